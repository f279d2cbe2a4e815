"""`diffusax convert lora`."""

import dataclasses
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from tyro.conf import Positional, arg

from diffusax.boundary.messages import escaped
from diffusax.boundary.options import Options
from diffusax.checkpoints import resolve
from diffusax.checkpoints.files import read_model_index
from diffusax.checkpoints.networks import read_network
from diffusax.cli.parsing import parse
from diffusax.lora import find_layers, read_lora, write_lora


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvertLora(Options):
    """Convert a LoRA between the formats of diffusers, kohya's scripts and A1111, and ComfyUI.

    The numbers stay as they are, and so do the images.
    """

    essentials: ClassVar[tuple[str, ...]] = ("to", "model", "references_layout", "strict")

    source: Annotated[Positional[str], arg(metavar="IN")]
    """The LoRA: a safetensors file, or a folder or Hub repository that holds one."""
    output: Annotated[Positional[Path], arg(metavar="OUT")]
    """The safetensors file to write."""
    to: Literal["diffusers", "kohya", "comfyui"]
    """The format to write. Formats of LyCORIS can only be kohya's or ComfyUI's; the latter, which
    ai-toolkit writes, too, is for transformers alone."""
    model: str
    """The checkpoint that the LoRA is for: a folder in diffusers' layout, or a Hub repository id.
    Only its configs are read."""
    references_layout: Literal["blind", "joint", "causal"] | None = None
    """For a LoRA that looks at images: by which layout it has learned to, which the new file's
    header says; by default what the file's own says. ai-toolkit's files say nothing: "blind" is
    what its option kv_cache trains, and "joint" what it trains without."""
    strict: bool = True
    """Refuse a file with tensors that fit no layer of the model, instead of leaving them out."""

    def run(self) -> Path:
        """Writes the file and returns it.

        Raises:
            ValueError: the LoRA does not fit the model, or the format cannot hold it.
        """
        if self.output.suffix != ".safetensors":
            raise ValueError(f"OUT must be a .safetensors file (got {self.output})")
        file, networks = read_lora(self.source), networks_of(self.model)
        layers = find_layers(file, networks, strict=self.strict)
        self.output.parent.mkdir(parents=True, exist_ok=True)
        options: dict[str, Any] = {
            "encoders": len(networks) - 1,
            "references_layout": self.references_layout or file.references_layout,
        }
        if "unet" in networks:
            options["unet"] = networks["unet"].config
        if "transformer" in networks:
            options["transformer"] = networks["transformer"].class_name
        write_lora(self.output, layers, self.to, **options)
        print(f"wrote {escaped(self.output)} ({len(layers)} layers)")
        return self.output


def networks_of(model: str) -> dict[str, Any]:
    """Returns the networks of a checkpoint by component; reads only its configs."""
    folder = resolve(model, weights=False)
    _, listed, _ = read_model_index(folder)
    beginnings = ("unet", "transformer", "text_encoder")
    names = [name for name in listed if name.startswith(beginnings) and all(listed[name])]
    return {name: read_network(folder / name) for name in names}


def command(args: list[str]) -> ConvertLora:
    """Reads the options from the arguments."""
    return parse(ConvertLora, args, prog="diffusax convert lora")
