"""Takes and checks what diffusers' and transformers' calls are given."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from diffusax.boundary.tensors import alike, as_array, as_numpy
from diffusax.models.layers.inputs import check_token_ids
from diffusax.runtime.switches import is_traced

ATTENTIONS = "output_attentions must be None or False: attention's weights are never held whole"
"""What is said of an argument that no encoder has a meaning for."""


def arrays(tree: Any) -> Any:
    """Converts everything in a tree to arrays; see `tensors.as_array`."""
    return jax.tree.map(as_array, tree)


def take_map(name: str, value: Any, channels: int | None) -> Any:
    """Converts images or latents to an array, and checks the layout b c h w.

    If height or width equals the number of channels, a wrong layout may not be noticed.

    Args:
        name: the name of the argument.
        value: its value.
        channels: the number of channels that it must have; None for any.

    Raises:
        ValueError: it does not have four axes, or the second one is not the channels.
    """
    return _channels_second(name, value, channels, "height, width")


def take_video(name: str, value: Any, channels: int | None) -> Any:
    """Converts videos or their latents to an array, and checks the layout b c f h w.

    Arguments and errors as those of `take_map`, with five axes.
    """
    return _channels_second(name, value, channels, "frames, height, width")


def _channels_second(name: str, value: Any, channels: int | None, sizes: str) -> Any:
    x, axes = as_array(value), 3 + sizes.count(",")
    if x.ndim == axes and channels in (None, x.shape[1]):
        return x
    mend = ""
    if x.ndim == axes and x.shape[-1] == channels:
        order = ", ".join(map(str, (0, axes - 1, *range(1, axes - 1))))
        mend = f"; channels come second here: {name}.transpose({order})"
    raise ValueError(
        f"{name} must have shape (batch, {channels or 'channels'}, {sizes}) (got {x.dtype} "
        f"of shape {tuple(x.shape)}){mend}"
    )


def take_ids(input_ids: Any, config: Any) -> Any:
    """Converts tokens to an array, and checks that the embedding has them all.

    Raises:
        ValueError: they are no integers b t, or one is not in the vocabulary.
    """
    ids = as_array(input_ids)
    if ids.ndim != 2 or not jnp.issubdtype(ids.dtype, jnp.integer):
        raise ValueError(
            f"input_ids must be integers of shape (texts, tokens) (got {ids.dtype} of shape "
            f"{tuple(ids.shape)})"
        )
    # The values of an array that is being traced are not known.
    if not is_traced(ids) and getattr(config, "vocab_size", None):
        check_token_ids(config, np.asarray(ids))
    return ids if isinstance(ids, jax.Array) else ids.astype(np.int32)


def take_grids(name: str, value: Any) -> np.ndarray:
    """Returns for each image the numbers of frames, and of rows and columns of patches, k 3.

    Raises:
        ValueError: they are no such integers.
    """
    grids = np.asarray([] if value is None else as_array(value))
    if grids.ndim != 2 or grids.shape[1] != 3 or grids.dtype.kind not in "iu" or grids.min() < 1:
        raise ValueError(
            f"{name} must be integers (images, 3): frames, and rows and columns of patches (got "
            f"{grids.dtype} of shape {grids.shape})"
        )
    return grids


def take_numbers(name: str, value: Any, count: int) -> Any:
    """Converts timesteps to float32, one or `count`, so that all kinds of them share a program.

    Raises:
        ValueError: there is another number of them.
    """
    x = value if isinstance(value, jax.Array) else as_numpy(value).astype(np.float32)
    if x.ndim > 1 or (x.ndim == 1 and x.shape[0] not in (1, count)):
        raise ValueError(
            f"{name} must be one number or one for each of {count} samples (got shape "
            f"{tuple(x.shape)})"
        )
    return x.astype(np.float32)


def spread(name: str, value: Any, rows: int) -> Any:
    """Returns one number or `rows` of them as an array of so many, float32."""
    return np.broadcast_to(take_numbers(name, value, rows), rows)


def take_positions(
    name: str, value: Any, count: int, axes: int, *, whole: bool = True
) -> np.ndarray:
    """Returns the positions of tokens, count axes; a first axis of images that agree is left out.

    whole: whether they must be integers of at least zero.

    Raises:
        ValueError: they have another shape, or are not such integers.
    """
    ids = as_numpy(value) if value is not None else np.zeros(0)
    ids = ids[0] if ids.ndim == 3 else ids
    others = whole and ((ids < 0).any() or (ids != np.round(ids)).any())
    if ids.shape != (count, axes) or others:
        kind = "integers of at least 0" if whole else "numbers"
        raise ValueError(
            f"{name} must be {kind}, of shape ({count}, {axes}) (got shape {ids.shape})"
        )
    return ids.astype(np.int32) if whole else ids


def check_no_adapters(name: str, value: Any) -> None:
    """Raises ValueError for the arguments of attention, which may be None or empty."""
    check_absent(
        value or None, f"{name} must be None: adapters belong to pipelines, see `adapters=`"
    )


def check_rows(name: str, x: Any, count: int) -> None:
    """Raises ValueError unless an array has one entry for each of `count` samples."""
    if x is not None and (x.ndim == 0 or x.shape[0] != count):
        raise ValueError(
            f"{name} must have one entry for each of {count} samples (got shape {tuple(x.shape)})"
        )


def check_absent(value: Any, sentence: str) -> None:
    """Raises ValueError with the sentence where an argument is given that has no meaning here."""
    if value is not None:
        raise ValueError(sentence)


def result(output: Any, return_dict: bool, *given: Any) -> Any:
    """Returns an output, or the tuple of its fields, in the kind of `given`; see `alike`.

    Calls declare the output alone, so that type checkers say of a wrong argument which it is: a
    choice of two signatures would be reported whole. They let an output be read by position, too.
    """
    output = alike(output, *given)
    return output if return_dict else output.to_tuple()
