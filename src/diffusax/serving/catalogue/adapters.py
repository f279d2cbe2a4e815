"""The LoRAs of a catalogue, loaded when a request names them."""

import collections
import threading
import weakref
from collections.abc import Mapping
from typing import Any

from diffusax.serving.requests.errors import Refused
from diffusax.text.lora_tags import add_weights

_MOST = 16
"""The LoRAs of a model that stay in memory."""


class Adapters:
    """Loads LoRAs into pipelines and evicts the least recently used. Any thread may call it."""

    def __init__(self, most: int = _MOST):
        """Starts without LoRAs. most: those of a model that stay in memory."""
        self._most, self._lock = most, threading.Lock()
        self._used: weakref.WeakKeyDictionary[Any, collections.OrderedDict[str, Any]] = (
            weakref.WeakKeyDictionary()
        )

    def load(self, pipe: Any, weights: Mapping[str, Any], catalogue: Any) -> dict[str, Any]:
        """Loads the LoRAs that a request names and returns their weights for a call.

        Reads a file again if it has changed. Images under way keep the weights that they have.

        Args:
            pipe: the pipeline.
            weights: the weights by names of the catalogue: a number, or numbers by component, of
                which those of components that the pipeline lacks are left out.
            catalogue: the catalogue.

        Raises:
            NotFound: the catalogue has no LoRA of this name.
            Refused: a LoRA cannot be read or does not fit the model; says why.
        """
        found: dict[str, Any] = {}
        for name, weight in weights.items():
            # A LoRA may be named by its title, and twice.
            own = catalogue.lora(name).name
            if isinstance(weight, Mapping):
                weight = {k: v for k, v in weight.items() if k in pipe.component_names}
            found[own] = add_weights(found[own], weight) if own in found else weight
        with self._lock:
            used = self._used.setdefault(pipe.parts.adapters, collections.OrderedDict())
            for name in found:
                self._load(pipe, used, name, catalogue.lora(name).path)
            while len(used) > max(self._most, len(found)):
                oldest = next(iter(used))
                del used[oldest]
                pipe.delete_adapters(oldest)
        return found

    def _load(self, pipe: Any, used: Any, name: str, path: Any) -> None:
        version = path, path.stat().st_mtime_ns
        if used.get(name) != version:
            if name in used:
                del used[name]
                pipe.delete_adapters(name)
            try:
                pipe.load_lora_weights(path, adapter_name=name)
            except ValueError as error:
                message = f"adapters names {name!r}, which cannot be used here: {error}"
                raise Refused(message, param="adapters") from None
            used[name] = version
        used.move_to_end(name)
