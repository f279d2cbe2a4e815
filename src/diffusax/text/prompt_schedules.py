"""Prompts that change from step to step, `[cat:dog:0.5]` and `[cat|dog]`, and that AND joins.

The rules are those of stable-diffusion-webui (modules/prompt_parser.py). There a grammar says what
a prompt is; brackets that do not close as it wants are text, and so is all of a prompt in which "|"
or a backslash stands where the grammar has none.
"""

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

_PLAIN = re.compile(r"(?:[^\\\[\]():|]|\\.)+")
_WHEN = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*\]")
_AND = re.compile(r"(\bAND\b)")
_WEIGHT = re.compile(r"(.*?)(?:\s*:\s*([-+]?(?:\d+\.?|\d*\.\d+)))?\s*", re.DOTALL)
_DEEPEST = 100
"""Brackets that are nested more deeply are text."""


class Part(NamedTuple):
    """One of the prompts that AND joins, and what it counts for."""

    text: str
    weight: float


class Span(NamedTuple):
    """A text, and the last step at which it is the prompt. The first step is 1."""

    until: int
    text: str


@dataclasses.dataclass(frozen=True)
class _Scheduled:
    """`[before:after:when]`, or `[after:when]`."""

    before: "_Nodes"
    after: "_Nodes"
    when: str


@dataclasses.dataclass(frozen=True)
class _Alternating:
    """`[a|b|c]`."""

    options: "tuple[_Nodes, ...]"


_Nodes = Sequence["str | _Scheduled | _Alternating"]


def split_parts(prompt: str) -> list[Part]:
    """Returns the prompts that AND joins, such as `a cat :1.2 AND a dog :0.8`, with their weights.

    Source: get_multicond_prompt_list. A prompt without AND is one part, which may have a weight.
    """
    found = []
    for text in _AND.split(prompt)[::2]:
        match = _WEIGHT.fullmatch(text)
        assert match is not None
        found.append(Part(match[1], 1.0 if match[2] is None else float(match[2])))
    return found


def schedule(prompt: str, steps: int) -> list[Span]:
    """Returns the texts that a prompt is one after the other, in a run of so many steps.

    A number with a point counts in parts of the run, and another one in steps. Source:
    get_learned_conditioning_prompt_schedules.
    """
    nodes = _parse(prompt)
    if nodes is None:
        return [Span(steps, prompt)]
    ends = {steps, *_ends(nodes, steps)}
    return [Span(end, _text(nodes, end, steps)) for end in sorted(ends)]


def text_at(spans: Sequence[Span], row: int) -> str:
    """Returns the text at a row of the run, counted from 0.

    As in reconstruct_cond_batch, where step 1 ends after row 1, a change comes one row later than
    its number says.
    """
    return next((span.text for span in spans if row <= span.until), spans[0].text)


def with_whole_steps(prompt: str, steps: int, before: int = 0) -> str:
    """Returns a prompt whose changes are counted in steps, so that a run of any length has them.

    Args:
        prompt: the prompt.
        steps: the steps of the run that the prompt is for.
        before: the steps of a first pass, after which the run is the second: there numbers count on
            from the first pass's, and parts of the run from 1.
    """

    def rewritten(text: str) -> str:
        nodes = _parse(text)
        if nodes is None:
            return text
        return _written(nodes, lambda when: max(_step(when, steps, before), 0))

    pieces = _AND.split(prompt)
    return "".join(piece if i % 2 else rewritten(piece) for i, piece in enumerate(pieces))


def _step(when: str, steps: int, before: int = 0) -> int:
    """Returns the last step before a change."""
    value = float(when)
    value = (value - bool(before)) * steps if "." in when else value - before
    return int(max(min(value, steps), -1))


def _parse(prompt: str) -> _Nodes | None:
    """Returns the parts of a prompt that changes, or None for one that does not."""
    if "[" not in prompt or not {*prompt} & {":", "|"}:
        return None
    parser = _Parser(prompt)
    nodes: list[str | _Scheduled | _Alternating] = []
    at = 0
    while True:
        found, at = parser.sequence(at)
        nodes += found
        if at == len(prompt):
            changes = any(not isinstance(node, str) for node in nodes)
            return nodes if changes else None
        if prompt[at] not in "[]():":
            return None
        nodes.append(prompt[at])
        at += 1


