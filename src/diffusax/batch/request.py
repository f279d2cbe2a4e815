"""A call that was submitted to a running batch: its future, and the state of its images."""

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, InvalidStateError
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import PIL.Image

from diffusax.batch.image import PreparedImage
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
    overlay: Callable[[Any], Any] | None = None
    """See `PreparedRun.overlay`."""
    results: list[Any] = dataclasses.field(default_factory=list)
    """The output of each image, None until it is decoded."""
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    def decode(self, latents: Any, decoding: Decoding, condition: Any) -> Any:
        """Converts latents to the output that the call asked for; see `to_output`."""
        return to_output(self.c, latents, decoding, condition, self.call.output_type)

    def deliver(self, image: int, prepared: PreparedImage, latents: Any) -> None:
        """Decodes an image's latents, 1 h w c, and settles the call if it is the last."""
        try:
            decoded = self.decode(latents, prepared.decoding, prepared.decoder_condition)
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
        self.generation.settle(result_of(self.call, images, self.overlay, flags=flags))

    def preview(self, images: Sequence[tuple[PreparedImage, Any, int]]) -> list[Any]:
        """Decodes images as they are, each with its latents 1 h w c before a row, to PIL images.

        See `preview_of`.
        """
        found: list[Any] = []
        for prepared, latents, row in images:
            own = prepared.decoding, prepared.decoder_condition
            found += preview_of(self.c, latents, prepared.levels[row], *own)
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


def make_request(
    pipe: Any,
    sampler: str | Scheduler | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    texts: TextCache,
    generation: Generation,
) -> Request:
    """Returns the request of a call with the components that the pipeline has now.

    Args:
        pipe: the pipeline.
        sampler: the name of a sampler or a scheduler; None for the pipeline's own.
        args: the arguments of the pipeline's call.
        kwargs: those that are given by name.
        texts: the cache of encoded texts.
        generation: the future of the result.

    Raises:
        ValueError: an argument is not valid.
        TypeError: the arguments do not fit the pipeline's call.
    """
    parts = check_pipeline(pipe).parts
    # It is prepared later, in another thread, and so its noise is that of the generators' seeds.
    call = _kept(dataclasses.replace(read_call(pipe, args, kwargs), generators=()))
    scheduler = parts.scheduler if sampler is None else sampler
    if isinstance(scheduler, str):
        scheduler = scheduler_from_name(scheduler, parts.scheduler)
    if not isinstance(scheduler, Scheduler):
        raise ValueError(
            "sampler must be the name of a sampler or a scheduler, such as 'euler' or "
            f"EulerDiscreteScheduler() (got {shortened(scheduler)})"
        )
    # What the pipeline's owner changes later concerns later calls.
    params: dict[str, Any] = {}
    models = {name: model.bound_to(params, name) for name, model in parts.models.items()}
    copies = {"models": models, "params": params, "tokenizers": dict(parts.tokenizers)}
    stores = {"adapters": parts.adapters, "ip_adapters": parts.ip_adapters}
    copies |= {name: store.snapshot() for name, store in stores.items()}
    c = dataclasses.replace(parts, scheduler=scheduler, text_cache=texts, **copies)
    call, mixture = choose_adapters(c, call)
    return Request(pipe, c, call, generation, mixture)


def check_pipeline(pipe: Any) -> Any:
    """Returns a pipeline as it is, and raises ValueError for anything else."""
    if not isinstance(getattr(pipe, "parts", None), Components):
        raise ValueError(
            "pipe must be a pipeline, as DiffusionPipeline.from_pretrained(...) gives "
            f"(got {shortened(pipe)})"
        )
    return pipe


def prepare(request: Request, call: Call | None = None) -> PreparedRun:
    """Returns the run of a request, after merging those adapters that are not of low rank.

    call: a call in the place of its own, such as one with further images.

    Raises:
        ValueError: an argument of its call is not valid.
    """
    request.c = with_mixture(request.c, request.mixture)
    return prepare_call(request.pipe.task, request.c, request.call if call is None else call)


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


_TEXTS = tuple(f"{prefix}prompt{end}" for prefix in ("", "negative_") for end in ("", "_2", "_3"))
_IMAGES = (
    *("prompt_embeds", "negative_prompt_embeds", "latents", "masked_image_latents"),
    *("pooled_prompt_embeds", "negative_pooled_prompt_embeds"),
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
    numbers, or with lists whose lengths do not fit.
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
    if seeds is not None:
        changes["seed"] = seeds + seeds[-1:] * (size - n * m)
    return dataclasses.replace(call, **changes, num_images_per_prompt=1), n * m


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _is_single(value: Any) -> bool:
    """Returns whether a value is one input image, which all images share, or none."""
    return value is None or isinstance(value, str | Path | PIL.Image.Image)
