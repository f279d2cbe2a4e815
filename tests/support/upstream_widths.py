"""diffusers' converters for FLUX.1, which have its sizes in them, for tiny networks."""

import inspect
import sys
from typing import Any

from support.tiny_transformers import FLUX


def for_tiny(function: Any, **changes: Any) -> Any:
    """The same function of diffusers for the sizes of the tiny transformer, with changes."""
    config = {**FLUX, **changes}
    width = config["attention_head_dim"] * config["num_attention_heads"]
    source = inspect.getsource(function)
    assert "3072" in source
    source = source.replace("12288", str(4 * width)).replace("3072", str(width))
    source = source.replace("num_layers = 19", f"num_layers = {config['num_layers']}")
    source = source.replace("_layers = 38", f"_layers = {config['num_single_layers']}")
    names = dict(vars(sys.modules[function.__module__]))
    exec(source, names)
    return names[function.__name__]
