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
            f"{module} is needed here; install it with pip install 'diffusax[{extra}]' ({error})"
        ) from None
