"""Makes one sheet with an image of each task, with the models inside the package.

It needs no network. Editing as an instruction says is in examples/demo.py.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from PIL import Image, ImageDraw, ImageFont

import diffusax

sys.path.insert(0, str(Path(__file__).parent / "emoji_control"))
from edges import edges

Cell = tuple[str, Image.Image]
CELL = 128
LINE = 16
# The embedded model was made for this guidance.
OPTIONS: dict[str, Any] = {"guidance_scale": 2.0, "seed": 1}


def text_to_image(pipe: diffusax.StableDiffusionPipeline) -> Iterator[Cell]:
    """Four prompts: colours, styles and backgrounds."""
    prompts = {
        "red apple on green": "a red apple on a green background",
        "blue apple": "a blue apple",
        "frog, 3d style": "a frog on a yellow background, 3d style",
        "lion, flat style": "a lion on a pink background, flat style",
    }
    for words, prompt in prompts.items():
        yield words, pipe(prompt, **OPTIONS).images[0]


def image_to_image(pipe: diffusax.StableDiffusionPipeline) -> Iterator[Cell]:
    """A drawing of two colours, and what a growing strength makes of it.

    The strengths are small because the model has learnt its emoji by heart: a tenth of the noise is
    enough for it to put the one that it knows in the place of the drawing.
    """
    drawing = Image.new("RGB", (64, 64), (50, 100, 210))
    ImageDraw.Draw(drawing).ellipse((6, 4, 44, 42), fill=(250, 210, 40))
    yield "a drawing", drawing
    over = diffusax.AutoPipelineForImage2Image.from_pipe(pipe)
    prompt = "a grinning face on a blue background"
    for strength in (0.06, 0.12, 0.6):
        images = over(prompt, image=drawing, strength=strength, **OPTIONS).images
        yield f"strength {strength}", images[0]


def inpainting(pipe: diffusax.StableDiffusionPipeline) -> Iterator[Cell]:
    """The lower half of an emoji generated anew, twice."""
    moon = pipe("a full moon on a blue background", **OPTIONS).images[0]
    mask = Image.new("L", moon.size)
    ImageDraw.Draw(mask).rectangle((0, 32, 63, 63), fill=255)
    yield "an image", moon
    yield "the mask", mask.convert("RGB")
    inside = diffusax.AutoPipelineForInpainting.from_pipe(pipe)
    for name in ("sun with face", "dog face"):
        prompt = f"a {name} on a blue background"
        yield name, inside(prompt, image=moon, mask_image=mask, **OPTIONS).images[0]


def blended_prompts(pipe: diffusax.StableDiffusionPipeline) -> Iterator[Cell]:
    """Embeddings between those of two prompts."""
    lion, negative = pipe.encode_prompt("a lion on a yellow background")
    fox, _ = pipe.encode_prompt("a fox on a yellow background")
    for share in (0.25, 0.45, 0.55, 0.75):
        mixed = jnp.add((1 - share) * lion, share * fox)
        images = pipe(prompt_embeds=mixed, negative_prompt_embeds=negative, **OPTIONS).images
        yield f"{1 - share:.0%} lion, {share:.0%} fox", images[0]


def few_steps(pipe: diffusax.StableDiffusionPipeline) -> Iterator[Cell]:
    """A sampler with which few steps are enough; swapping it compiles nothing."""
    before = pipe.scheduler
    pipe.scheduler = diffusax.DPMSolverMultistepScheduler.from_config(before.config)
    for steps in (1, 2, 4, 20):
        words = "a rocket on a black background"
        images = pipe(words, num_inference_steps=steps, **OPTIONS).images
        yield f"{steps} step{'s' * (steps > 1)}", images[0]
    pipe.scheduler = before


def control(pipe: diffusax.StableDiffusionPipeline) -> Iterator[Cell]:
    """The edges of an emoji that is small and turned, and what different words make of them."""
    emoji = pipe("a lion", **OPTIONS).images[0]
    small = emoji.rotate(30, fillcolor="white").resize((48, 48), Image.Resampling.LANCZOS)
    page = Image.new("RGB", emoji.size, "white")
    page.paste(small, (15, 14))
    lines = edges(page)
    yield "edges", lines
    net = diffusax.ControlNetModel.from_pretrained("emoji-control")
    steered = diffusax.StableDiffusionControlNetPipeline.from_pipe(pipe, controlnet=net)
    for words in ("lion on a blue", "tiger face on a pink", "sunflower on a green"):
        images = steered(f"a {words} background", image=lines, **OPTIONS).images
        yield words, images[0]


ROWS = {
    "Text to image": text_to_image,
    "Image to image": image_to_image,
    "Inpainting": inpainting,
    "ControlNet": control,
    "Between two prompts": blended_prompts,
    "Number of steps": few_steps,
}


def sheet(rows: dict[str, list[Cell]]) -> Image.Image:
    """Two rows side by side; a title for each row, a caption for each of its images."""
    columns, height = max(map(len, rows.values())), CELL + 3 * LINE
    width = columns * (CELL + 8) + LINE
    page = Image.new("RGB", (2 * width - LINE - 8, -(-len(rows) // 2) * height), "white")
    draw, font = ImageDraw.Draw(page), ImageFont.load_default(13)
    for i, (title, cells) in enumerate(rows.items()):
        x, y = i % 2 * width, i // 2 * height
        draw.text((x, y - 2), title, fill="black", font=ImageFont.load_default(17))
        for j, (caption, image) in enumerate(cells):
            left, top = x + j * (CELL + 8), y + LINE + 4
            page.paste(image.resize((CELL, CELL), Image.Resampling.BILINEAR), (left, top))
            draw.rectangle((left, top, left + CELL - 1, top + CELL - 1), outline="lightgray")
            draw.text((left, top + CELL + 1), caption, fill="black", font=font)
    return page


def main() -> None:
    """Generates the rows and says how long they took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("out/tasks.png"))
    args = parser.parse_args()
    start = time.perf_counter()
    pipe = diffusax.StableDiffusionPipeline.from_pretrained("emoji")
    pipe.set_progress_bar_config(disable=True)
    rows = {title: list(draw(pipe)) for title, draw in ROWS.items()}
    args.output.parent.mkdir(parents=True, exist_ok=True)
    sheet(rows).save(args.output)
    count = sum(map(len, rows.values()))
    print(f"wrote {args.output}: {count} pictures in {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
