"""Holds the private and undocumented names of JAX, Flax, tyro and Ray, each in a function.

Each says why no public name does, and with which versions it was tried; "read in" are versions
whose sources have the name, but that were not run. tests/runtime/test_compat.py tries them all, so
that a new version that lacks one fails there. Those of PyTorch are in `interop.torch.compat`.
"""

import contextlib
import functools
import importlib
import pickle
import threading
from collections.abc import Iterator, Mapping
from typing import Any

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
"""What JAX calls its measurement of a compilation. No public name; jax 0.10.2, read in 0.11.1."""


@functools.cache
def pretend_cudnn() -> None:
    """Lets JAX write calls of cuDNN on a machine that has no cuDNN.

    JAX asks for cuDNN's version while it traces an attention, to choose among calls. This answers
    9.8 where there is none, which JAX's CUDA plugins come with at least; a program that is compiled
    for another platform holds no such call. No option says so; jax 0.10.2, read in 0.11.1.
    """
    try:
        module: Any = importlib.import_module("jax._src.cudnn.fused_attention_stablehlo")
    except ImportError:
        return
    if getattr(module, "cuda_versions", None) is None and hasattr(module, "check_cudnn_version"):
        module.check_cudnn_version = lambda: 90800


def effort_options(effort: float) -> dict[str, Any]:
    """Returns the compiler options for an effort for a short execution time, from -1 to 1.

    JAX 0.11 has levels in its place. JAX lists no compiler options; jax 0.10.2, 0.11.2.
    """
    import jax

    if hasattr(jax.config, "jax_exec_time_optimization_effort"):
        return {"exec_time_optimization_effort": effort}
    return {"optimization_level": "O1" if effort < 0 else "O2" if effort == 0 else "O3"}


_BUILDING = threading.RLock()


@contextlib.contextmanager
def unchecked_modules() -> Iterator[None]:
    """Lets Flax build modules inside the context without checking each attribute twice.

    The checks find arrays where none may be, and change nothing; they are half of the time in which
    a module without arrays is built. Modules that other threads build meanwhile go unchecked, too.
    No option switches the checks off; flax 0.12.8.
    """
    from flax import nnx

    with _BUILDING:
        checked = getattr(nnx.Pytree, "_check_value", None)
        if checked is None:
            # A Flax without them is only slower.
            yield
            return
        nnx.Pytree._check_value = lambda *args, **kwargs: None  # type: ignore[method-assign]
        try:
            yield
        finally:
            nnx.Pytree._check_value = checked  # type: ignore[method-assign]


def scan_sizes(params: Mapping[str, Any], inputs: int) -> tuple[int, int]:
    """Returns how many of a scan's inputs are constants and how many are carried on.

    Args:
        params: those of the equation in a jaxpr, which no documentation promises.
        inputs: the number of all its inputs.

    Until JAX 0.11 they were numbers, since 0.12 they are trees; jax 0.10.2, 0.12.0.
    """
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carried, _ = params["ft_in"].update(list(range(inputs))).unpack()
    return len(list(consts)), len(list(carried))


def is_tracing() -> bool:
    """Returns whether JAX is tracing a function, or computing with tracers, in this thread.

    A function without arguments that are traced cannot tell otherwise; jax 0.10.2, read in 0.11.1.
    """
    return not importlib.import_module("jax._src.core").trace_state_clean()


def joined_part() -> tuple[int, int]:
    """Says which of how many processes this one has joined as, without making devices.

    `jax.process_index` would make them; jax 0.10.2, read in 0.11.1.
    """
    state = _distributed_state()
    return state.process_id, state.num_processes


def forget_joining() -> None:
    """Lets JAX make the devices of a process on its own, after `jax.distributed.shutdown`.

    That leaves both numbers, and devices made as some of several processes' would look for the
    others as soon as two of them exchange something; jax 0.10.2, read in 0.11.1.
    """
    state = _distributed_state()
    state.process_id, state.num_processes = 0, 1


def _distributed_state() -> Any:
    return importlib.import_module("jax._src.distributed").global_state


def use_argparse() -> None:
    """Lets tyro parse with argparse, whose errors name the option that is wrong.

    Also without boxes and colours. Otherwise only environment variables choose; tyro 1.0.17.
    """
    import tyro

    tyro._experimental_options["backend"] = "argparse"
    tyro._experimental_options["utf8_boxes"] = False
    tyro._experimental_options["ansi_codes"] = False


def forget_unrecognized() -> None:
    """Lets tyro forget the arguments that it did not recognise in its last run.

    By itself it forgets them only where `prog` is one word; tyro 1.0.17.
    """
    from tyro._backends import _argparse_formatter

    _argparse_formatter.global_unrecognized_arg_and_prog.clear()


def command_groups(parser: Any) -> Iterator[tuple[str, str, list[dict[str, Any]]]]:
    """Lists the groups of a command's options: title, description and options.

    Each option is told by its name, flags, text (with its default), and whether it is positional
    and required. The first group is the command's own, and has its description. argparse's parser
    has other texts, and no groups within groups; tyro 1.0.17.

    Args:
        parser: what `tyro.extras.get_parser` makes of a command.
    """
    yield from _groups(parser._parser_specification)


def ray_scope(argument: Any) -> Mapping[str, Any]:
    """Returns the ASGI scope of an HTTP request that a router of Ray Serve sees; else nothing.

    Ray's proxy, which this trusts as Ray's replicas do, gives it as a pickle of a class that is
    not public; ray 2.60.
    """
    if not isinstance(argument, bytes):
        return {}
    found: Mapping[str, Any] = getattr(pickle.loads(argument), "asgi_scope", {})
    return found


def _groups(specification: Any) -> Iterator[tuple[str, str, list[dict[str, Any]]]]:
    options = [_option(arg) for arg in specification.args if not arg.is_suppressed()]
    yield specification.extern_prefix, specification.description, options
    for child in specification.child_from_prefix.values():
        yield from _groups(child)


def _option(arg: Any) -> dict[str, Any]:
    from tyro._arguments import generate_argument_helptext

    _, flags = arg.get_invocation_text()
    positional = bool(arg.is_positional())
    return {
        "name": arg.field.intern_name if positional else arg.lowered.name_or_flags[0],
        "flags": flags.as_str_no_ansi(),
        "text": generate_argument_helptext(arg, arg.lowered).as_str_no_ansi(),
        "positional": positional,
        "required": bool(arg.lowered.required),
    }
