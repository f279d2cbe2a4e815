"""A call that was submitted to a running batch: the future of its result, and its images."""

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, InvalidStateError
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
import PIL.Image

from diffusax.batch.image import Image, PreparedImage, kind_of
from diffusax.boundary.convert import shortened
from diffusax.boundary.messages import require_extra
from diffusax.pipelines.components.adapters import Mixture, choose_adapters, with_mixture
from diffusax.pipelines.components.components import Components
from diffusax.pipelines.pipeline.call import prepare_call
from diffusax.pipelines.plan.arguments import Call, read_call
from diffusax.pipelines.plan.plan import Decoding, PreparedRun
from diffusax.pipelines.run.images import result_of, to_output
from diffusax.pipelines.tasks.text_cache import TextCache
from diffusax.samplers import Scheduler, scheduler_from_name

State = Literal["loading", "compiling", "queued", "running"]
"""Where a request stands until it has ended."""


class Request(Future[Any]):
    """A call that was submitted: the future of its result, and its images.

    The result is what the call of the pipeline would have returned. `result()` waits for it, and
    raises what the call would have raised. `cancel()` ends the call's images after the rows that
    were dispatched, and frees their lanes for others.
    """

    pipe: Any
    c: Components
    """The components that the pipeline had when the call was submitted."""
    call: Call
    mixture: Mixture | None = None
    """The adapters that are merged into the parameters of `c`; None without any."""
    overlay: Callable[[Any], Any] | None = None
    """See `PreparedRun.overlay`."""

    def __init__(
        self,
        *,
        key: str = "",
        priority: int = 0,
        deadline: float | None = None,
        work: float = 1.0,
        warms: bool = False,
    ):
        """Makes the future of a call, which `take_call` sets.

        Args:
            key: who submits it; the requests of each key have equal shares of the device.
            priority: requests with a higher one come first.
            deadline: when (time.time) it fails unless it is done; None for never.
            work: about what it costs, in any unit that all requests share.
            warms: whether all sizes of its batch are to be compiled ahead.
        """
        super().__init__()
        self.key, self.priority, self.deadline, self.work = key, priority, deadline, work
        self.warms, self.created = warms, time.time()
        """When it was submitted."""
        self.on_change: Callable[[], None] = lambda: None
        """Called when it ends or a preview is wanted."""
        self.images: list[Image] = []
        """The images, once they are prepared to join a batch."""
        self._results: dict[int, Any] = {}
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

    @property
    def is_loaded(self) -> bool:
        """Whether what it needs is in memory, so that it is prepared quickly."""
        return True

    def take_call(
        self,
        pipe: Any,
        sampler: str | Scheduler | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        texts: TextCache,
    ) -> None:
        """Sets the call, with the components that the pipeline has now.

        Args:
            pipe: the pipeline.
            sampler: the name of a sampler or a scheduler; None for the pipeline's own.
            args: the arguments of the pipeline's call, which the caller may change later.
            kwargs: those that are given by name.
            texts: the cache of encoded texts.

        Raises:
            ValueError: an argument is not valid.
            TypeError: the arguments do not fit the pipeline's call.
        """
        own = check_pipeline(pipe).parts.scheduler
        # It is prepared later, in another thread, so its noise is that of the generators' seeds.
        call = _kept(dataclasses.replace(read_call(pipe, args, kwargs), generators=()))
        scheduler = own if sampler is None else sampler
        if isinstance(scheduler, str):
            scheduler = scheduler_from_name(scheduler, own)
        if not isinstance(scheduler, Scheduler):
            raise ValueError(
                "sampler must be the name of a sampler or a scheduler, such as 'euler' or "
                f"EulerDiscreteScheduler() (got {shortened(scheduler)})"
            )
        # What the pipeline's owner changes later concerns later calls.
        c = pipe.parts.snapshot(scheduler=scheduler, text_cache=texts)
        self.set_call(pipe, c, call)

    def set_call(self, pipe: Any, c: Components, call: Call) -> None:
        """Sets a call and components that nobody else changes; see `take_call`."""
        self.pipe, self.c = pipe, c
        self.call, self.mixture = choose_adapters(c, call)

    def prepare(self, call: Call | None = None) -> PreparedRun:
        """Returns the run of the call, after merging those adapters that are not of low rank.

        call: a call in the place of its own, such as one with further images.

        Raises:
            ValueError: an argument of the call is not valid.
        """
        self.c = with_mixture(self.c, self.mixture)
        run = prepare_call(self.pipe.task, self.c, self.call if call is None else call)
        self.overlay = run.overlay
        return run

    def take_images(self, images: Sequence[PreparedImage], rank: int) -> None:
        """Sets the prepared images. rank: the least total rank of the adapters of their batch."""
        kinds = [kind_of(self.c, prepared, rank) for prepared in images]
        for i, prepared in enumerate(images):
            self.set_rows(i, 0, prepared.rows)
        self.images = [Image(self, i, *pair) for i, pair in enumerate(zip(images, kinds))]

    def cancel(self) -> bool:
        """Cancels the call, and returns whether it was still running."""
        cancelled = super().cancel()
        self.on_change()
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
        self.on_change()
        if self.done():
            self.answer_previews(None)
        return wanted.result(timeout)

    def wants_preview(self) -> bool:
        """Returns whether a caller of `preview` is waiting."""
        return bool(self._previews)

    def make_preview(self, images: Sequence[tuple[Image, Any, int]]) -> list[Any]:
        """Decodes images as they are, each with its latents 1 h w c before a row, to PIL images."""
        found: list[Any] = []
        for image, latents, row in images:
            own = image.prepared
            found += preview_of(
                self.c, latents, own.levels[row], own.decoding, own.decoder_condition
            )
        return found

    def answer_previews(self, make: Callable[[], list[Any]] | None) -> None:
        """Hands the list that `make` returns, or an empty one, to those who wait for a preview."""
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

    def set_state(self, state: State) -> None:
        """Is told that the model loads, programs compile, or the request waits or runs."""

    def release(self) -> None:
        """Is told, once, that the request has ended and nothing of it is being prepared."""

    def forget(self) -> None:
        """Drops what only computing needs, so that whoever keeps the future keeps no parameters."""
        self.images = []
        self._results.clear()
        for name in ("pipe", "c", "call", "mixture", "overlay"):
            self.__dict__.pop(name, None)

    def decode(self, latents: Any, decoding: Decoding, condition: Any) -> Any:
        """Converts latents to the output that the call asked for; see `to_output`."""
        return to_output(self.c, latents, decoding, condition, self.call.output_type)

    def deliver(self, image: Image, latents: Any) -> None:
        """Decodes an image's latents, 1 h w c, and settles the call if it is the last."""
        prepared = image.prepared
        try:
            decoded = self.decode(latents, prepared.decoding, prepared.decoder_condition)
            with self._lock:
                self._results[image.index] = decoded
                found = [self._results.get(i) for i in range(len(self.images))]
            if not any(result is None for result in found):
                images = _joined(found, self.call.output_type)
                flags = self.pipe.returns_flags
                self.settle(result_of(self.c, self.call, images, self.overlay, flags=flags))
        except Exception as error:
            self.settle(error=error)

    def settle(self, result: Any = None, error: BaseException | None = None) -> None:
        """Sets the result or the error, unless the call was cancelled or has one."""
        try:
            if error is None:
                self.set_result(result)
            else:
                self.set_exception(error)
        except (InvalidStateError, CancelledError):
            pass
        self.on_change()
        self.answer_previews(None)


