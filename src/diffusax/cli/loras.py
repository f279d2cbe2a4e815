"""The LoRAs of commands that generate images: their files, and those that prompts name."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from diffusax.text.extra_networks import log_prompt_warnings, read_tags


def load_named(pipe: Any, folder: Path | None, names: Iterable[str]) -> None:
    """Loads the LoRAs of these names that the pipeline does not have.

    folder: where their files are, NAME.safetensors or with this name in their headers; folders
        inside it are searched, too.

    Raises:
        ValueError: there is no such file, or it cannot be loaded.
    """
    for name in names:
        if name not in pipe.adapters:
            if folder is None:
                raise ValueError(f"the prompt names the LoRA {name!r}; --lora-dir says where it is")
            pipe.load_lora_weights(_file(folder, name), adapter_name=name)
    pipe.set_adapters([])


def load_folder(pipe: Any, folder: Path) -> None:
    """Loads all LoRAs of a folder under their files' names.

    Raises:
        ValueError: there are none, or one cannot be loaded.
    """
    files = sorted(folder.rglob("*.safetensors"))
    if not files:
        raise ValueError(f"--lora-dir {folder} has no .safetensors file")
    load_named(pipe, folder, [file.stem for file in files])


def learned_layout(folder: Path | None, names: Iterable[str]) -> str | None:
    """Returns the layout by which the LoRAs of these names have learned to look at images.

    None where the headers of their files say none. See `load_named`.

    Raises:
        ValueError: there is no such file.
    """
    from diffusax.lora import layout_of

    layouts = (layout_of(_file(folder, name)) for name in names if folder is not None)
    return next((layout for layout in layouts if layout is not None), None)


def adapters_of(pipe: Any, prompt: str) -> tuple[str, dict[str, Any]]:
    """Returns a prompt without its LoRAs, and the call's argument `adapters` for them.

    The pipeline has them.

    Raises:
        ValueError: a tag in the prompt cannot be read.
    """
    log_prompt_warnings(prompt)
    prompt, weights = read_tags(prompt)
    if not weights:
        return prompt, {}
    known = set(pipe.component_names)
    own = {
        name: {k: v for k, v in w.items() if k in known} if isinstance(w, dict) else w
        for name, w in weights.items()
    }
    return prompt, {"adapters": own}


def _file(folder: Path, name: str) -> Path:
    from diffusax.lora import called, output_name

    files = sorted(folder.rglob("*.safetensors"))
    found = called(name, {path: (path.stem, None) for path in files})
    # Headers are read only where no file has the name.
    found = found or called(name, {path: (path.stem, output_name(path)) for path in files})
    if len(found) != 1:
        count = "no file" if not found else f"{len(found)} files"
        raise ValueError(
            f"--lora-dir {folder} has {count} {name}.safetensors or with this name in the header"
        )
    return found[0]
