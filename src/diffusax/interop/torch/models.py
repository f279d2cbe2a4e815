"""Converts modules of diffusers and transformers to models of diffusax, with their parameters."""

import json
import logging
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
import torch
from jax.sharding import Mesh

from diffusax.checkpoints.networks import network_of, placing
from diffusax.checkpoints.tree import checkpoint_name, copied, fit_params, match_names, put_array
from diffusax.interop.torch.compat import (
    forward_hooks,
    forward_pre_hooks,
    has_accelerate_hook,
    uncompiled,
)
from diffusax.interop.torch.compiling import CompiledMethod
from diffusax.interop.torch.networks import (
    ALTERNATIVE,
    TorchAutoencoder,
    TorchConfig,
    TorchNetwork,
    TorchTextEncoder,
    TorchUNet,
    floating_tensors,
)
from diffusax.interop.torch.tensors import to_array
from diffusax.models import MODELS
from diffusax.models.network import Network, Params
from diffusax.networks import Model
from diffusax.runtime.devices.mesh import param_sharding

log = logging.getLogger(__name__)

_LIBRARIES = ("diffusers", "torch", "transformers")
_PROCESSORS = (
    "AttnProcessor",
    "AttnProcessor2_0",
    "Flux2AttnProcessor",
    "Flux2ParallelSelfAttnProcessor",
    "Flux3AttnProcessor",
    "FluxAttnProcessor",
    "QwenDoubleStreamAttnProcessor2_0",
    "QwenImage21AttnProcessor",
    "QwenImage21FlexAttnProcessor",
    "Krea2AttnProcessor",
    "SlicedAttnProcessor",
    "XFormersAttnProcessor",
    "ZSingleStreamAttnProcessor",
)
"""The classes of attention processors that compute plain attention, in one way or another."""
_FREEU = ("s1", "s2", "b1", "b2")


class Held(NamedTuple):
    """The tensor of a module; see `checkpoints.tree.Stored`."""

    path: str
    tensor: torch.Tensor
    dtype: np.dtype
    shape: tuple[int, ...]


def to_model(
    name: str, module: torch.nn.Module, *, dtype: Any = None, device: Any = None, factor: int = 8
) -> Model:
    """Converts a component of a pipeline to a model: diffusax's own network, or the module itself.

    Args:
        name: the component's name.
        module: a module of diffusers or transformers, or one that is called as theirs.
        dtype: the dtype of the parameters; None keeps the module's.
        device: a device for `jax.device_put`, or a mesh.
        factor: pixels per latent, for an autoencoder that diffusax does not have.

    Raises:
        ValueError: its parameters are offloaded or quantised, or diffusax has nothing like it.
    """
    module = uncompiled(module)
    tensors = [*module.parameters(), *module.buffers()]
    if any(tensor.is_meta for tensor in tensors):
        raise ValueError(
            f"{name} has parameters that are not in memory; load it without offloading"
        )
    network = native_network(name, module)
    if network is None:
        foreign: Any = _foreign_network(name, module, factor)
        return Model(foreign, _foreign_params(foreign, dtype, device))
    model = Model(network, _native_params(name, network, module, dtype, device))
    _take_switches(model, module)
    return model


def native_network(name: str, module: torch.nn.Module) -> Network | None:
    """Returns diffusax's network that computes the same as a module; None where there is none."""
    reason = _changed(module)
    kind = type(module).__name__
    if reason is None and kind in MODELS:
        try:
            network = network_of(kind, _options(module), source=f"{name}'s config")
            if _fits(network, module):
                return network
            reason = "it has other parameters than its config tells of"
        except ValueError as error:
            reason = str(error)
    log.info("%s runs as a PyTorch module: %s", name, reason or f"diffusax has no {kind}")
    return None


