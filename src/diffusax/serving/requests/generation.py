"""What a client asks for: settings that all interfaces share, and the steps that they mean."""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec import Meta

from diffusax.boundary.convert import Words, convert_fields, field_types, in_words, shortened
from diffusax.pipelines.tasks.tasks import consistency_image_to_image
from diffusax.samplers import Scheduler
from diffusax.serving.requests.errors import Refused
from diffusax.text.lora_tags import read_tags
from diffusax.text.prompt_schedules import with_whole_steps

TEXT, IMAGE, INPAINT, EDIT = "text-to-image", "image-to-image", "inpainting", "edit"
TASKS = TEXT, IMAGE, INPAINT, EDIT
"""What a client can ask for."""

# The types that fields of several interfaces share.
Text = Annotated[str, Meta(max_length=1_000_000)]
Name = Annotated[str, Meta(max_length=300)]
Pixels = Annotated[int, Meta(ge=8, le=16_384)]
Scale = Annotated[float, Meta(ge=-100, le=100)]
Share = Annotated[float, Meta(ge=0, le=1)]
Prompt = Annotated[Text, Meta(description="The prompt; <lora:name:0.8> in it names a LoRA.")]
Weights = dict[str, Scale]
SEEDS = 2**64
"""The number of seeds; after the last one comes 0."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ControlSettings:
    """How a ControlNet steers, without its image."""

    model: Annotated[Name, Meta(description="The name of a ControlNet of the catalogue.")]
    scale: Annotated[Scale, Meta(description="The weight of the ControlNet.")] = 1.0
    start: Annotated[
        Share, Meta(description="The fraction of the steps after which the ControlNet applies.")
    ] = 0.0
    end: Annotated[
        Share, Meta(description="The fraction of the steps after which the ControlNet stops.")
    ] = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Control(ControlSettings):
    """A ControlNet that steers, with its image."""

    image: Any
    """What it sees, a PIL image: edges, depth, a pose."""


# Interfaces of others name size and number of images in their own way, and take the rest from here.
@dataclasses.dataclass(frozen=True, kw_only=True)
class TextSettings:
    """The settings of every request but size and number of images. None takes the model's value."""

    prompt: Prompt = ""
    negative_prompt: Annotated[Text, Meta(description="The text to steer away from.")] = ""
    model: Annotated[Name, Meta(description="A model's name; the default model for none.")] = ""
    num_inference_steps: (
        Annotated[int, Meta(ge=1, le=1000, description="The sampler's steps.")] | None
    ) = None
    guidance_scale: (
        Annotated[
            Scale,
            Meta(
                description="The scale of classifier-free guidance; off at 1 and less (Z-Image: at "
                "0)."
            ),
        ]
        | None
    ) = None
    guidance_rescale: Annotated[
        Share, Meta(description="How much guidance is rescaled (Lin et al. 2024).")
    ] = 0.0
    sampler: (
        Annotated[Name, Meta(description="A sampler's name; the model's own for none.")] | None
    ) = None
    eta: Annotated[
        Share, Meta(description="The noise in the steps of the samplers ddim and tcd, from 0 to 1.")
    ] = 0.0
    seed: (
        Annotated[
            int,
            Meta(ge=0, description="Of 64 bits. Image i has the seed plus i; random for none."),
        ]
        | None
    ) = None
    adapters: Annotated[Weights, Meta(description="The weights of LoRAs by name.")] = (
        dataclasses.field(default_factory=dict)
    )
    clip_skip: (
        Annotated[
            int,
            Meta(ge=0, le=100, description="The number of the text encoder's last layers to skip."),
        ]
        | None
    ) = None
    prompt_weighting: Annotated[bool, Meta(description="Whether (word:1.3) is a weight.")] = True
    long_prompt: Annotated[bool, Meta(description="Whether all of a long prompt is read.")] = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageSettings:
    """The settings of requests that start from an image."""

    image_guidance_scale: (
        Annotated[Scale, Meta(description="How closely an edit keeps to its image.")] | None
    ) = None
    strength: Annotated[Share, Meta(description="How much to change the image.")] | None = None
    strength_rule: Annotated[
        Literal["diffusers", "webui", "exact"],
        Meta(
            description="Which steps a strength leaves: diffusers' part of them; A1111's, which "
            "has one more and never none; or all, of a schedule that is longer by as much."
        ),
    ] = "diffusers"
    mask_blur: Annotated[
        float, Meta(ge=0, le=1024, description="The pixels by which the mask's edge is softened.")
    ] = 0.0
    padding_mask_crop: (
        Annotated[
            int,
            Meta(
                ge=0,
                le=4096,
                description="Generates only the masked part, with so many pixels around it.",
            ),
        ]
        | None
    ) = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(ImageSettings, TextSettings):
    """The settings of a request, without its images. None takes the model's own value."""

    width: Pixels | None = None
    height: Pixels | None = None
    num_images: Annotated[int, Meta(ge=1, le=1000, description="The number of images.")] = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generation(Settings):
    """Images to generate. Image i has the seed plus i, and can be generated again by itself."""

    image: Any = None
    """A PIL image to start from, or to edit where the model is InstructPix2Pix's."""
    more_images: tuple[Any, ...] = ()
    """Further PIL images that the model looks at, where its family looks at several."""
    mask_image: Any = None
    """A PIL image, white where to generate anew."""
    controls: tuple[Control, ...] = ()
    """The ControlNets that steer, with their images."""

    @property
    def task(self) -> str:
        """The task: one of TASKS.

        An edit starts from an image and has an image guidance scale, which the catalogue fills in
        for models that edit.
        """
        if self.image is None:
            return TEXT
        if self.mask_image is not None:
            return INPAINT
        return IMAGE if self.image_guidance_scale is None else EDIT


