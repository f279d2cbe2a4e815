"""Reads the tensors and the metadata of a LoRA's file."""

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from diffusax.boundary.files import load_json
from diffusax.boundary.tensors import as_numpy
from diffusax.checkpoints.tensors import TensorFile, read_metadata
from diffusax.checkpoints.weight_file import fetch_file, find_weight_file

WEIGHT_NAME = "pytorch_lora_weights.safetensors"
"""The name that diffusers gives LoRAs."""
PEFT_NAME, PEFT_CONFIG = "adapter_model.safetensors", "adapter_config.json"
"""The names that PEFT gives an adapter, and the file of its options."""
METADATA = "lora_adapter_metadata"
"""The text in a file's header that holds PEFT's options, as JSON."""


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
        path = find_weight_file(source, preferred=(WEIGHT_NAME, PEFT_NAME), **where)
        file = _read(path, _peft_options(source, path, where))
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


def _read(path: Path, options: Path | None) -> LoraFile:
    opened = TensorFile(path)
    tensors = {key: opened.view(entry).copy() for key, entry in opened.entries.items()}
    metadata = read_metadata(path)
    if options is not None:
        metadata = {METADATA: json.dumps(load_json(options)), **metadata}
    return LoraFile(tensors, metadata, str(path))


def _peft_options(source: Any, path: Path, where: Mapping[str, Any]) -> Path | None:
    """Returns the file of options beside a file of PEFT's; None where there is none."""
    if path.name != PEFT_NAME:
        return None
    beside = path.with_name(PEFT_CONFIG)
    if not beside.is_file() and not os.path.exists(os.path.expanduser(source)):
        of_hub = {name: value for name, value in where.items() if name != "weight_name"}
        with contextlib.suppress(ValueError):
            return fetch_file(str(source), PEFT_CONFIG, **of_hub)
    return beside if beside.is_file() else None
