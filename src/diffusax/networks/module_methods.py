"""The methods of PyTorch's modules that diffusers' and transformers' users call on a model."""

import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

import jax
import numpy as np

from diffusax.boundary.files import write_json
from diffusax.boundary.messages import LAYERS, missing_attribute
from diffusax.boundary.tensors import as_numpy
from diffusax.checkpoints.networks import check_saveable, config_of
from diffusax.checkpoints.tree import (
    MAX_LISTED,
    checkpoint_name,
    match_names,
    params_to_tensors,
    to_flax,
    torch_shape,
)
from diffusax.models.encoders.token_table import has_table, replace_table
from diffusax.models.parameter_tree import fill, ordered_leaves, path_name
from diffusax.networks.parameters import Embedding, IncompatibleKeys, Parameter, like
from diffusax.runtime.devices.memory import array_bytes

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
    "Krea2AttnProcessor",
    "QwenDoubleStreamAttnProcessor2_0",
    "QwenImage21AttnProcessor",
    "QwenImage21FlexAttnProcessor",
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
    """The methods of PyTorch's modules, and those of models that give parameters their names."""

    class_name: Any
    config: Any
    network: Any
    params: Any
    switches: Any
    to: Any
    config_name = "config.json"
    """The name of the file with the options."""
    training = False
    is_gradient_checkpointing = False

    if not TYPE_CHECKING:

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
        return sum(map(array_bytes, jax.tree.leaves(self.params)))

    def state_dict(self) -> dict[str, np.ndarray]:
        """Returns the parameters by their names in the checkpoint, in PyTorch's layout.

        The arrays are NumPy's: {k: torch.tensor(v) for k, v in state.items()} is what a module of
        PyTorch loads.

        Raises:
            ValueError: the model is a module of PyTorch, or was freed.
        """
        check_saveable(self)
        return params_to_tensors(self.params)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> IncompatibleKeys:
        """Takes parameters by name, arrays or tensors in PyTorch's layout, in their present dtype.

        Args:
            state_dict: the parameters.
            strict: whether a missing or unknown name is an error.
            assign: accepted, as PyTorch's argument.

        Raises:
            ValueError: names are missing or unknown, or a shape differs; lists them.
        """
        leaves = list(ordered_leaves(self.params))
        names = [checkpoint_name(path) for path, _ in leaves]
        held = {name: as_numpy(value) for name, value in state_dict.items()}
        found, _ = match_names(self.network.module_class, names, [cast(Any, held)])
        missing = [name for name in names if name not in found]
        unknown = [name for name in found if name not in names]
        misshapen = [
            f"{name} (has {found[name].shape}, not {torch_shape(leaf.shape, path)})"
            for name, (path, leaf) in zip(names, leaves)
            if name in found and found[name].shape != torch_shape(leaf.shape, path)
        ]
        faults = {"misshapen": misshapen} | (
            {"missing": missing, "unexpected": unknown} if strict else {}
        )
        if told := [f"{kind}: {', '.join(n[:MAX_LISTED])}" for kind, n in faults.items() if n]:
            raise ValueError(f"state_dict does not fit {self.class_name}; {'; '.join(told)}")
        self.params = fill(
            self.params,
            [
                like(leaf, to_flax(cast(Any, found[name]), path)) if name in found else leaf
                for name, (path, leaf) in zip(names, leaves)
            ],
        )
        return IncompatibleKeys(missing, unknown)

    def parameters(self, recurse: bool = True) -> Iterator[Parameter]:
        """Yields the parameters, see `Parameter`; `model.params` is the tree that JAX uses."""
        return (parameter for _, parameter in self.named_parameters())

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Parameter]]:
        """Yields the names and the parameters."""
        start = f"{prefix}." if prefix else ""
        for path, _ in ordered_leaves(self.params):
            parameter = Parameter(self, path)
            yield f"{start}{parameter.name}", parameter

    def buffers(self, recurse: bool = True) -> Iterator[Parameter]:
        """Yields nothing: what PyTorch holds as buffers is computed, or a parameter."""
        return iter(())

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Parameter]]:
        """Yields nothing, see `buffers`."""
        return iter(())

    def get_parameter(self, target: str) -> Parameter:
        """Returns the parameter of a name.

        Raises:
            AttributeError: there is none.
        """
        found = dict(self.named_parameters())
        if target not in found:
            raise AttributeError(f"{self.class_name} has no parameter {target!r}")
        return found[target]

    def get_input_embeddings(self) -> Embedding:
        """Returns the table of a text encoder's token embeddings.

        `weight` is a parameter, into which rows can be written.

        Raises:
            ValueError: the model reads no tokens.
        """
        for name, parameter in self.named_parameters():
            if name.endswith(("token_embedding.weight", "embed_tokens.weight", "shared.weight")):
                return Embedding(parameter)
        raise ValueError(f"{self.class_name} has no table of token embeddings")

    def resize_token_embeddings(
        self,
        new_num_tokens: int | None = None,
        pad_to_multiple_of: int | None = None,
        mean_resizing: bool = True,
    ) -> Embedding:
        """Gives a CLIP text encoder's table as many rows, and returns the table.

        New rows are the mean of the others, which programs overwrite.

        Args:
            new_num_tokens: the number of rows, such as len(tokenizer); None for the present one.
            pad_to_multiple_of: the number that the rows are filled up to a multiple of.
            mean_resizing: accepted, as transformers' argument.

        Raises:
            ValueError: the model is no CLIP text encoder of diffusax's own.
        """
        if not has_table(self):
            raise ValueError(f"{self.class_name} is no CLIP text encoder, whose table can grow")
        table = self.get_input_embeddings().weight
        count = len(table) if new_num_tokens is None else int(new_num_tokens)
        if pad_to_multiple_of:
            count = -(-count // pad_to_multiple_of) * pad_to_multiple_of
        before = table.numpy()
        if count != len(before):
            mean = before.astype(np.float32).mean(0, keepdims=True)
            more = np.repeat(mean, max(count - len(before), 0), axis=0)
            rows = np.concatenate([before[:count], more.astype(before.dtype)])
            replace_table(self, like(table.value, rows))
        return self.get_input_embeddings()

    def to_json_string(self) -> str:
        """Returns the contents of config.json."""
        return json.dumps(config_of(self.network), indent=2, sort_keys=True) + "\n"

    def save_config(self, save_directory: str | Path, **_: Any) -> None:
        """Writes config.json into a folder."""
        Path(save_directory).mkdir(parents=True, exist_ok=True)
        write_json(Path(save_directory) / "config.json", config_of(self.network))

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


def _attentions(params: Any) -> list[str]:
    """Returns the paths of the layers that have queries."""
    queries = ("to_q", "to_qkv_mlp_proj")
    paths = [path for path, _ in ordered_leaves(params)]
    found = (path[:i] for path in paths for i, part in enumerate(path) if part.key in queries)
    return list(dict.fromkeys(map(path_name, found)))


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
