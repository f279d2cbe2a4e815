"""The page: the files of `diffusax/serving/page`, which are read once."""

import hashlib
import importlib.resources
import mimetypes
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from diffusax.serving.requests.errors import NotFound
from diffusax.serving.web.openapi import Operation, operation

_TYPES = {".js": "text/javascript", ".css": "text/css", ".html": "text/html"}
_TYPES |= {".svg": "image/svg+xml", ".webmanifest": "application/manifest+json"}


def page_files() -> dict[str, tuple[bytes, str, str]]:
    """Returns the content, media type and ETag of each file of the page, by path."""
    found: dict[str, tuple[bytes, str, str]] = {}

    def walk(folder: Any, prefix: str) -> None:
        for item in folder.iterdir():
            if item.is_dir():
                walk(item, f"{prefix}{item.name}/")
            elif not item.name.endswith((".py", ".pyc")):
                data = item.read_bytes()
                suffix = "." + item.name.rpartition(".")[2]
                guess = mimetypes.guess_type(item.name)[0] or "application/octet-stream"
                tag = f'"{hashlib.sha256(data).hexdigest()[:20]}"'
                found[prefix + item.name] = data, _TYPES.get(suffix, guess), tag

    folder = importlib.resources.files("diffusax.serving") / "page"
    if folder.is_dir():
        walk(folder, "")
    return found


def page_operations() -> list[Operation]:
    """Returns the operations that send the page and its files; a name is only looked up."""
    files = page_files()

    def send(request: Request, name: str) -> Response:
        if name not in files:
            raise NotFound(f"the page has no file {name[:100]!r}")
        data, kind, tag = files[name]
        headers = {"ETag": tag, "Cache-Control": "no-cache"}
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(data, media_type=kind, headers=headers)

    @operation("GET", "/", "The page.", group="Page", answer="text/html", open=True)
    async def index(request: Request) -> Response:
        """Sends the page."""
        return send(request, "index.html")

    @operation(
        "GET", "/page/{name:path}", "A file of the page.", group="Page", answer="*/*", open=True
    )
    async def file(request: Request) -> Response:
        """Sends a file of the page."""
        return send(request, request.path_params["name"])

    return [index, file]
