"""How well the embedded model draws what it is asked for.

Retrieval: a picture for each of 200 names; which of all real emoji on white is nearest to it, in
root mean square over pixels at 32x32? Colour: 100 emoji on a named background; is the border's
median colour nearest to that colour of the data set's ten?

Needs the data set: examples/emoji_styles/build_styles.py
    python benchmarks/emoji_quality.py --data out/emoji_styles/data
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from edit_quality import BATCH, picture, small
from machine import describe

import diffusax

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "emoji"))
from names import BACKGROUNDS, article

NAMES, COMPOSED = 200, 100


def real_emoji(folder: Path) -> tuple[list[str], np.ndarray]:
    """Names and pictures in the style that needs no words, on white, n 32 32 3 in [0, 1]."""
    plain = [("style", "==", "noto"), ("background", "==", "white"), ("tint", "==", "")]
    table = pq.read_table(folder, columns=["image", "name"], filters=plain)
    cells = {row["name"]: row["image"] for row in table.to_pylist()}
    return list(cells), np.stack([small(picture(cell)) for cell in cells.values()])


def draw(pipe: Any, prompts: list[str], args: argparse.Namespace) -> np.ndarray:
    """Pictures in [0, 1]."""
    batches = []
    for start in range(0, len(prompts), BATCH):
        # The last batch is filled up, so that there is one shape to compile.
        chunk = (prompts[start : start + BATCH] * BATCH)[:BATCH]
        own = {"num_inference_steps": args.steps, "guidance_scale": args.guidance}
        options = pipe.call_defaults | own
        seeds = [args.seed + start + i for i in range(BATCH)]
        images = pipe(prompt=chunk, seed=seeds, output_type="np", **options).images
        batches.append(images[: len(prompts) - start])
    return np.concatenate(batches)


def background(image: np.ndarray) -> str:
    """The colour whose name fits the border best."""
    border = np.concatenate([image[0], image[-1], image[:, 0], image[:, -1]])
    color = np.median(border, axis=0) * 255
    return min(BACKGROUNDS, key=lambda name: np.square(np.subtract(BACKGROUNDS[name], color)).sum())


def main() -> None:
    """Prints the shares."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="emoji")
    parser.add_argument("--data", type=Path, default=Path("out/emoji_styles/data"))
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--guidance", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--weights", help="int8 or fp8 for kernels of eight bits")
    args = parser.parse_args()
    print(describe())
    rng = np.random.default_rng(args.seed)
    names, real = real_emoji(args.data)
    pipe = diffusax.DiffusionPipeline.from_pretrained(
        args.model, dtype=args.dtype, weights=args.weights
    )
    pipe.set_progress_bar_config(disable=True)

    start = time.perf_counter()
    wanted = rng.choice(len(names), NAMES, replace=False)
    images = draw(pipe, [article(names[i]) for i in wanted], args)
    ranks = []
    for image, index in zip(images, wanted):
        distances = np.square(real - small(image)).mean((1, 2, 3))
        ranks.append(int((distances < distances[index]).sum()))
    top = {n: np.mean(np.array(ranks) < n) for n in (1, 5)}

    colors = [list(BACKGROUNDS)[i % len(BACKGROUNDS)] for i in range(COMPOSED)]
    subjects = rng.choice(len(names), COMPOSED, replace=False)
    prompts = [f"{article(names[i])} on {article(c)} background" for i, c in zip(subjects, colors)]
    found = [background(image) for image in draw(pipe, prompts, args)]
    share = np.mean([a == b for a, b in zip(found, colors)])
    seconds = time.perf_counter() - start
    print(
        f"{args.model}, {args.steps} steps, guidance {args.guidance}: retrieval among {len(names)} "
        f"top-1 {top[1]:.1%}, top-5 {top[5]:.1%} of {NAMES}; background {share:.1%} of {COMPOSED} "
        f"({seconds:.0f} s)"
    )
    wrong = [(names[i], r) for i, r in zip(wanted, ranks) if r][:10]
    print("not first:", "; ".join(f"{name} ({rank + 1}.)" for name, rank in wrong))


if __name__ == "__main__":
    main()
