"""The web application."""

from collections.abc import Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from diffusax.serving.catalogue.catalogue import Catalogue
from diffusax.serving.engine.engine import Engine
from diffusax.serving.requests.errors import NotFound, Refused
from diffusax.serving.web import capabilities, hub, jobs, metrics, openai
from diffusax.serving.web.a1111 import generation, lists
from diffusax.serving.web.a1111.state import A1111
from diffusax.serving.web.metrics import ROUTE
from diffusax.serving.web.openapi import Operation, document_operations
from diffusax.serving.web.page import page_operations
from diffusax.serving.web.replies import error_reply
from diffusax.serving.web.security import Guard, WebSettings
from diffusax.serving.web.service import Service

_MODULES: tuple[Any, ...] = (jobs, openai, generation, lists, hub, capabilities, metrics)


def create_app(
    engine: Engine, catalogue: Catalogue, settings: WebSettings | None = None
) -> Starlette:
    """Makes the application: the APIs, jobs, metrics, documentation and the page.

    Arguments:
        engine: runs the jobs.
        catalogue: the models, which is the engine's.
        settings: who may use the server, and its limits.

    Returns:
        An ASGI application. Its `state.service` has `opened`, to set once requests may come, and
        `draining`, to set when no more may.
    """
    settings = settings or WebSettings()
    service = Service(engine, catalogue, settings)
    operations = [one for module in _MODULES for one in module.OPERATIONS]
    shown = [*operations, *document_operations(operations), *page_operations()]
    app = Starlette(
        routes=_routes(shown),
        middleware=[Middleware(Guard, settings=settings, operations=shown)],
        exception_handlers={HTTPException: _http_error},
    )
    app.router.redirect_slashes = False
    app.state.service, app.state.a1111 = service, A1111()
    app.state.metrics = metrics.Metrics(service)
    return app


def _routes(operations: Sequence[Operation]) -> list[Route]:
    """Returns a route for each path, which knows all methods there."""
    by_path: dict[str, dict[str, Operation]] = {}
    for one in operations:
        by_path.setdefault(one.path, {})[one.method] = one
    return [_route(path, methods) for path, methods in by_path.items()]


def _route(path: str, methods: dict[str, Operation]) -> Route:
    async def endpoint(request: Request) -> Response:
        request.scope[ROUTE] = path
        method = "GET" if request.method == "HEAD" else request.method
        try:
            with request.app.state.service.pixels.request():
                return await methods[method].endpoint(request)
        except Refused as error:
            return error_reply(request.url.path, error)

    return Route(path, endpoint, methods=list(methods))


async def _http_error(request: Request, error: Exception) -> Response:
    """Answers where no route fits."""
    assert isinstance(error, HTTPException)
    path, shown = request.url.path, f"{request.method} {request.url.path[:100]}"
    if error.status_code == 404:
        found: Refused = NotFound(f"there is no {shown!r} here; /docs lists what there is")
    else:
        text = f"{shown!r} is not possible ({error.detail}); /docs lists what is"
        found = Refused(text, status=error.status_code, code="not_allowed")
    return error_reply(path, found, dict(error.headers or {}))
