"""Requests of running batches: calls with what their pipelines have at the time."""

import dataclasses
import inspect
from typing import Any

from diffusax.pipelines.adapter_store import resolve_adapters
from diffusax.pipelines.arguments import bound_arguments, check_call
from diffusax.pipelines.generation import Generation, Request
from diffusax.pipelines.plan import PreparedRun
from diffusax.pipelines.text_cache import TextCache
from diffusax.runtime.mesh import in_mesh
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
    signature = inspect.signature(type(pipe).__call__)
    call = check_call(bound_arguments(signature, pipe, args, kwargs))
    parts = pipe.parts
    scheduler = parts.scheduler if sampler is None else sampler
    if isinstance(scheduler, str):
        scheduler = scheduler_from_name(scheduler, parts.scheduler)
    # What the pipeline's owner changes later concerns later calls.
    params: dict[str, Any] = {}
    models = {name: model.bound_to(params, name) for name, model in parts.models.items()}
    copies = {"models": models, "params": params, "tokenizers": dict(parts.tokenizers)}
    stores = {"adapters": parts.adapters, "ip_adapters": parts.ip_adapters}
    copies |= {name: store.snapshot() for name, store in stores.items()}
    c = dataclasses.replace(parts, scheduler=scheduler, texts=texts, **copies)
    c, call = resolve_adapters(c, call)
    return Request(pipe, c, call, generation)


def prepare(request: Request) -> PreparedRun:
    """Returns the run of a request.

    Raises:
        ValueError: an argument of its call is not valid.
    """
    with in_mesh(request.c.local_mesh):
        run: PreparedRun = request.pipe.task(request.c, request.call)
    return run
