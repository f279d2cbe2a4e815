"""The task of drawing images from noise alone."""

import numpy as np

from diffusax.pipelines import guidance, programs
from diffusax.pipelines.arguments import Call
from diffusax.pipelines.components import Components
from diffusax.pipelines.plan import Conditions, Plan, PreparedRun, StepInputs
from diffusax.pipelines.schedules import make_schedule
from diffusax.runtime.random.noise import noise_source


def unconditional(c: Components, call: Call) -> PreparedRun:
    """Prepares a run that generates images from noise alone (Ho et al. 2020, algorithm 2).

    Raises:
        ValueError: the call has adapters, or its steps or seeds cannot be.
    """
    if call.adapters is not None:
        raise ValueError(
            f"adapters must be left out with {c.family.name}, whose calls take none; call "
            "fuse_lora, which merges them into the parameters, or disable_lora"
        )
    size = c.default_size
    schedule = make_schedule(c, call, size)
    noise = noise_source(call.noise, call.seed, call.batch_size, call.generators)
    start = noise.draw("start", c.latents.shape(*size))
    x = programs.begin(start, np.float32(schedule.init_noise_sigma), None, None)
    table = programs.device_table(schedule)
    height = len(table.timestep)
    inputs = StepInputs(guidance.per_row((), len(schedule), height), np.zeros(height, np.float32))
    plan = Plan(x, Conditions(None), table, inputs, noise.keys)
    return PreparedRun(plan, schedule, noise, (), c.decoding())
