"""Lowers an operation as is best for the platform of the program, or in the plain form."""

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from diffusax.runtime.chips import CARDS, capability_of

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
"""JAX's names of the platforms that lowerings are chosen for."""

_PLAIN = contextvars.ContextVar("plain", default=False)


def by_platform(
    choose: Callable[[str], str], lowerings: Mapping[str, Callable[..., Any]], *args: Any
) -> Any:
    """Computes an operation by the lowering chosen for the platform of the program.

    That platform need not be this machine's: the same trace is exported to others. Where two
    platforms choose differently, all their lowerings are traced, and only one is lowered.

    Args:
        choose: returns the name of the lowering for one of `PLATFORMS`; others lower like "rocm".
        lowerings: the lowerings by name.
        *args: the arrays that the lowering takes.
    """
    names = {platform: choose(platform) for platform in PLATFORMS}
    default = names.pop("rocm")
    others = {p: lowerings[name] for p, name in names.items() if name != default}
    if not others:
        return lowerings[default](*args)
    return jax.lax.platform_dependent(*args, default=lowerings[default], **others)


def cuda_capability() -> tuple[int, int] | None:
    """Returns the least compute capability of the NVIDIA GPUs that a program is traced for.

    They are those of the mesh in `jax.set_mesh`, which may be elsewhere (`topology_mesh`), or else
    this process's. Returns None where they are not known, as for exports from other machines.
    """
    mesh_device = jax.sharding.get_abstract_mesh().abstract_device
    kind = None if mesh_device is None else mesh_device.device_kind
    here = [capability_of(d) for d in jax.local_devices() if kind in (None, d.device_kind)]
    elsewhere = [card.capability for card in CARDS.values() if card.kind == kind]
    return min((found for found in (*here, *elsewhere) if found is not None), default=None)


def known_sizes(shape: Sequence[Any]) -> tuple[int, ...]:
    """Returns a shape for choosing lowerings, with 2 for sizes that an export leaves open."""
    return tuple(n if isinstance(n, int) else 2 for n in shape)


@contextlib.contextmanager
def plain_lowerings() -> Iterator[None]:
    """Traces convolutions and attention in their plain form inside the context.

    It affects functions that are traced inside; what JAX has traced before keeps its form.
    """
    token = _PLAIN.set(True)
    try:
        yield
    finally:
        _PLAIN.reset(token)


def is_plain() -> bool:
    """Returns whether the code runs inside `plain_lowerings`."""
    return _PLAIN.get()
