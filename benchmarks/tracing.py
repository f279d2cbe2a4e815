"""How long JAX traces and lowers the programs of full-size models' calls, without compiling them.

    python benchmarks/tracing.py --models xl flux --topology v6e:2x2

The first call with a new size does so, even where it finds compiled programs on the disk. Seconds
are of the processor, and medians of --repeats, each with empty caches. A TPU's topology needs
libtpu, a GPU's jax[cuda12].
"""

import argparse
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
from tpu_compile import of_model, shapes

from diffusax.pipelines.pipeline.ahead import mesh_of_program
from diffusax.runtime.devices.lowering import lowering_platforms
from diffusax.runtime.programs.program import lower
from diffusax.runtime.programs.topology import topology_mesh
from diffusax.runtime.switches import in_mesh


def main() -> None:
    """Prints a line for each program."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=["sd2", "xl", "flux"], choices=MODELS)
    parser.add_argument("--topology", default="v6e:2x2", help="see topology_mesh")
    parser.add_argument("--mesh", default="data=1", help="see make_mesh")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    mesh = topology_mesh(args.topology, args.mesh)
    print(f"{describe()}; {args.topology}, {args.mesh}")
    for model in args.models:
        options = argparse.Namespace(weights=None, offload=False, frames=None, size=None)
        size = of_model(options, model).size
        with tempfile.TemporaryDirectory() as name:
            write_checkpoint(Path(name), MODELS[model])
            pipe = shapes(Path(name), options)
            # The first round imports, and builds the networks.
            for program, request in call_programs(pipe, 1, mesh=mesh, size=size).items():
                rounds = [measured(request, mesh) for _ in range(1 + args.repeats)][1:]
                seconds = statistics.median(took for took, _ in rounds)
                print(f"{model} {program}: {seconds:.2f} s, {rounds[0][1]:,} lines", flush=True)


def measured(request, mesh) -> tuple[float, int]:
    """Returns the seconds that a program takes, and the lines of its module."""
    own = mesh_of_program(request, mesh)
    jax.clear_caches()
    gc.collect()
    began = time.process_time()
    with in_mesh(own):
        lowered = lower(request, lowering_platforms=lowering_platforms(own))
    took = time.process_time() - began
    return took, lowered.as_text().count("\n")


if __name__ == "__main__":
    main()
