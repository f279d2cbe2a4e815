"""Reads and writes model_index.json: the pipeline's class and the checkpoint's components."""

import os
import reprlib
from pathlib import Path
from typing import Any

from diffusax.files import load_json, write_json
from diffusax.typed.convert import Mismatch, convert

NAME = "model_index.json"


def read_model_index(folder: Path) -> tuple[str, dict[str, tuple[str, str]], dict[str, Any]]:
    """Reads the pipeline's class ("" if none), its components as (library, class), and its options.

    Components that are null, without which the pipeline runs, are left out.

    Raises:
        ValueError: the file is missing or broken; names it.
    """
    path = Path(folder) / NAME
    if not path.exists() and (path.parent / "config.json").is_file():
        raise ValueError(
            f"{path.parent.name} holds one network and no {NAME}, which a pipeline needs; load it "
            "with from_pretrained or from_single_file of the network's class, and give it to a "
            "pipeline"
        )
    data = load_json(path)
    class_name = data.get("_class_name", "")
    if not isinstance(class_name, str):
        raise ValueError(f"{path}: _class_name must be a string (got {class_name!r})")
    components = {}
    for name, value in data.items():
        if isinstance(value, list) and list(map(type, value)) == [str, str]:
            components[name] = (value[0], value[1])
        elif value not in (None, [None, None]) and os.path.isdir(path.parent / name):
            raise ValueError(
                f"{path}: {name} must be a list of library and class (got {reprlib.repr(value)})"
            )
    options = {
        name: value
        for name, value in data.items()
        if not name.startswith("_") and not isinstance(value, list)
    }
    return class_name, components, options


def listed_class(folder: Path) -> str | None:
    """Returns the class that a checkpoint's model_index.json lists for a component in it.

    folder: the component's. None where it lies in no checkpoint, or is not listed.

    Raises:
        ValueError: the file is broken.
    """
    if not (folder.parent / NAME).is_file():
        return None
    return read_model_index(folder.parent)[1].get(folder.name, ("", None))[1]


def read_call_defaults(folder: Path) -> dict[str, float]:
    """Reads arguments of a call that suit this checkpoint better than diffusers' own defaults.

    They are under the key `_call_defaults`; diffusers ignores keys that begin with an underscore.

    Raises:
        ValueError: they are not numbers by name.
    """
    path = Path(folder) / NAME
    defaults = load_json(path).get("_call_defaults", {})
    try:
        return convert(defaults, dict[str, float | int])
    except Mismatch as wrong:
        raise ValueError(f"{path}: _call_defaults must be numbers by name ({wrong})") from None


def write_model_index(
    folder: Path,
    class_name: str,
    components: dict[str, Any],
    *,
    call_defaults: dict[str, float] | None = None,
    **options: Any,
) -> None:
    """Writes model_index.json; a component of None is one without which the pipeline runs."""
    listed = {name: list(value or (None, None)) for name, value in components.items()}
    data = {"_class_name": class_name, "_diffusers_version": "0.40.0", **options, **listed}
    if call_defaults:
        data["_call_defaults"] = call_defaults
    write_json(Path(folder) / NAME, data)
