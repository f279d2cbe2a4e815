"""Lowers an operation as is best for the platform of the program, or in the plain form."""

import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, SingleDeviceSharding

from diffusax.runtime.devices.chips import CARDS, CHANNELS_LAST, capability_of

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
"""JAX's names of the platforms that lowerings are chosen for."""

OPTIONS: dict[str, dict[str, str | bool]] = {
    "cpu": {
        "xla_cpu_experimental_ynn_fusion_type": (
            "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT,LIBRARY_FUSION_TYPE_REDUCE"
        ),
        "xla_cpu_copy_insertion_use_region_analysis": True,
    },
    "gpu": {"xla_gpu_enable_triton_gemm": False},
}
"""XLA's options by JAX's name of a platform.

On CPUs the library YNNPACK computes products and sums. By XLA's own choice it also computes some
convolutions, which XLA's own code does sooner, and what comes after products, for which XLA first
writes each number of an activation to memory as often as it is used. The other option spares
training's steps a copy of all parameters and averages before they are changed in place.

On GPUs products are cuBLAS's, which add a bias and a residual. XLA's own kernels of products do
not inside a sampler's loop, where each such sum is a kernel of its own; and XLA compiles tens of
tilings for each of them, to time them on the device.
"""

_STREAMING: dict[str, dict[str, str | bool]] = {
    "gpu": {"xla_gpu_enable_latency_hiding_scheduler": True}
}
"""Further options of programs that copy parameters while they compute. Without this one cards
before Hopper wait for each copy."""

_CHANNELS_LAST: dict[str, str | bool] = {"xla_gpu_force_conv_nhwc": True}
"""Further options for NVIDIA's cards from Ampere on, where XLA convolves images b h w c anyway.
Without this one it would convolve videos b c f h w, for which it copies maps and kernels."""

# JAX keeps what it traces by the values of these, too.
_PLATFORM: Any = jax.make_user_context(None)
_PLAIN: Any = jax.make_user_context(False)
_INT8: Any = jax.make_user_context(None)
_REMATERIALIZED: Any = jax.make_user_context(False)
_BACKWARD: Any = jax.make_user_context(False)

Int8Activations = Literal["auto", "on", "off"]
"""See `int8_activations`."""


def by_platform(
    choose: Callable[[str], str], lowerings: Mapping[str, Callable[..., Any]], *args: Any
) -> Any:
    """Computes an operation by the lowering chosen for the platform of the program.

    Inside `lowering_for` it is known. A function that a user traces may be lowered for any, or for
    several: there all lowerings on which platforms differ are traced, and one is lowered for each.

    Args:
        choose: returns the name of the lowering for one of `PLATFORMS`; others lower like "rocm".
        lowerings: the lowerings by name.
        *args: the arrays that the lowering takes.
    """
    known = _PLATFORM.value
    if known is not None:
        return lowerings[choose(known if known in PLATFORMS else "rocm")](*args)
    names = {platform: choose(platform) for platform in PLATFORMS}
    default = names.pop("rocm")
    others = {p: lowerings[name] for p, name in names.items() if name != default}
    if not others:
        return lowerings[default](*args)
    return jax.lax.platform_dependent(*args, default=lowerings[default], **others)


_BARRIERS: Mapping[str, Callable[..., Any]] = {
    "barrier": jax.lax.optimization_barrier,
    "none": lambda x: x,
}


def barrier_on(platform: str, x: Any) -> Any:
    """Keeps XLA, on one platform, from merging what makes arrays with what reads them."""
    if is_plain():
        return x
    return by_platform(lambda p: "barrier" if p == platform else "none", _BARRIERS, x)


def lowering_for(platforms: Sequence[str]) -> contextlib.AbstractContextManager[None]:
    """Traces functions for these platforms inside the context, and for no others.

    What is traced inside must be lowered for them alone.
    """
    return _PLATFORM(platforms[0] if len(platforms) == 1 else None)


def lowering_platforms(mesh: Mesh | None) -> tuple[str]:
    """Returns the platform of a mesh's devices, as `jax.stages.Traced.lower` takes it.

    Without a mesh it is that on which JAX computes by default.
    """
    return (platform_of(_default_device() if mesh is None else mesh.devices.flat[0]),)


def platform_of(device: Any) -> str:
    """Returns JAX's name of a device's platform, for lowering: "cuda" or "rocm" for GPUs."""
    name: str = device.platform
    return name if name != "gpu" else "rocm" if capability_of(device) is None else "cuda"


def platform_for(arrays: Iterable[Any]) -> str:
    """Returns the platform on which JAX runs a program of these arrays, or of their shapes."""
    for x in arrays:
        sharding = getattr(x, "sharding", None)
        # Arrays that are on their device by default go where the others are.
        if sharding is not None and getattr(x, "committed", True):
            return platform_of(next(iter(sharding.device_set)))
    mesh = jax.sharding.get_mesh()
    return platform_of(_default_device() if mesh.empty else mesh.devices.flat[0])


