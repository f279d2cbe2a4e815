"""Peak host memory while a full-size UNet (860 M parameters, 3.4 GB) is loaded, and FLUX.1 of less.

The resident memory gained at the most, over the size of the loaded parameters; in a fresh process
for each line. FLUX.1's transformer with few of its blocks is, with --encoded, in a single file of
some 2 GB in eight or four bits, whose numbers are zeros, and with --weights a folder of 2 GB in
bfloat16, whose numbers are random: loaded with int8, with fp8 or without (none), or loaded without
and quantised in int8 then (quantize), of which the figures are those of the latter alone.
    python benchmarks/loading_cpu.py
    python benchmarks/loading_cpu.py --encoded
    python benchmarks/loading_cpu.py --weights none int8 fp8 quantize
"""

import argparse
import functools
import json
import math
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from full_size import SD1
from machine import describe
from random_models import random_params

from diffusax.checkpoints import save_network
from diffusax.checkpoints.networks import network_of
from diffusax.checkpoints.original.transformers import transformer_names
from diffusax.checkpoints.tree import torch_shapes
from diffusax.models import UNet2DConditionConfig, UNet2DConditionModel
from diffusax.models.network import cast_shapes
from diffusax.networks import FluxTransformer2DModel, Model, initialize, load_network

BLOCK = 141_557_760
"""The weights of one of FLUX.1's single blocks."""
FLUX = "FluxTransformer2DModel"
GGUF = {"Q8_0": (8, 32, 34), "Q4_K": (12, 256, 144)}
"""For each type its number, and the numbers and bytes of a block."""


def resident(figure: str = "VmRSS") -> int:
    """Bytes of this process in memory: now, or the most of them (VmHWM)."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(figure)) * 1024


def measure(what: str, load: Callable[[], Any]) -> None:
    """Loads a network and prints a line."""
    jax.block_until_ready(jnp.ones(2**20) + 1)
    # From here on Linux counts the peak.
    Path("/proc/self/clear_refs").write_text("5")
    before, start = resident(), time.perf_counter()
    params = jax.block_until_ready(load())
    seconds, peak = time.perf_counter() - start, resident("VmHWM")
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    print(
        f"{what}: {size / 1e9:.2f} GB of parameters in {seconds:.1f} s, "
        f"peak {(peak - before) / 1e9:.2f} GB, {(peak - before) / size:.3f} of them"
    )


def flux_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shapes of a transformer's tensors by their names in Black Forest Labs' code."""
    network = network_of("FluxTransformer2DModel", config, source="a benchmark")
    shapes, found = torch_shapes(network.shapes), {}
    for name, (paths, _) in transformer_names(network).items():
        for leaf in ("weight", "bias"):
            parts = [shapes[key] for path in paths if (key := f"{path}.{leaf}") in shapes]
            end = "scale" if name.endswith(("query_norm", "key_norm")) else leaf
            if parts:
                found[f"{name}.{end}"] = (sum(part[0] for part in parts), *parts[0][1:])
    return found


