"""Requests that arrive at random at an engine, by three policies, at several loads.

Each policy gets the same requests at the same times: one at a time, whole batches of equals, and a
running batch. The load is the rate of arrivals over the rate at which one request after the other
can be made. Then the longest gap between steps while programs for another size are compiled, and
what the engine costs beside calls of the pipeline in a loop. With --server-async, diffusers' own
example of a server gets the same requests, too.
    python benchmarks/serve_cpu.py [--jobs 60] [--load 0.5 0.8 1.0 1.5] [--model emoji]
        [--server-async DIFFUSERS/examples/server-async]
    python benchmarks/serve_cpu.py --only-overhead [--slow-size 192] [--rounds 12]
"""

import argparse
import dataclasses
import itertools
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
from continuous_cpu import requests
from machine import describe
from server_async import ServerAsync

from diffusax.checkpoints.hub import EMBEDDED
from diffusax.samplers import scheduler_from_name
from diffusax.serving import Generation
from diffusax.serving.catalogue.catalogue import Catalogue
from diffusax.serving.engine.engine import Engine, EngineSettings
from diffusax.serving.engine.jobs import Event, Job
from diffusax.serving.requests.errors import Busy


@dataclasses.dataclass
class Times:
    """When a request arrived, was first seen, and was done (time.perf_counter)."""

    arrived: float
    first: float | None = None
    done: float | None = None

    def note(self, event: Event) -> None:
        """Takes down the time of an event."""
        now = time.perf_counter()
        if event.kind in ("preview", "image") and self.first is None:
            self.first = now
        if event.kind == "end":
            self.done = now


