"""Stable Diffusion at full size on a GPU, with random weights, in bfloat16.

    python benchmarks/gpu.py sd2 sdxl sdxl-mlperf train train-256 --out gpu.jsonl
    python benchmarks/gpu.py --seconds 540              # as much of it as that allows
    python benchmarks/gpu.py --tiny                     # all of it, shrunken, on any machine

sd2: SD 2 base, 512x512, 20 steps, batches of 1 and 8.
sdxl: SDXL base, 1024x1024, 30 steps, one image.
sdxl-mlperf: SDXL as MLPerf's inference benchmark has it, 1024x1024, 20 steps of Euler, guidance 8,
    here in batches of 8 and 16. TensorRT on an H200 makes 2.18 images a second: the number to
    beat.
z-image, klein, flux: Z-Image Turbo, 9 steps, FLUX.2 klein, 4 steps, and FLUX.1-dev, 28 steps, one
    image of 1024x1024 with the prompt's text encoders; diffusax alone.
train: the SD 2 UNet on latents of 512x512 pixels, float32 parameters, AdamW, batches of 8 and 32.
train-256: the same on 256x256 pixels, batches of 32: what InstructPix2Pix is trained on.

A call is timed whole, from text to an array on the host. Beside diffusax, diffusers is measured
with the same weights, eager and through torch.compile, where both are installed. Every case and
system has a process to itself, so that one's memory is not another's; batches rise within it. With
--seconds, diffusax's rows come first, and what is left out is said. Where time on the device is
short, several commands with the same --lock compile side by side, and are timed one after another;
their "compile_seconds" are longer then. --profile prints the twenty slowest kernels of a call.
`make gpu-wheels` fetches what a machine without a network may lack.

Rates count the network's own operations (runtime/programs/flops.py): of a call the encoders, the
UNet's steps and decoding, in training the UNet forward and backward. "utilisation" is the rate over
the chip's peak, which in training is the model FLOP utilisation. "compile_seconds" is how much
longer the first call took; no compiled program comes from a cache. "check" is the images' mean
(from the same noise for all systems), or the last loss.
"""

import argparse
import contextlib
import fcntl
import functools
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from gpu_cases import (
    CASES,
    LR,
    PROMPT,
    TOKENS,
    Case,
    Prepare,
    call_arguments,
    first_latents,
    forget_params,
)
from gpu_profile import print_slowest
from machine import describe
from random_models import (
    MODELS,
    TINY,
    call_programs,
    random_pipeline,
    write_checkpoint,
)

from diffusax.runtime.devices.chips import GPU_SHARE, chip_of
from diffusax.runtime.devices.layouts import in_order
from diffusax.runtime.devices.mesh import make_mesh
from diffusax.runtime.programs.flops import count_training_flops
from diffusax.runtime.programs.program import work_of
from diffusax.runtime.programs.topology import compile_there
from diffusax.training import TextToImageConfig
from diffusax.training.loop.program import state_places, step_program
from diffusax.training.step.denoising import DenoisingLoss
from diffusax.training.step.step import initial_state

FRACTION = "XLA_CLIENT_MEM_FRACTION"
# Of JAX, by system; beside PyTorch, memory is given back as soon as it can be.
VARIABLES = {
    "diffusax": {FRACTION: str(GPU_SHARE)},
    "torch": {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
}


def main() -> None:
    """A process for each case and system."""
    options = parse_arguments()
    if options.worker:
        work(*options.worker, options)
        return
    print(describe("torch", "diffusers", "transformers"), flush=True)
    systems = [name for name in VARIABLES if name in options.systems]
    missing = [n for n in ("torch", "diffusers") if importlib.util.find_spec(n) is None]
    if missing and "torch" in systems:
        print(f"PyTorch is not measured: there is no {' and no '.join(missing)}", flush=True)
        systems.remove("torch")
    end = time.monotonic() + options.seconds
    names = options.cases or CASES
    rows = [(n, system) for system in systems for n in names if system != "torch" or CASES[n].torch]
    codes = [run_row(*row, end, options) for row in rows]
    sys.exit(int(any(codes)))


def run_row(name: str, system: str, end: float, options: argparse.Namespace) -> int:
    """Measures a case and a system in a process of its own; returns its status.

    end: the time, of `time.monotonic`, at which it is stopped. Rows that do not begin by then are
    left out.
    """
    left = end - time.monotonic()
    if left <= 0:
        print(f"{name}, {system}: left out, the {options.seconds:g} seconds are over", flush=True)
        return 0
    command = [sys.executable, __file__, *sys.argv[1:], "--worker", name, system]
    environment = variables(system, tiny=options.tiny)
    try:
        limit = None if left == float("inf") else left
        code = subprocess.run(command, env=environment, check=False, timeout=limit).returncode
    except subprocess.TimeoutExpired:
        print(f"{name}, {system}: stopped, the {options.seconds:g} seconds are over", flush=True)
        return 0
    if code:
        print(f"{name}, {system}: ended with status {code}", flush=True)
    return code


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "cases", nargs="*", choices=[[], *CASES], metavar="CASE", help="all by default"
    )
    parser.add_argument("--batches", type=int, nargs="+", help="instead of the case's own, rising")
    parser.add_argument("--repeats", type=int, help="timed calls after the first (5; tiny: 1)")
    parser.add_argument("--systems", nargs="+", choices=VARIABLES, default=list(VARIABLES))
    parser.add_argument("--torch-modes", nargs="+", default=["eager", "compiled"])
    parser.add_argument(
        "--compile-mode", help="torch.compile's (max-autotune; in training, default)"
    )
    parser.add_argument("--checkpointing", action="store_true", help="of gradients, by blocks")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="the time for everything"
    )
    parser.add_argument("--tiny", action="store_true", help="shrunken networks, to try the script")
    parser.add_argument("--lock", type=Path, help="a file that commands beside this one share")
    parser.add_argument("--profile", type=Path, help="a folder for JAX traces of a call")
    parser.add_argument("--out", type=Path, help="a file to add the lines to, as JSON")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.repeats = options.repeats or (1 if options.tiny else 5)
    return options


