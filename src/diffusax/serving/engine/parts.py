"""The images of jobs, which the scheduler runs as calls of their own."""

import dataclasses
import logging
import time
from collections.abc import Callable, MutableMapping, Sequence
from concurrent.futures import CancelledError
from typing import Any

from diffusax.batch import request
from diffusax.batch.image import Image, prepare_images
from diffusax.pipelines.plan.arguments import Call, read_call
from diffusax.pipelines.tasks.text_cache import TextCache
from diffusax.serving.catalogue.calls import adapters_of
from diffusax.serving.catalogue.residents import Adapters
from diffusax.serving.engine.jobs import Job
from diffusax.serving.engine.previews import Previews, expected_latents
from diffusax.serving.engine.videos import Video
from diffusax.serving.requests.errors import Failed, NotFound, Refused, refusal
from diffusax.serving.requests.generation import (
    VIDEO_TASKS,
    Generation,
    count_steps,
    write_infotext,
)

log = logging.getLogger(__name__)

_SECONDS_BETWEEN_PREVIEWS = 0.3


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
        self._partial = False
        """Whether the image is decoded as it is, as the job was interrupted."""
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
        if self.job.interrupted and self._rows_done and not self._partial:
            self._partial = True
            return True
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
        if self._partial:
            return self._decode_partial(image, latents, row)
        before = self._before or (image.prepared.entry.latents[None], 0)
        self._before = latents, row
        given = None if self.draws_noise else before
        return [self._sketches.sketch(self.c, image.prepared, (latents, row), given)]

    def answer_previews(self, make: Callable[[], list[Any]] | None) -> None:
        """Makes a preview and shows it."""
        if make is None or self.job.is_over:
            return
        if self._partial:
            self._show_partial(make)
            return
        try:
            self.job.set_preview(self.index, make()[0])
        except Exception:  # The image itself may still come out well.
            log.exception("a preview failed")
        self._sketching = False

    def _decode_partial(self, image: Image, latents: Any, row: int) -> list[Any]:
        """Decodes what the latents are expected to become, in full size."""
        prepared = image.prepared
        given = None if self.draws_noise else self._before or (prepared.entry.latents[None], 0)
        clean: Any = expected_latents(prepared.levels, (latents, row), given)
        return self.decode(clean, prepared.decoding, prepared.decoder_condition)

    def _show_partial(self, make: Callable[[], list[Any]]) -> None:
        try:
            found = make()[0]
            [found] = [found] if self.overlay is None else self.overlay([found])
        except Exception:  # The job ends without it.
            log.exception("an interrupted image failed")
            found = None
        self.job.set_partial(self.index, found)

    def _settled(self) -> None:
        try:
            made = self._made()
        except CancelledError:
            return
        except Exception as error:
            self.job.end("failed", refusal(error))
        else:
            self.job.set_image(self.index, made)

    def _made(self) -> Any:
        """Returns the image, or the video, whose file is written here, in the decoder's thread."""
        result, generation = self.result(), self.job.generation
        if generation.task not in VIDEO_TASKS:
            return result.images[0]
        text = write_infotext(self.job.singles[self.index], self.job.seeds[self.index])
        try:
            return Video.of(result.frames[0], generation.fps or 1, text)
        except (ValueError, OSError):
            log.exception("a video could not be written")
            raise Failed("the video could not be written; the server's log tells more") from None


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
    call = _with_variations(read_call(part.pipe, (), arguments), part.job.singles[part.index])
    part.set_call(part.pipe, parts.variant(**own), call)
    run = part.prepare()
    if len(run.weights) >= settings.lanes:
        raise Refused(
            f"prompt must have at most {settings.lanes - 1} parts that AND joins "
            f"(got {len(run.weights)})",
            param="prompt",
        )
    part.draws_noise = bool(run.schedule.draws_noise.any())
    part.take_images(prepare_images(part.c, part.pipe.task, run), settings.adapter_rank)


def _with_variations(call: Call, single: Generation) -> Call:
    """Returns a call with what no class of pipelines has an argument for."""
    varies, fill = single.variation_strength, single.masked_fill
    return dataclasses.replace(
        call,
        turned_noise=(single.variation_seed or 0, varies) if varies else None,
        masked_fill=None if fill == "image" else fill,
    )


def _work(generation: Generation) -> float:
    """Estimates what an image of a job costs: rows times lanes times megapixels.

    Of a video about every fourth frame counts, as one of latents stands for so many.
    """
    guided = generation.guidance_scale is None or generation.guidance_scale > 1
    lanes = 1 + guided + (generation.image_guidance_scale is not None)
    pixels = (generation.width or 512) * (generation.height or 512)
    frames = 1 + ((generation.num_frames or 1) - 1) / 4
    return count_steps(generation) * lanes * pixels * frames / 2**20
