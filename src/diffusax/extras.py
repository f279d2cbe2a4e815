"""Optional dependencies."""

import importlib
from typing import Any


def require_extra(module: str, extra: str) -> Any:
    """Imports and returns a module of an optional dependency.

    Raises:
        ImportError: the module is not installed; names the extra that installs it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{module} is needed here; install it with {install_command(extra)} ({error})"
        ) from None


def install_command(extra: str) -> str:
    """Returns the command that installs an extra of the package, however that was installed."""
    return f"pip install 'diffusax[{extra}]'"
