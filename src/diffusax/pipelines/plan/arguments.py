"""The arguments of all calls, each declared once with its type and range, and their checks."""

import dataclasses
import functools
import inspect
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, get_args

import jax
import numpy as np
from msgspec import Meta

from diffusax.boundary.convert import (
    Words,
    by_type,
    choice,
    convert_fields,
    field_types,
    limit,
    number,
    plain,
    shortened,
)
from diffusax.boundary.options import Fraction, ImageCount, Pixels, Scale, Steps
from diffusax.boundary.tensors import as_numpy, wants_tensors
from diffusax.pipelines.plan.generators import seed_of, take_keys
from diffusax.runtime.switches import check_untraced

Texts = str | list[str] | None
Coordinate = Annotated[int, Meta(ge=-1_000_000, le=1_000_000)]
Size = tuple[Coordinate, Coordinate]
Seed = int
Time = Annotated[float, Meta(ge=0, le=1_000_000)]
Times = list[Time] | None
Mode = Annotated[int, Meta(ge=0, le=1000)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """The arguments of a call. The type Any stands for images or arrays."""

    prompt: Texts = None
    prompt_2: Texts = None
    prompt_3: Texts = None
    negative_prompt: Texts = None
    negative_prompt_2: Texts = None
    negative_prompt_3: Texts = None
    prompt_embeds: Any = None
    negative_prompt_embeds: Any = None
    prompt_embeds_mask: Any = None
    negative_prompt_embeds_mask: Any = None
    pooled_prompt_embeds: Any = None
    negative_pooled_prompt_embeds: Any = None
    num_images_per_prompt: ImageCount | None = 1
    num_frames: Annotated[int, Meta(ge=1, le=100_000)] | None = None
    batch_size: ImageCount = 1
    clip_skip: Annotated[int, Meta(ge=0, le=100)] | None = None
    max_sequence_length: Annotated[int, Meta(ge=1, le=32_768)] = 512
    text_encoder_out_layers: tuple[Annotated[int, Meta(ge=-1024, le=1024)], ...] | None = None
    long_prompt: bool = False
    prompt_weighting: bool = False

    image: Any = None
    output_resolution: Pixels | None = None
    use_kv_cache: bool = True
    image_reference: Any = None
    last_image: Any = None
    video: Any = None
    mask: Any = None
    reference_images: Any = None
    conditioning_scale: Scale | list[Scale] = 1.0
    image_embeds: Any = None
    mask_image: Any = None
    control_image: Any = None
    masked_image_latents: Any = None
    padding_mask_crop: Annotated[int, Meta(ge=0, le=32_768)] | None = None
    height: Pixels | None = None
    width: Pixels | None = None
    max_area: Annotated[int, Meta(ge=1, le=2**30)] = 1024**2
    auto_resize: bool = True

    num_inference_steps: Steps | None = 50
    original_inference_steps: Steps | None = None
    timesteps: Times = None
    sigmas: Times = None
    strength: Fraction = 1.0
    denoising_start: Fraction | None = None
    denoising_end: Fraction | None = None
    eta: Fraction | None = 0.0
    use_clipped_model_output: bool | None = None
    adapters: Any = None
    lora_scale: Annotated[float, Meta(ge=-1_000_000, le=1_000_000)] = 1.0
    ip_adapter_image: Any = None
    ip_adapter_image_embeds: Any = None
    ip_adapter_masks: Any = None
    negative_ip_adapter_image: Any = None
    negative_ip_adapter_image_embeds: Any = None

    guidance_scale: Scale | None = 7.5
    guidance_scale_2: Scale | None = None
    true_cfg_scale: Scale = 1.0
    image_guidance_scale: Scale = 1.5
    guidance_rescale: Fraction = 0.0
    guidance_start: Fraction = 0.0
    guidance_end: Fraction = 1.0
    guide: Any = None
    hooks: Any = None
    cfg_normalization: Scale = 0.0
    cfg_truncation: Fraction | None = None
    controlnet_conditioning_scale: Scale | list[Scale] = 1.0
    control_guidance_start: Fraction | list[Fraction] = 0.0
    control_guidance_end: Fraction | list[Fraction] = 1.0
    control_mode: Mode | list[Mode | None] | None = None
    guess_mode: bool = False
    adapter_conditioning_scale: Scale | list[Scale] | None = 1.0
    adapter_conditioning_factor: Fraction | None = None

    original_size: Size | None = None
    crops_coords_top_left: Size = (0, 0)
    target_size: Size | None = None
    negative_original_size: Size | None = None
    negative_crops_coords_top_left: Size = (0, 0)
    negative_target_size: Size | None = None
    aesthetic_score: Scale = 6.0
    negative_aesthetic_score: Scale = 2.5

    seed: Seed | list[Seed] | None = None
    noise: Literal["jax", "torch"] = "jax"
    latents: Any = None
    output_type: Literal["pil", "np", "jax", "pt", "latent"] = "pil"
    return_dict: bool = True
    callback_on_step_end: Any = None
    callback_on_step_end_tensor_inputs: list[str] | None = None

    given: Any = frozenset()
    """The names of the arguments that are not their defaults."""
    named: Any = frozenset()
    """The names of the arguments that the caller wrote, with whatever value."""
    generators: Any = ()
    """PyTorch's generators and seeds, which draw the noise; `seed` has the seeds of all."""
    keys: Any = None
    """Random keys of JAX in the seed's place: one for all images, or one for each."""
    adapter_rows: Any = None
    """`adapters` as dictionaries of checked names and weights, for all prompts or for each; None
    before `resolve_adapters`."""
    tensors: bool = False
    """Whether latents and what callbacks see are tensors of PyTorch instead of JAX's arrays."""
    turned_noise: Any = None
    """The seed towards whose first noise that of `seed` is turned, and how far, from 0 to 1; None
    for no other seed."""
    masked_fill: Any = None
    """What latents begin with under a mask: "noise" or "nothing"; None for those of the image."""
    own_arguments: Any = dataclasses.field(default_factory=dict)
    """The arguments of a class's call that have none of these names, for a task of its own."""


TENSORS = ["latents"]
"""The default of callback_on_step_end_tensor_inputs, as in diffusers."""

_HINTS = field_types(Call)
_TYPES = {
    Texts: "a string or a list of strings",
    bool: "True or False",
    bool | None: "True, False or None",
    Size | None: "a pair of integers",
    Size: "a pair of integers",
    Times: "a list of numbers of at least 0",
    int: "an integer",
    int | list[int] | None: "an integer or a list of integers",
    list[str] | None: "a list of strings",
}
_WORDS = Words(
    "{name} must be {must} (got {value})",
    (limit, choice("one of {}", ", ", ", "), by_type(_TYPES), number),
    shortened,
)

_OLDER = {"callback": None, "callback_steps": 1}
"""The arguments that all calls take, also those that do not declare them, with their defaults."""

_SCALE = {"scale": "'scale', the strength of LoRAs"}

_ATTENTION_OPTIONS: dict[str, dict[str, str]] = {
    "cross_attention_kwargs": {**_SCALE, "ip_adapter_masks": "'ip_adapter_masks'"},
    "joint_attention_kwargs": _SCALE,
    "attention_kwargs": _SCALE,
}
"""What diffusers' dictionaries may hold, and what that is."""

_TRACED = (
    "prepare the inputs of generate_fn outside, and change their arrays in the traced function: "
    "inputs._replace(plan=inputs.plan._replace(latents=...))"
)

_CALL_TRACED = (
    "a call makes images; pipe.generate_fn(params, inputs) is its pure function, and "
    "pipe.prepare_inputs gives the inputs"
)


def read_call(
    pipe: Any,
    args: tuple[Any, ...],
    given: dict[str, Any],
    *,
    declared: Any = None,
    pure: bool = False,
) -> Call:
    """Returns the call of a pipeline with these arguments, which are checked and converted.

    Every call also takes callback and callback_steps, whether its declaration has them or not.

    Args:
        pipe: the pipeline.
        args: the arguments by position.
        given: the arguments by name.
        declared: the function that declares the arguments; by default the class's call.
        pure: whether they are for `generate_fn`, whose embeddings may be traced.

    Raises:
        ValueError: an argument is not valid; names it, its value and what is valid.
        TypeError: they do not fit the signature; names the method.
    """
    signature, call = _declaration(declared or inspect.unwrap(type(pipe).__call__))
    try:
        values = signature.bind(pipe, *args, **given).arguments
    except TypeError as error:
        raise TypeError(f"{type(pipe).__name__}.__call__() {error}") from None
    del values["self"]
    call = dataclasses.replace(call, **pipe.own_defaults)
    if pure:
        return check_call(values, call)
    check_untraced(values, _CALL_TRACED)
    defaults = signature.parameters
    changed = [name for name, value in values.items() if _differs(value, defaults[name].default)]
    tensors = wants_tensors(pipe._tensors, *values.values())
    names: dict[str, Any] = {"given": frozenset(changed), "named": frozenset(values)}
    return dataclasses.replace(_converted(values, call), tensors=tensors, **names)


@functools.cache
def _declaration(call: Any) -> tuple[inspect.Signature, Call]:
    """Returns the signature of a pipeline's call, with the older arguments, and its defaults."""
    signature = inspect.signature(call)
    declared = {**signature.parameters}
    older = {
        name: inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)
        for name, default in _OLDER.items()
        if name not in declared
    }
    known = {n: p.default for n, p in declared.items() if p.default is not signature.empty}
    rest = {n: declared.pop(n) for n, p in signature.parameters.items() if p.kind is p.VAR_KEYWORD}
    every = [*declared.values(), *older.values(), *rest.values()]
    return signature.replace(parameters=every), check_call(known)


