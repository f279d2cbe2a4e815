"""Draws the sheet docs/dreambooth.png: what was learnt from, and prompts before and after.

python examples/dreambooth/owl_sheet.py --trained out/dreambooth/lora/model
"""

import argparse
from pathlib import Path
from typing import Any

from draw_subject import POSES, owl
from PIL import Image

import diffusax
from diffusax.utils import labelled_grid

PROMPTS = (
    "a sks owl",
    "a sks owl on a blue background",
    "a sks owl on a yellow background",
    "an owl",
    "a red apple",
)
CELL, GAP = 96, 12


def draw(pipe: Any) -> list[Image.Image]:
    """A picture of each prompt."""
    pipe.set_progress_bar_config(disable=True)
    return list(pipe(list(PROMPTS), seed=[1] * len(PROMPTS)).images)


def load(path: str, model: str) -> Any:
    """A pipeline's folder, or a LoRA's on top of the model."""
    if (Path(path) / "model_index.json").is_file():
        return diffusax.DiffusionPipeline.from_pretrained(path)
    pipe = diffusax.DiffusionPipeline.from_pretrained(model)
    pipe.load_lora_weights(path)
    return pipe


def larger(pictures: list[Image.Image]) -> list[Image.Image]:
    """The pictures as large as the cells of the sheet."""
    return [picture.resize((CELL, CELL)) for picture in pictures]


def below(first: Image.Image, second: Image.Image) -> Image.Image:
    """One image under another, with the same right edge, on white."""
    width = max(first.width, second.width)
    sheet = Image.new("RGB", (width, first.height + GAP + second.height), "white")
    sheet.paste(first, (width - first.width, 0))
    sheet.paste(second, (width - second.width, first.height + GAP))
    return sheet


def main() -> None:
    """Writes the sheet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="emoji")
    parser.add_argument("--trained", default="out/dreambooth/lora/model")
    parser.add_argument("--output", type=Path, default=Path("docs/dreambooth.png"))
    args = parser.parse_args()
    learnt = labelled_grid([larger([owl(pose) for pose in POSES])], ["five pictures"])
    pipes = diffusax.DiffusionPipeline.from_pretrained(args.model), load(args.trained, args.model)
    drawn = labelled_grid([larger(draw(x)) for x in pipes], ["before", "after"], PROMPTS)
    below(learnt, drawn).save(args.output, optimize=True)


if __name__ == "__main__":
    main()
