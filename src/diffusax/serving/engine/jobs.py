"""A job: a request on its way, which many may watch."""

import logging
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from diffusax.serving.requests.errors import Refused
from diffusax.serving.requests.generation import VIDEO_TASKS, Generation

log = logging.getLogger(__name__)

State = Literal["queued", "loading", "compiling", "running", "done", "failed", "cancelled"]
Kind = Literal["state", "progress", "preview", "image", "end"]


class Event(NamedTuple):
    """What has happened to a job."""

    kind: Kind
    job: "Job"
    index: int = 0  # type: ignore[assignment]
    """The image that a preview or an image is of."""
    image: Any = None
    """The preview or the image, a PIL image; of a video a `MovingPreview` or a `Video`."""


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
        self.singles = [generation.single(i) for i in range(generation.num_images)]
        """What generates each image by itself."""
        self.seeds = [single.seed or 0 for single in self.singles]
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
        """The images that are done, PIL images, or videos, each a `Video`; None for the others."""
        self.preview: Any = None
        """The latest preview, a small PIL image, or of a video a `MovingPreview`."""
        self.error: Refused | None = None
        self._fractions = [0.0] * generation.num_images
        self._listeners: dict[int, tuple[Callback, bool]] = {}
        self._on_change, self._wanted = on_change, False
        self.interrupted = False
        """Whether it ends as soon as the images that have begun are decoded."""
        self._awaited: set[int] = set()
        """The images that are decoded before it ends."""
        self._lock = threading.RLock()
        self._over = threading.Event()

    @property
    def is_of_videos(self) -> bool:
        """Whether it generates videos."""
        return self.generation.task in VIDEO_TASKS

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

    def interrupt(self) -> None:
        """Ends the job with its images as they are; those that have begun are decoded first."""
        with self._lock:
            self._awaited |= {i for i, done in enumerate(self._fractions) if 0 < done < 1}
            self.interrupted = True
            if not self._awaited:
                self.cancel()
        self._on_change(self)

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

    def set_partial(self, index: int, image: Any) -> None:
        """Adds an image as it was when the job was interrupted; None for one that failed."""
        with self._lock:
            if self.is_over:
                return
            if image is not None:
                self.images[index] = image
                self._tell(Event("image", self, index, image))
            self._awaited.discard(index)
            if not self._awaited:
                self.end("cancelled")

    def set_image(self, index: int, image: Any) -> None:
        """Adds an image; the last one ends the job."""
        with self._lock:
            if self.is_over:
                return
            self.images[index], self._fractions[index] = image, 1.0
            self._tell(Event("image", self, index, image))
            if all(one is not None for one in self.images):
                self.end("done")
            elif self.interrupted:
                self.set_partial(index, None)

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
