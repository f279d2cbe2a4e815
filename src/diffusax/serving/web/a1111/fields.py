"""The fields of A1111's API that change what is generated; other fields are ignored."""

import dataclasses
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar

from msgspec import Meta

from diffusax.boundary.convert import field_types
from diffusax.serving.requests.generation import ControlSettings, Name, Settings, Text
from diffusax.serving.web.fields import SentImage, read_fields

T = TypeVar("T")

_SETTINGS = {
    "prompt": "prompt",
    "negative_prompt": "negative_prompt",
    "subseed_strength": "variation_strength",
    "sampler_name": "sampler",
    "sampler_index": "sampler",
    "batch_size": "num_images",
    "n_iter": "num_images",
    "steps": "num_inference_steps",
    "cfg_scale": "guidance_scale",
    "width": "width",
    "height": "height",
    "denoising_strength": "strength",
    "hr_sampler_name": "sampler",
    "hr_prompt": "prompt",
    "hr_negative_prompt": "negative_prompt",
    "hr_cfg": "guidance_scale",
    "image_cfg_scale": "image_guidance_scale",
    "mask_blur": "mask_blur",
    "mask_blur_x": "mask_blur",
    "mask_blur_y": "mask_blur",
}
"""A1111's names of our settings, whose ranges, descriptions and defaults they have."""
_CONTROL = {
    "model": "model",
    "weight": "scale",
    "guidance_start": "start",
    "guidance_end": "end",
}
"""Those of a ControlNet's settings."""
Whole = Annotated[int, Meta(ge=0, le=16_384)]
AnySeed = Annotated[int, Meta(ge=-(2**63), description="-1 takes one at random.")]
Threshold = Annotated[float, Meta(ge=-1, le=1_000_000)]
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


def _declared_by(ours: type, names: Mapping[str, str]) -> Callable[[type[T]], type[T]]:
    """Gives the fields of a class the types of ours, and the defaults where they have none.

    ours: the dataclass that declares them.
    names: the names of its fields by those of the class.
    """
    hints = field_types(ours)
    defaults = {field.name: field.default for field in dataclasses.fields(ours)}

    def declare(cls: type[T]) -> type[T]:
        for name in cls.__annotations__.keys() & names.keys():
            cls.__annotations__[name] = hints[names[name]]
            if name not in vars(cls):
                setattr(cls, name, defaults[names[name]])
        return cls

    return declare


@dataclasses.dataclass(frozen=True, kw_only=True)
@_declared_by(Settings, _SETTINGS)
class Shared:
    """What both calls take; the defaults are A1111's."""

    prompt: str
    negative_prompt: str
    seed: AnySeed = -1
    subseed: AnySeed = -1
    subseed_strength: float
    seed_resize_from_w: int = -1
    seed_resize_from_h: int = -1
    sampler_name: str | None
    sampler_index: str | None
    scheduler: Name | None = None
    batch_size: int
    n_iter: int
    steps: int | None
    cfg_scale: float | None
    width: int | None
    height: int | None
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
@_declared_by(Settings, _SETTINGS)
class TextToImage(Shared):
    """txt2img, with the second pass of hires fix."""

    enable_hr: bool = False
    denoising_strength: float = 0.75
    firstphase_width: Whole = 0
    firstphase_height: Whole = 0
    firstpass_image: Any = None
    hr_scale: Annotated[float, Meta(gt=0, le=16)] = 2.0
    hr_upscaler: Name | None = None
    hr_second_pass_steps: Annotated[int, Meta(ge=0, le=1000)] = 0
    hr_resize_x: Whole = 0
    hr_resize_y: Whole = 0
    hr_checkpoint_name: Name | None = None
    hr_sampler_name: str | None
    hr_scheduler: Name | None = None
    hr_prompt: str
    hr_negative_prompt: str
    hr_cfg: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
@_declared_by(Settings, _SETTINGS)
class ImageToImage(Shared):
    """img2img, with the options of inpainting; a mask is white where to generate anew."""

    init_images: Annotated[list[Any], Meta(max_length=100)] = dataclasses.field(
        default_factory=list
    )
    resize_mode: Annotated[int, Meta(ge=0, le=3)] = 0
    denoising_strength: float = 0.75
    image_cfg_scale: float | None
    mask: SentImage | None = None
    latent_mask: Any = None
    mask_round: bool = True
    initial_noise_multiplier: float | None = None
    mask_blur: float | None = None
    mask_blur_x: float = 4.0
    mask_blur_y: float = 4.0
    inpainting_fill: Annotated[int, Meta(ge=0, le=3)] = 0
    inpaint_full_res: bool = True
    inpaint_full_res_padding: Whole = 0
    inpainting_mask_invert: Annotated[int, Meta(ge=0, le=1)] = 0
    include_init_images: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preprocessing:
    """How a preprocessor of ControlNets makes its map."""

    processor_res: Annotated[int, Meta(le=2048)] = -1
    threshold_a: Threshold = -1.0
    threshold_b: Threshold = -1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
@_declared_by(ControlSettings, _CONTROL)
class ControlUnit(Preprocessing):
    """One ControlNet, as the extension of A1111's server takes it."""

    enabled: bool = True
    image: Any = None
    input_image: Any = None
    module: Name | None = None
    model: str | None = None
    weight: float
    guidance_start: float
    guidance_end: float
    control_mode: Any = 0
    resize_mode: Any = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImagesReply:
    """Images in base64, the request's parameters, and JSON about the images."""

    images: list[str]
    parameters: dict[str, Any]
    info: str
