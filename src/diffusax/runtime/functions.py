"""A caller's functions as arguments of compiled programs: trees whose leaves are their numbers."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from diffusax.boundary.convert import shortened


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class FixedFunction:
    """A function without numbers, on which programs are specialised."""

    function: Callable[..., Any]

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)


def function_tree(name: str, arguments: str, given: Any, leaf: Callable[[Any], Any]) -> Any:
    """Returns a caller's function as a tree whose leaves are its numbers.

    Args:
        name: what the function is called in errors.
        arguments: the names of its arguments, for errors.
        given: a function; or an instance of a class with a `__call__` that is registered with JAX
            as a tree (`jax.tree_util.Partial`, or by `jax.tree_util.register_dataclass`), whose
            leaves are data, so that other numbers compile nothing.
        leaf: converts a leaf; what it cannot convert is a TypeError or ValueError.

    Raises:
        ValueError: it cannot be called or hashed, or a leaf is not a number.
    """
    if not callable(given) or isinstance(given, type):
        raise ValueError(
            f"{name} must be a function of {arguments}, or an object with such a __call__ "
            f"(got {shortened(given)})"
        )
    if jax.tree_util.all_leaves([given]):
        if getattr(given, "__hash__", None) is None:
            raise ValueError(
                f"{name} must be hashable or registered with jax.tree_util.register_dataclass (got "
                f"{shortened(given)})"
            )
        return FixedFunction(given)
    try:
        return jax.tree.map(leaf, given)
    except (TypeError, ValueError):
        raise ValueError(
            f"{name} must have numbers as leaves (got {shortened(given)}); declare other fields as "
            "meta_fields of jax.tree_util.register_dataclass"
        ) from None
