"""Methods of pipelines that compile programs before the first call.

They import what they need themselves, which calls need not.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar, Self

import jax
import numpy as np
from jax.sharding import Mesh
from tqdm.auto import tqdm

from diffusax.pipelines.components.components import Components
from diffusax.runtime.devices.host import in_host_memory
from diffusax.runtime.devices.memory import array_bytes
from diffusax.runtime.programs.program import (
    PROGRAMS,
    Request,
    compile_request,
    describe,
    digest,
)


class AheadOfTime:
    """The methods of every pipeline for compilation ahead of time."""

    parts: Components
    task: ClassVar[Any]

    def compile(
        self,
        batch_sizes: Sequence[int] = (1,),
        sizes: Sequence[tuple[int, int]] | None = None,
        **arguments: Any,
    ) -> Self:
        """Compiles the programs for these shapes now, and returns the pipeline itself.

        Tiled decoding, and PyTorch's noise for samplers that draw noise in each row, use other
        programs, which are compiled in the first call.

        Args:
            batch_sizes: the numbers of images.
            sizes: heights and widths in pixels; by default the size that the denoiser was trained
                at.
            **arguments: arguments of the later calls that decide what is compiled, such as
                `guidance_scale=1` (Z-Image, Krea 2: 0) for calls without guidance.

        Raises:
            ValueError: an argument is unknown or not valid, or there are several processes.
        """
        from diffusax.pipelines.pipeline.ahead import encodes_texts, example_call, requests

        _check_alone()
        found: list[Request] = []
        for size in sizes or (None,):
            for b in batch_sizes:
                call = example_call(self, b, size, arguments)
                found += requests(self.parts, self.task, call)
        if self.parts.encoder_mesh is not None:
            compile_all([r for r in found if encodes_texts(r)], self.parts.encoder_mesh)
            found = [r for r in found if not encodes_texts(r)]
        compile_all(found, self.parts.mesh)
        return self

    def save_compiled(self, folder: str | Path) -> list[Path]:
        """Writes the programs that `compile` has made, for processes on machines like this one.

        Raises:
            ValueError: nothing was compiled ahead of time.
        """
        from diffusax.runtime.programs.saved import save_executables

        _check_alone()
        return save_executables(folder)

    def load_compiled(self, folder: str | Path) -> int:
        """Reads what `save_compiled` wrote; load only files that you trust.

        Returns:
            The number of programs that can be used. Files of other versions or devices are left
            out, with a warning.
        """
        from diffusax.runtime.programs.saved import load_executables

        _check_alone()
        return load_executables(folder)

    def memory(
        self,
        topology: str | None = None,
        *,
        mesh: str | None = None,
        batch_size: int = 1,
        size: tuple[int, int] | None = None,
        **arguments: Any,
    ) -> dict[str, dict[str, float]]:
        """Returns the memory of parameters by component and of compiled programs by shape, in GB.

        The figures are per device: its share of the parameters, and each program's temporary
        buffers and code. What `enable_model_cpu_offload` or `enable_group_offload` keeps in the
        host's memory is listed under "host".

        With a topology, the programs of a call are compiled for its devices, which may be
        elsewhere, and nothing is kept. Then "pipeline" has the GB of all parameters, the peak of a
        call on each device, the device's memory, what of it is usable (of GPUs 92%, if
        XLA_CLIENT_MEM_FRACTION=0.92 is set), and whether the peak fits into that; each program has
        its GB (arguments, results, temporaries, code, peak), the GB that it moves, its operations
        in TFLOP, the least seconds that they take, and on GPUs its kernels. A loop counts once, so
        denoising is one step.

        Args:
            topology: TPUs or GPUs such as "v5e:2x2", "h200:1", "h100:8" or "2xh100:8".
            mesh: how the call is spread over them, such as "data=4,tensor=2"; by default "data".
            batch_size: the number of images, over all devices.
            size: height and width in pixels; by default the pipeline's own.
            **arguments: further arguments of the call, as for `compile`.

        Raises:
            ValueError: there is no such topology, an argument is not valid, or other arguments are
                given without a topology.
            ImportError: the compiler for the topology is not installed; names the extra.
        """
        from diffusax.pipelines.pipeline.ahead import memory_there

        if topology is not None:
            return memory_there(self, topology, mesh, batch_size, size, arguments)
        if mesh is not None or batch_size != 1 or size is not None or arguments:
            raise ValueError(
                "mesh, batch_size, size and arguments of a call need a topology, such as h200:1; "
                "without one, memory tells of the programs that are compiled already"
            )
        return memory_of(self.parts.params)


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

    Parameters that lie in the host's memory are listed under "host".
    """
    from diffusax.runtime.programs.cost import cost_of

    def share(x: Any) -> float:
        return array_bytes(x, getattr(x, "sharding", None)) / 1e9

    report: dict[str, dict[str, float]] = {"parameters": {}}
    for name, tree in params.items():
        for x in jax.tree.leaves(tree):
            host = isinstance(x, np.ndarray) or in_host_memory(x)
            shares = report.setdefault("host" if host else "parameters", {})
            shares[name] = shares.get(name, 0.0) + share(x)
    for program in PROGRAMS.values():
        for request_key, executable in program.executables.items():
            cost = cost_of(executable.compiled)
            report[f"{program.name} {digest(request_key)}"] = {
                "temporaries": cost.temporaries,
                "code": cost.code,
            }
    return report


def _check_alone() -> None:
    if jax.process_count() > 1:
        raise ValueError(
            "programs are compiled ahead, saved and loaded in one process (got "
            f"{jax.process_count()}); the compilation cache serves several"
        )
