"""Error messages for modules that JAX cannot trace."""

import traceback
from pathlib import Path

_MACHINERY = ("torch", "torchax", "jax", "jaxlib", "diffusax", "unittest")


_NEED_VALUES = (
    "ConcretizationTypeError",
    "NonConcreteBooleanIndexError",
    "TracerArrayConversionError",
    "TracerBoolConversionError",
    "TracerIntegerConversionError",
)


class NotTraceable(ValueError):
    """A module depends on the values of tensors, or uses an operation that torchax lacks.

    needs_values: whether the values are the cause.
    """

    needs_values = False


class KeepsTensor(ValueError):
    """A module keeps a tensor that its program does not return; the message says where."""


def explain(component: str, method: str, error: BaseException) -> NotTraceable:
    """Returns an error that says what failed where, and what the user can do."""
    operation, place = where(error)
    failed = f"{operation} {reason(error)}{place}"
    if isinstance(error, KeepsTensor):
        failed = str(error)
    failure = NotTraceable(
        f"{component}.{method} cannot be compiled: {failed}. Leave it "
        f"out with exclude=[{component!r}], or use on_error='eager', which runs such components in "
        "PyTorch"
    )
    failure.needs_values = type(error).__name__ in _NEED_VALUES
    return failure


def reason(error: BaseException) -> str:
    """Returns the cause of an error, as the end of a sentence that begins with the line of code."""
    name = type(error).__name__
    if "lowering" in str(error):
        return "is an operation that torchax does not have"
    if name in (
        "ConcretizationTypeError",
        "TracerBoolConversionError",
        "TracerArrayConversionError",
    ):
        return "needs the value of a tensor, which is not known while a program is compiled"
    if name in ("TracerIntegerConversionError", "NonConcreteBooleanIndexError"):
        return "needs the value of a tensor, which is not known while a program is compiled"
    text = " ".join(str(error).split())
    return f"failed with {name}: {text[:200]}"


def where(error: BaseException) -> tuple[str, str]:
    """Returns the line of code that failed, and its file."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not _is_machinery(frame.filename)]
    if not own:
        return "tracing", ""
    frame = own[-1]
    file = "/".join(Path(frame.filename).parts[-3:])
    return f"`{frame.line}`", f" ({file}, line {frame.lineno})"


def _is_machinery(filename: str) -> bool:
    """Returns whether a file belongs to the libraries between a module and XLA."""
    path = Path(filename)
    if "site-packages" in path.parts:
        return path.parts[path.parts.index("site-packages") + 1] in _MACHINERY
    return path.is_relative_to(Path(__file__).parents[1])
