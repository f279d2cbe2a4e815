"""Uploads models and pipelines to the Hugging Face Hub."""

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import huggingface_hub

from diffusax.checkpoints.hub import hub_errors
from diffusax.checkpoints.keywords import take_keywords

_CARD = """---
library_name: diffusers
---

# {name}

This is a {kind} in diffusers' layout, written by diffusax.
"""


def publish(
    save: Callable[[Path], None],
    repo_id: str,
    kind: str,
    *,
    commit_message: str | None = None,
    private: bool | None = None,
    token: str | None = None,
    create_pr: bool = False,
    subfolder: str | None = None,
) -> str:
    """Uploads the files that `save` writes to a Hub repository, and returns the commit's address.

    The repository is created if it is not there. Its README.md is written where it has none, and
    `subfolder` is not given.

    Args:
        save: writes the files into a folder.
        repo_id: the repository, "owner/name" or "name".
        kind: the class of the model or pipeline.
        commit_message: the commit's message; by default it names the kind.
        private: whether a new repository is private; None for the owner's default.
        token: the token for the Hub; by default the stored login.
        create_pr: whether to open a pull request instead of a commit.
        subfolder: the folder in the repository.

    Raises:
        ValueError: the Hub refuses the upload or does not answer; says why.
    """
    api = huggingface_hub.HfApi(token=token)
    # First, so that a mistake shows before large files are written.
    repo = create_repository(api, repo_id, private=private)
    with hub_errors(repo_id):
        has_card = bool(subfolder) or api.file_exists(repo, "README.md")
    with tempfile.TemporaryDirectory() as written:
        folder = Path(written)
        save(folder)
        if not has_card:
            card = _CARD.format(name=repo.rpartition("/")[2], kind=kind)
            (folder / "README.md").write_text(card, "utf-8")
        return upload_folder(
            api,
            repo,
            folder,
            commit_message=commit_message or f"Upload {kind}",
            create_pr=create_pr,
            path_in_repo=subfolder,
        )


def create_repository(
    api: "huggingface_hub.HfApi", repo_id: str, *, private: bool | None = None
) -> str:
    """Creates a Hub repository unless it is there, and returns its name, "owner/name".

    Raises:
        ValueError: the Hub refuses or does not answer; says why.
    """
    with hub_errors(repo_id):
        return api.create_repo(repo_id, private=private, exist_ok=True).repo_id


def upload_folder(api: "huggingface_hub.HfApi", repo_id: str, folder: Path, **options: Any) -> str:
    """Uploads a folder to a Hub repository, and returns the commit's address.

    options: those of `HfApi.upload_folder`.

    Raises:
        ValueError: the Hub refuses the upload or does not answer; says why.
    """
    with hub_errors(repo_id):
        return str(api.upload_folder(repo_id=repo_id, folder_path=folder, **options))


def publishing_keywords(owner: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of `Publishing.push_to_hub` among further keywords; others are logged."""
    known = ("repo_id", "commit_message", "private", "token", "create_pr", "subfolder")
    return take_keywords(owner, given, known)[0]


class Publishing:
    """The method of models and pipelines that uploads them."""

    save_pretrained: Callable[..., None]

    def push_to_hub(
        self,
        repo_id: str,
        commit_message: str | None = None,
        private: bool | None = None,
        token: str | None = None,
        create_pr: bool = False,
        safe_serialization: bool = True,
        variant: str | None = None,
        subfolder: str | None = None,
    ) -> str:
        """Uploads what `save_pretrained` writes to a Hub repository, like diffusers' method.

        Args:
            repo_id: the repository, "owner/name" or "name"; it is created if it is not there.
            commit_message: the commit's message; by default it names the class.
            private: whether a new repository is private; None for the owner's default.
            token: the token for the Hub; by default the stored login.
            create_pr: whether to open a pull request instead of a commit.
            safe_serialization: True: only safetensors are written.
            variant: a variant such as "fp16" for the names of the files.
            subfolder: the folder in the repository.

        Raises:
            ValueError: the Hub refuses the upload or does not answer; says why.
        """
        options: dict[str, Any] = {"safe_serialization": safe_serialization, "variant": variant}
        return publish(
            lambda folder: self.save_pretrained(folder, **options),
            repo_id,
            getattr(self, "class_name", type(self).__name__),
            commit_message=commit_message,
            private=private,
            token=token,
            create_pr=create_pr,
            subfolder=subfolder,
        )
