"""The server on a Ray cluster: replicas, as many as the queue asks for.

Batching stays in each replica's engine; Ray starts replicas, restarts those that die, and sends
requests about a job to the replica that has it.
"""

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

from diffusax.boundary.messages import require_extra
from diffusax.serving.catalogue.catalogue import Catalogue
from diffusax.serving.engine.engine import Engine, EngineSettings
from diffusax.serving.web.security import WebSettings
from diffusax.serving.web.server import create_app

_POLICIES = "diffusax.serving.ray_policies"
"""The module that Ray imports where it routes and scales; not here, as it needs Ray Serve."""
_MOST_REQUESTS = 1000
"""The most requests of a replica that Ray lets in; the replica has limits of its own."""


def application(
    make_catalogue: Callable[[], Catalogue],
    *,
    engine: EngineSettings | None = None,
    web: WebSettings | None = None,
    replicas: tuple[int, int] = (1, 4),
    drawings_per_replica: float = 16.0,
    resources: Mapping[str, float] | None = None,
    drain_seconds: float = 60.0,
    scaling: Mapping[str, Any] | None = None,
) -> Any:
    """Returns the server as an application of Ray Serve, for `ray.serve.run`.

        from ray import serve
        from diffusax.serving.catalogue import Catalogue
        from diffusax.serving.with_ray import application

        serve.run(application(lambda: Catalogue("emoji")))

    Args:
        make_catalogue: makes the catalogue; called in each replica.
        engine: the bounds of each replica's engine.
        web: who may use the server, and how much a request may ask for.
        replicas: the fewest and the most replicas.
        drawings_per_replica: the jobs that wait or run for which there is one replica.
        resources: the resources of a replica, such as {"GPU": 1} or {"TPU": 4}; one CPU by default.
        drain_seconds: the most seconds that a stopping replica takes to finish its jobs.
        scaling: further options of `ray.serve.config.AutoscalingConfig`, such as
            {"downscale_delay_s": 300}.

    Raises:
        ImportError: Ray Serve is not installed.
        ValueError: replicas or drawings_per_replica are out of range.
    """
    serve = require_extra("ray.serve", "ray-serve")
    fewest, most = replicas
    if not 1 <= fewest <= most:
        raise ValueError(f"replicas must be the fewest, at least 1, and the most (got {replicas})")
    if drawings_per_replica <= 0:
        raise ValueError(f"drawings_per_replica must be above 0 (got {drawings_per_replica})")
    needs = dict(resources or {"CPU": 1})
    own = {"num_cpus": needs.pop("CPU", 0), "num_gpus": needs.pop("GPU", 0), "resources": needs}
    deployment = serve.deployment(
        name="diffusax",
        ray_actor_options=own,
        max_ongoing_requests=_MOST_REQUESTS,
        graceful_shutdown_timeout_s=drain_seconds + 10,
        autoscaling_config={
            "min_replicas": fewest,
            "max_replicas": most,
            "policy": {
                "policy_function": f"{_POLICIES}:ByDrawings",
                "policy_kwargs": {"per_replica": drawings_per_replica},
            },
            **(scaling or {}),
        },
        request_router_config={
            "request_router_class": f"{_POLICIES}.ByOwner",
            "request_routing_stats_period_s": 1.0,
        },
    )
    return deployment(serve.ingress()(_Replica)).bind(
        make_catalogue, engine or EngineSettings(), web or WebSettings(), drain_seconds
    )


class _Replica:
    """One server inside Ray: a catalogue, an engine, and the application that Ray calls."""

    def __init__(
        self,
        make_catalogue: Callable[[], Catalogue],
        engine: EngineSettings,
        web: WebSettings,
        drain_seconds: float,
    ):
        """Loads the default model, so that Ray sends no requests before."""
        context = require_extra("ray.serve", "ray-serve").get_replica_context()
        catalogue = make_catalogue()
        named = dataclasses.replace(engine, name=context.replica_id.unique_id)
        self._engine, self._drain_seconds = Engine(catalogue, named), drain_seconds
        self._app = create_app(self._engine, catalogue, web)
        service = self._app.state.service
        service.open()
        if service.failure:
            raise RuntimeError(service.failure)

    def __serve_build_asgi_app__(self) -> Any:
        """Returns the application, which Ray calls."""
        return self._app

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Returns the number of jobs that wait or run."""
        state = self._engine.state()
        return {"drawings": float(state.queued + state.running)}

    def record_routing_stats(self) -> dict[str, float]:
        """Returns the same, and when it was so."""
        return {**self.record_autoscaling_stats(), "at": time.monotonic()}

    def __del__(self) -> None:
        """Finishes what has begun; Ray calls it when the replica is to stop."""
        self._app.state.service.draining = True
        self._engine.drain(self._drain_seconds)
        self._engine.close()
