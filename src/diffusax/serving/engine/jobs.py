"""A job, a request on its way that many may watch, and its images, which the scheduler runs."""

import logging
import secrets
import threading
import time
from collections.abc import Callable, MutableMapping, Sequence
from concurrent.futures import CancelledError
from typing import Any, Literal, NamedTuple

from diffusax.batch import request
from diffusax.batch.image import Image, prepare_images
from diffusax.pipelines.plan.arguments import read_call
from diffusax.pipelines.tasks.text_cache import TextCache
from diffusax.serving.catalogue.calls import adapters_of
from diffusax.serving.catalogue.residents import Adapters
from diffusax.serving.engine.previews import Previews
from diffusax.serving.requests.errors import NotFound, Refused, refusal
from diffusax.serving.requests.generation import SEEDS, Generation, count_steps

log = logging.getLogger(__name__)

_SECONDS_BETWEEN_PREVIEWS = 0.3
State = Literal["queued", "loading", "compiling", "running", "done", "failed", "cancelled"]
Kind = Literal["state", "progress", "preview", "image", "end"]


class Event(NamedTuple):
    """What has happened to a job."""

    kind: Kind
    job: "Job"
    index: int = 0  # type: ignore[assignment]
    """The image that a preview or an image is of."""
    image: Any = None
    """The preview or the image, a PIL image."""


Callback = Callable[[Event], None]