def _default_device() -> Any:
    chosen = jax.config.jax_default_device  # type: ignore[attr-defined]
    if chosen is None or isinstance(chosen, str):
        return jax.local_devices(backend=chosen)[0]
    return chosen


def known_platform() -> str | None:
    """Returns the platform that a program is traced for; None where it may be any."""
    return _PLATFORM.value  # type: ignore[no-any-return]


def device_kinds() -> set[str]:
    """Returns JAX's names of the devices that a program is traced for.

    They are those of the mesh in `jax.set_mesh`, which may be elsewhere, or else this process's.
    """
    mesh_device = jax.sharding.get_abstract_mesh().abstract_device
    if mesh_device is not None:
        return {mesh_device.device_kind}
    return {d.device_kind for d in jax.local_devices()}


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


def plain_lowerings() -> contextlib.AbstractContextManager[None]:
    """Traces convolutions and attention in their plain form inside the context."""
    return _PLAIN(True)


def is_plain() -> bool:
    """Returns whether the code runs inside `plain_lowerings`."""
    return _PLAIN.value


def rematerialization() -> contextlib.AbstractContextManager[None]:
    """Traces inside the context what gradients compute again, to keep little of it."""
    return _REMATERIALIZED(True)


def is_rematerialized() -> bool:
    """Returns whether the code runs inside `rematerialization`."""
    return _REMATERIALIZED.value


def backward_alone() -> contextlib.AbstractContextManager[None]:
    """Traces inside the context what is differentiated backwards alone, as in training.

    Operations may have gradients of their own there, which exclude `jax.jvp`.
    """
    return _BACKWARD(True)


def is_backward_alone() -> bool:
    """Returns whether the code runs inside `backward_alone`."""
    return _BACKWARD.value


def int8_activations(choice: Int8Activations) -> contextlib.AbstractContextManager[None]:
    """Says inside the context whether layers with int8 kernels round what they multiply, too.

    Products of integers are faster on some devices, and round each token to the nearest of 255
    numbers. The variable DIFFUSAX_INT8_ACTIVATIONS says it for what is outside of such contexts;
    without it, it is "auto". A context holds for its own thread.

    Args:
        choice: "auto" for where the compilers' estimates say that it is faster; "on" for all layers
            whose kernels are int8, on all devices; "off" for none, so that the results are those of
            the kernels multiplied out.

    Raises:
        ValueError: choice is none of these.
    """
    return _INT8(_int8_choice("choice", choice))


def int8_choice() -> Int8Activations:
    """Returns what holds here, see `int8_activations`.

    Raises:
        ValueError: the variable says something else.
    """
    name = "DIFFUSAX_INT8_ACTIVATIONS"
    chosen: Int8Activations | None = _INT8.value
    return chosen or _int8_choice(name, os.environ.get(name, "auto"))


def _int8_choice(name: str, choice: Any) -> Int8Activations:
    if choice not in ("auto", "on", "off"):
        raise ValueError(f"{name} must be 'auto', 'on' or 'off' (got {choice!r})")
    return choice  # type: ignore[no-any-return]


def compiler_options(mesh: Mesh | None = None, *, streams: bool = False) -> dict[str, str | bool]:
    """Returns XLA's options for the devices of a mesh, by default those of this process.

    An option that the variable XLA_FLAGS has is the user's.

    streams: whether the program copies parameters from the host's memory while it computes.
    """
    device = jax.local_devices()[0] if mesh is None else mesh.devices.flat[0]
    platform, flags = device.platform, os.environ.get("XLA_FLAGS", "")
    wanted = {**OPTIONS.get(platform, {}), **(_STREAMING.get(platform, {}) if streams else {})}
    if (capability_of(device) or (0, 0)) >= CHANNELS_LAST:
        wanted |= _CHANNELS_LAST
    chosen = {name: on for name, on in wanted.items() if name not in flags}
    return {name: on for name, on in chosen.items() if platform != "cpu" or _is_known(name, on)}


@functools.cache
def _is_known(name: str, value: str | bool) -> bool:
    """Returns whether this XLA knows an option for CPUs, of which some are experimental."""
    device = jax.local_devices(backend="cpu")[0]
    nothing = jax.ShapeDtypeStruct((), jnp.int32, sharding=SingleDeviceSharding(device))
    try:
        # It may be asked for the first time inside of a mesh of other devices.
        with jax.set_mesh(Mesh(np.array([device]), ("data",))):
            jax.jit(lambda x: x).lower(nothing).compile({name: value})
    except jax.errors.JaxRuntimeError:
        return False
    return True