def _changed(module: torch.nn.Module) -> str | None:
    """Returns what makes a module differ from its class and config, or None."""
    for part in module.modules():
        kind = type(part)
        if not _is_of_libraries(kind):
            return f"{kind.__name__} is a class of its own"
        for method in ("forward", "encode", "decode"):
            patch = vars(part).get(method)
            # accelerate's hooks move tensors between devices.
            harmless = isinstance(patch, CompiledMethod) or has_accelerate_hook(part)
            if patch is not None and not harmless:
                return f"{kind.__name__}.{method} is replaced"
        hooks = (*forward_hooks(part).values(), *forward_pre_hooks(part).values())
        if not all(_is_of_libraries(hook) for hook in hooks):
            return f"{kind.__name__} has a forward hook"
        processor = type(vars(part).get("processor"))
        if processor.__name__ not in (*_PROCESSORS, "NoneType"):
            return f"{kind.__name__} has a {processor.__name__}"
    return None


def _is_of_libraries(value: Any) -> bool:
    return str(getattr(value, "__module__", None)).partition(".")[0] in _LIBRARIES


def _fits(network: Network, module: torch.nn.Module) -> bool:
    leaves, _ = jax.tree_util.tree_flatten_with_path(network.shapes)
    wanted = {checkpoint_name(path) for path, _ in leaves}
    found, _ = match_names(network.module_class, wanted, [_held(module)])
    return wanted == set(found)


def _native_params(
    name: str, network: Network, module: torch.nn.Module, dtype: Any, device: Any
) -> Params:
    def read(held: Held, *_: Any) -> Iterator[np.ndarray]:
        yield to_array(held.tensor)

    return fit_params(
        network.module_class,
        network.shapes,
        [_held(module, name)],
        read,
        where=f"the {name} of the PyTorch pipeline",
        dtype=dtype,
        device=placing(network, device),
    )


def _held(module: torch.nn.Module, name: str = "") -> dict[str, Held]:
    return {
        key: Held(name, tensor, _dtype(tensor), tuple(tensor.shape))
        for key, tensor in module.state_dict().items()
    }


def _dtype(tensor: torch.Tensor) -> np.dtype:
    return to_array(tensor.new_empty(0)).dtype


def _foreign_network(name: str, module: torch.nn.Module, factor: int) -> TorchNetwork:
    options = _options(module)
    if options.get("use_attention_mask"):
        raise ValueError(f"{name} asks for attention masks, which diffusax does not make")
    if name == "vae":
        options = {"sample_size": 512, **options, "downsampling": factor}
    kinds: dict[str, Any] = {"unet": TorchUNet, "vae": TorchAutoencoder}
    kinds |= dict.fromkeys(("text_encoder", "text_encoder_2"), TorchTextEncoder)
    if name not in kinds:
        reason = f"diffusax has no {type(module).__name__} like the pipeline's {name}"
        raise ValueError(f"{reason}; {ALTERNATIVE}")
    return kinds[name](module, TorchConfig(**{k: _frozen(v) for k, v in options.items()}))


def _foreign_params(network: TorchNetwork, dtype: Any, device: Any) -> Params:
    made: dict[int, jax.Array] = {}

    def put(name: str, tensor: torch.Tensor) -> jax.Array:
        # A tensor that has several names is stored once.
        if id(tensor) not in made:
            array = to_array(tensor)
            array = copied(array, dtype or jax.dtypes.canonicalize_dtype(array.dtype))
            sharded = isinstance(device, Mesh)
            place = param_sharding(device, name, array.shape) if sharded else device
            made[id(tensor)] = put_array(array, place)
        return made[id(tensor)]

    return {name: put(name, tensor) for name, tensor in floating_tensors(network.module)}


def _options(module: Any) -> dict[str, Any]:
    """Returns a module's config as in its config.json."""
    config = getattr(module, "config", None)
    if config is None:
        raise ValueError(f"{type(module).__name__} has no config; {ALTERNATIVE}")
    if hasattr(config, "to_json_string"):
        return json.loads(config.to_json_string())
    return {key: value for key, value in dict(config).items() if not key.startswith("_")}


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value


def _take_switches(model: Model, module: torch.nn.Module) -> None:
    """Turns on the switches that are on in the module."""
    if getattr(module, "use_tiling", False):
        model.enable_tiling()
    blocks = getattr(module, "up_blocks", None)
    numbers = [getattr(blocks[0], name, None) for name in _FREEU] if blocks else [None]
    if all(numbers):
        model.enable_freeu(*numbers)
