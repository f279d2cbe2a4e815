"""Finds a single file on this machine, or fetches it from the Hugging Face Hub."""

import os
import re
from pathlib import Path
from typing import Any

from huggingface_hub import constants

from diffusax.checkpoints.hub import resolve
from diffusax.checkpoints.weight_file import fetch_file

_ADDRESS = re.compile(
    r"(?P<repo>[^/\s]+/[^/\s]+)/(?:(?:blob|resolve)/(?P<revision>[^/]+)/)?(?P<name>[^?#]+)(?:[?#].*)?"
)
_HOSTS = ("https://huggingface.co/", "https://hf.co/", "huggingface.co/", "hf.co/")


def find_file(path_or_address: str | Path, **hub: Any) -> Path:
    """Returns the path of a single file, which is fetched if it is one of the Hub's.

    Args:
        path_or_address: a path, an address such as
            "https://huggingface.co/owner/name/blob/main/model.safetensors", or a repository id and
            the file in it, "owner/name/model.safetensors".
        **hub: revision, token, local_files_only, cache_dir: see `hub.resolve`.

    Raises:
        ValueError: there is no such file, or it cannot be fetched; says why.
    """
    if not isinstance(path_or_address, str | os.PathLike):
        raise ValueError(
            "a single file must be a path or an address of the Hub (got "
            f"{type(path_or_address).__name__})"
        )
    path = Path(os.path.expanduser(path_or_address))
    if path.is_file():
        return path
    if path.is_dir():
        raise ValueError(f"{path} is a folder; open it with from_pretrained")
    address = str(path_or_address)
    for host in (f"{constants.ENDPOINT}/", *_HOSTS):
        address = address.removeprefix(host)
    found = _ADDRESS.fullmatch(address)
    if found is None or "://" in address or address.startswith((".", "/", "~")):
        raise ValueError(
            f"there is no file {path_or_address}; give a path, or an address of the Hub such as "
            "https://huggingface.co/owner/name/blob/main/model.safetensors (files from elsewhere "
            "must be downloaded first)"
        )
    options = {**hub, "revision": hub.get("revision") or found["revision"]}
    return fetch_file(found["repo"], found["name"], **options)


def config_folder(
    config: str | Path | None, *, subfolder: str | None = None, **hub: Any
) -> Path | None:
    """Returns the folder of configs that the argument `config` names; None for None.

    Args:
        config: a folder, or a Hub repository of which only the configs are fetched.
        subfolder: the folder in it.
        **hub: token, local_files_only, cache_dir: see `hub.resolve`. A revision is the file's.

    Raises:
        ValueError: there is no such folder or repository.
    """
    if config is None:
        return None
    options = {name: value for name, value in hub.items() if name != "revision"}
    return resolve(config, subfolder=subfolder, weights=False, **options)
