"""Draws the five pictures that the example learns from: a purple owl that no set of emoji has.

python examples/dreambooth/draw_subject.py --output out/dreambooth/owl
"""

import argparse
from pathlib import Path
from typing import NamedTuple

from PIL import Image, ImageDraw

SIZE = 64
SCALE = 8
"""It is drawn this many times as large, and then made smaller."""
BODY, WINGS, BELLY = (118, 62, 170), (86, 40, 132), (186, 140, 224)
EYES, PUPILS, BEAK = (255, 224, 70), (30, 22, 40), (255, 140, 30)
SCARF, FEET = (40, 180, 160), (240, 150, 40)
WHITE = (255, 255, 255)


class Pose(NamedTuple):
    """What differs from picture to picture, in 64ths of the picture and in degrees."""

    look: float = 0
    """How far the pupils are to the right."""
    wings: float = 0
    """How far the wings are raised."""
    tilt: float = 0
    """By how much it leans to the left."""


POSES = (Pose(), Pose(look=-2.5), Pose(look=2.5, wings=6), Pose(wings=10), Pose(tilt=8))


def owl(pose: Pose, background: tuple[int, int, int] = WHITE) -> Image.Image:
    """The owl on a background, 64 by 64 pixels."""
    picture = Image.new("RGB", (SIZE * SCALE, SIZE * SCALE), background)
    layer = Image.new("RGBA", picture.size)
    _draw(ImageDraw.Draw(layer), pose)
    layer = layer.rotate(pose.tilt, Image.Resampling.BICUBIC)
    picture.paste(layer, mask=layer)
    return picture.resize((SIZE, SIZE), Image.Resampling.BOX)


def _draw(draw: ImageDraw.ImageDraw, pose: Pose) -> None:
    def oval(x: float, y: float, width: float, height: float, color: tuple[int, int, int]) -> None:
        box = (x - width / 2, y - height / 2, x + width / 2, y + height / 2)
        draw.ellipse(tuple(SCALE * n for n in box), fill=color)

    def shape(points: list[tuple[float, float]], color: tuple[int, int, int]) -> None:
        draw.polygon([(SCALE * x, SCALE * y) for x, y in points], fill=color)

    for side in (-1, 1):
        oval(32 + side * 8, 59, 10, 6, FEET)
        shape([(32 + side * 20, 2), (32 + side * 20, 20), (32 + side * 4, 12)], WINGS)
        oval(32 + side * 21, 40 - pose.wings, 12, 28, WINGS)
    oval(32, 35, 42, 50, BODY)
    oval(32, 46, 26, 24, BELLY)
    shape([(13, 33), (51, 33), (49, 39), (15, 39)], SCARF)
    shape([(38, 37), (45, 37), (47, 52), (40, 52)], SCARF)
    for side in (-1, 1):
        oval(32 + side * 9, 22, 17, 17, EYES)
        oval(32 + side * 9 + pose.look, 22, 8, 8, PUPILS)
    shape([(28, 26), (36, 26), (32, 34)], BEAK)


def main() -> None:
    """Writes the pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("out/dreambooth/owl"))
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    for number, pose in enumerate(POSES):
        owl(pose).save(args.output / f"{number}.png")


if __name__ == "__main__":
    main()
