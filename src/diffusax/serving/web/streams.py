"""Server-sent events."""

from collections.abc import AsyncIterator
from typing import Any

from starlette.responses import StreamingResponse

from diffusax.serving.web.replies import encode_json

KEEP_ALIVE = b": still there\n\n"
"""A comment, which tells proxies and clients that the connection lives."""


def sse(event: str, data: Any) -> bytes:
    """Encodes one event, whose data become JSON."""
    return b"event: %s\ndata: %s\n\n" % (event.encode(), encode_json(data))


def stream(events: AsyncIterator[bytes]) -> StreamingResponse:
    """Answers with events as they come; proxies are asked not to hold them back."""
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(events, media_type="text/event-stream", headers=headers)
