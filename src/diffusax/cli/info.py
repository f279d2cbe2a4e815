"""`diffusax info`."""

import collections
import dataclasses
import math
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional

from diffusax.boundary.files import load_json
from diffusax.boundary.messages import escaped
from diffusax.cli.parsing import OWN, parse


@dataclasses.dataclass(frozen=True)
class Info:
    """Show what a checkpoint holds, and the names of the samplers."""

    model: Annotated[Positional[str | None], OWN] = None
    """A folder in diffusers' layout, a .safetensors or .gguf file, a Hub repository id, or "emoji";
    without one, only the devices and samplers are shown."""
    variant: Annotated[str | None, OWN] = None
    """Show the checkpoint's variant of this name, such as fp16."""

    def run(self) -> None:
        """Prints the components from the headers of their files; loads no weights."""
        # These imports take seconds, and a wrong option is refused without them.
        from diffusax.runtime.programs.cache import enable_compilation_cache

        config = None if self.model is None else self._checkpoint(self.model)
        print(f"devices: {', '.join(device_kinds())}")
        print(f"compilation cache: {escaped(enable_compilation_cache() or 'off')}")
        for line in _samplers(config):
            print(escaped(line))

    def _checkpoint(self, model: str) -> dict[str, Any] | None:
        """Prints the components, and returns the scheduler's config if there is one."""
        from diffusax.checkpoints import read_model_index, resolve
        from diffusax.checkpoints.files import component_folder

        folder = resolve(model, variant=self.variant)
        class_name, components, _ = read_model_index(folder)
        # A single file is opened as a temporary folder, whose name would say nothing.
        shown = model if Path(model).is_file() else folder
        print(escaped(f"{class_name} in {shown}"))
        for name, (_, component) in sorted(components.items()):
            own = component_folder(folder, name)
            size = "" if name == "scheduler" else _size(own, self.variant)
            print(escaped(f"  {name:14} {component:24} {size}".rstrip()))
        file = component_folder(folder, "scheduler") / "scheduler_config.json"
        if "scheduler" not in components or not file.is_file():
            return None
        return {"_class_name": components["scheduler"][1], **load_json(file)}


def device_kinds() -> list[str]:
    """Describes the number of devices of each kind."""
    import jax

    kinds = collections.Counter((d.platform, d.device_kind) for d in jax.devices())
    return [f"{count} {platform} ({kind})" for (platform, kind), count in kinds.items()]


def command(args: list[str]) -> Info:
    """Reads the options from the arguments."""
    return parse(Info, args, prog="diffusax info")


def _samplers(config: dict[str, Any] | None) -> list[str]:
    """Lists the names of the samplers; with a checkpoint's config those that suit it come first."""
    from diffusax.samplers import SAMPLER_NAMES, fitting_samplers, scheduler_from_config

    if config is None:
        return [f"samplers: {', '.join(SAMPLER_NAMES)}"]
    try:
        found, others = fitting_samplers(scheduler_from_config(config))
    except ValueError as error:
        return [f"samplers: none ({error})"]
    reasons = [f"  not {', '.join(names)}: {reason}" for reason, names in others.items()]
    return [f"samplers: {', '.join(found)}", *reasons]


def _size(folder: Path, variant: str | None) -> str:
    from diffusax.checkpoints.networks import stored_tensors

    if not (folder / "config.json").is_file():
        return ""
    load_json(folder / "config.json")
    entries = [entry for part in stored_tensors(folder, variant) for entry in part.values()]
    count = sum(math.prod(entry.shape) for entry in entries)
    nbytes = sum(entry.nbytes for entry in entries)
    dtypes = "/".join(sorted({str(entry.dtype) for entry in entries}))
    return f"{count / 1e6:9.1f} M parameters  {nbytes / 2**20:9.1f} MiB  {dtypes}"
