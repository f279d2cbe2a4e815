"""`diffusax compile`."""

import dataclasses
import itertools
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from tqdm.auto import tqdm
from tyro.conf import Positional

import diffusax
from diffusax.boundary.messages import escaped
from diffusax.boundary.options import Count, Options
from diffusax.checkpoints import resolve
from diffusax.cli.fits import print_cost, print_head, print_pipeline
from diffusax.cli.generation import Dtype, StoredWeights
from diffusax.cli.parsing import OWN, parse
from diffusax.pipelines.pipeline import ahead
from diffusax.pipelines.pipeline.ahead import memory_there
from diffusax.runtime.devices.chips import chip_of
from diffusax.runtime.programs.cache import enable_compilation_cache
from diffusax.runtime.programs.cost import Cost
from diffusax.runtime.programs.topology import DoesNotFitError, topology_mesh

TASKS: dict[str, Any] = {
    "text-to-image": diffusax.AutoPipelineForText2Image,
    "image-to-image": diffusax.AutoPipelineForImage2Image,
    "inpainting": diffusax.AutoPipelineForInpainting,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compile(Options):
    """Compile a model's programs before they are needed, for this machine or for devices elsewhere.

    For this machine, they go to the compilation cache, or to the folder of --output. With
    --topology nothing is kept: the table says what each program, and all of a call, takes on every
    device, and whether it fits. Then only the configs of a folder are read.
    """

    model: Positional[str]
    """A folder in diffusers' layout, a .safetensors or .gguf file, a Hub repository id, or
    "emoji"."""
    task: Literal["text-to-image", "image-to-image", "inpainting"] = "text-to-image"
    """What the programs will be used for."""
    batch_sizes: tuple[Count, ...] = (1,)
    """The numbers of images, over all devices."""
    sizes: tuple[str, ...] = ()
    """Heights and widths in pixels, such as 512x768; by default the model's own size."""
    guidance: bool = True
    """Compile for calls with classifier-free guidance."""
    dtype: Dtype = "float32"
    """The dtype of the parameters and of the computation."""
    vae_dtype: Annotated[Dtype | None, OWN] = None
    """The dtype of the autoencoder, if it should differ."""
    weights: StoredWeights = "file"
    """Store the large networks' kernels in eight bits (int8, int8_convrot, fp8); with file only
    those that are quantised in their file, and none with --topology, for which no file is read."""
    mesh: Annotated[str | None, OWN] = None
    """The devices to spread the work over, such as data=4,tensor=2; by default all."""
    topology: Annotated[str | None, OWN] = None
    """Compile for TPUs or GPUs that are not here, such as v5e:2x2, h100:8 or 2xh100:8, and say what
    the programs need."""
    output: Annotated[Path | None, OWN] = None
    """Write the executables to this folder, for load_compiled and --compiled."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for size in self.sizes:
            parse_size("--sizes", size)
        if self.topology and self.output:
            raise ValueError("--output cannot be given with --topology: no executable is kept")

    def run(self) -> None:
        """Compiles, and prints the result."""
        if self.topology:
            self._for_topology(self.topology)
            return
        folder = enable_compilation_cache()
        pipe = TASKS[self.task].from_pretrained(
            self.model,
            dtype=self.dtype,
            vae_dtype=self.vae_dtype,
            weights=self.weights,
            mesh=self.mesh,
        )
        sizes = [parse_size("--sizes", size) for size in self.sizes] or None
        pipe.compile(self.batch_sizes, sizes, **self._arguments(pipe))
        if self.output:
            print(f"{escaped(self.output)} ({len(pipe.save_compiled(self.output))} programs)")
        else:
            print(f"the compilation cache {escaped(folder)}" if folder else "no cache is in use")

    def _for_topology(self, topology: str) -> None:
        mesh = topology_mesh(topology, self.mesh)
        pipe = ahead.shapes_only(
            TASKS[self.task],
            resolve(self.model, weights=False),
            dtype=self.dtype,
            vae_dtype=self.vae_dtype,
            weights=self.weights,
        )
        sizes: list[Any] = [parse_size("--sizes", size) for size in self.sizes]
        chip = chip_of(mesh.devices.flat[0])
        print_head(mesh, "so denoise is one step")
        with tqdm(desc="compiling", leave=False, disable=None) as bar:

            def watch(name: str, cost: Cost | DoesNotFitError) -> None:
                print_cost(name, cost, chip)
                bar.update()

            for size, b in itertools.product(sizes or [None], self.batch_sizes):
                given = topology, self.mesh, b, size, self._arguments(pipe)
                print_pipeline(memory_there(pipe, *given, watch=watch)["pipeline"], chip)

    def _arguments(self, pipe: Any) -> dict[str, Any]:
        return {"guidance_scale": 7.5 if self.guidance else pipe.family.guidance.off}


def command(args: list[str]) -> Compile:
    """Reads the options from the arguments."""
    return parse(Compile, args, prog="diffusax compile")


def parse_size(option: str, text: str) -> tuple[int, int]:
    """Reads height and width from an option such as 512x768.

    Raises:
        ValueError: the text does not have this form.
    """
    found = re.fullmatch(r"(\d{1,6})x(\d{1,6})", text)
    if not found:
        raise ValueError(f"{option} must be height and width, such as 512x768 (got {text})")
    return int(found[1]), int(found[2])
