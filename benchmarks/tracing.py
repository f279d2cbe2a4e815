"""How long JAX traces and lowers the programs of full-size models, without compiling them.

    python benchmarks/tracing.py --models xl flux --topology v6e:2x2
    python benchmarks/tracing.py --models xl --training train-lora --topology h200:1

These are the programs of a call, or a training step of one example, rank 16, blocks computed again.

The first call with a new size does so, even where it finds compiled programs on the disk. Seconds
are of the processor, and medians of --repeats, each with empty caches. A TPU's topology needs
libtpu, a GPU's jax[cuda12].
"""

import argparse
import functools
import gc
import os
import statistics
import tempfile
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
from machine import describe
from random_models import MODELS, call_programs, write_checkpoint
from tpu_compile import TRAINING, of_model, shapes, training_of

from diffusax.pipelines.pipeline.ahead import mesh_of_program
from diffusax.runtime.devices.lowering import lowering_platforms
from diffusax.runtime.programs.program import lower
from diffusax.runtime.programs.topology import topology_mesh
from diffusax.runtime.switches import in_mesh
from diffusax.training.loop.program import lower_step


def main() -> None:
    """Prints a line for each program."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=["sd2", "xl", "flux"], choices=MODELS)
    parser.add_argument("--topology", default="v6e:2x2", help="see topology_mesh")
    parser.add_argument("--mesh", default="data=1", help="see make_mesh")
    parser.add_argument("--training", choices=TRAINING, help="a step of it, instead of a call")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    mesh = topology_mesh(args.topology, args.mesh)
    print(f"{describe()}; {args.topology}, {args.mesh}")
    for model in args.models:
        options = of_model(argparse.Namespace(**OPTIONS), model)
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            write_checkpoint(folder, MODELS[model])
            for program, lowered in programs(folder, mesh, options, args.training):
                # The first round imports, and builds the networks.
                rounds = [measured(lowered) for _ in range(1 + args.repeats)][1:]
                seconds = statistics.median(took for took, _ in rounds)
                print(f"{model} {program}: {seconds:.2f} s, {rounds[0][1]:,} lines", flush=True)


OPTIONS = {
    **{"weights": None, "offload": False, "frames": None, "size": None, "batch": 1, "rank": 16},
    **{"accumulate": 1, "checkpointing": "blocks", "ema": "none"},
}
"""Those of benchmarks/tpu_compile.py."""


def programs(folder: Path, mesh, options, training: str | None):
    """Yields the names of programs, and functions that lower them."""
    if training:
        recipe, config = training_of(folder, mesh, options, training)
        yield training, in_its_mesh(mesh, functools.partial(lower_step, recipe, config, mesh))
        return
    pipe = shapes(folder, options)
    for program, request in call_programs(pipe, 1, mesh=mesh, size=options.size).items():
        own = mesh_of_program(request, mesh)
        platforms = lowering_platforms(own)
        run = functools.partial(lower, request, lowering_platforms=platforms)
        yield program, in_its_mesh(own, run)


def in_its_mesh(mesh, run):
    """Returns a function that runs another in the context of a mesh."""

    def call():
        with in_mesh(mesh):
            return run()

    return call


def measured(lowered) -> tuple[float, int]:
    """Returns the seconds that a program takes, and the lines of its module."""
    jax.clear_caches()
    gc.collect()
    began = time.process_time()
    module = lowered()
    took = time.process_time() - began
    return took, module.as_text().count("\n")


if __name__ == "__main__":
    main()
