"""Samplers as tables: coefficients from the host, and one generic step in the compiled program."""

from diffusax.samplers.distribution import StepDistribution, step_distribution
from diffusax.samplers.names import (
    SAMPLER_CLASSES,
    SAMPLER_NAMES,
    SPACED_NAMES,
    fitting_samplers,
    sampler_name,
    scheduler_from_config,
    scheduler_from_name,
)
from diffusax.samplers.rows import M1 as M1
from diffusax.samplers.rows import P as P
from diffusax.samplers.rows import Row, Schedule, Table, stack_tables
from diffusax.samplers.rows import X as X
from diffusax.samplers.schedulers import (
    alpha_schedulers,
    edm_schedulers,
    flow_schedulers,
    inverse_schedulers,
    sa_scheduler,
    sigma_schedulers,
    snr_schedulers,
)
from diffusax.samplers.schedulers.alpha_schedulers import *  # noqa: F403
from diffusax.samplers.schedulers.edm_schedulers import *  # noqa: F403
from diffusax.samplers.schedulers.flow_schedulers import *  # noqa: F403
from diffusax.samplers.schedulers.function_scheduler import Steps, scheduler_from_function
from diffusax.samplers.schedulers.inverse_schedulers import *  # noqa: F403
from diffusax.samplers.schedulers.sa_scheduler import *  # noqa: F403
from diffusax.samplers.schedulers.scheduler import SCHEDULERS, Scheduler
from diffusax.samplers.schedulers.sigma_schedulers import *  # noqa: F403
from diffusax.samplers.schedulers.snr_schedulers import *  # noqa: F403
from diffusax.samplers.step import init_state, run, step

__all__ = [
    "SAMPLER_CLASSES",
    "SAMPLER_NAMES",
    "SCHEDULERS",
    "SPACED_NAMES",
    "Row",
    "Schedule",
    "Scheduler",
    "StepDistribution",
    "Steps",
    "Table",
    "fitting_samplers",
    "init_state",
    "run",
    "sampler_name",
    "scheduler_from_config",
    "scheduler_from_function",
    "scheduler_from_name",
    "stack_tables",
    "step",
    "step_distribution",
]
__all__ += alpha_schedulers.__all__
__all__ += edm_schedulers.__all__
__all__ += flow_schedulers.__all__
__all__ += inverse_schedulers.__all__
__all__ += sa_scheduler.__all__
__all__ += sigma_schedulers.__all__
__all__ += snr_schedulers.__all__
