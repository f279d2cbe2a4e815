"""Imports torch and torchax, also in versions that do not fit each other yet."""

import contextlib
import importlib
import importlib.metadata
from collections.abc import Iterator
from typing import Any
from unittest import mock

from diffusax.boundary.messages import require_extra

_BROKEN_TORCHAX = "0.0.13"
"""The last torchax that names overloads which torch has removed."""


def torchax_module(name: str) -> Any:
    """Imports a module of torchax, such as "tensor".

    Raises:
        ImportError: torch or torchax is not installed; names the extra that brings them.
    """
    _require_torchax()
    return importlib.import_module(f"torchax.{name}")


def _require_torchax() -> None:
    torch = require_extra("torch", "torch")
    with _dropped_overloads(torch):
        require_extra("torchax", "torch")
        # torchax itself imports these later.
        importlib.import_module("torchax.decompositions")


@contextlib.contextmanager
def _dropped_overloads(torch: Any) -> Iterator[None]:
    """Adds placeholders for torch's named-tensor overloads while torchax is imported.

    torch 2.13 dropped the overloads `dimname` and `names_*` of its operators. torchax up to 0.0.13
    lists them in amp.py and decompositions.py, where they are only keys; commit d1a9349 of
    google/torchax removed them, in the release after. Nothing is done for other versions.
    """
    if not needs_dropped_overloads(torch.__version__, _installed("torchax")):
        yield
        return
    packet = type(torch.ops.aten.add)
    found = packet.__getattr__

    def answer(self: Any, name: str) -> Any:
        try:
            return found(self, name)
        except AttributeError:
            if "dimname" in name.lower() or "names" in name.split("_"):
                return _DroppedOverload()
            raise

    with mock.patch.object(packet, "__getattr__", answer):
        yield


class _DroppedOverload:
    """A placeholder for an overload that is never called."""


def needs_dropped_overloads(torch: str, torchax: str | None) -> bool:
    return (
        torchax is not None
        and _release(torchax) <= _release(_BROKEN_TORCHAX)
        and _release(torch) >= (2, 13)
    )


def _release(version: str) -> tuple[int, ...]:
    """Returns the leading numbers of a version: (2, 13, 0) of 2.13.0+cpu."""
    numbers = []
    for part in version.split("+")[0].split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
