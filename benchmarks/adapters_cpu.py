"""What LoRAs add to a step of a full-size UNet: time on the CPU, and the programs of TPUs and GPUs.

SD 2 (866 M parameters), random weights, 64x64 latents, batch 2 (one picture with guidance), without
adapters and with adapters of several ranks on all attention layers and on all layers, which both
rows weigh alike, as those of a call with one prompt, or with --by-row each by weights of its own.
What a call does once before its steps, such as adding adapters to kernels, is left out.
    python benchmarks/adapters_cpu.py --dtype float32 bfloat16
    python benchmarks/adapters_cpu.py --topologies v5e:2x2 h200:1 --repeats 0

Those of TPUs and GPUs are compiled without one, for one device; jax[cuda12] or libtpu is needed,
which may lie in an environment of its own. A TPU's kernels are its fusions. A GPU's bytes are those
of the kernels' inputs and results, each once; its operations are those that the network needs.
"""

import argparse
import functools
import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from full_size import SD2
from machine import describe, interleaved_medians

from diffusax.lora.stacks import WeightGroups, room_for
from diffusax.models import UNet2DConditionConfig, UNet2DConditionModel
from diffusax.models.adapters.low_rank import Adapters, LowRank, kernel_shapes
from diffusax.models.network import Network, cast_shapes, initialize_params
from diffusax.pipelines.run.mixing import mixed
from diffusax.runtime.devices.lowering import lowering_platforms
from diffusax.runtime.devices.mesh import replicated
from diffusax.runtime.programs.cost import Cost, Kernel, cost_of, kernels_of, traffic
from diffusax.runtime.programs.flops import count_flops
from diffusax.runtime.programs.topology import compile_there, topology_mesh
from diffusax.runtime.switches import in_mesh

NETWORK = Network(UNet2DConditionModel, UNet2DConditionConfig(**SD2))


def main() -> None:
    """Prints a line for each dtype and kind of adapters."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--rank", nargs="+", type=int, default=[16, 64, 128])
    parser.add_argument("--size", type=int, default=64, help="of the latents")
    parser.add_argument("--repeats", type=int, default=5, help="0 measures no time")
    parser.add_argument("--topologies", nargs="*", default=[], help="see topology_mesh")
    parser.add_argument("--groups", nargs="+", default=["attention", "everything"])
    parser.add_argument("--by-row", action="store_true", help="weights for each row of the batch")
    parser.add_argument("--kinds", type=int, default=0, help="of kernels that are listed, on GPUs")
    parser.add_argument("--effort", type=float, help="of XLA; by default the least for TPUs alone")
    args = parser.parse_args()
    print(describe())
    kinds = {"without": None} | {
        f"{name}, rank {rank}": functools.partial(adapter_shapes, group, rank, args.by_row)
        for (name, group), rank in itertools.product(groups().items(), args.rank)
        if name in args.groups
    }
    for dtype in args.dtype:
        if args.repeats:
            measure(kinds, dtype, args.size, args.repeats)
        for topology in args.topologies:
            compile_for(kinds, dtype, topology, args)


def groups() -> dict[str, list[str]]:
    """The layers that are adapted, by name."""
    known, (attention, _) = list(kernel_shapes(NETWORK)), NETWORK.adapter_groups
    return {"attention": [p for p in known if re.fullmatch(attention, p)], "everything": known}


def adapter_shapes(group: list[str], rank: int, by_row: bool, dtype: str) -> Adapters:
    """The adapters' shapes."""

    def layer(kernel: tuple[int, ...]) -> LowRank:
        down, up = (*kernel[:-1], rank), (rank, kernel[-1])
        which = jax.ShapeDtypeStruct((rank,), jnp.int32)
        return LowRank(*(jax.ShapeDtypeStruct(s, jnp.dtype(dtype)) for s in (down, up)), which)

    shapes = kernel_shapes(NETWORK)
    columns = room_for(1) * WeightGroups({"unet": NETWORK}).count
    weights = jax.ShapeDtypeStruct((2, columns), jnp.float32)
    found = Adapters({path: layer(shapes[path]) for path in group}, weights)
    return (
        found if by_row else jax.eval_shape(weigh_alike, cast_shapes(NETWORK.shapes, dtype), found)
    )


def weigh_alike(params: Any, adapters: Adapters) -> Adapters:
    """The adapters with the weights of the first row for all rows, as a run has them.

    The kernels that it changes have the shapes of the network's own.
    """
    _, layers = mixed(NETWORK, params, adapters.layers, adapters.weights[0])
    return Adapters(layers, adapters.weights)


