"""What samplers take the network to be trained for: networks of one kind draw nothing with another.

A sampler of flow matching tells a network that predicts noise other times, and takes its noise for
a velocity. Nothing fails: the pictures are noise.
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
    """The networks of a process, in words."""
    return f"networks trained {_TRAINED[process]}"


def check_process(name: str, scheduler: Any, trained: Process) -> None:
    """Refuses a sampler for networks that were trained for another process.

    Args:
        name: what the error calls the sampler.
        scheduler: the sampler.
        trained: the networks' process, which is that of the sampler that the checkpoint names.

    Raises:
        ValueError: the two are not the same.
    """
    if scheduler.process != trained:
        raise ValueError(
            f"{name} is for {samples(scheduler.process)}, and the scheduler that this checkpoint "
            f"came with is for {samples(trained)}; use {_FITTING[trained]} or another for those, "
            "or give scheduler= where the pipeline is made if its networks were trained otherwise"
        )
