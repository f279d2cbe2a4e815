"""Reads command lines into dataclasses with tyro."""

import dataclasses
import re
import shutil
import sys
import textwrap
import types
import typing
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, NoReturn, TypeVar

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

from diffusax.runtime.compat import command_groups, forget_unrecognized, use_argparse

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


def given_flags(options: Any, names: Sequence[str]) -> list[str]:
    """Returns the flags of those of the options that differ from their defaults."""
    given = (name for name in names if getattr(options, name) != getattr(type(options), name))
    return [f"--{name.replace('_', '-')}" for name in given]


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


FLAGS = ("-h", "--help", "--help-all")
_COLUMN = 24
"""The column where the texts begin."""
_WIDEST = 100
"""The longest line, because longer ones are hard to read."""


class Option(NamedTuple):
    """An option. name: its name in a configuration file. flags: its forms on the command line."""

    name: str
    flags: str
    text: str
    positional: bool
    required: bool


class Group(NamedTuple):
    """The options under one title; the group of the command itself has no title."""

    title: str
    text: str
    options: list[Option]


def command_help(
    prog: str,
    parser: Any,
    *,
    essentials: Collection[str] = (),
    refused: Collection[str] = (),
    everything: bool,
) -> str:
    """Returns the help of a command.

    Args:
        prog: the beginning of the command line.
        parser: the result of tyro's `get_parser` for the command.
        essentials: the names of the options that the short help shows, each with its first
            sentence; where there are none, it shows all options.
        refused: the names of options and of groups of them that are left out.
        everything: whether to show all options.
    """
    found = list(command_groups(parser))
    description = found[0][1]
    groups = [
        # The command's own description stands above all groups.
        Group(title, _joined(text) if i else "", [_option(**option) for option in options])
        for i, (title, text, options) in enumerate(found)
    ]
    groups = [group._replace(options=_without(group.options, refused)) for group in groups]
    count = sum(len(group.options) for group in groups)
    places = [option for group in groups for option in group.options if option.positional]
    blocks = [
        _wrapped(" ".join([f"usage: {prog} [OPTIONS]", *(option.flags for option in places)])),
        *map(_wrapped, description.split("\n\n")),
    ]
    if places:
        blocks.append(_table(places))
    about = Option("help", "-h, --help", "Show this help.", False, False)
    if essentials and not everything:
        named = {o.name: o for g in groups for o in g.options if not o.positional}
        shown = [named[name] for name in essentials if name in named]
        shown += [o for o in named.values() if o.required and o not in shown]
        shown = [option._replace(text=_first_sentence(option.text)) for option in shown]
        more = about._replace(flags="--help-all", text=f"Show all {count} options.")
        blocks.append("options:\n" + _table([*shown, about, more]))
        return "\n\n".join(blocks)
    for group in groups:
        rows = [option for option in group.options if not option.positional]
        if not group.title:
            rows.append(about)
        if rows:
            title = f"{group.title} options:".strip()
            head = _wrapped(f"{title} {group.text}".strip())
            blocks.append(f"{head}\n{_table(rows)}")
    return "\n\n".join(blocks)


def commands_help(prog: str, description: str, commands: Mapping[str, str]) -> str:
    """Returns the help of a program with several commands."""
    rows = [Option(name, name, text, True, False) for name, text in commands.items()]
    about = Option("help", "-h, --help", "Show this help; after a command, its own.", False, False)
    usage = f"usage: {prog} COMMAND [OPTIONS]"
    return "\n\n".join(
        [_wrapped(usage), _wrapped(description), f"commands:\n{_table(rows)}", _table([about])]
    )


def _without(options: Sequence[Option], refused: Collection[str]) -> list[Option]:
    """Leaves out options of these names, and those of groups of these names."""
    return [o for o in options if not {o.name, o.name.partition(".")[0]} & set(refused)]


def _option(name: str, text: str, **others: Any) -> Option:
    """An option as the configuration file names it, without a default that says nothing."""
    text = _joined(text)
    for nothing in ("(default: None)", "(default: '')", "(default: )"):
        text = text.replace(nothing, "").strip()
    return Option(name.removeprefix("--").replace("-", "_"), text=text, **others)


def _table(options: Sequence[Option]) -> str:
    """Formats flags on the left and texts beside them, or below flags that are long."""
    lines = []
    for _, flags, text, *_ in options:
        texts = textwrap.wrap(text, _width() - _COLUMN, break_on_hyphens=False) or [""]
        if len(flags) <= _COLUMN - 4:
            lines.append(f"  {flags:{_COLUMN - 2}}{texts.pop(0)}".rstrip())
        else:
            lines += textwrap.wrap(
                flags, _width() - 2, initial_indent="  ", subsequent_indent=" " * 6
            )
        lines += [" " * _COLUMN + line for line in texts if line]
    return "\n".join(lines)


def _first_sentence(text: str) -> str:
    """Returns the first sentence of an option's text, and the default value."""
    found = re.match(r"(.*?[^.]\.)(?: .*?)??( \(default: [^()]*\))?$", text)
    return text if found is None else found[1] + (found[2] or "")


def _wrapped(text: str) -> str:
    return textwrap.fill(_joined(text), _width(), break_on_hyphens=False)


def _joined(text: str) -> str:
    return " ".join(text.split())


def _width() -> int:
    return max(40, min(shutil.get_terminal_size().columns, _WIDEST))