class Job:
    """A submitted request: where it stands, and its images.

    Attributes are read at any time from any thread. Methods whose names begin with `set_`, and
    `end`, are the engine's.
    """

    def __init__(
        self,
        generation: Generation,
        *,
        client: str = "",
        priority: int = 0,
        deadline: float | None = None,
        on_change: Callable[["Job"], None] = lambda job: None,
        engine: str = "",
    ):
        """Makes a job that is queued.

        Args:
            generation: what to generate, with its seed and all values of its model.
            client: who asks for it.
            priority: jobs with a higher one come first.
            deadline: the seconds after which it fails if it is not done.
            on_change: called when the job is cancelled or a preview is asked for.
            engine: what the id begins with, before a dot.
        """
        self.id = f"{engine}." * bool(engine) + secrets.token_urlsafe(16)
        """A name that nobody can guess."""
        self.generation, self.client, self.priority = generation, client, priority
        self.seeds = [((generation.seed or 0) + i) % SEEDS for i in range(generation.num_images)]
        """The seed of each image."""
        self.created: float = time.time()
        """When it was submitted (time.time)."""
        self.deadline = None if deadline is None else self.created + deadline
        """When it fails if it is not done."""
        self.started: float | None = None
        """When its first image took a seat in a batch."""
        self.first_step: float | None = None
        """When its first step was computed."""
        self.ended: float | None = None
        self.state: State = "queued"
        self.position = 0
        """The number of queued jobs before it; 0 is next."""
        self.eta: float | None = None
        """The seconds that it will take from now, if that is known."""
        self.images: list[Any] = [None] * generation.num_images
        """The images that are done, PIL images; None for the others."""
        self.preview: Any = None
        """The latest preview, a small PIL image."""
        self.error: Refused | None = None
        self._fractions = [0.0] * generation.num_images
        self._listeners: dict[int, tuple[Callback, bool]] = {}
        self._on_change, self._wanted = on_change, False
        self._lock = threading.RLock()
        self._over = threading.Event()

    @property
    def progress(self) -> float:
        """The fraction that is computed of all images, from 0 to 1."""
        return 1.0 if self.state == "done" else sum(self._fractions) / len(self._fractions)

    @property
    def shown(self) -> list[Any]:
        """The images and the preview, as far as they are there."""
        return [*self.images, self.preview]

    @property
    def steps(self) -> int:
        """The steps of all images."""
        return (self.generation.num_inference_steps or 1) * len(self.images)

    @property
    def steps_done(self) -> int:
        """The steps that are computed of all images."""
        return int(self.progress * self.steps + 1e-6)

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
        return self._over.is_set()

    def cancel(self) -> bool:
        """Ends the job at the next step, and returns whether it was still under way."""
        return self.end("cancelled")

    def wait(self, timeout: float | None = None) -> State:
        """Waits until the job has ended, or for some seconds, and returns its state."""
        self._over.wait(timeout)
        return self.state

    def want_preview(self) -> None:
        """Asks for one preview, which `preview` has after some steps."""
        self._wanted = True
        self._on_change(self)

    def wants_preview(self) -> bool:
        """Returns whether somebody listens for previews, or has asked for one."""
        return self._wanted or any(previews for _, previews in list(self._listeners.values()))

    def listen(self, callback: Callback, *, previews: bool = False) -> Callable[[], None]:
        """Calls a function with every event of the job, from the engine's threads.

        It is called at once with the present state, and with the end if that was before. It must
        not block.

        Args:
            callback: the function.
            previews: whether previews are made for it.

        Returns:
            A function that ends the calls.
        """
        token = object()
        with self._lock:
            callback(Event("state", self))
            if self.is_over:
                callback(Event("end", self))
                return lambda: None
            self._listeners[id(token)] = callback, previews
        # The token lives as long as the function below, so that its id is its own.
        return lambda: self._stop(token)

    def set_state(self, state: State) -> None:
        """Notes that the model loads, programs compile, or the job waits or runs."""
        with self._lock:
            if self.is_over or self.state == state or self.state == "running":
                return
            self.state = state
            if state == "running":
                self.started, self.position = time.time(), 0
            self._tell(Event("state", self))

    def set_position(self, position: int) -> None:
        """Notes how many jobs are before it."""
        with self._lock:
            if self.position != position and self.started is None and not self.is_over:
                self.position = position
                self._tell(Event("state", self))

    def set_fraction(self, index: int, fraction: float) -> None:
        """Notes how much of an image is computed."""
        with self._lock:
            if not self.is_over and self._fractions[index] != fraction:
                self._fractions[index] = fraction
                self._tell(Event("progress", self, index))

    def set_preview(self, index: int, preview: Any) -> None:
        """Shows a preview of an image."""
        with self._lock:
            self._wanted = False
            if not self.is_over:
                self.preview = preview
                self._tell(Event("preview", self, index, preview))

    def set_image(self, index: int, image: Any) -> None:
        """Adds an image; the last one ends the job."""
        with self._lock:
            if self.is_over:
                return
            self.images[index], self._fractions[index] = image, 1.0
            self._tell(Event("image", self, index, image))
            if all(one is not None for one in self.images):
                self.end("done")

    def end(self, state: State, error: Refused | None = None) -> bool:
        """Ends the job, and returns whether it had not ended before."""
        with self._lock:
            if self.is_over:
                return False
            self.state, self.error, self.eta = state, error, None
            self.ended = time.time()
            self._over.set()
            self._tell(Event("end", self))
            self._listeners.clear()
        self._on_change(self)
        return True

    def _tell(self, event: Event) -> None:
        for callback, previews in list(self._listeners.values()):
            if previews or event.kind != "preview":
                try:
                    callback(event)
                except Exception:  # A listener's mistake must not end the job.
                    log.exception("a listener of a job failed")

    def _stop(self, token: object) -> None:
        with self._lock:
            self._listeners.pop(id(token), None)