def preview_of(
    c: Components, latents: Any, level: np.ndarray, decoding: Decoding, condition: Any
) -> list[Any]:
    """Decodes the latents of images that are not done to PIL images.

    The latents are scaled to about the variance of clean ones.

    Args:
        c: the components.
        latents: b h w c.
        level: their (signal, noise).
        decoding: see `to_output`.
        condition: see `to_output`.
    """
    unit = latents / np.float32(np.hypot(*level))
    found: list[Any] = to_output(c, unit, decoding, condition, "pil")
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


def check_pipeline(pipe: Any) -> Any:
    """Returns a pipeline as it is, and raises ValueError for anything else."""
    if not isinstance(getattr(pipe, "parts", None), Components):
        raise ValueError(
            "pipe must be a pipeline, as DiffusionPipeline.from_pretrained(...) gives "
            f"(got {shortened(pipe)})"
        )
    return pipe


def _kept(call: Call) -> Call:
    """Returns a call with copies of what its caller may change before it is prepared."""
    values = {field.name: getattr(call, field.name) for field in dataclasses.fields(call)}
    return dataclasses.replace(call, **{name: _copied(value) for name, value in values.items()})


def _copied(value: Any) -> Any:
    """Returns a copy of arrays, tensors and images, and of the lists and dictionaries of them."""
    match value:
        case Mapping():
            return {key: _copied(own) for key, own in value.items()}
        case list():
            return [_copied(own) for own in value]
        case tuple():
            return tuple(_copied(own) for own in value)
        case np.ndarray():
            return value.copy()
        case PIL.Image.Image():
            # A file that cannot be read, for whatever reason, is an error of the result's.
            with contextlib.suppress(Exception):
                return value.copy()
    is_tensor = hasattr(value, "detach") and hasattr(value, "clone")
    return value.detach().clone() if is_tensor else value
