"""Records of what the server answers, the OpenAPI document of them, and a page that shows it."""

import dataclasses
import html
import importlib.resources
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from diffusax._version import __version__
from diffusax.serving.web.replies import Json

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


_REF = "#/components/schemas/{name}"
_MEANINGS = {
    400: "The body cannot be read.",
    401: "No valid API key was sent.",
    403: "The request comes from another site's page.",
    404: "What was named does not exist.",
    408: "The body came too slowly.",
    409: "The job was cancelled, or is not done yet.",
    413: "The body or an image is too large.",
    415: "The body has another content type.",
    416: "The file has no such part.",
    421: "The host's name is unknown.",
    422: "A value is not possible.",
    429: "The queue is full, or the client has too many jobs; Retry-After says when to ask again.",
    500: "The server failed.",
    501: "Nothing here does this.",
    503: "The server is stopping, or the model is not loaded.",
    504: "The images were not done at the deadline.",
}
_ERROR: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string", "description": "One sentence with the mend."},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
            },
        }
    },
}
_A1111_ERROR: dict[str, Any] = {
    "type": "object",
    "required": ["error", "detail", "body", "errors"],
    "properties": {name: {"type": "string"} for name in ("error", "detail", "body", "errors")},
}


def openapi(operations: Sequence[Operation]) -> dict[str, Any]:
    """Returns the OpenAPI document (version 3.1) of operations."""
    kinds = [kind for one in operations for kind in (one.body, one.form, one.answer)]
    named = [kind for kind in dict.fromkeys(kinds) if hasattr(kind, "__dataclass_fields__")]
    refs, schemas = msgspec.json.schema_components(named, ref_template=_REF)
    schemas |= {"Error": _ERROR, "A1111Error": _A1111_ERROR}
    known = dict(zip(named, refs))
    paths: dict[str, Any] = {}
    for one in operations:
        path = re.sub(r"{(\w+):path}", r"{\1}", one.path)
        paths.setdefault(path, {})[one.method.lower()] = _describe(one, known)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "diffusax",
            "version": __version__,
            "description": "Generates images and videos with diffusion models in JAX.",
        },
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "basic": {"type": "http", "scheme": "basic"},
            },
        },
    }


def _describe(one: Operation, known: dict[Any, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "summary": one.summary,
        "operationId": one.endpoint.__name__ + "_" + re.sub(r"\W+", "_", one.path).strip("_"),
        "tags": [one.group],
        "responses": _responses(one, known),
    }
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"{(\w+)", one.path)
    ]
    parameters += [
        {"name": name, "in": "query", "required": False, "schema": {"type": "string"}}
        for name in one.query
    ]
    if parameters:
        found["parameters"] = parameters
    content = _bodies(one, known)
    if content:
        found["requestBody"] = {"required": True, "content": content}
    if not one.open:
        found["security"] = [{}, {"bearer": []}, {"basic": []}]
    return found


