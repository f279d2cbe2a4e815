"""The files of samplers: scheduler_config.json, read from and written to folders and the Hub."""

import json
from pathlib import Path
from typing import Any, Self, cast

import huggingface_hub

from diffusax.boundary.files import load_json, write_json
from diffusax.checkpoints.hub import EMBEDDED, hub_errors
from diffusax.checkpoints.keywords import OF_HUB, take_keywords
from diffusax.checkpoints.publishing import Publishing

FILE = "scheduler_config.json"


class SchedulerFiles(Publishing):
    """The methods of every sampler under diffusers' names that read and write its options."""

    config_name = FILE
    """The name of the file."""

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | Path,
        subfolder: str | None = None,
        *,
        revision: str | None = None,
        token: str | bool | None = None,
        local_files_only: bool = False,
        cache_dir: str | Path | None = None,
        **overrides: Any,
    ) -> Self:
        """Makes this sampler with the options of a checkpoint's scheduler_config.json.

        Args:
            pretrained_model_name_or_path: a folder, an embedded checkpoint or a Hub repository.
            subfolder: the folder inside it, usually "scheduler".
            revision: a Hub branch, tag or commit.
            token: the token for gated or private repositories.
            local_files_only: whether to use only what was downloaded before.
            cache_dir: the folder where downloads are kept.
            overrides: options instead of the config's; unknown ones are logged and left out.

        Raises:
            ValueError: there is no such file, or `from_config` refuses its options.
        """
        whole: Any = cls
        changes, more = take_keywords(cls.__name__, overrides, whole.option_names())
        hub: dict[str, Any] = {"revision": revision, "token": token, "cache_dir": cache_dir}
        hub |= {"local_files_only": local_files_only, **more}
        config = cls.load_config(pretrained_model_name_or_path, subfolder=subfolder, **hub)
        return cast(Self, whole.from_config(config, **changes))

    @classmethod
    def load_config(
        cls,
        pretrained_model_name_or_path: str | Path,
        *,
        subfolder: str | None = None,
        **hub: Any,
    ) -> dict[str, Any]:
        """Returns a checkpoint's parsed scheduler_config.json; arguments as of `from_pretrained`.

        Raises:
            ValueError: there is no such file.
        """
        options, more = take_keywords(cls.__name__, hub, OF_HUB)
        source = pretrained_model_name_or_path
        name = f"{subfolder}/{FILE}" if subfolder else FILE
        folder = EMBEDDED.get(str(source), Path(source))
        if folder.is_dir():
            return load_json(folder / name)
        with hub_errors(str(source), options.get("revision")):
            path = huggingface_hub.hf_hub_download(str(source), name, **options, **more)
        return load_json(Path(path))

    def save_config(
        self, save_directory: str | Path, push_to_hub: bool = False, **hub: Any
    ) -> None:
        """Writes scheduler_config.json into a folder, which diffusers opens.

        Args:
            save_directory: the folder.
            push_to_hub: whether to upload it, too.
            **hub: options of `push_to_hub`, and repo_id, by default the folder's name.
        """
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / FILE, self._contents())
        if push_to_hub:
            self.push_to_hub(hub.pop("repo_id", folder.name), **hub)

    def save_pretrained(
        self, save_directory: str | Path, push_to_hub: bool = False, **hub: Any
    ) -> None:
        """Writes scheduler_config.json into a folder; see `save_config`."""
        self.save_config(save_directory, push_to_hub, **hub)

    def to_json_string(self) -> str:
        """Returns the contents of scheduler_config.json."""
        return json.dumps(self._contents(), indent=2, sort_keys=True) + "\n"

    def to_json_file(self, json_file_path: str | Path) -> None:
        """Writes the options into a file of this name."""
        Path(json_file_path).write_text(self.to_json_string(), encoding="utf-8")

    def _contents(self) -> dict[str, Any]:
        return cast(dict[str, Any], cast(Any, self).to_config())
