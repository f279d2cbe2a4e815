"""Parameters of networks here that are those of a module of PyTorch, for comparisons of both."""

from typing import Any

import numpy as np

from diffusax.checkpoints.tree import fit_params


class _Held:
    """A tensor in memory as `fit_params` takes it."""

    def __init__(self, path: str, array: np.ndarray):
        self.path, self.array = path, array
        self.dtype, self.shape = array.dtype, array.shape


def params_of(network: Any, module: Any) -> Any:
    """The parameters of a network from a module with tensors of the same names."""
    tensors = {name: _Held(name, x.numpy()) for name, x in module.state_dict().items()}
    read, shapes = (lambda tensor, *_: [tensor.array]), network.shapes
    return fit_params(network.module_class, shapes, [tensors], read, where="the module")


def assert_close(actual: np.ndarray, expected: np.ndarray, tolerance: float = 1e-5) -> None:
    """Asserts that no number differs by more than a fraction of the largest one."""
    assert np.abs(actual - expected).max() <= tolerance * np.abs(expected).max()
