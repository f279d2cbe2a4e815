"""The fields of A1111's API that change what is generated; other fields are ignored."""

import dataclasses
import typing
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from msgspec import Meta

from diffusax.boundary.convert import field_types
from diffusax.serving.requests.generation import (
    Blur,
    Images,
    Name,
    Pixels,
    Scale,
    Share,
    Steps,
    Text,
)
from diffusax.serving.web.fields import SentImage, read_fields

T = TypeVar("T")

Whole = Annotated[int, Meta(ge=0, le=16_384)]
AnySeed = Annotated[int, Meta(ge=-(2**63), description="-1 takes one at random.")]
Amount = Annotated[float, Meta(ge=0, le=1_000_000)]

_NAMES = (
    *("sampler_name", "sampler_index", "scheduler", "refiner_checkpoint", "script_name"),
    *("hr_upscaler", "hr_checkpoint_name", "hr_sampler_name", "hr_scheduler", "infotext"),
    *("mask", "latent_mask", "firstpass_image"),
)
"""The fields of names and images, where an empty text means none."""
_NONE = ("scheduler", "hr_scheduler", "hr_checkpoint_name", "hr_sampler_name", "mask")
"""Those of them where "None" means none, too."""
_SAME = ("Use same checkpoint", "Use same sampler", "Use same scheduler")
"""The texts by which fields of the second pass ask for the first pass's value."""


def read_call(kind: type[T], values: Mapping[str, Any]) -> T:
    """Reads a call's fields from a request's values, as A1111's server does.

    Numbers may be texts, or true and false; an empty text is no name. Fields that the call does
    not use, such as those of a second pass that is off, may have any value of their type.

    Raises:
        Refused: a value has another type, or is out of its range.
    """
    hints = field_types(kind)
    given = {name: _plain(name, value, hints.get(name)) for name, value in values.items()}
    lax: dict[str, Any] = {"strict": False, "tolerant": True}
    unused: list[str] = []
    if "enable_hr" in hints:
        wanted = read_fields(kind, {"enable_hr": given.get("enable_hr")}, **lax)
        if not wanted.enable_hr:  # type: ignore[attr-defined]
            unused = [name for name in hints if name.startswith("hr_")] + ["denoising_strength"]
    return read_fields(kind, given, unused=unused, **lax)


def _plain(name: str, value: Any, hint: Any) -> Any:
    """Turns texts that mean none into None, and true and false into the numbers of such fields."""
    if isinstance(value, bool) and {int, float} & _types(hint):
        return int(value)
    if not isinstance(value, str):
        return value
    none = (name in _NAMES and not value) or (name in _NONE and value in ("None", "none", *_SAME))
    return None if none else value


def _types(hint: Any) -> set[Any]:
    """Returns the plain types that a value may have."""
    args = [arg for arg in typing.get_args(hint) if not isinstance(arg, Meta)]
    return set().union(*map(_types, args)) if args else {hint}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shared:
    """What both calls take; the defaults are A1111's."""

    prompt: Text = ""
    negative_prompt: Text = ""
    seed: AnySeed = -1
    subseed: AnySeed = -1
    subseed_strength: float = 0.0
    seed_resize_from_w: int = -1
    seed_resize_from_h: int = -1
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
    styles: Any = None
    tiling: bool = False
    restore_faces: bool = False
    script_name: Name | None = None
    refiner_checkpoint: Name | None = None
    refiner_switch_at: float | None = None
    eta: Amount | None = None
    s_churn: Amount = 0.0
    s_tmin: Amount = 0.0
    s_tmax: float | None = None
    s_noise: Amount = 1.0
    s_min_uncond: Amount = 0.0
    infotext: Text | None = None
    disable_extra_networks: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextToImage(Shared):
    """txt2img, with the second pass of hires fix."""

    enable_hr: bool = False
    denoising_strength: Share = 0.75
    firstphase_width: Whole = 0
    firstphase_height: Whole = 0
    firstpass_image: Any = None
    hr_scale: Annotated[float, Meta(gt=0, le=16)] = 2.0
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
    """img2img, with the options of inpainting; a mask is white where to generate anew."""

    init_images: Annotated[list[Any], Meta(max_length=100)] = dataclasses.field(
        default_factory=list
    )
    resize_mode: Annotated[int, Meta(ge=0, le=3)] = 0
    denoising_strength: Share = 0.75
    image_cfg_scale: Scale | None = None
    mask: SentImage | None = None
    latent_mask: Any = None
    mask_round: bool = True
    initial_noise_multiplier: float | None = None
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
