"""How long JAX traces and lowers the programs of full-size models' calls, without compiling them.

    python benchmarks/tracing.py --models xl flux --topology v6e:2x2

Listing the programs of a call traces all of them, as the first call with a new size does. Seconds
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
from random_models import MODELS, call_programs, write_checkpoint
from tpu_compile import of_model, shapes

from diffusax.pipelines.pipeline.ahead import mesh_of_program
from diffusax.runtime.devices.lowering import lowering_platforms
from diffusax.runtime.programs.program import lower
from diffusax.runtime.programs.topology import topology_mesh
from diffusax.runtime.switches import in_mesh


def main() -> None:
    """Prints a line for each model."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=["sd2", "xl", "flux"], choices=MODELS)
    parser.add_argument("--topology", default="v6e:2x2", help="see topology_mesh")
    parser.add_argument("--mesh", default="data=1", help="see make_mesh")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    mesh = topology_mesh(args.topology, args.mesh)
    for model in args.models:
        options = argparse.Namespace(weights=None, offload=False, frames=None, size=None)
        size = of_model(options, model).size
        with tempfile.TemporaryDirectory() as name:
            write_checkpoint(Path(name), MODELS[model])
            pipe = shapes(Path(name), options)
            # The first round imports, and builds the networks.
            rounds = [measured(pipe, mesh, size) for _ in range(1 + args.repeats)][1:]
        listing, lowering = (statistics.median(column) for column in list(zip(*rounds))[:2])
        lines = rounds[0][2]
        print(
            f"{model}, {args.topology}, {args.mesh}: {listing:.2f} s to list the programs, "
            f"{lowering:.2f} s to lower them, {lines:,} lines"
        )


def measured(pipe, mesh, size) -> tuple[float, float, int]:
    """Returns the seconds of listing and of lowering, and the lines of the modules."""
    jax.clear_caches()
    gc.collect()
    began = time.process_time()
    requests = call_programs(pipe, 1, mesh=mesh, size=size).values()
    listed = time.process_time()
    lowered = [lowered_for(request, mesh) for request in requests]
    done = time.process_time()
    return listed - began, done - listed, sum(x.as_text().count("\n") for x in lowered)


def lowered_for(request, mesh):
    """Returns a program as it is lowered for its part of the mesh."""
    own = mesh_of_program(request, mesh)
    with in_mesh(own):
        return lower(request, lowering_platforms=lowering_platforms(own))


if __name__ == "__main__":
    main()
