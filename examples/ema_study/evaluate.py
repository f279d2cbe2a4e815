"""Measures the averages of runs on held-out pairs, and adds what it finds to results.jsonl.

python examples/ema_study/evaluate.py out/ema_study/constant-0 out/ema_study/cosine-0

Each line is of one average of one run:
  loss: the training's loss on all held-out pairs, without dropout, always at the same timesteps
    and with the same noise.
  right: the share of edits whose nearest picture is the true result, as benchmarks/edit_quality.py
    has it; rights are the numbers of them by kind.
  error: from the edit to the true result, a root mean square over pixels at 32x32.
  kept: the same over the pixels alone that the true result shares with the picture before.
Edits are drawn for the first part of each kind's pairs, always from the same noise. What
results.jsonl has already is not measured again.
"""

import argparse
import collections
import dataclasses
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import diffusax
from diffusax import resolve
from diffusax.models import Params
from diffusax.training import (
    Draws,
    EditDataConfig,
    InstructPix2PixConfig,
    encode_pixels,
    instruct_pix2pix,
)

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from edit_quality import Pair, distance, edit, is_right, read, small

RESULTS = Path(__file__).with_name("results.jsonl")
SAME = 0.02
"""Pixels that differ by less in all channels are shared."""
SHARED = 0.05
"""The least share of pixels in common that makes a picture count."""
CHUNK = 100
ORDER = (
    *("start", "none", "full-0.98", "late-0.2-0.98", "posthoc-0.1", "late-0.035-0.9"),
    *("late-0.1-0.9", "posthoc-0.25", "late-0.035-0.98", "full-0.9", "late-0.1-0.98"),
    *("posthoc-0.05", "late-0.05-0.9", "late-0.05-0.98", "late-0.2-0.9", "posthoc-0.15"),
)
"""What is measured first."""
KEY = 20_231_205


@dataclasses.dataclass(frozen=True)
class Validation:
    """The loss on held-out pairs."""

    batches: list[tuple[dict[str, jax.Array], Draws]]
    frozen: Params
    loss: Any

    @classmethod
    def open(cls, model: str, data: Path, *, copies: int) -> "Validation":
        """All pairs of the test, with latents of a model's autoencoder.

        copies: the number of timesteps for each pair.
        """
        pictures = EditDataConfig(
            path=str(data / "pairs.parquet"), center_crop=True, random_flip=False
        )
        training = InstructPix2PixConfig(
            model=model, data=pictures, train_text_encoder=True, compute_dtype="float32"
        )
        recipe: Any = instruct_pix2pix(training)
        denoising = dataclasses.replace(recipe.denoising, conditioning_dropout=0.0)
        rng = np.random.default_rng(0)
        rows = [recipe.example(recipe.source[i], rng) for i in range(len(recipe.source))]
        vae, params = recipe.base.networks["vae"], recipe.base.load("vae").params
        encode = jax.jit(lambda pixels: encode_pixels(vae, params, pixels))
        batches = []
        for copy in range(copies):
            for start in range(0, len(rows), CHUNK):
                chunk = rows[start : start + CHUNK]
                pixels = {name: np.stack([row[name] for row in chunk]) for name in chunk[0]}
                batch = {
                    "moments": jnp.concatenate(encode(pixels["pixel_values"]), axis=-1),
                    "original_latents": encode(pixels["original_pixel_values"])[0],
                    "input_ids": jnp.asarray(pixels["input_ids"]),
                }
                key = jax.random.fold_in(jax.random.key(KEY + copy), start)
                batches.append((batch, denoising.draw(batch, jax.random.split(key, len(chunk)))))
        empty = {name: jnp.asarray(ids) for name, ids in recipe.base.tokenize("").items()}
        return cls(batches, {"empty": empty}, jax.jit(denoising.with_draws))

    def __call__(self, params: Params) -> float:
        """The mean over pairs and timesteps."""
        losses = [self.loss(params, self.frozen, *batch) for batch in self.batches]
        return float(jnp.concatenate(losses).mean())


def some_of_each(pairs: list[Pair], count: int) -> list[Pair]:
    """So many of all pairs, about the same share of each kind, those that come first."""
    kinds = collections.Counter(pair.kind for pair in pairs)
    seen = collections.Counter[str]()
    places = []
    for pair in pairs:
        places.append((seen[pair.kind] + 0.5) / kinds[pair.kind])
        seen[pair.kind] += 1
    return [pairs[i] for i in sorted(np.argsort(places, kind="stable")[:count])]


