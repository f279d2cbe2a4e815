"""Which steps of a sampler run over an image, by the rules of diffusers and A1111."""

from typing import Any

from diffusax.pipelines.tasks.tasks import consistency_image_to_image
from diffusax.samplers import Scheduler
from diffusax.serving.requests.errors import Refused
from diffusax.serving.requests.generation import IMAGE, INPAINT, Generation
from diffusax.text.lora_tags import read_tags
from diffusax.text.prompt_schedules import with_whole_steps

_LESS_THAN_ALL = 0.999
"""A1111's largest strength, for which its last step is left."""


def count_steps(generation: Generation) -> int:
    """Estimates how many steps a completed request runs, at least 1."""
    steps, strength = generation.num_inference_steps or 1, generation.strength
    if strength is None or generation.strength_rule == "exact":
        return steps
    return max(int(steps * strength), 1)


def check_strength(pipeline_class: Any, generation: Generation) -> None:
    """Raises Refused where diffusers' rule leaves no step of a completed request."""
    steps, strength = generation.num_inference_steps, generation.strength
    if not _begins_late(pipeline_class, generation) or generation.strength_rule != "diffusers":
        return
    first_step = pipeline_class.family.start.first_step
    if steps and strength is not None and first_step(steps, strength) >= steps:
        raise Refused(
            f"strength leaves none of num_inference_steps={steps} (got {strength:g}); use a "
            f"strength of at least {1 / steps:.3g}, or more steps",
            param="strength",
        )


def step_arguments(
    pipeline_class: Any, generation: Generation, scheduler: Scheduler
) -> dict[str, Any]:
    """Returns the arguments of a pipeline's call that run a request's steps.

    These are the number of steps and the strength, and for a schedule that is longer than the run
    prompts whose changes are counted in its steps. Where a strength would need a schedule of more
    steps than the network was trained for, fewer steps than all are run.

    Source: stable-diffusion-webui, modules/sd_samplers_common.py, setup_img2img_steps.

    Args:
        pipeline_class: the class of the pipeline.
        generation: the completed request.
        scheduler: its sampler.
    """
    steps, strength = generation.num_inference_steps, generation.strength
    most = scheduler.num_train_timesteps
    plain: dict[str, Any] = {"num_inference_steps": steps, "strength": strength}
    rule = generation.strength_rule
    if rule == "diffusers" or not steps or strength is None:
        return plain
    if not _begins_late(pipeline_class, generation):
        return plain
    part = min(strength, _LESS_THAN_ALL)
    if rule == "webui":
        whole, last = steps, int(part * steps) + 1
    elif steps <= part * most:
        whole, last = int(steps / part), steps
    else:
        whole, last = most, min(max(int(part * most), 1), steps)
    # Half a step away from where a part of a step would count as one more or less.
    halves, first_step = (last - 0.5, last + 0.5), pipeline_class.family.start.first_step
    strengths = [min(half / whole, 1.0) for half in halves]
    (kept,) = [s for s in strengths if whole - first_step(whole, s) == last][:1]
    own = {"num_inference_steps": whole, "strength": kept}
    return own if rule == "webui" else {**own, **_prompts(generation, steps * scheduler.order)}


def _prompts(generation: Generation, steps: int) -> dict[str, str]:
    """Returns the prompts with their changes counted in steps."""
    texts = {
        "prompt": read_tags(generation.prompt)[0],
        "negative_prompt": generation.negative_prompt,
    }
    return {name: with_whole_steps(text, steps) for name, text in texts.items() if text}


def _begins_late(pipeline_class: Any, generation: Generation) -> bool:
    """Returns whether the run leaves out the first steps of its sampler."""
    return generation.task in (IMAGE, INPAINT) and (
        pipeline_class.task is not consistency_image_to_image
    )