def variables(system: str, *, tiny: bool) -> dict[str, str]:
    """The environment of a process; what the caller has set stays."""
    # Tiny networks try the script: quick compilation matters, not how good it is.
    flags = {"XLA_FLAGS": "--xla_backend_optimization_level=0"} if tiny else {}
    own = {"JAX_ENABLE_COMPILATION_CACHE": "false", **flags, **VARIABLES[system]}
    if "XLA_PYTHON_CLIENT_MEM_FRACTION" in os.environ:
        # JAX ends with an error where the old name is set, too.
        own.pop(FRACTION, None)
    return {**own, **os.environ}


def work(name: str, system: str, options: argparse.Namespace) -> None:
    """All measurements of a case and a system."""
    case, models = CASES[name], MODELS
    if options.tiny:
        case = case._replace(batches=(1,), steps=min(case.steps, 2))
        models = TINY
    case = case._replace(batches=tuple(options.batches or case.batches))
    part: dict[str, Any] = {} if case.steps else {"only": ("unet",), "dtype": "float32"}
    with tempfile.TemporaryDirectory() as checkpoint, Turns(options.lock) as turns:
        write_checkpoint(Path(checkpoint), models[case.model])
        pipe = random_pipeline(Path(checkpoint), **part)
        for label, prepare, peak in systems(system, Path(checkpoint), pipe, case, options):
            for batch in case.batches:
                line = {"case": name, "system": label, "batch": batch}
                try:
                    run = prepare(batch)
                    line |= timed(run, batch, options.repeats, turns)
                except RuntimeError as error:
                    # Most often memory, which larger batches would lack, too.
                    report({**line, "error": str(error).strip()[:300]}, options.out)
                    break
                line |= rates(needed(pipe, case, batch, options), line["seconds"])
                report({**line, "peak_gb": peak(), **where()}, options.out)
                if options.profile and system == "diffusax":
                    folder = options.profile / f"{name}-{batch}"
                    with jax.profiler.trace(str(folder)):
                        run()
                    print_slowest(folder)


def systems(
    system: str, folder: Path, pipe: Any, case: Case, options: argparse.Namespace
) -> Iterator[tuple[str, Prepare, Callable[[], float | None]]]:
    """Name, what prepares a batch, and what tells the most memory in use so far, in GB."""
    if system == "diffusax":
        prepare = (
            drawing(pipe, case, model_size(case, options))
            if case.steps
            else training(pipe, case, options)
        )
        yield "diffusax", prepare, peak_memory
        return
    import gpu_torch

    networks = gpu_torch.take_networks(folder, pipe)
    for mode in options.torch_modes:
        if mode == "compiled":
            gpu_torch.compile_networks(networks, options, trains=not case.steps)
        if case.steps:
            prepare = gpu_torch.drawing(folder, pipe, networks, case)
        else:
            prepare = gpu_torch.training(pipe, networks, case, options)
        yield f"diffusers {mode}", prepare, gpu_torch.peak_memory


def model_size(case: Case, options: argparse.Namespace) -> int:
    """Pixels of a side of the model's images."""
    return (TINY if options.tiny else MODELS)[case.model].size


def drawing(pipe: Any, case: Case, size: int) -> Prepare:
    """A call of the pipeline. size: pixels of a side, where PyTorch is not measured beside it."""

    def prepare(batch: int) -> Callable[[], float]:
        arguments = call_arguments(case)
        if case.torch:
            arguments["latents"] = first_latents(pipe, batch)
        else:
            arguments |= {"generator": 0, "height": size, "width": size}

        def run() -> float:
            images = pipe(
                prompt=PROMPT, num_images_per_prompt=batch, output_type="np", **arguments
            ).images
            return float(images.mean())

        return run

    return prepare


