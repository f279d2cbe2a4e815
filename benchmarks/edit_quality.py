"""How well the embedded editing model does what it is told, on edits whose result is known.

Pictures are compared by root mean squares over pixels at 32x32, in [0, 1].
  right: the share of edits whose nearest picture is the true result, among it, the picture before
    and the results of all the other instructions there are for that picture (about 30; those that
    hardly differ from the true result are left out).
  error: from the edit to the true result; "untouched" is that of the picture before, "decoded" that
    of the true result through the autoencoder, the best there is.
With --curve, over image guidance scales, as figure 8 of Brooks et al. 2023 with pixels for CLIP:
  kept: the cosine of the edit and the picture before, each less its mean.
  direction: the cosine of the change made and the change asked for.

Needs the data set: examples/emoji_edit/build_data.py
    python benchmarks/edit_quality.py --data out/emoji_edit/test
"""

import argparse
import inspect
import io
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet as pq
from machine import describe
from PIL import Image

import diffusax

SAME = 0.02
"""A root mean square: pictures nearer than this are the same to the eye."""
BATCH = 50


class Pair(NamedTuple):
    """An edit to make, with pictures 64 64 3 in [0, 1]."""

    kind: str
    prompt: str
    before: np.ndarray
    after: np.ndarray
    others: list[np.ndarray]


def read(path: Path, column: str, count: int) -> list[Pair]:
    """The pairs of a Parquet file. column: with the instructions."""
    return [
        Pair(
            row["kind"],
            row[column],
            picture(row["input_image"]),
            picture(row["edited_image"]),
            [picture(cell) for cell in row["other_images"]],
        )
        for row in pq.read_table(path).to_pylist()[:count]
    ]


def picture(cell: dict[str, Any]) -> np.ndarray:
    """Of a cell of Parquet."""
    return np.asarray(Image.open(io.BytesIO(cell["bytes"])), np.float32) / 255


def edit(pipe: Any, pairs: list[Pair], args: argparse.Namespace, scale: float) -> np.ndarray:
    """What the model makes of the pictures before. scale: of the guidance by the picture."""
    options = pipe.call_defaults | {
        "num_inference_steps": args.steps,
        "guidance_scale": args.guidance,
        "output_type": "np",
    }
    if "image_guidance_scale" not in inspect.signature(pipe).parameters:
        # All pictures of a call are looked at for each of its prompts.
        return np.concatenate(
            [
                pipe(
                    prompt=pair.prompt, image=pil(pair.before), seed=args.seed + i, **options
                ).images
                for i, pair in enumerate(pairs)
            ]
        )
    batches = []
    for start in range(0, len(pairs), BATCH):
        # The last batch is filled up, so that there is one shape to compile.
        chunk = (pairs[start : start + BATCH] * BATCH)[:BATCH]
        images = pipe(
            prompt=[pair.prompt for pair in chunk],
            image=[pil(pair.before) for pair in chunk],
            seed=[args.seed + start + i for i in range(BATCH)],
            **options | {"image_guidance_scale": scale},
        ).images
        batches.append(images[: len(pairs) - start])
    return np.concatenate(batches)


def pil(image: np.ndarray) -> Image.Image:
    """Of a picture in [0, 1]."""
    return Image.fromarray(np.uint8(image * 255 + 0.5))


def small(image: np.ndarray) -> np.ndarray:
    """64 64 3 -> 32 32 3, means of 2x2 pixels."""
    return image.reshape(32, 2, 32, 2, 3).mean((1, 3))


def distance(a: np.ndarray, b: np.ndarray) -> float:
    """The root mean square of the difference at 32x32."""
    return float(np.sqrt(np.square(small(a) - small(b)).mean()))


def is_right(image: np.ndarray, pair: Pair) -> bool:
    """Whether the true result is the nearest picture."""
    others = [p for p in (pair.before, *pair.others) if distance(p, pair.after) > SAME]
    return distance(image, pair.after) < min(distance(image, p) for p in others)


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    """Of two pictures as vectors."""
    a, b = small(a).ravel(), small(b).ravel()
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b) + 1e-8))