def shared_pixels(pair: Pair) -> np.ndarray:
    """32 32: where the true result is the picture before."""
    return np.abs(small(pair.before) - small(pair.after)).max(-1) < SAME


def kept_error(image: np.ndarray, pair: Pair) -> float | None:
    """The error where nothing was to change; None for edits that change nearly all."""
    mask = shared_pixels(pair)
    if mask.mean() < SHARED:
        return None
    return float(np.sqrt(np.square(small(image) - small(pair.after))[mask].mean()))


def score(images: np.ndarray, pairs: list[Pair]) -> dict[str, Any]:
    """What is measured on edits."""
    right = [is_right(*both) for both in zip(images, pairs)]
    kept = [kept_error(*both) for both in zip(images, pairs)]
    errors = [distance(image, pair.after) for image, pair in zip(images, pairs)]
    rights = collections.Counter({pair.kind: 0 for pair in pairs})
    rights.update(pair.kind for pair, yes in zip(pairs, right) if yes)
    return {
        "right": round(float(np.mean(right)), 5),
        "error": round(float(np.mean(errors)), 5),
        "kept": round(float(np.mean([error for error in kept if error is not None])), 5),
        "rights": dict(rights),
        "pairs": len(pairs),
    }


def measure_edits(model: str, pairs: list[Pair], args: argparse.Namespace) -> dict[str, Any]:
    """What the model in a folder makes of the pairs."""
    pipe = diffusax.DiffusionPipeline.from_pretrained(model, dtype="float32")
    pipe.set_progress_bar_config(disable=True)
    return score(edit(pipe, pairs, args, args.image_guidance), pairs)


def measure_loss(model: str, validation: Validation) -> dict[str, Any]:
    """The loss of the model in a folder."""
    names = ("unet", "text_encoder")
    path = resolve(model)
    params = {name: diffusax.load_network(path / name, dtype="float32").params for name in names}
    return {"loss": round(validation(params), 6)}


def models(runs: list[Path], start: str) -> list[tuple[dict[str, Any], str]]:
    """What identifies a result, and the model. start: where the runs began."""
    found: list[tuple[dict[str, Any], str]] = [
        ({"schedule": "", "seed": 0, "average": "start"}, start)
    ]
    for run in runs:
        schedule, seed = run.name.split("-")
        for folder in sorted((run / "models").glob("*")):
            names = {"schedule": schedule, "seed": int(seed), "average": folder.name}
            found.append((names, str(folder)))
    # One average of all runs after the other, so that what is there can be compared at any time.
    return sorted(found, key=lambda model: _place(model[0]["average"]))


def _place(average: str) -> tuple[int, str]:
    return (ORDER.index(average) if average in ORDER else len(ORDER), average)


def main() -> None:
    """Adds lines to the results."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("runs", type=Path, nargs="+", help="folders such as constant-0")
    parser.add_argument("--start", default="emoji-edit", help="the model that the runs began with")
    parser.add_argument("--data", type=Path, default=Path("out/emoji_edit/test"))
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--copies", type=int, default=2)
    parser.add_argument("--guidance", type=float, default=2.0)
    parser.add_argument("--image-guidance", type=float, default=1.5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--measures", nargs="+", default=["loss", "edits"])
    args = parser.parse_args()
    names = ("schedule", "seed", "average")
    lines = args.results.read_text().splitlines() if args.results.is_file() else []
    rows = [json.loads(line) for line in lines]
    validation = Validation.open(args.start, args.data, copies=args.copies)
    pairs = some_of_each(read(args.data / "pairs.parquet", "edit_prompt", 300), args.pairs)
    measures: dict[str, tuple[str, Callable[[str], dict[str, Any]]]] = {
        "loss": ("loss", lambda model: measure_loss(model, validation)),
        "edits": ("right", lambda model: measure_edits(model, pairs, args)),
    }
    for column, measure in (measures[name] for name in args.measures):
        done = {tuple(row[name] for name in names) for row in rows if column in row}
        for row, model in models(args.runs, args.start):
            if tuple(row.values()) in done:
                continue
            start = time.perf_counter()
            line = json.dumps(row | measure(model))
            with args.results.open("a") as file:
                print(line, file=file)
            print(line, f"{time.perf_counter() - start:.1f} s", flush=True)


if __name__ == "__main__":
    main()