def training(pipe: Any, case: Case, options: argparse.Namespace) -> Prepare:
    """A training step, from cached latents and text embeddings."""
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(LR, weight_decay=1e-2))
    # The program of a training run (training/loop/program.py), in its order and with its options.
    mesh = make_mesh("data=1", devices=jax.devices()[:1])
    config = TextToImageConfig(model="none")
    recipe: Any = SimpleNamespace(loss=denoising_loss(pipe, options))
    create = functools.partial(initial_state, optimizer=optimizer, seed=0)
    params = {"unet": in_order(pipe.params["unet"])}
    forget_params(pipe)
    shapes = jax.eval_shape(create, params)
    kept = state_places(recipe, shapes, mesh)
    state = jax.jit(create, donate_argnums=0, out_shardings=kept)(params)
    del params
    program = step_program(recipe, config, optimizer, mesh, shapes)

    def prepare(batch: int) -> Callable[[], float]:
        frozen, data = jax.tree.map(
            lambda x: jax.random.normal(jax.random.key(1), x.shape, x.dtype),
            training_shapes(pipe, case, batch),
        )
        step = None

        def run() -> float:
            nonlocal state, step
            if step is None:
                step = compile_there(program.lower(state, frozen, data), mesh, effort=None)
            state, metrics = step(state, frozen, data)
            jax.block_until_ready(state)
            return float(metrics["loss"])

        return run

    return prepare


def denoising_loss(pipe: Any, options: argparse.Namespace) -> DenoisingLoss:
    """The loss in bfloat16."""
    c = pipe.parts
    return DenoisingLoss(
        c.family,
        c.networks,
        c.scheduler.forward_process,
        c.scheduler.prediction_type,
        gradient_checkpointing="blocks" if options.checkpointing else "none",
        compute_dtype=jnp.bfloat16,
    )


def training_shapes(pipe: Any, case: Case, batch: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Frozen parameters and a batch."""
    side, width = case.side(pipe), pipe.parts.denoiser.context_dim
    shape = jax.ShapeDtypeStruct
    empty = {"encoder_hidden_states": shape((TOKENS, width), jnp.bfloat16)}
    return {"empty": empty}, {
        "moments": shape((batch, side, side, 8), jnp.float32),
        "encoder_hidden_states": shape((batch, TOKENS, width), jnp.bfloat16),
    }


def needed(pipe: Any, case: Case, batch: int, options: argparse.Namespace) -> int:
    """The operations of what is timed."""
    if case.steps:
        size = None if case.torch else model_size(case, options)
        programs = call_programs(pipe, batch, size=size, **call_arguments(case))
        rounds = {"denoise": case.steps}
        return sum(rounds.get(name, 1) * work_of(p).operations for name, p in programs.items())
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), batch))
    params = {"unet": pipe.parts.networks["unet"].shapes}
    shapes = training_shapes(pipe, case, batch)
    return count_training_flops(denoising_loss(pipe, options), params, *shapes, keys)


class Turns:
    """Keeps the processes that share a file from doing anything while one of them is timed."""

    def __init__(self, path: Path | None):
        self._file = None if path is None else path.open("w")

    def __enter__(self) -> "Turns":
        self._take(fcntl.LOCK_SH)
        return self

    def __exit__(self, *_: object) -> None:
        self._take(fcntl.LOCK_UN)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Waits until all others wait, and keeps them waiting."""
        self._take(fcntl.LOCK_EX)
        try:
            yield
        finally:
            self._take(fcntl.LOCK_SH)

    def _take(self, lock: int) -> None:
        if self._file is not None:
            fcntl.flock(self._file, lock)


def timed(run: Callable[[], float], batch: int, repeats: int, turns: Turns) -> dict[str, Any]:
    """The median of calls after the first, and what the first took longer."""
    first, check = one_call(run)
    with turns.alone():
        seconds = statistics.median(one_call(run)[0] for _ in range(repeats))
    return {
        "seconds": round(seconds, 5),
        "images_per_second": round(batch / seconds, 4),
        "compile_seconds": round(first - seconds, 1),
        "check": round(check, 4),
    }


def one_call(run: Callable[[], float]) -> tuple[float, float]:
    """The seconds of a call, and its check."""
    start = time.perf_counter()
    check = run()
    return time.perf_counter() - start, check


def rates(flops: int, seconds: float) -> dict[str, Any]:
    """The rate, and its share of the chip's peak where that is known."""
    chip = chip_of(jax.devices()[0])
    share = round(flops / seconds / (chip.tflops * 1e12), 4) if chip else None
    return {"tflops": round(flops / seconds / 1e12, 4), "utilisation": share}


def peak_memory() -> float | None:
    """The most device memory that JAX has used so far, in GB."""
    stats = jax.local_devices()[0].memory_stats() or {}
    peak = stats.get("peak_bytes_in_use")
    return None if peak is None else round(peak / 1e9, 2)


def where() -> dict[str, str]:
    """What the measurement was made on."""
    return {"device": jax.devices()[0].device_kind, "jax": jax.__version__}


def report(line: dict[str, Any], out: Path | None) -> None:
    """Prints a measurement and adds it to the file."""
    print(", ".join(f"{k} {v}" for k, v in line.items() if v is not None), flush=True)
    if out:
        with out.open("a") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
