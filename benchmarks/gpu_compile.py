"""What a full-size model's program is made of on GPUs, by XLA's own compiler, without a GPU.

    python benchmarks/gpu_compile.py --model sd2 --program denoise --topology h200:1
    python benchmarks/gpu_compile.py --model xl --program train --topology h100:8 --mesh fsdp=8

It needs jax[cuda12] (5 GB; an environment of its own will do), gigabytes of memory and half a
minute to some minutes. Programs are compiled as users' are, but for the tilings of products, which
XLA chooses by timing them on a device. Kernels inside a loop with a known number of rounds count
for each round; the sampler's loop counts once, which is a step. Bytes are those of inputs and
results, each once; of what a kernel only slices, the slices. XLA's estimates leave out products and
cuDNN's convolutions and attention.
"""

import argparse
import collections
import os
import re
import tempfile
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
from random_models import MODELS, call_programs, write_checkpoint
from tpu_compile import (
    TRAINING,
    add_size,
    add_storage,
    compile_call,
    compile_request,
    compile_training,
    of_model,
    shapes,
)

from diffusax.lora.stacks import room_for
from diffusax.models.adapters.low_rank import LowRank, kernel_shapes
from diffusax.runtime.devices.chips import chip_of
from diffusax.runtime.devices.mesh import batch_size, replicated
from diffusax.runtime.programs.cost import Kernel, bytes_of, cost_of, kernels_of, traffic
from diffusax.runtime.programs.flops import Work
from diffusax.runtime.programs.topology import topology_mesh

PCIE = 31.5
"""GB a second of 16 lanes of 16 GT/s, 128 of 130 bits of which are data (PCIe 4.0)."""
PROGRAMS = ("encode_texts", "denoise", "decode", *TRAINING)


def main() -> None:
    """Prints a table of kernels."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="sd2", choices=MODELS)
    parser.add_argument("--program", default="denoise", choices=PROGRAMS)
    parser.add_argument("--topology", default="h200:1", help="see topology_mesh")
    parser.add_argument("--mesh", default="data=1", help="see make_mesh")
    parser.add_argument("--batch", type=int, default=1, help="images per device")
    add_size(parser)
    parser.add_argument("--accumulate", type=int, default=1, help="microbatches of a training step")
    parser.add_argument("--checkpointing", default="blocks", choices=["none", "blocks", "full"])
    parser.add_argument("--ema", default="none", choices=["none", "ramp"])
    parser.add_argument("--rank", type=int, default=8, help="of the adapters")
    parser.add_argument("--loras", type=int, help="rank of LoRAs on all attention, of denoise")
    add_storage(parser)
    parser.add_argument("--kinds", type=int, default=25, help="the number of lines of the table")
    parser.add_argument("--dump", type=Path, help="a file for the compiled module")
    args = parser.parse_args()
    args = of_model(args, args.model)
    args.effort = None
    mesh = topology_mesh(args.topology, args.mesh)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_checkpoint(folder, MODELS[args.model])
        began = time.perf_counter()
        compiled, work = compile_program(folder, mesh, args)
        seconds = time.perf_counter() - began
    text = compiled.as_text()
    if args.dump:
        args.dump.write_text(text)
    chip = chip_of(mesh.devices.flat[0])
    needed = work.operations / mesh.size
    cost = cost_of(compiled, needed=needed)
    print(f"{args.model} {args.program}, {args.topology}, {args.mesh}: {seconds:.0f} s to compile")
    print(
        f"{needed / 1e12:.3f} TFLOP needed, at least {1e3 * cost.seconds(chip):.2f} ms; GB: "
        f"arguments {cost.arguments:.2f}, temporaries {cost.temporaries:.2f}, peak {cost.peak:.2f} "
        f"of {chip.usable:.1f} usable"
    )
    report_need(work, mesh, compiled.memory_analysis().alias_size_in_bytes)
    if cost.host:
        report_copies(text, cost.host)
    report(kernels_of(text), args.kinds)


def compile_program(folder: Path, mesh, args):
    """Returns the executable, and the work that is needed on all devices."""
    if args.program.startswith("train"):
        return compile_training(folder, mesh, args, program=args.program)
    pipe = shapes(folder, args)
    images = args.batch * batch_size(mesh)
    if args.loras:
        return compile_adapted(pipe, mesh, images, args)
    return compile_call(pipe, mesh, images, args.program, args)


def compile_adapted(pipe, mesh, images: int, args):
    """The steps with LoRAs on the products of the denoiser's attention, on one device."""
    request = call_programs(pipe, images, mesh=mesh, size=args.size)["denoise"]
    denoiser, whole = dict(request.static)["denoiser"], replicated(mesh)
    network = denoiser.network

    def shape(*sizes: int, dtype="bfloat16"):
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=whole)

    def low_rank(kernel):
        down, up = shape(*kernel[:-1], args.loras), shape(args.loras, kernel[-1])
        return LowRank(down, up, shape(args.loras, dtype="int32"))

    layers = {
        path: low_rank(kernel)
        for path, kernel in kernel_shapes(network).items()
        if re.fullmatch(network.adapter_groups[0], path)
    }
    given = dict(zip(request.program.dynamic, request.dynamic))
    inputs = given["plan"].step_inputs
    weights = shape(len(inputs.weights), room_for(1), dtype="float32")
    given["plan"] = given["plan"]._replace(step_inputs=inputs._replace(adapters=weights))
    given["params"] = {**given["params"], "adapters": {denoiser.components[0]: layers}}
    return compile_request(request._replace(dynamic=tuple(given.values())), mesh, args)


