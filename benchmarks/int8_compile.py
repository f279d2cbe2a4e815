"""What a step of a transformer takes on a TPU with kernels of int8, by the TPU's own compiler.

    python benchmarks/int8_compile.py steps --models z-image --topologies v5e v6e
    python benchmarks/int8_compile.py layers --topologies v5e v6e v5p
    python benchmarks/int8_compile.py cards --models flux --topologies h200 rtx4090

It needs libtpu and no TPU. All times are estimates. libtpu writes into a compiled module how many
cycles it expects of each fusion ("estimated_cycles"); Pallas' kernels have none, and of those the
instructions of the final schedule are counted, with the rounds of their loops, or the time to read
and write their arrays where that is longer. Steps are those of one image of 1024x1024 without
guidance: one block of each kind is compiled, and counts as often as the network has it; the first
and last layers and those of the time, under a hundredth, are left out. "weights" keeps int8 kernels
and multiplies them out ("off" of `int8_activations`), "convrot" multiplies integers.
"cards" counts the kernels of all blocks of a step on GPUs, and the GB that these read and write; it
needs jax[cuda12] and no GPU.
"""

import argparse
import functools
import itertools
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from diffusax.models import (
    Flux3Transformer2DConfig,
    Flux3Transformer2DModel,
    FluxTransformer2DConfig,
    FluxTransformer2DModel,
    QwenImage21Transformer2DConfig,
    QwenImage21Transformer2DModel,
    ZImageTransformer2DConfig,
    ZImageTransformer2DModel,
)
from diffusax.models.network import Network
from diffusax.models.ops.int8 import linear
from diffusax.models.ops.modulation import modulate
from diffusax.models.ops.rotation import Rotation
from diffusax.models.parameter_tree import path_name
from diffusax.models.quantized import Quantized, quantizes
from diffusax.runtime.devices.chips import chip_of
from diffusax.runtime.devices.host import placed_shape
from diffusax.runtime.devices.layouts import place_of
from diffusax.runtime.devices.lowering import int8_activations, lowering_for
from diffusax.runtime.programs.cost import bytes_of, kernels_of, traffic
from diffusax.runtime.programs.topology import compile_there, topology_mesh

CLOCKS = {"v5e": 1.5e9, "v6e": 1.75e9, "v5p": 1.75e9}
"""Cycles in a second: the peak of products in bfloat16 divided by what the matrix units of one
chip multiply in a cycle."""
_DUMP = Path(tempfile.mkdtemp(prefix="libtpu"))
"""Where libtpu writes the schedules of kernels."""
MODES = ("bfloat16", "weights", "convrot")


def shape(*sizes: int, dtype: Any = "bfloat16") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def rotation(tokens: int) -> Rotation:
    return Rotation(*[shape(1, tokens, 64, dtype="float32")] * 2)


def z_image_block(tokens: int) -> tuple:
    return shape(1, tokens, 3840), rotation(tokens), shape(1, dtype="int32"), shape(1, 256)


class Kind(NamedTuple):
    """A kind of block: how often a step computes one, which it is, and what it is given."""

    count: int
    block: Callable[[Any], Any]
    given: tuple


class Model(NamedTuple):
    """A full-size transformer, with as few blocks as have one of each kind."""

    network: Network
    kinds: tuple[Kind, ...]


_CONTEXT, _IMAGE = 512, 4096
_ALL = _CONTEXT + _IMAGE
_MODULATION = (shape(1, 1, 3072),) * 3
_KEYS = (shape(1, _CONTEXT, 32, 128),) * 2

