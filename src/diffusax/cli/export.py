"""`diffusax export`."""

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional

from diffusax.checkpoints import resolve
from diffusax.cli.compile import TASKS, parse_size
from diffusax.cli.drawing import Dtype
from diffusax.cli.parsing import OWN, parse
from diffusax.options import Count, Options
from diffusax.pipelines import ahead
from diffusax.printable import escaped
from diffusax.runtime.exporting import export_requests


@dataclasses.dataclass(frozen=True, kw_only=True)
class Export(Options):
    """Write a model's programs as StableHLO files, which run without diffusax on any platform.

    Weights are not in the files: they are arguments, by their names in the checkpoint.
    """

    model: Positional[str]
    """A folder in diffusers' layout, a Hub repository id, or "emoji"."""
    platforms: tuple[Literal["cpu", "cuda", "rocm", "tpu"], ...] = ("cpu", "cuda", "tpu")
    """The platforms that the programs are for; each file serves all of them."""
    task: Literal["text-to-image", "image-to-image", "inpainting"] = "text-to-image"
    """What the programs will be used for."""
    batch_size: Annotated[Count | None, OWN] = None
    """The number of images; by default the files take any number."""
    size: Annotated[str | None, OWN] = None
    """Height and width in pixels, such as 512x768; by default the size it was trained at."""
    guidance: bool = True
    """Export for calls with classifier-free guidance."""
    dtype: Dtype = "float32"
    """Dtype of the parameters and of the computation."""
    output: Path = Path("exported")
    """The folder for the files."""

    def run(self) -> list[Path]:
        """Writes the files and returns them."""
        pipe = ahead.shapes_only(
            TASKS[self.task], resolve(self.model, weights=False), dtype=self.dtype
        )
        size = None if self.size is None else parse_size("--size", self.size)
        b = self.batch_size or 2
        arguments = {"guidance_scale": 7.5 if self.guidance else 1.0}
        call = ahead.example_call(pipe, b, size, arguments)
        found = ahead.requests(pipe.parts, pipe.task, call)
        axes = ahead.image_axes if self.batch_size is None else None
        files = export_requests(found, self.output, self.platforms, image_axes=axes)
        for file in files:
            print(escaped(f"{file} ({file.stat().st_size / 1e6:.1f} MB)"))
        return files


def command(args: list[str]) -> Export:
    """The options from the arguments."""
    return parse(Export, args, prog="diffusax export")
