"""The images of jobs, each of which is a call of its own in a running batch."""

import logging
import time
from collections.abc import Callable, MutableMapping, Sequence
from concurrent.futures import CancelledError
from typing import Any

from diffusax.batch.image import PreparedImage, prepare_images
from diffusax.batch.request import Generation, Request, make_request, prepare
from diffusax.batch.run import Kind, kind_of
from diffusax.pipelines.tasks.text_cache import TextCache
from diffusax.runtime.devices.memory import is_out_of_memory
from diffusax.serving.catalogue.adapters import Adapters
from diffusax.serving.catalogue.calls import adapters_of
from diffusax.serving.drawings.errors import Failed, Refused
from diffusax.serving.engine.jobs import Job
from diffusax.serving.engine.previews import Previews

log = logging.getLogger(__name__)

_SECONDS_BETWEEN_PREVIEWS = 0.3


class Part(Generation):
    """One image of a job, and the future of the call that generates it."""

    request: Request
    """The call, once it is prepared."""
    prepared: PreparedImage
    """The image as it joins a batch, once it is prepared."""
    kind: Kind
    """The kind of batch that it joins."""

    def __init__(
        self,
        job: Job,
        index: int,
        *,
        on_change: Callable[[], None],
        on_rows: Callable[["Part", int], None],
        warm: bool = False,
    ):
        """Makes the part for image `index` of a job.

        Args:
            job: the job.
            index: the index of the image.
            on_change: called when it is cancelled.
            on_rows: called with the number of its rows that were computed since the last call.
            warm: whether all sizes of its batch are to be compiled.
        """
        super().__init__(on_change)
        self.job, self.index = job, index
        self.pipe: Any = None
        self.rows_done, self.warm = 0, warm
        self.asked = 0.0
        """When a preview was made last (time.perf_counter)."""
        self._on_rows, self._sketching = on_rows, False
        self.add_done_callback(lambda _: self._settled())

    @property
    def rows_left(self) -> int:
        """The rows that are not computed."""
        return self.prepared.rows - self.rows_done

    def set_rows(self, image: int, done: int, total: int) -> None:
        """Tells the job and the engine how much is computed."""
        super().set_rows(image, done, total)
        new, self.rows_done = done - self.rows_done, done
        self.job.set_fraction(self.index, done / total)
        if new > 0:
            self._on_rows(self, new)

    def wants_preview(self) -> bool:
        """Returns whether somebody waits for a preview and enough time has passed."""
        if self._sketching or not self.rows_done or not self.job.wants_preview():
            return False
        now = time.perf_counter()
        if now - self.asked < _SECONDS_BETWEEN_PREVIEWS:
            return False
        self.asked, self._sketching = now, True
        return True

    def answer_previews(self, make: Callable[[], list[Any]] | None) -> None:
        """Makes a preview and shows it."""
        if make is None or self.job.is_over:
            return
        try:
            self.job.set_preview(self.index, make()[0])
        except Exception:  # The image itself may still come out well.
            log.exception("a preview failed")
        self._sketching = False

    def _settled(self) -> None:
        try:
            images = self.result().images
        except CancelledError:
            return
        except Exception as error:
            self.job.end("failed", refusal(error))
        else:
            self.job.set_image(self.index, images[0])


class PartRequest(Request):
    """A part's request for a running batch, with cheap previews."""

    def __init__(self, request: Request, previews: Previews, *, draws_noise: bool):
        """Copies a request. draws_noise: whether its sampler does."""
        super().__init__(request.pipe, request.c, request.call, request.generation)
        self._previews, self._draws_noise = previews, draws_noise
        self._before: tuple[Any, int] | None = None

    def preview(self, images: Sequence[tuple[PreparedImage, Any, int]]) -> list[Any]:
        """Returns a small image of the latents as they are."""
        prepared, latents, row = images[0]
        before = self._before or (prepared.entry.latents[None], 0)
        self._before = latents, row
        given = None if self._draws_noise else before
        return [self._previews.sketch(self.c, prepared, (latents, row), given)]


def prepare_part(
    part: Part,
    catalogue: Any,
    *,
    texts: MutableMapping[Any, TextCache],
    adapters: Adapters,
    previews: Previews,
    rank: int,
    lanes: int,
) -> None:
    """Loads what a part needs and prepares it for a running batch.

    Args:
        part: the part.
        catalogue: the models.
        texts: the cache of encoded texts of each model, by its store of adapters.
        adapters: the adapters that are loaded.
        previews: what previews are made with.
        rank: the least total rank of batches with adapters.
        lanes: the most lanes of a batch on each device.

    Raises:
        Exception: whatever is wrong with the request; see `refusal`.
    """
    drawing = part.job.drawing
    part.pipe, arguments = catalogue.acquire(drawing)
    weights = adapters.load(part.pipe, adapters_of(drawing), catalogue)
    arguments = {**arguments, "adapters": weights, "seed": part.job.seeds[part.index]}
    own = texts.setdefault(part.pipe.parts.adapters, TextCache())
    request = make_request(part.pipe, drawing.sampler, (), arguments, texts=own, generation=part)
    run = prepare(request)
    if len(run.weights) >= lanes:
        raise Refused(
            f"prompt must have at most {lanes - 1} parts that AND joins (got {len(run.weights)})",
            param="prompt",
        )
    draws_noise = bool(run.schedule.draws_noise.any())
    part.request = PartRequest(request, previews, draws_noise=draws_noise)
    part.request.overlay = run.overlay
    (part.prepared,) = prepare_images(request.c, part.pipe.task, run)
    part.kind = kind_of(request.c, part.prepared, rank)


def refusal(error: BaseException) -> Refused:
    """Turns an error into one that a client reads."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, ValueError | TypeError):
        return Refused(str(error))
    if isinstance(error, FloatingPointError):
        return Failed(str(error), code="not_finite")
    log.error("an image failed", exc_info=error)
    if is_out_of_memory(error):
        return Failed(
            "the device has too little memory for width and height; ask for a smaller image",
            code="out_of_memory",
            status=507,
        )
    return Failed("generating failed through an error of the server; its log tells more")
