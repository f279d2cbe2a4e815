"""Formats --help and --help-all from what tyro knows of a command's options."""

import re
import shutil
import textwrap
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from diffusax.runtime.compat import command_groups

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
