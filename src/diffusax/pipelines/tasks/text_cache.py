"""The embeddings of texts, kept for calls that encode the same ones."""

import collections
import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from diffusax.models.adapters.low_rank import Layers
from diffusax.models.network import Network, Params
from diffusax.pipelines.families import Family
from diffusax.pipelines.plan.plan import Prompt, Tokens
from diffusax.pipelines.tasks.prompts import encode_texts
from diffusax.runtime.copies import Copyable


class TextCache(Copyable):
    """The embeddings of the last texts, each of which is encoded by itself.

    So they are the same bits whatever other texts a call has, and the empty negative prompt is
    encoded once. The cache keeps neither the parameters of text encoders nor adapters in memory.
    """

    fresh = ("_lock", "_found")

    def __init__(self, size: int = 256):
        """Makes an empty cache. size: the number of texts that it keeps."""
        self._size = size
        self._found: collections.OrderedDict[Any, tuple[Prompt, _Arrays]]
        self._found = collections.OrderedDict()
        self._lock = threading.Lock()

    def encode(
        self,
        family: Family,
        encoders: tuple[Network, ...],
        params: tuple[Params, ...],
        tokens: Tokens,
        adapters: tuple[Layers | None, ...] = (),
        *,
        groups: int = 1,
        clip_skip: int | None = None,
        ready: Callable[[], tuple[Params, ...]] | None = None,
    ) -> tuple[Prompt, ...]:
        """Encodes like `encode_texts`.

        ready: returns the parameters on their devices, where `params` lie in the host's memory; it
        is called if a text is not in the cache.
        """
        n = len(tokens.ids[0]) // groups
        load = functools.cache(ready or (lambda: params))
        arrays = _Arrays((params, adapters))
        found = [
            self._one(
                (family, encoders, arrays),
                jax.tree.map(lambda x, i=i: x[i : i + 1], tokens),
                adapters,
                skip,
                load,
            )
            for group in range(groups)
            for i in range(group * n, (group + 1) * n)
            for skip in [None if group else clip_skip]
        ]
        if n == 1:
            return tuple(found)
        parts = (found[g * n : (g + 1) * n] for g in range(groups))
        return tuple(jax.tree.map(lambda *x: jnp.concatenate(x), *part) for part in parts)

    def _one(
        self,
        model: "tuple[Family, tuple[Network, ...], _Arrays]",
        tokens: Tokens,
        adapters: tuple[Layers | None, ...],
        clip_skip: int | None,
        load: Callable[[], tuple[Params, ...]],
    ) -> Prompt:
        family, encoders, arrays = model
        leaves = tuple((x.shape, np.asarray(x).tobytes()) for x in jax.tree.leaves(tokens))
        key = encoders, arrays.ids, leaves, jax.tree.structure(tokens), clip_skip
        with self._lock:
            # Other arrays may have got the identity of those that are no more.
            if key in self._found and self._found[key][1].alive():
                self._found.move_to_end(key)
                return self._found[key][0]
        given = family, encoders, load(), tokens, adapters
        (prompt,) = encode_texts(*given, clip_skip=clip_skip)
        with self._lock:
            self._found[key] = prompt, arrays
            self._found.move_to_end(key)
            while len(self._found) > self._size:
                self._found.popitem(last=False)
        return prompt


class _Arrays:
    """The arrays of trees by their identity, which keeps none of them in memory."""

    def __init__(self, trees: Any):
        leaves = jax.tree.leaves(trees)
        self.ids = tuple(map(id, leaves))
        self._references = tuple(map(weakref.ref, leaves))

    def alive(self) -> bool:
        """Returns whether all are still in memory, and so the only ones with their identity."""
        return all(reference() is not None for reference in self._references)
