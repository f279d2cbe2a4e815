"""Counts the floating-point operations of a function in its jaxpr, and the bytes that they need.

A convolution counts by its definition, not by Winograd's algorithm or another lowering, so that
rates on different platforms are comparable. Only products and convolutions are counted.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from diffusax.runtime.compat import scan_sizes
from diffusax.runtime.devices.lowering import plain_lowerings

_CALLS = frozenset(["jaxpr", "call_jaxpr", "fun_jaxpr"])


class Work(NamedTuple):
    """What products and convolutions do, if each reads its factors and writes its result once."""

    operations: int = 0
    """Multiplications and additions."""
    kernels: int = 0
    """The bytes of weights that are read, and of their gradients that are written."""
    maps: int = 0
    """The bytes of all else. Attention's scores are not written."""

    def times(self, count: int) -> "Work":
        """Returns that of so many rounds."""
        return Work(*(count * own for own in self))

    def plus(self, other: "Work") -> "Work":
        """Returns that of both."""
        return Work(*map(sum, zip(self, other)))


def count_flops(function: Callable[..., Any], *args: Any) -> int:
    """Counts the multiplications and additions of one call. args: arrays or shapes.

    Loops with a fixed number of rounds count each round, unlike XLA's cost analysis; other loops
    count one.
    """
    return count_work(function, *args).operations


def count_training_flops(function: Callable[..., Any], *args: Any) -> int:
    """Counts those of the call and of the gradient with respect to its first argument.

    A product needs another one for the gradient of each factor that depends on that argument, so a
    frozen network before the trained one counts once, a trained one three times. What is computed
    a second time to save memory does not count.
    """
    return count_work(function, *args, trained=True).operations


def count_work(function: Callable[..., Any], *args: Any, trained: bool = False) -> Work:
    """Counts operations and bytes.

    trained: whether to count as `count_training_flops`, otherwise as `count_flops`.
    """
    with plain_lowerings():
        # A new function, so that JAX does not return an earlier trace.
        jaxpr = jax.make_jaxpr(lambda *args: function(*args))(*args).jaxpr
    first = len(jax.tree.leaves(args[0])) if trained else 0
    return _walk(jaxpr, [i < first for i in range(len(jaxpr.invars))])[0]


def _walk(jaxpr: Any, varies: Sequence[bool]) -> tuple[Work, list[bool]]:
    """Returns the work, and which results depend on the inputs that vary."""
    known = dict(zip(jaxpr.invars, varies))
    total = Work()
    for eqn in jaxpr.eqns:
        inputs = [not hasattr(x, "val") and known.get(x, False) for x in eqn.invars]
        count, outputs = _equation(eqn, inputs)
        total = total.plus(count)
        known.update(zip(eqn.outvars, outputs))
    return total, [not hasattr(x, "val") and known.get(x, False) for x in jaxpr.outvars]


def _equation(eqn: Any, inputs: list[bool]) -> tuple[Work, list[bool]]:
    params = eqn.params
    varies = [any(inputs)] * len(eqn.outvars)
    match eqn.primitive.name:
        case "dot_general":
            (contracted, _), _ = params["dimension_numbers"]
            depth = math.prod(eqn.invars[0].aval.shape[i] for i in contracted)
        case "conv_general_dilated":
            kernel = eqn.invars[1].aval.shape
            depth = math.prod(kernel) // kernel[params["dimension_numbers"].rhs_spec[0]]
        case "stop_gradient":
            return Work(), [False] * len(eqn.outvars)
        case "scan":
            return _scan(params, inputs)
        case "cond":
            results = [_walk(_opened(branch), inputs[1:]) for branch in params["branches"]]
            outputs = [any(column) for column in zip(*(r[1] for r in results))]
            return max((r[0] for r in results), key=lambda work: work.operations), outputs
        case _:
            return _call(params, inputs, varies)
    operations = 2 * depth * math.prod(eqn.outvars[0].aval.shape)
    # The gradient of each factor is a product, too, of the same sizes.
    return Work(operations, *_bytes(eqn)).times(1 + sum(inputs[:2])), varies


def _bytes(eqn: Any) -> tuple[int, int]:
    """Returns the bytes of a product's weights, and of its other factor and its result."""
    given, weights, result = (math.prod(x.aval.shape) for x in (*eqn.invars[:2], eqn.outvars[0]))
    # The result may be float32 until it is rounded.
    size = eqn.invars[0].aval.dtype.itemsize
    if eqn.primitive.name == "dot_general" and eqn.params["dimension_numbers"][1][0]:
        # A product of the heads of attention: the largest are scores.
        return 0, size * (given + weights + result - max(given, weights, result))
    return size * weights, size * (given + result)


def _scan(params: dict[str, Any], inputs: list[bool]) -> tuple[Work, list[bool]]:
    consts, carried = scan_sizes(params, len(inputs))
    body = _opened(params["jaxpr"])
    while True:
        count, outputs = _walk(body, inputs)
        carry = slice(consts, consts + carried)
        merged = [a or b for a, b in zip(inputs[carry], outputs[:carried])]
        if merged == inputs[carry]:
            return count.times(params["length"]), outputs
        inputs = [*inputs[:consts], *merged, *inputs[consts + carried :]]


def _opened(jaxpr: Any) -> Any:
    """Returns a jaxpr without its constants; JAX 0.12 has no other ones."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def _call(
    params: dict[str, Any], inputs: list[bool], varies: list[bool]
) -> tuple[Work, list[bool]]:
    """Counts an equation that holds others: a function call, or a loop without a count."""
    inner = {name: _opened(value) for name, value in params.items()}
    inner = {name: value for name, value in inner.items() if hasattr(value, "eqns")}
    for name in _CALLS & set(inner):
        if len(inner[name].invars) == len(inputs):
            return _walk(inner[name], inputs)
    walked = (_walk(j, [any(inputs)] * len(j.invars))[0] for j in inner.values())
    return functools.reduce(Work.plus, walked, Work()), varies
