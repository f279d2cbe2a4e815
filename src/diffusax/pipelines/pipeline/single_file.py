"""Pipelines from a single file."""

import hashlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, Self

from diffusax.checkpoints.keywords import hub_keywords
from diffusax.checkpoints.single_file import Reading, opened_view
from diffusax.checkpoints.single_file.original_config import prediction_of
from diffusax.checkpoints.weight_file import config_folder, find_file

WITHOUT_MEANING = frozenset(
    (
        *("num_in_channels", "image_size", "upcast_attention", "scheduler_type", "model_type"),
        *("from_safetensors", "stable_unclip", "config_files"),
    )
)
"""The arguments of diffusers' from_single_file that are accepted and change nothing."""


class SingleFile:
    """The method of pipelines that opens single files."""

    @classmethod
    def from_single_file(
        cls,
        path_or_address: str | Path,
        *,
        config: str | Path | None = None,
        original_config: Any = None,
        prediction_type: str | None = None,
        use_ema: bool = False,
        extract_ema: bool = False,
        revision: str | None = None,
        token: str | bool | None = None,
        local_files_only: bool = False,
        cache_dir: str | Path | None = None,
        **options: Any,
    ) -> Self:
        """Loads a model from one .safetensors or .gguf file, as A1111, ComfyUI and the Hub have it.

        It reads Stable Diffusion 1 and 2, SDXL and its refiner, and their models for inpainting and
        InstructPix2Pix. `DiffusionPipeline` chooses the class by what the file holds; another class
        must be of the same family. Configs and tokenizers are in the package, so that nothing is
        fetched. Models with a transformer need `config`, and what the file lacks as
        components. Tensors are read and cast one by one.

        Args:
            path_or_address: the file's path, its address on the Hub, or "owner/name/file".
            config: a folder or Hub repository in diffusers' layout, for a model of which the
                package has no config; only its configs and tokenizers are read.
            original_config: a YAML file of the original code, or its contents; only its prediction
                type is read, because the tensors say the rest.
            prediction_type: what the UNet predicts: "epsilon", "v_prediction" or "sample". By
                default what the file says; files of Stable Diffusion 2 rarely do, and need it.
            use_ema: whether to read the UNet's averaged parameters (`model_ema.`).
            extract_ema: diffusers' name for `use_ema`.
            revision: a branch, tag or commit of the file's repository.
            token: the token for private and gated repositories; by default the stored login.
            local_files_only: whether to use only files that were downloaded before.
            cache_dir: the folder of downloads, instead of the one in HF_HOME.
            **options: torch_dtype, dtype, vae_dtype, device, mesh, weights, and components to use
                instead of the file's, as in `from_pretrained`; force_download. Unknown ones are
                logged and left out.

        Raises:
            ValueError: the file cannot be found or read, lacks a component, or does not say what is
                needed; names what to pass.
        """
        hub: dict[str, Any] = {
            **{"token": token, "cache_dir": cache_dir},
            **{"local_files_only": local_files_only, "revision": revision},
        }
        hub |= hub_keywords(options)
        original_config = options.pop("original_config_file", original_config)
        left_out = {*WITHOUT_MEANING, *hub, "use_auth_token"}
        options = {name: value for name, value in options.items() if name not in left_out}
        wanted = prediction_type or prediction_of(original_config)
        scheduler = options.get("scheduler")
        if wanted is None and scheduler is not None:
            wanted = getattr(scheduler, "config", {}).get("prediction_type")
        reading = Reading(
            config_folder(config, **hub), wanted, use_ema or extract_ema, frozenset(options)
        )
        with opened_view(find_file(path_or_address, **hub), reading) as folder:
            loaded: Self = cls.from_pretrained(folder, **options)  # type: ignore[attr-defined]
        return loaded


_FILE = "pipeline.py"
_DISABLED = "DIFFUSERS_DISABLE_REMOTE_CODE"
_TRUE = ("1", "ON", "YES", "TRUE")


def custom_class(base: Any, custom_pipeline: str | Path, *, trust_remote_code: bool) -> Any:
    """Runs a Python file, and returns the class of pipelines that it defines.

    Args:
        base: the class from which the file's class derives, DiffusionPipeline.
        custom_pipeline: a file, or a folder with a pipeline.py.
        trust_remote_code: whether the caller consents to running it, as in diffusers.

    Raises:
        ValueError: there is no such file, there is no consent, or the file does not define exactly
            one such class.
    """
    path = _file(custom_pipeline)
    if os.environ.get(_DISABLED, "").upper() in _TRUE:
        raise ValueError(f"{path} is code, which {_DISABLED} forbids to run; unset it")
    if trust_remote_code is not True:
        raise ValueError(
            f"{path} is code that would run with all your rights; read it, and give "
            "trust_remote_code=True if you trust it"
        )
    module = _module(path)
    kinds = dict.fromkeys(x for x in vars(module).values() if isinstance(x, type))
    found = [x for x in kinds if issubclass(x, base) and x.__module__ == module.__name__]
    if len(found) != 1:
        names = ", ".join(kind.__name__ for kind in found) or "none"
        raise ValueError(
            f"{path} must define one class that derives from diffusax.DiffusionPipeline "
            f"(got {names})"
        )
    return found[0]


def _file(custom_pipeline: str | Path) -> Path:
    """Returns the file to run.

    Raises:
        ValueError: it is none, but perhaps a name on the Hub.
    """
    path = Path(os.path.expanduser(custom_pipeline))
    file = path / _FILE if path.is_dir() else path
    if file.suffix == ".py" and file.is_file():
        return file.resolve()
    raise ValueError(
        f"custom_pipeline must be a .py file here, or a folder with a {_FILE} (got "
        f"{str(custom_pipeline)!r}); nothing is fetched for it, and diffusers' community pipelines "
        "are programs of PyTorch"
    )


def _module(path: Path) -> ModuleType:
    """Runs the file as a module, anew each time because it may have changed."""
    digest = hashlib.sha256(str(path).encode()).hexdigest()[:12]
    name = f"diffusax_custom_{path.stem}_{digest}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickles look for their module while it runs.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
