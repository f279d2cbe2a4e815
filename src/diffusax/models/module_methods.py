"""The methods of PyTorch's modules that diffusers' and transformers' users call on a model."""

import logging
from collections.abc import Mapping
from typing import Any, Self

import jax

from diffusax.boundary.messages import LAYERS, missing_attribute

log = logging.getLogger(__name__)

_PLAIN = (
    "AttnProcessor",
    "AttnProcessor2_0",
    "AttnAddedKVProcessor",
    "AttnAddedKVProcessor2_0",
    "Flux2AttnProcessor",
    "Flux2ParallelSelfAttnProcessor",
    "FluxAttnProcessor",
    "FluxAttnProcessor2_0",
    "FusedAttnProcessor2_0",
    "SlicedAttnProcessor",
    "XFormersAttnProcessor",
    "ZSingleStreamAttnProcessor",
)
"""The classes of attention processors that compute plain attention, in one way or another."""


class AttnProcessor:
    """Plain attention, which networks compute anyway; for programs that choose it."""


class AttnProcessor2_0(AttnProcessor):
    """Plain attention, which networks compute anyway; for programs that choose it."""


class ModuleMethods:
    """The methods that need no layout of PyTorch's; others are in `checkpoints.module_methods`."""

    config: Any
    params: Any
    switches: Any
    to: Any
    config_name = "config.json"
    """The name of the file with the options."""
    training = False
    is_gradient_checkpointing = False

    def __getattr__(self, name: str) -> Any:
        """Says of a layer where it is, and of other names what there is instead.

        Raises:
            AttributeError: always.
        """
        held = vars(self)
        params = held.get("_store", {}).get(held.get("_name"))
        error = missing_attribute(type(self), name)
        if isinstance(params, Mapping) and name in params:
            error = AttributeError(f"{error}; {LAYERS}")
        raise error

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the model."""
        called: Any = self
        return called(*args, **kwargs)

    def eval(self) -> Self:
        """Returns the model itself, because networks here have no training mode."""
        return self

    def train(self, mode: bool = True) -> Self:
        """Returns the model itself, because networks here have no training mode."""
        return self

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Says whether the model is to be trained, and returns the model itself.

        JAX takes gradients of functions; `training_utils` and `num_parameters` read it.
        """
        self.switches.trainable = requires_grad
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Does nothing, because JAX returns gradients; PyTorch's programs call it."""

    def half(self) -> Self:
        """Casts the parameters to float16, and returns the model itself."""
        cast: Self = self.to(dtype="float16")
        return cast

    def bfloat16(self) -> Self:
        """Casts the parameters to bfloat16, and returns the model itself."""
        cast: Self = self.to(dtype="bfloat16")
        return cast

    def float(self) -> Self:
        """Casts the parameters to float32, and returns the model itself."""
        cast: Self = self.to(dtype="float32")
        return cast

    def cpu(self) -> Self:
        """Returns the model itself: JAX has placed the parameters already."""
        return self

    def cuda(self, device: Any = None) -> Self:
        """Returns the model itself: JAX has placed the parameters already."""
        return self

    def compile(self, *args: Any, **kwargs: Any) -> Self:
        """Returns the model itself, because calls are compiled anyway."""
        return self

    def get_memory_footprint(self, return_buffers: bool = True) -> int:
        """Returns the number of bytes of the parameters."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self.params))

    @property
    def attn_processors(self) -> dict[str, AttnProcessor]:
        """A plain processor for each attention, by its path; networks compute no other."""
        return {f"{path}.processor": AttnProcessor2_0() for path in _attentions(self.params)}

    def set_attn_processor(self, processor: Any, *args: Any, **kwargs: Any) -> None:
        """Accepts processors of plain attention, which networks compute anyway.

        Raises:
            ValueError: a processor computes something else.
        """
        for one in processor.values() if isinstance(processor, Mapping) else [processor]:
            name = type(one).__name__
            if name not in _PLAIN or type(one).__module__.partition(".")[0] == "__main__":
                raise ValueError(
                    f"processor must be one of plain attention, as AttnProcessor2_0 (got {name}): "
                    "networks are Flax modules, whose layers network.module(params) gives"
                )
        _tell("set_attn_processor")


def _attentions(params: Any, path: tuple[str, ...] = ()) -> list[str]:
    """Returns the paths of the layers that have queries."""
    if not isinstance(params, Mapping):
        return []
    own = [".".join(path)] if {"to_q", "to_qkv_mlp_proj"} & {*params} else []
    below = (_attentions(value, (*path, str(name))) for name, value in params.items())
    return [*own, *(found for one in below for found in one)]


def _tell(name: str) -> None:
    log.info("%s changes nothing in diffusax: XLA plans memory and fuses attention", name)


def _no_meaning(name: str) -> Any:
    def method(self: ModuleMethods, *args: Any, **kwargs: Any) -> None:
        _tell(name)

    method.__doc__ = "Accepted, as diffusers' method of this name; XLA does without it."
    method.__name__ = name
    return method


for _name in (
    "set_default_attn_processor",
    "set_attention_slice",
    "set_attention_backend",
    "reset_attention_backend",
    "enable_xformers_memory_efficient_attention",
    "disable_xformers_memory_efficient_attention",
    "set_use_memory_efficient_attention_xformers",
    "enable_xla_flash_attention",
    "disable_xla_flash_attention",
    "enable_gradient_checkpointing",
    "disable_gradient_checkpointing",
    "gradient_checkpointing_enable",
    "gradient_checkpointing_disable",
    "activation_checkpointing_enable",
    "activation_checkpointing_disable",
    "enable_input_require_grads",
    "disable_input_require_grads",
    "enable_npu_flash_attention",
    "disable_npu_flash_attention",
    "set_use_npu_flash_attention",
    "set_use_xla_flash_attention",
    "set_attn_implementation",
    "set_use_kernels",
    "fuse_qkv_projections",
    "unfuse_qkv_projections",
    "enable_slicing",
    "disable_slicing",
    "tie_weights",
    "compile_repeated_blocks",
):
    setattr(ModuleMethods, _name, _no_meaning(_name))
