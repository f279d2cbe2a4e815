"""Makes constructors from tables of their arguments."""

from collections.abc import Callable, Mapping
from inspect import Parameter, Signature
from typing import TYPE_CHECKING, Any, ClassVar

REQUIRED = Parameter.empty
"""Marks an argument without a default."""


class Constructed:
    """A base class whose subclasses list their constructor's arguments in a table.

    Attributes:
        arguments: the arguments in their order, each with its default or REQUIRED. A subclass
            without a table of its own inherits its parent's constructor or defines one.
    """

    arguments: ClassVar[Mapping[str, Any]] = {}

    if TYPE_CHECKING:

        def __init__(self, *args: Any, **named: Any) -> None: ...

        # The constructor takes this method's docstring.
        def _configure(self, given: Mapping[str, Any]) -> None: ...

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "arguments" in vars(cls):
            cls.__init__ = _constructor(cls)  # type: ignore[method-assign]


def _constructor(cls: type[Constructed]) -> Callable[..., None]:
    """Returns an `__init__` that passes all arguments, by name, to `_configure`."""
    kind, name = Parameter.POSITIONAL_OR_KEYWORD, f"{cls.__qualname__}.__init__"
    parameters = [
        Parameter(argument, kind, default=default, annotation=_annotation(default))
        for argument, default in cls.arguments.items()
    ]
    signature = Signature([Parameter("self", kind), *parameters])

    def __init__(self: Any, *args: Any, **named: Any) -> None:
        try:
            bound = signature.bind(self, *args, **named)
        except TypeError as error:
            raise TypeError(f"{name}() {error}") from None
        bound.apply_defaults()
        del bound.arguments["self"]
        self._configure(bound.arguments)

    __init__.__signature__ = signature  # type: ignore[attr-defined]
    __init__.__qualname__, __init__.__doc__ = name, cls._configure.__doc__
    return __init__


def _annotation(default: Any) -> Any:
    return type(default) if isinstance(default, int | float | str) else Any
