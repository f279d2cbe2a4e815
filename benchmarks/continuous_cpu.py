"""Requests that arrive at random: one at a time, whole batches of equals, and a running batch.

Each server gets the same requests at the same times. They differ in sampler, steps, guidance and
prompt. The load is the rate of arrivals over the rate at which one picture at a time can be served.
Then the longest gap between steps of a running batch, without and with a request beside it whose
adapter of all attention layers, a LoHa, a LoKr or a DoRA, is merged into the parameters for the
first time; without loads only that.
    python benchmarks/continuous_cpu.py [--requests 300] [--load 0.5 0.8 1.2]
    python benchmarks/continuous_cpu.py --load
"""

import argparse
import collections
import dataclasses
import gc
import itertools
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from machine import describe

import diffusax
from diffusax.lora import Lora
from diffusax.models.adapters.low_rank import kernel_shapes
from diffusax.samplers import scheduler_from_name

SAMPLERS = ("dpm++2m", "euler", "euler_a", "heun", "ddim", "unipc", "dpm++2m_sde", "lcm")
PROMPTS = ("a red apple", "lion", "fox", "rocket", "pizza", "frog")


@dataclasses.dataclass
class Times:
    """When a request arrived, had its first step, and was answered, in seconds."""

    arrived: float = 0.0
    first: float = 0.0
    done: float = 0.0


