"""Takes PyTorch's tensors where arrays are asked for, and gives tensors back, without importing it.

A program that holds tensors has imported PyTorch itself.
"""

from typing import Any

import numpy as np


def as_numpy(value: Any) -> np.ndarray:
    """Converts an array or PyTorch tensor to NumPy; dtypes that NumPy lacks become float32."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = value.float() if value.is_floating_point() else value
    return np.asarray(value)
