"""Adapters that all images of a run weigh alike, made ready once for all steps.

Where there is room for changed kernels, a layer's is W + A s B (Hu et al. 2021, section 4.1), and
steps compute what they do without adapters. The other layers compute x W + (x A) (s B), and those
that read one input share the product with A. Each piece of a run does so anew.
"""

import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from diffusax.models.adapters.image_prompts import cross_attentions
from diffusax.models.adapters.low_rank import Layers, Merged, Mixed
from diffusax.models.network import Network, Params
from diffusax.models.parameter_tree import replaced
from diffusax.pipelines.families import Denoiser
from diffusax.runtime.devices.chips import CHIPS
from diffusax.runtime.devices.host import in_host_memory
from diffusax.runtime.devices.memory import array_bytes, device_memory

_SHARE = 1 / 4
"""The part of a network's bytes that changed kernels may take."""
_MAX_BYTES = 2**31
"""The most bytes that changed kernels may take."""
_SMALL = 2
"""How many times a device has to hold the network to have room for changed kernels."""


def with_mixture(denoiser: Denoiser, params: Params, weights: jax.Array) -> Params:
    """Returns a denoiser's parameters with adapters that all images weigh alike.

    Args:
        denoiser: the denoiser.
        params: the parameters by component, and under "adapters" the layers of each one's adapters.
        weights: a, the weight of each of a adapters.
    """
    changed: dict[str, Params] = {}
    adapters: dict[str, Params] = {}
    for name, layers in params["adapters"].items():
        given = denoiser.networks[name], params[name], layers, weights
        changed[name], adapters[name] = mixed(*given)
    return {**params, **changed, "adapters": adapters}


def mixed(
    network: Network, params: Params, layers: Layers, weights: jax.Array
) -> tuple[Params, dict[str, Mixed | Merged]]:
    """Returns a network's parameters and adapters for rows that all weigh these alike."""
    found = {path: layer.mixed(weights) for path, layer in layers.items()}
    left: dict[str, Mixed | Merged] = dict(found)
    params, once = network.fitted(params), _once_a_run(network)
    for path in _with_room({path: found[path] for path in found if path not in once}, params):
        layer, own = _layer(params, path), found[path]
        at = tuple(path.split("."))
        params = replaced(params, (*at, "kernel"), own.merged(layer["kernel"]))
        if layer.get("bias") is None:
            left[path] = Merged(own.bias)
        else:
            params = replaced(params, (*at, "bias"), layer["bias"] + own.bias)
            del left[path]
    for paths in _read_together(network):
        if all(isinstance(left.get(path), Mixed) for path in paths):
            together = jnp.concatenate([found[path].down for path in paths], axis=-1)
            left[paths[0]] = found[paths[0]]._replace(together=together)
    return params, left


@functools.lru_cache(64)
def _once_a_run(network: Network) -> frozenset[str]:
    """Returns the paths of the layers that a run calls before its steps; see `project_context`."""
    paths = cross_attentions(network)
    return frozenset(f"{path}.{name}" for path in paths for name in ("to_k", "to_v"))


def _with_room(layers: Mapping[str, Mixed], params: Params) -> list[str]:
    """Returns the paths of the layers whose kernels a run changes, those of the smallest kernels.

    What adapters cost beside a kernel hardly depends on its size. A mesh that splits parameters
    has none, and neither have parameters in the host's memory.
    """
    shape, leaves = jax.sharding.get_abstract_mesh().shape, jax.tree.leaves(params)
    split = any(size > 1 for axis, size in shape.items() if axis != "data")
    whole, memory = sum(map(array_bytes, leaves)), _memory()
    if split or in_host_memory(leaves) or (memory is not None and whole * _SMALL > memory):
        return []
    room = min(whole * _SHARE, _MAX_BYTES)
    sizes = {path: _changeable_bytes(layer, params, path) for path, layer in layers.items()}
    chosen = []
    for path, size in sorted(sizes.items(), key=lambda item: item[1]):
        room -= size
        if room < 0:
            break
        chosen.append(path)
    return chosen


def _memory() -> float | None:
    """Returns the bytes of a device that a program is traced for, or None where they are unknown.

    It is zero where processes may have devices of different memory: their programs must agree.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device or jax.local_devices()[0]
    if (chip := CHIPS.get(device.device_kind)) is not None:
        return chip.memory * 1e9
    return device_memory(jax.local_devices()[0]) if jax.process_count() == 1 else 0


def _changeable_bytes(layer: Mixed, params: Params, path: str) -> float:
    """Returns the bytes of a layer's kernel; infinity for one that the product is not added to."""
    parameters = _layer(params, path)
    kernel: Any = parameters.get("kernel")
    plain = isinstance(kernel, jax.Array) and not in_host_memory(kernel)
    if not plain or kernel.shape != (*layer.down.shape[:-1], layer.up.shape[-1]):
        return math.inf
    # Only linear layers take a bias that is none of their parameters.
    takes_bias = kernel.ndim == 2 or parameters.get("bias") is not None
    return array_bytes(kernel) if takes_bias else math.inf


def _layer(params: Params, path: str) -> Mapping[str, Any]:
    for name in path.split("."):
        params = params[name]
    return params


@functools.lru_cache(64)
def _read_together(network: Network) -> tuple[tuple[str, ...], ...]:
    """Returns the paths of layers that read one input, by the modules' `reads_together`."""
    found = []
    for path, module in nnx.iter_modules(network.skeleton):
        groups = getattr(module, "reads_together", ())
        found += [tuple(".".join(map(str, (*path, name))) for name in group) for group in groups]
    return tuple(found)
