"""The fields of A1111's API that change what is generated; others are read over."""

import dataclasses
from typing import Annotated, Any

from msgspec import Meta

from diffusax.serving.drawing import Blur, Images, Name, Pixels, Scale, Share, Steps, Text
from diffusax.serving.errors import Refused
from diffusax.serving.web.fields import Picture

Whole = Annotated[int, Meta(ge=0, le=16_384)]
AnySeed = Annotated[int, Meta(ge=-1, le=2**32 - 1, description="-1 takes one at random.")]

_WITHOUT: dict[str, tuple[tuple[Any, ...], str]] = {
    "subseed_strength": ((0,), "variation seeds"),
    "tiling": ((False,), "images that tile"),
    "restore_faces": ((False,), "restorers of faces"),
    "seed_resize_from_w": ((0, -1), "resizing of seeds"),
    "seed_resize_from_h": ((0, -1), "resizing of seeds"),
    "s_churn": ((0,), "churn"),
    "styles": (([],), "styles; write their words into the prompt"),
    "script_name": (("", "None", "none"), "scripts"),
    "refiner_checkpoint": (("", "None", "none"), "refiners within a run"),
    "firstpass_image": (("",), "images for the first pass"),
}
"""Fields with the values that leave them off, and the capability that other values ask for."""


def refuse_what_is_missing(values: dict[str, Any]) -> None:
    """Raises Refused where a value asks for what A1111's server has and this one lacks."""
    for name, (off, what) in _WITHOUT.items():
        value = values.get(name)
        if value is not None and value not in off:
            text = (
                f"{name} must be {off[0]!r} here (got {str(value)[:60]!r}), as there are no {what}"
            )
            raise Refused(text, param=name, code="not_supported")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shared:
    """What both calls take; the defaults are A1111's."""

    prompt: Text = ""
    negative_prompt: Text = ""
    seed: AnySeed = -1
    sampler_name: Name | None = None
    sampler_index: Name | None = None
    scheduler: Name | None = None
    batch_size: Images = 1
    n_iter: Images = 1
    steps: Steps | None = None
    cfg_scale: Scale | None = None
    width: Pixels | None = None
    height: Pixels | None = None
    override_settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    override_settings_restore_afterwards: bool = True
    alwayson_scripts: dict[str, Any] = dataclasses.field(default_factory=dict)
    send_images: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextToImage(Shared):
    """txt2img, with the second pass of hires fix."""

    enable_hr: bool = False
    denoising_strength: Share | None = None
    hr_scale: Annotated[float, Meta(ge=1, le=8)] = 2.0
    hr_upscaler: Name | None = None
    hr_second_pass_steps: Annotated[int, Meta(ge=0, le=1000)] = 0
    hr_resize_x: Whole = 0
    hr_resize_y: Whole = 0
    hr_checkpoint_name: Name | None = None
    hr_sampler_name: Name | None = None
    hr_scheduler: Name | None = None
    hr_prompt: Text = ""
    hr_negative_prompt: Text = ""
    hr_cfg: Scale | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageToImage(Shared):
    """img2img, with the options of inpainting; a mask is white where the image is drawn anew."""

    init_images: Annotated[list[Any], Meta(max_length=100)] = dataclasses.field(
        default_factory=list
    )
    resize_mode: Annotated[int, Meta(ge=0, le=3)] = 0
    denoising_strength: Share = 0.75
    image_cfg_scale: Scale | None = None
    mask: Picture | None = None
    mask_blur: Blur | None = None
    mask_blur_x: Blur = 4.0
    mask_blur_y: Blur = 4.0
    inpainting_fill: Annotated[int, Meta(ge=0, le=3)] = 0
    inpaint_full_res: bool = True
    inpaint_full_res_padding: Whole = 0
    inpainting_mask_invert: Annotated[int, Meta(ge=0, le=1)] = 0
    include_init_images: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class ControlUnit:
    """One ControlNet, as the extension of A1111's server takes it."""

    enabled: bool = True
    image: Any = None
    input_image: Any = None
    module: Name | None = None
    model: Name | None = None
    weight: Scale = 1.0
    guidance_start: Share = 0.0
    guidance_end: Share = 1.0
    control_mode: Any = 0
    resize_mode: Any = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImagesReply:
    """Images in base64, the request's parameters, and JSON about the images."""

    images: list[str]
    parameters: dict[str, Any]
    info: str
