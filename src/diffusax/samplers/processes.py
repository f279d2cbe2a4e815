"""The processes that networks are trained for: a sampler suits the networks of one process only.

A sampler of flow matching would give other times to a network that predicts noise, and take the
noise for a velocity. Nothing would fail, but the images would be noise.
"""

from typing import Any, Literal

Process = Literal["diffusion", "flow", "edm", "continuous"]
"""diffusion: the discrete noise levels of a list of betas. flow: flow matching. edm: the
preconditioning of Karras et al. 2022. continuous: v prediction at continuous noise levels, which is
that preconditioning with sigma_data=1."""

_TRAINED: dict[Process, str] = {
    "diffusion": "at discrete noise levels",
    "flow": "with flow matching",
    "edm": "with EDM's preconditioning",
    "continuous": "to predict v at continuous noise levels",
}
_FITTING: dict[Process, str] = {
    "diffusion": "EulerDiscreteScheduler ('euler')",
    "flow": "FlowMatchEulerDiscreteScheduler ('flow_euler'), or prediction_type='flow_prediction'",
    "edm": "EDMEulerScheduler ('edm_euler') with the checkpoint's sigma_data",
    "continuous": "EulerDiscreteScheduler ('euler') with timestep_type='continuous'",
}


def samples(process: Process) -> str:
    """Describes the networks of a process in words."""
    return f"networks trained {_TRAINED[process]}"


def check_process(name: str, scheduler: Any, trained: Process) -> None:
    """Raises an error where a sampler is for networks that were trained for another process.

    Args:
        name: the sampler's name in the error.
        scheduler: the sampler.
        trained: the networks' process, which is that of the sampler that the checkpoint names.

    Raises:
        ValueError: the sampler is for another process.
    """
    if scheduler.process != trained:
        raise ValueError(
            f"{name} is for {samples(scheduler.process)}, and the scheduler that this checkpoint "
            f"came with is for {samples(trained)}; use {_FITTING[trained]} or another for those, "
            "or give scheduler= where the pipeline is made if its networks were trained otherwise"
        )
