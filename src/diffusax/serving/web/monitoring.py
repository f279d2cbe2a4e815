"""The log, one JSON object per line, and Prometheus' metrics.

Prompts are logged only where the settings ask for them.
"""

import itertools
import json
import logging
import sys
import time
from collections.abc import Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Metric, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.utils import floatToGoString
from starlette.concurrency import run_in_threadpool as in_thread
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from diffusax.serving.engine.engine import Engine
from diffusax.serving.engine.jobs import Event, Job
from diffusax.serving.engine.metrics import Histogram, Sample
from diffusax.serving.web.openapi import operation
from diffusax.text.extra_networks import prompt_warnings

_POLLED = ("/health", "/ready", "/metrics")
"""The paths that watchers poll."""

LOG = logging.getLogger("diffusax.serving")


class JsonLines(logging.Formatter):
    """Writes each record as one line of JSON: time, level, event, and the record's fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Returns the line."""
        entry = {"time": round(record.created, 3), "level": record.levelname.lower()}
        entry |= {"event": record.getMessage(), **getattr(record, "fields", {})}
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        # A line stays one line, and reads on a terminal as it is written.
        text = json.dumps(entry, ensure_ascii=False, separators=(",", ":"), default=str)
        return "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text)


def log_to_stderr() -> None:
    """Sends the log of the server, and of uvicorn from warnings on, to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    for name, level in (("diffusax", logging.INFO), ("uvicorn", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)


def log_request(scope: Any, status: int, begun: float) -> None:
    """Logs a request that was answered. begun: when it came, by `time.monotonic`."""
    if status == 200 and scope["path"] in _POLLED:
        return
    fields = {
        "method": scope["method"],
        "path": scope["path"][:200],
        "status": status,
        "seconds": round(time.monotonic() - begun, 4),
        "client": scope.get("diffusax.client", ""),
    }
    LOG.info("request", extra={"fields": fields})


def log_job(job: Job, prompts: bool) -> None:
    """Logs that a job was submitted, and later that it has ended."""
    generation = job.generation
    fields: dict[str, Any] = {
        "job": job.id,
        "client": job.client,
        "model": generation.model,
        "task": generation.task,
        "size": f"{generation.width}x{generation.height}",
        "steps": generation.num_inference_steps,
        "images": generation.num_images,
    }
    if generation.num_frames is not None:
        fields["frames"] = generation.num_frames
    warnings = prompt_warnings(generation.prompt, generation.negative_prompt)
    if warnings:
        # They quote the prompts.
        fields["warnings"] = list(warnings) if prompts else len(warnings)
    if prompts:
        fields |= {"prompt": generation.prompt, "negative_prompt": generation.negative_prompt}
    LOG.info("job", extra={"fields": fields})

    def listen(event: Event) -> None:
        if event.kind != "end":
            return
        since = job.ended or time.time()
        ended: dict[str, Any] = {"job": job.id, "state": job.state}
        ended["seconds"] = round(since - job.created, 3)
        if job.error is not None:
            ended["error"] = job.error.code if not prompts else str(job.error)
        LOG.info("job ended", extra={"fields": ended})

    job.listen(listen)


TYPE = "text/plain; version=0.0.4; charset=utf-8"
ROUTE = "diffusax.route"
"""The key of a scope under which the path of the request's route stands."""
_GAUGES = {
    "queued": "Jobs that wait.",
    "running": "Jobs that have begun.",
    "lanes_live": "Lanes in use, of all batches.",
    "lanes": "The most lanes of one batch.",
    "batches": "Batches with images.",
    "compiling": "Sizes of batches that are being compiled, or wait for it.",
    "kept": "Jobs that have ended and can still be asked for.",
    "memory_in_use": "Bytes in use, of a device, or on CPUs of the process.",
}
"""What is exported of the engine's state."""


class EngineCollector:
    """Collects the engine's figures whenever Prometheus asks for them."""

    def __init__(self, engine: Engine):
        """Collects from an engine."""
        self._engine = engine

    def collect(self) -> Iterable[Metric]:
        """Yields the metrics."""
        state = self._engine.state()
        for name, text in _GAUGES.items():
            yield GaugeMetricFamily(f"diffusax_{name}", text, getattr(state, name))
        yield GaugeMetricFamily("diffusax_up", "Whether the engine runs.", float(state.alive))
        samples = self._engine.metrics.samples()
        for name, found in itertools.groupby(samples, key=lambda sample: sample.name):
            yield _family(f"diffusax_{name}", list(found))


def _family(name: str, samples: list[Sample]) -> Metric:
    """Returns a metric with its samples, which differ in their labels."""
    kind, about = samples[0].kind, samples[0].help
    labels = [label for label, _ in samples[0].labels]
    if kind == "histogram":
        family: Any = HistogramMetricFamily(name, about, labels=labels)
    else:
        family = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}[kind](
            name, about, labels=labels
        )
    for sample in samples:
        values = [value for _, value in sample.labels]
        if isinstance(sample.value, Histogram):
            buckets = [(floatToGoString(to), n) for to, n in sample.value.cumulative()]
            family.add_metric(values, buckets, sample.value.sum)
        else:
            family.add_metric(values, sample.value)
    return family


class Metrics:
    """A registry of its own, so that several servers in one process do not share theirs."""

    def __init__(self, engine: Engine):
        """Makes the registry of an engine."""
        self.registry = CollectorRegistry()
        self.registry.register(EngineCollector(engine))
        self.requests = Counter(
            "diffusax_requests",
            "Requests that were answered, by route and status.",
            ("route", "status"),
            registry=self.registry,
        )

    def count_request(self, scope: Scope, status: int) -> None:
        """Counts a request that was answered; the route is "none" if no endpoint has seen it."""
        self.requests.labels(scope.get(ROUTE, "none"), str(status)).inc()


@operation("GET", "/metrics", "Metrics for Prometheus.", group="Server", answer="text/plain")
async def metrics(request: Request) -> Response:
    """Writes the metrics as text."""
    found = request.app.state.metrics
    return Response(await in_thread(generate_latest, found.registry), media_type=TYPE)


OPERATIONS = (metrics,)
