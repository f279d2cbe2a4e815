"""Checks networks' inputs while they are traced, so that a wrong layout gives a clear error."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np


def check_map(name: str, x: Any, channels: int) -> None:
    """Checks the layout b h w c of images or latents.

    If height or width equals the number of channels, a wrong layout may not be noticed.

    Args:
        name: the name of the argument.
        x: its value.
        channels: the number of channels that it must have.

    Raises:
        ValueError: it does not have four axes, or the last one is not the channels.
    """
    _check_layout(name, x, channels, "batch, height, width")


def check_video(name: str, x: Any, channels: int) -> None:
    """Checks the layout b f h w c of videos or their latents, like `check_map`.

    Raises:
        ValueError: it does not have five axes, the last one is not the channels, or there is no
            frame.
    """
    _check_layout(name, x, channels, "batch, frames, height, width")
    if _shape(x)[1] < 1:
        raise ValueError(f"{name} must have at least one frame (got {_given(x)})")


def _check_layout(name: str, x: Any, channels: int, axes: str) -> None:
    shape, count = _shape(x), axes.count(",") + 2
    if len(shape) == count and shape[-1] == channels:
        return
    mend = ""
    if len(shape) == count and shape[1] == channels:
        order = 0, *range(2, count), 1
        mend = f"; channels come last here: {name}.transpose{order}"
    raise ValueError(f"{name} must have shape ({axes}, {channels}) (got {_given(x)}){mend}")


def check_tokens(name: str, x: Any, widths: set[int] | None) -> None:
    """Checks the layout b s d of a text encoder's outputs.

    Args:
        name: the name of the argument.
        x: its value.
        widths: the possible values of d; None for any.

    Raises:
        ValueError: it does not have three axes, or has another width.
    """
    shape = _shape(x)
    if len(shape) != 3 or (widths is not None and shape[-1] not in widths):
        width = "width" if widths is None else " or ".join(map(str, sorted(widths)))
        raise ValueError(f"{name} must have shape (batch, tokens, {width}) (got {_given(x)})")


def check_rows(sample: Any, **others: Any) -> None:
    """Checks that inputs have a row for each row of the sample; a number is for all of them.

    Raises:
        ValueError: one has another number of rows, or a time has more axes.
    """
    rows = _shape(sample)[0]
    for name, x in others.items():
        shape = _shape(x)
        # The number of rows is a symbol where a program is exported.
        differs = bool(shape) and all(isinstance(n, int) for n in (rows, shape[0]))
        if differs and shape[0] != rows and not (name == "timestep" and shape == (1,)):
            raise ValueError(
                f"{name} must have as many rows as the sample, {rows} (got {_given(x)})"
            )
        if name == "timestep" and len(shape) > 1:
            raise ValueError(f"timestep must be a number, or one for each row (got {_given(x)})")


def check_width(name: str, x: Any, width: int) -> None:
    """Checks the layout b d of vectors such as a text's pooled output.

    Raises:
        ValueError: they do not have two axes, or another width.
    """
    if len(_shape(x)) != 2 or _shape(x)[-1] != width:
        raise ValueError(f"{name} must have shape (batch, {width}) (got {_given(x)})")


def check_residuals(name: str, residuals: Sequence[Any], maps: Sequence[Any]) -> None:
    """Checks that a ControlNet's residuals fit the maps of a UNet that they are added to, b h w c.

    Raises:
        ValueError: there are more or fewer, or one has another size or number of channels.
    """
    wanted, given = ([_shape(x) for x in xs] for xs in (maps, residuals))
    fits = len(wanted) == len(given) and all(
        len(own) == 4 and all(i in (1, j) for i, j in zip(own, other, strict=True))
        for own, other in zip(given, wanted, strict=True)
    )
    if not fits:
        shown = [", ".join(str(shape[1:]) for shape in shapes) for shapes in (wanted, given)]
        raise ValueError(
            f"{name} must have the sizes and channels of the UNet's maps, {shown[0]} here (got "
            f"{shown[1]}); is the ControlNet made for this UNet?"
        )


def check_ids(name: str, x: Any) -> None:
    """Checks the layout b t of tokens.

    Raises:
        ValueError: they are not integers, or do not have two axes.
    """
    if len(_shape(x)) != 2 or not jnp.issubdtype(x.dtype, jnp.integer):
        raise ValueError(f"{name} must be integers of shape (texts, tokens) (got {_given(x)})")


def check_token_ids(config: Any, input_ids: np.ndarray) -> None:
    """Raises ValueError if an id is not in the embedding, because a device would clamp it."""
    for token in (input_ids.min(initial=0), input_ids.max(initial=0)):
        if not 0 <= token < config.vocab_size:
            raise ValueError(
                f"input_ids has the token {token}, but the text encoder's vocab_size is "
                f"{config.vocab_size}; use the tokenizer that belongs to it"
            )


def _shape(x: Any) -> tuple[int, ...]:
    return tuple(getattr(x, "shape", ()))


def _given(x: Any) -> str:
    return f"{x.dtype} of shape {_shape(x)}" if hasattr(x, "dtype") else type(x).__name__
