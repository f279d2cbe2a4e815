"""Logs one JSON object per line; prompts only where the settings ask for them."""

import json
import logging
import sys
import time
from typing import Any

from diffusax.serving.engine.jobs import Event, Job
from diffusax.text.prompt_warnings import prompt_warnings

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
