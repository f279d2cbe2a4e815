"""A call that was submitted to a running batch: its future, and the state of its images."""

import dataclasses
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, InvalidStateError
from typing import Any

import jax.numpy as jnp
import numpy as np

from diffusax.boundary.messages import require_extra
from diffusax.pipelines.adapter_store import Mixture
from diffusax.pipelines.arguments import Call
from diffusax.pipelines.components import Components
from diffusax.pipelines.entries import Picture
from diffusax.pipelines.output import output, result_of
from diffusax.pipelines.plan import Decoding


class Generation(Future[Any]):
    """The future result of a call, which is what the call of the pipeline would have returned.

    `result()` waits for it, and raises what the call would have raised. `cancel()` ends the call's
    images after the rows that were dispatched, and frees their lanes for others.
    """

    def __init__(self, on_change: Callable[[], None] = lambda: None):
        """Makes a future. on_change: called when it ends or wants a preview."""
        super().__init__()
        self._on_change = on_change
        self._rows: dict[int, tuple[int, int]] = {}
        self._previews: list[Future[list[Any]]] = []
        self._lock = threading.Lock()
        self._told = False
        """Whether those who wait for several futures have been told that it is cancelled."""

    @property
    def progress(self) -> float:
        """The fraction of the rows that are computed, from 0 to 1."""
        if self.done():
            return 1.0
        with self._lock:
            done, total = map(sum, zip((0, 0), *self._rows.values()))
        return done / total if total else 0.0

    def cancel(self) -> bool:
        """Cancels the call, and returns whether it was still running."""
        cancelled = super().cancel()
        self._on_change()
        if cancelled:
            with self._lock:
                first, self._told = not self._told, True
            if first:
                # concurrent.futures.wait and as_completed learn of it only so.
                self.set_running_or_notify_cancel()
            self.answer_previews(None)
        return cancelled

    def running(self) -> bool:
        """Returns whether it has begun and not ended; it can be cancelled all the same."""
        with self._lock:
            begun = any(done for done, _ in self._rows.values())
        return begun and not self.done()

    def preview(self, timeout: float | None = None) -> list[Any]:
        """Returns the call's images as they are now, decoded to PIL images.

        The list has those that run; it is empty, at once, before the first row and after the last.

        timeout: the seconds to wait for the next step and the decoder; None waits as long as it
        takes.

        Raises:
            TimeoutError: it took longer.
        """
        wanted: Future[list[Any]] = Future()
        with self._lock:
            if not any(0 < done < total for done, total in self._rows.values()):
                return []
            self._previews.append(wanted)
        self._on_change()
        if self.done():
            self.answer_previews(None)
        return wanted.result(timeout)

    def wants_preview(self) -> bool:
        """Returns whether a caller of `preview` is waiting."""
        return bool(self._previews)

    def answer_previews(self, make: Callable[[], list[Any]] | None) -> None:
        """Gives those who wait for a preview the list that `make` returns, or an empty one."""
        with self._lock:
            waiting, self._previews = self._previews, []
        try:
            images = [] if make is None else make()
        except Exception as error:  # Whatever the decoder raises is the caller's.
            for future in waiting:
                future.set_exception(error)
            return
        for future in waiting:
            future.set_result(images)

    def set_rows(self, image: int, done: int, total: int) -> None:
        """Sets how many rows of an image are computed."""
        with self._lock:
            self._rows[image] = done, total

    def settle(self, result: Any = None, error: BaseException | None = None) -> None:
        """Sets the result or the error, unless the call was cancelled or has one."""
        try:
            if error is None:
                self.set_result(result)
            else:
                self.set_exception(error)
        except (InvalidStateError, CancelledError):
            pass
        self._on_change()
        self.answer_previews(None)


@dataclasses.dataclass(eq=False)
class Request:
    """A call with the components that it was submitted with."""

    pipe: Any
    c: Components
    call: Call
    generation: Generation
    mixture: Mixture | None = None
    """The adapters that `prepare` merges into the parameters of `c`; None without any."""
    finish: Callable[[Any], Any] | None = None
    """See `PreparedRun.finish`."""
    results: list[Any] = dataclasses.field(default_factory=list)
    """The output of each image, None until it is decoded."""
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    def decode(self, latents: Any, decoding: Decoding, condition: Any) -> Any:
        """Converts latents to the output that the call asked for; see `output`."""
        return output(self.c, latents, decoding, condition, self.call.output_type)

    def deliver(self, image: int, picture: Picture, latents: Any) -> None:
        """Decodes an image's latents, 1 h w c, and settles the call if it is the last."""
        try:
            decoded = self.decode(latents, picture.decoding, picture.decoder_condition)
            with self.lock:
                self.results[image] = decoded
                whole = all(result is not None for result in self.results)
            if whole:
                self.complete(_joined(self.results, self.call.output_type))
        except Exception as error:
            self.generation.settle(error=error)

    def complete(self, images: Any) -> None:
        """Settles the call with all its images."""
        flags = self.pipe.returns_flags
        self.generation.settle(result_of(self.call, images, self.finish, flags=flags))

    def preview(self, pictures: Sequence[tuple[Picture, Any, int]]) -> list[Any]:
        """Decodes pictures as they are, each with its latents 1 h w c before a row, to PIL images.

        See `preview_of`.
        """
        found: list[Any] = []
        for picture, latents, row in pictures:
            own = picture.decoding, picture.decoder_condition
            found += preview_of(self.c, latents, picture.levels[row], *own)
        return found


def preview_of(
    c: Components, latents: Any, level: np.ndarray, decoding: Decoding, condition: Any
) -> list[Any]:
    """Decodes the latents of images that are not done to PIL images.

    The latents are scaled to about the variance of clean ones.

    Args:
        c: the components.
        latents: b h w c.
        level: their (signal, noise).
        decoding: see `output`.
        condition: see `output`.
    """
    unit = latents / np.float32(np.hypot(*level))
    found: list[Any] = output(c, unit, decoding, condition, "pil")
    return found


def _joined(results: list[Any], output_type: str) -> Any:
    """Joins the outputs of single images to that of a call."""
    if len(results) == 1:
        return results[0]
    match output_type:
        case "pil":
            return [image for result in results for image in result]
        case "np":
            return np.concatenate(results)
        case "pt":
            return require_extra("torch", "torch").cat(results)
    return jnp.concatenate(results)
