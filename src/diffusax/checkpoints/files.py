"""Finds the files with configuration and weights in a component's folder."""

import itertools
import os
import re
import reprlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from diffusax.boundary.convert import Mismatch, convert
from diffusax.boundary.files import load_json, write_json

STEMS = ("diffusion_pytorch_model", "model")
_SHARD = r"-\d{5}-of-\d{5}"
_VARIANT = re.compile(
    rf"(?:{'|'.join(STEMS)})(?:"
    r"\.safetensors\.index\.(?P<indexed>[^.]+)\.json"
    r"|\.safetensors\.(?P<older>[^.]+)\.index\.json"
    rf"|\.(?P<named>[^.]+?)(?:{_SHARD})?\.safetensors(?:\.index\.json)?"
    rf"|{_SHARD}\.(?P<numbered>[^.]+)\.safetensors)"
)
_REFUSED = (".bin", ".ckpt", ".pt", ".pth", ".pkl", ".msgpack")


def choose_weights(names: Iterable[str], variant: str | None = None) -> str | None:
    """Chooses from a folder's file names what to load: a safetensors file or an index of several.

    If the folder has no files of this variant, it chooses from those without a variant, like
    diffusers for the components of a pipeline. Returns None if there is nothing to load.
    """
    names = set(names)
    chosen = choose_variant(names, variant) if variant else None
    return chosen or choose_variant(names, None)


def choose_variant(names: Iterable[str], variant: str | None) -> str | None:
    """Chooses like `choose_weights`, but only from files of this variant."""
    names = set(names)
    candidates = (name for stem in STEMS for name in _candidates(stem, variant))
    return next((name for name in candidates if name in names), None)


def weight_files(folder: Path, variant: str | None = None) -> list[Path]:
    """Returns the safetensors files of a component, in order.

    Raises:
        ValueError: there are none, only pickles, or an index that names missing files.
    """
    names = [p.name for p in folder.iterdir()] if folder.is_dir() else []
    chosen = choose_weights(names, variant)
    if chosen is None:
        raise ValueError(_nothing_to_load(folder, names))
    path = folder / chosen
    if path.suffix != ".json":
        if not path.is_file():
            raise ValueError(f"{path} is not a file")
        return [path]
    shards = [folder / name for name in shard_names(load_json(path), path)]
    for shard in shards:
        if not shard.is_file():
            raise ValueError(f"{path} names {shard.name}, which is missing; download it again")
    return shards


def fitting_variant(folder: Path, variant: str | None) -> str | None:
    """Returns the variant if a pipeline's component has it; None if it only has other weights."""
    names = [p.name for p in folder.iterdir()] if folder.is_dir() else []
    return variant if variant and choose_variant(names, variant) else None


def component_folder(folder: Path, name: str) -> Path:
    """Returns the folder with a component's files.

    It is `name` in the checkpoint. Checkpoints of one network, such as google/ddpm-cifar10-32, may
    have all files beside model_index.json; the checkpoint's own folder is returned then.
    """
    own = folder / name
    return folder if not own.is_dir() and (folder / "config.json").is_file() else own


def numbered(name: str, count: int) -> tuple[str, ...]:
    """Returns the names of `count` networks in the place of one: controlnet, controlnet_1, ...."""
    return tuple(name if i == 0 else f"{name}_{i}" for i in range(count))


def numbered_folders(first: Path) -> list[Path]:
    """Returns the folders first, first_1, first_2 and so on, as far as there are."""
    names = (first.name if i == 0 else f"{first.name}_{i}" for i in itertools.count())
    return list(itertools.takewhile(Path.is_dir, map(first.with_name, names)))


def shard_names(index: dict[str, Any], path: Path) -> list[str]:
    """Returns the file names in a *.safetensors.index.json.

    Raises:
        ValueError: it names none, or something other than files beside it.
    """
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{path} has no weight_map; download it again")
    for name in weight_map.values():
        beside = isinstance(name, str) and not {"/", "\\", "\0"} & set(name)
        if not beside or not name.endswith(".safetensors"):
            raise ValueError(f"{path} names {name!r}, which is no safetensors file beside it")
    return sorted(set(weight_map.values()))


