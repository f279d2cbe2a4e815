"""Scenes that edits change: an emoji, its style and place, the background, a border, the light.

An edit changes a scene by a fixed rule, so the true picture after it is drawn like any other.
"""

import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1] / "emoji"))
from names import BACKGROUNDS

RESOLUTION = 64
BORDER = 4
SCALES = {"small": 0.6, "normal": 1.0, "big": 1.35}
BORDERS = ("red", "blue", "black", "white", "yellow", "green")
TINTS = ("red", "green", "blue", "yellow", "purple", "pink")
STYLES = ("noto", "twemoji", "3d", "flat")
NIGHT = (0.30, 0.35, 0.60)
"""What red, green and blue are multiplied by."""


@dataclasses.dataclass(frozen=True)
class Scene:
    """What a picture shows."""

    name: str
    style: str
    background: str = "white"
    turns: int = 0
    """Quarter turns to the left, after mirroring."""
    mirrored: bool = False
    scale: str = "normal"
    tint: str = ""
    border: str = ""
    light: str = ""
    """Gray, night, bright or dark; none is as it is."""


Glyphs = Mapping[tuple[str, str], Image.Image]
"""Square RGBA pictures by name and style."""


def edited(scene: Scene, instruction: str) -> Scene | None:
    """The scene after an edit; None where it cannot be done or would change nothing."""
    kind, _, detail = instruction.partition(":")
    change = dataclasses.replace
    if kind in ("background", "tint", "border", "style"):
        done = getattr(scene, kind) == detail or (kind == "border" and scene.border)
        return None if done else change(scene, **{kind: detail})
    if kind == "turn":
        turns = {"left": 1, "over": 2, "right": 3}[detail]
        return change(scene, turns=(scene.turns + turns) % 4)
    if kind == "mirror":
        return change(scene, turns=-scene.turns % 4, mirrored=not scene.mirrored)
    if kind == "size":
        order = list(SCALES)
        place = order.index(scene.scale) + (1 if detail == "bigger" else -1)
        return change(scene, scale=order[place]) if 0 <= place < len(order) else None
    return None if scene.light else change(scene, light=detail)


def draw(scene: Scene, glyphs: Glyphs) -> np.ndarray:
    """The picture. 64 64 3 uint8."""
    glyph = _sized(glyphs[scene.name, scene.style], SCALES[scene.scale])
    if scene.tint:
        glyph = _tinted(glyph, scene.tint)
    side = glyph.width
    picture = Image.new("RGBA", glyph.size, (*BACKGROUNDS[scene.background], 255))
    picture.alpha_composite(glyph)
    assert side == 2 * RESOLUTION, "glyphs are drawn at twice the size"
    pixels = np.asarray(picture.convert("RGB"), np.float32)
    pixels = pixels.reshape(RESOLUTION, 2, RESOLUTION, 2, 3).mean((1, 3))
    if scene.mirrored:
        pixels = pixels[:, ::-1]
    pixels = np.rot90(pixels, scene.turns).copy()
    if scene.border:
        inside = pixels[BORDER:-BORDER, BORDER:-BORDER].copy()
        pixels[:] = BACKGROUNDS[scene.border]
        pixels[BORDER:-BORDER, BORDER:-BORDER] = inside
    return np.round(_lit(pixels, scene.light)).astype(np.uint8)


def _sized(glyph: Image.Image, scale: float) -> Image.Image:
    """The emoji smaller or bigger in a picture of the same size; what leaves it is cut off."""
    if scale == 1:
        return glyph
    side = round(glyph.width * scale / 2) * 2
    resized = glyph.resize((side, side), Image.Resampling.BILINEAR)
    margin = (glyph.width - side) // 2
    if margin < 0:
        return resized.crop((-margin, -margin, side + margin, side + margin))
    result = Image.new("RGBA", glyph.size)
    result.paste(resized, (margin, margin))
    return result


def _tinted(glyph: Image.Image, color: str) -> Image.Image:
    """Dark parts from black to the colour, light ones from the colour to white."""
    pixels = np.asarray(glyph, np.float32)
    gray = (pixels[..., :3] @ np.float32([0.299, 0.587, 0.114]) / 255)[..., None]
    paint = np.float32(BACKGROUNDS[color])
    dark, light = paint * 2 * gray, paint + (255 - paint) * (2 * gray - 1)
    rgb = np.where(gray < 0.5, dark, light)
    return Image.fromarray(np.concatenate([rgb, pixels[..., 3:]], -1).round().astype(np.uint8))


def _lit(pixels: np.ndarray, light: str) -> np.ndarray:
    if light == "gray":
        return np.repeat(pixels @ np.float32([[0.299], [0.587], [0.114]]), 3, -1)
    if light == "night":
        return pixels * np.float32(NIGHT)
    if light == "bright":
        return pixels + (255 - pixels) * 0.4
    return pixels * 0.55 if light == "dark" else pixels
