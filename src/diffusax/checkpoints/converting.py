"""Converts between single files and folders in diffusers' layout, bit for bit.

Tensors go from file to file one by one; no network is loaded.
"""

import math
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from diffusax.boundary.files import load_json, write_json
from diffusax.checkpoints.files import MODEL_INDEX, index_of, read_model_index
from diffusax.checkpoints.networks import config_of, read_network, stored_tensors, weights_stem
from diffusax.checkpoints.original.autoencoder import is_projection
from diffusax.checkpoints.original.open_clip import TEXT_PROJECTION, open_clip_names
from diffusax.checkpoints.original.transformers import ORIGINALS, transformer_names
from diffusax.checkpoints.single_file import Reading, opened_view, part_of, read_contents
from diffusax.checkpoints.single_file.names import CLASSES, NAMES
from diffusax.checkpoints.tensors import Entry, check_copyable, copy_tensors
from diffusax.checkpoints.tree import fitted, torch_shapes
from diffusax.models.network import Network

Tensors = dict[str, Sequence[Entry | np.ndarray]]

_UNKNOWN = "no single file holds such a network"
_COMPONENTS = {kind: name for name in (*NAMES, "transformer") for kind in CLASSES[name]}
_QWEN3_8B = 4096
"""The width of the language model of FLUX.2 klein 9B."""
_PREFIXES = {
    "unet": "model.diffusion_model.",
    "controlnet": "control_model.",
    "vae": "first_stage_model.",
    "transformer": "model.diffusion_model.",
}


def unpack_single_file(path: Path, folder: Path, reading: Reading, *, dtype: Any = None) -> None:
    """Writes a single file as a folder in diffusers' layout, of a pipeline or of one network.

    Args:
        path: the .safetensors file.
        folder: the folder to write.
        reading: how to read the file.
        dtype: the dtype of the tensors; None keeps the file's.

    Raises:
        ValueError: the file cannot be read, lacks a network, or does not say what is needed.
    """
    contents = read_contents(path)
    component = None if contents.is_pipeline else next(iter(contents.parts))
    with opened_view(path, reading, component) as view:
        networks = {p.parent: read_network(p.parent) for p in view.rglob("config.json")}
        tensors = {own: _fitted(own, network) for own, network in networks.items()}
        for stored in tensors.values():
            check_copyable(stored, dtype)
        shutil.copytree(view, folder, dirs_exist_ok=True)
        for own, network in networks.items():
            target = folder / own.relative_to(view)
            write_json(target / "config.json", config_of(network))
            file = f"{weights_stem(network.class_name)}.safetensors"
            copy_tensors(target / file, tensors[own], dtype=dtype)


def pack_single_file(folder: Path, path: Path, *, dtype: Any = None) -> None:
    """Writes a folder in diffusers' layout as a single file in the original layout.

    The names are those of diffusers' scripts/convert_diffusers_to_original_stable_diffusion.py and
    convert_diffusers_to_original_sdxl.py, for models with a transformer those of ComfyUI. A model
    that predicts v gets the tensors `v_pred` and `ztsnr` by which ComfyUI knows it. An autoencoder
    or a transformer alone has names without a prefix.

    Args:
        folder: the folder of a pipeline of Stable Diffusion, SDXL, FLUX, Z-Image or Wan, or of a
            UNet, a transformer, a ControlNet or an autoencoder.
        path: the .safetensors file to write.
        dtype: the dtype of the tensors; None keeps the folder's.

    Raises:
        ValueError: the folder cannot be read, or the original code has no such model.
    """
    if path.suffix.lower() != ".safetensors":
        raise ValueError(f"a single file must be named .safetensors (got {path})")
    metadata = {"format": "pt"}
    if index_of(folder) is not None:
        tensors = _pipeline(folder, metadata)
    else:
        network = read_network(folder)
        name = _component(folder, network)
        if name == "transformer":
            tensors = _transformer(folder, network, "")
        else:
            tensors = _original(folder, network, name, "" if name == "vae" else _PREFIXES[name])
    path.parent.mkdir(parents=True, exist_ok=True)
    copy_tensors(path, tensors, dtype=dtype, metadata=metadata)


