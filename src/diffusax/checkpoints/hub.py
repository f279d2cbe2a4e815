"""Finds a checkpoint's folder on this machine or on the Hugging Face Hub."""

import contextlib
import dataclasses
import errno
import logging
import os
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import huggingface_hub
from huggingface_hub import constants

from diffusax.boundary.files import load_json
from diffusax.checkpoints.files import (
    INDEXES,
    choose_variant,
    choose_weights,
    component_folder,
    index_of,
    read_model_index,
    shard_names,
    variants,
)
from diffusax.checkpoints.single_file import is_single_file, lasting_view

# No pipeline here runs the safety checker, which is 1.2 GB, or the language model that rewrites
# FLUX.3's prompts.
_SKIPPED = ("safety_checker", "prompt_upsampler", "prompt_upsampler_processor")
# Many have it for the safety checker alone.
_NOT_NEEDED = ("feature_extractor",)
# Several of them are one component, in controlnet, controlnet_1 and so on.
_NUMBERED = {"controlnet", "adapter"}

_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EIO)
_READ = (".json", ".txt", ".jinja")
"""The endings of a component's small files."""
_SPIECE = "spiece.model"
"""T5's tokenizer of checkpoints that are older than tokenizer.json."""
_CONFIGS = ("config.json", "scheduler_config.json", "tokenizer_config.json", "tokenizer.json")

_DATA = Path(__file__).parents[1] / "data"
EMBEDDED = {
    "emoji": _DATA / "emoji",
    "emoji-edit": _DATA / "emoji_edit",
    "emoji-control": _DATA / "emoji_control",
}
"""The checkpoints inside the package, by name."""
EMBEDDED_LORAS = {"emoji-owl": _DATA / "emoji_owl"}
"""The LoRAs inside the package, by name."""

logger = logging.getLogger(__name__)


def resolve(
    path_or_repo: str | Path,
    *,
    subfolder: str | None = None,
    revision: str | None = None,
    variant: str | None = None,
    token: str | bool | None = None,
    local_files_only: bool = False,
    cache_dir: str | Path | None = None,
    force_download: bool = False,
    skip: Collection[str] = (),
    weights: bool = True,
) -> Path:
    """Returns the folder of a checkpoint, given as a folder, an embedded name or a Hub repository.

    A .safetensors or .gguf file with a whole model, or a network, is opened as a folder without
    weights, see `diffusax.checkpoints.single_file`.

    From a repository, only the files that are used are fetched: those of the components in
    model_index.json if it has one, those of `subfolder` if that is given. Without a connection an
    earlier download is used. HF_HUB_OFFLINE, HF_ENDPOINT, HF_HOME and a stored login have the
    meaning that they have for huggingface_hub.

    Args:
        path_or_repo: a folder, a Hub repository id, a .safetensors or .gguf file, or "emoji",
            "emoji-edit" or "emoji-control" for a model in the package.
        subfolder: a folder in it, such as "unet"; the result is that folder.
        revision: a branch, tag or commit of the repository.
        variant: a variant such as "fp16". Components that lack it are loaded without it; at least
            one must have it.
        token: the token for private and gated repositories; by default the stored login.
        local_files_only: whether to use only the cache.
        cache_dir: the folder of the cache, instead of HF_HOME.
        force_download: whether to download again what was downloaded before.
        skip: components of a pipeline that are not needed.
        weights: whether the parameters are needed, or only the configs.

    Raises:
        ValueError: there is no such folder, repository, subfolder or variant, or it cannot be
            fetched; says why.
    """
    if not isinstance(path_or_repo, str | os.PathLike):
        raise ValueError(
            f"path_or_repo must be a folder or a Hub repository id (got {path_or_repo!r})"
        )
    wanted = _Wanted(_relative(subfolder), variant, frozenset({*skip, *_SKIPPED}), weights)
    file = Path(os.path.expanduser(path_or_repo))
    if is_single_file(file):
        view = lasting_view(file, skip) / wanted.subfolder
        if not view.is_dir():
            raise ValueError(f"{file} holds no {wanted.subfolder}")
        return view
    folder = local_folder(path_or_repo)
    if folder is not None:
        if not (folder / wanted.subfolder).is_dir():
            raise ValueError(f"there is no folder {folder / wanted.subfolder}")
        wanted.check_variant(str(folder), wanted.on_disk(folder))
        return folder / wanted.subfolder
    repo = str(path_or_repo)
    options: dict[str, Any] = {"revision": revision, "token": token, "cache_dir": cache_dir}
    if force_download:
        options["force_download"] = True
    with hub_errors(repo, revision):
        if local_files_only or constants.HF_HUB_OFFLINE:
            return _cached(repo, wanted, options, "HF_HUB_OFFLINE or local_files_only is set")
        return _download(repo, wanted, options)


