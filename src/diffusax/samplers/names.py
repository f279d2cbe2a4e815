"""Samplers by name, for configs and the command line."""

from typing import Any

from diffusax.samplers.schedulers import (
    DDIMScheduler,
    DDPMScheduler,
    LCMScheduler,
    PNDMScheduler,
    Scheduler,
    TCDScheduler,
)
from diffusax.samplers.sigma_schedulers import (
    DPMSolverMultistepScheduler,
    DPMSolverSinglestepScheduler,
    EulerAncestralDiscreteScheduler,
    EulerDiscreteScheduler,
    HeunDiscreteScheduler,
    KDPM2AncestralDiscreteScheduler,
    KDPM2DiscreteScheduler,
    LMSDiscreteScheduler,
    UniPCMultistepScheduler,
)

SCHEDULERS: dict[str, type[Scheduler]] = {
    cls.class_name: cls
    for cls in (
        DDIMScheduler,
        DDPMScheduler,
        DPMSolverMultistepScheduler,
        DPMSolverSinglestepScheduler,
        EulerAncestralDiscreteScheduler,
        EulerDiscreteScheduler,
        HeunDiscreteScheduler,
        KDPM2AncestralDiscreteScheduler,
        KDPM2DiscreteScheduler,
        LCMScheduler,
        LMSDiscreteScheduler,
        PNDMScheduler,
        TCDScheduler,
        UniPCMultistepScheduler,
    )
}

_SDE = {"algorithm_type": "sde-dpmsolver++"}
_NAMES: dict[str, tuple[type[Scheduler], dict[str, Any]]] = {
    "ddim": (DDIMScheduler, {}),
    "ddpm": (DDPMScheduler, {}),
    "dpm": (
        DPMSolverMultistepScheduler,
        {"algorithm_type": "dpmsolver", "final_sigmas_type": "sigma_min"},
    ),
    "dpm++2m": (DPMSolverMultistepScheduler, {"algorithm_type": "dpmsolver++"}),
    "dpm++3m": (DPMSolverMultistepScheduler, {"solver_order": 3}),
    "dpm++2m_sde": (DPMSolverMultistepScheduler, _SDE),
    "dpm++3m_sde": (DPMSolverMultistepScheduler, {**_SDE, "solver_order": 3}),
    "dpm++2s": (DPMSolverSinglestepScheduler, {"algorithm_type": "dpmsolver++"}),
    "euler": (EulerDiscreteScheduler, {}),
    "euler_a": (EulerAncestralDiscreteScheduler, {}),
    "heun": (HeunDiscreteScheduler, {}),
    "kdpm2": (KDPM2DiscreteScheduler, {}),
    "kdpm2_a": (KDPM2AncestralDiscreteScheduler, {}),
    "lcm": (LCMScheduler, {}),
    "lms": (LMSDiscreteScheduler, {}),
    "pndm": (PNDMScheduler, {"skip_prk_steps": True}),
    "tcd": (TCDScheduler, {}),
    "unipc": (UniPCMultistepScheduler, {}),
}
_NAMES |= {
    f"{name}_karras": (cls, {**options, "use_karras_sigmas": True})
    for name, (cls, options) in _NAMES.items()
    if "use_karras_sigmas" in cls.__dataclass_fields__
}
SAMPLER_NAMES = tuple(sorted(_NAMES))


def scheduler_from_name(name: str, config: dict[str, Any] | Scheduler | None = None) -> Scheduler:
    """A sampler by short name ("dpm++2m_karras") or diffusers class name, on a noise schedule.

    Args:
        name: one of SAMPLER_NAMES or SCHEDULERS.
        config: the scheduler whose noise schedule and prediction type to keep.

    Raises:
        ValueError: an unknown name.
    """
    options: dict[str, Any] = {}
    if name in SCHEDULERS:
        cls = SCHEDULERS[name]
    elif name in _NAMES:
        cls, options = _NAMES[name]
    else:
        raise ValueError(f"unknown sampler {name!r}; use one of {', '.join(SAMPLER_NAMES)}")
    return cls.from_config(config if config is not None else {}, **options)


def scheduler_from_config(config: dict[str, Any], **overrides: Any) -> Scheduler:
    """The sampler that a scheduler_config.json describes.

    Raises:
        ValueError: its class, an option or an option's value is not supported.
    """
    name = config.get("_class_name")
    if name not in SCHEDULERS:
        raise ValueError(
            f"scheduler {name!r} is not supported; diffusax has {', '.join(SCHEDULERS)}"
        )
    return SCHEDULERS[name].from_config(config, **overrides)
