"""Which programs of diffusax a call compiles, by the lines that the log has of them; and none."""

import contextlib
import logging
import re
from collections.abc import Iterator

from diffusax.runtime.programs import room


class _Names(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.names: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if found := re.match(
            r"(\w+) for .*: compiled, or read from the cache", record.getMessage()
        ):
            self.names.append(found[1])


@contextlib.contextmanager
def compiled_programs() -> Iterator[list[str]]:
    """Yields a list of the names of the programs that calls compile inside the context."""
    logger, handler = logging.getLogger("diffusax"), _Names()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield handler.names
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def forget_executables() -> None:
    """Releases all executables, whether compiled ahead of time, compiled in a call, or loaded."""
    for program in list(room.ALL):
        program.forget_all()
