"""The names that widgets offer: what a server had when it was last asked."""

import threading
import time
from typing import Any

from .client import Server, ServerError

DEFAULT = "default"
"""The choice of what the server or the model has by default."""
_SECONDS = 1.0
"""How long ComfyUI's list of nodes may wait for the server."""
_KEPT, _KEPT_FAILURE = 10.0, 60.0
"""For how many seconds an answer is kept, and the lack of one: every prompt asks many times."""


class Choices:
    """The lists of the server that was connected last, at first the environment's."""

    def __init__(self) -> None:
        """Starts without lists; asks nothing."""
        self._lock = threading.Lock()
        self._server: Server | None = None
        self._found: dict[str, Any] = {}
        self._until = 0.0

    def remember(self, server: Server, capabilities: dict[str, Any]) -> None:
        """Takes the lists of a server that has just answered, for now and later."""
        with self._lock:
            self._server, self._found = server, capabilities
            self._until = time.monotonic() + _KEPT

    def names(self, kind: str) -> list[str]:
        """Returns the names of a kind, "models" for instance; none while no server answers."""
        with self._lock:
            if time.monotonic() >= self._until:
                self._ask()
            return names_of(self._found, kind)

    def _ask(self) -> None:
        """Asks the server again."""
        try:
            server = self._server or Server()
            self._found = server.capabilities(_SECONDS)
            kept = _KEPT
        except (ServerError, OSError):
            self._found, kept = {}, _KEPT_FAILURE
        self._until = time.monotonic() + kept


CHOICES = Choices()


def names_of(capabilities: dict[str, Any], kind: str) -> list[str]:
    """Returns the names in one list of a server's capabilities."""
    listed = capabilities.get(kind, [])
    return [one["name"] if isinstance(one, dict) else one for one in listed]


def widget(kind: str, tooltip: str, first: str | None = DEFAULT) -> tuple[Any, dict[str, Any]]:
    """Returns an input: a list of the server's names, or a text where no server answers.

    Args:
        kind: what is listed: "models", "samplers", "loras" or "controlnets".
        tooltip: what the input is for.
        first: a choice before all names, which is the default; None for none.
    """
    options = [*([first] if first else []), *CHOICES.names(kind)]
    about = {"default": options[0] if options else "", "tooltip": tooltip}
    if len(options) > bool(first):
        return options, about
    return "STRING", about


def given(name: str) -> str | None:
    """Returns a name that was chosen, or None for the default."""
    name = name.strip()
    return None if name in ("", DEFAULT) else name
