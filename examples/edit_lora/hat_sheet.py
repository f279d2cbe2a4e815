"""Draws the sheet docs/edit_lora.png: emoji that were not learnt from, before and after the hat.

python examples/edit_lora/hat_sheet.py --trained out/edit_lora/run/model
"""

import argparse
from pathlib import Path
from typing import Any

from PIL import Image

import diffusax
from diffusax.utils import labelled_grid

PROMPTS = ("put a hat on it", "give it a hat", "make the background blue", "make it night")
CELL = 72


def edited(pipe: Any, images: list[Image.Image], prompt: str, scale: float) -> list[Image.Image]:
    """The images after an edit. scale: of the adapters."""
    options = {**pipe.call_defaults, "num_inference_steps": 20}
    pipe.set_adapters("hat", scale)
    prompts, seeds = [prompt] * len(images), list(range(len(images)))
    return list(pipe(prompts, image=images, seed=seeds, **options).images)


def main() -> None:
    """Writes the sheet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("out/edit_lora/test"))
    parser.add_argument("--trained", default="out/edit_lora/run/model")
    parser.add_argument("--output", type=Path, default=Path("docs/edit_lora.png"))
    args = parser.parse_args()
    before = [Image.open(path).convert("RGB") for path in sorted(args.data.glob("*_before.png"))]
    pipe = diffusax.DiffusionPipeline.from_pretrained("emoji-edit")
    pipe.set_progress_bar_config(disable=True)
    pipe.load_lora_weights(args.trained, adapter_name="hat")
    before = before[:8]
    rows = [before, edited(pipe, before, PROMPTS[0], 0.0)]
    rows += [edited(pipe, before, prompt, 1.0) for prompt in PROMPTS]
    labels = ["before", f"{PROMPTS[0]}, without the LoRA", *PROMPTS]
    cells = [[image.resize((CELL, CELL)) for image in row] for row in rows]
    labelled_grid(cells, labels).save(args.output, optimize=True)


if __name__ == "__main__":
    main()