def variants(names: Iterable[str]) -> list[str]:
    """Returns the variants for which there are weights among a folder's file names."""
    found = (_VARIANT.fullmatch(name) for name in names)
    return sorted({next(filter(None, match.groups())) for match in found if match})


def _candidates(stem: str, variant: str | None) -> tuple[str, ...]:
    """Returns the names of files that hold a network's weights, the first to be taken first.

    Where shards and one whole file are there, diffusers takes the shards, transformers the file.
    """
    if variant is None:
        whole, indices = f"{stem}.safetensors", [f"{stem}.safetensors.index.json"]
    else:
        whole = f"{stem}.{variant}.safetensors"
        indices = [
            f"{stem}.safetensors.index.{variant}.json",
            # As diffusers wrote it for a while, and as diffusax did.
            f"{stem}.safetensors.{variant}.index.json",
            f"{stem}.{variant}.safetensors.index.json",
        ]
    return (*indices, whole) if stem == STEMS[0] else (whole, *indices)


def _nothing_to_load(folder: Path, names: list[str]) -> str:
    if not names:
        return f"{folder} is missing or empty; is this a diffusers checkpoint?"
    if found := variants(names):
        return f"{folder} has only the variant {found[0]!r}; pass variant={found[0]!r}"
    if shards := [name for name in names if re.search(rf"{_SHARD}(\.[^.]+)?\.safetensors$", name)]:
        return (
            f"{folder} has {sorted(shards)[0]} and no index of such files "
            f"({shards[0].partition('-0')[0]}.safetensors.index.json); download it, too"
        )
    if pickles := [name for name in names if name.endswith(_REFUSED)]:
        return (
            f"{folder / pickles[0]} is not a safetensors file, and loading it could run code; "
            "convert it where PyTorch is installed: DiffusionPipeline.from_pretrained(...)"
            ".save_pretrained(folder, safe_serialization=True)"
        )
    return f"{folder} has no safetensors file; expected {' or '.join(STEMS)}.safetensors"


MODEL_INDEX = "model_index.json"
MODULAR_INDEX = "modular_model_index.json"
"""What diffusers' modular pipelines have in its place."""
INDEXES = (MODEL_INDEX, MODULAR_INDEX)
CallDefaults = dict[str, float | list[int]]
"""Arguments of a call by name: numbers, or lists of whole numbers."""
DISTILLED_STEPS = {"Flux3DistilledModularPipeline": 16}
"""The steps that modular pipelines were distilled to, by class; no file says them."""


def index_of(folder: Path) -> Path | None:
    """Returns the file that lists the components of a pipeline in a folder; None without one."""
    paths = (Path(folder) / name for name in INDEXES)
    return next((path for path in paths if path.is_file()), None)


def is_modular(folder: Path) -> bool:
    """Returns whether a folder has the index of a modular pipeline of diffusers alone."""
    index = index_of(folder)
    return index is not None and index.name == MODULAR_INDEX


