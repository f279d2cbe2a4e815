"""How Ray Serve finds the replica for a request, and how many replicas there should be.

Ray imports this in processes of its own, on every machine.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

_ANYWHERE = ("/v1/images/", "/models/", "/health", "/ready", "/docs", "/openapi.json", "/page/")
"""The beginnings of paths whose requests are whole in themselves."""

DRAWINGS = "drawings"
"""The name of the number that replicas report, by which Ray scales."""


class ByDrawings:
    """Scales by the drawings that wait or run, which are more than the requests under way."""

    def __init__(self, per_replica: float):
        """Makes the policy. per_replica: the drawings for which there is one replica."""
        self._per_replica = per_replica

    def __call__(self, context: Any) -> tuple[float, dict[str, Any]]:
        """Returns the number of replicas, and nothing to remember."""
        found = (context.aggregated_metrics or {}).get(DRAWINGS, {})
        return sum(found.values()) / self._per_replica, {}


class ByClient(RequestRouter):
    """Sends the requests of a client to one replica, as long as that lives.

    Jobs, their events and images, and the progress that A1111's clients ask for, are known to the
    replica alone that draws. A client is an API key, or else an address. Requests that are whole in
    themselves go to the replica with the fewest.
    """

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Returns the replicas in the order in which they are tried."""
        if pending_request is None or not pending_request.args:
            return [candidate_replicas]
        scope = getattr(pending_request.args[0], "asgi_scope", None)
        if scope is None or str(scope.get("path", "")).startswith(_ANYWHERE):
            return [candidate_replicas]
        client = client_of(scope)
        return [[one] for one in ranked(client, candidate_replicas)]


def client_of(scope: Mapping[str, Any]) -> str:
    """Returns what tells a request's client from others: its key, or its address."""
    headers = {name.decode("latin-1").lower(): value for name, value in scope.get("headers", ())}
    for name in ("authorization", "x-forwarded-for"):
        if name in headers:
            return str(headers[name].decode("latin-1").partition(",")[0].strip())
    address = scope.get("client") or ("",)
    return str(address[0])


def ranked(client: str, replicas: list[Any]) -> list[Any]:
    """Sorts replicas for a client by rendezvous hashing (Thaler and Ravishankar 1998).

    When a replica comes or goes, only the clients that it gains or loses change theirs.
    """

    def weight(replica: Any) -> bytes:
        name = getattr(replica.replica_id, "unique_id", str(replica.replica_id))
        return hashlib.sha256(f"{client}\n{name}".encode()).digest()

    return sorted(replicas, key=weight)
