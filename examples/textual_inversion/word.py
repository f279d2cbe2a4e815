"""Pictures of a thing for a word to be learnt from, and what the learnt word then draws.

python examples/textual_inversion/word.py draw --output out/thing/pictures
diffusax train textual-inversion --config examples/textual_inversion/word.yaml
python examples/textual_inversion/word.py check --word out/thing/model
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import diffusax

THING = "octopus"
WORD = "<thing>"
TAUGHT = ("white", "red", "green", "blue", "yellow")
"""The backgrounds of the pictures that the word is learnt from."""
ASKED = ("purple", "orange", "pink")
"""The backgrounds that are asked for afterwards."""
THINGS = (
    *("octopus", "frog", "owl", "penguin", "snail", "turtle", "whale", "robot", "rocket"),
    *("bicycle", "pizza", "banana", "rose", "sun", "umbrella", "guitar", "key", "crown"),
    *("mushroom", "cactus"),
)
CALL: dict[str, Any] = {"num_inference_steps": 25, "guidance_scale": 2.0}


def draw(output: Path) -> None:
    """Draws the pictures, with captions that do not say what the thing is."""
    pipe = diffusax.DiffusionPipeline.from_pretrained("emoji")
    output.mkdir(parents=True, exist_ok=True)
    prompts = [f"{THING} on a {colour} background" for colour in TAUGHT]
    images = pipe(prompts, seed=list(range(len(prompts))), **CALL).images
    lines = []
    for colour, image in zip(TAUGHT, images):
        image.save(output / f"{colour}.png")
        row = {"file_name": f"{colour}.png", "text": f"{WORD} on a {colour} background"}
        lines.append(json.dumps(row))
    (output / "metadata.jsonl").write_text("\n".join(lines) + "\n")


def check(word: Path, seeds: int) -> None:
    """Draws the word on other backgrounds, and finds the nearest picture of a known thing."""
    pipe = diffusax.DiffusionPipeline.from_pretrained("emoji")
    pipe.load_textual_inversion(word)
    found = []
    for colour in ASKED:
        for seed in range(100, 100 + seeds):
            names = [WORD, *THINGS]
            prompts = [f"{name} on a {colour} background" for name in names]
            first, *others = map(pixels, pipe(prompts, seed=[seed] * len(names), **CALL).images)
            distances = [float(np.sqrt(np.mean((first - other) ** 2))) for other in others]
            found.append((THINGS[int(np.argmin(distances))], distances[THINGS.index(THING)]))
    right = sum(name == THING for name, _ in found)
    mean = np.mean([distance for _, distance in found])
    print(
        f"{right} of {len(found)} pictures of {WORD} are nearest to the {THING} of the same noise"
    )
    print(f"their root mean square distance from it is {mean:.3f} of 1 on average")


def pixels(image: Image.Image) -> np.ndarray:
    """Returns the pixels, from 0 to 1."""
    return np.asarray(image, np.float32) / 255


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("draw").add_argument("--output", type=Path, required=True)
    checking = commands.add_parser("check")
    checking.add_argument("--word", type=Path, required=True)
    checking.add_argument("--seeds", type=int, default=4)
    given = parser.parse_args()
    if given.command == "draw":
        draw(given.output)
    else:
        check(given.word, given.seeds)