FIELDS: Mapping[str, Any] = field_types(Settings)
"""The types of the fields that are no images, by name."""
CONTROL_FIELDS: Mapping[str, Any] = field_types(ControlSettings)
"""Those of a ControlNet."""
_NAMES = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    Weights: "weights by name",
    type(None): "nothing",
}
_WORDS = Words("{where}{name} must be {must} (got {value})", (in_words(_NAMES),), shortened)


def settings_of(generation: Generation) -> dict[str, Any]:
    """Returns the fields of a request without its images."""
    found = {name: getattr(generation, name) for name in FIELDS}
    controls = [
        {name: getattr(control, name) for name in CONTROL_FIELDS} for control in generation.controls
    ]
    return {**found, "adapters": dict(generation.adapters), "controls": controls}


def typed(generation: Generation) -> Generation:
    """Converts the fields of a request to their types.

    Raises:
        Refused: one has another type or is out of its range; names it, its value and what is valid.
    """
    fields = _converted(FIELDS, generation, "", None)
    check_seed(fields["seed"])
    controls = tuple(
        dataclasses.replace(
            control, **_converted(CONTROL_FIELDS, control, "controls: ", "controls")
        )
        for control in generation.controls
    )
    return dataclasses.replace(generation, **fields, controls=controls)


def check_seed(seed: int | None) -> None:
    """Raises Refused for a seed of more than 64 bits, a bound that msgspec cannot express."""
    if seed is not None and seed >= SEEDS:
        raise Refused(
            f"seed must be a whole number up to {SEEDS - 1} (got {shortened(seed)})", param="seed"
        )


def _converted(
    hints: Mapping[str, Any], given: Any, where: str, param: str | None
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in hints:
        value = getattr(given, name)
        values = {name: dict(value) if isinstance(value, Mapping) else value}
        try:
            found |= convert_fields(hints, values, _WORDS, where=where)
        except ValueError as error:
            raise Refused(str(error), param=param or name) from None
    return found


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
