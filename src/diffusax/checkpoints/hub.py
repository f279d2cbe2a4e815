"""A checkpoint's folder, from this machine or from the Hugging Face Hub."""

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import huggingface_hub
from huggingface_hub import constants, errors

from diffusax.checkpoints.files import choose_weights, load_json, shard_names

# Components that no pipeline here runs; the safety checker alone is 1.2 GB.
_SKIPPED = ("safety_checker", "feature_extractor", "image_encoder")

EMBEDDED = {"emoji": Path(__file__).parents[1] / "data" / "emoji"}
"""The checkpoints inside the package, by name."""


def resolve(
    path_or_repo: str | Path,
    *,
    revision: str | None = None,
    variant: str | None = None,
    token: str | bool | None = None,
    local_files_only: bool = False,
    cache_dir: str | Path | None = None,
) -> Path:
    """A folder as it is, an embedded checkpoint by its name, anything else as a Hub repository.

    Of a repository, what is used is fetched.

    Honours HF_HUB_OFFLINE, HF_ENDPOINT, HF_HOME and a stored login, as huggingface_hub does.

    Raises:
        ValueError: neither a folder nor a repository that can be had; says why.
    """
    if Path(path_or_repo).is_dir():
        return Path(path_or_repo)
    if path_or_repo in EMBEDDED:
        return EMBEDDED[str(path_or_repo)]
    if isinstance(path_or_repo, Path) or path_or_repo.startswith((".", "/", "~")):
        raise ValueError(f"there is no folder {path_or_repo}")
    repo = path_or_repo
    options: dict[str, Any] = {"revision": revision, "token": token, "cache_dir": cache_dir}
    local_files_only = local_files_only or constants.HF_HUB_OFFLINE
    with hub_errors(repo, revision):
        if local_files_only:
            return _cached(repo, revision, cache_dir)
        return _download(repo, variant, options)


@contextlib.contextmanager
def hub_errors(repo: str, revision: str | None = None) -> Iterator[None]:
    """Turns the Hub client's exceptions into a ValueError that says what to do."""
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
    except (errors.HfHubHTTPError, OSError) as error:
        first_line = str(error).strip().splitlines()[:1]
        raise ValueError(f"the Hub does not answer for {repo!r}: {first_line}") from None


def _download(repo: str, variant: str | None, options: dict[str, Any]) -> Path:
    revision, token = options["revision"], options["token"]
    try:
        names = huggingface_hub.HfApi(token=token).list_repo_files(repo, revision=revision)
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.HFValidationError):
        raise
    except Exception:
        # Without a connection a copy in the cache serves.
        return _cached(repo, revision, options["cache_dir"])

    wanted = []
    for folder, files in _by_folder(names).items():
        if folder.split("/")[0] in _SKIPPED:
            continue
        prefix = f"{folder}/" if folder else ""
        wanted += [prefix + f for f in files if f.endswith((".json", ".txt"))]
        chosen = choose_weights(files, variant)
        if chosen is not None and chosen.endswith(".json"):
            index = Path(huggingface_hub.hf_hub_download(repo, prefix + chosen, **options))
            wanted += [prefix + shard for shard in shard_names(load_json(index), index)]
        elif chosen is not None:
            wanted.append(prefix + chosen)
    return Path(huggingface_hub.snapshot_download(repo, allow_patterns=wanted, **options))


def _cached(repo: str, revision: str | None, cache_dir: str | Path | None) -> Path:
    """The folder of an earlier download, which has only those files that were used."""
    for name in ("model_index.json", "config.json"):
        found = huggingface_hub.try_to_load_from_cache(repo, name, cache_dir, revision)
        if isinstance(found, str):
            return Path(found).parent
    raise ValueError(
        f"{repo!r} is not in the local cache and the Hub is not reachable (or switched off by "
        "HF_HUB_OFFLINE or local_files_only)"
    )


def _by_folder(names: list[str]) -> dict[str, list[str]]:
    folders = defaultdict(list)
    for name in names:
        path = PurePosixPath(name)
        folders[str(path.parent) if path.parent.name else ""].append(path.name)
    return folders
