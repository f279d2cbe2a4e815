"""What full-size models take on TPUs, by the TPU's own compiler, without a TPU.

    python benchmarks/tpu_compile.py --models sd2 xl --programs denoise decode train \
        --topologies v5e:2x2 v5p:2x2x1 v6e:2x2 --meshes data=1 data=4 --batch 1
    python benchmarks/tpu_compile.py --models sd2 --programs train-edits --size 256 --batch 64 \
        --topologies v4:2x2x4 --meshes data=16 --ema ramp
    python benchmarks/tpu_compile.py --models sd1 xl --programs train-lora --topologies v5e:2x2 \
        --meshes data=1 --batch 1
    python benchmarks/tpu_compile.py --models qwen-image-edit --programs train-edits-lora-cached \
        --topologies v6e:2x2 --meshes data=1,fsdp=4 --rank 16 --weights int8

It needs libtpu (pip install -e '.[tpu]'), gigabytes of memory and minutes for each line, with
--effort 0 many times as long. Each line is printed, and added to --out as JSON, as soon as it is
known. "need" is the network's own count of operations
(runtime/programs/flops.py); the compiler's comes from XLA's cost analysis, in which a loop counts
once.
"""

import argparse
import functools
import io
import itertools
import json
import os
import tempfile
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image
from random_models import MODELS, call_programs, write_checkpoint

import diffusax
from diffusax.pipelines.pipeline import ahead
from diffusax.pipelines.pipeline.ahead import mesh_of_program
from diffusax.runtime.devices.chips import chip_of
from diffusax.runtime.devices.lowering import lowering_platforms
from diffusax.runtime.devices.mesh import batch_size
from diffusax.runtime.programs.cost import cost_of
from diffusax.runtime.programs.program import lower, streams, work_of
from diffusax.runtime.programs.topology import (
    DoesNotFitError,
    compile_there,
    topology_mesh,
)
from diffusax.runtime.switches import in_mesh
from diffusax.training import (
    EMAConfig,
    InstructPix2PixConfig,
    LoRAConfig,
    TextToImageConfig,
    instruct_pix2pix,
    text_to_image,
)
from diffusax.training.loop.program import lower_step, step_work
from diffusax.training.recipes.caching import encode_batch

TRAINING = (
    *("train", "train-edits", "train-lora", "train-edits-lora"),
    *("train-lora-cached", "train-edits-lora-cached"),
)
"""Training steps: of all parameters or adapters, from pixels and texts or from a cache of them."""


def compile_call(pipe, mesh, batch: int, name: str, options):
    """A program of a call, compiled, and the work that the networks need on all devices."""
    given = {} if options.frames is None else {"num_frames": options.frames}
    request = call_programs(pipe, batch, mesh=mesh, size=options.size, **given)[name]
    return compile_request(request, mesh, options)


def compile_request(request, mesh, options):
    """The same of a request."""
    mesh = mesh_of_program(request, mesh)
    with in_mesh(mesh):
        lowered = lower(request, lowering_platforms=lowering_platforms(mesh))
        given = {"effort": options.effort, "streams": streams(request), **estimates(mesh)}
        compiled = compile_there(lowered, mesh, **given)
    return compiled, work_of(request)


def estimates(mesh) -> dict:
    """The compiler option that writes XLA's estimates into a GPU's program.

    XLA knows too little of cards before Hopper, and fails.
    """
    known = mesh.devices.flat[0].device_kind.startswith(("NVIDIA H", "NVIDIA B"))
    return {"xla_gpu_collect_cost_model_stats": True} if known else {}


def shapes(folder: Path, options):
    """The pipeline of a checkpoint in bfloat16, without weights."""
    given = {"dtype": "bfloat16", "weights": options.weights}
    pipe = ahead.shapes_only(diffusax.DiffusionPipeline, folder, **given)
    if options.offload:
        pipe.enable_group_offload("cuda", num_blocks_per_group=1)
    return pipe


def compile_training(folder: Path, mesh, options, *, program: str):
    """A training step, compiled, and the work that the networks need on all devices."""
    recipe, config = training_of(folder, mesh, options, program)
    with in_mesh(mesh):
        lowered = lower_step(recipe, config, mesh)
        compiled = compile_there(lowered, mesh, effort=options.effort, **estimates(mesh))
    return compiled, step_work(recipe, config, mesh)


def training_of(folder: Path, mesh, options, program: str):
    """A training in bfloat16 with AdamW, parameters split: its recipe and its configuration."""
    _, *words = program.split("-")
    edits, lora, cached = (word in words for word in ("edits", "lora", "cached"))
    kind, make = (
        (InstructPix2PixConfig, instruct_pix2pix) if edits else (TextToImageConfig, text_to_image)
    )
    config = kind(
        model=str(folder),
        batch_size=options.batch * batch_size(mesh),
        accumulate=options.accumulate,
        gradient_checkpointing=options.checkpointing,
        data=type(kind().data)(path=str(write_data(folder)), resolution=options.size),
        ema=EMAConfig(rule=options.ema),
        lora=LoRAConfig(rank=options.rank if lora else 0),
        weights=options.weights if lora else None,
    )
    recipe = make(config)
    if cached:
        take_as_cached(recipe)
    return recipe, config


