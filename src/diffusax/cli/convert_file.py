"""`diffusax convert` between single files and folders."""

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from diffusax.boundary.messages import escaped
from diffusax.boundary.options import Options
from diffusax.checkpoints.converting import pack_single_file, unpack_single_file
from diffusax.checkpoints.hub import resolve
from diffusax.checkpoints.single_file import Reading
from diffusax.checkpoints.weight_file import config_folder, find_file
from diffusax.cli.parsing import OWN, given_flags, parse
from diffusax.models.network import parse_dtype


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvertFile(Options):
    """Convert a single .safetensors or .gguf file into a folder in diffusers' layout, or back.

    Tensors are copied bit for bit unless --dtype is given. diffusax convert instruct-pix2pix --help
    shows how a model becomes one of another task.
    """

    source: Annotated[Positional[str], arg(metavar="IN")]
    """A .safetensors or .gguf file or its address on the Hub; or, to make one of it, a folder in
    diffusers' layout or a Hub repository id."""
    output: Annotated[Positional[Path], arg(metavar="OUT")]
    """The folder to write, or the file, whose name ends with .safetensors."""
    dtype: Annotated[Literal["float32", "bfloat16", "float16"] | None, OWN] = None
    """The dtype of the parameters; by default the input's."""
    prediction_type: Annotated[Literal["epsilon", "v_prediction", "sample"] | None, OWN] = None
    """What the UNet predicts, where the file does not say it: v_prediction for Stable Diffusion 2
    of 768 pixels, epsilon for that of 512."""
    use_ema: bool = False
    """Take the UNet's averaged parameters from the file."""
    model_config: Annotated[str | None, OWN] = None
    """A folder or Hub repository with the configs of a model of which the package has none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        flags = given_flags(self, ("prediction_type", "use_ema", "model_config"))
        if self._packs and flags:
            raise ValueError(f"{flags[0]} is for a single file as IN; leave it out")
        if self.output.suffix.lower() == ".gguf":
            raise ValueError(f"OUT must be a folder or a .safetensors file (got {self.output})")

    def run(self) -> Path:
        """Writes the folder or the file and returns it.

        Raises:
            ValueError: the input cannot be converted, or would overwrite itself.
        """
        dtype = None if self.dtype is None else parse_dtype(self.dtype)
        if self._packs:
            pack_single_file(resolve(self.source), self.output, dtype=dtype)
        else:
            config = config_folder(self.model_config)
            reading = Reading(config, self.prediction_type, self.use_ema)
            unpack_single_file(find_file(self.source), self.output, reading, dtype=dtype)
        print(f"wrote {escaped(self.output)}")
        return self.output

    @property
    def _packs(self) -> bool:
        """Whether a single file is the output."""
        return self.output.suffix.lower() == ".safetensors"


def command(args: list[str]) -> ConvertFile:
    """Reads the options from the arguments."""
    return parse(ConvertFile, args, prog="diffusax convert")