class _Parser:
    """Reads a prompt from left to right, each bracket once."""

    def __init__(self, prompt: str):
        self._prompt, self._depth = prompt, 0
        self._found: dict[int, tuple[_Nodes, int] | None] = {}

    def sequence(self, at: int) -> tuple[list[str | _Scheduled | _Alternating], int]:
        """Returns what follows, up to a character that is none of it, and the place of that."""
        nodes: list[str | _Scheduled | _Alternating] = []
        while at < len(self._prompt):
            if plain := _PLAIN.match(self._prompt, at):
                nodes.append(plain[0])
                at = plain.end()
            elif self._prompt[at] in "([" and (found := self._bracket(at)):
                nodes += found[0]
                at = found[1]
            else:
                break
        return nodes, at

    def _bracket(self, at: int) -> tuple[_Nodes, int] | None:
        """Returns what a bracket that opens is, and the place behind it; None for text."""
        if at not in self._found:
            self._found[at] = None
            if self._depth < _DEEPEST:
                self._depth += 1
                read = self._round if self._prompt[at] == "(" else self._square
                self._found[at] = read(at + 1)
                self._depth -= 1
        return self._found[at]

    def _round(self, at: int) -> tuple[_Nodes, int] | None:
        """Reads `(text)` or `(text:weight)`, which stays as it is but for what is inside."""
        nodes, at = self.sequence(at)
        if self._is(":", at):
            more, at = self.sequence(at + 1)
            nodes = [*nodes, ":", *more]
        return (["(", *nodes, ")"], at + 1) if self._is(")", at) else None

    def _square(self, at: int) -> tuple[_Nodes, int] | None:
        """Reads `[text]`, `[text:when]`, `[text:text:when]` or `[text|text]`."""
        first, at = self.sequence(at)
        if self._is("]", at):
            return ["[", *first, "]"], at + 1
        if self._is("|", at):
            options = [first]
            while self._is("|", at):
                more, at = self.sequence(at + 1)
                options.append(more)
            return ([_Alternating(tuple(options))], at + 1) if self._is("]", at) else None
        if not self._is(":", at):
            return None
        if when := _WHEN.match(self._prompt, at + 1):
            return [_Scheduled((), first, when[1])], when.end()
        second, at = self.sequence(at + 1)
        if self._is(":", at) and (when := _WHEN.match(self._prompt, at + 1)):
            return [_Scheduled(first, second, when[1])], when.end()
        return None

    def _is(self, character: str, at: int) -> bool:
        return self._prompt.startswith(character, at)


def _ends(nodes: _Nodes, steps: int) -> set[int]:
    """Returns the last steps before the changes of a prompt."""
    found: set[int] = set()
    for node in nodes:
        if isinstance(node, _Scheduled):
            end = _step(node.when, steps)
            found |= {end} if end >= 1 else set()
            found |= _ends(node.before, steps) | _ends(node.after, steps)
        elif isinstance(node, _Alternating):
            found |= set(range(1, steps + 1))
            found.update(*(_ends(option, steps) for option in node.options))
    return found


def _text(nodes: _Nodes, step: int, steps: int) -> str:
    """Returns the text of a prompt at a step."""

    def of(node: str | _Scheduled | _Alternating) -> str:
        if isinstance(node, _Scheduled):
            return _text(
                node.before if step <= _step(node.when, steps) else node.after, step, steps
            )
        if isinstance(node, _Alternating):
            return _text(node.options[(step - 1) % len(node.options)], step, steps)
        return node

    return "".join(map(of, nodes))


def _written(nodes: _Nodes, step: Callable[[str], int]) -> str:
    """Writes a prompt with other numbers."""

    def of(node: str | _Scheduled | _Alternating) -> str:
        if isinstance(node, _Scheduled):
            texts = (_written(part, step) for part in (node.before, node.after))
            return f"[{':'.join(texts)}:{step(node.when)}]"
        if isinstance(node, _Alternating):
            return f"[{'|'.join(_written(option, step) for option in node.options)}]"
        return node

    return "".join(map(of, nodes))
