"""`diffusax export`."""

import dataclasses
import inspect
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import Positional

from diffusax.boundary.messages import escaped
from diffusax.boundary.options import Count, Options, Steps
from diffusax.checkpoints import resolve
from diffusax.cli.compile import TASKS, parse_size
from diffusax.cli.generation import Dtype
from diffusax.cli.parsing import OWN, parse
from diffusax.pipelines.pipeline import ahead
from diffusax.pipelines.pipeline.exporting import (
    parameter_files,
    reads_plain_texts,
    write_example,
    write_parameters,
)
from diffusax.runtime.programs.exporting import export_requests


@dataclasses.dataclass(frozen=True, kw_only=True)
class Export(Options):
    """Write a model's programs as StableHLO files, which run without diffusax on any platform.

    Weights are arguments of the programs and in files of their own. For text-to-image with Stable
    Diffusion there is a script, draw.py, that generates images with all of them.
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
    """Height and width in pixels, such as 512x768; by default the size the model was trained at."""
    guidance: bool = True
    """Export for calls with classifier-free guidance."""
    dtype: Dtype = "float32"
    """The dtype of the parameters and of the computation."""
    weights: bool = True
    """Write the weights beside the programs, and for Stable Diffusion draw.py."""
    steps: Annotated[Steps | None, OWN] = None
    """The number of sampler steps of draw.py; the pipeline's own by default."""
    output: Path = Path("exported")
    """The folder for the files."""

    def run(self) -> list[Path]:
        """Writes the files and returns them."""
        checkpoint = resolve(self.model, weights=self.weights)
        pipe = ahead.shapes_only(TASKS[self.task], checkpoint, dtype=self.dtype)
        size = None if self.size is None else parse_size("--size", self.size)
        arguments = self._arguments(pipe)
        call = ahead.example_call(pipe, self.batch_size or 2, size, arguments)
        found = ahead.requests(pipe.parts, pipe.task, call)
        files = export_requests(
            found,
            self.output,
            self.platforms,
            image_axes=ahead.image_axes if self.batch_size is None else None,
            parameter_files=lambda request: parameter_files(pipe.parts, request),
        )
        if self.weights:
            names = list(pipe.params)
            given = checkpoint, pipe.family, names, self.output
            files += write_parameters(*given, dtype=self.dtype)
        if self.weights and self.task == "text-to-image" and reads_plain_texts(pipe.parts):
            call = ahead.example_call(pipe, self.batch_size or 1, size, arguments)
            (denoise,) = (request for request in found if request.program.name == "denoise")
            files += write_example(pipe.parts, pipe.task, call, denoise, self.output)
        for file in files:
            print(escaped(f"{file} ({file.stat().st_size / 1e6:.1f} MB)"))
        return files

    def _arguments(self, pipe: Any) -> dict[str, Any]:
        """Returns the arguments of the call that the programs are for."""
        if not self.guidance:
            arguments: dict[str, Any] = {"guidance_scale": pipe.family.guidance.off}
        else:
            scale = pipe.call_defaults.get("guidance_scale", 7.5)
            arguments = {"guidance_scale": scale}
            if "negative_prompt" in inspect.signature(type(pipe).__call__).parameters:
                # Needed even where no negative prompt means zeros: the programs take any prompt.
                arguments["negative_prompt"] = ""
        steps = self.steps or pipe.call_defaults.get("num_inference_steps")
        return arguments if steps is None else {**arguments, "num_inference_steps": int(steps)}


def command(args: list[str]) -> Export:
    """Reads the options from the arguments."""
    return parse(Export, args, prog="diffusax export")
