"""The IP-Adapters of a pipeline, with their scales and their place on the devices."""

import dataclasses
import math
import re
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from diffusax.boundary.convert import shortened
from diffusax.checkpoints.ip_adapter import IPAdapter
from diffusax.models.adapters.image_prompts import ImageLayers, cross_attentions
from diffusax.models.network import Network, Params, cast_params
from diffusax.models.parameter_tree import first_parameter
from diffusax.pipelines.families.placement import device_of, put_params
from diffusax.runtime.copies import Copyable
from diffusax.runtime.switches import is_traced


@dataclasses.dataclass(frozen=True, eq=False)
class _Placed:
    """The parameters of IP-Adapters on the devices of a pipeline."""

    key: Any
    """What they were put there for."""
    projections: tuple[Params, ...]
    layers: tuple[ImageLayers, ...]


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
        leaf = first_parameter(c.params[name])
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


_PATH = re.compile(r"(down|up)_blocks\.(\d+)\.attentions\.(\d+)\.|mid_block\.attentions\.0\.")

Place = tuple[str, int, int]
"""The transformer of a cross-attention: down, mid or up, the block's and its own number."""


def read_scale(scale: Any, paths: Sequence[str]) -> np.ndarray:
    """Returns the scale of one IP-Adapter in each cross-attention, l n.

    n is 1 where all images have the same scale.

    Args:
        scale: a number; a list of numbers, one for each image with a mask; or a dictionary such as
            {"down": {"block_2": [0.0, 1.0]}, "mid": 0.5, "up": {"block_0": 1.0}}, as in diffusers'
            `set_ip_adapter_scale`: of down and up either one number, or for each block one, or one
            for each of its transformers. What a dictionary leaves out is zero.
        paths: the paths of the l cross-attentions in the UNet.

    Raises:
        ValueError: it is nothing of this kind, or names a block that the UNet lacks.
    """
    places = [_place(path) for path in paths]
    if isinstance(scale, Mapping):
        by_place = _by_place(scale, places)
        rows = [by_place[place] for place in places]
    else:
        rows = [_numbers(scale)] * len(places)
    lengths = {len(row) for row in rows} - {1}
    if len(lengths) > 1:
        raise ValueError(
            f"an IP-Adapter's scale must have as many numbers in each block (got {_shown(scale)})"
        )
    n = max(lengths, default=1)
    return np.array([row * n if len(row) == 1 else row for row in rows], np.float32)


def _place(path: str) -> Place:
    match = _PATH.match(path)
    assert match is not None
    direction, block, number = match.groups()
    return ("mid", 0, 0) if direction is None else (direction, int(block), int(number))


def _by_place(scale: Mapping[str, Any], places: Sequence[Place]) -> dict[Place, list[float]]:
    """Returns the numbers of each transformer."""
    if unknown := set(scale) - {"down", "mid", "up"}:
        raise ValueError(
            "an IP-Adapter's scale by block may have the keys 'down', 'mid' and 'up' (got "
            f"{', '.join(map(_shown, unknown))})"
        )
    found = {}
    for place in dict.fromkeys(places):
        direction, block, number = place
        own = scale.get(direction, 0.0)
        if direction == "mid":
            found[place] = _numbers(own)
            continue
        count = len({p for p in places if p[:2] == (direction, block)})
        blocks = {f"block_{p[1]}" for p in places if p[0] == direction}
        if isinstance(own, Mapping):
            if unknown := set(own) - blocks:
                raise ValueError(
                    f"an IP-Adapter's scale for {direction!r} may have the keys "
                    f"{', '.join(map(repr, sorted(blocks)))} "
                    f"(got {', '.join(map(_shown, unknown))})"
                )
            own = own.get(f"block_{block}", 0.0)
        own = list(own) if isinstance(own, list | tuple) else [own]
        if len(own) not in (1, count):
            raise ValueError(
                f"an IP-Adapter's scale for {direction}.block_{block} must have {count} entries, "
                f"one for each transformer (got {len(own)})"
            )
        found[place] = _numbers(own[number if len(own) > 1 else 0])
    return found


def _numbers(value: Any) -> list[float]:
    """Returns a number, or a list of numbers for each image, as a list."""
    values = list(value) if isinstance(value, list | tuple) else [value]
    for number in values:
        real = isinstance(number, int | float | np.number) and not isinstance(number, bool)
        if not real or not math.isfinite(number):
            raise ValueError(
                f"an IP-Adapter's scale must be a finite number (got {_shown(number)})"
            )
    if not values:
        raise ValueError("an IP-Adapter's scale must not be an empty list")
    return [float(number) for number in values]


def _shown(value: Any) -> str:
    """Writes a value for an error, in one line."""
    return " ".join(shortened(value).split())
