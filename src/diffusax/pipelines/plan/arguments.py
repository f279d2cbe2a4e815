"""The arguments of all calls, each declared once with its type and range, and their checks."""

import dataclasses
import functools
import inspect
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, get_args

import jax
import jax.numpy as jnp
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
from diffusax.runtime.random.step_noise import is_stateful
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
    pooled_prompt_embeds: Any = None
    negative_pooled_prompt_embeds: Any = None
    num_images_per_prompt: ImageCount | None = 1
    batch_size: ImageCount = 1
    clip_skip: Annotated[int, Meta(ge=0, le=100)] | None = None
    max_sequence_length: Annotated[int, Meta(ge=1, le=32_768)] = 512
    text_encoder_out_layers: tuple[Annotated[int, Meta(ge=-1024, le=1024)], ...] | None = None
    long_prompt: bool = False
    prompt_weighting: bool = False

    image: Any = None
    image_reference: Any = None
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
    true_cfg_scale: Scale = 1.0
    image_guidance_scale: Scale = 1.5
    guidance_rescale: Fraction = 0.0
    guidance_start: Fraction = 0.0
    guidance_end: Fraction = 1.0
    guide: Any = None
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
    generators: Any = ()
    """PyTorch's generators and seeds, which draw the noise; `seed` has the seeds of all."""
    tensors: bool = False
    """Whether latents and what callbacks see are tensors of PyTorch instead of JAX's arrays."""
    own_arguments: Any = dataclasses.field(default_factory=dict)
    """The arguments of a class's call that have none of these names, for a task of its own."""


TENSORS = ["latents"]
"""The default of callback_on_step_end_tensor_inputs, as in diffusers."""