def main() -> None:
    """Prints a line for each load and server."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--load", type=float, nargs="*", default=[0.5, 0.8, 1.2])
    parser.add_argument("--lanes", type=int, default=8)
    parser.add_argument("--model", default="emoji")
    parser.add_argument("--rounds", type=int, default=8, help="of adapters that are merged")
    args = parser.parse_args()
    print(describe())
    # As `diffusax serve` has it: a collection of all objects halts every thread for 0.1 to 0.2 s.
    gc.set_threshold(100_000, 50, 100)
    pipe = diffusax.DiffusionPipeline.from_pretrained(args.model)
    pipe.set_progress_bar_config(disable=True)
    calls = requests(args.requests)
    if not args.load:
        report_gaps(pipe, args.lanes, args.rounds)
        return
    servers = {
        "one at a time": OneByOne(pipe, 1),
        "batches of equals": OneByOne(pipe, args.lanes // 2),
        "running batch": Running(pipe, args.lanes),
    }
    for server in servers.values():
        serve(server, calls, [0.0] * len(calls))
    seconds = capacity(pipe, calls)
    print(f"one picture at a time: {1 / seconds:.2f} images/s, {1000 * seconds:.0f} ms each")
    for load in args.load:
        gaps = np.random.default_rng(1).exponential(seconds / load, len(calls))
        for name, server in servers.items():
            report(f"load {load:.0%}, {name}", serve(server, calls, list(np.cumsum(gaps))))
    for server in servers.values():
        server.close()
    report_gaps(pipe, args.lanes, args.rounds)


def requests(count: int) -> list[dict[str, Any]]:
    """Mixed calls, always the same."""
    r = np.random.default_rng(0)
    return [
        {
            "prompt": f"a {PROMPTS[i % len(PROMPTS)]}",
            "sampler": SAMPLERS[i % len(SAMPLERS)],
            "num_inference_steps": int(r.integers(4, 31)),
            "guidance_scale": float(r.choice([1.0, 2.0, 4.0])),
            "seed": i,
        }
        for i in range(count)
    ]


def capacity(pipe: Any, calls: list[dict[str, Any]]) -> float:
    """The mean seconds of a call, one after the other."""
    server = OneByOne(pipe, 1)
    began = time.perf_counter()
    serve(server, calls, [0.0] * len(calls))
    server.close()
    return (time.perf_counter() - began) / len(calls)


class OneByOne:
    """Runs requests in the order of their arrival, those with equal settings together."""

    def __init__(self, pipe: Any, together: int):
        self._pipe, self._own, self._together = pipe, pipe.scheduler, together
        self._waiting: collections.deque[tuple[dict[str, Any], Times, Callable[[], None]]] = (
            collections.deque()
        )
        self._changed, self._closing = threading.Condition(), False
        for n in range(1, together + 1):
            for scale in (1.0, 2.0):
                options = {"guidance_scale": scale, "num_inference_steps": 4, "output_type": "np"}
                pipe(["a"] * n, seed=[0] * n, **options)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def submit(self, call: dict[str, Any], times: Times, answered: Callable[[], None]) -> None:
        """Adds a request."""
        with self._changed:
            self._waiting.append((call, times, answered))
            self._changed.notify()

    def close(self) -> None:
        """Ends the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _serve(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._closing:
                    self._changed.wait()
                if not self._waiting:
                    return
                group = self._next_group()
            began = time.perf_counter()
            call = dict(group[0][0])
            name = call.pop("sampler")
            self._pipe.scheduler = scheduler_from_name(name, self._own)
            call["prompt"] = [one["prompt"] for one, _, _ in group]
            call["seed"] = [one["seed"] for one, _, _ in group]
            self._pipe(**call, output_type="np")
            self._pipe.scheduler = self._own
            now = time.perf_counter()
            for _, times, answered in group:
                times.first = began + (now - began) / call["num_inference_steps"]
                times.done = now
                answered()

    def _next_group(self) -> list[Any]:
        def settings(call: dict[str, Any]) -> Any:
            return call["sampler"], call["num_inference_steps"], call["guidance_scale"]

        first = settings(self._waiting[0][0])
        group = [one for one in self._waiting if settings(one[0]) == first][: self._together]
        for one in group:
            self._waiting.remove(one)
        return group


class Running:
    """Submits requests to a running batch."""

    def __init__(self, pipe: Any, lanes: int):
        self._batch = diffusax.RunningBatch(pipe, lanes=lanes)
        for scale in (1.0, 2.0):
            self._batch.warm("a", guidance_scale=scale, output_type="np", num_inference_steps=4)

    def submit(self, call: dict[str, Any], times: Times, answered: Callable[[], None]) -> None:
        """Adds a request."""
        generation = self._batch.submit(**call, output_type="np")
        # Asking for the progress again and again would take time from the two cores.
        set_rows = generation.set_rows

        def note_rows(image: int, done: int, total: int) -> None:
            if done and not times.first:
                times.first = time.perf_counter()
            set_rows(image, done, total)

        def note_end(_: Any) -> None:
            times.done = time.perf_counter()
            times.first = times.first or times.done
            answered()

        generation.set_rows = note_rows
        generation.add_done_callback(note_end)

    def close(self) -> None:
        """Ends the threads."""
        self._batch.close()


def serve(server: Any, calls: list[dict[str, Any]], arrivals: list[float]) -> list[Times]:
    """Sends the calls at these seconds, and waits for all answers."""
    left = threading.Semaphore(0)
    began, found = time.perf_counter(), []
    for call, at in zip(calls, arrivals, strict=True):
        time.sleep(max(0.0, began + at - time.perf_counter()))
        times = Times(arrived=began + at)
        found.append(times)
        server.submit(call, times, left.release)
    for _ in calls:
        left.acquire()
    return found


def report(name: str, times: list[Times]) -> None:
    """Prints a line."""

    def percentiles(values: list[float]) -> str:
        cuts = statistics.quantiles(values, n=100, method="inclusive")
        return f"{cuts[49]:.2f} / {cuts[98]:.2f} s"

    pictures = percentiles([t.done - t.arrived for t in times])
    steps = percentiles([t.first - t.arrived for t in times])
    speed = len(times) / (max(t.done for t in times) - min(t.arrived for t in times))
    print(
        f"{name}: to a picture {pictures} (p50 / p99), to the first step {steps}, "
        f"{speed:.2f} images/s",
        flush=True,
    )


def report_gaps(pipe: Any, lanes: int, rounds: int) -> None:
    """Prints the longest gaps between steps, in turns without and with an adapter that is new."""
    rows: list[float] = []
    call = {"guidance_scale": 2.0, "num_inference_steps": 60, "output_type": "np"}
    gaps: dict[str, list[float]] = {"without": [], **{kind: [] for kind in CHANGES}}
    waits: dict[str, list[float]] = {kind: [] for kind in CHANGES}

    def note(image: int, done: int, total: int) -> None:
        rows.append(time.perf_counter())

    with diffusax.RunningBatch(pipe, lanes=lanes) as batch:
        batch.warm("a", **call)
        for kind in CHANGES:
            merged(pipe, batch, kind, 0)
        for i, kind in itertools.product(range(rounds), gaps):
            rows.clear()
            others = [batch.submit("a red apple", seed=seed, **call) for seed in range(2)]
            for other in others:
                other.set_rows = note
            while len(rows) < 20:
                time.sleep(0.01)
            if kind in waits:
                waits[kind].append(merged(pipe, batch, kind, 1 + i))
            for other in others:
                other.result()
            gaps[kind].append(max(b - a for a, b in itertools.pairwise(rows[20:])))
    for kind, found in gaps.items():
        middle, longest = 1000 * statistics.median(found), 1000 * max(found)
        call_of = "" if kind == "without" else f", its call {statistics.median(waits[kind]):.2f} s"
        print(f"longest gap, {kind}: {middle:.0f} ms, at most {longest:.0f} of {rounds}{call_of}")


def loha(draw: Any, c: int, d: int) -> dict[str, Any]:
    """Two products of rank 8, multiplied."""
    names = ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")
    return {name: draw(*size) for name, size in zip(names, ((d, 8), (8, c)) * 2)}


def lokr(draw: Any, c: int, d: int) -> dict[str, Any]:
    """A Kronecker product with a matrix of four rows and columns."""
    return {"lokr_w1": draw(4, 4), "lokr_w2": draw(d // 4, c // 4)}


def dora(draw: Any, c: int, d: int) -> dict[str, Any]:
    """A product of rank 8, and the lengths of the weight's rows."""
    lengths = np.ones(d, np.float32)
    return {"down": draw(8, c), "up": draw(d, 8), "factor": np.float32(1), "magnitude": lengths}


CHANGES = {"LoHa": loha, "LoKr": lokr, "DoRA": dora}
"""What is merged: a function (draw, c, d) -> a change of a kernel of c inputs and d outputs."""


def merged(pipe: Any, batch: diffusax.RunningBatch, kind: str, seed: int) -> float:
    """Returns the seconds of a call with a new adapter of all attention layers."""
    random = np.random.default_rng(seed)

    def draw(*size: int) -> Any:
        return 0.1 * random.normal(size=size).astype("f4")

    layers = {
        f"{path}.kernel": CHANGES[kind](draw, *shape)
        for path, shape in kernel_shapes(pipe.parts.networks["unet"]).items()
        if len(shape) == 2 and "attn" in path
    }
    pipe.add_adapter("new", Lora({}, {"unet": layers}))
    began = time.perf_counter()
    options = {"guidance_scale": 2.0, "num_inference_steps": 4, "output_type": "np"}
    batch.submit("a lion", adapters={"new": 1.0}, **options).result()
    took = time.perf_counter() - began
    pipe.delete_adapters("new")
    return took


if __name__ == "__main__":
    main()
