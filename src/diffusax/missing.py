"""Names that diffusers has and diffusax lacks, with a sentence that says what to use instead."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")

_SAVE = "save_pretrained(folder) in PyTorch diffusers, and open the folder with from_pretrained"
_LORA = (
    "LoRAs belong to the pipeline: load_lora_weights, set_adapters, fuse_lora and their like are "
    "its methods, see docs/guides/adapters.md"
)
_SINGLE_FILE = (
    "from_single_file(...) loads .safetensors files; a .ckpt file is a pickle, which could run code"
)
_SINGLE_NETWORK = (
    "UNet2DConditionModel, AutoencoderKL and ControlNetModel have it, and the transformers of FLUX "
    "and Z-Image with their text encoders; they and pipelines are what single files hold"
)
_PIECES = (
    "a call is one program here: pipe.generate_fn and pipe.prepare_inputs are it as a pure "
    "function, see docs/functional.md"
)
_STEPS = (
    "a step is a row of coefficients: scheduler.schedule(steps).rows has them, and step(...) gives "
    "prev_sample and for most samplers pred_original_sample"
)
_MODULE = (
    "a model is a network with the tree of its parameters, model.params; see docs/functional.md"
)
_ATTENTION = (
    "how attention is computed is chosen for the platform that is compiled for; leave it out"
)


def _hints(reasons: Mapping[str, Iterable[str]]) -> dict[str, str]:
    return {name: reason for reason, names in reasons.items() for name in names}


def _words(text: str) -> list[str]:
    return text.split()


PIPELINE = _hints(
    {
        _LORA: _words(
            "lora_state_dict load_lora_into_unet load_lora_into_text_encoder write_lora_layers"
        ),
        _SINGLE_FILE: _words("from_ckpt"),
        _PIECES: _words(
            "check_inputs prepare_latents decode_latents get_timesteps "
            "prepare_image prepare_control_image prepare_mask_latents prepare_image_latents "
            "run_safety_checker"
        ),
    }
)
"""Hints for pipelines, by name."""
NETWORK = _hints(
    {
        _LORA: _words(
            "load_attn_procs save_attn_procs load_lora_adapter save_lora_adapter add_adapter "
            "set_adapter set_adapters delete_adapters active_adapters enable_adapters "
            "disable_adapters enable_lora disable_lora enable_lora_hotswap fuse_lora unfuse_lora "
            "unload_lora"
        ),
        _SINGLE_NETWORK: _words("from_single_file"),
        _ATTENTION: _words(
            "attn_processors set_attn_processor set_default_attn_processor set_attention_slice "
            "set_attention_backend enable_xformers_memory_efficient_attention "
            "disable_xformers_memory_efficient_attention"
        ),
        _MODULE: _words(
            "state_dict load_state_dict parameters named_parameters modules named_modules train"
        ),
    }
)
"""Hints for networks, by name."""
SCHEDULER = _hints({_STEPS: _words("convert_model_output previous_timestep step_plms step_prk")})
"""Hints for schedulers, by name."""


def hinting(hints: Mapping[str, str]) -> Callable[[type[T]], type[T]]:
    """Makes a class, and its subclasses, explain missing names: the error says what to use instead.

    `hasattr` stays False for the class and for its instances. Names that the class has stay.

    Args:
        hints: the sentence for each name.
    """

    def decorate(cls: type[T]) -> type[T]:
        for name, hint in hints.items():
            if not hasattr(cls, name):
                setattr(cls, name, _Missing(name, hint))
        return cls

    return decorate


def missing_attribute(cls: type, name: str) -> AttributeError:
    """Returns the error to raise when an instance of a class is asked for a name that it lacks."""
    found = next((vars(kind)[name] for kind in cls.__mro__ if name in vars(kind)), None)
    hint = f"; {found.hint}" if isinstance(found, _Missing) else ""
    return AttributeError(f"{cls.__name__!r} has no attribute {name!r}{hint}")


class _Missing:
    """An attribute that is not there."""

    def __init__(self, name: str, hint: str):
        self.name, self.hint = name, hint

    def __get__(self, instance: Any, owner: type) -> Any:
        raise missing_attribute(owner, self.name)