def write_gguf(path: Path, shapes: dict[str, tuple[int, ...]], kind: str) -> None:
    """Writes zeros in blocks of one of ggml's types."""
    number, length, size = GGUF[kind]
    head, end = struct.pack("<4sIQQ", b"GGUF", 3, len(shapes), 0), 0
    for name, shape in shapes.items():
        blocks = len(shape) > 1 and shape[-1] % length == 0
        head += struct.pack("<Q", len(name)) + name.encode()
        head += struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])
        head += struct.pack("<IQ", number if blocks else 0, end)
        count = math.prod(shape)
        end += -(-(count // length * size if blocks else 4 * count) // 32) * 32
    with path.open("wb") as file:
        file.write(head)
        file.truncate(-(-len(head) // 32) * 32 + end)


def write_convrot(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """Writes zeros as ComfyUI's int8 with groups of 64 and its JSON."""
    told = b'{"format": "int8_tensorwise", "convrot": true, "convrot_groupsize": 64}'
    header, end = {}, 0

    def add(name: str, dtype: str, shape: tuple[int, ...], size: int) -> None:
        nonlocal end
        begin, end = end, end + size * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}

    texts = []
    for name, shape in shapes.items():
        if len(shape) == 1:
            add(name, "F32", shape, 4)
            continue
        add(name, "I8", shape, 1)
        add(f"{name}_scale", "F32", (shape[0], 1), 4)
        texts.append(end)
        add(f"{name.removesuffix('weight')}comfy_quant", "U8", (len(told),), 1)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for place in texts:
            file.seek(8 + len(text) + place)
            file.write(told)
        file.truncate(8 + len(text) + end)


def measure_encoded(root: Path, kind: str, weights: str) -> None:
    """Writes a single file and loads it."""
    blocks = round(2.1e9 / BLOCK / (0.5625 if kind == "Q4_K" else 1.05))
    config = {"num_layers": 1, "num_single_layers": blocks, "guidance_embeds": True}
    path = root / ("flux.safetensors" if kind == "ConvRot" else "flux.gguf")
    if kind == "ConvRot":
        write_convrot(path, flux_shapes(config))
    else:
        write_gguf(path, flux_shapes(config), kind)
    (root / "config.json").write_text(json.dumps({"_class_name": FLUX, **config}))
    own = weights if weights == "file" else None
    size = path.stat().st_size / 1e9
    load = FluxTransformer2DModel.from_single_file
    measure(
        f"{size:.2f} GB of {kind} loaded as {own or 'bfloat16'}",
        lambda: load(path, config=root, dtype="bfloat16", weights=own).params,
    )


def write_transformer(folder: str) -> None:
    """Writes FLUX.1's transformer with two blocks of each kind, in bfloat16."""
    config = {"num_layers": 2, "num_single_layers": 2, "guidance_embeds": True}
    network = network_of(FLUX, config, source="a benchmark")
    params = random_params(cast_shapes(network.shapes, "bfloat16"))
    save_network(Model(network, params), folder)


def measure_weights(folder: str, weights: str) -> None:
    """Loads a transformer in bfloat16 with kernels of eight bits, or quantises it then."""
    if weights == "quantize":
        model = load_network(folder, dtype="bfloat16")
        measure("quantised after it was loaded", lambda: model.quantize("int8").params)
        return
    kind = None if weights == "none" else weights
    load = functools.partial(load_network, folder, dtype="bfloat16", weights=kind)
    measure(f"bfloat16 folder loaded with {weights}", lambda: load().params)


def main() -> None:
    """Writes checkpoints and measures them in processes of their own."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = ("none", "int8", "fp8", "quantize")
    parser.add_argument("--weights", nargs="+", default=[], choices=kinds)
    parser.add_argument("--encoded", action="store_true", help="files of eight and four bits")
    parser.add_argument("--measure", nargs=2, metavar=("FOLDER", "DTYPE"))
    parser.add_argument("--one", nargs=2, metavar=("KIND", "WEIGHTS"))
    parser.add_argument("--folder", nargs=2, metavar=("FOLDER", "WEIGHTS"))
    args = parser.parse_args()
    if args.measure:
        folder, dtype = args.measure
        measure(f"float32 file loaded as {dtype}", lambda: load_network(folder, dtype=dtype).params)
        return
    if args.one:
        with tempfile.TemporaryDirectory() as root:
            measure_encoded(Path(root), *args.one)
        return
    if args.folder:
        measure_weights(*args.folder)
        return
    print(describe(), flush=True)
    if args.weights:
        with tempfile.TemporaryDirectory() as folder:
            write_transformer(folder)
            for weights in args.weights:
                subprocess.run([sys.executable, __file__, "--folder", folder, weights], check=True)
        return
    if args.encoded:
        for kind in ("Q8_0", "Q4_K", "ConvRot"):
            for weights in ("bfloat16", "file"):
                subprocess.run([sys.executable, __file__, "--one", kind, weights], check=True)
        return
    with tempfile.TemporaryDirectory() as folder:
        save_network(initialize(UNet2DConditionModel, UNet2DConditionConfig(**SD1)), folder)
        for dtype in ("float32", "bfloat16"):
            subprocess.run([sys.executable, __file__, "--measure", folder, dtype], check=True)


if __name__ == "__main__":
    main()