def step(params: Any, adapters: Adapters | None, sample: Any, context: Any) -> Any:
    """The UNet at timestep 500."""
    return NETWORK.apply(params, sample, jnp.float32(500), context, adapters=adapters)


def measure(kinds: dict[str, Any], dtype: str, size: int, repeats: int) -> None:
    """Prints the medians of all kinds in turns, and their operations."""
    params = initialize_params(NETWORK.shapes, dtype=jnp.dtype(dtype))
    args = jax.tree.map(draw, input_shapes(size, dtype))
    runs, flops = {}, {}
    for name, kind in kinds.items():
        adapters = None if kind is None else jax.tree.map(draw, kind(dtype))
        compiled = jax.jit(step).lower(params, adapters, *args).compile()
        runs[name] = functools.partial(finish, compiled, params, adapters, *args)
        flops[name] = count_flops(step, params, adapters, *args)
    medians = interleaved_medians(runs, repeats)
    first = next(iter(kinds))
    for name, seconds in medians.items():
        more = seconds / medians[first] - 1
        print(
            f"{dtype}, {size}x{size}, {name}: {seconds:.2f} s ({more:+.1%}), "
            f"{flops[name] / 1e12:.3f} TFLOP ({flops[name] / flops[first] - 1:+.1%}), "
            f"median of {repeats}",
            flush=True,
        )


def compile_for(kinds: dict[str, Any], dtype: str, topology: str, args: Any) -> None:
    """Prints what the compiler of a TPU or GPU makes of each kind, on one device."""
    mesh = topology_mesh(topology, "data=1")

    def placed(tree: Any) -> Any:
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated(mesh)), tree
        )

    params, inputs = cast_shapes(NETWORK.shapes, dtype), input_shapes(args.size, dtype)
    (platform,) = lowering_platforms(mesh)
    effort = -1.0 if args.effort is None and platform == "tpu" else args.effort
    first: Cost | None = None
    for name, kind in kinds.items():
        given = params, None if kind is None else kind(dtype), *inputs
        with in_mesh(mesh):
            traced = jax.jit(step).trace(*placed(given))
            lowered = traced.lower(lowering_platforms=(platform,))
            compiled = compile_there(lowered, mesh, effort=effort)
            needed = count_flops(step, *given)
        cost, text = cost_of(compiled, needed=needed), compiled.as_text()
        kernels = text.count(" fusion(") if cost.kernels is None else cost.kernels
        first = first or cost
        print(
            f"{topology}, {dtype}, {args.size}x{args.size}, {name}: {kernels} kernels, "
            f"{cost.tflop:.3f} TFLOP ({cost.tflop / first.tflop - 1:+.1%}), {cost.moved:.2f} GB "
            f"moved ({cost.moved / first.moved - 1:+.1%}), {cost.arguments:.2f} GB of arguments, "
            f"{cost.temporaries:.2f} GB of temporaries",
            flush=True,
        )
        if args.kinds and cost.kernels is not None:
            list_kernels(kernels_of(text), args.kinds)


def list_kernels(kernels: list[Kernel], lines: int) -> None:
    """Prints the most frequent kinds of kernels, with the bytes that they move."""
    by_kind: dict[str, list[Kernel]] = {}
    for kernel in kernels:
        by_kind.setdefault(kernel.kind, []).append(kernel)
    for kind, some in sorted(by_kind.items(), key=lambda item: -len(item[1]))[:lines]:
        found = traffic(some)
        print(f"    {found.kernels:5} {kind}, {found.moved:.2f} GB", flush=True)


def input_shapes(size: int, dtype: str) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Latents and context."""
    shapes = (2, size, size, 4), (2, 77, SD2["cross_attention_dim"])
    return tuple(jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape in shapes)


def draw(shape: Any) -> jax.Array:
    """Small random numbers; of integers, the numbers of two adapters."""
    rng = np.random.default_rng(0)
    if jnp.issubdtype(shape.dtype, jnp.integer):
        return jnp.asarray(rng.integers(0, 2, shape.shape), shape.dtype)
    return jnp.asarray(0.1 * rng.standard_normal(shape.shape, np.float32), shape.dtype)


def finish(compiled: Any, *args: Any) -> None:
    """Runs the step to its end."""
    jax.block_until_ready(compiled(*args))


if __name__ == "__main__":
    main()
