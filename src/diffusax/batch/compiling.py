"""A thread that makes the programs of batches ready, while others run."""

import collections
import dataclasses
import itertools
import logging
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from diffusax.batch.executables import Executables
from diffusax.batch.image import Image, Kind, PreparedImage
from diffusax.batch.programs import insert
from diffusax.batch.run import BatchRun
from diffusax.batch.sizes import KindSizes
from diffusax.pipelines.components.components import Components
from diffusax.pipelines.run import autoencoding
from diffusax.runtime.devices.memory import return_memory
from diffusax.runtime.programs.program import Request, key
from diffusax.runtime.programs.room import make_room, memory_maps

log = logging.getLogger(__name__)

_MOST_MAPS = 24_000
"""The memory maps of this process beyond which programs are let go; Linux allows 65,530."""
_MOST_KINDS = 8
"""The kinds whose programs stay loaded, besides those that are in use."""
_IDLE = 60.0
"""The seconds after which the other process ends that has nothing to compile."""


@dataclasses.dataclass(frozen=True, order=True)
class _Wish:
    """A size of a kind of batch that is to be ready."""

    urgency: int
    """Lower comes first."""
    number: int
    size: int
    kind: Kind = dataclasses.field(compare=False)
    c: Components = dataclasses.field(compare=False)
    prepared: PreparedImage = dataclasses.field(compare=False)
    kept: bool = dataclasses.field(compare=False)
    """Whether it is granted even if nobody waits for it any more."""