def main() -> None:
    """Prints a line for each load and policy."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=60)
    parser.add_argument("--load", type=float, nargs="*", default=[0.5, 0.8, 1.0, 1.5])
    parser.add_argument("--policies", nargs="+", default=["one", "whole", "running"])
    parser.add_argument("--lanes", type=int, default=8)
    parser.add_argument("--model", default="emoji")
    parser.add_argument("--size", type=int, help="pixels; by default the model's own size")
    parser.add_argument("--slow-size", type=int, default=256, help="where a step takes over 100 ms")
    parser.add_argument("--queue", type=int, default=16, help="requests that may wait")
    parser.add_argument("--rounds", type=int, default=12, help="of requests beside calls")
    parser.add_argument("--only-overhead", action="store_true", help="only these rounds")
    parser.add_argument("--server-async", type=Path, help="diffusers' folder of that name")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    print(describe())
    catalogue = Catalogue(args.model)
    generations = [
        Generation(**call, width=args.size, height=args.size) for call in requests(args.jobs)
    ]
    bounds = {"lanes": args.lanes, "most_queued": args.queue}
    if args.only_overhead:
        with Engine(catalogue, EngineSettings(**bounds)) as engine:
            print(f"beside a loop of calls: {overhead(engine, args.slow_size, args.rounds)}")
        return
    engines: dict[str, Any] = {
        name: Engine(catalogue, EngineSettings(policy=name, **bounds)) for name in args.policies
    }
    for name, engine in engines.items():
        began = time.perf_counter()
        engine.warm(generations[:3])
        closed_loop(engine, generations)
        while engine.state().compiling:
            time.sleep(0.1)
        print(f"{name}: warm after {time.perf_counter() - began:.1f} s", flush=True)
    if args.server_async is not None:
        path = catalogue.entry().path
        checkpoint = EMBEDDED.get(str(path), path)
        engines["server-async"] = ServerAsync(args.server_async, checkpoint)
        closed_loop(engines["server-async"], generations[:3])
    for engine in engines.values():
        seconds = closed_loop(engine, generations)
        print(f"{engine.settings.policy}: {1 / seconds:.2f} requests/s without a pause", flush=True)
    seconds = closed_loop(next(iter(engines.values())), generations)
    for load in args.load:
        gaps = np.random.default_rng(args.seed).exponential(seconds / load, len(generations))
        for name, engine in engines.items():
            print(f"load {load:.0%}, {name}: {report(engine, generations, gaps)}", flush=True)
    engine = engines[args.policies[-1]]
    print(f"longest gap while another size compiles: {gap_beside(engine, generations)}", flush=True)
    print(f"beside a loop of calls: {overhead(engine, args.slow_size, args.rounds)}", flush=True)
    for engine in engines.values():
        engine.close()


def closed_loop(engine: Engine, generations: list[Generation]) -> float:
    """Returns the mean seconds of a request where the queue is never empty nor full."""
    began, waiting = time.perf_counter(), []
    for generation in generations:
        waiting.append(engine.submit(generation))
        if len(waiting) > engine.settings.most_queued // 2:
            waiting.pop(0).wait()
    for job in waiting:
        job.wait()
    return (time.perf_counter() - began) / len(generations)


def report(engine: Engine, generations: list[Generation], gaps: Any) -> str:
    """Sends requests after these pauses, and returns what became of them."""
    found: list[tuple[Job, Times]] = []
    refused, began = 0, time.perf_counter()
    for generation, at in zip(generations, np.cumsum(gaps), strict=True):
        time.sleep(max(0.0, began + at - time.perf_counter()))
        times = Times(began + at)
        try:
            job = engine.submit(generation)
        except Busy:
            refused += 1
            continue
        job.listen(times.note, previews=True)
        found.append((job, times))
    for job, _ in found:
        assert job.wait() == "done", job.error
    whole = time.perf_counter() - began
    return (
        f"to the image {percentiles([t.done - t.arrived for _, t in found])}, to the first preview "
        f"{percentiles([t.first - t.arrived for _, t in found])}, {len(found) / whole:.2f} "
        f"requests/s, {refused} refused, longest gap {engine.metrics.longest_gap(whole):.2f} s"
    )


def percentiles(values: list[float]) -> str:
    """Returns p50 and p99."""
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return f"{cuts[49]:.2f} / {cuts[98]:.2f} s"


def gap_beside(engine: Engine, generations: list[Generation]) -> str:
    """Keeps the engine busy while requests of a size come that no program is compiled for."""
    own = engine.catalogue.entry()
    # Another number each time, so that no program is found on disk.
    width = own.width + own.multiple * (1 + time.time_ns() % 97)
    began = time.perf_counter()
    other = engine.submit(dataclasses.replace(generations[0], width=width, height=own.height))
    running: list[Job] = []
    for generation in itertools.cycle(generations):
        running = [job for job in running if not job.is_over]
        if other.is_over:
            break
        if len(running) < 3:
            running.append(engine.submit(generation))
        time.sleep(0.01)
    for job in running:
        job.wait()
    whole = time.perf_counter() - began
    return (
        f"{engine.metrics.longest_gap(whole):.2f} s, and {whole:.1f} s until {width}x{own.height} "
        "was drawn"
    )


def overhead(engine: Engine, size: int, rounds: int) -> str:
    """Compares requests one after the other with calls of the pipeline, in turns.

    By the clock, and by the seconds of all cores, which other work on the machine changes less.
    """
    generation = Generation(
        prompt="a red apple",
        width=size,
        height=size,
        num_inference_steps=8,
        guidance_scale=2.0,
        sampler="euler",
    )
    engine.warm([generation])
    catalogue = engine.catalogue
    pipe, arguments = catalogue.acquire(catalogue.check(generation))
    own, pipe.scheduler = pipe.scheduler, scheduler_from_name("euler", pipe.scheduler)
    took: dict[str, list[tuple[float, float]]] = {"call": [], "job": []}
    for seed in range(1 + rounds):
        for name, found in took.items():
            began = time.perf_counter(), time.process_time()
            if name == "call":
                pipe(**arguments, seed=seed)
            else:
                engine.submit(dataclasses.replace(generation, seed=seed)).wait()
            found.append((time.perf_counter() - began[0], time.process_time() - began[1]))
    pipe.scheduler = own
    catalogue.release(pipe)
    call, job = (
        [statistics.median(column) for column in zip(*found[1:])] for found in took.values()
    )
    return (
        f"{job[0]:.3f} s against {call[0]:.3f} s ({job[0] / call[0] - 1:+.1%}), of all cores "
        f"{job[1]:.3f} s against {call[1]:.3f} s ({job[1] / call[1] - 1:+.1%}), "
        f"{1000 * call[0] / 8:.0f} ms a step"
    )


if __name__ == "__main__":
    main()
