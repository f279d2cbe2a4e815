"""diffusers' examples/server-async in the place of an engine, for serve_cpu.py.

Its server begins each request at once in a thread of its own (starlette's pool has 40) with a copy
of the pipeline and of the scheduler. It asks for CUDA or MPS and for Stable Diffusion 3; this
takes what it serves with, `RequestScopedPipeline`, for any checkpoint on the CPU, and leaves out
its HTTP, its files of images and its waits for the garbage collector. Requests' samplers are
ignored, as its server ignores them.
"""

import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from diffusax.serving import Generation

THREADS = 40


class ServerAsync:
    """The part of an engine that serve_cpu.py uses."""

    def __init__(self, folder: Path, checkpoint: Path):
        """Opens a checkpoint.

        folder: diffusers' examples/server-async.
        """
        sys.path.insert(0, str(folder))
        from diffusers import DiffusionPipeline
        from utils import RequestScopedPipeline  # type: ignore[attr-defined]

        pipe = DiffusionPipeline.from_pretrained(str(checkpoint), safety_checker=None)
        pipe.set_progress_bar_config(disable=True)
        self._pipe = RequestScopedPipeline(pipe)
        self._threads = ThreadPoolExecutor(THREADS)
        self.settings = SimpleNamespace(policy="server-async", most_queued=2 * THREADS)
        self.metrics = SimpleNamespace(longest_gap=lambda seconds: float("nan"))

    def submit(self, generation: Generation) -> "Request":
        """Begins a request."""
        return Request(self._threads.submit(self._draw, generation))

    def close(self) -> None:
        """Ends the threads."""
        self._threads.shutdown()

    def _draw(self, generation: Generation) -> Any:
        import torch

        return self._pipe.generate(
            prompt=generation.prompt,
            num_inference_steps=generation.num_inference_steps,
            guidance_scale=generation.guidance_scale,
            generator=torch.Generator().manual_seed(generation.seed or 0),
            output_type="pil",
        )


class Request:
    """The part of a job that serve_cpu.py uses. There are no previews."""

    def __init__(self, future: Future[Any]):
        self._future = future
        self.error: BaseException | None = None

    def listen(self, callback: Callable[[Any], None], *, previews: bool = False) -> None:
        """Calls back at the end."""
        del previews

        def done(_: Any) -> None:
            callback(SimpleNamespace(kind="image"))
            callback(SimpleNamespace(kind="end"))

        self._future.add_done_callback(done)

    def wait(self) -> str:
        """Returns the state at the end."""
        self.error = self._future.exception()
        return "failed" if self.error else "done"