class Part(request.Request):
    """One image of a job."""

    pipe: Any = None

    def __init__(
        self,
        job: Job,
        index: int,
        *,
        catalogue: Any,
        previews: Previews,
        on_rows: Callable[["Part", int], None],
        warms: bool = False,
    ):
        """Makes the part for image `index` of a job.

        Args:
            job: the job.
            index: the index of the image.
            catalogue: the models.
            previews: what previews are made with.
            on_rows: called with the number of its rows that were computed since the last call.
            warms: whether all sizes of its batch are to be compiled.
        """
        super().__init__(
            key=job.client,
            priority=job.priority,
            deadline=job.deadline,
            work=_work(job.generation),
            warms=warms,
        )
        self.job, self.index, self.created = job, index, job.created
        self.catalogue, self._sketches, self._on_rows = catalogue, previews, on_rows
        self._rows_done, self._asked, self._sketching = 0, 0.0, False
        self.draws_noise = False
        """Whether its sampler draws noise at its steps."""
        self._before: tuple[Any, int] | None = None
        self.add_done_callback(lambda _: self._settled())

    @property
    def is_loaded(self) -> bool:
        """Whether its model is in memory, so that preparing it is fast."""
        try:
            return bool(self.catalogue.entry(self.job.generation.model).loaded)
        except NotFound:
            # It has left the catalogue since; preparing the part says so.
            return True

    def set_state(self, state: request.State) -> None:
        """Tells the job that its model loads, its programs compile, or it waits or runs."""
        self.job.set_state(state)

    def set_rows(self, image: int, done: int, total: int) -> None:
        """Tells the job and the engine how much is computed."""
        super().set_rows(image, done, total)
        new, self._rows_done = done - self._rows_done, done
        self.job.set_fraction(self.index, done / total)
        if new > 0:
            self._on_rows(self, new)

    def release(self) -> None:
        """Tells the catalogue that the model is needed no longer."""
        if self.pipe is not None:
            self.catalogue.release(self.pipe)

    def wants_preview(self) -> bool:
        """Returns whether somebody waits for a preview and enough time has passed."""
        if self._sketching or not self._rows_done or not self.job.wants_preview():
            return False
        now = time.perf_counter()
        if now - self._asked < _SECONDS_BETWEEN_PREVIEWS:
            return False
        self._asked, self._sketching = now, True
        return True

    def make_preview(self, images: Sequence[tuple[Image, Any, int]]) -> list[Any]:
        """Returns a small image of the latents as they are."""
        image, latents, row = images[0]
        before = self._before or (image.prepared.entry.latents[None], 0)
        self._before = latents, row
        given = None if self.draws_noise else before
        return [self._sketches.sketch(self.c, image.prepared, (latents, row), given)]

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


def prepare_part(
    part: Any, *, texts: MutableMapping[Any, TextCache], adapters: Adapters, settings: Any
) -> None:
    """Loads what a part needs and prepares it for a running batch.

    Args:
        part: the part.
        texts: the cache of encoded texts of each model, by its store of adapters.
        adapters: the adapters that are loaded.
        settings: the engine's `EngineSettings`.

    Raises:
        Exception: whatever is wrong with the request; see `refusal`.
    """
    generation, catalogue = part.job.generation, part.catalogue
    part.pipe, arguments = catalogue.acquire(generation)
    weights = adapters.load(part.pipe, adapters_of(generation), catalogue)
    arguments = {**arguments, "adapters": weights, "seed": part.job.seeds[part.index]}
    parts = part.pipe.parts
    own: dict[str, Any] = {"text_cache": texts.setdefault(parts.adapters, TextCache())}
    # Nothing else of a pipeline of the catalogue changes after it is loaded.
    own |= {"scheduler": catalogue.sampler(generation), "adapters": parts.adapters.snapshot()}
    part.set_call(part.pipe, parts.variant(**own), read_call(part.pipe, (), arguments))
    run = part.prepare()
    if len(run.weights) >= settings.lanes:
        raise Refused(
            f"prompt must have at most {settings.lanes - 1} parts that AND joins "
            f"(got {len(run.weights)})",
            param="prompt",
        )
    part.draws_noise = bool(run.schedule.draws_noise.any())
    part.take_images(prepare_images(part.c, part.pipe.task, run), settings.adapter_rank)


def _work(generation: Generation) -> float:
    """Estimates what an image of a job costs: rows times lanes times megapixels."""
    guided = generation.guidance_scale is None or generation.guidance_scale > 1
    lanes = 1 + guided + (generation.image_guidance_scale is not None)
    pixels = (generation.width or 512) * (generation.height or 512)
    return count_steps(generation) * lanes * pixels / 2**20
