"""Prints a table of what programs take on devices, and whether they fit."""

from collections.abc import Callable

import jax
from jax.sharding import Mesh

from diffusax.runtime.chips import GPU_SHARE, Chip, chip_of
from diffusax.runtime.cost import cost_of
from diffusax.runtime.topology import DoesNotFitError, compile_there


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
    chip = chip_of(mesh.devices.flat[0])
    try:
        cost = cost_of(compile_there(lowered, mesh), needed=operations() / mesh.size)
    except DoesNotFitError as error:
        print(f"{name:58} no: {error}", flush=True)
        return
    fits = "?" if chip is None else verdict(cost.peak, chip)
    least = "?" if chip is None else f"{1e3 * cost.seconds(chip):.2f}"
    kernels = "" if cost.kernels is None else cost.kernels
    numbers = f"{cost.tflop:8.3f} {cost.moved:8.2f} {cost.temporaries:9.2f} {cost.peak:8.2f}"
    print(f"{name:58} {numbers} {least:>8} {kernels:>7}  {fits}", flush=True)


def verdict(peak: float, chip: Chip) -> str:
    """Says whether so many GB fit a device, and with which share of its memory."""
    if peak <= chip.usable_by_default:
        return "yes"
    if peak <= chip.usable:
        return f"with XLA_CLIENT_MEM_FRACTION={GPU_SHARE}"
    return f"no ({chip.usable:.1f} of {chip.memory} GB usable)"