DESCRIPTIONS = {
    "prompt": "What to draw, one text or a list; or `prompt_embeds`, n t d.",
    "prompt_2": "For the second text encoder, where it differs.",
    "prompt_3": "For the third text encoder, where it differs.",
    "image": "The picture or pictures to start from, edit or be steered by: paths, PIL images, or "
    "arrays in [0, 1].",
    "image_reference": "Further pictures to look at, in the size of the first: one or several for "
    "all pictures that are drawn, or one for each.",
    "mask_image": "White where to draw anew, black where to keep.",
    "control_image": "What the ControlNets see; a list with one entry for each of several.",
    "masked_image_latents": "b 4 h/8 w/8, in the place of what is encoded of the masked picture.",
    "height": "In pixels, as `width`: a multiple of the autoencoder's factor (8).",
    "max_area": "In pixels, of the picture to draw, whose shape is that of `height` and `width`.",
    "padding_mask_crop": "Draw only the masked part and as many pixels around it, at full size.",
    "strength": "How much of the noise to add, from 0 to 1, and so how much may change.",
    "num_inference_steps": "Of the sampler; `strength` leaves some of them out.",
    "timesteps": "Custom ones instead of steps, for samplers that take them; or `sigmas`.",
    "original_inference_steps": "Of the grid that a consistency model was distilled on.",
    "denoising_start": "The fraction of the run that was done before, by another model.",
    "denoising_end": "The fraction of the run to stop at, for another model to go on.",
    "guidance_scale": "Classifier-free guidance; 1 and less turns it off, of Z-Image's 0.",
    "true_cfg_scale": "Classifier-free guidance of FLUX.1, where a negative prompt is given; 1 and "
    "less turns it off.",
    "image_guidance_scale": "How closely to keep to the picture that is edited.",
    "guidance_rescale": "phi of Lin et al. 2024, section 3.4.",
    "guidance_start": "The fraction of the run from which on to guide, until `guidance_end`.",
    "guide": "A rule of guidance of one's own, a function (predictions k h w c, step) -> h w c; by "
    "default the weighted sum of classifier-free guidance.",
    "cfg_normalization": "The most that guidance may lengthen a prediction, as a multiple of its "
    "norm without guidance; True is 1, and False or 0 sets no limit.",
    "cfg_truncation": "The time from 0 (noise) to 1 (image) after which no guidance applies; 1 and "
    "None mean all.",
    "negative_prompt": "What to steer away from; or `negative_prompt_embeds`.",
    "num_images_per_prompt": "The pictures of a prompt stand together in the result.",
    "batch_size": "How many pictures to draw.",
    "eta": "DDIM's, from 0 (deterministic) to 1.",
    "use_clipped_model_output": "Let DDIM take the noise from the picture that it has clipped, as "
    "Glide does.",
    "generator": "A seed, a torch.Generator or a list of them, for PyTorch's numbers; a generator "
    "of the CPU goes on with every call.",
    "seed": "Of the run, or one per picture; None takes one from the system.",
    "noise": "'jax', or 'torch' for the numbers of torch.Generator().manual_seed(seed).",
    "latents": "The initial noise, images c h/8 w/8, instead of drawing it.",
    "controlnet_conditioning_scale": "What the ControlNets count for; a list for several.",
    "control_mode": "The kind of the ControlNet's picture, a number, for one that knows several; a "
    "list for several ControlNets.",
    "guess_mode": "Let the ControlNet's picture speak, with no or little of a prompt.",
    "control_guidance_start": "The fraction of the run from which on the ControlNets steer, until "
    "`control_guidance_end`.",
    "adapter_conditioning_scale": "What the T2I-Adapters count for; a list for several.",
    "adapter_conditioning_factor": "The fraction of the steps for which the T2I-Adapters steer.",
    "original_size": "SDXL's micro-conditioning, (height, width), with `crops_coords_top_left` and "
    "`target_size`; their `negative_` forms for the negative prompt.",
    "aesthetic_score": "The refiner's, from 0 to 10; `negative_aesthetic_score` likewise.",
    "clip_skip": "How many of the text encoder's last layers to leave out.",
    "output_type": "'pil', 'np' or 'jax' (b h w 3 in [0, 1]), 'pt' (b 3 h w), or 'latent' "
    "(b c h/8 w/8).",
    "callback_on_step_end": "Called as (pipe, step, timestep, tensors) after every step; it may "
    "return changed tensors, and False stops the run.",
    "adapters": "The names and weights of LoRAs that were loaded, `{'style': 0.8}`, or a list with "
    "one dictionary for each prompt; by default those of `set_adapters`.",
    "joint_attention_kwargs": "`{'scale': 0.5}` multiplies the weights of all LoRAs.",
    "attention_kwargs": "`{'scale': 0.5}` multiplies the weights of all LoRAs.",
    "cross_attention_kwargs": "`{'scale': 0.5}` multiplies the weights of all LoRAs, and "
    "`ip_adapter_masks` says where IP-Adapters count.",
    "negative_ip_adapter_image": "None, as `negative_ip_adapter_image_embeds`: there are no "
    "IP-Adapters for FLUX.1.",
    "ip_adapter_image": "The picture that the IP-Adapter sees; a list with one entry for each of "
    "several, where an entry may be a list of pictures; or `ip_adapter_image_embeds`, a list of "
    "arrays as `prepare_ip_adapter_image_embeds` returns it.",
    "max_sequence_length": "The most tokens of a prompt, with those of the chat around it; what is "
    "longer is cut off.",
    "text_encoder_out_layers": "Which hidden states of the language model are a prompt's "
    "embeddings, side by side; 0 is what the first layer reads.",
    "long_prompt": "Use all of a long prompt, in windows as long as the text encoder reads.",
    "prompt_weighting": "Read A1111's syntax: the weight of `(word:1.3)`, and texts that change "
    "from step to step or that AND joins.",
}

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


