"""What a pipeline offers of `ahead`: programs compiled before the first call."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import jax

from diffusax.pipelines.ahead import example_call, requests
from diffusax.pipelines.components import Components
from diffusax.runtime.ahead import compile_all, memory_of
from diffusax.runtime.program import Request
from diffusax.runtime.saved import load_executables, save_executables


class AheadOfTime:
    """Methods of every pipeline."""

    parts: Components
    task: ClassVar[Any]

    def compile(
        self,
        batch_sizes: Sequence[int] = (1,),
        sizes: Sequence[tuple[int, int]] | None = None,
        **arguments: Any,
    ) -> Self:
        """The pipeline itself, whose programs for these shapes are compiled now.

        Tiled decoding, and numbers of PyTorch that a sampler draws row by row, take other programs.

        Args:
            batch_sizes: numbers of images.
            sizes: heights and widths in pixels; by default the size that the denoiser was
                trained at.
            **arguments: of the calls to come, as far as they decide what is computed, such as
                `guidance_scale=1` for calls without guidance.

        Raises:
            ValueError: an argument is unknown or cannot be, or there are several processes.
        """
        _check_alone()
        found: list[Request] = []
        for size in sizes or (None,):
            for b in batch_sizes:
                call = example_call(self, b, size, arguments)
                found += requests(self.parts, self.task, call)
        compile_all(found, self.parts.mesh)
        return self

    def save_compiled(self, folder: str | Path) -> list[Path]:
        """Writes what `compile` has made, for processes on machines like this one.

        Raises:
            ValueError: nothing was compiled ahead of time.
        """
        _check_alone()
        return save_executables(folder)

    def load_compiled(self, folder: str | Path) -> int:
        """Reads what `save_compiled` wrote; load only files that you trust.

        Returns:
            How many programs can be used. Files of other versions or devices are left out, with a
            warning.
        """
        _check_alone()
        return load_executables(folder)

    def memory(self) -> dict[str, dict[str, float]]:
        """GB that parameters take, by component, and programs compiled ahead of time, by shape.

        On every device: its share of the parameters; a program's temporaries while it runs, and its
        own code.
        """
        return memory_of(self.parts.params)


def _check_alone() -> None:
    if jax.process_count() > 1:
        raise ValueError(
            "programs are compiled ahead, saved and loaded in one process (got "
            f"{jax.process_count()}); the compilation cache serves several"
        )
