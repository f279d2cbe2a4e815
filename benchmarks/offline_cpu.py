"""A run over many prompts with and without work beside the device's: reading, PNG files, the disk.

Both write the same files. The model inside the package draws 64x64 pictures; the fewer steps, the
more of the time goes to what can be done beside them.
    python benchmarks/offline_cpu.py
"""

import argparse
import itertools
import tempfile
from pathlib import Path

from machine import describe, interleaved_medians

import diffusax
from diffusax import offline


def main() -> None:
    """Prints a line for each number of steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 4])
    args = parser.parse_args()
    print(describe("pillow"))
    pipe = diffusax.DiffusionPipeline.from_pretrained("emoji")
    names = ["a red apple", "cat face", "fire engine on a blue background", "star"]
    prompts = list(itertools.islice(itertools.cycle(names), args.images))
    for steps in args.steps:
        compare(pipe, prompts, steps, args.batch_size, args.repeats)


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
