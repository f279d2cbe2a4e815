"""Keeps compiled programs on disk between processes, with JAX's persistent compilation cache."""

import contextlib
import functools
import logging
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

log = logging.getLogger(__name__)

VARIABLE = "DIFFUSAX_COMPILATION_CACHE"
_OFF = ("", "0", "off", "false", "no", "none")
_MAX_BYTES = 8 * 2**30
# Programs that compile faster are not worth a file; those of a tiny model are slower.
_MIN_SECONDS = 0.1
_MIN_FREE = 32 * 2**20
"""The bytes that a disk must have free, so that no program is written by half."""
_TRIAL = bytes(2**16)
_WRITING = 60.0
"""The seconds for which another process may be writing a program."""
_LOCK = threading.Lock()
_paused = False
"""Whether `check_compilation_cache` has switched the cache off."""


def enable_compilation_cache(folder: str | Path | None = None) -> Path | None:
    """Keeps compiled programs in a folder, where this and later processes find them.

    Pipelines call it when they are made. It does not change a folder that JAX itself was given
    (JAX_COMPILATION_CACHE_DIR). Several processes may share a folder; beyond 8 GiB, the programs
    unused for longest are deleted (JAX_COMPILATION_CACHE_MAX_SIZE sets another limit).

    Args:
        folder: the folder; by default that of the variable DIFFUSAX_COMPILATION_CACHE, where "off"
            disables the cache, or else diffusax/programs in the user's cache folder.

    Returns:
        The folder in use; None if the cache is off or cannot be written.
    """
    found: str | None = getattr(jax.config, "jax_compilation_cache_dir")  # noqa: B009
    if found:
        check_compilation_cache()
        return None if _paused else Path(found)
    chosen = os.environ.get(VARIABLE) if folder is None else str(folder)
    if chosen is not None and chosen.lower() in _OFF:
        return None
    path = default_folder() if chosen is None else Path(chosen).expanduser()
    if path is None:
        return None
    problem = _problem(path)
    if problem is not None:
        _warn_once(path, problem)
        return None
    jax.config.update("jax_compilation_cache_dir", str(path))
    if "JAX_COMPILATION_CACHE_MAX_SIZE" not in os.environ:
        jax.config.update("jax_compilation_cache_max_size", _MAX_BYTES)
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", _MIN_SECONDS)
    _remove_halves(path)
    # JAX looks for the folder once, when it compiles for the first time.
    compilation_cache.reset_cache()
    return path


@contextlib.contextmanager
def without_compilation_cache() -> Iterator[None]:
    """Neither reads programs from the cache nor writes them to it inside the context."""
    before = jax.config.jax_enable_compilation_cache  # type: ignore[attr-defined]
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()


def default_folder() -> Path | None:
    """Returns diffusax/programs in the user's cache folder (XDG_CACHE_HOME), or None."""
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:
        return None
    return Path(base) / "diffusax" / "programs"


def check_compilation_cache() -> None:
    """Switches JAX's compilation cache off while its folder cannot be written, with one warning.

    Programs are compiled all the same. It is switched on again once the folder can be written. JAX
    itself would warn for every program, and after a disk was full write none any more.
    """
    global _paused
    folder: str | None = getattr(jax.config, "jax_compilation_cache_dir")  # noqa: B009
    if not folder or "://" in folder:
        return
    with _LOCK:
        enabled = jax.config.jax_enable_compilation_cache  # type: ignore[attr-defined]
        if not (enabled or _paused):
            return
        problem = _problem(Path(folder))
        if (problem is not None) == _paused:
            return
        if problem is None:
            log.info("%s can be written again: compiled programs are kept there", folder)
            _remove_halves(Path(folder))
        else:
            _warn_once(Path(folder), problem)
        _paused = problem is not None
        jax.config.update("jax_enable_compilation_cache", not _paused)
        compilation_cache.reset_cache()


@functools.cache
def _warn_once(folder: Path, problem: str) -> None:
    log.warning("compiled programs are not kept in %s: %s", folder, problem)


def _problem(folder: Path) -> str | None:
    """Returns why a folder, which is made if need be, cannot be written; None if it can."""
    trial = folder / f".trial-{os.getpid()}-{threading.get_ident()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
        trial.write_bytes(_TRIAL)
    except OSError as error:
        return error.strerror or str(error)
    finally:
        with contextlib.suppress(OSError):
            trial.unlink()
    return None if free >= _MIN_FREE else "its disk is full"


def _remove_halves(folder: Path) -> None:
    """Removes programs that were written by half when a disk was full; JAX stumbles over them.

    A cache without a limit keeps no dates of use beside its programs, so none is known as such.
    """
    if jax.config.jax_compilation_cache_max_size == -1:  # type: ignore[attr-defined]
        return
    with contextlib.suppress(OSError):
        for file in list(folder.glob("*-cache")):
            dated = file.with_name(file.name.removesuffix("-cache") + "-atime")
            if not dated.exists() and file.stat().st_mtime < time.time() - _WRITING:
                file.unlink()