def _pipeline(folder: Path, metadata: dict[str, str]) -> Tensors:
    """Returns the tensors of a whole model; adds what it predicts to the metadata."""
    _, listed, _ = read_model_index(folder)
    if "transformer" in listed:
        return _pipeline_of_transformer(folder, listed)
    absent = [name for name in ("unet", "vae", "scheduler") if name not in listed]
    if absent:
        raise ValueError(f"{folder / MODEL_INDEX} has no {absent[0]}; a single file holds them all")
    tensors: Tensors = {}
    for name in ("unet", "vae"):
        network = read_network(folder / name)
        if _component(folder / name, network) != name:
            raise ValueError(f"{folder / name} holds a {network.class_name}; {_UNKNOWN}")
        tensors |= _original(folder / name, network, name, _PREFIXES[name])
    texts = [name for name in ("text_encoder", "text_encoder_2") if name in listed]
    for name in texts:
        tensors |= _text_encoder(folder / name, name, texts)
    scheduler = load_json(folder / "scheduler" / "scheduler_config.json")
    v = scheduler.get("prediction_type") == "v_prediction"
    metadata["modelspec.prediction_type"] = "v" if v else "epsilon"
    return {**tensors, **_markers(scheduler)}


def _pipeline_of_transformer(folder: Path, listed: Collection[str]) -> Tensors:
    """Returns the tensors of a whole model under the names that ComfyUI gives them."""
    if "transformer_2" in listed:
        raise ValueError(
            f"{folder} has two transformers, and a single file holds one; convert the folders "
            "transformer and transformer_2 by themselves"
        )
    tensors: Tensors = {}
    for name in ("transformer", "vae", "text_encoder", "text_encoder_2"):
        if name not in listed:
            continue
        network = read_network(folder / name)
        if name == "vae":
            tensors |= _original(folder / name, network, name, "vae.")
        elif name != "transformer":
            prefix = _text_prefix(folder / name, network)
            found = _fitted(folder / name, network)
            tensors |= {f"{prefix}{key}": parts for key, parts in found.items()}
        elif _component(folder / name, network) == name:
            tensors |= _transformer(folder / name, network, _PREFIXES[name])
    return tensors


def _text_prefix(folder: Path, network: Network) -> str:
    """Returns ComfyUI's prefix for a text encoder of a model with a transformer."""
    prefixes = {
        "CLIPTextModel": "clip_l.transformer.",
        "T5EncoderModel": "t5xxl.transformer.",
        "UMT5EncoderModel": "umt5xxl.transformer.",
        "Qwen3Model": "qwen3_4b.transformer.model.",
        "Qwen3ForCausalLM": "qwen3_4b.transformer.",
    }
    if network.class_name not in prefixes:
        raise ValueError(f"{folder} holds a {network.class_name}; {_UNKNOWN}")
    prefix = prefixes[network.class_name]
    if getattr(network.config, "hidden_size", None) == _QWEN3_8B:
        prefix = prefix.replace("4b", "8b")
    return f"text_encoders.{prefix}"


def _component(folder: Path, network: Network) -> str:
    if network.class_name not in _COMPONENTS:
        raise ValueError(f"{folder} holds a {network.class_name}; {_UNKNOWN}")
    return _COMPONENTS[network.class_name]


def _original(folder: Path, network: Network, name: str, prefix: str) -> Tensors:
    """Returns a network's tensors by their names in the original code."""
    modules = {ours: theirs for theirs, ours in NAMES[name](network.config).items()}
    tensors: Tensors = {}
    for key, (entry,) in _fitted(folder, network).items():
        module, _, leaf = key.rpartition(".")
        if name == "vae" and leaf == "weight" and is_projection(module):
            entry = entry._replace(shape=(*entry.shape[:2], 1, 1))
        tensors[f"{prefix}{modules[module]}.{leaf}"] = [entry]
    return tensors


