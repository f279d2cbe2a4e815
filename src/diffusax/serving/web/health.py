"""Whether the server lives, and whether it may be sent requests."""

import dataclasses

from starlette.requests import Request
from starlette.responses import Response

from diffusax.serving.requests.errors import Refused
from diffusax.serving.web.operations import operation
from diffusax.serving.web.replies import Json
from diffusax.serving.web.service import service_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class StatusAnswer:
    """That all is well."""

    status: str


@operation(
    "GET", "/health", "Whether the server lives.", group="Server", answer=StatusAnswer, open=True
)
async def health(request: Request) -> Response:
    """Answers as long as the server does."""
    return Json({"status": "ok"})


@operation(
    "GET",
    "/ready",
    "Whether requests may be sent: the first model is loaded, and the server is not stopping.",
    group="Server",
    answer=StatusAnswer,
    errors=(503,),
    open=True,
)
async def ready(request: Request) -> Response:
    """Answers 200 once requests may come, and 503 before and while the server stops."""
    service = service_of(request)
    if service.draining:
        raise Refused("the server is stopping; ask another one", status=503, code="closing")
    if service.failure:
        raise Refused(service.failure, status=503, code="failed")
    if not service.opened.is_set():
        raise Refused(
            "the model is loading; ask again later", status=503, code="loading", retry_after=1.0
        )
    return Json({"status": "ready"})


OPERATIONS = (health, ready)
