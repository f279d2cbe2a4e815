"""Draws and edits pictures with the models inside the package; needs no network."""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

from PIL import Image

import diffusax
from diffusax.utils import captioned, contact_sheet, make_image_grid

PROMPTS = (
    "a red apple",
    "a grinning face on a pink background",
    "a sunflower on a blue background",
    "a fire engine",
    "a pizza on a green background",
    "a cat face on a purple background",
    "a red heart on a yellow background",
    "a full moon on a black background",
)
EDITS = (
    "make the background blue",
    "turn it upside down",
    "make it black and white",
    "add a green border",
    "mirror it",
    "make it night",
    "rotate it to the left",
    "make it smaller",
)
SIDE = 128


def timed(call: Callable[[int], list[Image.Image]]) -> list[Image.Image]:
    """The pictures of a second run, after one that compiles; says how long each took."""
    for seed, run in ((1, "first run, with compilation"), (0, "second run, other noise")):
        start = time.perf_counter()
        images = call(seed)
        print(f"{len(images)} pictures in {time.perf_counter() - start:.2f} s ({run})")
    return images


def large(image: Image.Image) -> Image.Image:
    """For the eye."""
    return image.resize((SIDE, SIDE), Image.Resampling.LANCZOS)


def labelled(before: Image.Image, after: Image.Image, words: str) -> Image.Image:
    """Both pictures side by side, with the instruction below."""
    (cell,) = captioned([make_image_grid([large(before), large(after)], 1, 2)], [words])
    return cell


def main() -> None:
    """Writes a sheet of pictures and one of what edits make of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("out/demo.png"))
    parser.add_argument("--edits", type=Path, default=Path("out/edits.png"))
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--guidance", type=float, default=2.0)
    args = parser.parse_args()
    options = {"num_inference_steps": args.steps, "guidance_scale": args.guidance}

    pipe = diffusax.DiffusionPipeline.from_pretrained("emoji")
    images = timed(lambda seed: pipe(list(PROMPTS), seed=seed, **options).images)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    contact_sheet([image.resize((192, 192), 1) for image in images], columns=4).save(args.output)
    print(f"wrote {args.output}: " + "; ".join(PROMPTS))

    editor = diffusax.DiffusionPipeline.from_pretrained("emoji-edit")
    edited = timed(lambda seed: editor(list(EDITS), image=images, seed=seed, **options).images)
    cells = [labelled(*three) for three in zip(images, edited, EDITS, strict=True)]
    args.edits.parent.mkdir(parents=True, exist_ok=True)
    contact_sheet(cells, columns=4, gap=12).save(args.edits)
    print(f"wrote {args.edits}: " + "; ".join(EDITS))


if __name__ == "__main__":
    main()
