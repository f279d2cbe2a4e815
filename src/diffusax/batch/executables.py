"""Compiled programs in a folder, and the process that compiles new ones beside the server."""

import contextlib
import hashlib
import importlib
import logging
import os
import pickle
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax

from diffusax.runtime.programs.cache import enable_compilation_cache
from diffusax.runtime.programs.program import (
    PROGRAMS,
    Executable,
    Request,
    compile_request,
    describe,
    digest,
    key,
)
from diffusax.runtime.programs.saved import compile_to_file, environment, load_from_file

log = logging.getLogger(__name__)

_MOST_BYTES = 4 * 2**30
"""The bytes of the executables of all versions and machines; those unused for longest go."""
_NICE = 10
"""How far the compiling process steps back behind this one."""
_COMMAND = "from diffusax.batch.executables import serve_requests; serve_requests()"


class Executables:
    """Makes programs ready to be called: from a folder, in another process, or here.

    Reading an executable traces nothing, so that neither the interpreter nor the device is held up.
    One thread at a time may call the methods.
    """

    def __init__(self, folder: Path | None = None):
        """Opens the folder: by default one beside JAX's compilation cache, if that is in use."""
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        if folder is None:
            cache = enable_compilation_cache()
            folder = cache and cache / "executables"
        self._root = folder or self._temporary_folder()
        about = repr((environment(), os.environ.get("XLA_FLAGS")))
        self._version = hashlib.sha256(about.encode()).hexdigest()[:16]
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False

    def make_ready(self, request: Request, *, mesh: Any = None, elsewhere: bool = False) -> str:
        """Makes a program ready, and returns where it came from.

        Args:
            request: the program with its arguments, or their shapes.
            mesh: the mesh of the pipeline.
            elsewhere: whether another process compiles what must be compiled. Programs of a mesh,
                and for TPUs, which belong to one process, are always compiled here.

        Returns:
            "memory", "file", "process" or "here".
        """
        request_key = key(request)
        if request_key in request.program.executables:
            return "memory"
        path = self._path(request)
        if path and path.is_file() and self._load(request, path):
            return "file"
        began = time.perf_counter()
        where = "here"
        if path and elsewhere and mesh is None and jax.default_backend() in ("cpu", "gpu"):
            where = self._compile_elsewhere(request, path)
        if self._closed:
            raise RuntimeError("the executables are closed")
        if where == "here":
            self._compile_here(request, path, mesh)
        seconds = time.perf_counter() - began
        log.info("%s: compiled in %.1f s (%s)", describe(request), seconds, where)
        self._make_room()
        return where

    def rest(self) -> None:
        """Ends the other process, whose memory is free then; the next program starts another."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for stream in (self._process.stdin, self._process.stdout):
                if stream is not None:
                    stream.close()
            self._process = None

    def stop(self) -> None:
        """Ends the other process, even while it compiles. Any thread may call this."""
        self._closed = True
        process = self._process
        if process is not None:
            process.kill()

    def close(self) -> None:
        """Ends the other process, and removes the folder if it is a temporary one."""
        self.rest()
        if self._temporary is not None:
            self._temporary.cleanup()

    def _path(self, request: Request) -> Path | None:
        """Returns the file of a program's executable; None if no folder can be written."""
        while self._root is not None:
            folder = self._root / self._version
            try:
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            except OSError as error:
                self._leave_folder(error)
            else:
                return folder / f"{request.program.name}-{digest(key(request))}"
        return None

    def _leave_folder(self, error: OSError) -> None:
        """Goes on with a temporary folder; without any, if that is the one which failed."""
        log.warning("executables are not kept in %s: %s", self._root, error)
        self._root = None if self._temporary else self._temporary_folder()

    def _temporary_folder(self) -> Path | None:
        try:
            self._temporary = tempfile.TemporaryDirectory(
                prefix="diffusax-", ignore_cleanup_errors=True
            )
        except OSError as error:
            log.warning("executables are not kept in a temporary folder: %s", error)
            return None
        return Path(self._temporary.name)

    def _compile_here(self, request: Request, path: Path | None, mesh: Any) -> None:
        if path is None:
            compiled = compile_request(request, mesh)
            # The request would keep its arrays alive.
            request.program.keep(key(request), Executable(compiled))
            return
        try:
            compile_to_file(request, path, mesh)
        except OSError as error:
            if key(request) not in request.program.executables:
                raise
            self._leave_folder(error)

    def _load(self, request: Request, path: Path) -> bool:
        try:
            load_from_file(request.program.name, path)
        except Exception as error:  # Whatever is wrong with the file, another one can be made.
            log.warning("%s is made anew: %s", path, error)
            return False
        with contextlib.suppress(OSError):
            os.utime(path)
        return key(request) in request.program.executables

    def _compile_elsewhere(self, request: Request, path: Path) -> str:
        """Compiles in the other process; returns "process", or "here" where that failed."""
        module = request.program.__wrapped__.__module__  # type: ignore[attr-defined]
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), request.dynamic)
        name = request.program.name
        try:
            process = self._running()
            assert process.stdin is not None
            assert process.stdout is not None
            pickle.dump((module, name, request.static, shapes, path), process.stdin)
            process.stdin.flush()
            problem = pickle.load(process.stdout)
        except Exception as error:  # It was killed, or what it needs cannot be sent.
            problem = repr(error)
            self.rest()
        if problem is None and self._load(request, path):
            return "process"
        log.warning("%s is compiled in this process: %s", describe(request), problem)
        return "here"

    def _running(self) -> "subprocess.Popen[bytes]":
        if self._process is None or self._process.poll() is not None:
            # On a GPU it takes what it needs and not most of the memory.
            environ = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
            environ["JAX_PLATFORMS"] = jax.default_backend().replace("gpu", "cuda,cpu")
            environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
            self._process = subprocess.Popen(
                [sys.executable, "-c", _COMMAND],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environ,
                start_new_session=True,
            )
        return self._process

    def _make_room(self) -> None:
        """Deletes the files unused for longest, while all take more than their limit."""
        # Other servers delete files here, too, and so may somebody who cleans up.
        with contextlib.suppress(OSError):
            found = self._root.rglob("*-*") if self._root else ()
            files = [path for path in found if path.is_file()]
            about = sorted((path.stat().st_mtime, path.stat().st_size, path) for path in files)
            total = sum(size for _, size, _ in about)
            for _, size, path in about:
                if total <= _MOST_BYTES:
                    return
                path.unlink(missing_ok=True)
                total -= size


def serve_requests() -> None:
    """Compiles what the server asks for on standard input, until that ends."""
    with contextlib.suppress(OSError):
        os.nice(_NICE)
    answers = os.fdopen(os.dup(1), "wb")
    # What libraries print goes to the server's log and not among the answers.
    os.dup2(2, 1)
    while True:
        try:
            module, name, static, shapes, path = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        problem = None
        try:
            importlib.import_module(module)
            program = PROGRAMS[name]
            compile_to_file(Request(program, static, shapes), path)
            program.forget_all()
        except Exception as error:
            problem = repr(error)
        try:
            pickle.dump(problem, answers)
            answers.flush()
        except BrokenPipeError:
            # The server has ended meanwhile.
            os._exit(0)
