"""What compiled programs take on each device."""

from typing import Any, NamedTuple

import jax

from diffusax.runtime.devices.chips import Chip
from diffusax.runtime.programs.kernels import kernels_of, traffic


class Cost(NamedTuple):
    """What a compiled program takes on each device. A loop counts once, however often it runs."""

    tflop: float
    """The number of floating-point operations in 10^12."""
    moved: float
    """The GB read from and written to the device's memory."""
    arguments: float
    """The GB of arguments, which include the parameters."""
    temporaries: float
    """The GB besides arguments and results while it runs."""
    code: float
    """The GB of the program itself."""
    peak: float
    """The GB of arguments, results, temporaries and code together."""
    kernels: int | None = None
    """On GPUs the number of kernels and calls of libraries."""

    @property
    def results(self) -> float:
        """The GB of results that do not take the place of arguments."""
        return self.peak - self.arguments - self.temporaries - self.code

    def fits(self, chip: Chip) -> bool:
        """Returns whether the peak is within what programs can have (`Chip.usable`)."""
        return self.peak <= chip.usable

    def seconds(self, chip: Chip) -> float:
        """Returns the least time that the chip needs: to compute or to move, the longer of the
        two.
        """
        return max(self.tflop / chip.tflops, self.moved / chip.bandwidth)

    def figures(self, chip: Chip | None) -> dict[str, float]:
        """Returns all by name, with whether it fits and the seconds where the chip is known."""
        names = ("arguments", "results", "temporaries", "code", "peak", "moved", "tflop")
        found: dict[str, float] = {name: getattr(self, name) for name in names}
        if self.kernels is not None:
            found["kernels"] = self.kernels
        if chip is not None:
            found |= {"seconds": self.seconds(chip), "fits": self.fits(chip)}
        return found


def cost_of(compiled: jax.stages.Compiled, *, needed: float = 0.0) -> Cost:
    """Returns what XLA says of an executable; memory that it does not tell counts as 0.

    needed: the operations that are needed on each device (see `flops`). They count
    where XLA gives no number, as for GPUs that are elsewhere; then the kernels and the bytes are
    counted in the executable's text.
    """
    analysis: Any = compiled.cost_analysis() or {}
    memory: Any = compiled.memory_analysis()

    def gigabytes(name: str) -> float:
        return getattr(memory, f"{name}_size_in_bytes", 0) / 1e9

    arguments, temporaries = gigabytes("argument"), gigabytes("temp")
    results = gigabytes("output") - gigabytes("alias")
    code = gigabytes("generated_code")
    operations, moved = analysis.get("flops", 0), analysis.get("bytes accessed", 0) / 1e9
    kernels = None
    if needed and not operations:
        found = traffic(kernels_of(compiled.as_text() or ""))
        operations, moved, kernels = needed, found.moved, found.kernels
    return Cost(
        operations / 1e12,
        moved,
        arguments,
        temporaries,
        code,
        arguments + results + temporaries + code,
        kernels,
    )
