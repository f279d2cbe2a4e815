"""`diffusax convert`."""

import dataclasses
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import Positional, arg

from diffusax.boundary.messages import escaped
from diffusax.boundary.options import Options
from diffusax.checkpoints import resolve
from diffusax.checkpoints.single_file.contents import SUFFIXES, TORCH_SUFFIXES
from diffusax.cli.parsing import OWN, parse
from diffusax.pipelines import DiffusionPipeline
from diffusax.training.recipes.editors import to_instruct_pix2pix


@dataclasses.dataclass(frozen=True, kw_only=True)
class Convert(Options):
    """Convert a text-to-image checkpoint into one of another task, to be trained further.

    The denoiser gets input channels for a second image, whose weights are zero, so that its
    predictions do not change.

    Without a task, diffusax convert IN OUT makes a folder of a single .safetensors or .gguf file,
    or back. diffusax convert lora IN OUT converts a LoRA to another format.
    """

    task: Positional[Literal["instruct-pix2pix"]]
    """The task of the result: instruct-pix2pix edits an image as a text says."""
    source: Annotated[Positional[str], arg(metavar="IN")]
    """The text-to-image checkpoint: a folder in diffusers' layout, or a Hub repository id."""
    output: Annotated[Positional[Path], arg(metavar="OUT")]
    """The folder to write."""
    dtype: Annotated[Literal["float32", "bfloat16", "float16"] | None, OWN] = None
    """The dtype of the parameters; by default that of the checkpoint's files."""

    def run(self) -> Path:
        """Writes the folder and returns it.

        Raises:
            ValueError: the checkpoint cannot be converted, or would overwrite itself.
        """
        folder = resolve(self.source)
        if folder.resolve() == self.output.resolve():
            raise ValueError(f"OUT must be another folder than IN (got {self.output})")
        pipe = DiffusionPipeline.from_pretrained(folder, dtype=self.dtype or "auto")
        to_instruct_pix2pix(pipe).save_pretrained(self.output)
        print(f"wrote {escaped(self.output)}")
        return self.output


def command(args: list[str]) -> Any:
    """Reads the options from the arguments: of a task, of a LoRA, or of a single file."""
    if args[:1] == ["lora"]:
        from diffusax.cli import convert_lora

        return convert_lora.command(args[1:])
    if _names_single_file(args):
        from diffusax.cli import convert_file

        return convert_file.command(args)
    return parse(Convert, args, prog="diffusax convert")


def _names_single_file(args: list[str]) -> bool:
    """Returns whether the arguments begin with no task, and a single file is among them."""
    ends = *SUFFIXES, *TORCH_SUFFIXES
    return args[:1] != ["instruct-pix2pix"] and any(end in arg for arg in args for end in ends)