def _transformer(folder: Path, network: Network, prefix: str) -> Tensors:
    """Returns a transformer's tensors by their names in the original code."""
    original = ORIGINALS[network.class_name]
    scales, tables = original.scales, {own: name for name, own in original.tables.items()}
    parameters = {own: name for name, own in original.parameters.items()}
    owners = {own.paths[0]: (name, own) for name, own in transformer_names(network).items()}
    rest = {path for _, own in owners.values() for path in own.paths[1:]}
    found = _fitted(folder, network)
    tensors: Tensors = {}
    for key, parts in found.items():
        module, _, leaf = key.rpartition(".")
        if module in rest:
            continue
        if key in parameters:
            key = parameters[key]
        elif module in owners:
            name, own = owners[module]
            parts = [found[f"{path}.{leaf}"][0] for path in own.paths]
            parts = [part.swap() for part in parts] if own.swapped else parts
            leaf = "scale" if scales and name.endswith(scales) else tables.get(leaf, leaf)
            if leaf in original.tables and name.startswith(original.flat):
                parts = [part._replace(shape=(math.prod(part.shape),)) for part in parts]
            key = f"{name}.{leaf}"
        tensors[prefix + key] = _same_dtype(folder, key, parts)
    flags = [name for name, option in original.flags.items() if getattr(network.config, option)]
    return tensors | {prefix + name: [np.zeros(0, np.float32)] for name in flags}


def _text_encoder(folder: Path, name: str, names: Sequence[str]) -> Tensors:
    """Returns a text encoder's tensors by their names in the original code."""
    network = read_network(folder)
    found = _fitted(folder, network)
    # CLIP's own encoder has the activation quick_gelu, OpenCLIP's gelu.
    if network.config.hidden_act == "quick_gelu" and name == "text_encoder":
        place = "conditioner.embedders.0" if len(names) > 1 else "cond_stage_model"
        return {f"{place}.transformer.{key}": parts for key, parts in found.items()}
    if name == "text_encoder":
        prefix = "cond_stage_model.model."
    else:
        prefix = f"conditioner.embedders.{len(names) - 1}.model."
    tensors: Tensors = {}
    for key, parts in open_clip_names(network.config).items():
        tensors[prefix + key] = _same_dtype(folder, key, [found[part][0] for part in parts])
    if (projection := found.get(f"{TEXT_PROJECTION}.weight")) is not None:
        tensors[prefix + TEXT_PROJECTION] = [projection[0].transpose()]
    return tensors


def _same_dtype(folder: Path, name: str, parts: list[Entry]) -> list[Entry]:
    if len({part.dtype for part in parts}) > 1:
        raise ValueError(f"{folder}: the parts of {name} have several dtypes; give one dtype")
    return parts


def _fitted(folder: Path, network: Network) -> dict[str, list[Entry]]:
    """Returns the places of a network's tensors by name, in the shapes that diffusers gives them.

    Old files mix linear layers and 1x1 convolutions, which have the same numbers.
    """
    part = part_of(folder)
    where = str(part.path if part else folder)
    stored = stored_tensors(folder)
    found = fitted(network.module_class, network.shapes, stored, where=where)
    shapes = torch_shapes(network.shapes)
    return {name: [found[name]._replace(shape=shape)] for name, shape in shapes.items()}


def _markers(scheduler: Mapping[str, Any]) -> Tensors:
    """Returns the tensors that say how a model is sampled from."""
    if scheduler.get("prediction_type") != "v_prediction":
        return {}
    if "sigma_data" in scheduler:
        names = ("sigma_max", "sigma_min")
        return {f"edm_vpred.{name}": [np.array(scheduler[name], np.float32)] for name in names}
    markers = ["v_pred", "ztsnr"] if scheduler.get("rescale_betas_zero_snr") else ["v_pred"]
    return {name: [np.zeros(0, np.float32)] for name in markers}
