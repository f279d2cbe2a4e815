"""The call of every pipeline, from its arguments to its images: read `generate`."""

import functools
import inspect
from operator import attrgetter
from typing import Any

from diffusax.pipelines.components.adapters import resolve_adapters
from diffusax.pipelines.components.components import Components
from diffusax.pipelines.pipeline.diffusers_methods import LAST_CALL
from diffusax.pipelines.plan.arguments import Call, read_call, with_default_generator
from diffusax.pipelines.plan.descriptions import DESCRIPTIONS
from diffusax.pipelines.plan.plan import PreparedRun
from diffusax.pipelines.run.callbacks import row_callback
from diffusax.pipelines.run.images import decode_result
from diffusax.pipelines.run.sample import run_plan
from diffusax.pipelines.tasks.tasks import Task
from diffusax.pipelines.tasks.unused import ALWAYS_USED, warn_unused
from diffusax.runtime.switches import in_mesh, under_own_switches


def documented(call: Any) -> Any:
    """Makes a pipeline's `__call__` from a declaration of its arguments with a summary sentence.

    The call checks its arguments by `read_call` and passes them to `generate`. It also takes
    callback and callback_steps, which diffusers' calls take without declaring them.
    The descriptions of the arguments are added to the docstring.
    """
    names = [name for name in inspect.signature(call).parameters if name in DESCRIPTIONS]
    lines = [f"            {name}: {DESCRIPTIONS[name]}" for name in names]
    raises = [
        "            ValueError: an argument that cannot be; says which, and what can.",
        "            FloatingPointError: the latents or images are not finite.",
    ]
    sections = ["", "", "        Args:", *lines, "", "        Raises:", *raises, "        "]
    call.__doc__ += "\n".join(sections)

    @under_own_switches
    @functools.wraps(call)
    def called(self: Any, *args: Any, **given: Any) -> Any:
        return generate(self, read_call(self, args, given, declared=call))

    return called


def generate(pipe: Any, call: Call) -> Any:
    """Returns the result of a pipeline's call whose arguments are checked.

    The pipeline's task makes a plan of the call, the sampler runs it to latents, and these are
    decoded. A call with adapters may run with other components than the pipeline's.
    """
    check_complete(pipe, decodes=call.output_type != "latent")
    c = pipe.parts
    if call.tensors:
        call = with_default_generator(call)
    if call.adapters is not None or c.adapters.active:
        c, call = resolve_adapters(c, call)
    run = prepare_call(pipe.task, c, call)
    remember(pipe, call, run)
    on_row = None if call.callback_on_step_end is None else row_callback(pipe, call)
    sampled = run_plan(
        c, run, on_row, interrupted=lambda: pipe._interrupt, bar=pipe.progress_bar_options
    )
    result = decode_result(c, call, run, sampled, flags=pipe.returns_flags)
    if c.offload is not None:
        pipe.maybe_free_model_hooks()
    return result


def check_complete(pipe: Any, *, decodes: bool = True) -> None:
    """Raises ValueError where a pipeline lacks a component that a call needs."""
    for name, is_decoder in pipe.needed_components:
        if name not in pipe.parts.models and (decodes or not is_decoder):
            pipe.parts.require(name)
    if pipe.parts.scheduler is None:
        pipe.parts.require(pipe.family.scheduler_name)


def prepare_call(task: Task, c: Components, call: Call) -> PreparedRun:
    """Returns the run that a task makes of a call, and warns of arguments that it does not use."""
    with in_mesh(c.local_mesh):
        run = task(c, call)
    if not call.given <= ALWAYS_USED:
        warn_unused(task, c, call, run)
    return run


def remember(pipe: Any, call: Call, run: PreparedRun) -> None:
    """Keeps what properties under diffusers' names tell of the last call, to callbacks too."""
    vars(pipe).update(
        _interrupt=False,
        _guidance_scale=call.guidance_scale,
        _num_timesteps=len(run.schedule.rows),
        _last_call=dict(zip(LAST_CALL, attrgetter(*LAST_CALL)(call))),
    )
