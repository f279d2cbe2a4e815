"""Reads IP-Adapters (Ye et al. 2023) from safetensors files and dictionaries.

A file has the image projection under `image_proj.` and, under `ip_adapter.1.`, `ip_adapter.3.` and
so on, the keys' and values' matrices of the UNet's cross-attentions in the order of
`cross_attentions`.
"""

import dataclasses
import functools
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from huggingface_hub import constants

from diffusax.boundary.tensors import as_numpy
from diffusax.checkpoints.hub import local_folder
from diffusax.checkpoints.tensors import TensorFile
from diffusax.checkpoints.tree import fit_params
from diffusax.checkpoints.weight_file import fetch_file
from diffusax.models.adapters.image_prompts import ImageLayers, KeysValues, cross_attentions
from diffusax.models.encoders.image_projections import projection_of
from diffusax.models.network import Network, Params

_PROJECTION, _LAYERS = "image_proj", "ip_adapter"


@dataclasses.dataclass(frozen=True, eq=False)
class IPAdapter:
    """An IP-Adapter with its parameters."""

    projection: Network
    """The network that turns an image's features into tokens."""
    params: Params
    """The parameters of the projection."""
    layers: ImageLayers
    """The keys' and values' matrices by the path of the cross-attention."""


@dataclasses.dataclass(frozen=True, eq=False)
class _Held:
    """A tensor of a dictionary."""

    path: str
    array: np.ndarray

    @property
    def dtype(self) -> np.dtype:
        return self.array.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape


def find_ip_adapter(
    source: str | Path, subfolder: str | None, weight_name: str | None, **hub: Any
) -> Path:
    """Returns the path of an IP-Adapter's file.

    Args:
        source: the file, or a folder or Hub repository that holds it.
        subfolder: the folder in it.
        weight_name: the name of the file there.
        **hub: revision, token, cache_dir and local_files_only.

    Raises:
        ValueError: there is no such file, or it is not a safetensors file.
    """
    if not isinstance(source, str | os.PathLike):
        raise ValueError(
            "pretrained_model_name_or_path_or_dict must be a file, a folder, a Hub repository or a "
            f"dictionary (got {type(source).__name__})"
        )
    for name, value in (("subfolder", subfolder), ("weight_name", weight_name)):
        if not isinstance(value, str | os.PathLike | None):
            raise ValueError(f"{name} must be a text (got {type(value).__name__})")
    path = Path(source).expanduser()
    if os.path.isfile(path):
        return _checked(path)
    if not weight_name:
        raise ValueError(
            f"weight_name must name the IP-Adapter's file in {source}, such as "
            "'ip-adapter_sd15.safetensors'"
        )
    inside = Path(subfolder or "", weight_name)
    if ".." in inside.parts or inside.is_absolute():
        raise ValueError(f"weight_name and subfolder must be inside {source} (got {inside})")
    _checked(inside)
    folder = local_folder(source)
    if folder is None:
        local = bool(hub.get("local_files_only")) or constants.HF_HUB_OFFLINE
        return fetch_file(str(source), inside.as_posix(), **{**hub, "local_files_only": local})
    if not os.path.isfile(folder / inside):
        raise ValueError(f"there is no file {folder / inside}")
    return folder / inside


def read_ip_adapter(source: Path | Mapping[str, Any], unet: Network, dtype: Any) -> IPAdapter:
    """Reads an IP-Adapter for a UNet.

    Args:
        source: a safetensors file, or a dictionary of arrays or tensors: image_proj and ip_adapter,
            each by name, or all by their names in a file.
        unet: the network of the UNet.
        dtype: the dtype of the parameters.

    Raises:
        ValueError: it is none, is broken, or belongs to another UNet; names the file and says why.
    """
    file, where, stored = _stored(source)
    projection = _projection(where, stored)
    shapes = cross_attentions(unet)
    widths = {shape[0] for shape in shapes.values()}
    if widths != {projection.config.context_dim}:
        raise ValueError(
            f"{where} makes tokens of width {projection.config.context_dim}, but this UNet's "
            f"context has {', '.join(map(str, widths)) or 'none'} (768 for SD 1.x, 1024 for SD 2.x "
            "and 2048 for SDXL); use an IP-Adapter for this family"
        )
    wanted = {_PROJECTION: projection.shapes, _LAYERS: _layer_shapes(shapes)}
    read = functools.partial(_read, where, file)
    try:
        params = fit_params(
            projection.module_class, wanted, [stored], read, where=where, dtype=dtype
        )
    except ValueError as error:
        raise ValueError(_about(str(error))) from None
    layers = {path: _pair(params[_LAYERS], i) for i, path in enumerate(shapes)}
    return IPAdapter(projection, params[_PROJECTION], layers)


