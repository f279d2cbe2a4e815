"""A running batch for calls that come one after the other, in a thread of its own."""

import atexit
import dataclasses
import functools
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import PIL.Image

from diffusax.batch.alone import RunsAlone
from diffusax.batch.image import count_shares, draws_torch_noise, prepare_images
from diffusax.batch.loop import time_rows
from diffusax.batch.request import Request, check_pipeline
from diffusax.batch.run import BatchRun, check_local
from diffusax.batch.scheduler import Scheduler
from diffusax.batch.sizes import Sizes
from diffusax.pipelines.plan.arguments import Call
from diffusax.pipelines.tasks.text_cache import TextCache
from diffusax.samplers import Scheduler as Sampler

_FINISHERS = 2
"""The threads that decode and convert images that have left."""


class RunningBatch:
    """Runs the calls of pipelines in one batch, which they join and leave at any step.

    Calls may have any sampler, number of steps, guidance, prompt, strength, mask and adapters, and
    come from any thread; other ones compile nothing. Images of another size, or of another
    pipeline, form a batch of their own, and the batches take turns. As many images share the device
    as makes their waits shortest on average, by what steps of larger batches are measured to take.
    A call's images are those that the call alone would generate, to rounding.

        with diffusax.RunningBatch(pipe) as batch:
            futures = [batch.submit(prompt, seed=i) for i, prompt in enumerate(prompts)]
            images = [future.result().images[0] for future in futures]
    """

    def __init__(
        self, pipe: Any, *, lanes: int = 8, smallest: int | None = None, adapter_rank: int = 64
    ):
        """Starts a running batch.

        Args:
            pipe: the pipeline whose calls are submitted. Others may be named with each call.
            lanes: the most entries of the network's batch, a power of two, at least 4, times the
                devices of the pipeline's mesh. An image takes one without guidance, two with
                classifier-free guidance and three with InstructPix2Pix's.
            smallest: the entries of the network's batch while little is to do, such a power of two
                from 1 to lanes; by default one for each device. A step of a small batch takes less
                time on CPUs, and each size compiles once.
            adapter_rank: the total rank for which the programs of images with adapters have room,
                rounded up; images whose adapters together have more wait until others leave.

        Raises:
            ValueError: pipe is no pipeline, a number is not such a one, or the mesh belongs to
                several processes.
        """
        check_local(check_pipeline(pipe).mesh)
        devices = count_shares(pipe.mesh)
        smallest = devices if smallest is None else smallest
        numbers = {"lanes": lanes, "smallest": smallest, "adapter_rank": adapter_rank}
        for name, value in numbers.items():
            if isinstance(value, bool) or not isinstance(value, int):
                raise ValueError(f"{name} must be an integer (got {value!r})")
        for name, value, least in (("lanes", lanes, 4), ("smallest", smallest, 1)):
            share, rest = divmod(value, devices)
            if rest or share < least or share.bit_count() != 1 or value > lanes:
                raise ValueError(
                    f"{name} must be a power of two, at least {least}, times {devices} "
                    f"devices, and smallest at most lanes (got {value})"
                )
        if not 0 <= adapter_rank <= 4096:
            raise ValueError(f"adapter_rank must be between 0 and 4096 (got {adapter_rank})")
        self._pipe, self._texts = pipe, TextCache()
        self._sizes = Sizes(lanes // devices, smallest // devices, adapter_rank)
        self._lock, self._closing = threading.Lock(), False
        self._alone = RunsAlone()
        self._scheduler = Scheduler(
            self._sizes,
            self._prepare,
            finishers=_FINISHERS,
            on_end=lambda: self._alone.close(wait=False),
        )
        self._scheduler.start()
        # A thread that still computes while Python ends would abort the process.
        self._at_exit = functools.partial(_close_at_exit, weakref.ref(self))
        atexit.register(self._at_exit)

    def submit(
        self, *args: Any, pipe: Any = None, sampler: str | Sampler | None = None, **kwargs: Any
    ) -> Request:
        """Submits a call, and returns its future.

        Args:
            *args: the arguments of the pipeline's call.
            pipe: another pipeline to call, such as one for another task with the same components
                (`from_pipe`).
            sampler: the name of a sampler or a scheduler for this call; by default the pipeline's
                own.
            **kwargs: the arguments of the pipeline's call by name.

        Raises:
            ValueError: an argument is not valid; errors that concern arrays and images are raised
                by the future's `result`.
            TypeError: the arguments do not fit the pipeline's call.
            RuntimeError: the running batch is closed.
        """
        request = self._request(pipe, sampler, args, kwargs)
        with self._lock:
            if self._closing:
                raise RuntimeError("the running batch is closed; make another")
            self._scheduler.add(request)
        return request

    def warm(self, *args: Any, **kwargs: Any) -> None:
        """Compiles the programs that images like those of this call need, for every size of batch.

        So are those that prepare calls of one image, of two, of four and so on up to as many as
        there are lanes, with and without guidance; other numbers of images are prepared by the
        same programs. It also measures what a step of each size costs, by which images join. The
        arguments are those of `submit`. Sizes that were not compiled are when a batch first grows
        to them, which the images in it wait for.
        """
        sampler, pipe = kwargs.pop("sampler", None), kwargs.pop("pipe", None)
        request = self._request(pipe, sampler, args, kwargs)
        prepared = prepare_images(request.c, request.pipe.task, request.prepare())[0]
        request.take_images([prepared], self._sizes.rank)
        (image,) = request.images
        sizes, largest = [self._sizes.smallest_of(image.kind)], self._sizes.largest_of(image.kind)
        for call in _calls_like(request.call, largest):
            prepare_images(request.c, request.pipe.task, request.prepare(call), 1)
        while sizes[-1] < largest:
            sizes.append(2 * sizes[-1])
        run = BatchRun(request.c, prepared, sizes[0], image.kind)
        for size in (*sizes, *sizes[-2::-1]):
            if size != run.size:
                run.resize(size)
            latents = time_rows(self._scheduler.loop.seconds, run, image)
        request.decode(latents, prepared.decoding, prepared.decoder_condition)

    def close(self, *, cancel: bool = False) -> None:
        """Waits until all calls have ended, and stops the threads.

        In a callback of a future, which one of these threads may call, it waits for none.

        cancel: whether to cancel the calls first.
        """
        with self._lock:
            self._closing = True
        if cancel:
            self._scheduler.cancel()
            self._alone.cancel()
        own = threading.current_thread() in {*self._scheduler.threads, self._alone.thread}
        self._scheduler.close(wait=not own)
        if not own:
            self._alone.close()
            atexit.unregister(self._at_exit)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        self.close(cancel=error is not None)

    def _request(
        self, pipe: Any, sampler: str | Sampler | None, args: tuple[Any, ...], kwargs: Any
    ) -> Request:
        request, pipe = Request(), self._pipe if pipe is None else pipe
        request.take_call(pipe, sampler, args, kwargs, texts=self._texts)
        return request

    def _prepare(self, request: Request) -> None:
        """Prepares the images of a call, or hands it to the thread of those that run alone."""
        if request.call.callback_on_step_end is not None or request.call.hooks is not None:
            self._alone.add(request)
            return
        call, count = padded(request.call)
        run = request.prepare(call)
        if draws_torch_noise(run):
            self._alone.add(request, run)
        elif 1 + len(run.weights) > self._sizes.largest:
            self._alone.add(request)
        else:
            images = prepare_images(request.c, request.pipe.task, run, count)
            request.take_images(images, self._sizes.rank)


def _calls_like(call: Call, most: int) -> Iterator[Call]:
    """Yields calls of one to `most` images, the powers of two, with and without guidance."""
    for scale in dict.fromkeys((call.guidance_scale, 0.0, 5.0)):
        own = dataclasses.replace(call, guidance_scale=scale)
        yield own
        count = 2
        while count <= most:
            several, images = padded(dataclasses.replace(own, num_images_per_prompt=count))
            if images is None:
                break
            yield several
            count *= 2


_TEXTS = tuple(f"{prefix}prompt{end}" for prefix in ("", "negative_") for end in ("", "_2", "_3"))
_IMAGES = (
    *("prompt_embeds", "negative_prompt_embeds", "latents", "masked_image_latents"),
    *("pooled_prompt_embeds", "negative_pooled_prompt_embeds"),
    *("prompt_embeds_mask", "negative_prompt_embeds_mask"),
    *("image", "image_reference", "mask_image", "control_image"),
    *("ip_adapter_image", "ip_adapter_image_embeds", "ip_adapter_masks"),
    *("negative_ip_adapter_image", "negative_ip_adapter_image_embeds"),
)
"""The arguments that may have an entry for each image."""


def padded(call: Call) -> tuple[Call, int | None]:
    """Returns a call with further images, up to a power of two, and how many are its own.

    These are the first ones, and what they are does not depend on the others. Each image has an
    entry of its own in the lists of prompts. A call that cannot have more is returned as it is,
    with None: one of a single image, with an array or a list for its images, with PyTorch's
    numbers or random keys, or with lists whose lengths do not fit.
    """
    n = len(call.prompt) if isinstance(call.prompt, list) else 1
    m = call.num_images_per_prompt or 1
    lists = {
        name: value for name in (*_TEXTS, "adapters") if _is_list(value := getattr(call, name))
    }
    seeds = call.seed if isinstance(call.seed, list) else None
    if (
        call.prompt is None
        or call.noise != "jax"
        or call.keys is not None
        or call.own_arguments
        or not all(_is_single(getattr(call, name)) for name in _IMAGES)
        or any(len(value) != n for value in lists.values())
        or (seeds is not None and len(seeds) != n * m)
        or n * m < 2
    ):
        return call, None
    size = 1 << (n * m - 1).bit_length()
    changes: dict[str, Any] = {"prompt": [call.prompt], **lists}
    for name, value in changes.items():
        one_each = [entry for entry in value for _ in range(m)]
        changes[name] = one_each + one_each[-1:] * (size - n * m)
    if "adapters" in lists:
        # They are those of the prompts as they were.
        changes["adapter_rows"] = None
    if seeds is not None:
        changes["seed"] = seeds + seeds[-1:] * (size - n * m)
    return dataclasses.replace(call, **changes, num_images_per_prompt=1), n * m


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _is_single(value: Any) -> bool:
    """Returns whether a value is one input image, which all images share, or none."""
    return value is None or isinstance(value, str | Path | PIL.Image.Image)


def _close_at_exit(batch: weakref.ref[RunningBatch]) -> None:
    if (found := batch()) is not None:
        found.close(cancel=True)