def take_as_cached(recipe) -> None:
    """Makes a recipe train on what a cache of its data with text embeddings would hold."""
    base = recipe.base
    row = recipe.example(recipe.source[0], np.random.default_rng(0))
    batch = {name: jax.ShapeDtypeStruct((1, *x.shape), x.dtype) for name, x in row.items()}
    shapes = {name: base.networks[name].shapes for name in (base.autoencoder, *base.text_encoders)}
    encode = functools.partial(encode_batch, base, text_embeddings=True)
    stored = jax.eval_shape(encode, shapes, batch)
    held = {name: np.zeros(x.shape[1:], x.dtype) for name, x in stored.items()}
    recipe.cached = recipe.embedded = True
    recipe.example = lambda row, rng: held


def write_data(folder: Path) -> Path:
    """One row of a data set with captions and edits; only its shapes matter."""
    file = io.BytesIO()
    Image.new("RGB", (64, 64)).save(file, "PNG")
    picture = [{"bytes": file.getvalue()}]
    columns = {"image": picture, "input_image": picture, "edited_image": picture}
    (folder / "data").mkdir(exist_ok=True)
    table = pa.table({**columns, "text": ["a"], "edit_prompt": ["b"]})
    pq.write_table(table, folder / "data" / "rows.parquet")
    return folder / "data"


def measure(folder: Path, model: str, program: str, mesh, options) -> dict:
    """One line of the table."""
    pipe = shapes(folder, options)
    began = time.perf_counter()
    if program.startswith("train"):
        compiled, work = compile_training(folder, mesh, options, program=program)
    else:
        images = options.batch * batch_size(mesh)
        compiled, work = compile_call(pipe, mesh, images, program, options)
    needed = work.operations / mesh.size
    cost, chip = cost_of(compiled, needed=needed), chip_of(mesh.devices.flat[0])
    return {
        "seconds to compile": round(time.perf_counter() - began),
        "TFLOP": round(cost.tflop, 3),
        "TFLOP needed": round(needed / 1e12, 3),
        "GB moved": round(cost.moved, 2),
        "GB arguments": round(cost.arguments, 2),
        "GB temporaries": round(cost.temporaries, 2),
        "GB peak": round(cost.peak, 2),
        "GB usable of the chip": round(chip.usable, 1),
        **({"GB in the host's memory": round(cost.host, 2)} if cost.host else {}),
        **({} if cost.kernels is None else {"kernels": cost.kernels}),
        "ms at least": round(1e3 * cost.seconds(chip), 1),
    }


def sides(text: str) -> int | tuple[int, int]:
    """The pixels of both sides, such as 512, or of height and width, such as 480x832."""
    sizes = [int(part) for part in text.split("x")]
    return sizes[0] if len(sizes) == 1 else (sizes[0], sizes[1])


def add_size(parser) -> None:
    """Adds the options that say how large pictures are, and how long videos."""
    parser.add_argument(
        "--size", type=sides, help="pixels of a side, or 480x832; by default the model's own"
    )
    parser.add_argument("--frames", type=int, help="of a video, by default the call's own 81")


def add_storage(parser) -> None:
    """Adds the options that say what parameters are stored as, and where."""
    parser.add_argument(
        "--weights", choices=["int8", "fp8"], help="of kernels, see from_pretrained"
    )
    parser.add_argument("--offload", action="store_true", help="see enable_group_offload")


def of_model(options, model: str):
    """The options with the model's own size where none is given."""
    return argparse.Namespace(**{**vars(options), "size": options.size or MODELS[model].size})


def lines(options):
    """Every combination that was asked for: what it is, and how to measure it."""
    for model in options.models:
        own = of_model(options, model)
        with tempfile.TemporaryDirectory() as name:
            write_checkpoint(Path(name), MODELS[model])
            for program, topology, text in itertools.product(
                options.programs, options.topologies, options.meshes
            ):
                mesh = topology_mesh(topology, text)
                line = {"model": model, "program": program, "topology": topology, "mesh": text}
                line |= {"size": own.size}
                line |= {"images per device": options.batch}
                line |= {} if options.frames is None else {"frames": options.frames}
                if program.startswith("train"):
                    line |= {"microbatches": options.accumulate, "ema": options.ema}
                    line |= {"checkpointing": options.checkpointing}
                yield line, functools.partial(measure, Path(name), model, program, mesh, own)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    names = ["encode_texts", "denoise", "decode", *TRAINING]
    parser.add_argument("--programs", nargs="+", default=names, choices=names)
    parser.add_argument("--topologies", nargs="+", default=["v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
    parser.add_argument("--meshes", nargs="+", default=["data=1", "data=4"], help="see make_mesh")
    parser.add_argument("--batch", type=int, default=1, help="images per device")
    parser.add_argument("--accumulate", type=int, default=1, help="microbatches of a training step")
    add_size(parser)
    parser.add_argument("--checkpointing", default="blocks", choices=["none", "blocks", "full"])
    parser.add_argument("--rank", type=int, default=8, help="of the adapters")
    parser.add_argument("--ema", default="none", choices=["none", "ramp"])
    add_storage(parser)
    parser.add_argument("--effort", type=float, default=-1.0, help="of XLA, see compile_there")
    parser.add_argument("--out", type=Path, help="a file to add the lines to")
    options = parser.parse_args()
    for line, take in lines(options):
        try:
            line |= take()
        except DoesNotFitError as error:
            line["does not fit"] = str(error)
        print(json.dumps(line), flush=True)
        if options.out:
            with options.out.open("a") as file:
                file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
