"""diffusers' converters for FLUX.1, which have its width in them, for tiny networks."""

import inspect
import sys
from typing import Any


def of_width(function: Any, width: int) -> Any:
    """The same function of diffusers for a transformer of this width."""
    source = inspect.getsource(function)
    assert "3072" in source
    source = source.replace("12288", str(4 * width)).replace("3072", str(width))
    names = dict(vars(sys.modules[function.__module__]))
    exec(source, names)
    return names[function.__name__]
