"""An engine under more load than it can bear, whose clients leave at random.

Says every ten seconds what is going on, and in the end whether the memory stayed flat after the
first quarter but for the programs of new shapes, and each job ended once, with the images it had
asked for.
    python benchmarks/serve_soak.py [--minutes 30] [--load 1.2] [--shapes 200] [--model emoji]

Each shape compiles once, which takes the most time on CPUs; with
XLA_FLAGS=--xla_backend_optimization_level=0 it takes less, and steps take more.
"""

import argparse
import collections
import dataclasses
import random
import statistics
import sys
import threading
import time

from continuous_cpu import requests
from machine import describe
from serve_cpu import closed_loop

from diffusax.batch.sizes import memory_in_use
from diffusax.serving import Generation
from diffusax.serving.catalogue.catalogue import Catalogue
from diffusax.serving.engine.engine import Engine, EngineSettings
from diffusax.serving.engine.jobs import Event, Job
from diffusax.serving.requests.errors import Busy

LEAVE = 1 / 3
"""The part of the clients that leave."""
STUCK = 300.0
"""The seconds after which a job that has not ended counts as lost."""
PROGRAMS = 2**20
"""The bytes that the programs of a shape may take."""


@dataclasses.dataclass
class Client:
    """Somebody who waits for a request."""

    job: Job
    leaves: float | None
    """When it leaves (time.monotonic); None for one that stays."""
    images: int = 0
    ends: int = 0

    def hear(self, event: Event) -> None:
        """Counts what comes."""
        self.images += event.kind == "image"
        self.ends += event.kind == "end"


def main() -> None:
    """Ends with status 1 where something is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--load", type=float, default=1.2)
    parser.add_argument("--shapes", type=int, default=200)
    parser.add_argument("--model", default="emoji")
    parser.add_argument("--lanes", type=int, default=8)
    args = parser.parse_args()
    print(describe())
    engine = Engine(Catalogue(args.model), EngineSettings(lanes=args.lanes, most_queued=32))
    generations = [Generation(**call) for call in requests(60)]
    engine.warm(generations[:3])
    closed_loop(engine, generations)
    while engine.state().compiling:
        time.sleep(0.1)
    seconds = closed_loop(engine, generations)
    print(f"{1 / seconds:.2f} requests/s without a pause", flush=True)
    problems = soak(engine, generations, args.minutes * 60, args.load / seconds, args.shapes)
    engine.close()
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("diffusax")]
    problems += [f"threads are left: {left}"] if left else []
    print("\n".join(problems) or "nothing is wrong")
    sys.exit(bool(problems))


def soak(
    engine: Engine, generations: list[Generation], seconds: float, rate: float, shapes: int
) -> list[str]:
    """Sends requests at a rate for some seconds, and returns what went wrong."""
    draw, entry = random.Random(0), engine.catalogue.entry()
    every = [(w, h) for w in range(1, 33) for h in range(1, 33)]
    sizes = [tuple(entry.multiple * side for side in size) for size in draw.sample(every, shapes)]
    clients: list[Client] = []
    counts: collections.Counter[str] = collections.Counter()
    memory: list[tuple[int, int]] = []
    began = said = time.monotonic()
    at, number, shaped = began, 0, 0
    while (now := time.monotonic()) < began + seconds:
        if now >= at:
            at += draw.expovariate(rate)
            generation = dataclasses.replace(generations[number % len(generations)], seed=number)
            if shaped < shapes * (now - began) / seconds:
                width, height = sizes[shaped]
                generation = dataclasses.replace(generation, width=width, height=height)
            counts["sent"] += 1
            try:
                job = engine.submit(generation)
            except Busy:
                counts["refused"] += 1
            else:
                shaped += generation.width is not None
                leaves = now + draw.expovariate(0.5) if draw.random() < LEAVE else None
                clients.append(Client(job, leaves))
                job.listen(clients[-1].hear, previews=number % 3 == 0)
            number += 1
        for client in clients:
            if client.leaves is not None and now > client.leaves:
                counts["left"] += client.job.cancel()
                client.leaves = None
        if now > said + 10:
            said = now
            memory.append((memory_in_use(), shaped))
            state = engine.state()
            print(
                f"{now - began:5.0f} s: {state.memory_in_use / 2**20:.0f} MiB, {state.queued} "
                f"queued, {state.running} running, {state.lanes_live} lanes, {shaped} shapes, "
                f"{dict(counts)}, longest gap {state.longest_gap:.2f} s",
                flush=True,
            )
        time.sleep(min(0.005, max(0.0, at - time.monotonic())))
    return [*_lost(clients), *_stuck(engine), *_grown(memory)]


def _lost(clients: list[Client]) -> list[str]:
    """Returns what is wrong with the answers."""
    until, found = time.monotonic() + STUCK, []
    for client in clients:
        state = client.job.wait(max(0.0, until - time.monotonic()))
        images = sum(image is not None for image in client.job.images)
        if client.ends != 1 or client.images != images or (state == "done") != bool(images):
            found.append(f"{state}: {client.ends} ends, {client.images} of {images} images")
        if state == "failed":
            found.append(f"failed: {client.job.error}")
    return found


def _stuck(engine: Engine) -> list[str]:
    time.sleep(2)
    state = engine.state()
    still = state.queued, state.running, state.lanes_live
    return [f"{still} are still queued, running and in lanes"] if any(still) else []


def _grown(memory: list[tuple[int, int]]) -> list[str]:
    """Compares the last quarter of the run with the second, by medians of memory and of shapes.

    In the first quarter the programs of the first shapes come into memory. Later ones stay there,
    too, until programs take half of the process's memory maps.
    """
    quarter = len(memory) // 4
    if not quarter:
        return []
    parts = memory[quarter : 2 * quarter], memory[-quarter:]
    early, late = ([statistics.median(column) for column in zip(*part)] for part in parts)
    grown, shapes = late[0] - early[0], late[1] - early[1]
    if grown < 0.05 * early[0] + PROGRAMS * shapes:
        return []
    return [
        f"the memory grew from {early[0] / 2**20:.0f} to {late[0] / 2**20:.0f} MiB with "
        f"{shapes:.0f} new shapes"
    ]


if __name__ == "__main__":
    main()
