"""Converts tensors of PyTorch to arrays of NumPy and JAX, and back."""

from typing import Any

import jax
import ml_dtypes
import numpy as np
import torch

# NumPy has no names of its own for these; the bits are read as integers of the same size.
_BITS = {
    torch.bfloat16: (torch.int16, ml_dtypes.bfloat16),
    torch.float8_e4m3fn: (torch.uint8, ml_dtypes.float8_e4m3fn),
    torch.float8_e5m2: (torch.uint8, ml_dtypes.float8_e5m2),
}
_FROM_BITS = {np.dtype(dtype): (bits, name) for name, (bits, dtype) in _BITS.items()}
_INTEGERS = {torch.int16: np.int16, torch.uint8: np.uint8}


def to_array(value: Any) -> np.ndarray:
    """Converts a tensor to an array on the host, which shares its memory where that is possible."""
    if not isinstance(value, torch.Tensor):
        return np.asarray(value)
    value = value.detach().resolve_conj().cpu().contiguous()
    if value.dtype in _BITS:
        bits, dtype = _BITS[value.dtype]
        return np.asarray(value.view(bits).numpy().view(dtype))
    return np.asarray(value.numpy())


def to_tensor(array: Any) -> torch.Tensor:
    """Copies an array to a tensor on the host.

    Integers of 32 bits become PyTorch's 64, since JAX shortens them by default.
    """
    found = np.array(array)
    if found.dtype in _FROM_BITS:
        bits, dtype = _FROM_BITS[found.dtype]
        return torch.from_numpy(found.view(_INTEGERS[bits])).view(dtype)
    if found.dtype == np.int32 and not jax.config.read("jax_enable_x64"):
        found = found.astype(np.int64)
    return torch.from_numpy(found)
