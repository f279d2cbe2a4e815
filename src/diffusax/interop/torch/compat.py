"""Holds the private and undocumented names of PyTorch and its libraries, each in a function.

Each says why no public name does. All were tried with torch 2.13.0, torchax 0.0.13, diffusers
0.42.1 and accelerate 1.15, but where another version is named; "read in" are versions whose sources
have the name, but that were not run. tests/runtime/test_compat.py tries them all, so that a new
version that lacks one fails there.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from diffusax.interop.torch.importing import torchax_module

# torchax documents nothing of its tensors and of what it has for operations; read in 0.0.14.
Tensor: Any = torchax_module("tensor").Tensor
"""An array of JAX as a tensor."""
View: Any = torchax_module("view").View
"""A slice of one, which is written through."""
NarrowInfo: Any = torchax_module("view").NarrowInfo
"""Which slice."""
OperatorNotFound: Any = torchax_module("tensor").OperatorNotFound
"""The error for an operation that it does not have."""


_Environment: Any = torchax_module("tensor").Environment


class Environment(_Environment):
    """Is torchax's environment, and asks where casts to another dtype shall go.

    Casts have no public hook of their own.
    """

    def _to_copy(self, the_tensor: Any, new_dtype: Any, new_device: Any) -> Any:
        device = self.cast_device(the_tensor, new_device)
        return super()._to_copy(the_tensor, new_dtype, device)

    def cast_device(self, tensor: Any, device: Any) -> Any:
        """Says where a tensor goes that is moved to a device, or cast (None)."""
        return device

    def register(self, function: Any, implementation: Callable[..., Any], takes_jax: bool) -> None:
        """Lets an operation be computed by a function of arrays, or else of tensors, in place.

        torchax's public registration changes all environments of the process.
        """
        operator = torchax_module("ops.ops_registry").Operator
        self._ops[function] = operator(
            function, implementation, takes_jax, True, False, not takes_jax
        )

    def dispatching(self) -> Any:
        """Gives a context in which ATen's operations, and not PyTorch's functions, come here.

        Entering the environment, which is public, takes both.
        """
        return self._dispatch_mode


def environment_of(tensor: Any) -> Any:
    """Gives the environment of a tensor of torchax; no public name tells."""
    return tensor._env


def torchax_convolution(*args: Any) -> Any:
    """Computes aten::convolution of arrays as torchax does, in public only of tensors."""
    return torchax_module("ops.jaten")._aten_convolution(*args)


UNSAFE_INDEX_PUT = torch.ops.aten._unsafe_index_put
"""What compiled decompositions call for index_put; public only inside ATen's own lists."""


@contextlib.contextmanager
def on_host() -> Iterator[None]:
    """Inside, PyTorch computes by itself, past all modes and classes of tensors.

    No public name switches both off.
    """
    with torch._C.DisableTorchFunction(), torch.utils._mode_utils.no_dispatch():
        yield


def plain_tensors() -> Any:
    """Gives a context in which classes of tensors are taken for plain ones.

    PyTorch documents it under this private name ("Extending PyTorch").
    """
    return torch._C.DisableTorchFunctionSubclass()


def tree_leaves(tree: Any) -> list[Any]:
    """Lists the leaves of a tree with PyTorch's named results, which JAX's public trees lack."""
    return torch.utils._pytree.tree_leaves(tree)


def map_leaves(kind: Any, function: Callable[[Any], Any], tree: Any) -> Any:
    """Replaces the leaves of a class in a tree, see `tree_leaves`, by what a function makes."""
    return torch.utils._pytree.tree_map_only(kind, function, tree)


def writes_in_place(operation: Any) -> bool:
    """Tells whether an operation of ATen changes its arguments; no public name does."""
    return isinstance(operation, torch._ops.OpOverload) and operation._schema.is_mutable


def is_view(operation: Any) -> bool:
    """Tells whether an operation of ATen gives views of its arguments; undocumented."""
    return getattr(operation, "is_view", False)


def version_of(tensor: torch.Tensor) -> int:
    """Tells how often a tensor was written to; no public name does."""
    return tensor._version


def parameters_of(part: torch.nn.Module) -> dict[str, Any]:
    """Gives a module's own parameters as it holds them, so that who keeps this sees new ones.

    The public named_parameters goes through all parts anew, which takes milliseconds.
    """
    return part._parameters


def forward_hooks(part: torch.nn.Module) -> dict[int, Callable[..., Any]]:
    """Gives the hooks that follow a module's forward; in public they can only be added."""
    return part._forward_hooks


def forward_pre_hooks(part: torch.nn.Module) -> dict[int, Callable[..., Any]]:
    """Gives the hooks that precede a module's forward; see `forward_hooks`."""
    return part._forward_pre_hooks


def all_hooks(part: torch.nn.Module) -> dict[str, dict[Any, Any]]:
    """Gives all of a module's tables of hooks, by attribute; see `forward_hooks`."""
    return {n: x for n, x in vars(part).items() if "_hooks" in n and isinstance(x, dict)}


MODULE_ATTRIBUTES = frozenset(vars(torch.nn.Module())) - {
    "training",
    "_forward_hooks",
    "_forward_pre_hooks",
}
"""What every module has that changes nothing of what it computes; no public name lists it."""


def uncompiled(module: torch.nn.Module) -> torch.nn.Module:
    """Gives the module that torch.compile was given; no public name does."""
    return getattr(module, "_orig_mod", module)


def has_accelerate_hook(part: torch.nn.Module) -> bool:
    """Tells whether accelerate wraps a module's forward, to move tensors; no public name does."""
    return "_hf_hook" in vars(part)


def progress_bar_options(pipe: Any) -> dict[str, Any]:
    """Gives what diffusers' `set_progress_bar_config` was given, which only sets."""
    return dict(getattr(pipe, "_progress_bar_config", {}))
