"""Whether DreamBooth's subject is drawn where it is asked for, and nowhere else.

Each picture is compared, by root mean squares over pixels at 32x32, with three kinds of pictures:
the subject on the background asked for (drawn as for the training, so that the truth is known), an
owl, and 15 other emoji, as the model draws these before the training on that background. Which is
nearest? Prompts of the subject should come nearest to it, those of the class to the class, those
of others each to the picture that the model drew for the same prompt before.

Needs what examples/dreambooth/README.md makes:
    python benchmarks/dreambooth_quality.py LoRA=out/dreambooth/lora/model
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from edit_quality import small
from machine import describe

import diffusax

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "emoji"))
sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "dreambooth"))
from draw_subject import POSES, owl
from names import BACKGROUNDS, article
from owl_sheet import load

SUBJECT, CLASS = "sks owl", "owl"
OTHERS = (
    *("red apple", "frog", "dog face", "rocket", "snowman", "whale", "house", "banana"),
    *("crown", "bus", "bell", "cactus", "penguin", "eagle", "robot"),
)
COLORS = ("white", "blue", "yellow", "green")
BATCH = 16
SEEDS = 2
"""The number of pictures of the subject, and of the class, on each background."""


def draw(pipe: Any, prompts: list[str], args: argparse.Namespace) -> np.ndarray:
    """Pictures in [0, 1]."""
    options = {"num_inference_steps": args.steps, "guidance_scale": args.guidance}
    batches = []
    for start in range(0, len(prompts), BATCH):
        # The last batch is filled up, so that there is one shape to compile.
        chunk = (prompts[start : start + BATCH] * BATCH)[:BATCH]
        seeds = [args.seed + start + i for i in range(BATCH)]
        batches.append(pipe(chunk, seed=seeds, output_type="np", **options).images)
    return np.concatenate(batches)[: len(prompts)]


def prompt(name: str, background: str) -> str:
    """What is asked for."""
    said = article(name)
    return said if background == "white" else f"{said} on {article(background)} background"


def subjects(background: str) -> np.ndarray:
    """The subject in all its poses, n 32 32 3 in [0, 1]."""
    pictures = [owl(pose, BACKGROUNDS[background]) for pose in POSES]
    return np.stack([small(np.asarray(x, np.float32) / 255) for x in pictures])


class Truth:
    """The pictures that others are compared with, by their background."""

    def __init__(self, pipe: Any, args: argparse.Namespace):
        """Draws the class and the other emoji with the model before its training."""
        names = (CLASS, *OTHERS)
        prompts = [prompt(name, b) for b in COLORS for name in names]
        drawn = np.stack([small(x) for x in draw(pipe, prompts, args)])
        known = drawn.reshape(len(COLORS), len(names), *drawn.shape[1:])
        self.known = dict(zip(COLORS, known))

    def nearest(self, picture: np.ndarray, background: str) -> str:
        """The name of what a picture 64 64 3 is nearest to."""
        rivals = np.concatenate([subjects(background), self.known[background]])
        names = (*[SUBJECT] * len(POSES), CLASS, *OTHERS)
        return names[int(np.square(rivals - small(picture)).mean((1, 2, 3)).argmin())]


def shares(pipe: Any, truth: Truth, args: argparse.Namespace) -> list[float]:
    """Of the prompts of the subject, of the class and of others: right, and the subject instead."""
    asked = [(name, b) for name in (SUBJECT, CLASS) for b in COLORS for _ in range(SEEDS)]
    asked += [(name, COLORS[i % len(COLORS)]) for i, name in enumerate(OTHERS)]
    images = draw(pipe, [prompt(*pair) for pair in asked], args)
    found = np.array([truth.nearest(x, pair[1]) for x, pair in zip(images, asked)])
    names = np.array([name for name, _ in asked])
    kinds = [names == SUBJECT, names == CLASS, np.isin(names, OTHERS)]
    right = [float((found == names)[kind].mean()) for kind in kinds]
    return [x for kind, r in zip(kinds, right) for x in (r, float((found[kind] == SUBJECT).mean()))]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="*", help="name=folder of a trained model or LoRA")
    parser.add_argument("--model", default="emoji", help="what the training started from")
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--guidance", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=1000)
    args = parser.parse_args()
    print(describe())
    before = diffusax.DiffusionPipeline.from_pretrained(args.model)
    before.set_progress_bar_config(disable=True)
    truth = Truth(before, args)
    print("\n| | subject: right | class: right | class: subject instead | others: right |")
    print("|---|---|---|---|---|")
    for run in ("before=", *args.runs):
        name, _, path = run.partition("=")
        start = time.perf_counter()
        pipe = load(path, args.model) if path else before
        pipe.set_progress_bar_config(disable=True)
        values = shares(pipe, truth, args)
        cells = [f"{values[i]:.0%}" for i in (0, 2, 3, 4)]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
        print(f"{name}: {time.perf_counter() - start:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
