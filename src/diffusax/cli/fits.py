"""Prints a table of what programs take on devices, and whether they fit."""

from collections.abc import Callable, Mapping

import jax
from jax.sharding import Mesh

from diffusax.runtime.devices.chips import GPU_SHARE, Chip, chip_of
from diffusax.runtime.programs.cost import Cost, cost_of
from diffusax.runtime.programs.topology import DoesNotFitError, compile_there


def print_head(mesh: Mesh, note: str) -> None:
    """Prints the devices and the names of the columns. note: a remark to add."""
    kind = mesh.devices.flat[0].device_kind
    print(f"{mesh.size} of {kind}, GB on each; loops count once, {note}")
    print(
        f"{'program':58} {'TFLOP':>8} {'moved':>8} {'temporary':>9} {'peak':>8} {'ms':>8} "
        f"{'kernels':>7}  fits"
    )


def print_line(
    name: str, lowered: jax.stages.Lowered, mesh: Mesh, operations: Callable[[], int]
) -> None:
    """Compiles a program, and prints what it takes on every device.

    Args:
        name: what to call the program.
        lowered: the program.
        mesh: the devices.
        operations: returns the number of operations that the program needs, over all devices.
    """
    try:
        cost: Cost | DoesNotFitError = cost_of(
            compile_there(lowered, mesh), needed=operations() / mesh.size
        )
    except DoesNotFitError as error:
        cost = error
    print_cost(name, cost, chip_of(mesh.devices.flat[0]))


def print_cost(name: str, cost: Cost | DoesNotFitError, chip: Chip | None) -> None:
    """Prints what a program takes on every device, or why it does not fit."""
    if isinstance(cost, DoesNotFitError):
        print(f"{name:58} no: {cost}", flush=True)
        return
    least = "?" if chip is None else f"{1e3 * cost.seconds(chip):.2f}"
    kernels = "" if cost.kernels is None else cost.kernels
    numbers = f"{cost.tflop:8.3f} {cost.moved:8.2f} {cost.temporaries:9.2f} {cost.peak:8.2f}"
    print(f"{name:58} {numbers} {least:>8} {kernels:>7}  {verdict(cost.peak, chip)}", flush=True)


def print_pipeline(whole: Mapping[str, float], chip: Chip | None) -> None:
    """Prints what a call takes: all parameters, and the most that a program needs besides.

    whole: the figures of the pipeline (`pipe.memory(topology)`).
    """
    name = "pipeline: all parameters, and the largest program"
    if "peak" not in whole:
        print(f"{name:58} no: a program does not fit", flush=True)
        return
    peak = whole["peak"]
    print(f"{name:86} {peak:8.2f} {'':16}  {verdict(peak, chip)}", flush=True)


def verdict(peak: float, chip: Chip | None) -> str:
    """Says whether so many GB fit a device, and with which share of its memory."""
    if chip is None:
        return "?"
    if peak <= chip.usable_by_default:
        return "yes"
    if peak <= chip.usable:
        return f"with XLA_CLIENT_MEM_FRACTION={GPU_SHARE}"
    return f"no ({chip.usable:.1f} of {chip.memory} GB usable)"
