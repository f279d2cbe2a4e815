"""Records of what the server answers, for its routes and the OpenAPI document."""

import dataclasses
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

Endpoint = Callable[[Request], Awaitable[Response]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operation:
    """One method of one path.

    body and form are the dataclasses of a JSON body and of a multipart form's fields; `answer` is
    the dataclass of a JSON answer, or the media type of another one.
    """

    method: str
    path: str
    endpoint: Endpoint
    summary: str
    group: str
    body: Any = None
    raw_body: tuple[str, ...] = ()
    form: Any = None
    files: tuple[str, ...] = ()
    query: tuple[str, ...] = ()
    answer: Any = dict
    status: int = 200
    errors: tuple[int, ...] = ()
    open: bool = False
    """Whether the operation needs no API key."""


def operation(method: str, path: str, summary: str, **options: Any) -> Any:
    """Makes an endpoint, a function of a request, into an operation; a decorator."""

    def decorate(endpoint: Endpoint) -> Operation:
        return Operation(method=method, path=path, endpoint=endpoint, summary=summary, **options)

    return decorate
