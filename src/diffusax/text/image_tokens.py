"""The tokens that stand for images in texts, and their positions."""

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

TEXT, IMAGE = 0, 1
"""The types of tokens."""


def image_positions(
    types: np.ndarray,
    grids: Sequence[Sequence[int]] | np.ndarray,
    *,
    mask: np.ndarray | None = None,
    merge: int = 2,
) -> np.ndarray:
    """Returns positions of tokens of texts with images: 3 b t, for frame, row and column.

    A text's positions count on along all three. An image's rows and columns count from where it
    begins, and what follows it begins behind the longer side (transformers
    models/qwen3_vl/modeling_qwen3_vl.py and models/qwen2_5_vl/modeling_qwen2_5_vl.py,
    get_rope_index).

    Args:
        types: b t, 1 where a token stands for a part of an image, else 0.
        grids: for each image, in the order of the texts, the numbers of frames, and of rows and
            columns of patches.
        mask: b t, zeros for pads, whose positions are 0; None for none.
        merge: the side of the squares of patches that are a token each.

    Raises:
        ValueError: images have not as many tokens as the texts have for them.
    """
    found = np.zeros((3, *types.shape), np.int32)
    images = iter(np.asarray(grids))
    for row, own in enumerate(types):
        real = np.ones(len(own), bool) if mask is None else mask[row] != 0
        found[:, row, real] = np.concatenate([*_positions(own[real], images, merge)], axis=1)
    if next(images, None) is not None:
        raise ValueError("the texts must have tokens for each image (got more images)")
    return found


def _positions(types: np.ndarray, images: Iterator[np.ndarray], merge: int) -> Iterator[np.ndarray]:
    """Yields the positions of each piece of a text, 3 n: of words or of an image."""
    start = 0
    for kind, piece in itertools.groupby(types.tolist()):
        count = len(list(piece))
        if kind == TEXT:
            yield np.broadcast_to(np.arange(start, start + count), (3, count))
            start += count
            continue
        grid = next(images, None)
        frames, rows, columns = (0, 0, 0) if grid is None else (grid[0], *(grid[1:] // merge))
        if kind != IMAGE or count != frames * rows * columns:
            raise ValueError(
                f"an image must have {frames * rows * columns} tokens of type 1 (got {count} of "
                f"type {kind}); use the checkpoint's processor"
            )
        yield start + np.indices((frames, rows, columns)).reshape(3, -1)
        start += max(rows, columns)
