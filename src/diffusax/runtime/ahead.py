"""Compiles several programs at once before they are called, and measures their memory."""

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from tqdm.auto import tqdm

from diffusax.runtime.programs.cost import cost_of
from diffusax.runtime.programs.program import (
    PROGRAMS,
    Request,
    compile_request,
    describe,
    digest,
)


def compile_all(found: Sequence[Request], mesh: Mesh | None, *, threads: int = 4) -> None:
    """Compiles the programs, several at once, with a progress bar; later calls use them."""
    bar = tqdm(total=len(found), desc="compiling", disable=None if len(found) > 1 else True)

    def one(request: Request) -> None:
        compile_request(request, mesh)
        bar.set_postfix_str(describe(request))
        bar.update()

    with bar, ThreadPoolExecutor(threads) as pool:
        list(pool.map(one, found))


def memory_of(params: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Returns GB on each device: of parameters by component, and of programs by shape.

    Parameters that lie in the host's memory, as NumPy arrays, are listed under "host".
    """

    def share(x: Any) -> float:
        shape = x.sharding.shard_shape(x.shape) if isinstance(x, jax.Array) else x.shape
        return math.prod(shape) * x.dtype.itemsize / 1e9

    report: dict[str, dict[str, float]] = {"parameters": {}}
    for name, tree in params.items():
        leaves = jax.tree.leaves(tree)
        place = "host" if isinstance(leaves[0], np.ndarray) else "parameters"
        report.setdefault(place, {})[name] = sum(map(share, leaves))
    for program in PROGRAMS.values():
        for request_key, compiled in program.executables.items():
            cost = cost_of(compiled)
            report[f"{program.name} {digest(request_key)}"] = {
                "temporaries": cost.temporaries,
                "code": cost.code,
            }
    return report
