"""Guidance as weights over branches: predictions of one network under different conditions.

Branch 0 has every condition. The guided prediction is y0 + sum_j w_j (y0 - y_j): k branches have k
- 1 weights, and weights of zero mean no guidance. A call may bring a rule of its own instead.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from diffusax.runtime.functions import function_tree


def classifier_free(scale: float) -> tuple[float, ...]:
    """Returns the weight of classifier-free guidance (Ho and Salimans 2022).

    The scale is Imagen's, where 1 is no guidance.
    """
    return (scale - 1.0,)


def above_one(scale: float) -> tuple[float, ...]:
    """Returns the weight of classifier-free guidance; none for a scale of 1 and less."""
    return () if scale <= 1 else (scale - 1.0,)


def above_zero(scale: float) -> tuple[float, ...]:
    """Returns the weight of guidance by a scale that counts from 0; none for 0 and less.

    Source: Ho and Salimans 2022, equation 6, as Z-Image's pipelines have it.
    """
    return () if scale <= 0 else (scale,)


def instruct(text_scale: float, image_scale: float) -> tuple[float, ...]:
    """Returns the weights of InstructPix2Pix's guidance (Brooks et al. 2023, equation 3).

    The branches are (text, image), (none, image) and (none, none).
    """
    return (text_scale - image_scale, image_scale - 1.0)


def weights_by_row(
    call: Any, weights: Sequence[float], timesteps: np.ndarray, padded: int
) -> np.ndarray:
    """Returns the weights of guidance at each row of a call's run, padded k-1.

    They are zero in padding rows, outside guidance_start and guidance_end, in fractions of the rows
    (Kynkäänniemi et al. 2024), and after the time cfg_truncation, where 0 is noise and 1 an image
    (diffusers pipeline_z_image.py, the denoising loop).

    timesteps: those of the rows, from 1000 to 0. padded: the rows of the table with its padding.
    """
    rows, last = len(timesteps), call.cfg_truncation
    table = np.zeros((padded, len(weights)), np.float32)
    table[round(call.guidance_start * rows) : round(call.guidance_end * rows)] = weights
    if last is not None and last <= 1:
        times = (1000 - timesteps.astype(np.float32)) / 1000
        table[:rows][times > last] = 0
    return table


def active_branches(weights: jax.Array, b: int) -> jax.Array:
    """Returns which branches of guidance a row reads, b k: without weights only the first.

    weights: k-1, or b k-1.
    """
    each = jnp.broadcast_to(weights, (b, weights.shape[-1]))
    guided = jnp.broadcast_to((each != 0).any(1, keepdims=True), each.shape)
    return jnp.concatenate([jnp.ones((b, 1), bool), guided], axis=1)


def last_guided_row(weights: np.ndarray) -> int:
    """Returns the row after the last one with guidance, 0 without any. weights: n k-1."""
    guided = np.flatnonzero(np.any(weights, axis=1))
    return int(guided[-1]) + 1 if len(guided) else 0


class GuidanceStep(NamedTuple):
    """What a rule of guidance is told of one image at one row, besides its predictions."""

    weights: jax.Array
    """The weights of guidance, k-1: of classifier-free guidance the scale less one, and of
    InstructPix2Pix those of `instruct`."""
    row: jax.Array
    """The number of the row in the run, counted from 0, a scalar."""
    timestep: jax.Array
    """The network's time input, a scalar."""
    x: jax.Array
    """The latents as the network is given them, h w c."""

    @property
    def scale(self) -> jax.Array:
        """The guidance scale of the call, a scalar, where 1 is no guidance."""
        return 1 + self.weights.sum()


def as_rule(guide: Any) -> Any:
    """Returns the rule of guidance that a call brings, as a tree whose leaves are its numbers.

    Args:
        guide: a function (predictions: k h w c, step: `GuidanceStep`) -> prediction h w c, which is
            traced once for each image size and the like; or an instance of a class with such a
            `__call__` that is registered with JAX as a tree (`jax.tree_util.register_dataclass`),
            whose leaves are data, so that other numbers compile nothing. None for none.

    Raises:
        ValueError: it cannot be called or hashed, or a leaf is not a number.
    """
    if guide is None:
        return None
    return function_tree("guide", "(predictions, step)", guide, _number)


def _number(leaf: Any) -> Any:
    return leaf.astype(jnp.float32) if isinstance(leaf, jax.Array) else np.asarray(leaf, np.float32)


