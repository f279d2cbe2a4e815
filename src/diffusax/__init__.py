"""Run, edit with and train Hugging Face diffusion models in JAX."""

import importlib
import importlib.util
from typing import Any

from diffusax import import_paths
from diffusax._version import __version__ as __version__


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first asked for, because importing JAX takes long.

    So a command line that is wrong, or asks for help, is answered without JAX. Type checkers read
    the names in `__init__.pyi`.
    """
    if not name.startswith("_") and importlib.util.find_spec(f"{__name__}.{name}"):
        try:
            return importlib.import_module(f"{__name__}.{name}")
        except ImportError as error:
            # pickle asks every module for the names that it saves, `torch` among them, and expects
            # no other error. The import statements raise the ImportError itself.
            raise AttributeError(
                f"module {__name__!r} has no attribute {name!r}: {error}"
            ) from error
    if name == "__all__" or not name.startswith("_"):
        api = importlib.import_module(f"{__name__}.api")
        if hasattr(api, name):
            globals()[name] = getattr(api, name)
            return globals()[name]
        try:
            return import_paths.find_name(name)
        except AttributeError:
            pass
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


import_paths.register_paths()


def __dir__() -> list[str]:
    return sorted({*globals(), *importlib.import_module(f"{__name__}.api").__all__})
