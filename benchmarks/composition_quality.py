"""How well the embedded model draws what it has never seen together.

Each prompt names an emoji in a style on a background, or in a colour, that the training left out,
though it had the emoji, the style, the background and the colour in other company. A picture is
right if the true one is nearer to it, in root mean square over pixels at 32x32, than the same emoji
in every other style, colour and on every other background, and than 60 other emoji in the same
style and on the same background. The last line is of the autoencoder alone: the mean ratio of
signal to noise of the true pictures, encoded and decoded, at 64x64.

Needs the data set: examples/emoji_styles/build_styles.py
    python benchmarks/composition_quality.py --data out/emoji_styles/test
"""

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from edit_quality import SAME, distance, picture
from emoji_quality import draw
from machine import describe

import diffusax


def is_right(image: np.ndarray, row: dict[str, Any]) -> bool:
    """Whether the true picture is the nearest; those that are the same to the eye do not count."""
    true = picture(row["image"])
    others = [picture(cell) for cell in row["other_images"]]
    rivals = [other for other in others if distance(other, true) > SAME]
    return distance(image, true) < min(distance(image, other) for other in rivals)


def decibels(pipe: Any, pictures: np.ndarray) -> float:
    """The mean peak signal-to-noise ratio of pictures n 64 64 3 after encoding and decoding."""
    decoded = np.clip(np.asarray(pipe.vae.run(pictures * 2 - 1)) / 2 + 0.5, 0, 1)
    return float(-10 * np.log10(np.square(decoded - pictures).mean((1, 2, 3))).mean())


def main() -> None:
    """Prints the shares."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="emoji")
    parser.add_argument("--data", type=Path, default=Path("out/emoji_styles/test"))
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--guidance", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--weights", help="int8 or fp8 for kernels of eight bits")
    args = parser.parse_args()
    print(describe())
    rows = pq.read_table(args.data).to_pylist()
    pipe = diffusax.DiffusionPipeline.from_pretrained(
        args.model, dtype=args.dtype, weights=args.weights
    )
    pipe.set_progress_bar_config(disable=True)
    start = time.perf_counter()
    images = draw(pipe, [row["text"] for row in rows], args)
    right = np.array([is_right(*both) for both in zip(images, rows)])
    kinds = np.array([(row["tint"] and "colour") or f"{row['style']} style" for row in rows])
    print(f"{args.model}, {args.steps} steps ({time.perf_counter() - start:.0f} s)\n")
    print("| held out | prompts | right |\n|---|---|---|")
    for kind in sorted(set(kinds)):
        print(f"| {kind} | {(kinds == kind).sum()} | {right[kinds == kind].mean():.1%} |")
    print(f"| all | {len(rows)} | {right.mean():.1%} |")
    pictures = np.stack([picture(row["image"]) for row in rows])
    print(f"\nautoencoder: {decibels(pipe, pictures):.1f} dB")


if __name__ == "__main__":
    main()
