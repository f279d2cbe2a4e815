"""A run over many prompts with and without work beside the device's: reading, PNG files, the disk.

Both write the same files. The model inside the package draws 64x64 pictures; the fewer steps, the
more of the time goes to what can be done beside them. With --mixed the lines have 4 to 50 steps,
eight samplers, with guidance and without; run it in turns with another version of diffusax.
    python benchmarks/offline_cpu.py
    python benchmarks/offline_cpu.py --mixed 200
"""

import argparse
import itertools
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from machine import describe, interleaved_medians

import diffusax
from diffusax import offline

SAMPLERS = ("dpm++2m", "euler", "euler_a", "heun", "ddim", "unipc", "dpm++2m_sde", "lcm")


def main() -> None:
    """Prints a line for each number of steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--mixed", type=int, default=0, help="this many lines of mixed settings")
    args = parser.parse_args()
    print(describe("pillow"))
    pipe = diffusax.DiffusionPipeline.from_pretrained("emoji")
    if args.mixed:
        draw_mixed(pipe, args.mixed, args.batch_size, args.repeats)
        return
    names = ["a red apple", "cat face", "fire engine on a blue background", "star"]
    prompts = list(itertools.islice(itertools.cycle(names), args.images))
    for steps in args.steps:
        compare(pipe, prompts, steps, args.batch_size, args.repeats)


def draw_mixed(pipe, count: int, batch_size: int, repeats: int) -> None:
    """Images per second of lines with steps, samplers and guidance of their own."""
    r = np.random.default_rng(0)
    rows = [
        {
            "prompt": f"a {('red apple', 'lion', 'fox', 'rocket', 'pizza', 'frog')[i % 6]}",
            "steps": int(r.integers(4, 51)),
            "guidance": float(r.choice([1.0, 2.0, 4.0])),
            "sampler": SAMPLERS[i % len(SAMPLERS)],
        }
        for i in range(count)
    ]
    settings = offline.Settings(batch_size=batch_size)
    seconds = []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(repeats + 1):
            began = time.perf_counter()
            out = Path(tempfile.mkdtemp(dir=folder))
            assert offline.generate(pipe, rows, out, settings, progress=False).drawn == count
            seconds.append(time.perf_counter() - began)
    # The first compiles.
    median = statistics.median(seconds[1:])
    print(
        f"{count} mixed lines, batch {batch_size}: {count / median:.2f} images/s "
        f"({median:.1f} s, median of {repeats})",
        flush=True,
    )


def compare(pipe, prompts: list[str], steps: int, batch_size: int, repeats: int) -> None:
    """Images per second, in turns."""
    settings = offline.Settings(steps=steps, batch_size=batch_size, images_per_shard=len(prompts))

    with tempfile.TemporaryDirectory() as folder:

        def run(lookahead: int) -> None:
            out = tempfile.mkdtemp(dir=folder)
            options = {"progress": False, "lookahead": lookahead}
            done = offline.generate(pipe, prompts, Path(out), settings, **options)
            assert done.drawn == len(prompts)

        medians = interleaved_medians({"with": lambda: run(2), "without": lambda: run(0)}, repeats)
    speeds = {name: len(prompts) / seconds for name, seconds in medians.items()}
    print(
        f"{steps} steps, batch {batch_size}, {len(prompts)} images: {speeds['with']:.1f} images/s "
        f"with overlap, {speeds['without']:.1f} without, ratio "
        f"{speeds['with'] / speeds['without']:.2f} (median of {repeats})",
        flush=True,
    )


if __name__ == "__main__":
    main()
