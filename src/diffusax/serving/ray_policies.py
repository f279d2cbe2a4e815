"""Tells Ray Serve which replica answers a request, and how many replicas there should be.

Ray imports this in processes of its own, on every machine.
"""

import hashlib
import re
from collections.abc import Mapping
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from diffusax.runtime.compat import ray_scope

_ANY_REPLICA = ("/jobs", "/v1/images/", "/v1/videos", "/models/")
"""The beginnings of the paths of jobs that any replica may run."""
_JOB = re.compile(r"/(?:jobs|v1/videos)/(?P<replica>\w+)\.")


class ByDrawings:
    """Scales by the jobs that wait or run, which are more than the HTTP requests under way."""

    def __init__(self, per_replica: float):
        """Makes the policy. per_replica: the jobs for which there is one replica."""
        self._per_replica = per_replica

    def __call__(self, context: Any) -> tuple[float, dict[str, Any]]:
        """Returns the number of replicas, and nothing to remember."""
        found = (context.aggregated_metrics or {}).get("drawings", {})
        return sum(found.values()) / self._per_replica, {}


class ByOwner(RequestRouter):
    """Sends requests about a job to the replica that has it, and new jobs to the idlest.

    Whatever else a client asks for, such as A1111's images and their progress, goes to one replica
    as long as that lives. A client is an API key, or else an address.
    """

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Returns the replicas to try, one group after the other."""
        arguments = pending_request.args if pending_request is not None else ()
        scope = ray_scope(arguments[0]) if arguments else {}
        if not scope:
            return [candidate_replicas]
        found = ranked(client_of(scope), candidate_replicas)
        path = str(scope.get("path", ""))
        if owner := _JOB.match(path):
            # Another one would not know the job: a replica that is slow to answer is waited for.
            return [[one for one in found if _name(one) == owner["replica"]] or found]
        if scope.get("method") == "POST" and path.startswith(_ANY_REPLICA):
            found.sort(key=self._load)
            if found:
                self._count(found[0])
            return [[replica] for replica in found]
        return [found[:1]]

    def initialize_state(self, **_: Any) -> None:
        """Starts without jobs; Ray calls it."""
        self._sent: dict[str, tuple[float, int]] = {}

    def _load(self, replica: RunningReplica) -> float:
        """Returns the jobs that a replica reported, and those that were sent to it since."""
        stats = replica.routing_stats or {}
        at, sent = self._sent.get(_name(replica), (0.0, 0))
        told = float(stats.get("drawings", 0))
        return told + (sent if at == stats.get("at", 0.0) else 0)

    def _count(self, replica: RunningReplica) -> None:
        now = (replica.routing_stats or {}).get("at", 0.0)
        at, sent = self._sent.get(_name(replica), (now, 0))
        self._sent[_name(replica)] = now, (sent if at == now else 0) + 1


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
        return hashlib.sha256(f"{client}\n{_name(replica)}".encode()).digest()

    return sorted(replicas, key=weight)


def _name(replica: Any) -> str:
    return str(replica.replica_id.unique_id)
