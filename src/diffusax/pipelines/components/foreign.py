"""Components of diffusers and transformers, which become diffusax's own where they are given."""

import inspect
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from diffusax.pipelines.families import Component
from diffusax.samplers import Scheduler, scheduler_from_config
from diffusax.text.language_tokenizer import TEMPLATE_FILE

CONVERTERS: dict[str, Callable[..., Any]] = {}
"""The functions that convert what PyTorch runs, added by the modules that import it: "torch" a
whole pipeline, "torch_module" a network."""


def own_component(component: Component, value: Any) -> Any:
    """Returns a component of diffusers or transformers as diffusax's own; others as they are.

    Raises:
        ValueError: diffusax has nothing like it, or it is not of the pipeline's kind.
    """
    # torch.compile wraps a model in a function, although its calls are compiled anyway.
    value = inspect.unwrap(value) if inspect.isfunction(value) else value
    if value is None or isinstance(value, component.kind):
        return value
    match component.role:
        case "scheduler":
            return _scheduler(value)
        case "tokenizer":
            return _tokenizer(component, value)
        case "image_processor":
            # transformers' processors are dictionaries of the same options.
            return component.kind.from_dict(value.to_dict()) if _has(value, "to_dict") else value
    return own_model(component.name, value)


def own_model(name: str, value: Any) -> Any:
    """Returns a module of PyTorch as a model with its parameters; anything else as it is.

    Raises:
        ValueError: diffusax has no network like it.
        ImportError: diffusax.pipelines was imported alone, or the extra "torch" is missing.
    """
    if not is_module(value):
        return value
    if "torch_module" not in CONVERTERS:
        raise ImportError(f"{name} is a module of PyTorch, which needs more: import diffusax.api")
    return CONVERTERS["torch_module"](name, value)


def own_pipeline(cls: Any, pipe: Any) -> Any:
    """Returns a pipeline of diffusers as one of diffusax; anything else as it is."""
    theirs = not isinstance(pipe, cls) and any(
        map(is_module, getattr(pipe, "__dict__", {}).values())
    )
    return cls.from_torch(pipe) if theirs else pipe


def is_module(value: Any) -> bool:
    """Returns whether the value is a module of PyTorch, without importing it."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module)


def full_name(value: Any) -> str:
    """Returns the class of a value with its module: other libraries have classes of our names."""
    kind = type(value)
    place = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return f"{place}{kind.__qualname__}"


def _scheduler(value: Any) -> Any:
    config = getattr(value, "config", None)
    if isinstance(value, Scheduler) or not isinstance(config, Mapping) or not _has(value, "step"):
        return value
    return scheduler_from_config({**config, "_class_name": type(value).__name__})


def _tokenizer(component: Component, value: Any) -> Any:
    """Converts a tokenizer, or a processor with one, by writing and reading its small files."""
    if type(value).__module__.partition(".")[0] == "diffusax":
        return value
    # What a processor has for videos is not read, and needs torchvision.
    found = [getattr(value, name, None) for name in ("tokenizer", "image_processor")]
    parts: list[Any] = [part for part in found if part is not None] if found[0] else [value]
    if not (_has(parts[0], "save_pretrained") and _has(parts[0], "convert_ids_to_tokens")):
        return value
    with tempfile.TemporaryDirectory() as folder:
        for part in parts:
            part.save_pretrained(folder)
        if parts[0] is not value and isinstance(getattr(value, "chat_template", None), str):
            (Path(folder) / TEMPLATE_FILE).write_text(value.chat_template, encoding="utf-8")
        try:
            return component.kind.from_folder(folder)
        except ValueError as error:
            raise ValueError(
                f"{component.name}={full_name(value)} cannot be converted: "
                f"{str(error).replace(folder, 'its files')}"
            ) from None


def _has(value: Any, name: str) -> bool:
    return callable(getattr(value, name, None))
