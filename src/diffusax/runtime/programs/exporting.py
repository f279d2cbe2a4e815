"""Writes programs as StableHLO files that run without diffusax on any platform (jax.export)."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import export

from diffusax.boundary.files import written_whole
from diffusax.boundary.messages import require_extra
from diffusax.runtime.devices.lowering import PLATFORMS
from diffusax.runtime.devices.mesh import tree_name
from diffusax.runtime.devices.shares import NO_IMAGES
from diffusax.runtime.programs.program import Request
from diffusax.runtime.random.noise import as_key

# The calls of cuDNN's kernels, which JAX does not promise to keep as long as StableHLO itself.
_CALLS = ("__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward")


def export_requests(
    found: Sequence[Request],
    folder: Path,
    platforms: Sequence[str],
    *,
    image_axes: Callable[[Request], Any] | None = None,
    parameter_files: Callable[[Request], dict[str, str]] = lambda request: {},
) -> list[Path]:
    """Writes each program as NAME.stablehlo, and a description of its arguments to programs.json.

    `jax.export.deserialize(data).call(arguments)` runs one; arguments are a flat dictionary from
    the names in programs.json to arrays. Random keys are passed as their data, 2 uint32.

    Args:
        found: the programs with their shapes, see `ahead.requests`.
        folder: the folder for the files.
        platforms: some of `runtime.lowering.PLATFORMS`.
        image_axes: for each argument of a program the axis that counts images, or NO_IMAGES, see
            `ahead.image_axes`: the exported program then takes any number of them. None keeps every
            shape as it is.
        parameter_files: the files of a program's parameters, by the prefix of their names in its
            arguments; programs.json lists them.

    Raises:
        ValueError: a platform is unknown, or a program cannot be exported; says why.
        ImportError: flatbuffers is not installed; names the extra.
    """
    unknown = [p for p in platforms if p not in PLATFORMS]
    if unknown or not platforms:
        raise ValueError(f"platforms must be of {', '.join(PLATFORMS)} (got {', '.join(unknown)})")
    require_extra("flatbuffers", "export")
    folder.mkdir(parents=True, exist_ok=True)
    index, files = {}, []
    for request in found:
        exported = _export(request, platforms, image_axes)
        path = folder / f"{request.program.name}.stablehlo"
        with written_whole(path) as partial:
            partial.write_bytes(exported.serialize())
        files.append(path)
        names = sorted(_flat(request.dynamic, request.program.dynamic))
        shapes = {name: str(aval) for name, aval in zip(names, exported.in_avals)}
        index[path.name] = {
            "platforms": list(platforms),
            "arguments": shapes,
            "results": [str(aval) for aval in exported.out_avals],
            "parameters": parameter_files(request),
        }
    with written_whole(folder / "programs.json") as partial:
        partial.write_text(json.dumps(index, indent=2) + "\n", "utf-8")
    return [*files, folder / "programs.json"]


def _export(
    request: Request, platforms: Sequence[str], image_axes: Callable[[Request], Any] | None
) -> export.Exported:
    program = request.program
    leaves, treedef = jax.tree.flatten(request.dynamic)
    names = _names(request.dynamic, program.dynamic)
    keys = [_is_key(leaf) for leaf in leaves]

    def run(arguments: dict[str, Any]) -> Any:
        given = [
            as_key(arguments[name]) if is_key else arguments[name]
            for name, is_key in zip(names, keys)
        ]
        dynamic = dict(zip(program.dynamic, jax.tree.unflatten(treedef, given)))
        result = program.__wrapped__(**dict(request.static), **dynamic)  # type: ignore[attr-defined]
        return _plain(result)

    scope = export.SymbolicScope()
    axes = image_axes(request) if image_axes else [NO_IMAGES] * len(leaves)
    open_axes = dict(zip(names, jax.tree.leaves(axes)))
    shapes = {
        name: _open(
            jax.eval_shape(jax.random.key_data, leaf) if is_key else leaf, open_axes[name], scope
        )
        for name, leaf, is_key in zip(names, leaves, keys)
    }
    checks = [export.DisabledSafetyCheck.custom_call(name) for name in _CALLS]
    make = export.export(jax.jit(run), platforms=list(platforms), disabled_checks=checks)
    try:
        return make(shapes)
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"{program.name} cannot be exported: {reason}") from error


def _plain(tree: Any) -> Any:
    """Named tuples as plain ones of what they hold: callers of the program need not know them."""
    if isinstance(tree, tuple):
        return tuple(_plain(leaf) for leaf in tree if leaf is not None)
    return tree


def _open(x: Any, axis: int, scope: Any) -> jax.ShapeDtypeStruct:
    """Returns the shape with the symbolic size "b" on an axis."""
    if axis == NO_IMAGES:
        return jax.ShapeDtypeStruct(x.shape, x.dtype)
    spec = ",".join("b" if i == axis else str(n) for i, n in enumerate(x.shape))
    return jax.ShapeDtypeStruct(export.symbolic_shape(spec, scope=scope), x.dtype)


def _names(dynamic: Any, arguments: Sequence[str]) -> list[str]:
    """Returns a name for each array: its argument and the path inside it, joined by dots."""
    paths, _ = jax.tree_util.tree_flatten_with_path(tuple(dynamic))
    named = [(arguments[path[0].idx], tree_name(path[1:])) for path, _ in paths]
    return [".".join(filter(None, name)) for name in named]


def _flat(dynamic: Any, arguments: Sequence[str]) -> dict[str, Any]:
    return dict(zip(_names(dynamic, arguments), jax.tree.leaves(dynamic)))


def flat_arguments(request: Request, arguments: Sequence[Any]) -> dict[str, Any]:
    """Returns the arguments of a request's call in the form that its exported program takes."""
    flat = _flat(tuple(arguments), request.program.dynamic)
    return {name: jax.random.key_data(x) if _is_key(x) else x for name, x in flat.items()}


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
