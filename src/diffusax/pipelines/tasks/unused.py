"""Warns of arguments of a call that change nothing.

diffusers is silent about them. Here each is a warning of the logger `diffusax`; where an argument
can only be a mistake, its own check raises an error instead.
"""

import logging
from collections.abc import Iterator, Sequence
from typing import Any

from diffusax.pipelines.components.components import Components
from diffusax.pipelines.plan.arguments import Call
from diffusax.pipelines.plan.plan import PreparedRun
from diffusax.pipelines.tasks.tasks import Task, image_to_image, instruct, text_to_image

log = logging.getLogger(__name__)

Reason = tuple[Sequence[str], str]
"""The names of arguments, and why they change nothing."""

_OF_GUIDANCE = (
    *("negative_prompt", "negative_prompt_2", "negative_prompt_3"),
    *("negative_prompt_embeds", "negative_pooled_prompt_embeds", "guidance_rescale"),
    "negative_prompt_embeds_mask",
    *("guidance_start", "guidance_end", "cfg_normalization", "cfg_truncation"),
    *("negative_original_size", "negative_crops_coords_top_left", "negative_target_size"),
    *("negative_aesthetic_score", "image_guidance_scale", "guide"),
)
_OF_TEXTS = (
    *("clip_skip", "max_sequence_length", "long_prompt", "prompt_weighting"),
    "text_encoder_out_layers",
)
_ATTENTION = ("cross_attention_kwargs", "joint_attention_kwargs", "attention_kwargs")
_SECOND = ("prompt_2", "negative_prompt_2")

ALWAYS_USED = frozenset(
    {
        *("prompt", "height", "width", "num_inference_steps", "num_images_per_prompt"),
        *("seed", "generator", "noise", "output_type", "return_dict", "callback_on_step_end"),
    }
)
"""The arguments that change every call in which no others are given."""


def warn_unused(task: Task, c: Components, call: Call, run: PreparedRun) -> None:
    """Warns of the arguments of a call that its run does not use."""
    for line in unused(task, c, call, run):
        log.warning("%s", line)


def unused(task: Task, c: Components, call: Call, run: PreparedRun) -> list[str]:
    """Returns a sentence for each reason why arguments that were given change nothing."""
    lines = []
    for names, reason in _reasons(task, c, call, run):
        found = [name for name in names if name in call.given]
        if found:
            verb = "change" if len(found) > 1 else "changes"
            lines.append(f"{' and '.join(found)} {verb} nothing in this call: {reason}")
    return lines


def _reasons(task: Task, c: Components, call: Call, run: PreparedRun) -> Iterator[Reason]:
    yield from _of_guidance(task, c, call, run)
    yield from _of_texts(c, call, run)
    yield from _of_sampling(task, c, call, run)
    yield from _of_images(task, c, call, run)
    if call.callback_on_step_end is None:
        names = ("callback_on_step_end_tensor_inputs", "callback_steps")
        yield names, "there is no callback"


def _of_guidance(task: Task, c: Components, call: Call, run: PreparedRun) -> Iterator[Reason]:
    if run.weights:
        rows = len(run.schedule)
        whole = f"at {rows} evaluations of the network it leaves out none"
        if round(call.guidance_start * rows) == 0:
            yield ("guidance_start",), whole
        if round(call.guidance_end * rows) >= rows:
            yield ("guidance_end",), whole
        return
    off = guidance_off(c, call, instructs=task is instruct)
    yield [name for name in _OF_GUIDANCE if _says_something(getattr(call, name))], off
    own = c.family.guidance
    if own.branches(c) > 1 and (getattr(call, own.argument) or 0) > 1:
        yield (own.argument,), off
    if not c.denoiser.embeds_guidance:
        yield own.told(c), "this network was distilled and is told no guidance scale"


def guidance_off(c: Components, call: Call, *, instructs: bool = False) -> str:
    """Returns why a call is not guided.

    instructs: whether it edits images as the prompt says, with two scales.
    """
    if instructs:
        return "guidance needs guidance_scale above 1 and image_guidance_scale of at least 1"
    return c.family.guidance.why_off(c, call)


def _of_texts(c: Components, call: Call, run: PreparedRun) -> Iterator[Reason]:
    embedded = call.prompt is None and call.prompt_embeds is not None
    if embedded and (not run.weights or call.negative_prompt_embeds is not None):
        yield _OF_TEXTS, "the embeddings of all prompts are given"
    encoders = c.family.text_encoders
    if len(encoders) > 1 and sum(encoder.name in c.networks for encoder in encoders) == 1:
        yield _SECOND, "this checkpoint has one text encoder, which reads prompt"
    if call.lora_scale != 1 and not call.adapters:
        yield _ATTENTION, "'scale' multiplies the weights of LoRAs, and none is active"
    if c.options.get("force_zeros_for_empty_prompt") and call.negative_prompt is None:
        yield ("negative_prompt_2",), "without negative_prompt this checkpoint takes zeros for both"
    yield from c.family.unused(c, call, run)


def _of_sampling(task: Task, c: Components, call: Call, run: PreparedRun) -> Iterator[Reason]:
    if not c.scheduler.takes_eta:
        yield ("eta",), f"{c.scheduler.class_name} has no eta"
    custom = [name for name in ("timesteps", "sigmas") if getattr(call, name) is not None]
    if custom:
        yield ("num_inference_steps",), f"{' and '.join(custom)} say which steps there are"
    if call.denoising_start is not None and 0 < call.denoising_start < 1:
        yield ("strength",), "denoising_start says where the run begins"
    if task is text_to_image and call.latents is not None and not run.schedule.draws_noise.any():
        reason = f"latents are given, and {c.scheduler.class_name} draws no noise between steps"
        yield ("generator", "seed"), reason


def _of_images(task: Task, c: Components, call: Call, run: PreparedRun) -> Iterator[Reason]:
    if task is image_to_image and call.latents is not None:
        yield ("image",), "latents are given, and start the run in its place"
    elif task is image_to_image and run.schedule.levels[0, 0] == 0:
        yield ("image",), f"strength={call.strength:g} starts the run from noise alone"
    if run.plan.conditions.channels is None:
        yield ("masked_image_latents",), "this network reads no masked image"
    if call.image is None:
        yield ("_auto_resize",), "there is no image"


def _says_something(value: Any) -> bool:
    """Returns whether a prompt, or anything else, is not empty."""
    if isinstance(value, list):
        return any(map(_says_something, value))
    return not (value is None or (isinstance(value, str) and not value))