def read_model_index(folder: Path) -> tuple[str, dict[str, tuple[str, str]], dict[str, Any]]:
    """Reads the pipeline's class ("" if none), its components as (library, class), and its options.

    Components that are null, without which the pipeline runs, are left out. The index of a modular
    pipeline of diffusers has a third entry for each, how to load it; of a component that is null
    besides, this one has the class.

    Raises:
        ValueError: the file is missing or broken; names it.
    """
    path = index_of(folder) or Path(folder) / MODEL_INDEX
    if not path.exists() and (path.parent / "config.json").is_file():
        raise ValueError(
            f"{path.parent.name} holds one network and no {MODEL_INDEX}, which a pipeline needs; "
            "load it with from_pretrained or from_single_file of the network's class, and give it "
            "to a pipeline"
        )
    data = load_json(path)
    class_name = data.get("_class_name", "")
    if not isinstance(class_name, str):
        raise ValueError(f"{path}: _class_name must be a string (got {class_name!r})")
    components = {}
    for name, value in data.items():
        value = _listed(value) if path.name == MODULAR_INDEX else value
        if isinstance(value, list) and list(map(type, value)) == [str, str]:
            components[name] = (value[0], value[1])
        elif value not in (None, [None, None]) and os.path.isdir(path.parent / name):
            raise ValueError(
                f"{path}: {name} must be a list of library and class (got {reprlib.repr(value)})"
            )
    options = {
        name: value
        for name, value in data.items()
        if not name.startswith("_") and not (isinstance(value, list) and _is_component(value))
    }
    return class_name, components, options


def _is_component(value: list[Any]) -> bool:
    """Returns whether a list in model_index.json is a component's, not an option of numbers."""
    return not value or not all(isinstance(entry, int | float) for entry in value)


def _listed(value: Any) -> Any:
    """Returns the library and the class of a component in the index of a modular pipeline."""
    if not isinstance(value, list) or len(value) != 3 or not isinstance(value[2], dict):
        return value
    hint = value[2].get("type_hint")
    return value[:2] if value[:2] != [None, None] or hint is None else list(hint)


def listed_class(folder: Path) -> str | None:
    """Returns the class that a checkpoint's model_index.json lists for a component in it.

    folder: the component's. None where it lies in no checkpoint, or is not listed.

    Raises:
        ValueError: the file is broken.
    """
    if index_of(folder.parent) is None:
        return None
    return read_model_index(folder.parent)[1].get(folder.name, ("", None))[1]


def read_call_defaults(folder: Path) -> CallDefaults:
    """Reads arguments of a call that suit this checkpoint better than diffusers' own defaults.

    They are under the key `_call_defaults`; diffusers ignores keys that begin with an underscore.

    Raises:
        ValueError: they are not numbers, or lists of whole numbers, by name.
    """
    path = index_of(folder) or Path(folder) / MODEL_INDEX
    data = load_json(path)
    steps = DISTILLED_STEPS.get(str(data.get("_class_name")))
    own = {} if steps is None else {"num_inference_steps": steps}
    try:
        return convert(data.get("_call_defaults", own), dict[str, float | int | list[int]])
    except Mismatch as wrong:
        raise ValueError(
            f"{path}: _call_defaults must be numbers, or lists of them, by name ({wrong})"
        ) from None


def write_model_index(
    folder: Path,
    class_name: str,
    components: dict[str, Any],
    *,
    call_defaults: CallDefaults | None = None,
    **options: Any,
) -> None:
    """Writes model_index.json; a component of None is one without which the pipeline runs."""
    listed = {name: list(value or (None, None)) for name, value in components.items()}
    data = {"_class_name": class_name, "_diffusers_version": "0.40.0", **options, **listed}
    if call_defaults:
        data["_call_defaults"] = call_defaults
    write_json(Path(folder) / MODEL_INDEX, data)


def write_modular_index(
    folder: Path, class_name: str, components: Mapping[str, tuple[str, str]]
) -> None:
    """Writes what diffusers' modular pipelines read: modular_model_index.json.

    class_name: the pipeline's. components: library and class of each, in a folder of its name.
    """
    # Without this name nothing is opened.
    blocks = class_name.replace("ModularPipeline", "AutoBlocks")
    data: dict[str, Any] = {"_blocks_class_name": blocks, "_class_name": class_name}
    data["_diffusers_version"] = "0.42.0"
    for name, (library, kind) in components.items():
        source = {"pretrained_model_name_or_path": str(folder), "subfolder": name}
        entry: dict[str, Any] = {"type_hint": [library, kind], "variant": None, "revision": None}
        data[name] = [library, kind, {**source, **entry}]
    write_json(Path(folder) / MODULAR_INDEX, data)
