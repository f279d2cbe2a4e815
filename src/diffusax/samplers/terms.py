"""Sums of a row's terms, in which the methods of samplers are written; only linear ones exist."""

import numbers
from typing import Any

import numpy as np

NAMES = ("X", "M1", "M2", "M3", "M4", "M5", "RAW", "P", "NOISE")
"""The terms: x, the memory slots, the raw prediction, that after conversion, and fresh noise."""


class NotLinearError(ValueError, TypeError):
    """A function of terms that is not linear in them, so that no row can hold it."""


class Terms:
    """A sum of terms times numbers, such as `X + 0.5 * (P - M1)`; its values come in a run.

    It can be added, subtracted, negated, and multiplied and divided by a number, in Python and by
    NumPy's functions. Anything else raises an error, because a row has coefficients alone: a
    function of the coefficients would be another one of the values.

    coefficients: 9, the numbers before the terms in the order of `NAMES`.
    """

    __slots__ = ("coefficients",)
    __hash__ = object.__hash__

    def __init__(self, coefficients: Any) -> None:
        values = np.asarray(coefficients, np.float64)
        if values.shape != (len(NAMES),):
            raise ValueError(
                f"coefficients must be {len(NAMES)} numbers, of {', '.join(NAMES)} (got shape "
                f"{values.shape})"
            )
        self.coefficients = values

    def __repr__(self) -> str:
        parts = [
            f"{value:g} {name}" for name, value in zip(NAMES, self.coefficients.tolist()) if value
        ]
        return " + ".join(parts) or "0"

    def __add__(self, other: Any) -> "Terms":
        return Terms(self.coefficients + _summand(other, "adding"))

    def __radd__(self, other: Any) -> "Terms":
        return self + other

    def __sub__(self, other: Any) -> "Terms":
        return Terms(self.coefficients - _summand(other, "subtracting"))

    def __rsub__(self, other: Any) -> "Terms":
        return Terms(_summand(other, "subtracting from") - self.coefficients)

    def __mul__(self, other: Any) -> "Terms":
        return Terms(self.coefficients * _number(other, "multiplying by"))

    def __rmul__(self, other: Any) -> "Terms":
        return self * other

    def __truediv__(self, other: Any) -> "Terms":
        return Terms(self.coefficients / np.float64(_number(other, "dividing by")))

    def __neg__(self) -> "Terms":
        return Terms(-self.coefficients)

    def __pos__(self) -> "Terms":
        return self

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> "Terms":
        operation = _OPERATIONS.get(ufunc)
        if operation is None or method != "__call__" or options:
            raise _not_linear(f"numpy.{ufunc.__name__}")
        first, *others = (self._whole(value) for value in inputs)
        result: Terms = operation(first, *others)
        return result

    def __array_function__(self, function: Any, types: Any, args: Any, options: Any) -> "Terms":
        if function is np.zeros_like and args == (self,) and not options:
            return 0 * self
        raise _not_linear(f"numpy.{function.__name__}")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(str(_not_linear(f".{name}")))

    @staticmethod
    def _whole(value: Any) -> Any:
        """Returns an array of coefficients as terms, and anything else as it is."""
        return Terms(value) if isinstance(value, np.ndarray) and value.ndim else value


def coefficients_of(value: Any) -> np.ndarray:
    """Returns the coefficients of terms, or an array as it is."""
    return value.coefficients if isinstance(value, Terms) else np.asarray(value)


def _summand(value: Any, verb: str) -> Any:
    """Returns what is added to coefficients.

    Raises:
        NotLinearError: it is neither terms nor zero.
    """
    if isinstance(value, Terms):
        return value.coefficients
    if isinstance(value, np.ndarray) and value.ndim:
        return Terms(value).coefficients
    if _is_number(value) and float(value) == 0:
        # `sum` begins with it.
        return 0.0
    raise _not_linear(f"{verb} {value!r}")


def _number(value: Any, verb: str) -> float:
    """Returns a factor; raises NotLinearError where it is no number."""
    if not _is_number(value):
        raise _not_linear(f"{verb} {value!r}")
    return float(value)


def _is_number(value: Any) -> bool:
    if isinstance(value, Terms | bool | np.bool):
        return False
    return isinstance(value, numbers.Real) or getattr(value, "shape", None) == ()


def _not_linear(what: str) -> NotLinearError:
    return NotLinearError(
        f"a row of a sampler holds sums of {', '.join(NAMES)} times numbers, and {what} makes no "
        "such sum; compute with numbers, and use +, -, * and / for the terms"
    )


def _refused(what: str) -> Any:
    def refuse(self: Terms, *_: Any) -> Any:
        raise _not_linear(what)

    return refuse


_OPERATIONS: dict[Any, Any] = {
    np.add: lambda a, b: a + b,
    np.subtract: lambda a, b: a - b if isinstance(a, Terms) else b.__rsub__(a),
    np.multiply: lambda a, b: a * b if isinstance(a, Terms) else b * a,
    np.true_divide: lambda a, b: a / b if isinstance(a, Terms) else b.__rtruediv__(a),
    np.negative: lambda a: -a,
    np.positive: lambda a: a,
}
_REFUSED = {
    "a comparison": "eq ne lt le gt ge",
    "a truth value": "bool",
    "a conversion to a number": "float int complex index",
    "a power": "pow rpow",
    "a division by terms": "rtruediv",
    "a remainder or a whole division": "mod rmod floordiv rfloordiv divmod rdivmod",
    "a matrix product": "matmul rmatmul",
    "a magnitude": "abs",
    "rounding": "round floor ceil trunc",
}
for _what, _names in _REFUSED.items():
    for _name in _names.split():
        setattr(Terms, f"__{_name}__", _refused(_what))
