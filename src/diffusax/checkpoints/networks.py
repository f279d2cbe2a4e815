"""Reads a network and its parameters from a component's folder, and writes them there."""

import dataclasses
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jax.sharding import Mesh, NamedSharding

from diffusax.boundary.config import config_from_dict, config_to_dict
from diffusax.boundary.files import load_json, write_json
from diffusax.checkpoints.drawn import drawn_anew
from diffusax.checkpoints.entries import INSTEAD
from diffusax.checkpoints.files import STEMS, listed_class, weight_files
from diffusax.checkpoints.hub import resolve
from diffusax.checkpoints.markings import marked
from diffusax.checkpoints.single_file import named_entries, part_of
from diffusax.checkpoints.tensors import (
    Entry,
    read_entries,
    read_places,
    split_into_shards,
    write_tensors,
)
from diffusax.checkpoints.tree import (
    MeshPlace,
    load_entries,
    match_names,
    params_to_tensors,
    torch_shapes,
)
from diffusax.models import MODELS
from diffusax.models.network import Network, Params, parse_dtype, upstream_name
from diffusax.models.quantized import parse_weights
from diffusax.runtime.devices.mesh import spread_sharding, tree_name

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class LeftOut:
    """What a network was loaded without, and where it still is."""

    folder: Path
    """The folder of the network's files."""
    options: tuple[str, ...]
    """The options of its config.json that were replaced."""
    variant: str | None = None
    """The variant of the files that were read."""


_ENCODERS = {
    f"{name}{kind}": f"{name}EncoderModel"
    for name in ("T5", "UMT5")
    for kind in ("ForConditionalGeneration", "Model")
}
"""Whole models of transformers by the encoder that is read of them."""
_QUANTISED = ("bitsandbytes", "bfl")
"""The methods in config.json of weights that are read, see `markings`."""


def read_parameters(
    path_or_repo: str | Path,
    *,
    subfolder: str | None = None,
    dtype: Any = None,
    variant: str | None = None,
    device: Any = None,
    changes: Mapping[str, Any] | None = None,
    weights: str | None = None,
    ignore_mismatched_sizes: bool = False,
    own_class: Any = None,
    **hub: Any,
) -> tuple[Network, Params]:
    """Reads the network in a folder or Hub repository and its parameters.

    Other arguments and errors are those of `diffusax.load_network`; ignore_mismatched_sizes is that
    of `Model.from_pretrained`.

    own_class: a Flax module class that is made instead of one from which it is derived.
    """
    folder = resolve(path_or_repo, subfolder=subfolder, variant=variant, **hub)
    written = read_network(folder)
    network = read_network(folder, changes, own_class) if changes or own_class else written
    stored = stored_tensors(folder, variant)
    if changes:
        stored = [_kept(stored, written, network)]
    part = part_of(folder)
    files = [part.path] if part else weight_files(folder, variant)
    where, drawn = ", ".join(map(str, files)), None
    if ignore_mismatched_sizes:
        found, _ = match_names(network.module_class, torch_shapes(network.shapes), stored)
        drawn = drawn_anew(network.shapes, found, where=where)
    elif changes:
        told = ", ".join(f"{name}={value!r:.80}" for name, value in changes.items())
        where += f", with {told} (ignore_mismatched_sizes=True draws anew what differs),"
    params = load_entries(
        network.module_class,
        network.shapes,
        stored,
        where=where,
        drawn=drawn,
        dtype=None if dtype is None else parse_dtype(dtype),
        device=placing(network, device),
        weights=parse_weights(weights, loading=True),
    )
    return network, params


def stored_tensors(folder: Path, variant: str | None = None) -> list[dict[str, Entry]]:
    """Returns the places of the tensors in a network's folder by name, for each file.

    A folder may stand for a part of a single file (`single_file.part_of`).

    Raises:
        ValueError: the files, or the config that their names depend on, cannot be read.
    """
    part = part_of(folder)
    if part is not None:
        return [named_entries(part, read_network(folder))]
    return marked(list(map(read_entries, weight_files(folder, variant))))