def guidance_by(
    own: Callable[..., jax.Array],
    rule: Any,
    row: jax.Array,
    timestep: jax.Array,
    x: jax.Array,
    *,
    per_image: bool = False,
) -> Callable[..., jax.Array]:
    """Returns the function (predictions b k h w c, inputs of the row) -> b h w c that guides.

    Args:
        own: the denoiser's `guide`, which is used without a rule.
        rule: a rule from `as_rule`, or None.
        row: the number of the row, a scalar or b.
        timestep: a scalar or b.
        x: the scaled latents, b h w c.
        per_image: whether the leaves of the rule have a first axis of b images.
    """
    if rule is None:
        return own

    def combine(predictions: jax.Array, inputs: Any) -> jax.Array:
        b, k = predictions.shape[:2]
        if k == 1:
            return predictions[:, 0]
        weights = jnp.broadcast_to(inputs.weights, (b, k - 1))
        steps = GuidanceStep(
            weights, jnp.broadcast_to(row, (b,)), jnp.broadcast_to(timestep, (b,)), x
        )
        axes = (0 if per_image else None, 0, 0)
        guided = jax.vmap(_guide_image, in_axes=axes)(rule, predictions, steps)
        return rescale_guided(predictions[:, 0], guided, inputs.rescale)

    return combine


def _guide_image(rule: Any, predictions: jax.Array, step: GuidanceStep) -> jax.Array:
    """Applies a rule to one image, k h w c -> h w c, in rows with guidance.

    Raises:
        ValueError: the rule returns another shape.
    """
    guided = rule(predictions, step)
    shape = getattr(guided, "shape", None)
    if shape != predictions.shape[1:]:
        raise ValueError(
            "guide must return one prediction, of the shape (height, width, channels) "
            f"{predictions.shape[1:]} (got {type(guided).__name__ if shape is None else shape})"
        )
    return jnp.where((step.weights != 0).any(), guided.astype(jnp.float32), predictions[0])


def apply_guidance(y: jax.Array, weights: jax.Array, rescale: jax.Array) -> jax.Array:
    """Returns the guided prediction.

    Args:
        y: b k ..., float32, with every condition in branch 0.
        weights: k-1, or b k-1 where each image has its own.
        rescale: a scalar or b; phi of Lin et al. 2024, section 3.4, zero for none.

    Returns:
        b ...
    """
    first = y[:, 0]
    if y.shape[1] == 1:
        return first
    ones = (1,) * (first.ndim - 1)
    w = jnp.broadcast_to(weights, (y.shape[0], weights.shape[-1]))
    guided = first + sum(
        w[:, j - 1].reshape(-1, *ones) * (first - y[:, j]) for j in range(1, y.shape[1])
    )
    return rescale_guided(first, guided, rescale)


def keep_norms(first: jax.Array, guided: jax.Array, patch: int) -> jax.Array:
    """Scales guided predictions so that each token has the norm of the first branch's.

    Source: diffusers pipeline_qwenimage.py, the denoising loop.

    Args:
        first: b h w c, the predictions with every condition.
        guided: b h w c, the guided predictions.
        patch: the rows and columns of latents that are a token.
    """
    b, h, w, c = guided.shape
    cut = b, h // patch, patch, w // patch, patch, c

    def norms(y: jax.Array) -> jax.Array:
        return jnp.sqrt(jnp.square(y.reshape(cut)).sum((2, 4, 5), keepdims=True))

    own = norms(guided)
    ratio = jnp.where(own > 0, norms(first) / jnp.where(own > 0, own, 1), 1)
    return (guided.reshape(cut) * ratio).reshape(guided.shape)


def limit_norm(first: jax.Array, guided: jax.Array, limit: jax.Array) -> jax.Array:
    """Scales guided predictions down whose norm is more than `limit` times the first branch's.

    Source: diffusers pipeline_z_image.py, cfg_normalization.

    Args:
        first: b ..., the predictions with every condition.
        guided: b ..., the guided predictions.
        limit: a scalar or b; zero for none.
    """
    axes = tuple(range(1, guided.ndim))
    own, most = (jnp.sqrt(jnp.square(y).sum(axes, keepdims=True)) for y in (guided, first))
    limit = jnp.broadcast_to(limit, first.shape[:1]).reshape(most.shape)
    most = most * limit
    return jnp.where((limit > 0) & (own > most), guided * (most / own), guided)


def rescale_guided(first: jax.Array, guided: jax.Array, rescale: jax.Array) -> jax.Array:
    """Brings guided predictions nearer to the deviation of the first branch's.

    A prediction without deviation, such as zeros, stays as it is. Source: Lin et al. 2024, section
    3.4.

    Args:
        first: b ..., the predictions with every condition.
        guided: b ..., the guided predictions.
        rescale: a scalar or b; phi, zero for none.
    """
    axes = tuple(range(1, guided.ndim))
    deviation = guided.std(axes, keepdims=True, ddof=1)
    wanted = first.std(axes, keepdims=True, ddof=1)
    ratio = jnp.where(deviation > 0, wanted / jnp.where(deviation > 0, deviation, 1), 1)
    phi = jnp.broadcast_to(rescale, (first.shape[0],)).reshape(-1, *(1,) * len(axes))
    return jnp.where(phi > 0, guided * (phi * ratio + 1 - phi), guided)
