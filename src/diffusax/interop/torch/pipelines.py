"""Compiles whole diffusers pipelines: finds their modules, and the methods that are called."""

import functools
from typing import Any, TypeVar, cast

import torch

from diffusax.interop.torch.compiling import CompiledMethod, CompiledModule, CompileOptions
from diffusax.interop.torch.fused import FusedLoop

Pipeline = TypeVar("Pipeline")

_LEFT_OUT = ("safety_checker",)
"""The safety checker runs on finished images, with branches that depend on what it finds."""


def compile(pipe: Pipeline, options: CompileOptions | None = None, **changes: Any) -> Pipeline:
    """Makes the modules of a PyTorch diffusers pipeline run in JAX, in place.

    The pipeline's own code still runs in PyTorch on the host: its call, scheduler, image processor,
    random numbers and callbacks are unchanged. Each module's `forward`, and its `encode` and
    `decode` where it has them, become programs that are compiled at the first call with new shapes.
    Parameters are read once; call `compile` again after changing them by hand.

    Args:
        pipe: a diffusers pipeline, or any torch.nn.Module.
        options: see `CompileOptions`.
        **changes: fields of `CompileOptions` that replace the options'.

    Returns:
        The same object.

    Raises:
        ValueError: a component is unknown.
        TypeError: an option is unknown.
    """
    options = CompileOptions(**{**vars(options or CompileOptions()), **changes})
    restore(pipe)
    for name, module in _chosen(pipe, options).items():
        CompiledModule(name, module, _methods(name, module, options), options)
    if options.fuse_loop:
        if isinstance(pipe, torch.nn.Module):
            raise ValueError("fuse_loop is for pipelines; a module has no loop")
        _fuse(pipe)
    return pipe


def _fuse(pipe: Any) -> None:
    """Changes the pipeline's class to one of the same name, whose call is the fused one."""
    cls, loop = type(pipe), FusedLoop(type(pipe).__call__)

    @functools.wraps(cls.__call__)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return loop(self, *args, **kwargs)

    made = type(cls.__name__, (cls,), {"__call__": call, "_fused_loop": loop})
    made.__module__, made.__qualname__ = cls.__module__, cls.__qualname__
    pipe.__class__ = made


def restore(pipe: Pipeline) -> Pipeline:
    """Makes the pipeline, or module, run its methods in PyTorch again, and returns it."""
    if "_fused_loop" in vars(type(pipe)):
        cast("Any", pipe).__class__ = type(pipe).__base__
    for module in _modules(pipe).values():
        for method in list(vars(module).values()):
            if isinstance(method, CompiledMethod):
                method.component.restore()
    return pipe


def _modules(pipe: Any) -> dict[str, torch.nn.Module]:
    if isinstance(pipe, torch.nn.Module):
        return {type(pipe).__name__: pipe}
    return {n: m for n, m in pipe.components.items() if isinstance(m, torch.nn.Module)}


def _chosen(pipe: Any, options: CompileOptions) -> dict[str, torch.nn.Module]:
    modules = _modules(pipe)
    for name in (*(options.components or ()), *options.exclude, *options.methods_to_compile):
        if name not in modules:
            known = ", ".join(modules) or "none"
            raise ValueError(f"the pipeline has no module {name!r}; it has {known}")
    if options.components is not None:
        modules = {name: modules[name] for name in options.components}
    else:
        modules = {n: m for n, m in modules.items() if n not in _LEFT_OUT}
    return {name: m for name, m in modules.items() if name not in options.exclude}


def _methods(name: str, module: torch.nn.Module, options: CompileOptions) -> tuple[str, ...]:
    """Returns the methods of a module that a pipeline calls."""
    usual = ("forward", "encode", "decode")
    more = options.methods_to_compile.get(name, ())
    for method in more:
        if not callable(getattr(module, method, None)):
            raise ValueError(f"{name} has no method {method!r}")
    found = (m for m in usual if callable(getattr(module, m, None)))
    return tuple(dict.fromkeys((*found, *more)))
