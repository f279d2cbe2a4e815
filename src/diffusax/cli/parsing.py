"""Reads command lines into dataclasses with tyro."""

import dataclasses
import sys
import types
import typing
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import tyro
import tyro.extras
from tyro.conf import (
    DisallowNone,
    PositionalMetavarFromFieldName,
    UseAppendAction,
    arg,
    subcommand,
)
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from diffusax.cli.help import FLAGS, command_help, commands_help
from diffusax.runtime.compat import forget_unrecognized, use_argparse

use_argparse()

OWN = arg(help_behavior_hint="")
"""Marks an option whose help text contains its default."""

T = TypeVar("T")

_MARKERS = (DisallowNone, PositionalMetavarFromFieldName)

_registry = ConstructorRegistry()


def parse(kind: type[T], args: Sequence[str], *, prog: str, default: T | None = None) -> T:
    """Reads the arguments into a dataclass; on --help or a mistake, prints a message and exits.

    The class may name, as `essentials`, the options that the short help shows, and as `refused`
    options and groups of them that no help shows.
    """
    if any(arg in FLAGS for arg in args):
        _show_help(kind, prog, default, everything="--help-all" in args)
    return _tyro(kind, args, prog, **({} if default is None else {"default": default}))


def choose(
    commands: Mapping[str, str],
    args: Sequence[str],
    load: Callable[[str, list[str]], T],
    *,
    prog: str,
    description: str,
) -> T:
    """Reads the command that `args` begin with: returns `load(its name, the other args)`.

    Without a command, prints help or the mistake, and exits.

    Arguments:
        commands: the description of each command, by name.
        args: the arguments of the command line.
        load: imports what the command needs, and reads its arguments.
        prog: the beginning of the command line.
        description: the description of the whole program, for the help.
    """
    if args and args[0] in commands:
        return load(args[0], list(args[1:]))
    if args and args[0] in FLAGS:
        print(commands_help(prog, description, commands))
        sys.exit(0)
    kinds = [
        Annotated[_Unread, subcommand(name=name, description=text)]
        for name, text in commands.items()
    ]
    return _tyro(typing.Union[tuple(kinds)], args, prog, description=description)  # noqa: UP007


@dataclasses.dataclass(frozen=True)
class FromFiles:
    """Options that come from files; those on the command line override them."""

    config: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="")] = None
    """Read options from a YAML file."""
    set: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="NAME=VALUE")] = ()
    """Set one option in the form of the file; can be given several times."""


def parse_with_files(
    kind: type[T], args: Sequence[str], read: Callable[..., Any], *, prog: str
) -> T:
    """Reads arguments like `parse`, with the files and pairs among them as defaults.

    Arguments:
        kind: the command's dataclass, which inherits from `FromFiles` and others.
        args: the command's arguments.
        read: returns the options for the path of a file and for pairs.
        prog: the beginning of the command line.

    Raises:
        ValueError: the file cannot be read, or an option in it is wrong.
    """
    if any(arg in FLAGS for arg in args):
        return parse(kind, args, prog=prog, default=kind(**vars(read(None, ()))))
    files, _ = _tyro(FromFiles, args, prog, add_help=False, return_unknown_args=True)
    return parse(kind, args, prog=prog, default=kind(**vars(read(files.config, files.set))))


def _tyro(kind: Any, args: Sequence[str], prog: str, **options: Any) -> Any:
    forget_unrecognized()
    return tyro.cli(kind, args=args, prog=prog, config=_MARKERS, registry=_registry, **options)


def _show_help(kind: Any, prog: str, default: Any, *, everything: bool) -> NoReturn:
    given = {} if default is None else {"default": default}
    with warnings.catch_warnings():
        # It is deprecated, but nothing else returns what tyro made of the options.
        warnings.simplefilter("ignore")
        options: Any = {"config": _MARKERS, "registry": _registry, **given}
        parser = tyro.extras.get_parser(kind, prog=prog, **options)
    shown = {"essentials": getattr(kind, "essentials", ()), "refused": getattr(kind, "refused", ())}
    print(command_help(prog, parser, everything=everything, **shown))
    sys.exit(0)


@dataclasses.dataclass(frozen=True)
class _Unread:
    """A command whose options have not been read yet."""


@_registry.primitive_rule
def _optional(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec | None:
    """Reads `int | None` like an int without None, so that tyro's errors name an int."""
    inner = [kind for kind in typing.get_args(info.type) if kind is not types.NoneType]
    if info.type_origin not in (typing.Union, types.UnionType) or len(inner) != 1:
        return None
    spec = ConstructorRegistry.get_primitive_spec(PrimitiveTypeInfo.make(inner[0], info.markers))
    if not isinstance(spec, PrimitiveConstructorSpec):
        return None
    return dataclasses.replace(
        spec,
        is_instance=lambda value: value is None or spec.is_instance(value),
        str_from_instance=lambda value: (
            ["None"] if value is None else spec.str_from_instance(value)
        ),
    )
