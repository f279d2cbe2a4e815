"""Holds the private and undocumented names of PyTorch and its libraries, each in a function.

Each docstring says why no public name is used. All were tried with torch 2.13.0, torchax 0.0.13,
diffusers 0.42.1 and accelerate 1.15, except where another version is named; "read in" names
versions whose sources have the name, but that were not run. tests/runtime/test_compat.py tries them
all, so that a new version that lacks one fails there.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from diffusax.interop.torch.importing import torchax_module

# torchax documents nothing of its tensors and of what it has for operations; read in 0.0.14.
Tensor: Any = torchax_module("tensor").Tensor
"""The class of tensors that hold an array of JAX."""
View: Any = torchax_module("view").View
"""The class of slices of such tensors, which pass writes on to them."""
NarrowInfo: Any = torchax_module("view").NarrowInfo
"""The class that describes a slice."""
OperatorNotFound: Any = torchax_module("tensor").OperatorNotFound
"""The error for an operation that torchax does not have."""


_Environment: Any = torchax_module("tensor").Environment


class Environment(_Environment):
    """torchax's environment, with a method that decides where moved or cast tensors go.

    torchax has no public hook for casts.
    """

    def _to_copy(self, the_tensor: Any, new_dtype: Any, new_device: Any) -> Any:
        device = self.cast_device(the_tensor, new_device)
        return super()._to_copy(the_tensor, new_dtype, device)

    def cast_device(self, tensor: Any, device: Any) -> Any:
        """Returns the device of a tensor that is moved to a device, or cast (None)."""
        return device

    def register(self, function: Any, implementation: Callable[..., Any], takes_jax: bool) -> None:
        """Registers a function as the implementation of an operation.

        takes_jax: whether it takes and returns arrays; otherwise it takes tensors and may change
        them in place. torchax's public registration changes all environments of the process.
        """
        operator = torchax_module("ops.ops_registry").Operator
        self._ops[function] = operator(
            function, implementation, takes_jax, True, False, not takes_jax
        )

    def dispatching(self) -> Any:
        """Returns a context that dispatches ATen's operations, and not PyTorch's functions.

        Entering the environment, which is public, dispatches both.
        """
        return self._dispatch_mode


def environment_of(tensor: Any) -> Any:
    """Returns the environment of a tensor of torchax; there is no public name for it."""
    return tensor._env


def torchax_convolution(*args: Any) -> Any:
    """Computes aten::convolution of arrays as torchax does; its public form takes only tensors."""
    return torchax_module("ops.jaten")._aten_convolution(*args)


UNSAFE_INDEX_PUT = torch.ops.aten._unsafe_index_put
"""The operation that compiled decompositions call for index_put; it is public only in ATen."""


@contextlib.contextmanager
def on_host() -> Iterator[None]:
    """Makes PyTorch compute by itself, inside the context, without any modes or tensor classes.

    No public name switches both off.
    """
    with torch._C.DisableTorchFunction(), torch.utils._mode_utils.no_dispatch():
        yield


def plain_tensors() -> Any:
    """Returns a context in which tensors of subclasses are taken for plain ones.

    PyTorch documents it under this private name ("Extending PyTorch").
    """
    return torch._C.DisableTorchFunctionSubclass()


def tree_leaves(tree: Any) -> list[Any]:
    """Returns the leaves of a tree with PyTorch's named results, which JAX's public trees lack."""
    return torch.utils._pytree.tree_leaves(tree)


def map_leaves(kind: Any, function: Callable[[Any], Any], tree: Any) -> Any:
    """Replaces the leaves of a class in a tree by the results of a function; see `tree_leaves`."""
    return torch.utils._pytree.tree_map_only(kind, function, tree)


def writes_in_place(operation: Any) -> bool:
    """Returns whether an operation of ATen changes its arguments; no public name says so."""
    return isinstance(operation, torch._ops.OpOverload) and operation._schema.is_mutable


def is_view(operation: Any) -> bool:
    """Returns whether an operation of ATen returns views of its arguments; undocumented."""
    return getattr(operation, "is_view", False)


def version_of(tensor: torch.Tensor) -> int:
    """Returns the number of writes to a tensor; no public name has it."""
    return tensor._version


def parameters_of(part: torch.nn.Module) -> dict[str, Any]:
    """Returns a module's own dictionary of parameters, in which replaced parameters appear.

    The public named_parameters goes through all parts anew, which takes milliseconds.
    """
    return part._parameters


def forward_hooks(part: torch.nn.Module) -> dict[int, Callable[..., Any]]:
    """Returns the hooks that follow a module's forward; publicly they can only be added."""
    return part._forward_hooks


def forward_pre_hooks(part: torch.nn.Module) -> dict[int, Callable[..., Any]]:
    """Returns the hooks that precede a module's forward; see `forward_hooks`."""
    return part._forward_pre_hooks


def all_hooks(part: torch.nn.Module) -> dict[str, dict[Any, Any]]:
    """Returns all of a module's tables of hooks, by attribute; see `forward_hooks`."""
    return {n: x for n, x in vars(part).items() if "_hooks" in n and isinstance(x, dict)}


MODULE_ATTRIBUTES = frozenset(vars(torch.nn.Module())) - {
    "training",
    "_forward_hooks",
    "_forward_pre_hooks",
}
"""The attributes of every module that do not affect its results; no public name lists them."""


def uncompiled(module: torch.nn.Module) -> torch.nn.Module:
    """Returns the module that torch.compile was given; no public name has it."""
    return getattr(module, "_orig_mod", module)


def has_accelerate_hook(part: torch.nn.Module) -> bool:
    """Returns whether accelerate wraps a module's forward to move tensors; no public name does."""
    return "_hf_hook" in vars(part)


def progress_bar_options(pipe: Any) -> dict[str, Any]:
    """Returns the options that diffusers' `set_progress_bar_config` was given, which only sets."""
    return dict(getattr(pipe, "_progress_bar_config", {}))
