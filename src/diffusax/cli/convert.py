"""`diffusax convert TASK`."""

import dataclasses
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import Positional, arg

from diffusax.checkpoints import resolve
from diffusax.cli.parsing import OWN, choose, parse
from diffusax.options import Options
from diffusax.pipelines import DiffusionPipeline
from diffusax.pipelines.converting import to_instruct_pix2pix
from diffusax.printable import escaped


@dataclasses.dataclass(frozen=True, kw_only=True)
class InstructPix2Pix(Options):
    """Write an InstructPix2Pix checkpoint that a training can start from.

    The UNet gets input channels for a second picture, whose weights are zero, so that it draws what
    it drew before.
    """

    source: Annotated[Positional[str], arg(metavar="IN")]
    """The text-to-image checkpoint: a folder in diffusers' layout, or a Hub repository id."""
    output: Annotated[Positional[Path], arg(metavar="OUT")]
    """The folder to write."""
    dtype: Annotated[Literal["float32", "bfloat16", "float16"] | None, OWN] = None
    """Dtype of the parameters; by default that of the checkpoint's files."""

    def run(self) -> Path:
        """Writes the folder and returns it.

        Raises:
            ValueError: the checkpoint cannot be converted, or would be written over itself.
        """
        folder = resolve(self.source)
        if folder.resolve() == self.output.resolve():
            raise ValueError(f"OUT must be another folder than IN (got {self.output})")
        pipe = DiffusionPipeline.from_pretrained(folder, dtype=self.dtype or "auto")
        to_instruct_pix2pix(pipe).save_pretrained(self.output)
        print(f"wrote {escaped(self.output)}")
        return self.output


TASKS = {"instruct-pix2pix": InstructPix2Pix}


def command(args: list[str]) -> Any:
    """What the arguments ask for."""
    texts = {name: (kind.__doc__ or "").splitlines()[0] for name, kind in TASKS.items()}
    description = "Make a checkpoint of one task into one of another."
    return choose(texts, args, _read, prog="diffusax convert", description=description)


def _read(name: str, args: list[str]) -> Any:
    return parse(TASKS[name], args, prog=f"diffusax convert {name}")
