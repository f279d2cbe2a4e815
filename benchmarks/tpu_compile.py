"""What full-size models take on TPUs, by the TPU's own compiler, without a TPU.

    python benchmarks/tpu_compile.py --models sd2 xl --programs denoise decode train \
        --topologies v5e:2x2 v5p:2x2x1 v6e:2x2 --devices 1 4 --batch 1

It needs libtpu (pip install 'diffusax[tpu]'), gigabytes of memory and minutes for each line: a
denoising step of SD 2 takes some six minutes of CPU time. Each line is printed, and added to
--out as JSON, as soon as it is known. "need" is the network's own count of operations
(runtime/flops.py); the compiler's comes from XLA's cost analysis, in which a loop counts once.
"""

import argparse
import functools
import json
import math
import os
import tempfile
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
import optax
from random_models import MODELS, call_programs, needed_flops, write_checkpoint

import diffusax
from diffusax.models import TENSOR_RULES
from diffusax.pipelines import ahead
from diffusax.runtime.flops import count_training_flops
from diffusax.runtime.mesh import batch_sharding, batch_size, in_mesh, tree_sharding
from diffusax.runtime.program import lower
from diffusax.runtime.topology import CHIPS, cost_of, topology_mesh
from diffusax.training.denoising import DenoisingLoss
from diffusax.training.step import initial_state, make_train_step


def compile_call(pipe, mesh, batch: int, name: str):
    """A program of a call, compiled, and the operations that the network needs on each device."""
    request = call_programs(pipe, batch, mesh=mesh)[name]
    with in_mesh(mesh):
        compiled = lower(request, lowering_platforms=("tpu",)).compile()
    return compiled, needed_flops(request) / mesh.size


def compile_training(pipe, mesh, batch: int, size: int):
    """A training step from pixels in bfloat16 with AdamW, parameters split, compiled."""
    c, scheduler = pipe.parts, pipe.scheduler
    loss = DenoisingLoss(
        c.family,
        c.networks,
        scheduler.alphas_cumprod,
        scheduler.prediction_type,
        gradient_checkpointing="blocks",
        compute_dtype=jax.numpy.bfloat16,
    )
    b = batch * batch_size(mesh)
    optimizer = optax.adamw(1e-5)
    create = functools.partial(initial_state, optimizer=optimizer, seed=0)
    state = jax.eval_shape(create, {"unet": c.networks["unet"].shapes})
    half = functools.partial(jax.tree.map, lambda x: jax.ShapeDtypeStruct(x.shape, "bfloat16"))
    frozen = {name: half(c.networks[name].shapes) for name in ("vae", "text_encoder")}
    frozen["empty"] = {"input_ids": jax.ShapeDtypeStruct((77,), np.int32)}
    data = {
        "pixel_values": jax.ShapeDtypeStruct((b, size, size, 3), np.uint8),
        "input_ids": jax.ShapeDtypeStruct((b, 77), np.int32),
    }

    def at(tree, shardings):
        return jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings
        )

    args = (
        at(state, tree_sharding(mesh, state, TENSOR_RULES)),
        at(frozen, tree_sharding(mesh, frozen, TENSOR_RULES)),
        at(data, jax.tree.map(lambda _: batch_sharding(mesh), data)),
    )
    step = make_train_step(loss, optimizer)
    with in_mesh(mesh):
        traced = jax.jit(step, donate_argnums=0).trace(*args)
        compiled = traced.lower(lowering_platforms=("tpu",)).compile()
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), b))
    needed = count_training_flops(loss, state.params, frozen, data, keys)
    return compiled, needed / mesh.size


def measure(folder: Path, model: str, program: str, topology: str, devices: int, options) -> dict:
    """One line of the table."""
    axis = "data" if program in ("denoise", "decode") and not options.fsdp else "fsdp"
    shape = {"data": f"data={devices}", "fsdp": f"data=1,fsdp={devices}"}[axis]
    mesh = topology_mesh(topology, shape)
    pipe = ahead.shapes_only(diffusax.DiffusionPipeline, folder, dtype="bfloat16")
    began = time.perf_counter()
    size = MODELS[model].size
    if program == "train":
        compiled, needed = compile_training(pipe, mesh, options.batch, size)
    else:
        images = options.batch * batch_size(mesh)
        compiled, needed = compile_call(pipe, mesh, images, program)
    cost, chip = cost_of(compiled), CHIPS[mesh.devices.flat[0].device_kind]
    return {
        "model": model,
        "program": program,
        "topology": topology,
        "mesh": shape,
        "images per device": options.batch,
        "seconds to compile": round(time.perf_counter() - began),
        "TFLOP": round(cost.tflop, 3),
        "TFLOP needed": round(needed / 1e12, 3),
        "GB moved": round(cost.moved, 2),
        "GB arguments": round(cost.arguments, 2),
        "GB temporaries": round(cost.temporaries, 2),
        "GB peak": round(cost.peak, 2),
        "GB of the chip": chip.memory,
        "ms at least": round(1e3 * cost.seconds(chip), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    names = ["denoise", "decode", "train"]
    parser.add_argument("--programs", nargs="+", default=names, choices=names)
    parser.add_argument("--topologies", nargs="+", default=["v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
    parser.add_argument("--devices", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--batch", type=int, default=1, help="images per device")
    parser.add_argument("--fsdp", action="store_true", help="split parameters, not only images")
    parser.add_argument("--out", type=Path, help="a file to add the lines to")
    options = parser.parse_args()
    assert math.prod(options.devices) > 0
    for model in options.models:
        with tempfile.TemporaryDirectory() as name:
            write_checkpoint(Path(name), MODELS[model])
            for program in options.programs:
                for topology in options.topologies:
                    for devices in options.devices:
                        line = measure(Path(name), model, program, topology, devices, options)
                        print(json.dumps(line), flush=True)
                        if options.out:
                            with options.out.open("a") as file:
                                file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