def decoded(pipe: Any, pairs: list[Pair]) -> np.ndarray:
    """The true results through the autoencoder."""
    x = np.stack([pair.after for pair in pairs]) * 2 - 1
    return np.asarray(pipe.vae.run(x)) / 2 + 0.5


def print_kinds(pipe: Any, pairs: list[Pair], images: np.ndarray) -> None:
    """A table with a row for each kind of edit."""
    right = np.array([is_right(*both) for both in zip(images, pairs)])
    error = np.array([distance(image, pair.after) for image, pair in zip(images, pairs)])
    untouched = np.array([distance(pair.before, pair.after) for pair in pairs])
    best = np.array([distance(y, pair.after) for y, pair in zip(decoded(pipe, pairs), pairs)])
    print("| edit | pairs | right | error | untouched | decoded |")
    print("|---|---|---|---|---|---|")
    kinds = np.array([pair.kind for pair in pairs])
    for kind in (*dict.fromkeys(kinds), "all"):
        rows = (kinds == kind) | (kind == "all")
        means = (values[rows].mean() for values in (error, untouched, best))
        cells = " | ".join(f"{value:.3f}" for value in means)
        print(f"| {kind} | {rows.sum()} | {right[rows].mean():.1%} | {cells} |")


def print_curve(pipe: Any, pairs: list[Pair], args: argparse.Namespace) -> None:
    """A table with a row for each image guidance scale."""
    print("| image guidance | kept | direction | right | error |")
    print("|---|---|---|---|---|")
    for scale in args.scales:
        both = list(zip(edit(pipe, pairs, args, scale), pairs))
        kept = np.mean([cosine(y - y.mean(), p.before - p.before.mean()) for y, p in both])
        direction = np.mean([cosine(y - p.before, p.after - p.before) for y, p in both])
        right = np.mean([is_right(y, p) for y, p in both])
        error = np.mean([distance(y, p.after) for y, p in both])
        print(f"| {scale} | {kept:.3f} | {direction:.3f} | {right:.1%} | {error:.3f} |")


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="emoji-edit")
    parser.add_argument("--data", type=Path, default=Path("out/emoji_edit/test"))
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--guidance", type=float, default=2.0)
    parser.add_argument("--image-guidance", type=float, default=1.5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--weights", help="int8 or fp8 for kernels of eight bits")
    parser.add_argument("--curve", action="store_true")
    parser.add_argument(
        "--scales", type=float, nargs="+", default=[1.0, 1.2, 1.4, 1.6, 1.8, 2.0, 2.2]
    )
    parser.add_argument("--brief", action="store_true", help="the held-out pairs alone")
    args = parser.parse_args()
    print(describe())
    pipe = diffusax.DiffusionPipeline.from_pretrained(
        args.model, dtype=args.dtype, weights=args.weights
    )
    pipe.set_progress_bar_config(disable=True)
    print(
        f"{args.model}, {args.steps} steps, guidance {args.guidance}, "
        f"image guidance {args.image_guidance}, {args.dtype}"
    )
    held_out = read(args.data / "pairs.parquet", "edit_prompt", args.count)
    if args.curve:
        print_curve(pipe, held_out, args)
        return
    sets = {"held-out pairs": held_out}
    if not args.brief:
        sets["the same in other words"] = read(
            args.data / "pairs.parquet", "new_wording", args.count
        )
        sets["names never seen"] = read(args.data / "names.parquet", "edit_prompt", args.count)
    for name, pairs in sets.items():
        start = time.perf_counter()
        images = edit(pipe, pairs, args, args.image_guidance)
        print(f"\n{name} ({time.perf_counter() - start:.0f} s)\n")
        print_kinds(pipe, pairs, images)


if __name__ == "__main__":
    main()