@contextlib.contextmanager
def hub_errors(repo: str, revision: str | None = None) -> Iterator[None]:
    """Turns the Hub client's exceptions into a ValueError that says what to do."""
    # What the Hub needs, an HTTP client above all, takes long to import.
    from huggingface_hub import errors

    try:
        yield
    except errors.HFValidationError:
        raise ValueError(
            f"{repo!r} is neither a folder here nor a Hub repository id ('owner/name')"
        ) from None
    except errors.GatedRepoError:
        raise ValueError(
            f"{repo!r} is gated: accept its licence on the Hub, then pass token=... or run "
            "`hf auth login`"
        ) from None
    except errors.RevisionNotFoundError:
        raise ValueError(f"{repo!r} has no revision {revision!r}") from None
    except errors.RepositoryNotFoundError:
        raise ValueError(
            f"there is no folder {repo!r} here and no such repository on the Hub (a private one "
            "needs token=... or `hf auth login`)"
        ) from None
    except (errors.HTTPError, OSError) as error:
        answer = "does not answer" if is_connection_problem(error) else "gives an error"
        raise ValueError(f"the Hub {answer} for {repo!r}: {_reason(error)}") from None


def local_folder(path_or_repo: str | os.PathLike[str]) -> Path | None:
    """Returns the folder on this machine; None for what can only be a repository.

    Raises:
        ValueError: it is a path, but no folder.
    """
    text = os.path.expanduser(path_or_repo)
    if os.path.isdir(text):
        return Path(text)
    if text in EMBEDDED:
        return EMBEDDED[text]
    if not isinstance(path_or_repo, str) or text.startswith((".", "/", "~")):
        kind = "is a file, not a folder" if os.path.exists(text) else "is no folder here"
        raise ValueError(f"{text} {kind}; give the folder of a checkpoint in diffusers' layout")
    return None


@dataclasses.dataclass(frozen=True)
class _Wanted:
    """The parts of a checkpoint that are used."""

    subfolder: str
    variant: str | None
    skip: frozenset[str]
    weights: bool

    def folders(self, root: Path) -> list[str]:
        """Returns the folders to read of a checkpoint; `root` may hold its model_index.json."""
        if self.subfolder or index_of(root) is None:
            return [self.subfolder]
        _, components, _ = read_model_index(root)
        names = [name for name in components if name not in self.skip]
        parts = (component_folder(root, name).relative_to(root) for name in names)
        return list(dict.fromkeys("" if part == Path() else str(part) for part in parts))

    def on_disk(self, root: Path) -> dict[str, list[str]]:
        """Returns the file names in each of those folders that exists."""
        paths = {folder: root / folder for folder in self.folders(root)}
        return {k: os.listdir(path) for k, path in paths.items() if path.is_dir()}

    def check_variant(self, source: str, listing: Mapping[str, Collection[str]]) -> None:
        """Raises ValueError where no folder has weights of the variant, like diffusers.

        Logs a warning where only some have it.
        """
        if not self.variant:
            return
        has = {folder for folder, names in listing.items() if choose_variant(names, self.variant)}
        plain = {folder for folder, names in listing.items() if choose_variant(names, None)}
        others = sorted({v for names in listing.values() for v in variants(names)})
        if not has and (plain or others):
            mend = f"it has {', '.join(map(repr, others))}" if others else "leave variant out"
            raise ValueError(f"{source} has no weights of variant={self.variant!r}; {mend}")
        if plain - has:
            logger.warning(
                "%s has no variant %r of %s; other weights of it are loaded",
                source,
                self.variant,
                ", ".join(sorted(plain - has)),
            )


def _relative(subfolder: str | None) -> str:
    parts = PurePosixPath(subfolder or "").parts
    if ".." in parts or "/" in parts:
        raise ValueError(f"subfolder must be a folder of the checkpoint (got {subfolder!r})")
    return "/".join(parts)