def _differs(value: Any, default: Any) -> bool:
    """Returns whether an argument says something else than its default; None never does."""
    if value is None or value is default:
        return False
    return not (isinstance(value, bool | int | float | str | tuple) and value == default)


def check_call(given: Mapping[str, Any], defaults: Call | None = None) -> Call:
    """Checks the arguments of a call and converts them to their types.

    Args:
        given: the arguments by name; `self` is left out.
        defaults: the call that has the values of the others; by default those of `Call`.

    Raises:
        ValueError: one of them has a type or value that is not valid; names it, its value and what
            is valid.
    """
    values = take_keys({name: value for name, value in given.items() if name != "self"})
    # Embeddings and random keys stay arrays, and a rule of guidance or hooks a tree of them.
    arrays = ("guide", "hooks", "keys")
    numbers = {k: v for k, v in values.items() if "embeds" not in k and k not in arrays}
    check_untraced(numbers, _TRACED)
    return _converted(values, defaults or Call())


def _converted(values: dict[str, Any], defaults: Call) -> Call:
    """Returns `defaults` with these values, each converted to its type, in the place of its own."""
    values = take_keys(values)
    _take_attention_options(values)
    if "num_videos_per_prompt" in values:
        values["num_images_per_prompt"] = values.pop("num_videos_per_prompt")
    if "_auto_resize" in values:
        values["auto_resize"] = values.pop("_auto_resize")
    for name in ("cfg_normalization", "cfg_truncation"):
        if isinstance(values.get(name), bool):
            values[name] = float(values[name])
    if (generator := values.pop("generator", None)) is not None:
        values |= seed_of(generator, values.get("seed"))
    callback, every = values.pop("callback", None), values.pop("callback_steps", None)
    taken = {name: _plain(value, _HINTS[name]) for name, value in values.items() if name in _HINTS}
    changes = convert_fields(_HINTS, taken, _WORDS)
    if own := {name: value for name, value in values.items() if name not in _HINTS}:
        changes["own_arguments"] = {**defaults.own_arguments, **own}
    call = dataclasses.replace(defaults, **changes)
    if callback is None and call.callback_on_step_end is None:
        return call
    return _with_callback(call, callback, every)


