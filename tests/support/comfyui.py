"""ComfyUI's side of its protocol for nodes, as far as the nodes of `comfyui/` meet it.

Prompts are checked and run as ComfyUI's execution.py does it, without its cache. Tensors may stand
where a prompt has links to nodes of ComfyUI.
"""

import contextlib
import dataclasses
import importlib.util
import inspect
import sys
import threading
from types import ModuleType
from typing import Any

import pytest

from support.repository import ROOT

PACKAGE = ROOT / "comfyui"
_NUMBERS = {"INT": int, "FLOAT": float}


class InterruptProcessingException(Exception):
    """What ComfyUI raises in a node when the user interrupts."""


@dataclasses.dataclass
class Comfy:
    """What nodes have told ComfyUI, and whether the user has interrupted."""

    nodes: Any = None
    progress: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    previews: list[Any] = dataclasses.field(default_factory=list)
    texts: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    interrupted: threading.Event = dataclasses.field(default_factory=threading.Event)
    interrupt_at: int | None = None
    """The progress at which the user interrupts."""

    def throw_if_interrupted(self) -> None:
        if self.interrupted.is_set():
            self.interrupted.clear()
            raise InterruptProcessingException

    def progressed(self, value: int, total: int, preview: Any) -> None:
        self.progress.append((value, total))
        if preview is not None:
            self.previews.append(preview)
        if self.interrupt_at is not None and value >= self.interrupt_at:
            self.interrupted.set()
        self.throw_if_interrupted()

    def run(self, prompt: dict[str, Any]) -> dict[str, tuple[Any, ...]]:
        """Checks and runs a prompt in its API form; returns what each node of ours returns."""
        errors = {id: self.errors(node) for id, node in prompt.items()}
        assert not any(errors.values()), errors
        found: dict[str, tuple[Any, ...]] = {}
        for id in prompt:
            self._run(prompt, id, found)
        return found

    def errors(self, node: dict[str, Any]) -> list[str]:
        """Returns what ComfyUI has against a node's inputs before it runs."""
        cls = self.nodes.NODE_CLASS_MAPPINGS[node["class_type"]]
        types, found = cls.INPUT_TYPES(), []
        validate = getattr(cls, "VALIDATE_INPUTS", None)
        own = inspect.getfullargspec(validate).args if validate else []
        for category in ("required", "optional"):
            for name, (kind, about) in types.get(category, {}).items():
                if name not in node["inputs"]:
                    found += [f"{name} is missing"] if category == "required" else []
                    continue
                value = node["inputs"][name]
                if isinstance(value, list) or name in own:
                    continue
                if isinstance(kind, list) and value not in kind:
                    found.append(f"{name} is not in the list")
                elif kind in ("INT", "FLOAT"):
                    value = node["inputs"][name] = _NUMBERS[kind](value)
                    if not about["min"] <= value <= about["max"]:
                        found.append(f"{name} is out of its range")
        given = {name: value for name, value in node["inputs"].items() if name in own}
        if validate is not None and validate(**given) is not True:
            found.append("VALIDATE_INPUTS")
        return found

    def _run(self, prompt: dict[str, Any], id: str, found: dict[str, tuple[Any, ...]]) -> None:
        if id in found:
            return
        node = prompt[id]
        cls = self.nodes.NODE_CLASS_MAPPINGS[node["class_type"]]
        types = cls.INPUT_TYPES()
        inputs = dict(node["inputs"])
        for name, value in inputs.items():
            if isinstance(value, list):
                self._run(prompt, value[0], found)
                inputs[name] = found[value[0]][value[1]]
        for name, kind in types.get("hidden", {}).items():
            assert kind == "UNIQUE_ID"
            inputs[name] = id
        returned = getattr(cls(), cls.FUNCTION)(**inputs)
        assert len(returned) == len(cls.RETURN_TYPES) == len(cls.RETURN_NAMES)
        found[id] = returned


@contextlib.contextmanager
def loaded_nodes(default_url: str):
    """Loads the nodes as ComfyUI loads a folder of custom_nodes, with stand-ins for its modules."""
    comfy = Comfy()

    class ProgressBar:
        def __init__(self, total: int, node_id: Any = None):
            self.total = total

        def update_absolute(self, value: int, total: Any = None, preview: Any = None) -> None:
            comfy.progressed(min(value, self.total), self.total, preview)

    class PromptServer:
        class instance:
            @staticmethod
            def send_progress_text(text: str, node_id: str) -> None:
                comfy.texts.append((node_id, text))

    throw = comfy.throw_if_interrupted
    modules = {
        "comfy": {},
        "comfy.utils": {"ProgressBar": ProgressBar},
        "comfy.model_management": {"throw_exception_if_processing_interrupted": throw},
        "server": {"PromptServer": PromptServer},
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DIFFUSAX_SERVER", default_url)
        patch.delenv("DIFFUSAX_API_KEY", raising=False)
        for name, values in modules.items():
            module = ModuleType(name)
            vars(module).update(values)
            patch.setitem(sys.modules, name, module)
            if "." in name:
                setattr(sys.modules["comfy"], name.partition(".")[2], module)
        name = "custom_nodes_diffusax"
        spec = importlib.util.spec_from_file_location(name, PACKAGE / "__init__.py")
        package = importlib.util.module_from_spec(spec)
        patch.setitem(sys.modules, name, package)
        spec.loader.exec_module(package)
        comfy.nodes = package
        yield comfy
        for one in [one for one in sys.modules if one.startswith(f"{name}.")]:
            del sys.modules[one]