MODELS = {
    "z-image": Model(
        Network(
            ZImageTransformer2DModel, ZImageTransformer2DConfig(n_layers=1, n_refiner_layers=1)
        ),
        (
            Kind(30, lambda m: m.layers[0], z_image_block(_IMAGE + 128)),
            Kind(2, lambda m: m.noise_refiner[0], z_image_block(_IMAGE)),
        ),
    ),
    "flux": Model(
        Network(
            FluxTransformer2DModel,
            FluxTransformer2DConfig(num_layers=1, num_single_layers=1, guidance_embeds=True),
        ),
        (
            Kind(
                19,
                lambda m: m.transformer_blocks[0],
                (
                    shape(1, _IMAGE, 3072),
                    shape(1, _CONTEXT, 3072),
                    (shape(1, 3072),) * 2,
                    rotation(_ALL),
                ),
            ),
            Kind(
                38,
                lambda m: m.single_transformer_blocks[0],
                (shape(1, _ALL, 3072), shape(1, 3072), rotation(_ALL)),
            ),
        ),
    ),
    "flux3": Model(
        Network(
            Flux3Transformer2DModel, Flux3Transformer2DConfig(num_layers=1, num_single_layers=1)
        ),
        (
            Kind(
                5,
                lambda m: m.mode_blocks["image"][0],
                (shape(1, _IMAGE, 3072), _MODULATION, rotation(_IMAGE)),
            ),
            Kind(
                28,
                lambda m: m.single_transformer_blocks[0],
                (
                    shape(1, _ALL, 3072),
                    # Those of the image and of the text differ.
                    (shape(1, _ALL, 3072),) * 3,
                    rotation(_ALL),
                    shape(1, dtype="int32"),
                ),
            ),
        ),
    ),
    "qwen-image21": Model(
        Network(QwenImage21Transformer2DModel, QwenImage21Transformer2DConfig(num_layers=1)),
        (
            Kind(
                32,
                lambda m: m.transformer_blocks[0],
                (
                    shape(1, _IMAGE, 4096),
                    (shape(1, 1, 4096),) * 4,
                    rotation(_IMAGE),
                    _KEYS,
                    shape(1, dtype="int32"),
                ),
            ),
        ),
    ),
}


def kernels_in(params: Any, mode: str) -> Any:
    """The shapes of parameters with kernels in eight bits."""

    def one(path: Any, x: Any) -> Any:
        if mode == "bfloat16" or not quantizes(path_name(path), x.shape) or len(x.shape) != 2:
            return shape(*x.shape)
        group = 256 if x.shape[0] % 256 == 0 else 0
        values, scale = shape(*x.shape, dtype="int8"), shape(x.shape[1], dtype="float32")
        return Quantized(values, scale, np.dtype("bfloat16"), group)

    return jax.tree_util.tree_map_with_path(one, params)


class Times(NamedTuple):
    """Estimated seconds."""

    fusions: float
    pallas: float

    @property
    def all(self) -> float:
        return self.fusions + self.pallas


def compile_for(topology: str, function: Any, mode: str, *args: Any) -> Times:
    """Compiles a function of shapes for one chip, and adds up the estimates."""
    mesh = topology_mesh(f"{topology}:1")
    whole = NamedSharding(mesh, PartitionSpec())
    args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), args)
    for path in _DUMP.iterdir():
        path.unlink()
    # "on" would round the single token of a modulation, too.
    choice = "off" if mode == "weights" else "auto"
    with jax.set_mesh(mesh), lowering_for(["tpu"]), int8_activations(choice):
        traced = jax.jit(function).trace(*args)
        compiled = traced.lower(lowering_platforms=("tpu",)).compile()
    bandwidth = 1e9 * chip_of(mesh.devices.flat[0]).bandwidth
    return times(compiled.as_text(), CLOCKS[topology], bandwidth)


