"""Finds a single safetensors file: a path, in a folder, or in a Hub repository."""

import os
import re
from collections.abc import Collection
from pathlib import Path, PurePosixPath
from typing import Any

import huggingface_hub
from huggingface_hub import constants

from diffusax.checkpoints.hub import EMBEDDED_LORAS, hub_errors, resolve

SUFFIX = ".safetensors"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
"""The endings of the names of pickles."""
_OTHERS = ("scheduler", "optimizer", "checkpoint")


def find_weight_file(
    path_or_repo: str | os.PathLike[str],
    *,
    weight_name: str | None = None,
    subfolder: str | None = None,
    preferred: Collection[str] = (),
    revision: str | None = None,
    token: str | bool | None = None,
    local_files_only: bool = False,
    cache_dir: str | Path | None = None,
    force_download: bool = False,
) -> Path:
    """Returns the path of a safetensors file, which is downloaded if it is on the Hub.

    Args:
        path_or_repo: the file, a folder that holds it, a Hub repository id, or "emoji-owl" for the
            LoRA in the package.
        weight_name: the file's name in the folder or repository; by default the only one there.
        subfolder: the folder inside it.
        preferred: names that are taken where a folder has several files.
        revision: a branch, tag or commit of the repository.
        token: the token for private and gated repositories; by default the stored login.
        local_files_only: whether to use only files that were downloaded before.
        cache_dir: the folder of downloads, instead of the one in HF_HOME.
        force_download: whether to download again what was downloaded before.

    Raises:
        ValueError: there is no such file, there are several, or it is a pickle; says which.
    """
    if not isinstance(path_or_repo, str | os.PathLike):
        raise ValueError(
            "path must be a safetensors file, a folder or a Hub repository id "
            f"(got {type(path_or_repo).__name__})"
        )
    text = os.path.expanduser(path_or_repo)
    refuse_pickle(weight_name or text)
    path = Path(text)
    if path.is_file():
        return path
    if not path.exists():
        path = EMBEDDED_LORAS.get(text, path)
    if path.is_dir():
        folder = path / (subfolder or "")
        names = sorted(os.listdir(folder)) if folder.is_dir() else []
        return folder / _chosen(names, weight_name, preferred, str(folder))
    if text.startswith((".", "/", "~")) or text.endswith(SUFFIX):
        raise ValueError(f"there is no file {text}")
    if weight_name is None:
        if local_files_only or constants.HF_HUB_OFFLINE:
            raise ValueError(f"weight_name must name the file of {text!r} to use offline")
        with hub_errors(text, revision):
            weight_name = _listed(text, subfolder, preferred, revision=revision, token=token)
    options: dict[str, Any] = {"revision": revision, "token": token, "cache_dir": cache_dir}
    options |= {"local_files_only": local_files_only, "force_download": force_download}
    return fetch_file(text, weight_name, subfolder=subfolder, **options)


def fetch_file(repo: str, name: str, *, subfolder: str | None = None, **hub: Any) -> Path:
    """Returns a file of a Hub repository, which is downloaded unless it was before.

    hub: revision, token, local_files_only and cache_dir.

    Raises:
        ValueError: there is no such repository or file, or it cannot be fetched; says why.
    """
    from huggingface_hub import errors

    with hub_errors(repo, hub.get("revision")):
        try:
            return Path(huggingface_hub.hf_hub_download(repo, name, subfolder=subfolder, **hub))
        except errors.LocalEntryNotFoundError:
            raise ValueError(
                f"{name} of {repo!r} is not in the local cache, and the Hub was not asked or did "
                "not answer"
            ) from None
        except errors.EntryNotFoundError:
            raise ValueError(f"{repo!r} has no file {name}; name the one to read") from None


def refuse_pickle(name: str) -> None:
    """Raises ValueError for the name of a pickle, which can run code when it is read."""
    if name.endswith(PICKLES):
        raise ValueError(
            f"{name} is a pickle, which may run code when it is read; convert it on a machine that "
            "you can spare, with safetensors.torch.save_file(torch.load(path, weights_only=True), "
            "'new.safetensors')"
        )


def _listed(repo: str, subfolder: str | None, preferred: Collection[str], **options: Any) -> str:
    found = huggingface_hub.HfApi(token=options["token"]).model_info(
        repo, revision=options["revision"]
    )
    folder = PurePosixPath(subfolder or ".")
    paths = [PurePosixPath(file.rfilename) for file in found.siblings or ()]
    return _chosen([p.name for p in paths if p.parent == folder], None, preferred, repr(repo))


def _chosen(
    names: list[str], weight_name: str | None, preferred: Collection[str], where: str
) -> str:
    files = [name for name in names if name.endswith(SUFFIX)]
    if weight_name is not None:
        if weight_name not in names:
            there = ", ".join(files) or f"no {SUFFIX} file"
            raise ValueError(f"{where} has no {weight_name} (it has {there})")
        return weight_name
    if len(files) > 1:
        files = [name for name in files if not any(word in name for word in _OTHERS)]
    first = next((name for name in preferred if name in files), None)
    if first is not None:
        return first
    if not files:
        pickles = [name for name in names if name.endswith(PICKLES)]
        if pickles:
            refuse_pickle(pickles[0])
        raise ValueError(f"{where} has no {SUFFIX} file")
    if len(files) > 1:
        raise ValueError(f"{where} has {', '.join(files)}; name one with weight_name")
    return files[0]


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
