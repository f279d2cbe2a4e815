"""Finds checkpoints, LoRAs and what else requests name in a folder of A1111's, or any other."""

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from diffusax.boundary.files import load_json
from diffusax.checkpoints.files import index_of
from diffusax.checkpoints.single_file import is_single_file, kind_of_file

Kind = Literal["model", "lora", "embedding", "controlnet", "upscaler"]

_FOLDERS: dict[str, Kind] = {
    "stable-diffusion": "model",
    "checkpoints": "model",
    "diffusers": "model",
    "lora": "lora",
    "loras": "lora",
    "lycoris": "lora",
    "embeddings": "embedding",
    "controlnet": "controlnet",
    "controlnets": "controlnet",
    "upscalers": "upscaler",
    "upscale_models": "upscaler",
    "esrgan": "upscaler",
    "realesrgan": "upscaler",
}
"""The kinds of things in A1111's and ComfyUI's folders, by the folders' names in small letters."""


@dataclasses.dataclass(frozen=True)
class Found:
    """A checkpoint, or a file beside checkpoints, with its names among those of its kind."""

    kind: Kind
    path: Path
    name: str
    """The file's name without its ending; with folders before it where two have the same name."""
    title: str
    """The path below the folder of its kind, with the ending."""


def find_files(folder: Path) -> tuple[list[Found], dict[Path, str]]:
    """Finds what a folder holds; reads only headers of files.

    The folder may be A1111's or ComfyUI's own, their folder `models`, or hold checkpoints, in
    diffusers' layout or as single files, at its top and in folders of any name. Files in other
    folders are told apart by their tensors.

    Returns:
        what was found, sorted by kind and title, and the reasons for files that cannot be read.

    Raises:
        ValueError: there is no such folder.
    """
    if not folder.is_dir():
        raise ValueError(f"models must be a folder (got {str(folder)!r}); give one that is there")
    found: list[tuple[Kind, Path, Path]] = []
    unreadable: dict[Path, str] = {}
    known = _known_folders(folder)
    for kind, root in known:
        found += [(kind, path, root) for path in _walk(root) if _is_of(kind, path)]
    # Beside folders of checkpoints there may be thousands of other files, such as programs.
    deep = all(kind != "model" for kind, _ in known)
    for path in _walk(folder, skip={root for _, root in known}, deep=deep):
        try:
            own = _kind_of(path)
        except ValueError as error:
            unreadable[path] = str(error)
            continue
        found += [] if own is None else [(own, path, folder)]
    return _named(found), unreadable


def _known_folders(folder: Path) -> list[tuple[Kind, Path]]:
    """Returns the folders of A1111's and ComfyUI's names, with their kinds."""
    roots = [folder, *(child for child in _children(folder) if child.name.lower() == "models")]
    children = [child for root in roots for child in _children(root) if child.is_dir()]
    kinds = ((_FOLDERS.get(child.name.lower()), child) for child in children)
    return [(kind, child) for kind, child in kinds if kind is not None]


def _children(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if not path.name.startswith("."))


def _walk(folder: Path, *, skip: set[Path] | None = None, deep: bool = True) -> Iterator[Path]:
    """Yields the single files and the folders in diffusers' layout below a folder."""
    seen: set[str] = set()
    for path, folders, names in os.walk(folder, followlinks=True):
        here = Path(path)
        real = os.path.realpath(path)
        if real in seen:
            # A link to a folder above it.
            folders.clear()
            continue
        seen.add(real)
        inside = [here / name for name in sorted(folders) if not name.startswith(".")]
        whole = [child for child in inside if _is_saved(child)]
        yield from whole
        yield from (here / name for name in sorted(names) if is_single_file(here / name))
        kept = set(inside) - set(whole) - (skip or set())
        folders[:] = sorted(child.name for child in kept) if deep else []


def _is_saved(folder: Path) -> bool:
    """Returns whether a folder is a pipeline or a network in diffusers' layout."""
    return index_of(folder) is not None or (folder / "config.json").is_file()


def _is_of(kind: Kind, path: Path) -> bool:
    """Returns whether a path in the folder of a kind can be of that kind."""
    if not path.is_dir():
        return True
    return index_of(path) is not None if kind == "model" else kind == "controlnet"


def _kind_of(path: Path) -> Kind | None:
    """Returns the kind of a file or folder; None for what has no use by itself.

    Raises:
        ValueError: it cannot be read.
    """
    if path.is_dir():
        if index_of(path) is not None:
            return "model"
        named = load_json(path / "config.json").get("_class_name")
        return "controlnet" if named == "ControlNetModel" else None
    kind = kind_of_file(path)
    return None if kind == "other" else kind


def _named(found: list[tuple[Kind, Path, Path]]) -> list[Found]:
    """Gives each a name that no other of its kind has."""
    named: list[Found] = []
    taken: set[tuple[Kind, str]] = set()
    # Of two with the same name, the one in fewer folders keeps it.
    by_depth = sorted(found, key=lambda item: (len(item[1].parts), str(item[1]).lower()))
    for kind, path, root in by_depth:
        title = path.relative_to(root).as_posix()
        stem = title if path.is_dir() else title.removesuffix(path.suffix)
        names = (stem.rpartition("/")[2], stem, title, path.as_posix())
        name = next(name for name in names if (kind, name) not in taken)
        taken.add((kind, name))
        named.append(Found(kind, path, name, title))
    return sorted(named, key=lambda one: (one.kind, one.title.lower()))
