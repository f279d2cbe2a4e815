"""Loads the networks that measure, also those that are published in PyTorch's own files alone."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from diffusax.checkpoints.files import choose_weights
from diffusax.checkpoints.networks import placing, read_network
from diffusax.checkpoints.tensors import Entry, read_entries
from diffusax.checkpoints.torch_file import read_torch_file
from diffusax.checkpoints.tree import load_entries
from diffusax.checkpoints.weight_file import fetch_file
from diffusax.models.network import Network, parse_dtype
from diffusax.networks import Model, load_network

SUFFIXES = (".safetensors", ".pt", ".pth", ".bin")
_OLD = "pytorch_model.bin"
"""What transformers wrote before there were safetensors."""


def load_encoder(
    path_or_repo: str | Path, folder: Path, *, dtype: Any, mesh: Mesh | None, **hub: Any
) -> Model:
    """Loads the network of a checkpoint of transformers, of pytorch_model.bin if need be.

    Args:
        path_or_repo: the folder or repository as it was given.
        folder: where it is here.
        dtype: the dtype of the parameters and the computation.
        mesh: the devices to spread the parameters over.
        **hub: revision, token, local_files_only, cache_dir.

    Raises:
        ValueError: the checkpoint cannot be found or read.
    """
    if choose_weights(path.name for path in folder.iterdir()) is not None:
        return load_network(folder, dtype=dtype, device=mesh)
    network = read_network(folder)
    file = weight_file(path_or_repo, _OLD, **hub)
    return load_file(network, state_of(file), file, dtype=dtype, device=placing(network, mesh))


def load_file(
    network: Network, entries: Mapping[str, Entry], file: Path, *, dtype: Any, device: Any
) -> Model:
    """Loads a network of the tensors in a file.

    Args:
        network: the network.
        entries: the tensors by the network's names.
        file: where they are, for messages.
        dtype: the dtype of the parameters and the computation.
        device: where to put them, see `placing`.

    Raises:
        ValueError: the tensors are not the network's.
    """
    options: dict[str, Any] = {"dtype": parse_dtype(dtype), "device": device, "where": str(file)}
    params = load_entries(network.module_class, network.shapes, [entries], **options)
    return Model(network, params)


def weight_file(path_or_repo: str | Path, weight_name: str, **hub: Any) -> Path:
    """Returns the path of a file: itself, one in a folder, or one on the Hub.

    hub: revision, token, local_files_only, cache_dir.

    Raises:
        ValueError: there is no such file, or it cannot be fetched.
    """
    path = Path(path_or_repo).expanduser()
    if path.is_file():
        return path
    if path.is_dir():
        if not (path / weight_name).is_file():
            raise ValueError(f"{path} has no file {weight_name}; give the file itself")
        return path / weight_name
    if str(path_or_repo).startswith((".", "/", "~")) or path.suffix in SUFFIXES:
        raise ValueError(f"there is no file {path_or_repo}")
    return fetch_file(str(path_or_repo), weight_name, **hub)


def state_of(file: Path) -> dict[str, Entry]:
    """Returns the places of a network's tensors in a file of safetensors or of PyTorch.

    Of a file that keeps them in a dictionary `state_dict`, it is what is in there.

    Raises:
        ValueError: the file cannot be read.
    """
    entries = read_entries(file) if file.suffix == ".safetensors" else read_torch_file(file)
    for prefix in ("state_dict.", "module."):
        if any(name.startswith(prefix) for name in entries):
            entries = {
                name.removeprefix(prefix): entry
                for name, entry in entries.items()
                if name.startswith(prefix)
            }
    return entries
