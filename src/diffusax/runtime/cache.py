"""Keeps compiled programs on disk between processes, with JAX's persistent compilation cache."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

VARIABLE = "DIFFUSAX_COMPILATION_CACHE"
_OFF = ("", "0", "off", "false", "no", "none")
_MAX_BYTES = 8 * 2**30
# Programs that compile faster are not worth a file; those of a tiny model are slower.
_MIN_SECONDS = 0.1


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
        return Path(found)
    chosen = os.environ.get(VARIABLE) if folder is None else str(folder)
    if chosen is not None and chosen.lower() in _OFF:
        return None
    path = default_folder() if chosen is None else Path(chosen).expanduser()
    if path is None or not _writable(path):
        return None
    jax.config.update("jax_compilation_cache_dir", str(path))
    if "JAX_COMPILATION_CACHE_MAX_SIZE" not in os.environ:
        jax.config.update("jax_compilation_cache_max_size", _MAX_BYTES)
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", _MIN_SECONDS)
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


def _writable(path: Path) -> bool:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(path, os.W_OK)