def report_need(work: Work, mesh, state: int) -> None:
    """Prints the bytes that products need on each device, and those of what is changed in place.

    Products read kernels whole, but for their split over the tensor axis. state: the bytes of
    arguments whose memory results take over, such as parameters and moments in training.
    """
    kernels = work.kernels / mesh.shape["tensor"]
    parts = [kernels, work.maps / mesh.size, 2 * state]
    print(
        f"at least {sum(parts) / 1e9:.2f} GB moved: {parts[0] / 1e9:.2f} of kernels, "
        f"{parts[1] / 1e9:.2f} of maps, {parts[2] / 1e9:.2f} of what is changed in place"
    )


def report_copies(text: str, host: float) -> None:
    """Prints the bytes that a step, or a run of another program, copies from the host's memory.

    The computation waits for a copy as a whole where no kernel comes between its start and its end.

    host: the GB of arguments there.
    """
    began: dict[str, int] = {}
    kernels = copied = waited = 0
    for line in text.splitlines():
        start = re.search(r"%(\S+) = \(([^()]*?), [^()]*S\(5\)[^()]*.*\) copy-start\(", line)
        end = re.search(r" copy-done\(%([\w.\-]+)\)", line)
        if start:
            began[start[1]] = kernels
        elif end and end[1] in began:
            size = bytes_of(re.search(r"= (\S+) copy-done", line)[1])
            copied += size
            waited += size * (began[end[1]] == kernels)
        elif re.search(r" (fusion|custom-call)\(", line):
            kernels += 1
    print(
        f"{host:.2f} GB copied from the host, at least {host / PCIE * 1e3:.0f} ms by PCIe 4.0 x16; "
        f"{waited / max(copied, 1):.1%} of all copies with nothing computed meanwhile"
    )


def report(kernels: list[Kernel], lines: int) -> None:
    """Prints the kernels by kind."""
    step = [kernel for kernel in kernels if kernel.in_step]
    once = [kernel for kernel in kernels if not kernel.in_step and not kernel.copies_weights]
    copies = [kernel for kernel in kernels if kernel.copies_weights]
    print(f"{'':40} {'kernels':>8} {'GB':>8} {'ms, XLA':>8}")
    for name, some in [("a step", step), ("once", once), ("copies of weights", copies)]:
        if some:
            print(line(name, some))
    by_kind = collections.defaultdict(list)
    for kernel in step or once:
        by_kind[kernel.kind].append(kernel)
    for kind, some in sorted(by_kind.items(), key=lambda item: -traffic(item[1]).moved)[:lines]:
        print(line(f"  {kind}", some))


def line(name: str, kernels: list[Kernel]) -> str:
    """Adds up kernels."""
    found = traffic(kernels)
    return f"{name:40} {found.kernels:8} {found.moved:8.2f} {1e3 * found.estimate:8.3f}"


if __name__ == "__main__":
    main()
