"""Which files of a component's folder hold its configuration and its weights."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from diffusax.files import load_json

STEMS = ("diffusion_pytorch_model", "model")
_REFUSED = (".bin", ".ckpt", ".pt", ".pth", ".pkl", ".msgpack")


def choose_weights(names: Iterable[str], variant: str | None = None) -> str | None:
    """The one of a folder's file names to load: a safetensors file or an index of several.

    Falls back to the files without a variant where the folder has none of this variant, as
    diffusers does. None if there is nothing to load.
    """
    names = set(names)
    for suffix in (variant, None) if variant else (None,):
        for stem in STEMS:
            for candidate in _candidates(stem, suffix):
                if candidate in names:
                    return candidate
    return None


def weight_files(folder: Path, variant: str | None = None) -> list[Path]:
    """The safetensors files of a component, in order.

    Raises:
        ValueError: there are none, only pickles, or an index that names files that are not there.
    """
    names = [p.name for p in folder.iterdir()] if folder.is_dir() else []
    chosen = choose_weights(names, variant)
    if chosen is None:
        raise ValueError(_nothing_to_load(folder, names))
    path = folder / chosen
    if path.suffix != ".json":
        return [path]
    shards = [folder / name for name in shard_names(load_json(path), path)]
    for shard in shards:
        if not shard.is_file():
            raise ValueError(f"{path} names {shard.name}, which is missing; download it again")
    return shards


def shard_names(index: dict[str, Any], path: Path) -> list[str]:
    """The file names in a *.safetensors.index.json."""
    try:
        return sorted(set(index["weight_map"].values()))
    except (KeyError, AttributeError, TypeError):
        raise ValueError(f"{path} has no weight_map; download it again") from None


def _candidates(stem: str, variant: str | None) -> tuple[str, ...]:
    if variant is None:
        return f"{stem}.safetensors", f"{stem}.safetensors.index.json"
    return (
        f"{stem}.{variant}.safetensors",
        f"{stem}.safetensors.index.{variant}.json",
        f"{stem}.{variant}.safetensors.index.json",
    )


def _nothing_to_load(folder: Path, names: list[str]) -> str:
    if not names:
        return f"{folder} is missing or empty; is this a diffusers checkpoint?"
    variants = sorted(
        name.split(".")[1].split("-")[0]
        for name in names
        for stem in STEMS
        if name.startswith(f"{stem}.") and name.endswith(".safetensors")
    )
    if variants:
        return f"{folder} has only the variant {variants[0]!r}; pass variant={variants[0]!r}"
    if pickles := [name for name in names if name.endswith(_REFUSED)]:
        return (
            f"{folder / pickles[0]} is not a safetensors file, and loading it could run code; "
            "convert it where PyTorch is installed: DiffusionPipeline.from_pretrained(...)"
            ".save_pretrained(folder, safe_serialization=True)"
        )
    return f"{folder} has no safetensors file; expected {' or '.join(STEMS)}.safetensors"