def _take_attention_options(values: dict[str, Any]) -> None:
    """Replaces the dictionaries of diffusers' attention options by the arguments that they hold."""
    for name, known in _ATTENTION_OPTIONS.items():
        options = values.pop(name, None)
        if options is None:
            continue
        unknown = [options]
        if isinstance(options, Mapping):
            unknown = [option for option in options if option not in known]
        if unknown:
            allowed = ", and ".join(known.values())
            raise ValueError(f"{name} may hold only {allowed} (got {unknown})")
        values["lora_scale"] = options.get("scale", 1.0)
        if "ip_adapter_masks" in known:
            values["ip_adapter_masks"] = options.get("ip_adapter_masks")
    if values.get("lora_scale") is None:
        values.pop("lora_scale", None)


def _plain(value: Any, hint: Any) -> Any:
    """Returns a value with arrays' numbers as Python's, and 64.0 as 64 where its type is int."""
    if hint is Any or isinstance(value, str | int):
        return value
    found = plain(value)
    return _whole(found) if float not in _plain_types(hint) else found


def _whole(value: Any) -> Any:
    if isinstance(value, list):
        return list(map(_whole, value))
    return int(value) if isinstance(value, float) and value.is_integer() else value


@functools.cache
def _plain_types(hint: Any) -> frozenset[Any]:
    """Returns the types that a type is made of, without their ranges."""
    parts = [arg for arg in get_args(hint) if not isinstance(arg, Meta)]
    return frozenset({hint}).union(*map(_plain_types, parts))


