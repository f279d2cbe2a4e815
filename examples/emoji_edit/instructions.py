"""What is said for each edit. The last wordings of each kind are kept out of the training."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "emoji"))
from names import BACKGROUNDS, article
from scenes import BORDERS, STYLES, TINTS

HELD_OUT = 1
"""How many of the wordings, from the end."""

_WORDINGS = {
    "background": (
        "make the background {c}",
        "change the background to {c}",
        "set the background to {c}",
        "put it on {a} background",
        "{c} background",
        "give it {a} background",
    ),
    "tint": (
        "make it {c}",
        "make the emoji {c}",
        "paint it {c}",
        "color it {c}",
        "paint the emoji {c}",
    ),
    "border": (
        "add {a} border",
        "put {a} border around it",
        "{c} border",
        "draw {a} frame around it",
        "add {a} frame",
    ),
    "style:noto": ("in noto style", "make it noto style", "noto style", "draw it in noto style"),
    "style:twemoji": (
        "in twemoji style",
        "make it twemoji style",
        "twemoji style",
        "draw it in twemoji style",
    ),
    "style:3d": ("make it 3d", "in 3d", "3d style", "draw it in 3d"),
    "style:flat": ("make it flat", "in flat style", "flat style", "draw it in flat style"),
    "turn:over": (
        "turn it upside down",
        "upside down",
        "rotate it by 180 degrees",
        "put it upside down",
    ),
    "turn:left": ("rotate it to the left", "turn it to the left", "rotate left", "turn it left"),
    "turn:right": (
        "rotate it to the right",
        "turn it to the right",
        "rotate right",
        "turn it right",
    ),
    "mirror": ("mirror it", "flip it horizontally", "mirror image", "mirror the picture"),
    "light:gray": (
        "make it black and white",
        "black and white",
        "remove the colors",
        "turn it black and white",
    ),
    "light:night": ("make it night", "night", "turn it into night", "make the picture night"),
    "light:bright": (
        "make it brighter",
        "brighter",
        "make the picture brighter",
        "turn it brighter",
    ),
    "light:dark": ("make it darker", "darker", "make the picture darker", "turn it darker"),
    "size:smaller": ("make it smaller", "smaller", "make the emoji smaller", "shrink it"),
    "size:bigger": ("make it bigger", "bigger", "make the emoji bigger", "make it larger"),
}

# A share of the training for each kind.
SHARES = {
    "background": 0.18,
    "tint": 0.12,
    "border": 0.10,
    "style": 0.16,
    "turn": 0.18,
    "mirror": 0.06,
    "light": 0.12,
    "size": 0.08,
}


def instructions() -> list[str]:
    """All edits: "background:red", "mirror"..."""
    colors = {"background": tuple(BACKGROUNDS), "tint": TINTS, "border": BORDERS, "style": STYLES}
    found = [f"{kind}:{detail}" for kind, details in colors.items() for detail in details]
    return found + [key for key in _WORDINGS if key not in colors and key not in found]


def wordings(instruction: str, *, held_out: bool = False) -> list[str]:
    """The ways to say an edit, those of the training or the others."""
    kind, _, detail = instruction.partition(":")
    said = _WORDINGS.get(instruction) or _WORDINGS[kind]
    chosen = said[-HELD_OUT:] if held_out else said[:-HELD_OUT]
    return [words.format(c=detail, a=article(detail) if detail else "") for words in chosen]
