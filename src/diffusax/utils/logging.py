"""How much diffusax tells, under the names of `diffusers.utils.logging`.

diffusax logs by Python's `logging`, under the name "diffusax", and adds no handler of its own.
"""

import logging
from logging import CRITICAL, DEBUG, ERROR, FATAL, INFO, NOTSET, WARN, WARNING
from typing import Any

from huggingface_hub import constants, utils
from tqdm.auto import tqdm as _tqdm

__all__ = ["CRITICAL", "DEBUG", "ERROR", "FATAL", "INFO", "NOTSET", "WARN", "WARNING"]

log_levels = {
    "debug": DEBUG,
    "info": INFO,
    "warning": WARNING,
    "error": ERROR,
    "critical": CRITICAL,
}
_ROOT = logging.getLogger("diffusax")
_FORMAT = "[%(levelname)s|%(filename)s:%(lineno)s] %(asctime)s >> %(message)s"
_shows_bars = True
_default_handler = logging.StreamHandler()


def get_logger(name: str | None = None) -> logging.Logger:
    """Returns the logger of a name, by default that of diffusax."""
    return logging.getLogger(name) if name else _ROOT


def get_log_levels_dict() -> dict[str, int]:
    """Returns the levels by name."""
    return dict(log_levels)


def get_verbosity() -> int:
    """Returns the level from which on diffusax logs, one of those of `logging`."""
    return _ROOT.getEffectiveLevel()


def set_verbosity(verbosity: int) -> None:
    """Sets the level from which on diffusax logs, such as `logging.ERROR`."""
    _ROOT.setLevel(verbosity)


def set_verbosity_debug() -> None:
    """Logs all."""
    set_verbosity(DEBUG)


def set_verbosity_info() -> None:
    """Logs what happens, and warnings."""
    set_verbosity(INFO)


def set_verbosity_warning() -> None:
    """Logs warnings and errors."""
    set_verbosity(WARNING)


def set_verbosity_error() -> None:
    """Logs errors alone."""
    set_verbosity(ERROR)


def add_handler(handler: logging.Handler) -> None:
    """Adds a handler to diffusax's logger."""
    _ROOT.addHandler(handler)


def remove_handler(handler: logging.Handler) -> None:
    """Removes a handler from diffusax's logger."""
    _ROOT.removeHandler(handler)


def enable_default_handler() -> None:
    """Writes what diffusax logs to standard error."""
    _ROOT.addHandler(_default_handler)


def disable_default_handler() -> None:
    """Ends `enable_default_handler`."""
    _ROOT.removeHandler(_default_handler)


def enable_propagation() -> None:
    """Passes on what diffusax logs to the handlers of the program's root logger, as by default."""
    _ROOT.propagate = True


def disable_propagation() -> None:
    """Keeps what diffusax logs from the handlers of the program's root logger."""
    _ROOT.propagate = False


def enable_explicit_format() -> None:
    """Makes the handlers of diffusax's logger write level, file, line and time."""
    for handler in _ROOT.handlers:
        handler.setFormatter(logging.Formatter(_FORMAT))


def reset_format() -> None:
    """Ends `enable_explicit_format`."""
    for handler in _ROOT.handlers:
        handler.setFormatter(None)


def is_progress_bar_enabled() -> bool:
    """Returns whether the bars of loading are shown."""
    return _shows_bars


def enable_progress_bar() -> None:
    """Shows the bars of loading and downloads, as by default."""
    global _shows_bars
    _shows_bars = True
    if constants.HF_HUB_DISABLE_PROGRESS_BARS is None:
        utils.enable_progress_bars()


def disable_progress_bar() -> None:
    """Hides the bars of loading and downloads.

    The bar of a call belongs to its pipeline: `pipe.set_progress_bar_config(disable=True)`.
    """
    global _shows_bars
    _shows_bars = False
    if constants.HF_HUB_DISABLE_PROGRESS_BARS is None:
        utils.disable_progress_bars()


def tqdm(*args: Any, **kwargs: Any) -> Any:
    """Makes a bar, which `disable_progress_bar` hides."""
    return _tqdm(*args, **{"disable": not _shows_bars, **kwargs})
