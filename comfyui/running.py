"""Runs jobs at a server with ComfyUI's progress and previews, until they end or are interrupted."""

import contextlib
import http.client
import logging
import queue
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import comfy.model_management
import comfy.utils
from server import PromptServer

from .client import Server, ServerError
from .pictures import preview_of

_LOG = logging.getLogger(__name__)
_PAUSE = 0.2
"""The seconds after which an interruption is noticed."""
_LARGEST_PREVIEW = 512
_LONGEST_WAIT = 600.0
"""How many seconds a job waits to be taken by a server that is full or starting."""
_READS = 5
"""How often a stream of events that breaks off is opened again."""
_DONE = "done"

Event = tuple[str, dict[str, Any]]


def run(server: Server, requests: Sequence[Mapping[str, Any]], node_id: str) -> list[bytes]:
    """Runs requests as one job each, which the server may generate together.

    Args:
        server: where to run them.
        requests: the fields of `POST /jobs`.
        node_id: the node that shows the progress.

    Returns:
        The PNG files of all images, in order.

    Raises:
        ServerError: the server refuses a request, or a job fails; the others are cancelled.
        InterruptProcessingException: the user interrupts; all jobs are cancelled.
    """
    jobs: list[dict[str, Any]] = []
    try:
        for fields in requests:
            jobs.append(_submit(server, fields, node_id))
        bar = comfy.utils.ProgressBar(sum(job["steps"] for job in jobs))
        before = 0
        for job in jobs:
            _follow(server, job["id"], _Display(bar, before, node_id))
            before += job["steps"]
        return [
            server.image(job["id"], index) for job in jobs for index in range(len(job["images"]))
        ]
    except BaseException:
        for job in jobs:
            with contextlib.suppress(ServerError):
                server.cancel(job["id"])
        raise


class _Display:
    """What a node shows of one of its jobs."""

    def __init__(self, bar: Any, before: int, node_id: str):
        """Starts with nothing shown. before: the steps of the jobs before this one."""
        self.bar, self.before, self.node_id = bar, before, node_id

    def show(self, name: str, job: Mapping[str, Any]) -> None:
        """Shows an event."""
        _tell(self.node_id, _state(job))
        # Of several images, which would take turns in one place, the first one is shown.
        first = name == "preview" and job["index"] == 0
        preview = _preview(job["preview"]) if first else None
        self.bar.update_absolute(self.before + job["steps_done"], preview=preview)


def _preview(data_uri: str) -> tuple[str, Any, int]:
    """Returns a preview as ComfyUI's progress bar takes it: format, image, largest side."""
    image = preview_of(data_uri)
    # ComfyUI enlarges smaller ones.
    return "JPEG", image, min(max(image.size), _LARGEST_PREVIEW)


def _submit(server: Server, fields: Mapping[str, Any], node_id: str) -> dict[str, Any]:
    """Submits a job, and waits while the server is full or starting."""
    end = time.monotonic() + _LONGEST_WAIT
    while True:
        try:
            job = server.submit(fields)
        except ServerError as error:
            if error.status not in (429, 503) or time.monotonic() > end:
                raise
            _tell(node_id, str(error))
            _wait(error.retry_after)
            continue
        for warning in job.get("warnings", ()):
            _LOG.warning("%s", warning)
        return job


def _wait(seconds: float) -> None:
    """Waits; raises where the user interrupts."""
    end = time.monotonic() + seconds
    while True:
        comfy.model_management.throw_exception_if_processing_interrupted()
        left = end - time.monotonic()
        if left <= 0:
            return
        time.sleep(min(left, _PAUSE))


def _follow(server: Server, id: str, display: _Display) -> None:
    """Shows a job's progress until it is done; raises if it fails."""
    for event in _events(server, id):
        comfy.model_management.throw_exception_if_processing_interrupted()
        if event is None:
            continue
        name, job = event
        if name != "end":
            display.show(name, job)
        elif job["error"]:
            raise ServerError(job["error"]["message"])
        elif job["state"] != _DONE:
            raise ServerError(f"the job was {job['state']} at {server.url}; queue the prompt again")


def _events(server: Server, id: str) -> Iterator[Event | None]:
    """Yields a job's events up to its end, and None in between, when nothing happens."""
    found: queue.SimpleQueue[Event | Exception] = queue.SimpleQueue()
    # A read of the stream cannot be interrupted, so it has a thread; cancelling the job ends it.
    threading.Thread(target=_read, args=(server, id, found), daemon=True).start()
    while True:
        try:
            event = found.get(timeout=_PAUSE)
        except queue.Empty:
            yield None
            continue
        if isinstance(event, Exception):
            raise event
        yield event
        if event[0] == "end":
            return


def _read(server: Server, id: str, found: "queue.SimpleQueue[Event | Exception]") -> None:
    """Puts a job's events into a queue, and in the end why there are no more."""
    for _ in range(_READS):
        try:
            for event in server.events(id):
                found.put(event)
                if event[0] == "end":
                    return
        except ServerError as error:
            if error.status:
                found.put(error)
                return
        except (OSError, http.client.HTTPException, ValueError) as error:
            _LOG.info("the events of job %s broke off (%s)", id, error)
        time.sleep(1.0)
    text = f"{server.url} no longer tells how far its job is; see whether it runs"
    found.put(ServerError(text))


def _state(job: Mapping[str, Any]) -> str:
    """Says in a few words how far a job is."""
    if job["state"] == "queued" and job["position"]:
        return f"queued, {job['position']} before it"
    if job["state"] == "running":
        return f"step {job['steps_done']} of {job['steps']}"
    return str(job["state"])


def _tell(node_id: str, text: str) -> None:
    """Shows a text at a node, where ComfyUI is new enough to do so."""
    send = getattr(PromptServer.instance, "send_progress_text", None)
    if send is not None:
        send(text, node_id)
