"""Draws the pairs that the example learns from: emoji before and after they put on a hat.

The models inside the package draw the emoji and the hat, so that nothing is needed besides.
    python examples/edit_lora/draw_pairs.py --output out/edit_lora
"""

import argparse
import json
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

import diffusax

sys.path.insert(0, str(Path(__file__).parents[1] / "emoji"))
from names import BACKGROUNDS, article

ANIMALS = (
    *("monkey face", "dog face", "wolf", "fox", "cat face", "lion", "tiger face"),
    *("horse face", "cow face", "pig face", "mouse face", "hamster", "rabbit face", "bear"),
    *("polar bear", "koala", "panda", "frog", "dragon face", "unicorn", "owl", "penguin"),
)
FACES = (
    *("grinning face", "winking face", "smiling face", "thinking face", "neutral face"),
    *("sleeping face", "angry face", "crying face", "ghost", "alien", "robot", "clown face"),
    *("jack-o-lantern", "full moon face", "sun with face", "skull", "goblin"),
)
HELD_OUT = ("cat face", "penguin", "robot", "neutral face", "frog", "alien")
"""Who is left out of the training, for the test."""
INSTRUCTIONS = ("put a hat on it", "give it a hat", "add a hat")
KNOWN = 3
"""One pair of so many is an edit that the model knows, so that it goes on telling them apart."""
COLORS = ("red", "blue", "black", "white", "yellow", "green")
BORDER, NIGHT = 4, (0.30, 0.35, 0.60)
SIZE, BATCH = 64, 20
HAT_WIDTH, HAT_TOP = 34, 0
ROOM = 14
"""The pixels above the emoji, for the hat."""
PLAIN = 24
"""A difference of colours, of 255: what differs less from the background is background."""


class Row(NamedTuple):
    """A row of the data set."""

    prompt: str
    before: Image.Image
    after: Image.Image


def draw(pipe: diffusax.DiffusionPipeline, prompts: list[str]) -> list[Image.Image]:
    """An image of each prompt, in batches of one size."""
    images: list[Image.Image] = []
    for start in range(0, len(prompts), BATCH):
        chunk = (prompts[start : start + BATCH] * BATCH)[:BATCH]
        seeds = list(range(start, start + BATCH))
        options = {**pipe.call_defaults, "num_inference_steps": 20}
        images += pipe(chunk, seed=seeds, **options).images
    return images[: len(prompts)]


def background(image: Image.Image) -> np.ndarray:
    """The colour around the emoji, 3."""
    pixels = np.asarray(image, np.float32)
    return np.median(np.concatenate([pixels[0], pixels[:, 0], pixels[:, -1]]), axis=0)


def opacity(image: Image.Image) -> np.ndarray:
    """Where the emoji is and no background, from 0 to 1, h w 1."""
    away = np.abs(np.asarray(image, np.float32) - background(image)).max(-1, keepdims=True)
    return np.clip(away / PLAIN - 1, 0, 1)


def cut_out(image: Image.Image) -> Image.Image:
    """What is on a plain background, with an opacity, as small as it is."""
    pixels = np.concatenate([np.asarray(image), opacity(image) * 255], axis=-1)
    found = Image.fromarray(pixels.astype(np.uint8))
    return found.crop(found.getchannel("A").getbbox())


def with_hat(image: Image.Image, hat: Image.Image) -> Image.Image:
    """The image with the hat at its top."""
    result = image.convert("RGBA")
    result.alpha_composite(hat, ((SIZE - hat.width) // 2, HAT_TOP))
    return result.convert("RGB")


def lowered(image: Image.Image) -> Image.Image:
    """The image smaller and lower, so that there is room above the emoji."""
    side = SIZE - ROOM
    result = Image.new("RGB", (SIZE, SIZE), tuple(background(image).astype(int).tolist()))
    result.paste(image.resize((side, side), Image.Resampling.LANCZOS), (ROOM // 2, ROOM))
    return result


def known_edit(image: Image.Image, number: int) -> Row:
    """An edit that the model knows: of the background, of the light, or a border."""
    pixels = np.asarray(image, np.float32)
    color = COLORS[number // 5 % len(COLORS)]
    there = opacity(image)
    known = (
        (f"make the background {color}", pixels * there + BACKGROUNDS[color] * (1 - there)),
        (f"add {article(color)} border", _framed(pixels, color)),
        ("make it darker", pixels * 0.55),
        ("make it brighter", pixels * 0.6 + 102),
        ("make it night", pixels * np.float32(NIGHT)),
    )
    said, after = known[number % len(known)]
    return Row(said, image, Image.fromarray(after.astype(np.uint8)))


def _framed(pixels: np.ndarray, color: str) -> np.ndarray:
    inside = pixels[BORDER:-BORDER, BORDER:-BORDER]
    framed = np.zeros_like(pixels) + np.float32(BACKGROUNDS[color])
    framed[BORDER:-BORDER, BORDER:-BORDER] = inside
    return framed


def write(folder: Path, rows: list[Row]) -> None:
    """A folder of images with the file that names them."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "metadata.jsonl").open("w", encoding="utf-8") as file:
        for i, (said, before, after) in enumerate(rows):
            names = {"input_image": f"{i:03}_before.png", "edited_image": f"{i:03}_after.png"}
            before.save(folder / names["input_image"])
            after.save(folder / names["edited_image"])
            row = {f"{key}_file_name": name for key, name in names.items()}
            file.write(json.dumps({**row, "edit_prompt": said}) + "\n")


def main() -> None:
    """Writes the pairs for the training and for the test."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--output", type=Path, default=Path("out/edit_lora"))
    args = parser.parse_args()
    pipe = diffusax.DiffusionPipeline.from_pretrained("emoji")
    pipe.set_progress_bar_config(disable=True)
    hat = cut_out(draw(pipe, ["a top hat on a pink background"])[0])
    hat = hat.resize((HAT_WIDTH, HAT_WIDTH * hat.height // hat.width), Image.Resampling.LANCZOS)

    def pairs(names: list[str], count: int) -> list[Row]:
        rng, colors = np.random.default_rng(0), list(BACKGROUNDS)
        some = [article(names[i % len(names)]) for i in range(count)]
        prompts = [f"{name} on {article(str(rng.choice(colors)))} background" for name in some]
        before = [lowered(image) for image in draw(pipe, prompts)]
        rows = [Row(str(rng.choice(INSTRUCTIONS)), x, with_hat(x, hat)) for x in before]
        for i in range(0, count, KNOWN):
            rows[i] = known_edit(before[i], i // KNOWN)
        return rows

    known = [name for name in (*ANIMALS, *FACES) if name not in HELD_OUT]
    write(args.output / "data", pairs(known, args.pairs))
    write(args.output / "test", pairs(list(HELD_OUT), 2 * len(HELD_OUT)))


if __name__ == "__main__":
    main()
