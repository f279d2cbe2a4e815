"""What a client asks for: settings that all interfaces share, also as text in images' files.

The text has stable-diffusion-webui's form.
"""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec import Meta

from diffusax.boundary.convert import (
    Mismatch,
    Words,
    convert,
    field_types,
    in_words,
    shortened,
)
from diffusax.infotext import text as infotext
from diffusax.infotext.files import texts_of
from diffusax.infotext.others import webui_text
from diffusax.serving.requests.errors import Refused

TEXT, IMAGE, INPAINT, EDIT = "text-to-image", "image-to-image", "inpainting", "edit"
TASKS = TEXT, IMAGE, INPAINT, EDIT
"""What a client can ask for of models that generate images."""
TEXT_VIDEO, IMAGE_VIDEO, VIDEO_VIDEO = "text-to-video", "image-to-video", "video-to-video"
VIDEO_TASKS = TEXT_VIDEO, IMAGE_VIDEO, VIDEO_VIDEO
"""What a client can ask for of models that generate videos."""

# The types that fields of several interfaces share.
Text = Annotated[str, Meta(max_length=1_000_000)]
Name = Annotated[str, Meta(max_length=300)]
Pixels = Annotated[int, Meta(ge=8, le=16_384)]
Frames = Annotated[int, Meta(ge=1, le=100_000)]
FramesPerSecond = Annotated[int, Meta(ge=1, le=240)]
Scale = Annotated[float, Meta(ge=-100, le=100)]
LowNoiseScale = Annotated[
    Scale, Meta(description="The guidance_scale of the less noisy steps, of two transformers.")
]
Share = Annotated[float, Meta(ge=0, le=1)]
Prompt = Annotated[Text, Meta(description="The prompt; <lora:name:0.8> in it names a LoRA.")]
Weights = dict[str, Scale]
SEEDS = 2**64
"""The number of seeds; after the last one comes 0."""
_LONGEST, _LONGEST_OWN = 100_000, 1_000_000
"""The most characters of a text, and of one that diffusax wrote; a file may hold millions."""


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
    variation_seed: (
        Annotated[
            int,
            Meta(ge=0, description="Another seed, of which image i has the number plus i."),
        ]
        | None
    ) = None
    variation_strength: Annotated[
        Share,
        Meta(
            description="How far the first noise is turned towards that of the variation seed. "
            "Above 0, all images have the same seed."
        ),
    ] = 0.0
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
    masked_fill: Annotated[
        Literal["image", "noise", "nothing"],
        Meta(description="What latents begin with under the mask."),
    ] = "image"
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
    num_images: Annotated[
        int, Meta(ge=1, le=1000, description="The number of images, or of videos.")
    ] = 1
    num_frames: (
        Annotated[
            Frames,
            Meta(description="A video's frames: one more than a multiple of frames_multiple."),
        ]
        | None
    ) = None
    fps: Annotated[FramesPerSecond, Meta(description="A video's frames per second.")] | None = None
    guidance_scale_2: LowNoiseScale | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generation(Settings):
    """Images, or videos, to generate. Image i has the seed plus i, and can be generated by itself.

    With a variation strength image i has the seed itself, and the variation seed plus i.
    """

    image: Any = None
    """A PIL image to start from, or to edit where the model is InstructPix2Pix's."""
    more_images: tuple[Any, ...] = ()
    """Further PIL images that the model looks at, where its family looks at several."""
    mask_image: Any = None
    """A PIL image, white where to generate anew."""
    video: Any = None
    """A `diffusax.images.clips.Clip` to start from, or that controls, for models of videos."""
    mask_video: Any = None
    """A `Clip`, or a PIL image for all frames, white where to generate anew, for VACE's models."""
    last_image: Any = None
    """A PIL image that a video ends with, for models that were trained with one."""
    controls: tuple[Control, ...] = ()
    """The ControlNets that steer, with their images."""

    @property
    def task(self) -> str:
        """The task: one of TASKS or VIDEO_TASKS.

        An edit starts from an image and has an image guidance scale, which the catalogue fills in
        for models that edit. A video has a number of frames, which it fills in, too.
        """
        if self.video is not None:
            return VIDEO_VIDEO
        if self.num_frames is not None:
            return TEXT_VIDEO if self.image is None else IMAGE_VIDEO
        if self.image is None:
            return TEXT
        if self.mask_image is not None:
            return INPAINT
        return IMAGE if self.image_guidance_scale is None else EDIT

    def single(self, index: int) -> "Generation":
        """Returns what generates image `index` by itself."""
        seed, other = self.seed or 0, self.variation_seed
        if self.variation_strength:
            other = ((other or 0) + index) % SEEDS
        else:
            seed = (seed + index) % SEEDS
        return dataclasses.replace(self, seed=seed, variation_seed=other, num_images=1)


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
    check_seed(fields["variation_seed"], "variation_seed")
    controls = tuple(
        dataclasses.replace(
            control, **_converted(CONTROL_FIELDS, control, "controls: ", "controls")
        )
        for control in generation.controls
    )
    return dataclasses.replace(generation, **fields, controls=controls)


