"""Splits long prompts into windows, and reads `(word:1.3)` prompt weighting.

Both follow AUTOMATIC1111's stable-diffusion-webui (modules/prompt_parser.py and
modules/sd_hijack_clip.py), whose syntax the field has adopted.
"""

import dataclasses
import itertools
import logging
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import jax
import numpy as np

from diffusax.boundary.convert import checked_texts
from diffusax.text.tokenizer import CLIPTokenizer

ROUND_WEIGHT = 1.1
SQUARE_WEIGHT = 1 / 1.1

MAX_WINDOWS = 64
"""The most windows of a prompt; stable-diffusion-webui has no limit, but attention's cost grows."""
MAX_CHARACTERS = 100_000
"""The most characters of a long or weighted prompt; 64 windows of English have a quarter of it."""
MAX_WEIGHT = 1000.0
COMMA_BACKTRACK = 20
"""A window may end this many tokens early, after a comma (stable-diffusion-webui's default)."""

Array = TypeVar("Array", np.ndarray, jax.Array)

_SYNTAX = re.compile(
    r"\\(?P<escaped>[()\[\]\\])"
    r"|(?P<open>[(\[])"
    r"|:\s*(?P<weight>[+-]?(?:\d+(?:\.\d*)?|\.\d+))\s*\)"
    r"|(?P<close>[)\]])"
    r"|(?P<text>[^\\()\[\]:]+|[\\:])"
)
_BREAK = re.compile(r"\bBREAK\b")

logger = logging.getLogger(__name__)


class Token(NamedTuple):
    """A token's id and its weight."""

    id: int
    weight: float


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
    """Splits prompts into windows, each into as many as the longest one needs.

    Without `long_prompt` there is one window; text that does not fit is cut off and named in the
    log. With it, the word BREAK starts a new window, and a window that would end between two commas
    ends after the first, if that is among its last 20 tokens. With `weighting`, parentheses are
    syntax (see `parse_weights`); without, they are text. `windows` sets the number of windows, of
    which the last may be empty, so that a short negative prompt suits a long prompt.

    Raises:
        ValueError: a prompt has the wrong type, a weight beyond 1000, more windows than `windows`
            or 64, or more than 100,000 characters to parse.
    """
    prompts = [
        _long(tokenizer, text, weighting) if long_prompt else [_short(tokenizer, text, weighting)]
        for text in checked_texts(texts)
    ]
    needed = max(map(len, prompts))
    if windows is not None and windows < needed:
        room = tokenizer.model_max_length - 2
        raise ValueError(
            f"windows={windows} is too few: a prompt needs {needed} windows of {room} tokens; "
            "shorten it or raise windows"
        )
    shape = (len(prompts), windows or needed, tokenizer.model_max_length)
    input_ids = np.empty(shape, np.int32)
    input_ids[:] = tokenizer.window([])
    weights = np.ones(shape, np.float32) if weighting else None
    for i, prompt in enumerate(prompts):
        for w, window in enumerate(prompt):
            input_ids[i, w] = tokenizer.window([token.id for token in window])
            if weights is not None:
                weights[i, w, 1 : len(window) + 1] = [token.weight for token in window]
    return PromptTokens(input_ids, weights)


def window_lengths(tokenizer: CLIPTokenizer, text: str, *, weighting: bool = False) -> list[int]:
    """Returns how many tokens are in each window of a long prompt, without bos, eos and pads.

    Raises:
        ValueError: as `tokenize_prompts` does.
    """
    return [len(window) for window in _long(tokenizer, text, weighting)]


def parse_weights(text: str) -> list[tuple[str, float]]:
    r"""Returns the parts of a prompt with their weights; neighbours of equal weight are joined.

    `(word:1.3)` weighs 1.3, `(word)` 1.1 and `[word]` 1/1.1; nested weights multiply. `\(`, `\)`,
    `\[`, `\]` and `\\` are those characters. An open bracket without a close lasts to the end, a
    close without an open is text, as in stable-diffusion-webui. A backslash before anything else is
    text too; stable-diffusion-webui drops it. The time is proportional to the text.
    """
    pieces: list[str] = []
    brackets: list[_Bracket] = []
    opened: dict[str, list[_Bracket]] = {"(": [], "[": []}

    def close(kind: str, weight: float) -> None:
        bracket = opened[kind].pop()
        bracket.end, bracket.weight = len(pieces), weight

    for match in _SYNTAX.finditer(text):
        kind, piece = match.lastgroup, match.group()
        if kind == "open":
            weight = ROUND_WEIGHT if piece == "(" else SQUARE_WEIGHT
            brackets.append(_Bracket(piece, len(pieces), weight))
            opened[piece].append(brackets[-1])
        elif kind == "weight" and opened["("]:
            close("(", float(match["weight"]))
        elif piece == ")" and opened["("]:
            close("(", ROUND_WEIGHT)
        elif piece == "]" and opened["["]:
            close("[", SQUARE_WEIGHT)
        else:
            pieces.append(match["escaped"] or piece)
    parts = zip(_weights(brackets, len(pieces)), pieces)
    groups = itertools.groupby(parts, key=lambda part: part[0])
    return [("".join(piece for _, piece in group), weight) for weight, group in groups]


