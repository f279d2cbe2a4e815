"""The IP-Adapters of a pipeline, with their scales and their place on the devices."""

import dataclasses
import threading
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from diffusax.checkpoints.ip_adapter import IPAdapter
from diffusax.models.image_prompts import Layers, cross_attentions
from diffusax.models.network import Network, Params, cast_params
from diffusax.pipelines.ip_adapter_scales import read_scale
from diffusax.pipelines.placement import device_of, put_params
from diffusax.runtime.copies import Copyable
from diffusax.runtime.switches import is_traced


@dataclasses.dataclass(frozen=True, eq=False)
class _Placed:
    """The parameters of IP-Adapters on the devices of a pipeline."""

    key: Any
    """What they were put there for."""
    projections: tuple[Params, ...]
    layers: tuple[Layers, ...]


class IPAdapterStore(Copyable):
    """The IP-Adapters that are loaded, in order. Pipelines that share their components share it."""

    fresh = ("_lock", "_cache")

    def __init__(self) -> None:
        self._adapters: tuple[IPAdapter, ...] = ()
        self._scales: tuple[np.ndarray, ...] = ()
        self._cache: list[_Placed] = []
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._adapters)

    @property
    def adapters(self) -> tuple[IPAdapter, ...]:
        """The IP-Adapters."""
        return self._adapters

    @property
    def scales(self) -> tuple[np.ndarray, ...]:
        """The scale of each IP-Adapter in each cross-attention, l n: see `read_scale`."""
        return self._scales

    def set(self, adapters: Sequence[IPAdapter]) -> None:
        """Replaces the IP-Adapters by others, at a scale of one; by none for an empty sequence."""
        with self._lock:
            self._adapters, self._cache = tuple(adapters), []
            self._scales = tuple(np.ones((len(one.layers), 1), np.float32) for one in adapters)

    def set_scales(self, scales: Any, unet: Network) -> None:
        """Sets the scales.

        scales: those of `read_scale`, one or a list with one for each IP-Adapter. unet: the network
        of the UNet.

        Raises:
            ValueError: there are not as many as IP-Adapters, or one is not valid.
        """
        several = list(scales) if isinstance(scales, list | tuple) else [scales] * len(self)
        if not len(self):
            raise ValueError("there is no IP-Adapter whose scale to set; load_ip_adapter loads one")
        if len(several) != len(self):
            raise ValueError(
                f"scale must be one for all or a list with one for each of {len(self)} "
                f"IP-Adapters (got {len(several)})"
            )
        paths = list(cross_attentions(unet))
        self._scales = tuple(read_scale(scale, paths) for scale in several)

    def snapshot(self) -> "IPAdapterStore":
        """Returns a store with the same IP-Adapters, of which later changes are no concern."""
        copy = IPAdapterStore()
        with self._lock:
            copy._adapters, copy._scales = self._adapters, self._scales
            copy._cache, copy._lock = self._cache, self._lock
        return copy

    def placed(self, c: Any) -> _Placed:
        """Returns the parameters in the dtype and on the devices of a pipeline's denoiser.

        They are the same objects until the IP-Adapters, the dtype or the devices change.
        """
        name = c.denoiser.components[0]
        leaf = jax.tree.leaves(c.params[name])[0]
        with self._lock:
            cache = self._cache
            key = leaf.dtype, c.mesh, None if c.mesh is not None else device_of(leaf)
            # In a trace only shapes are asked for.
            if not cache or (cache[0].key != key and not is_traced(leaf)):
                with jax.ensure_compile_time_eval():
                    cache[:] = [self._put(c, name, key)]
            return cache[0]

    def _put(self, c: Any, name: str, key: Any) -> _Placed:
        dtype, mesh, device = key
        projections = [cast_params(one.params, dtype) for one in self._adapters]
        layers = [cast_params(one.layers, dtype) for one in self._adapters]
        if mesh is None:
            projections, layers = jax.device_put((projections, layers), device)
        else:
            nets = [one.projection for one in self._adapters]
            projections = [
                put_params(mesh, "image_encoder", net, params)
                for net, params in zip(nets, projections, strict=True)
            ]
            layers = [put_params(mesh, "denoiser", c.networks[name], one) for one in layers]
        return _Placed(key, tuple(projections), tuple(layers))