def check_call(given: Mapping[str, Any]) -> Call:
    """Checks the arguments of a call and converts them to their types.

    Args:
        given: the arguments by name; `self` is left out.

    Raises:
        ValueError: one of them has a type or value that is not valid; names it, its value and what
            is valid.
    """
    values = {name: value for name, value in given.items() if name != "self"}
    # Embeddings stay arrays, and a rule of guidance a tree of them.
    numbers = {k: v for k, v in values.items() if "embeds" not in k and k != "guide"}
    check_untraced(numbers, _TRACED)
    for name in ("seed", "generator"):
        _check_no_key(name, values.get(name))
    if (options := values.pop("cross_attention_kwargs", None)) is not None:
        known = ("scale", "ip_adapter_masks")
        _check_attention_options("cross_attention_kwargs", options, known)
        values["lora_scale"] = options.get("scale", 1.0)
        values["ip_adapter_masks"] = options.get("ip_adapter_masks")
    for name in ("joint_attention_kwargs", "attention_kwargs"):
        if (options := values.pop(name, None)) is not None:
            _check_attention_options(name, options, ("scale",))
            values["lora_scale"] = options.get("scale", 1.0)
    if "_auto_resize" in values:
        values["auto_resize"] = values.pop("_auto_resize")
    for name in ("cfg_normalization", "cfg_truncation"):
        if isinstance(values.get(name), bool):
            values[name] = float(values[name])
    if values.get("lora_scale") is None:
        values.pop("lora_scale", None)
    if (generator := values.pop("generator", None)) is not None:
        values |= _randomness(generator, values)
    callback, callback_steps = values.pop("callback", None), values.pop("callback_steps", 1)
    if callback is not None:
        values["callback_on_step_end"] = _legacy_callback(callback, callback_steps, values)
    hints = field_types(Call)
    own = {name: value for name, value in values.items() if name not in hints}
    values = {k: _plain(v, hints[k]) for k, v in values.items() if k in hints}
    values["own_arguments"] = own
    call = Call(**convert_fields(hints, values, _WORDS))
    callback = call.callback_on_step_end
    if hasattr(callback, "tensor_inputs"):
        names = list(callback.tensor_inputs)
        call = dataclasses.replace(call, callback_on_step_end_tensor_inputs=names)
    if callback is not None and not callable(callback):
        raise ValueError(f"callback_on_step_end must be callable (got {shortened(callback)})")
    return call


def _plain(value: Any, hint: Any) -> Any:
    """Returns a value with Python's numbers, where integers may be given as 64.0 or as arrays."""
    if hint is Any:
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


def documented(call: Any) -> Any:
    """Makes a pipeline's `__call__` from a declaration of its arguments with a summary sentence.

    The descriptions of the arguments are added to the docstring. The call also takes callback and
    callback_steps, which diffusers' calls take without declaring them.
    """
    signature = inspect.signature(call)
    names = [name for name in signature.parameters if name in DESCRIPTIONS]
    lines = [f"            {name}: {DESCRIPTIONS[name]}" for name in names]
    raises = [
        "            ValueError: an argument that cannot be; says which, and what can.",
        "            FloatingPointError: the latents or pictures are not finite.",
    ]
    sections = ["", "", "        Args:", *lines, "", "        Raises:", *raises, "        "]
    call.__doc__ += "\n".join(sections)

    @functools.wraps(call)
    def called(self: Any, *args: Any, **given: Any) -> Any:
        return self._generate(bound_arguments(signature, self, args, given))

    return called