def _download(repo: str, wanted: _Wanted, options: dict[str, Any]) -> Path:
    from huggingface_hub import errors

    api = huggingface_hub.HfApi(token=options["token"])
    try:
        info = api.model_info(repo, revision=options["revision"])
    except (errors.HTTPError, OSError) as error:
        if not is_connection_problem(error):
            raise
        reason = f"the Hub is not reachable: {_reason(error)}"
        return _cached(repo, wanted, options, reason)

    def fetch(name: str) -> Path:
        return Path(huggingface_hub.hf_hub_download(repo, name, **options))

    names = [file.rfilename for file in info.siblings or ()]
    by_folder = _by_folder(names)
    index = next((name for name in INDEXES if name in names and not wanted.subfolder), None)
    is_pipeline = index is not None
    root = Path() if index is None else fetch(index).parent
    folders = set(wanted.folders(root))
    if is_pipeline and not folders <= set(by_folder) and "config.json" in by_folder.get("", ()):
        folders.add("")
    for name in _NUMBERED & folders:
        folders |= {folder for folder in by_folder if folder.startswith(f"{name}_")}
    listing = {folder: by_folder[folder] for folder in sorted(folders) if folder in by_folder}
    if not any(name.endswith(_READ) for files in listing.values() for name in files):
        where = f"in {wanted.subfolder} " if wanted.subfolder else ""
        there = ", ".join(sorted(folder for folder in by_folder if folder)) or "no folders"
        raise ValueError(f"{repo!r} has no checkpoint {where}in diffusers' layout (it has {there})")
    wanted.check_variant(repo, listing)

    patterns = [] if index is None else [index]
    for folder, files in listing.items():
        prefix = f"{folder}/" if folder else ""
        patterns += [prefix + f for f in files if f.endswith(_READ)]
        if _SPIECE in files and "tokenizer.json" not in files:
            patterns.append(prefix + _SPIECE)
        chosen = choose_weights(files, wanted.variant) if wanted.weights else None
        if chosen is not None and chosen.endswith(".json"):
            shards = fetch(prefix + chosen)
            patterns += [prefix + shard for shard in shard_names(load_json(shards), shards)]
        elif chosen is not None:
            patterns.append(prefix + chosen)
    snapshot = huggingface_hub.snapshot_download(repo, allow_patterns=patterns, **options)
    return Path(snapshot) / wanted.subfolder


def _cached(repo: str, wanted: _Wanted, options: dict[str, Any], reason: str) -> Path:
    """Returns the folder of an earlier download, which has only the files that were used then.

    Raises:
        ValueError: there is none, or components are missing in it; ends with the reason.
    """
    prefix = f"{wanted.subfolder}/" if wanted.subfolder else ""
    names = [prefix + name for name in _CONFIGS] if prefix else [*INDEXES, "config.json"]
    cache_dir, revision = options["cache_dir"], options["revision"]
    found = (
        huggingface_hub.try_to_load_from_cache(repo, name, cache_dir, revision) for name in names
    )
    folder = next((Path(path).parent for path in found if isinstance(path, str)), None)
    if folder is None:
        of = f"{wanted.subfolder} of " if prefix else ""
        raise ValueError(f"{of}{repo!r} is not in the local cache, and {reason}")
    root = folder.parents[wanted.subfolder.count("/")] if wanted.subfolder else folder
    listing = wanted.on_disk(root)
    missing = [
        name
        for name in wanted.folders(root)
        if name not in _NOT_NEEDED
        if not (files := listing.get(name))
        or (wanted.weights and "config.json" in files and not choose_weights(files, wanted.variant))
    ]
    if missing:
        parts = ", ".join(filter(None, missing)) or "its weights"
        raise ValueError(f"{repo!r} is only partly in the local cache (not {parts}), and {reason}")
    wanted.check_variant(repo, listing)
    return folder


def _by_folder(names: list[str]) -> dict[str, list[str]]:
    folders = defaultdict(list)
    for name in names:
        path = PurePosixPath(name)
        folders[str(path.parent) if path.parent.name else ""].append(path.name)
    return folders


def is_connection_problem(error: Exception) -> bool:
    """Returns whether the Hub was not reached, or answered that it is out of order."""
    from huggingface_hub import errors

    if isinstance(error, errors.HfHubHTTPError):
        return getattr(error.response, "status_code", 0) >= 500
    # Without an answer, the HTTP clients raise an HTTPError or an OSError.
    local = isinstance(error, errors.LocalTokenNotFoundError | PermissionError)
    return not local and getattr(error, "errno", None) not in _DISK_ERRORS


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
