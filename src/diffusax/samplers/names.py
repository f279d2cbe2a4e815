"""Finds samplers by name, for configs and the command line."""

import functools
from collections.abc import Mapping
from typing import Any

from diffusax.samplers.processes import check_process, samples

# Importing the classes enters them in SCHEDULERS.
from diffusax.samplers.schedulers import (  # noqa: F401
    alpha_schedulers,
    edm_schedulers,
    flow_schedulers,
    inverse_schedulers,
    sa_scheduler,
    sigma_schedulers,
    snr_schedulers,
)
from diffusax.samplers.schedulers.scheduler import SCHEDULERS, Scheduler
from diffusax.samplers.schedulers.spaced import SPACINGS, spaced, spaced_options

_SDE = {"algorithm_type": "sde-dpmsolver++"}
_NAMES: dict[str, tuple[str, dict[str, Any]]] = {
    "ddim": ("DDIMScheduler", {}),
    "deis": ("DEISMultistepScheduler", {}),
    "ddpm": ("DDPMScheduler", {}),
    "dpm": (
        "DPMSolverMultistepScheduler",
        {"algorithm_type": "dpmsolver", "final_sigmas_type": "sigma_min"},
    ),
    "dpm++2m": ("DPMSolverMultistepScheduler", {"algorithm_type": "dpmsolver++"}),
    "dpm++3m": ("DPMSolverMultistepScheduler", {"solver_order": 3}),
    "dpm++2m_sde": ("DPMSolverMultistepScheduler", _SDE),
    "dpm++3m_sde": ("DPMSolverMultistepScheduler", {**_SDE, "solver_order": 3}),
    "dpm++2s": ("DPMSolverSinglestepScheduler", {"algorithm_type": "dpmsolver++"}),
    "dpm++_sde": ("DPMSolverSDEScheduler", {}),
    "edm_dpm++2m": ("EDMDPMSolverMultistepScheduler", {}),
    "edm_euler": ("EDMEulerScheduler", {}),
    "euler": ("EulerDiscreteScheduler", {}),
    "euler_a": ("EulerAncestralDiscreteScheduler", {}),
    "flow_euler": ("FlowMatchEulerDiscreteScheduler", {}),
    "flow_heun": ("FlowMatchHeunDiscreteScheduler", {}),
    "flow_lcm": ("FlowMatchLCMScheduler", {}),
    "heun": ("HeunDiscreteScheduler", {}),
    "kdpm2": ("KDPM2DiscreteScheduler", {}),
    "kdpm2_a": ("KDPM2AncestralDiscreteScheduler", {}),
    "lcm": ("LCMScheduler", {}),
    "lms": ("LMSDiscreteScheduler", {}),
    "pndm": ("PNDMScheduler", {"skip_prk_steps": True}),
    "sa_solver": ("SASolverScheduler", {}),
    "tcd": ("TCDScheduler", {}),
    "unipc": ("UniPCMultistepScheduler", {}),
}
_KARRAS = {
    f"{name}_karras": (cls, {**options, "use_karras_sigmas": True})
    for name, (cls, options) in _NAMES.items()
    if "use_karras_sigmas" in SCHEDULERS[cls].__dataclass_fields__
}
_NAMES |= _KARRAS
SAMPLER_NAMES = tuple(sorted(_NAMES))
SAMPLER_CLASSES = {name: cls for name, (cls, _) in _NAMES.items()}
"""The class of each sampler."""
_SPACED: dict[str, tuple[type[Any], dict[str, Any]]] = {
    f"{name}_{spacing}": (cls, {**options, **spaced_options(cls)})
    for name, (class_name, options) in _NAMES.items()
    for spacing in SPACINGS
    if name not in _KARRAS
    if f"{name}_{spacing}" not in _NAMES
    if (cls := spaced(SCHEDULERS[class_name], spacing)) is not None
}
SPACED_NAMES = tuple(sorted(_SPACED))
"""Samplers at k-diffusion's noise levels that diffusers lacks. Lists of samplers leave them out."""


def scheduler_from_name(
    name: str, config: Mapping[str, Any] | Scheduler | None = None
) -> Scheduler:
    """Makes a sampler from a short name ("dpm++2m_karras") or a diffusers class name.

    Args:
        name: one of SAMPLER_NAMES, SPACED_NAMES or SCHEDULERS.
        config: the scheduler whose noise schedule and prediction type to keep.

    Raises:
        ValueError: the name is unknown, or the sampler is for networks that were trained for
            another process than those of `config`.
    """
    scheduler, own = _named(name, config), config
    if isinstance(config, Mapping):
        own = scheduler_from_config(config) if config.get("_class_name") in SCHEDULERS else None
    if isinstance(own, Scheduler):
        check_process(f"sampler {name!r}", scheduler, own.process)
    return scheduler


def fitting_samplers(config: Scheduler) -> tuple[list[str], dict[str, list[str]]]:
    """Returns the SAMPLER_NAMES that suit a scheduler's networks, and the other names by reason."""
    found: list[str] = []
    others: dict[str, list[str]] = {}
    for name in SAMPLER_NAMES:
        try:
            scheduler = _named(name, config)
        except ValueError as error:
            others.setdefault(str(error), []).append(name)
            continue
        fits = scheduler.process == config.process
        names = found if fits else others.setdefault(f"for {samples(scheduler.process)}", [])
        names.append(name)
    return found, others


@functools.lru_cache(256)
def sampler_name(scheduler: Scheduler) -> str:
    """Returns the name of SAMPLER_NAMES that gives this scheduler with its options, or its class's.

    `scheduler_from_name` of the name and the scheduler returns the same one. Of several such names
    it is the one that says most: Karras' levels are named, though the config has them anyway. At
    other levels it is one of SPACED_NAMES.
    """
    spacing = [name for name, (cls, _) in _SPACED.items() if cls is type(scheduler)]
    fitting = spacing or fitting_samplers(scheduler)[0]
    options = {n: _SPACED.get(n) or _NAMES[n] for n in fitting if _named(n, scheduler) == scheduler}
    return max(options, key=lambda name: len(options[name][1]), default=scheduler.class_name)


def _named(name: str, config: Mapping[str, Any] | Scheduler | None) -> Scheduler:
    options: dict[str, Any] = {}
    cls: type[Any]
    if name in SCHEDULERS:
        cls = SCHEDULERS[name]
    elif name in _SPACED:
        cls, options = _SPACED[name]
    elif name in _NAMES:
        cls, options = SCHEDULERS[_NAMES[name][0]], _NAMES[name][1]
    else:
        raise ValueError(f"unknown sampler {name!r}; use one of {', '.join(SAMPLER_NAMES)}")
    found: Scheduler = cls.from_config(config if config is not None else {}, **options)
    return found


def scheduler_from_config(config: Mapping[str, Any], **overrides: Any) -> Scheduler:
    """Makes the sampler that a scheduler_config.json describes.

    Raises:
        ValueError: its class, an option or an option's value is not supported.
    """
    name = config.get("_class_name")
    if not isinstance(name, str) or name not in SCHEDULERS:
        raise ValueError(
            f"scheduler {name!r} is not supported; diffusax has {', '.join(SCHEDULERS)}"
        )
    return SCHEDULERS[name].from_config(config, **overrides)