_LINE = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = (\((?:[^()]|\([^()]*\))*\)|\S+) ([\w\-]+)\((.*)")


def times(text: str, clock: float, bandwidth: float) -> Times:
    """Adds up the estimates of a compiled module without loops."""
    dumps = {re.sub(r"^\d+-|-\d+-final_bundles\.txt$", "", p.name): p for p in _DUMP.iterdir()}
    fusions, found, shapes, known = 0, [], {}, {}
    for line in text.splitlines():
        parts = _LINE.match(line)
        if not parts:
            continue
        name, kind, _, rest = parts.groups()
        shapes[name] = kind
        cycles = re.search(r'"estimated_cycles":"(\d+)"', rest)
        fusions += int(cycles[1]) if cycles else 0
        if 'custom_call_target="tpu_custom_call"' in rest:
            operands, attributes = rest.split(', custom_call_target="', 1)
            sizes = [kind, *(shapes[o] for o in re.findall(r"%([\w.\-]+)", operands))]
            # Equal kernels are scheduled once.
            own = re.search(r'"body":"([^"]*)"', attributes)[1]
            if name in dumps:
                known[own] = bundles(dumps[name])
            found.append((own, sum(map(bytes_of, sizes))))
    pallas = sum(max(known[own] / clock, moved / bandwidth) for own, moved in found)
    return Times(fusions / clock, pallas)


def bundles(path: Path) -> int:
    """Counts the instructions of a schedule, those of loops as often as they run."""
    stack = [[0, 1]]
    for line in path.read_text().splitlines():
        if not re.match(r"\s*0x[0-9a-f]+\s+(\w\w)?\s*:", line):
            continue
        depth = line.split("{")[0].count(">")
        if re.search(r"\{\s*\}", line):
            depth = len(stack) - 1
        while len(stack) - 1 < depth:
            stack.append([0, 1])
        while len(stack) - 1 > depth:
            count, rounds = stack.pop()
            stack[-1][0] += count * rounds
        stack[-1][0] += 1
        end = re.search(r"scmp\.\w\w\.s32\.totalorder %\w+, (\d+) /\* loop exit test \*/", line)
        if end:
            stack[-1][1] = int(end[1])
    while len(stack) > 1:
        count, rounds = stack.pop()
        stack[-1][0] += count * rounds
    return stack[0][0]


def call_block(network: Network, kind: Kind, params: Any, given: tuple) -> Any:
    return kind.block(network.module(params))(*given)


def steps(args: Any) -> Iterator[dict[str, Any]]:
    """All blocks of a step."""
    for name, topology, mode in itertools.product(args.models, args.topologies, args.modes):
        model, total, blocks = MODELS[name], Times(0, 0), []
        params = kernels_in(model.network.shapes, mode)
        for kind in model.kinds:
            call = functools.partial(call_block, model.network, kind)
            own = compile_for(topology, call, mode, params, kind.given)
            blocks.append([kind.count, *(round(1e3 * t, 3) for t in own)])
            total = Times(*(t + kind.count * o for t, o in zip(total, own)))
        ms = round(1e3 * total.all, 1)
        yield {"model": name, "topology": topology, "mode": mode, "ms": ms, "blocks": blocks}


def layers(args: Any) -> Iterator[dict[str, Any]]:
    """Three layers of one modulated input, as queries, keys and values are."""
    for topology in args.topologies:
        for tokens, c, d in args.sizes:
            line: dict[str, Any] = {"topology": topology, "tokens": tokens, "c": c, "d": d}
            for mode in args.modes:
                params = kernels_in({"0": {"kernel": shape(c, d)}}, mode)["0"]["kernel"]

                def call(x: Any, vectors: Any, kernels: Any) -> Any:
                    rows = modulate(x, *vectors)
                    return [linear(rows, kernel) for kernel in kernels]

                vectors = (shape(1, 1, c),) * 2
                given = shape(1, tokens, c), vectors, (params,) * 3
                line[mode] = round(1e3 * compile_for(topology, call, mode, *given).all, 3)
            yield line


def placed(sharding: Any, x: Any) -> Any:
    return placed_shape(x, place_of(x, sharding))


def cards(args: Any) -> Iterator[dict[str, Any]]:
    """Kernels and bytes of all blocks of a step on GPUs, integers "on"."""
    for name, topology, mode in itertools.product(args.models, args.topologies, args.modes):
        model, mesh = MODELS[name], topology_mesh(f"{topology}:1")
        put = functools.partial(placed, NamedSharding(mesh, PartitionSpec()))
        choice = "on" if mode == "convrot" else "off"
        params, launches, moved = kernels_in(model.network.shapes, mode), 0, 0.0
        for kind in model.kinds:
            given = jax.tree.map(put, (params, kind.given))
            call = functools.partial(call_block, model.network, kind)
            with jax.set_mesh(mesh), lowering_for(["cuda"]), int8_activations(choice):
                lowered = jax.jit(call).trace(*given).lower(lowering_platforms=("cuda",))
            found = traffic(kernels_of(compile_there(lowered, mesh, effort=None).as_text()))
            launches += kind.count * found.kernels
            moved += kind.count * found.moved
        line = {"model": name, "topology": topology, "mode": mode}
        yield {**line, "kernels": launches, "GB": round(moved, 2)}


RUNS = {"steps": steps, "layers": layers, "cards": cards}


def main() -> None:
    """Prints a line for each case, as JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=RUNS)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--topologies", nargs="+", default=["v5e", "v6e"])
    parser.add_argument("--modes", nargs="+", default=MODES, choices=MODES)
    sizes = [(n, 3072, 3072) for n in (128, 256, 512, 1024, 4096)]
    sizes += [(4096, 1024, 1024), (4096, 640, 640), (4096, 12288, 3072)]
    parser.add_argument(
        "--sizes", nargs="+", type=lambda s: tuple(map(int, s.split("x"))), default=sizes
    )
    args = parser.parse_args()
    # libtpu reads it when it is loaded.
    os.environ["LIBTPU_INIT_ARGS"] = (
        f"--xla_jf_dump_to={_DUMP} --xla_jf_dump_llo_text=true "
        "--xla_jf_dump_llo_pass_label_regex=final_bundles"
    )
    for line in RUNS[args.what](args):
        print(json.dumps(line), flush=True)
    shutil.rmtree(_DUMP)


if __name__ == "__main__":
    main()
