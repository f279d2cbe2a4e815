"""Prometheus' metrics."""

import itertools
from collections.abc import Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Metric, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.utils import floatToGoString
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from diffusax.serving.engine.metrics import Histogram, Sample
from diffusax.serving.web.openapi import operation
from diffusax.serving.web.service import Service, in_thread

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

    def __init__(self, service: Service):
        """Collects from a service's engine."""
        self._service = service

    def collect(self) -> Iterable[Metric]:
        """Yields the metrics."""
        state = self._service.engine.state()
        for name, text in _GAUGES.items():
            yield GaugeMetricFamily(f"diffusax_{name}", text, getattr(state, name))
        yield GaugeMetricFamily("diffusax_up", "Whether the engine runs.", float(state.alive))
        samples = self._service.engine.metrics.samples()
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

    def __init__(self, service: Service):
        """Makes the registry of a service."""
        self.registry = CollectorRegistry()
        self.registry.register(EngineCollector(service))
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