class Compiler:
    """Makes sizes of batches ready in a thread, the urgent ones first."""

    def __init__(
        self,
        sizes: KindSizes,
        compiled: collections.Counter[str],
        *,
        is_busy: Callable[[], bool],
        is_wanted: Callable[[Kind], bool],
        on_ready: Callable[[], None],
        on_error: Callable[[Kind, int, Exception], None],
        folder: Path | None = None,
    ):
        """Starts the thread.

        Args:
            sizes: what is told of sizes that are ready.
            compiled: counts the programs that were made ready, by where they came from.
            is_busy: returns whether something runs, so that another process should compile.
            is_wanted: returns whether images of a kind wait or run.
            on_ready: called when a size is ready.
            on_error: called with the kind, the size and the error of what cannot be compiled.
            folder: the folder of executables, see `Executables`.
        """
        self._sizes, self._compiled = sizes, compiled
        self._executables = Executables(folder)
        self._is_busy, self._is_wanted = is_busy, is_wanted
        self._on_ready, self._on_error = on_ready, on_error
        self._wishes: queue.PriorityQueue[_Wish] = queue.PriorityQueue()
        self._asked: set[tuple[Kind, int]] = set()
        self._keys: dict[Kind, set[tuple[Any, Any]]] = {}
        """The programs of each kind, the kinds that were used last at the end."""
        self._dropped, self._lock = 0, threading.Lock()
        self._numbers, self._closing = itertools.count(), threading.Event()
        self._thread = threading.Thread(target=self._work, name="diffusax-compile", daemon=True)
        self._thread.start()

    def want(self, image: Image, lanes: int) -> None:
        """Asks for the programs that an image needs, and for the sizes that suit the load.

        Args:
            image: an image that waits.
            lanes: the lanes of all images of its kind that wait or run.
        """
        kind, sizes, least = image.kind, self._sizes, self._sizes.least_of(image)
        ready = sizes.ready(kind)
        self._use(kind)
        if not ready:
            self._ask(image, least, urgency=0)
            while image.request.warms and (least := 2 * least) <= sizes.cap(kind):
                self._ask(image, least, keep=True)
            return
        larger, smaller = 2 * max(ready), min(ready) // 2
        if lanes > max(ready) and larger <= sizes.cap(kind):
            self._ask(image, larger)
        # Where a step of few lanes takes less time, which is so on CPUs.
        if lanes <= smaller and jax.default_backend() == "cpu" and smaller >= least:
            self._ask(image, smaller, urgency=2)

    def _ask(self, image: Image, size: int, *, urgency: int = 1, keep: bool = False) -> None:
        """Asks for a size once, and not again where it cannot be compiled.

        Args:
            image: an image of the kind of batch.
            size: the lanes.
            urgency: lower comes first.
            keep: whether to make it ready even if nobody waits for it any more.
        """
        kind, c, prepared = image.kind, image.request.c, image.prepared
        known = size in self._sizes.ready(kind) or self._sizes.is_refused(kind, size)
        if not known and (kind, size) not in self._asked:
            self._asked.add((kind, size))
            wish = _Wish(urgency, next(self._numbers), size, kind, c, prepared, keep)
            self._wishes.put(wish)

    def _use(self, kind: Kind) -> None:
        """Notes that a kind is in use, so that its programs stay."""
        with self._lock:
            if kind in self._keys:
                self._keys[kind] = self._keys.pop(kind)

    @property
    def waiting(self) -> int:
        """The sizes that are asked for and not ready."""
        return len(self._asked)

    def close(self) -> None:
        """Ends the thread, which finishes the program that it compiles here."""
        self._closing.set()
        self._executables.stop()
        self._thread.join()

    def _work(self) -> None:
        executables, idle = self._executables, 0.0
        while not self._closing.is_set():
            try:
                wish = self._wishes.get(timeout=0.2)
            except queue.Empty:
                idle += 0.2
                if idle > _IDLE:
                    executables.rest()
                continue
            idle = 0.0
            try:
                if wish.kept or self._is_wanted(wish.kind):
                    self._grant(wish, executables)
            except Exception as error:
                if self._closing.is_set():
                    break
                self._on_error(wish.kind, wish.size, error)
            self._asked.discard((wish.kind, wish.size))
            # Its model may leave memory while the next wish is waited for.
            del wish
            self._on_ready()
        executables.close()

    def _grant(self, wish: _Wish, executables: Executables) -> None:
        """Makes the programs of a size ready, and those between it and its neighbours."""
        self._make_room(wish.kind)
        found = self._programs(wish)
        for request in found:
            if self._closing.is_set():
                return
            elsewhere = self._is_busy()
            where = executables.make_ready(request, mesh=wish.c.mesh, elsewhere=elsewhere)
            self._compiled[where] += 1
        keys = {(request.program, key(request)) for request in found}
        with self._lock:
            self._keys.setdefault(wish.kind, set()).update(keys)
        self._sizes.set_ready(wish.kind, wish.size, *_bytes_of(found))

    def _programs(self, wish: _Wish) -> list[Request]:
        """Returns the programs of a size that no other size of the kind has made ready."""
        ready, size = self._sizes.ready(wish.kind), wish.size
        around = [other for other in (size // 2, 2 * size) if other in ready]
        found = self._batch(wish, size).requests(wish.prepared, around)
        for other in around:
            found += self._batch(wish, other).requests(wish.prepared, [size])[2:]
        if wish.c.mesh is None and not ready:
            found.append(_decode_request(wish.c, wish.prepared))
        return found

    def _batch(self, wish: _Wish, size: int) -> BatchRun:
        return BatchRun(wish.c, wish.prepared, size, wish.kind)

    def _make_room(self, kind: Kind) -> None:
        """Releases the programs of the kinds that were least recently used."""
        with self._lock:
            self._keys[kind] = self._keys.pop(kind, set())
            idle = [one for one in self._keys if one is not kind and not self._is_wanted(one)]
            before = self._dropped
            while idle and (len(self._keys) > _MOST_KINDS or memory_maps() > _MOST_MAPS):
                self._drop(idle.pop(0))
        make_room()
        if self._dropped // _MOST_KINDS > before // _MOST_KINDS:
            # Of each size there are small programs as well, which only JAX holds.
            jax.clear_caches()
        if self._dropped > before:
            return_memory()

    def _drop(self, kind: Kind) -> None:
        self._sizes.forget(kind)
        gone = self._keys.pop(kind)
        for program, request_key in gone.difference(*self._keys.values()):
            program.forget(request_key)
        self._dropped += 1


def _decode_request(c: Components, prepared: PreparedImage) -> Request:
    return autoencoding.decode.request(
        c.autoencoder,
        c.autoencoder_params,
        prepared.entry.latents[None],
        prepared.decoder_condition,
        **dataclasses.asdict(prepared.decoding),
    )


def _bytes_of(found: list[Request]) -> tuple[float, float]:
    """Returns the bytes of a batch's arrays, and the most temporaries of its programs."""
    batch = next(request.dynamic[0] for request in found if request.program is insert)
    arrays = sum(leaf.nbytes for leaf in jax.tree.leaves(batch))
    compiled = [r.program.executables[key(r)].compiled for r in found]
    analyses: list[Any] = [one.memory_analysis() for one in compiled]
    temporaries = [getattr(one, "temp_size_in_bytes", 0) for one in analyses]
    return arrays, max(temporaries)