def placing(network: Network, device: Any) -> Any:
    """Returns where `fit_params` puts each parameter: on a device, or its share on a mesh.

    device: a device, a mesh, a sharding, or a function (name, shape) -> device or sharding.
    """
    if isinstance(device, Mesh):
        return lambda path, shape: MeshPlace(device, tree_name(path), network.tensor_rules)
    if isinstance(device, NamedSharding) and device.mesh.size > 1:
        return lambda path, shape: spread_sharding(device, shape)
    if callable(device):
        return lambda path, shape: device(tree_name(path), shape)
    return device


def read_network(
    folder: Path, changes: Mapping[str, Any] | None = None, own_class: Any = None
) -> Network:
    """Returns the network that a component's config.json describes; reads no weights.

    Its class is the one in the checkpoint's model_index.json, if that names another, as in
    diffusers.

    changes: options that replace those of the file. own_class: see `read_parameters`.

    Raises:
        ValueError: diffusax cannot read the config; says why.
    """
    source = str(folder / "config.json")
    data = _unquantised(load_json(folder / "config.json"), source)
    changed = {**data, **(changes or {})}
    listed = listed_class(folder)
    if listed not in MODELS:
        return network_of(class_name_of(data, source), changed, own_class, source=source)
    if listed not in (names := named_classes(data)) and names:
        log.warning(
            "%s is of %s, and model_index.json lists %s, which is taken, as in diffusers",
            source,
            names[0],
            listed,
        )
    return network_of(listed, changed, own_class, source=source)


def _unquantised(data: dict[str, Any], source: str) -> dict[str, Any]:
    """Returns a parsed config.json without what it says of the weights, which say it themselves.

    Raises:
        ValueError: the weights are quantised in a way that is not read.
    """
    told = data.pop("quantization_config", None)
    method = told.get("quant_method") if isinstance(told, dict) else told
    if method not in (None, *_QUANTISED):
        raise ValueError(
            f"{source}: the weights are quantised by {method!r:.40}, which diffusax does not read; "
            f"{INSTEAD}"
        )
    return data


def _kept(stored: list[dict[str, Entry]], written: Network, network: Network) -> dict[str, Entry]:
    """Returns the stored tensors of one network without those that only it has.

    Args:
        stored: the tensors by the names in the files, for each file.
        written: the network of the files.
        network: the one that is loaded.
    """
    before, after = torch_shapes(written.shapes), torch_shapes(network.shapes)
    found, _ = match_names(written.module_class, before, stored)
    return {name: entry for name, entry in found.items() if name in after or name not in before}


def network_of(
    class_name: str, config: dict[str, Any], own_class: Any = None, *, source: str
) -> Network:
    """Makes the network of a class in `MODELS` with the options of a parsed config.json.

    own_class: a class that is taken instead of one from which it is derived.

    Raises:
        ValueError: an option or its value is not supported.
    """
    module_class: Any = MODELS[class_name]
    if own_class is not None and upstream_name(own_class) == class_name:
        module_class = own_class
    return Network(module_class, config_from_dict(module_class.config_class, config, source=source))


def check_safe(safe_serialization: bool) -> None:
    """Raises ValueError where safe_serialization is False."""
    if not safe_serialization:
        raise ValueError("safe_serialization must be True: diffusax writes safetensors only")


def check_saveable(model: Any) -> None:
    """Raises ValueError for a PyTorch module, which has no format here, and what was freed."""
    if not isinstance(model.network, Network):
        raise ValueError(
            f"{model.class_name} is a PyTorch module that diffusax runs as it is; save it with the "
            "save_pretrained of the PyTorch pipeline"
        )
    if not model.params:
        raise ValueError(
            f"{model.class_name} was freed by encode_first; load the pipeline without it to save it"
        )


def save_network(
    model: Any,
    folder: str | Path,
    *,
    variant: str | None = None,
    max_shard_size: int | str | None = None,
) -> None:
    """Writes a folder that diffusers or transformers opens. Files appear only when whole.

    What the model was loaded without is copied, if it is still there.

    max_shard_size is in bytes, or a text such as "5GB"; larger networks are split into several
    files with an index. By default it is 10 GiB.

    Raises:
        ValueError: the network comes from a PyTorch module.
    """
    check_saveable(model)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    network, tensors = _whole(model)
    write_json(folder / "config.json", config_of(network))
    stem = weights_stem(network.upstream_name)
    stem = f"{stem}.{variant}" if variant else stem
    sizes = {name: tensor.nbytes for name, tensor in tensors.items()}
    groups = list(split_into_shards(sizes, _bytes(max_shard_size)))
    if len(groups) == 1:
        write_tensors(folder / f"{stem}.safetensors", tensors)
        return
    weight_map: dict[str, str] = {}
    for i, group in enumerate(groups):
        name = f"{stem}-{i + 1:05}-of-{len(groups):05}.safetensors"
        write_tensors(folder / name, {key: tensors[key] for key in group})
        weight_map |= dict.fromkeys(group, name)
    index = f"{stem.removesuffix(f'.{variant}')}.safetensors.index"
    index += f".{variant}.json" if variant else ".json"
    total = {"total_size": sum(sizes.values())}
    write_json(folder / index, {"metadata": total, "weight_map": weight_map})


