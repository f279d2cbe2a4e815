"""Reads the tensors and the metadata of a LoRA's file."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import safe_open

from diffusax.checkpoints.tensors import TensorFile
from diffusax.checkpoints.weight_file import find_weight_file
from diffusax.tensors import as_numpy

WEIGHT_NAME = "pytorch_lora_weights.safetensors"
"""The name that diffusers gives LoRAs."""


class LoraFile(NamedTuple):
    """The tensors of a LoRA by key, the texts of its file's header, and what errors call it."""

    tensors: dict[str, np.ndarray]
    metadata: dict[str, str]
    name: str


def read_lora(source: Any, **where: Any) -> LoraFile:
    """Reads a LoRA.

    Args:
        source: a safetensors file, a folder or a Hub repository that holds one, or a dictionary of
            arrays or tensors by key.
        **where: weight_name, subfolder, revision, token, local_files_only and cache_dir; see
            `find_weight_file`.

    Raises:
        ValueError: there is no such file, it cannot be read, or holds what are not finite numbers.
    """
    if isinstance(source, Mapping):
        file = LoraFile({str(k): as_numpy(v) for k, v in source.items()}, {}, "the LoRA")
    else:
        file = _read(find_weight_file(source, preferred=(WEIGHT_NAME,), **where))
    if not file.tensors:
        raise ValueError(f"{file.name} holds no tensors")
    for key, tensor in file.tensors.items():
        if tensor.dtype.kind in "biu":
            continue
        if tensor.dtype.kind not in "fV":
            raise ValueError(f"{file.name}: {key} holds {tensor.dtype}, which are no numbers")
        if not np.isfinite(tensor.astype(np.float32)).all():
            raise ValueError(f"{file.name}: {key} has numbers that are not finite")
    return file


def _read(path: Path) -> LoraFile:
    opened = TensorFile(path)
    tensors = {key: opened.view(entry).copy() for key, entry in opened.entries.items()}
    with safe_open(os.fspath(path), framework="numpy") as file:
        metadata = file.metadata() or {}
    return LoraFile(tensors, dict(metadata), str(path))
