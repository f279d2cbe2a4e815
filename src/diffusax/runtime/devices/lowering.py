"""Lowers an operation as is best for the platform of the program, or in the plain form."""

import contextlib
import contextvars
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from diffusax.runtime.devices.chips import CARDS, capability_of

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


OPTIONS: dict[str, dict[str, str | bool]] = {"gpu": {"xla_gpu_enable_triton_gemm": False}}
"""XLA's options by JAX's name of a platform.

On GPUs products are cuBLAS's, which add a bias and a residual. XLA's own kernels of products do
not inside a sampler's loop, where each such sum is a kernel of its own; and XLA compiles tens of
tilings for each of them, to time them on the device.
"""


def compiler_options(mesh: Mesh | None = None) -> dict[str, str | bool]:
    """Returns XLA's options for the devices of a mesh, by default those of this process.

    An option that the variable XLA_FLAGS has is the user's.
    """
    platform = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
    flags = os.environ.get("XLA_FLAGS", "")
    return {name: on for name, on in OPTIONS.get(platform, {}).items() if name not in flags}
