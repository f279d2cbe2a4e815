"""Prints a table of what programs take on devices, and whether they fit."""

import jax
from jax.sharding import Mesh

from diffusax.runtime.topology import CHIPS, DoesNotFitError, compile_there, cost_of


def print_head(mesh: Mesh, note: str) -> None:
    """Prints the devices and the names of the columns. note: a remark to add."""
    kind = mesh.devices.flat[0].device_kind
    print(f"{mesh.size} of {kind}, GB on each; loops count once, {note}")
    print(f"{'program':58} {'TFLOP':>8} {'moved':>8} {'temporary':>9} {'peak':>8}  fits")


def print_line(name: str, lowered: jax.stages.Lowered, mesh: Mesh) -> None:
    """Compiles a program, and prints what it takes on every device."""
    chip = CHIPS.get(mesh.devices.flat[0].device_kind)
    try:
        cost = cost_of(compile_there(lowered))
    except DoesNotFitError as error:
        print(f"{name:58} no: {error}", flush=True)
        return
    fits = "?" if chip is None else "yes" if cost.fits(chip) else f"no ({chip.memory} GB)"
    numbers = f"{cost.tflop:8.3f} {cost.moved:8.2f} {cost.temporaries:9.2f} {cost.peak:8.2f}"
    print(f"{name:58} {numbers}  {fits}", flush=True)