def bound_arguments(
    signature: inspect.Signature, self: Any, args: tuple[Any, ...], given: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the arguments of a pipeline's call by name, with the defaults.

    Every call also takes callback and callback_steps, whether its signature has them or not. What
    kind of arrays the program that calls works with is `tensors`, and under "given" are the names
    of the arguments that are not their defaults.

    Raises:
        ValueError: callback or callback_steps is not valid.
        TypeError: they do not fit the signature; names the method.
    """
    given, callback, steps = dict(given), None, None
    if "callback" not in signature.parameters:
        callback, steps = given.pop("callback", None), given.pop("callback_steps", None)
    try:
        bound = signature.bind(self, *args, **given)
    except TypeError as error:
        raise TypeError(f"{type(self).__name__}.__call__() {error}") from None
    parameters = signature.parameters
    named = {k for k, v in bound.arguments.items() if _differs(v, parameters[k].default)}
    if steps not in (None, 1):
        named.add("callback_steps")
    bound.apply_defaults()
    arguments = dict(bound.arguments)
    if callback is not None:
        arguments["callback_on_step_end"] = _legacy_callback(callback, steps, arguments)
    tensors = wants_tensors(self.tensors, *arguments.values())
    return {**arguments, "tensors": tensors, "given": frozenset(named)}


def _differs(value: Any, default: Any) -> bool:
    """Returns whether an argument is another than its default; None, too, says nothing."""
    if value is None or value is default:
        return False
    return not (isinstance(value, bool | int | float | str | tuple) and value == default)


def as_list(value: Any) -> list[Any]:
    """Returns a list as it is, and any other value as a list of one."""
    return list(value) if isinstance(value, list | tuple) else [value]


_ATTENTION_OPTIONS = {
    "scale": "'scale', the strength of LoRAs",
    "ip_adapter_masks": "'ip_adapter_masks'",
}


def _check_attention_options(name: str, options: Any, known: Sequence[str]) -> None:
    unknown = [k for k in options if k not in known] if isinstance(options, Mapping) else [options]
    if unknown:
        allowed = ", and ".join(_ATTENTION_OPTIONS[option] for option in known)
        raise ValueError(f"{name} may hold only {allowed} (got {unknown})")


_TRACED = (
    "prepare the inputs of generate_fn outside, and change their arrays in the traced function: "
    "inputs._replace(plan=inputs.plan._replace(latents=...))"
)


def _check_no_key(name: str, value: Any) -> None:
    """Raises ValueError for a random key of JAX in a call's arguments."""
    found = [x for x in as_list(value) if isinstance(x, jax.Array)]
    is_old = len(found) == 1 and found[0].dtype == np.uint32 and found[0].ndim == 1
    if is_old or any(jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in found):
        raise ValueError(
            f"{name} must be an integer or a list of integers, and not a key of jax.random (got "
            f"{found[0].dtype} of shape {found[0].shape}): image i of seed s draws from "
            "fold_in(key(s), i)"
        )


def _randomness(generator: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the seed and noise of a diffusers `generator`: PyTorch's numbers of its seed."""
    if values.get("seed") is not None:
        raise ValueError("only one of generator and seed can be given")
    several = as_list(generator)
    seeds = [_seed_of(g) for g in several]
    many = isinstance(generator, list | tuple)
    ongoing = tuple(g if is_stateful(g) else seed for g, seed in zip(several, seeds))
    return {"seed": seeds if many else seeds[0], "noise": "torch", "generators": ongoing}


def with_default_generator(call: Call) -> Call:
    """Returns a call of a program in PyTorch with PyTorch's default generator where it has none.

    That of each of several processes is another, whose images have to be the same.
    """
    given = call.seed is not None or call.noise == "torch"
    if not call.tensors or given or jax.process_count() > 1:
        return call
    default = sys.modules["torch"].default_generator
    return dataclasses.replace(call, noise="torch", generators=(default,))


def _seed_of(generator: Any) -> Any:
    seed = generator.initial_seed() if hasattr(generator, "initial_seed") else plain(generator)
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ValueError(
            f"generator must be an integer, a torch.Generator, or a list of them (got {seed!r})"
        )
    return seed


def _legacy_callback(callback: Any, every: Any, values: Mapping[str, Any]) -> Any:
    """Wraps diffusers' older callback(step, timestep, latents), called every `callback_steps`.

    values: the call's arguments by name.
    """
    if values.get("callback_on_step_end") is not None:
        raise ValueError("only one of callback and callback_on_step_end can be given")
    if not callable(callback):
        raise ValueError(f"callback must be callable (got {shortened(callback)})")
    every = 1 if every is None else every
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ValueError(f"callback_steps must be an integer of at least 1 (got {every!r})")

    steps, strength = values.get("num_inference_steps"), values.get("strength", 1.0)
    own = values.get("timesteps") is not None or values.get("sigmas") is not None
    count = None
    if isinstance(steps, int) and isinstance(strength, int | float) and not own:
        count = min(int(steps * strength), steps)

    def on_step_end(pipe: Any, step: int, timestep: float, tensors: dict[str, Any]) -> None:
        order = pipe.scheduler.order
        # Rows that PNDM has more than steps: diffusers begins to call after them.
        begin = 0 if count is None else max(pipe.num_timesteps - count * order, 0)
        whole = step >= begin and (step + 1) % order == 0
        if (whole or step + 1 == pipe.num_timesteps) and step % every == 0:
            callback(step // order, timestep, tensors["latents"])

    vars(on_step_end)["__wrapped__"] = callback
    return on_step_end


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
