"""Chooses the rows of the sampler that a call runs."""

from typing import Any

from diffusax.pipelines.components.components import Components
from diffusax.pipelines.plan.arguments import Call
from diffusax.samplers import Schedule
from diffusax.samplers.processes import check_process
from diffusax.samplers.runs import cached_schedule


def make_schedule(
    c: Components,
    call: Call,
    size: tuple[int, int],
    *,
    from_image: bool = False,
    strength: float = 1.0,
) -> Schedule:
    """Returns the rows of a call's run, cut by strength, denoising_start and denoising_end.

    Args:
        c: the components.
        call: the call.
        size: height and width of the image in pixels, on which some families' noise levels depend.
        from_image: whether the run starts from an image, and so at the row that the strength gives.
        strength: the scheduler's own strength, which consistency models use.

    Raises:
        ValueError: no rows are left, or the sampler is for networks of another kind.
    """
    c.require(c.family.scheduler_name)
    # CosXL is trained as EDM is, and its checkpoints may come with any scheduler.
    if c.process is not None and not c.options.get("is_cosxl_edit"):
        check_process(f"scheduler={c.scheduler.class_name}", c.scheduler, c.process)
    custom = call.timesteps is not None or call.sigmas is not None
    options: dict[str, Any] = {
        "steps": None if custom else call.num_inference_steps,
        "timesteps": None if call.timesteps is None else tuple(call.timesteps),
        "sigmas": None if call.sigmas is None else tuple(call.sigmas),
        "eta": call.eta or 0.0,
        "original_inference_steps": call.original_inference_steps,
        "strength": strength,
        "use_clipped_model_output": bool(call.use_clipped_model_output),
    }
    options |= c.family.schedule_options(c, call, size)
    last = call.denoising_end or 0.0
    if not from_image and not 0 < last < 1:
        return cached_schedule(c.scheduler, **options)
    whole = cached_schedule(c.scheduler, uncut=True, **options)
    begin, end = begin_row(c, call, whole) if from_image else 0, len(whole)
    if 0 < last < 1:
        cutoff = _cutoff(c, last)
        end = begin + int((whole.timesteps[begin:] >= cutoff).sum())
    if begin >= end:
        raise ValueError(_nothing_left(call, from_image=from_image))
    if (begin, end) == (0, len(whole)):
        return cached_schedule(c.scheduler, **options)
    return cached_schedule(c.scheduler, begin=begin, end=end, **options)


def begin_row(c: Components, call: Call, whole: Schedule) -> int:
    """Returns the row at which a run that starts from an image begins.

    Upstream: get_timesteps of diffusers' image-to-image pipelines.
    """
    start = call.denoising_start
    if start is not None and 0 < start < 1:
        left = int((whole.timesteps < _cutoff(c, start)).sum())
        # A step of two rows is not cut in the middle.
        left += whole.order == 2 and left % 2 == 0
        return len(whole) - left
    given = call.timesteps or call.sigmas
    steps = (call.num_inference_steps if given is None else len(given)) or 0
    return c.family.start.first_step(steps, call.strength) * whole.order


def _nothing_left(call: Call, *, from_image: bool) -> str:
    """Says which of the call's arguments leave no step, naming those that it has."""
    given: dict[str, Any] = {"num_inference_steps": call.num_inference_steps}
    given |= {name: getattr(call, name) for name in ("timesteps", "sigmas")}
    starts = call.denoising_start is not None and 0 < call.denoising_start < 1
    if from_image and not starts:
        given["strength"] = call.strength
    given |= {name: getattr(call, name) for name in ("denoising_start", "denoising_end")}
    if call.timesteps or call.sigmas:
        given.pop("num_inference_steps")
    steps, *parts = (f"{name}={value}" for name, value in given.items() if value is not None)
    return (
        f"nothing is left of {steps} with {' and '.join(parts)}; take more steps or a larger part "
        "of them"
    )


def _cutoff(c: Components, fraction: float) -> int:
    total = c.scheduler.num_train_timesteps
    return round(total - fraction * total)