def _whole(model: Any) -> tuple[Network, dict[str, Any]]:
    """Returns a model's network and tensors, with those that it was loaded without."""
    network, tensors = model.network, params_to_tensors(model.params)
    left_out: LeftOut | None = getattr(model, "left_out", None)
    if left_out is None:
        return network, tensors
    try:
        written = read_network(left_out.folder)
        stored = stored_tensors(left_out.folder, left_out.variant)
    except ValueError as error:
        log.warning("%s is saved as it was loaded, without a part: %s", model.class_name, error)
        return network, tensors
    before = torch_shapes(written.shapes)
    found, _ = match_names(written.module_class, before, stored)
    dtype = next(iter(tensors.values())).dtype
    kept = {name: found[name] for name in before if name in found and name not in tensors}
    rest = {name: tensor.astype(dtype) for name, tensor in read_places(kept).items()}
    options = {name: getattr(written.config, name) for name in left_out.options}
    config = dataclasses.replace(network.config, **options)
    return Network(network.module_class, config), {**tensors, **rest}


def _bytes(size: int | str | None) -> int:
    """Returns a size in bytes.

    Raises:
        ValueError: it is neither a number of bytes nor a text such as "5GB".
    """
    if size is None:
        return 10 * 2**30
    if isinstance(size, str) and (found := re.fullmatch(r"(\d+)\s*([KMGT]?)B?", size.upper())):
        # As in diffusers, K is 1000.
        return int(found[1]) * 1000 ** " KMGT".index(found[2] or " ")
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ValueError(
            f"max_shard_size must be a number of bytes or such as '5GB' (got {size!r})"
        )
    return size


def weights_stem(class_name: str) -> str:
    """Returns the name, without its ending, of the file with a network's weights."""
    return STEMS[1] if _of_transformers(class_name) else STEMS[0]


def config_of(network: Network) -> dict[str, Any]:
    """Returns the contents of a network's config.json, as diffusers or transformers reads it."""
    data = config_to_dict(network.config)
    if not _of_transformers(network.upstream_name):
        return data
    del data["_class_name"]
    # transformers loads what "dtype" says, and diffusers its own networks in float32 unless a dtype
    # is asked for: with the parameters' half precision here, their pipeline could not draw.
    return {"architectures": [network.upstream_name], **data, "dtype": "float32"}


def class_name_of(data: Mapping[str, Any], source: str) -> str:
    """Returns the class in `MODELS` that a parsed config.json is for.

    Raises:
        ValueError: it names none, or one that diffusax does not have.
    """
    name = next(iter(named_classes(data)), None)
    if not isinstance(name, str):
        raise ValueError(f"{source} has neither _class_name nor architectures")
    if name not in MODELS:
        raise ValueError(
            f"{source} asks for {name}, which diffusax does not have (it has {', '.join(MODELS)})"
        )
    return name


def named_classes(data: Mapping[str, Any]) -> list[Any]:
    """Returns what a parsed config.json gives for its network's class, the first to be taken first.

    transformers writes the classes of which a model's parts are, too: T5's for its encoder.
    """
    architectures = data.get("architectures")
    found = [data.get("_class_name"), *(architectures if isinstance(architectures, list) else ())]
    return [_ENCODERS.get(name, name) if isinstance(name, str) else name for name in found if name]


def _of_transformers(class_name: str) -> bool:
    """Returns whether a class is transformers', whose configs all have a model_type."""
    config_class = getattr(MODELS.get(class_name), "config_class", None)
    return "model_type" in getattr(config_class, "fixed", ())