def check_seed(seed: int | None, name: str = "seed") -> None:
    """Raises Refused for a seed of more than 64 bits, a bound that msgspec cannot express."""
    if seed is not None and seed >= SEEDS:
        raise Refused(
            f"{name} must be a whole number up to {SEEDS - 1} (got {shortened(seed)})", param=name
        )


def _converted(
    hints: Mapping[str, Any], given: Any, where: str, param: str | None
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in hints:
        value = getattr(given, name)
        try:
            found[name] = convert(dict(value) if isinstance(value, Mapping) else value, hints[name])
        except Mismatch as wrong:
            raise Refused(_WORDS.tell(name, wrong, where=where), param=param or name) from None
    return found


def count_steps(generation: Generation) -> int:
    """Estimates how many steps a completed request runs, at least 1."""
    steps, strength = generation.num_inference_steps or 1, generation.strength
    if strength is None or generation.strength_rule == "exact":
        return steps
    return max(int(steps * strength), 1)


@dataclasses.dataclass(frozen=True)
class FileSettings:
    """What a file says of its image."""

    settings: dict[str, Any]
    """The fields of `Generation` that it states."""
    left_out: list[str]
    """What it states and the fields lack, such as "Variation seed: 5"."""
    text: str
    """The settings as webui writes them."""


def write_infotext(generation: Generation, seed: int, more: Mapping[str, Any] | None = None) -> str:
    """Returns the text `parameters` for the file of one image.

    Args:
        generation: what was generated, with its model's values, as `Catalogue.check` returns it.
        seed: the image's own seed.
        more: further settings by webui's names.
    """
    task = generation.task
    fields = {**settings_of(generation), "seed": seed}
    del fields["num_images"]
    if task in (TEXT, EDIT, TEXT_VIDEO, IMAGE_VIDEO):
        fields["strength"] = None
    if task != INPAINT:
        fields["mask_blur"] = None
    if not generation.variation_strength:
        fields["variation_seed"] = None
    return infotext.write(fields, more)


def read_text(text: str) -> FileSettings:
    """Reads a text `parameters`, of this server, of webui, or of a program with its form.

    LoRAs that webui's prompts name stay in the prompt. Lists as left out what has no field here,
    is out of its range or names an unknown sampler, and ControlNets, whose images the text lacks.

    Raises:
        Refused: the text is longer than any that diffusax writes.
    """
    own = f", {infotext.EXACT}: " in text[:_LONGEST_OWN]
    if len(text) > (_LONGEST_OWN if own else _LONGEST):
        raise Refused(
            f"image must have at most {_LONGEST} characters of settings (got {len(text)}); "
            "give them as fields",
            param="image",
        )
    found = infotext.read(text)
    settings: dict[str, Any] = {}
    left_out = list(found.left_out)
    for name, value in found.fields.items():
        if name == "controls" and isinstance(value, list):
            left_out += [f"ControlNet: {one.get('model')}" for one in value]
        elif name not in FIELDS:
            left_out += [f"{name}: {value}"]
        else:
            try:
                settings[name] = convert(value, FIELDS[name], strict=False)
            except Mismatch:
                left_out.append(found.stated.get(name, f"{name}: {value!r}"[:80]))
    return FileSettings(settings, list(dict.fromkeys(left_out)), text)


def read_image(image: Any) -> FileSettings:
    """Reads the settings in an image's file, whichever program wrote them.

    image: a PIL image that was opened from a file.

    Raises:
        Refused: the file says nothing of settings, or too much.
    """
    text = text_in(image)
    if not text:
        raise Refused(
            "image must have settings in its file, as diffusax, A1111's web UI, ComfyUI, InvokeAI, "
            "NovelAI and others write them; this one has none",
            param="image",
        )
    return read_text(text)


def text_in(image: Any) -> str:
    """Returns the settings in an image's file as webui writes them; "" where there are none."""
    return webui_text(texts_of(image), image.size)
