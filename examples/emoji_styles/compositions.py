"""What the pictures show, an emoji in a style or a colour on a background, and its captions."""

import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from names import BACKGROUNDS, article
from scenes import STYLES, TINTS, Glyphs, Scene

PLAIN = "noto"
"""The style that needs no words."""
COLORS = re.compile(r"^(light blue|red|orange|yellow|green|blue|purple|brown|black|white|pink) ")


class Composition(NamedTuple):
    """A scene that a caption names. tint: a colour instead of the emoji's own."""

    name: str
    style: str = PLAIN
    background: str = "white"
    tint: str = ""

    @property
    def scene(self) -> Scene:
        """To draw it."""
        return Scene(self.name, self.style, self.background, tint=self.tint)

    def caption(self, *, with_article: bool = True, says_style: bool = True) -> str:
        """As one would say it. says_style: whether the style that needs no words is named."""
        name = f"{self.tint} {uncolored(self.name)}" if self.tint else self.name
        said = article(name) if with_article else name
        if self.background != "white":
            said += f" on {article(self.background)} background"
        return f"{said}, {self.style} style" if self.style != PLAIN or says_style else said


def uncolored(name: str) -> str:
    """An apple is no longer a red apple when it is blue."""
    return COLORS.sub("", name)


def styled(glyphs: Glyphs) -> list[Composition]:
    """Every emoji in every style that has it, on every background."""
    return [Composition(name, style, color) for name, style in glyphs for color in BACKGROUNDS]


def tinted(glyphs: Glyphs) -> list[Composition]:
    """Every emoji in every colour on white, but for those that are other emoji, as a blue book."""
    names = {name for name, style in glyphs if style == PLAIN}
    found = [Composition(name, tint=tint) for name in sorted(names) for tint in TINTS]
    return [x for x in found if f"{x.tint} {uncolored(x.name)}" not in names]


def held_out(
    glyphs: Glyphs, styles: int, tints: int
) -> tuple[list[Composition], list[Composition]]:
    """Compositions that the training never sees, though it sees their parts.

    Args:
        glyphs: all of them.
        styles: how many in a named style on a coloured background.
        tints: how many in another colour.
    """
    rng = np.random.default_rng(0)

    def some(all_of_them: list[Composition], count: int) -> list[Composition]:
        return [all_of_them[i] for i in rng.permutation(len(all_of_them))[:count]]

    other = [x for x in styled(glyphs) if x.style != PLAIN and x.background != "white"]
    return some(other, styles), some(tinted(glyphs), tints)


def captions(composition: Composition, turn: int) -> Iterator[str]:
    """What a composition is called in the training. turn: any number, for variety."""
    says_style = turn % 4 == 0
    yield composition.caption(with_article=turn % 2 == 0, says_style=says_style)
    # White and the plain style need no words, so they are named by the name alone.
    if composition.background == "white" and not composition.tint:
        yield composition.caption(with_article=turn % 2 == 1, says_style=not says_style)


def others(composition: Composition, glyphs: Glyphs, count: int, seed: int) -> list[Composition]:
    """What a picture could be taken for: the same emoji otherwise, other emoji in the same way."""
    rng = np.random.default_rng(seed)
    same = [
        Composition(composition.name, style, color) for style in STYLES for color in BACKGROUNDS
    ]
    same += [Composition(composition.name, tint=tint) for tint in TINTS]
    names = sorted({name for name, style in glyphs if style == composition.style})
    same += [composition._replace(name=str(other)) for other in rng.permutation(names)[:count]]
    return [x for x in same if x != composition and (x.name, x.style) in glyphs]
