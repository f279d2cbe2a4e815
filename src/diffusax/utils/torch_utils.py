"""Random numbers as diffusers' `randn_tensor` draws them."""

import gc
import sys
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from diffusax.boundary.tensors import as_tensor, wants_tensors
from diffusax.models.network import floating_dtype
from diffusax.runtime.random.noise import draw_like


def randn_tensor(
    shape: Sequence[int],
    generator: Any = None,
    device: Any = None,
    dtype: Any = None,
    layout: Any = None,
) -> Any:
    """Draws standard normal numbers, as diffusers' function of this name.

    Args:
        shape: the shape.
        generator: a torch.Generator, a seed for PyTorch's numbers of it, or a list with one for
            each entry of the first axis; or a key of `jax.random`. Without one the numbers are
            PyTorch's next ones where the dtype or device is PyTorch's, and else of a seed from the
            system.
        device: PyTorch's device of a tensor; JAX's arrays lie on the default device.
        dtype: the dtype, by default float32.
        layout: accepted, as diffusers' argument; arrays have one layout.

    Returns:
        A tensor of PyTorch where generator, dtype or device is PyTorch's, or the program works with
        PyTorch; and else an array of JAX.

    Raises:
        ValueError: generator is none of these, or a list of another length.
    """
    shape = tuple(int(n) for n in shape)
    if any(map(_is_pytorchs, (dtype, device, *_listed(generator)))):
        return _tensor(shape, generator, device, dtype)
    if isinstance(generator, list | tuple) and len(generator) == 1:
        generator = generator[0]
    tensors = wants_tensors(None)
    if tensors and generator is None:
        return _tensor(shape, None, None, None)
    numbers = draw_like(np.broadcast_to(np.float32(0), shape), generator)
    found = jnp.asarray(numbers, floating_dtype(dtype) or np.float32)
    return as_tensor(found) if tensors else found


def is_compiled_module(module: Any) -> bool:
    """Returns False: models are no modules that `torch.compile` has wrapped."""
    return False


def empty_device_cache(device_type: Any = None) -> None:
    """Frees what nothing refers to any more, as XLA gives its memory to the next program."""
    gc.collect()


def _tensor(shape: tuple[int, ...], generator: Any, device: Any, dtype: Any) -> Any:
    torch: Any = sys.modules["torch"]
    sources = _listed(generator)
    place = getattr(sources[0], "device", None) or device
    if len(sources) < 2:
        drawn = torch.randn(shape, generator=sources[0], device=place, dtype=dtype)
        return drawn.to(device)
    one = (1, *shape[1:])
    parts = [torch.randn(one, generator=g, device=place, dtype=dtype) for g in sources[: shape[0]]]
    return torch.cat(parts).to(device)


def _listed(generator: Any) -> list[Any]:
    return list(generator) if isinstance(generator, list | tuple) else [generator]


def _is_pytorchs(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] == "torch"
