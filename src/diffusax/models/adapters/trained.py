"""Low-rank adapters in training: LoRA (Hu et al. 2021) with dropout, and DoRA (Liu et al. 2024).

A layer computes y = x W + b + s (drop(x) A) B. With DoRA the sum W + s A B gets the lengths of its
columns m anew, y = x (W + s A B) m / |W + s A B| + b, and the lengths that are divided by are taken
for constants, as in PEFT (tuners/lora/dora.py).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from diffusax.models.adapters.low_rank import Base
from diffusax.models.ops.conv import Padding, conv2d
from diffusax.models.ops.matmul import matmul
from diffusax.models.quantized import Kernel, dense
from diffusax.runtime.devices.splitting import split_widths


class TrainedLayer(NamedTuple):
    """The adapter of one layer in training."""

    down: jax.Array
    """A: c r, or kh kw c r with the size of the convolution's kernel."""
    up: jax.Array
    """B: r d."""
    scale: float
    """s: alpha / r."""
    magnitude: jax.Array | None = None
    """DoRA's lengths of the columns m, d, float32; None without it."""
    dropout: float = 0.0
    """The share of the numbers of x that A does not see."""
    keys: jax.Array | None = None
    """A random key for each row of x, b; None where nothing is dropped."""

    def linear(self, x: jax.Array, base: Base) -> jax.Array:
        """Returns what the adapter adds to a linear layer. x: b ... c -> b ... d."""
        return self._added(x, base, matmul)

    def conv(self, x: jax.Array, base: Base, *, stride: int, padding: Padding) -> jax.Array:
        """Returns what the adapter adds to a convolution. x: b h w c -> b h' w' d."""
        return self._added(x, base, lambda x, k: conv2d(x, k, stride=stride, padding=padding))

    def columns(self, widths: Sequence[int]) -> list["TrainedLayer"]:
        """Returns the adapters of the layers that stand side by side in one, of these widths."""
        ups = split_widths(self.up, widths)
        magnitudes: Sequence[jax.Array | None] = [None] * len(ups)
        if self.magnitude is not None:
            magnitudes = split_widths(self.magnitude, widths)
        return [self._replace(up=up, magnitude=own) for up, own in zip(ups, magnitudes)]

    def _added(
        self, x: jax.Array, base: Base, product: Callable[[jax.Array, Kernel], jax.Array]
    ) -> jax.Array:
        x = self.dropped(x)
        lora = matmul(product(x, self.down), self.up) * self.scale
        if self.magnitude is None:
            return lora
        if self.keys is not None:
            own = product(x, base.kernel)
        else:
            own = base.y if base.bias is None else base.y - base.bias
        lengths = self._lengths(base.kernel)
        # A column of zeros has the length zero, and stays one.
        gain = self.magnitude / jnp.where(lengths > 0, lengths, 1)
        return (gain - 1).astype(x.dtype) * own + gain.astype(x.dtype) * lora

    def dropped(self, x: jax.Array) -> jax.Array:
        """Drops numbers of each row by the row's key alone, and scales up the others."""
        if self.keys is None:
            return x
        keep = 1 - self.dropout
        probability = np.float32(keep)
        draw = jax.vmap(lambda key: jax.random.bernoulli(key, probability, x.shape[1:]))
        kept = draw(self.keys)
        return jnp.where(kept, x / keep, 0)

    def _lengths(self, kernel: Kernel) -> jax.Array:
        """Returns the lengths of the columns of W + s A B, d, float32, as constants."""
        down, up = (x.astype(jnp.float32) for x in (self.down, self.up))
        total = dense(kernel).astype(jnp.float32) + jnp.matmul(down, up) * self.scale
        return jax.lax.stop_gradient(column_lengths(total))


def column_lengths(kernel: Kernel) -> jax.Array:
    """Returns the norm of a kernel ... c d over all that goes to each output, d."""
    return jnp.sqrt(jnp.sum(jnp.square(dense(kernel)), axis=tuple(range(kernel.ndim - 1))))


class TrainedAdapters(NamedTuple):
    """The adapters of a network in training."""

    layers: Mapping[str, Mapping[str, Any]]
    """The parameters by the layers' paths: down, up and with DoRA magnitude; see `TrainedLayer`."""
    scales: Mapping[str, float]
    """alpha / r by path."""
    dropout: float = 0.0
    keys: Any = None
    """A random key for each row of the network's batch, b; None where nothing is dropped."""

    def by_layer(self) -> Mapping[str, TrainedLayer]:
        """Returns the adapter of each layer, with random keys of its own."""

        def keys(number: int) -> Any:
            if self.keys is None:
                return None
            return jax.vmap(lambda key: jax.random.fold_in(key, number))(self.keys)

        return {
            path: TrainedLayer(
                **self.layers[path],
                scale=self.scales[path],
                dropout=self.dropout,
                keys=keys(number),
            )
            for number, path in enumerate(sorted(self.layers))
        }

    def for_rows(self, rows: int) -> "TrainedAdapters":
        """Returns the adapters for more rows, of which those that follow each other share a key."""
        if self.keys is None:
            return self
        return self._replace(keys=self.keys[jnp.arange(rows) // (rows // len(self.keys))])
