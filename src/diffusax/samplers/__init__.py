"""Samplers as tables: coefficients on the host, one generic step in the compiled program."""

from diffusax.samplers.names import (
    SAMPLER_NAMES,
    SCHEDULERS,
    scheduler_from_config,
    scheduler_from_name,
)
from diffusax.samplers.rows import Row, Schedule, Table
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
from diffusax.samplers.step import init_state, run

__all__ = [
    "SAMPLER_NAMES",
    "SCHEDULERS",
    "DDIMScheduler",
    "DDPMScheduler",
    "DPMSolverMultistepScheduler",
    "DPMSolverSinglestepScheduler",
    "EulerAncestralDiscreteScheduler",
    "EulerDiscreteScheduler",
    "HeunDiscreteScheduler",
    "KDPM2AncestralDiscreteScheduler",
    "KDPM2DiscreteScheduler",
    "LCMScheduler",
    "LMSDiscreteScheduler",
    "PNDMScheduler",
    "Row",
    "Schedule",
    "Scheduler",
    "TCDScheduler",
    "Table",
    "UniPCMultistepScheduler",
    "init_state",
    "run",
    "scheduler_from_config",
    "scheduler_from_name",
]
