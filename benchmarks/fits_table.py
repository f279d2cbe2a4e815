"""Which model fits which machine, by the compilers of GPUs and TPUs, without either.

    python benchmarks/fits_table.py measure --out lines.jsonl --topologies h200:1
    python benchmarks/fits_table.py measure --out lines.jsonl --topologies v5e:2x2 --rows sd2 xl
    python benchmarks/fits_table.py table lines.jsonl

`measure` compiles full-size models without weights, as users' programs are compiled, and adds a
line to the file for each row and topology; those that are there already are left out. It needs
jax[cuda12] or libtpu, gigabytes of memory, and half a minute to some minutes for each line. `table`
prints the table of docs/serving/memory.md. The GB are those of one device: all parameters, and what
the program that takes most needs besides. A GPU's kind changes them little: they are those of the
topology, and compared with the memory of all, of which `GPU_SHARE` is usable on GPUs.
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from random_models import MODELS, write_checkpoint
from tpu_compile import compile_training

import diffusax
from diffusax.models.network import cast_shapes
from diffusax.models.unet.derived import controlnet_of
from diffusax.networks import Model
from diffusax.pipelines.pipeline import ahead
from diffusax.runtime.devices.chips import GPU_SHARE
from diffusax.runtime.programs.cost import cost_of
from diffusax.runtime.programs.topology import DoesNotFitError, topology_mesh

CARDS = (8, 12, 16, 24, 40, 80, 141)
"""The GB of NVIDIA's cards."""
TPUS = {"v5e": 16, "v4": 32, "v6e": 32, "v5p": 95}


KEPT = ("arguments", "temporaries", "peak", "fits")
"""What a line says of a program."""


class Row(NamedTuple):
    """A line of the table."""

    text: str
    model: str
    batch: int = 1
    """Images, or examples of a training step, on a device."""
    size: int | None = None
    program: str = "call"
    ema: str = "none"
    rank: int = 0
    mesh: str = "data=1"
    devices: int = 1
    weights: str | None = None
    """int8 for kernels of eight bits."""


ROWS = {
    "sd2": Row("SD 2, 512x512, one image", "sd2"),
    "sd2-8": Row("eight images", "sd2", 8),
    "sd2-control": Row("with a ControlNet, one image", "sd2", program="control"),
    "xl": Row("SDXL, 1024x1024, one image", "xl"),
    "xl-4": Row("four images", "xl", 4),
    "xl-control": Row("with a ControlNet, one image", "xl", program="control"),
    "xl-int8": Row("SDXL in int8, one image", "xl", weights="int8"),
    "z-image": Row("Z-Image, 1024x1024, one image", "z-image"),
    "z-image-int8": Row("in int8", "z-image", weights="int8"),
    "flux": Row("FLUX.1-dev, 1024x1024, one image", "flux"),
    "flux-int8": Row("in int8", "flux", weights="int8"),
    "qwen-image21": Row("Qwen-Image 2.1, 1024x1024, one image", "qwen-image21"),
    "qwen-image21-int8": Row("in int8", "qwen-image21", weights="int8"),
    "sd2-train": Row("Training SD 2, 256x256, batch 8", "sd2", 8, 256, "train"),
    "sd2-train-ema": Row("with an average (EMA)", "sd2", 8, 256, "train", ema="ramp"),
    "sd2-train-512": Row("512x512, batch 8", "sd2", 8, 512, "train"),
    "sd2-train-fsdp": Row(
        "256x256, batch 8, on each of eight, fsdp=8",
        "sd2",
        8,
        256,
        "train",
        mesh="fsdp=8",
        devices=8,
    ),
    "sd2-train-512-fsdp": Row(
        "512x512, batch 8, on each of eight, fsdp=8",
        "sd2",
        8,
        512,
        "train",
        mesh="fsdp=8",
        devices=8,
    ),
    "sd2-edits": Row(
        "Training InstructPix2Pix of SD 2, 256x256, batch 8", "sd2", 8, 256, "train-edits"
    ),
    "sd2-edits-fsdp": Row(
        "batch 8 on each of eight, fsdp=8",
        "sd2",
        8,
        256,
        "train-edits",
        mesh="fsdp=8",
        devices=8,
    ),
    "xl-lora": Row(
        "LoRA of SDXL, 1024x1024, rank 16, batch 1", "xl", 1, 1024, "train-lora", rank=16
    ),
    "flux-lora-fsdp": Row(
        "LoRA of FLUX.1-dev, 1024x1024, rank 8, batch 1, on each of eight, fsdp=8",
        "flux",
        1,
        1024,
        "train-lora",
        rank=8,
        mesh="fsdp=8",
        devices=8,
    ),
    "xl-train": Row("Training SDXL, 1024x1024, batch 1", "xl", 1, 1024, "train"),
    "xl-train-fsdp": Row(
        "Training SDXL, 1024x1024, batch 1, on each of eight, fsdp=8",
        "xl",
        1,
        1024,
        "train",
        mesh="fsdp=8",
        devices=8,
    ),
}


