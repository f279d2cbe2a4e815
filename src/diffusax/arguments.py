"""Command lines to dataclasses, with tyro."""

import contextlib
import io
import re
from collections.abc import Sequence
from typing import Any

import tyro


def parse_arguments(kind: Any, args: Sequence[str], *, prog: str, default: Any = None) -> Any:
    """An instance of the dataclass (or of one of a union of them, each a subcommand).

    Raises:
        ValueError: the arguments cannot be read; says why in one line.
    """
    options = {} if default is None else {"default": default}
    shown = io.StringIO()
    try:
        with contextlib.redirect_stderr(shown):
            return tyro.cli(kind, args=list(args), prog=prog, **options)
    except SystemExit as stop:
        if not stop.code:
            raise
        plain = re.sub(r"\x1b\[[0-9;]*m|[╭╮╰╯│─]+", " ", shown.getvalue())
        raise ValueError(" ".join(plain.split()).removeprefix("Parsing error ")) from None
