"""What networks are given, checked while they are traced: a wrong layout is one sentence."""

from typing import Any

import jax.numpy as jnp


def check_map(name: str, x: Any, channels: int) -> None:
    """Holds pictures or latents against their layout, b h w c.

    Where height or width is as large as the channels, another layout cannot be told from this one.

    Args:
        name: of the argument.
        x: what was given for it.
        channels: how many it must have.

    Raises:
        ValueError: it has not four axes, or the last are not the channels.
    """
    shape = _shape(x)
    if len(shape) == 4 and shape[-1] == channels:
        return
    mend = ""
    if len(shape) == 4 and shape[1] == channels:
        mend = f"; channels come last here: {name}.transpose(0, 2, 3, 1)"
    raise ValueError(
        f"{name} must have shape (batch, height, width, {channels}) (got {_given(x)}){mend}"
    )


def check_tokens(name: str, x: Any, widths: set[int] | None) -> None:
    """Holds the outputs of a text encoder against their layout, b s d.

    Args:
        name: of the argument.
        x: what was given for it.
        widths: what d may be; None for anything.

    Raises:
        ValueError: it has not three axes, or another width.
    """
    shape = _shape(x)
    if len(shape) != 3 or (widths is not None and shape[-1] not in widths):
        width = "width" if widths is None else " or ".join(map(str, sorted(widths)))
        raise ValueError(f"{name} must have shape (batch, tokens, {width}) (got {_given(x)})")


def check_ids(name: str, x: Any) -> None:
    """Holds tokens against their layout, b t.

    Raises:
        ValueError: they are no integers, or have not two axes.
    """
    if len(_shape(x)) != 2 or not jnp.issubdtype(x.dtype, jnp.integer):
        raise ValueError(f"{name} must be integers of shape (texts, tokens) (got {_given(x)})")


def _shape(x: Any) -> tuple[int, ...]:
    return tuple(getattr(x, "shape", ()))


def _given(x: Any) -> str:
    return f"{x.dtype} of shape {_shape(x)}" if hasattr(x, "dtype") else type(x).__name__