def _bodies(one: Operation, known: dict[Any, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if one.body is not None:
        content["application/json"] = {"schema": _schema(one.body, known)}
    if one.form is not None:
        content["multipart/form-data"] = {"schema": _form(one)}
    binary = {"type": "string", "format": "binary"}
    return content | {kind: {"schema": binary} for kind in one.raw_body}


def _form(one: Operation) -> dict[str, Any]:
    """Returns the schema of a form, in which images are files."""
    _, rest = msgspec.json.schema_components([one.form], ref_template=_REF)
    own = rest[one.form.__name__]
    files = {name: {"type": "string", "format": "binary"} for name in one.files}
    return {**own, "properties": {**own["properties"], **files}}


def _schema(kind: Any, known: dict[Any, Any]) -> Any:
    if kind in known:
        return known[kind]
    return {dict: {"type": "object"}, list: {"type": "array"}, None: {"type": "null"}}[kind]


def _responses(one: Operation, known: dict[Any, Any]) -> dict[str, Any]:
    kind = one.answer
    if isinstance(kind, str):
        content: dict[str, Any] = {kind: {"schema": {"type": "string"}}}
    else:
        content = {"application/json": {"schema": _schema(kind, known)}}
    found = {str(one.status): {"description": "What was asked for.", "content": content}}
    a1111 = one.path.startswith(("/sdapi/", "/controlnet/"))
    ref = {"schema": {"$ref": f"#/components/schemas/{'A1111Error' if a1111 else 'Error'}"}}
    own = {400, 408, 413, 415} if one.body or one.form else set()
    errors = {*one.errors, *own, 403, 421, 500} | (set() if one.open else {401})
    for status in sorted(errors):
        content = {"application/json": ref}
        found[str(status)] = {"description": _MEANINGS[status], "content": content}
    return found


def document_operations(operations: Sequence[Operation]) -> list[Operation]:
    """Returns the operations that send the document, and the page that shows it."""
    document = openapi(operations)
    page = docs_page(document)
    style = (importlib.resources.files("diffusax.serving.web") / "docs.css").read_bytes()

    @operation("GET", "/openapi.json", "This document.", group="Server", open=True)
    async def send_document(request: Request) -> Response:
        """Sends the OpenAPI document."""
        return Json(document)

    @operation("GET", "/docs", "This document, to read.", group="Server", open=True)
    async def send_page(request: Request) -> Response:
        """Sends the page."""
        return Response(page, media_type="text/html")

    @operation("GET", "/docs.css", "The style of /docs.", group="Server", open=True)
    async def send_style(request: Request) -> Response:
        """Sends the page's style."""
        return Response(style, media_type="text/css")

    return [send_document, send_page, send_style]


def docs_page(document: dict[str, Any]) -> str:
    """Returns a page that shows an OpenAPI document, without scripts and from this server alone."""
    groups: dict[str, list[str]] = {}
    for path, methods in document["paths"].items():
        for method, one in methods.items():
            groups.setdefault(one["tags"][0], []).append(_shown(method, path, one))
    sections = "".join(
        f"<section><h2>{html.escape(name)}</h2>{''.join(items)}</section>"
        for name, items in groups.items()
    )
    schemas = "".join(
        f"<details><summary><code>{name}</code> "
        f"{html.escape(schema.get('description', '').split(chr(10))[0])}</summary>"
        # A link to what is inside opens it.
        f'<div id="{name}">{_properties(schema)}</div></details>'
        for name, schema in sorted(document["components"]["schemas"].items())
    )
    title = f"diffusax {html.escape(document['info']['version'])}"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<title>{title}: the API</title><link rel="icon" href="/page/icon.svg">'
        '<link rel="stylesheet" href="/docs.css"></head><body>'
        f"<main><h1>{title}</h1><p>The same for programs: "
        f'<a href="/openapi.json">openapi.json</a>.</p>{sections}'
        f"<section><h2>Objects</h2>{schemas}</section></main></body></html>"
    )


def _shown(method: str, path: str, one: dict[str, Any]) -> str:
    body = one.get("requestBody", {}).get("content", {})
    rows = "".join(
        f"<dt>Body, <code>{html.escape(kind)}</code></dt><dd>{_link(content['schema'])}</dd>"
        for kind, content in body.items()
    )
    for status, answer in one["responses"].items():
        kinds = ", ".join(
            f"<code>{html.escape(kind)}</code> {_link(content['schema'])}"
            for kind, content in answer.get("content", {}).items()
        )
        rows += f"<dt>{status}</dt><dd>{html.escape(answer['description'])} {kinds}</dd>"
    return (
        f'<details><summary><b class="{method}">{method.upper()}</b> '
        f"<code>{html.escape(path)}</code> {html.escape(one['summary'])}</summary>"
        f"<dl>{rows}</dl></details>"
    )


def _link(schema: dict[str, Any]) -> str:
    name = schema.get("$ref", "").rpartition("/")[2]
    if name:
        return f'<a href="#{name}">{name}</a>'
    return _properties(schema) if schema.get("properties") else ""


def _properties(schema: dict[str, Any]) -> str:
    needed = schema.get("required", ())
    rows = "".join(
        f"<tr><td><code>{html.escape(name)}</code>{' (needed)' if name in needed else ''}</td>"
        f"<td>{html.escape(_type(one))}</td><td>{html.escape(_default(one))}</td></tr>"
        for name, one in schema.get("properties", {}).items()
    )
    head = "<tr><th>Field</th><th>Type</th><th>Default</th></tr>"
    return f"<table>{head}{rows}</table>"


def _default(one: dict[str, Any]) -> str:
    return msgspec.json.encode(one["default"]).decode() if "default" in one else ""


def _type(one: dict[str, Any]) -> str:
    """Returns a schema in a few words."""
    if "anyOf" in one:
        return " or ".join(map(_type, one["anyOf"]))
    if "$ref" in one:
        return one["$ref"].rpartition("/")[2]
    if "enum" in one:
        return ", ".join(map(str, one["enum"]))
    kind = one.get("type", "anything")
    text = kind if isinstance(kind, str) else " or ".join(kind)
    if kind == "array" and one.get("items"):
        text = f"array of {_type(one['items'])}"
    low, high = one.get("minimum"), one.get("maximum")
    if low is not None and high is not None:
        text += f" from {low} to {high}"
    return f"{text}: {one['description']}" if "description" in one else text
