"""Floating-point operations of a function, counted in its jaxpr."""

import math
from collections.abc import Callable
from typing import Any

import jax


def count_flops(function: Callable[..., Any], *args: Any) -> int:
    """Multiplications and additions of the products and convolutions, at the shapes of `args`.

    Loops with a fixed number of rounds count each round, unlike XLA's cost analysis. What a
    convolution was lowered to is what counts.
    """
    return _flops(jax.make_jaxpr(function)(*args).jaxpr)


def _flops(jaxpr: Any) -> int:
    total = 0
    for eqn in jaxpr.eqns:
        match eqn.primitive.name:
            case "dot_general":
                (contracted, _), _ = eqn.params["dimension_numbers"]
                lhs = eqn.invars[0].aval.shape
                depth = math.prod(lhs[i] for i in contracted)
                total += 2 * depth * math.prod(eqn.outvars[0].aval.shape)
            case "conv_general_dilated":
                kernel = eqn.invars[1].aval.shape
                out_feature = eqn.params["dimension_numbers"].rhs_spec[0]
                depth = math.prod(kernel) // kernel[out_feature]
                total += 2 * depth * math.prod(eqn.outvars[0].aval.shape)
            case "scan":
                total += eqn.params["length"] * _flops(eqn.params["jaxpr"].jaxpr)
            case "cond":
                total += max(_flops(branch.jaxpr) for branch in eqn.params["branches"])
            case _:
                total += sum(_flops(inner) for inner in _inner(eqn.params.values()))
    return total


def _inner(values: Any) -> list[Any]:
    jaxprs = (getattr(value, "jaxpr", value) for value in values)
    return [jaxpr for jaxpr in jaxprs if hasattr(jaxpr, "eqns")]
