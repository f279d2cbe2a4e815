"""Prometheus' metrics."""

from collections.abc import Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import GaugeMetricFamily
from starlette.requests import Request
from starlette.responses import Response

from diffusax.serving.web.memory import resident_memory
from diffusax.serving.web.operations import operation
from diffusax.serving.web.service import Service, in_thread, service_of

TYPE = "text/plain; version=0.0.4; charset=utf-8"
_GAUGES = {
    "queued": "Jobs that wait.",
    "running": "Jobs that run.",
    "lanes_live": "Lanes of the running batches that compute an image.",
    "lanes": "Lanes of the running batches.",
    "steps_per_second": "Steps a second, summed over images.",
}


class EngineCollector:
    """Collects what the engine tells about itself, at the time when it is asked for."""

    def __init__(self, service: Service):
        """Collects from a service's engine."""
        self._service = service

    def collect(self) -> Iterable[Any]:
        """Yields the metrics."""
        state = self._service.engine.state()
        for name, text in _GAUGES.items():
            yield GaugeMetricFamily(f"diffusax_{name}", text, getattr(state, name))
        text = "Bytes of memory that the process uses."
        yield GaugeMetricFamily("diffusax_resident_bytes", text, resident_memory())


class Metrics:
    """A registry of its own, so that several servers in one process do not share theirs."""

    def __init__(self, service: Service):
        """Makes the registry of a service."""
        self.registry = CollectorRegistry()
        self.registry.register(EngineCollector(service))  # type: ignore[arg-type]
        self.requests = Counter(
            "diffusax_requests",
            "Requests that were answered, by route and status.",
            ("route", "status"),
            registry=self.registry,
        )


@operation("GET", "/metrics", "Metrics for Prometheus.", group="Server", answer="text/plain")
async def metrics(request: Request) -> Response:
    """Writes the metrics as text."""
    found = request.app.state.metrics
    service_of(request)
    return Response(await in_thread(generate_latest, found.registry), media_type=TYPE)


OPERATIONS = (metrics,)