def _with_callback(call: Call, callback: Any, every: Any) -> Call:
    """Returns a call with its callback checked, or with diffusers' older kind of callback.

    Args:
        call: the call.
        callback: a function (step, timestep, latents), or None.
        every: the number of steps between its calls; None for 1.
    """
    if callback is not None and call.callback_on_step_end is not None:
        raise ValueError("only one of callback and callback_on_step_end can be given")
    if callback is None:
        callback = call.callback_on_step_end
        if not callable(callback):
            raise ValueError(f"callback_on_step_end must be callable (got {shortened(callback)})")
        names = getattr(callback, "tensor_inputs", call.callback_on_step_end_tensor_inputs)
        names = None if names is None else list(names)
        return dataclasses.replace(call, callback_on_step_end_tensor_inputs=names)
    if not callable(callback):
        raise ValueError(f"callback must be callable (got {shortened(callback)})")
    every = 1 if every is None else every
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ValueError(f"callback_steps must be an integer of at least 1 (got {every!r})")
    count, steps = None, call.num_inference_steps
    if steps is not None and call.timesteps is None and call.sigmas is None:
        count = min(int(steps * call.strength), steps)

    def on_step_end(pipe: Any, step: int, timestep: float, tensors: dict[str, Any]) -> None:
        order = pipe.scheduler.order
        # Rows that PNDM has more than steps: diffusers begins to call after them.
        begin = 0 if count is None else max(pipe.num_timesteps - count * order, 0)
        whole = step >= begin and (step + 1) % order == 0
        if (whole or step + 1 == pipe.num_timesteps) and step % every == 0:
            callback(step // order, timestep, tensors["latents"])

    vars(on_step_end)["__wrapped__"] = callback
    return dataclasses.replace(call, callback_on_step_end=on_step_end)


def with_default_generator(call: Call) -> Call:
    """Returns a call that draws from PyTorch's default generator where it gives no seed.

    Several processes keep a seed from the system: their default generators differ, and their images
    must not.
    """
    given = call.seed is not None or call.keys is not None or call.noise == "torch"
    if given or jax.process_count() > 1:
        return call
    default = sys.modules["torch"].default_generator
    return dataclasses.replace(call, noise="torch", generators=(default,))


def as_list(value: Any) -> list[Any]:
    """Returns a list as it is, and any other value as a list of one."""
    return list(value) if isinstance(value, list | tuple) else [value]


def read_numbers(name: str, value: Any) -> np.ndarray:
    """Returns an array, or a tensor of PyTorch, as float32.

    Raises:
        ValueError: it does not hold real numbers.
    """
    array = as_numpy(value)
    if array.dtype.kind not in "biuf" and array.dtype.name != "bfloat16":
        raise ValueError(f"{name} must be an array of real numbers (got {array.dtype})")
    return array.astype(np.float32)


def match_length(name: str, values: Sequence[Any], n: int, of: str = "prompts") -> list[Any]:
    """Returns `values` as n values, where a single one is repeated.

    Raises:
        ValueError: there is neither one nor n.
    """
    if len(values) not in (1, n):
        raise ValueError(f"{name} has {len(values)} entries for {n} {of}; give 1 or {n}")
    return list(values) * n if len(values) == 1 else list(values)
