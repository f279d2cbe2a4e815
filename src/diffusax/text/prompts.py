"""Long prompts as several windows, and `(word:1.3)` prompt weighting.

Both follow AUTOMATIC1111's stable-diffusion-webui (modules/prompt_parser.py and
modules/sd_hijack_clip.py), whose syntax the field has adopted.
"""

import dataclasses
import re
from collections.abc import Sequence
from typing import TypeVar

import jax
import numpy as np

from diffusax.text.tokenizer import CLIPTokenizer, checked_texts, warn_cut_off

ROUND_WEIGHT = 1.1
SQUARE_WEIGHT = 1 / 1.1

Array = TypeVar("Array", np.ndarray, jax.Array)

_SYNTAX = re.compile(
    r"\\(?P<escaped>[()\[\]\\])"
    r"|(?P<open>[(\[])"
    r"|:\s*(?P<weight>[+-]?(?:\d+\.?\d*|\.\d+))\s*\)"
    r"|(?P<close>[)\]])"
    r"|(?P<text>[^\\()\[\]:]+|[\\:])"
)


@dataclasses.dataclass(frozen=True)
class PromptTokens:
    """Prompts as windows of bos, at most 75 tokens, eos and pads.

    input_ids: (n, windows, 77) int32. weights: (n, windows, 77) float32, one for bos, eos and pads;
    None without weighting.
    """

    input_ids: np.ndarray
    weights: np.ndarray | None

    @property
    def windows(self) -> int:
        return self.input_ids.shape[1]


def tokenize_prompts(
    tokenizer: CLIPTokenizer,
    texts: str | Sequence[str],
    *,
    long_prompt: bool = False,
    weighting: bool = False,
    windows: int | None = None,
) -> PromptTokens:
    """The windows of some prompts, as many for each as the longest one needs.

    Without `long_prompt` there is one window, and what does not fit is cut off with a warning. With
    `weighting`, parentheses are syntax (see `parse_weights`); without, they are text. `windows`
    asks for that many, the last ones empty: so a short negative prompt goes with a long prompt.

    Raises:
        ValueError: wrong type of prompt, or a prompt that needs more than `windows` windows.
    """
    room = tokenizer.model_max_length - 2
    prompts = []
    for text in checked_texts(texts):
        parts = parse_weights(text) if weighting else [(text, 1.0)]
        prompts.append(_weighted_ids(tokenizer, parts, None if long_prompt else room))

    needed = max(1, *(-(-len(ids) // room) for ids, _ in prompts))
    if windows is not None and windows < needed:
        raise ValueError(
            f"windows={windows} is too few: a prompt needs {needed} windows of {room} tokens; "
            "shorten it or raise windows"
        )
    starts = range(0, room * (windows or needed), room)
    input_ids = [[tokenizer.window(ids[s : s + room]) for s in starts] for ids, _ in prompts]
    if not weighting:
        return PromptTokens(np.array(input_ids), None)
    weights = np.ones(np.shape(input_ids), np.float32)
    for i, (_, values) in enumerate(prompts):
        for window, start in enumerate(starts):
            part = values[start : start + room]
            weights[i, window, 1 : len(part) + 1] = part
    return PromptTokens(np.array(input_ids), weights)


def parse_weights(text: str) -> list[tuple[str, float]]:
    r"""The parts of a prompt with their weights; neighbours of equal weight are joined.

    `(word:1.3)` weighs 1.3, `(word)` 1.1 and `[word]` 1/1.1; nested weights multiply. `\(`, `\)`,
    `\[`, `\]` and `\\` are those characters. An open bracket without a close lasts to the end, a
    close without an open is text, as in stable-diffusion-webui.
    """
    parts: list[tuple[str, float]] = []
    opened: dict[str, list[int]] = {"(": [], "[": []}

    def close(bracket: str, weight: float) -> None:
        start = opened[bracket].pop()
        parts[start:] = [(part, w * weight) for part, w in parts[start:]]

    for match in _SYNTAX.finditer(text):
        kind, piece = match.lastgroup, match.group()
        if kind == "open":
            opened[piece].append(len(parts))
        elif kind == "weight" and opened["("]:
            close("(", float(match["weight"]))
        elif piece == ")" and opened["("]:
            close("(", ROUND_WEIGHT)
        elif piece == "]" and opened["["]:
            close("[", SQUARE_WEIGHT)
        else:
            parts.append((match["escaped"] or piece, 1.0))
    for bracket, weight in ("(", ROUND_WEIGHT), ("[", SQUARE_WEIGHT):
        while opened[bracket]:
            close(bracket, weight)
    return _joined(parts)


def apply_weights(embeddings: Array, weights: Array) -> Array:
    """Embeddings times their weights, brought back to the mean they had: (n, t, d), (n, t).

    stable-diffusion-webui's "Original" emphasis (modules/sd_emphasis.py), but with a mean for each
    of the n rows instead of one for all, so that a row does not depend on the others. Give it one
    window per row (t = 77). Takes NumPy or JAX arrays; computes in the dtype of `weights`.
    """
    x = embeddings.astype(weights.dtype)
    weighted = x * weights[..., None]
    scale = x.mean((1, 2), keepdims=True) / weighted.mean((1, 2), keepdims=True)
    return (weighted * scale).astype(embeddings.dtype)


def _joined(parts: list[tuple[str, float]]) -> list[tuple[str, float]]:
    joined: list[tuple[str, float]] = []
    for text, weight in parts:
        if joined and joined[-1][1] == weight:
            joined[-1] = (joined[-1][0] + text, weight)
        else:
            joined.append((text, weight))
    return joined


def _weighted_ids(
    tokenizer: CLIPTokenizer, parts: list[tuple[str, float]], room: int | None
) -> tuple[list[int], list[float]]:
    """The ids and weights of a prompt, `room` of them at most; warns of what is cut off."""
    ids: list[int] = []
    weights: list[float] = []
    cut_off = ""
    for text, weight in parts:
        tokens = tokenizer.tokenize(text)
        left = len(tokens) if room is None else room - len(ids)
        if not left:
            cut_off += text
        elif len(tokens) > left:
            cut_off = tokenizer.rest_of(text, left)
        ids += tokens[:left]
        weights += [weight] * len(tokens[:left])
    if cut_off.strip():
        warn_cut_off(cut_off, len(ids))
    return ids, weights