def _stored(source: Path | Mapping[str, Any]) -> tuple[TensorFile | None, str, dict[str, Any]]:
    """Returns the file, if it is one, the name for errors, and an IP-Adapter's tensors by name."""
    found: Mapping[str, Any]
    if isinstance(source, Mapping):
        file, where, found = None, "the dictionary", _flat(source)
    else:
        file = TensorFile(source)
        where, found = str(source), file.entries
    parts = [[k for k in found if k.startswith(f"{p}.")] for p in (_PROJECTION, _LAYERS)]
    if not all(parts):
        raise ValueError(
            f"{where} is no IP-Adapter: it must have tensors image_proj.* and ip_adapter.*"
        )
    return file, where, {name: found[name] for part in parts for name in part}


def _projection(where: str, stored: Mapping[str, Any]) -> Network:
    shapes = {
        name.removeprefix(f"{_PROJECTION}."): tensor.shape
        for name, tensor in stored.items()
        if name.startswith(f"{_PROJECTION}.")
    }
    try:
        return projection_of(shapes)
    except ValueError as error:
        raise ValueError(f"{where} cannot be used as an IP-Adapter: {error}") from None


def _read(where: str, file: TensorFile | None, entry: Any, *_: Any) -> Iterator[np.ndarray]:
    """Gives a stored tensor as an array, whole, while it is read.

    Raises:
        ValueError: it holds numbers that are not finite.
    """
    array = entry.array if file is None else file.view(entry)
    if not np.isfinite(array.astype(np.float32)).all():
        raise ValueError(f"{where} is broken: a tensor of it is not finite; download it again")
    yield array
    if file is not None:
        file.release(entry)


def _checked(path: Path) -> Path:
    if path.suffix != ".safetensors":
        raise ValueError(
            f"{path} is not a safetensors file, and loading it could run code; use the file of the "
            "same name that ends in .safetensors, or convert it where PyTorch is installed: "
            "safetensors.torch.save_file of the tensors in torch.load(file, weights_only=True), "
            "each named by its part and its name, such as image_proj.proj.weight"
        )
    return path


def _flat(source: Mapping[str, Any]) -> dict[str, _Held]:
    """Returns the tensors of a dictionary by their names in a file."""
    nested = {k: v for k, v in source.items() if isinstance(v, Mapping)}
    flat = {k: v for k, v in source.items() if k not in nested}
    flat |= {f"{part}.{k}": v for part, own in nested.items() for k, v in own.items()}
    held = {}
    for name, tensor in flat.items():
        if not hasattr(tensor, "shape"):
            raise ValueError(f"{name} must be an array or tensor (got {type(tensor).__name__})")
        held[str(name)] = _Held(str(name), as_numpy(tensor))
    return held


def _layer_shapes(shapes: Mapping[str, tuple[int, int]]) -> dict[str, Any]:
    """Returns the tree of the matrices as shapes; the attentions to the image itself count, too."""

    def kernel(shape: tuple[int, int]) -> dict[str, Any]:
        return {"kernel": jax.ShapeDtypeStruct(shape, np.float32)}

    return {
        str(2 * i + 1): {"to_k_ip": kernel(shape), "to_v_ip": kernel(shape)}
        for i, shape in enumerate(shapes.values())
    }


def _pair(layers: Params, i: int) -> KeysValues:
    own = layers[str(2 * i + 1)]
    return KeysValues(own["to_k_ip"]["kernel"], own["to_v_ip"]["kernel"])


def _about(error: str) -> str:
    """Says of an IP-Adapter what `fit_params` says of a network."""
    error = error.replace("does not fit its config.json", "is no IP-Adapter for this UNet")
    return error.replace("the config asks for", "the UNet asks for")