def main() -> None:
    """Measures, or prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = parser.add_subparsers(required=True)
    measure = kinds.add_parser("measure")
    measure.add_argument("--rows", nargs="+", default=list(ROWS), choices=ROWS)
    measure.add_argument("--topologies", nargs="+", default=["h200:1"], help="of one device")
    measure.add_argument("--out", type=Path, required=True)
    measure.set_defaults(run=lambda options: add_lines(options))
    table = kinds.add_parser("table")
    table.add_argument("lines", type=Path)
    table.set_defaults(run=lambda options: print(markdown(read(options.lines))))
    options = parser.parse_args()
    options.run(options)


def add_lines(options: argparse.Namespace) -> None:
    """Measures what the file does not have."""
    there = {(line["row"], line["kind"]) for line in read(options.out)}
    for topology in options.topologies:
        for name in options.rows:
            kind = topology_mesh(topology).devices.flat[0].platform
            if (name, kind) in there:
                continue
            began = time.perf_counter()
            line = {"row": name, "kind": kind, "topology": of_row(topology, ROWS[name], kind)}
            line |= peak_of(ROWS[name], line["topology"])
            line["seconds"] = round(time.perf_counter() - began)
            print(json.dumps(line), flush=True)
            with options.out.open("a") as file:
                file.write(json.dumps(line) + "\n")


def of_row(topology: str, row: Row, kind: str) -> str:
    """The topology with as many devices as the row asks for."""
    name = topology.split(":")[0]
    if row.devices == 1:
        return topology
    return f"{name}:{row.devices}" if kind == "gpu" else f"{name}:2x{row.devices // 2}"


def peak_of(row: Row, topology: str) -> dict[str, Any]:
    """The GB that a device needs; None if its compiler says that there are too few."""
    mesh = topology_mesh(topology, row.mesh)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_checkpoint(folder, MODELS[row.model])
        if not row.program.startswith("train"):
            return call_peak(row, folder, topology)
        options = argparse.Namespace(
            **row._asdict(), accumulate=1, checkpointing="blocks", effort=-1.0
        )
        try:
            compiled, work = compile_training(folder, mesh, options, program=row.program)
        except DoesNotFitError:
            return {"GB": None}
        return {"GB": round(cost_of(compiled, needed=work.operations / mesh.size).peak, 2)}


def call_peak(row: Row, folder: Path, topology: str) -> dict[str, Any]:
    """The GB of a call of a pipeline, of its parameters by component, and of each program."""
    components = {}
    kind: Any = diffusax.DiffusionPipeline
    if row.program == "control":
        kind = {
            "sd2": diffusax.StableDiffusionControlNetPipeline,
            "xl": diffusax.StableDiffusionXLControlNetPipeline,
        }[row.model]
        unet = ahead.shapes_only(diffusax.DiffusionPipeline, folder, dtype="bfloat16").unet
        net = controlnet_of(unet.network)
        components["controlnet"] = Model(net, cast_shapes(net.shapes, "bfloat16"))
    options: dict[str, Any] = {"dtype": "bfloat16", "weights": row.weights, **components}
    pipe = ahead.shapes_only(kind, folder, **options)
    figures = pipe.memory(topology, mesh=row.mesh, batch_size=row.batch, guidance_scale=7.5)
    peak = figures.pop("pipeline").get("peak")
    found = {"GB": None if peak is None else round(peak, 2)}
    return found | {
        name: {key: round(own[key], 2) for key in own if key in KEPT or name == "parameters"}
        for name, own in figures.items()
    }


def read(file: Path) -> list[dict[str, Any]]:
    """The lines that were measured."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def markdown(lines: list[dict[str, Any]]) -> str:
    """The table."""
    found = {(line["row"], line["kind"]): line["GB"] for line in lines}
    head = "| | GB on a GPU | smallest card | GB on a TPU | TPUs |\n|---|---|---|---|---|"
    rows = []
    for name, row in ROWS.items():
        gpu, tpu = (found.get((name, kind), "not measured") for kind in ("gpu", "tpu"))
        if gpu == tpu == "not measured":
            continue
        cells = [row.text, shown(gpu), card_for(gpu), shown(tpu), tpus_for(tpu)]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join([head, *rows])


def shown(peak: Any) -> str:
    return "-" if peak == "not measured" else "more than it has" if peak is None else f"{peak:.1f}"


def card_for(peak: Any) -> str:
    """The smallest card that holds so much."""
    if not isinstance(peak, float):
        return "-"
    fitting = [gb for gb in CARDS if peak <= gb * GPU_SHARE]
    return f"{fitting[0]} GB" if fitting else "none"


def tpus_for(peak: Any) -> str:
    """The TPUs that hold so much."""
    if peak == "not measured":
        return "-"
    return ", ".join(name for name, gb in TPUS.items() if peak is not None and peak <= gb) or "none"


if __name__ == "__main__":
    main()
