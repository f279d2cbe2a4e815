"""Requests of running batches: calls with what their pipelines have at the time."""

import contextlib
import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np
import PIL.Image

from diffusax.boundary.convert import shortened
from diffusax.pipelines.adapter_store import choose_adapters, with_mixture
from diffusax.pipelines.arguments import Call, bound_arguments, check_call
from diffusax.pipelines.components import Components
from diffusax.pipelines.generation import Generation, Request
from diffusax.pipelines.plan import PreparedRun
from diffusax.pipelines.text_cache import TextCache
from diffusax.pipelines.unused import prepared
from diffusax.samplers import Scheduler, scheduler_from_name


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
    signature = inspect.signature(type(pipe).__call__)
    call = check_call(bound_arguments(signature, pipe, args, kwargs))
    # It is prepared later, in another thread, and so its noise is that of the generators' seeds.
    call = _kept(dataclasses.replace(call, generators=()))
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
    c = dataclasses.replace(parts, scheduler=scheduler, texts=texts, **copies)
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
    """Returns the run of a request, after merging its adapters that are no products.

    call: a call in the place of its own, such as one with further images.

    Raises:
        ValueError: an argument of its call is not valid.
    """
    request.c = with_mixture(request.c, request.mixture)
    return prepared(request.pipe.task, request.c, request.call if call is None else call)


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
