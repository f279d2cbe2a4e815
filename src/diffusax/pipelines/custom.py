"""Pipelines whose class is in a file of one's own: `from_pretrained(custom_pipeline=...)`."""

import hashlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

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
