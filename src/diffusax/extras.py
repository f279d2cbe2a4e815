"""Optional dependencies."""

import importlib
from typing import Any


def require_extra(module: str, extra: str) -> Any:
    """The module, imported.

    Raises:
        ImportError: it is not installed; names the extra that brings it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{module} is needed here; install it with {install_command(extra)} ({error})"
        ) from None


def install_command(extra: str) -> str:
    """What installs an extra: PyPI has no diffusax, so its packages are named by a clone."""
    return f"pip install -e '.[{extra}]' in diffusax's folder"