def apply_weights(embeddings: Array, weights: Array) -> Array:
    """Multiplies embeddings by weights, then restores their mean: (n, t, d), (n, t).

    This is stable-diffusion-webui's "Original" emphasis (modules/sd_emphasis.py), but with a mean
    for each of the n rows instead of one for all, so that rows do not depend on each other. Pass
    one window per row (t = 77). It takes NumPy or JAX arrays, and computes in `weights`' dtype.
    """
    x = embeddings.astype(weights.dtype)
    weighted = x * weights[..., None]
    scale = x.mean((1, 2), keepdims=True) / weighted.mean((1, 2), keepdims=True)
    return (weighted * scale).astype(embeddings.dtype)


@dataclasses.dataclass
class _Bracket:
    """A weight for the pieces from `start` to before `end`, or to the last one."""

    kind: str
    start: int
    weight: float
    end: int | None = None


def _weights(brackets: Iterable[_Bracket], n: int) -> list[float]:
    """Returns the weight of each of n pieces.

    Round brackets may cross square ones, but brackets of one kind are nested, so that a stack of
    products for each kind is enough.
    """
    starting, ending = defaultdict(list), defaultdict(list)
    for bracket in brackets:
        if bracket.end != bracket.start:
            starting[bracket.start].append(bracket)
            ending[bracket.end].append(bracket)
    products = {"(": [1.0], "[": [1.0]}
    weights = []
    for i in range(n):
        for bracket in ending[i]:
            products[bracket.kind].pop()
        for bracket in starting[i]:
            stack = products[bracket.kind]
            stack.append(stack[-1] * bracket.weight)
        weights.append(products["("][-1] * products["["][-1])
    return weights


def _parts(text: str, weighting: bool) -> list[tuple[str, float]]:
    """Returns a prompt's parts with their weights.

    Raises:
        ValueError: there are too many characters, or a weight is too large.
    """
    if len(text) > MAX_CHARACTERS:
        raise ValueError(
            f"prompt has {len(text)} characters; with long_prompt or prompt_weighting at most "
            f"{MAX_CHARACTERS} are read"
        )
    parts = parse_weights(text) if weighting else [(text, 1.0)]
    for part, weight in parts:
        if abs(weight) > MAX_WEIGHT:
            raise ValueError(
                f"prompt gives {_shortened(part)} a weight of {weight:g}; use weights from "
                f"-{MAX_WEIGHT:g} to {MAX_WEIGHT:g}"
            )
    return parts


def _short(tokenizer: CLIPTokenizer, text: str, weighting: bool) -> list[Token]:
    """Returns the one window of a prompt; logs the text that is cut off."""
    room = tokenizer.model_max_length - 2
    window: list[Token] = []
    lost: list[str] = []
    for part, weight in _parts(text, weighting) if weighting else [(text, 1.0)]:
        ids, rest = tokenizer.fit(part, room - len(window))
        window += [Token(i, weight) for i in ids]
        lost.append(rest)
    if part := "".join(lost).strip():
        logger.warning(
            "the prompt is longer than %d tokens; this part was cut off: %s (long_prompt=True "
            "keeps it)",
            room,
            _shortened(part),
        )
    return window


def _long(tokenizer: CLIPTokenizer, text: str, weighting: bool) -> list[list[Token]]:
    """Returns the windows of a long prompt."""
    sections: list[list[Token]] = [[]]
    for part, weight in _parts(text, weighting):
        for i, piece in enumerate(_BREAK.split(part)):
            if i:
                sections.append([])
            sections[-1] += [Token(token, weight) for token in tokenizer.ids_of(piece)]
    if len(sections) > 1 and not sections[-1]:
        sections.pop()
    comma = tokenizer.ids_of(",")
    room = tokenizer.model_max_length - 2
    inner = frozenset(itertools.chain(*tokenizer.parts.values()))
    windows = [window for section in sections for window in _split(section, room, comma, inner)]
    if len(windows) > MAX_WINDOWS:
        raise ValueError(
            f"prompt needs {len(windows)} windows of {room} tokens, more than {MAX_WINDOWS}; "
            "shorten it"
        )
    return windows


def _split(
    tokens: list[Token], room: int, comma: list[int], inner: Collection[int]
) -> Iterator[list[Token]]:
    """Splits tokens into windows of at most `room`, which end after a late comma if there is one.

    inner: the ids before which no window ends, because they belong to the word before them.
    """
    start = 0
    while len(tokens) - start > room:
        end = start + room
        if [tokens[end].id] != comma:
            late = range(end - 1, max(end - COMMA_BACKTRACK, start) - 1, -1)
            end = next((i + 1 for i in late if [tokens[i].id] == comma), end)
        begins = range(end, start, -1)
        end = next((i for i in begins if tokens[i].id not in inner), end)
        yield tokens[start:end]
        start = end
    yield tokens[start:]


def _shortened(text: str) -> str:
    return repr(text if len(text) <= 200 else f"{text[:200]}...")
