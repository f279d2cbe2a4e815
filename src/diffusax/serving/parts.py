"""The images of jobs, each of which is a call of its own in a running batch."""

import logging
from concurrent.futures import CancelledError
from typing import Any

from diffusax.pipelines.batch_loop import make_request, prepare
from diffusax.pipelines.entries import Picture, prepare_pictures
from diffusax.pipelines.generation import Generation, Request
from diffusax.pipelines.text_cache import TextCache
from diffusax.serving.errors import Failed, Refused
from diffusax.serving.jobs import Job

log = logging.getLogger(__name__)


class Part(Generation):
    """One image of a job, and the future of the call that draws it."""

    request: Request
    pictures: list[Picture]

    def __init__(self, job: Job, index: int, on_change: Any):
        """Makes the part of a job that draws image `index`."""
        super().__init__(on_change)
        self.job, self.index, self.pipe = job, index, None
        self.pictures = []
        self.add_done_callback(lambda _: self._settled())

    def set_rows(self, image: int, done: int, total: int) -> None:
        """Tells the job how much is computed."""
        super().set_rows(image, done, total)
        self.job.set_fraction(self.index, done / total)

    def _settled(self) -> None:
        try:
            images = self.result().images
        except CancelledError:
            return
        except Exception as error:
            self.job.end("failed", refusal(error))
        else:
            self.job.set_image(self.index, images[0])


def prepare_part(part: Part, catalogue: Any, texts: TextCache) -> bool:
    """Prepares a part for a running batch, and returns whether it can join; else its job ends."""
    job = part.job
    if job.is_over:
        return False
    try:
        part.pipe, arguments = catalogue.acquire(job.drawing)
        arguments = {"adapters": {}, **arguments, "seed": job.seeds[part.index]}
        part.request = make_request(
            part.pipe, job.drawing.sampler, (), arguments, texts=texts, generation=part
        )
        run = prepare(part.request)
        part.request.finish = run.finish
        part.pictures = prepare_pictures(part.request.c, part.pipe.task, run)
    except Exception as error:
        job.end("failed", refusal(error))
        return False
    return True


def refusal(error: BaseException) -> Refused:
    """Returns what a client is told of an error."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, ValueError | TypeError):
        return Refused(str(error))
    log.error("a drawing failed", exc_info=error)
    return Failed(f"the drawing failed: {error}")
