"""Flax checkpoints: fetches their folders, and reads .msgpack weights as diffusax's parameters."""

from pathlib import Path
from typing import Any

import huggingface_hub
import jax
import jax.numpy as jnp
import numpy as np
from flax.serialization import msgpack_restore
from flax.traverse_util import flatten_dict

from diffusax.checkpoints.files import weight_files
from diffusax.checkpoints.hub import EMBEDDED, hub_errors, resolve
from diffusax.checkpoints.keywords import OF_HUB
from diffusax.checkpoints.tensors import read_entries
from diffusax.checkpoints.tree import MAX_LISTED, load_entries
from diffusax.models.network import Network, Params

WEIGHTS = ("diffusion_flax_model.msgpack", "flax_model.msgpack")
"""The file names of diffusers' networks, and of transformers'."""

_CONFIGS = ("*.json", "*.txt")
_AUTOENCODER_ATTENTION = (
    ("to_q", "query"),
    ("to_k", "key"),
    ("to_v", "value"),
    ("to_out_0", "proj_attn"),
)


def fetch(
    path_or_repo: str | Path, *, from_pt: bool, subfolder: str | None = None, **options: Any
) -> Path:
    """Returns the folder of a checkpoint, from this machine or from the Hub.

    From a repository, Flax's weights are downloaded unless `from_pt` is set, and safetensors where
    it has none.

    Args:
        path_or_repo: a folder, an embedded checkpoint or a Hub repository id.
        from_pt: whether to take PyTorch's weights even if there are Flax's.
        subfolder: a folder in it; the result is that folder.
        **options: revision, token, local_files_only, cache_dir; other Hub options have no effect.

    Raises:
        ValueError: it cannot be found or downloaded; says why.
    """
    hub = {name: options[name] for name in OF_HUB if options.get(name) is not None}
    text = str(path_or_repo)
    if from_pt or text in EMBEDDED or Path(text).expanduser().is_dir():
        return resolve(path_or_repo, subfolder=subfolder, **hub)
    prefix = f"{subfolder}/" if subfolder else "*"
    names = [f"{prefix}{name}" for name in (*_CONFIGS, *WEIGHTS)]
    with hub_errors(text, hub.get("revision")):
        root = huggingface_hub.snapshot_download(
            text, allow_patterns=names, ignore_patterns=["safety_checker/*"], **hub
        )
    folder = Path(root) / (subfolder or "")
    if any(path for name in WEIGHTS for path in folder.glob(f"**/{name}")):
        return folder
    return resolve(path_or_repo, subfolder=subfolder, **hub)


def load_weights(network: Network, folder: Path, *, from_pt: bool) -> Params:
    """Reads the parameters in a component's folder, in the files' dtypes.

    Flax's .msgpack file is read where there is one, unless `from_pt`; else safetensors.

    Raises:
        ValueError: there are none, or they do not fit the network; says which.
    """
    found = [folder / name for name in WEIGHTS if (folder / name).is_file()]
    if from_pt or not found:
        files = weight_files(folder)
        where = ", ".join(map(str, files))
        entries = list(map(read_entries, files))
        return load_entries(network.module_class, network.shapes, entries, where=where)
    try:
        stored = flatten_dict(msgpack_restore(found[0].read_bytes()), sep="/")
    except Exception as error:
        # msgpack has a class for each kind of damage; a pointer of git-lfs is another.
        raise ValueError(f"{found[0]} is no Flax checkpoint ({error}); download it again") from None
    return _from_flax(network, stored, found[0])


def _from_flax(network: Network, stored: dict[str, Any], path: Path) -> Params:
    leaves, treedef = jax.tree_util.tree_flatten_with_path(network.shapes)
    values, wrong = [], []
    for keys, shape in leaves:
        names = _flax_names(keys)
        value = next((stored[name] for name in names if name in stored), None)
        if value is None or value.shape != shape.shape:
            has = "nothing" if value is None else value.shape
            wrong.append(f"{names[0]} (has {has}, the config asks for {shape.shape})")
        else:
            values.append(jnp.asarray(np.asarray(value)))
    if wrong:
        shown = ", ".join(wrong[:MAX_LISTED])
        raise ValueError(f"{path} does not fit its config.json: {shown}")
    return jax.tree.unflatten(treedef, values)


def _flax_names(keys: tuple[Any, ...]) -> tuple[str, ...]:
    """Returns the names that a parameter may have in Flax's files.

    diffusers joins an index to the name before it, transformers does not; the attention in
    diffusers' FlaxAutoencoderKL has names of its own.
    """
    parts = [str(key.key) for key in keys]
    joined = parts[0]
    for part in parts[1:]:
        joined += f"_{part}" if part.isdigit() else f"/{part}"
    old = joined
    for now, before in _AUTOENCODER_ATTENTION:
        old = old.replace(f"/{now}/", f"/{before}/")
    return joined, old, "/".join(parts)
