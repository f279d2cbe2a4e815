"""A small server that speaks as much of the Hub's API as uploads need."""

import base64
import contextlib
import http.server
import json
import threading
from collections.abc import Iterator
from typing import ClassVar


class Hub(http.server.BaseHTTPRequestHandler):
    files: ClassVar[dict[str, bytes]] = {}
    created: ClassVar[list[str]] = []
    refuse: ClassVar[bool] = False

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.refuse:
            self.send(401, {"error": "Invalid username or password."})
        elif self.path.endswith("/api/repos/create"):
            self.created.append(json.loads(body)["name"])
            url = f"http://{self.headers['Host']}/someone/model"
            self.send(200, {"url": url, "id": "someone/model"})
        elif self.path.endswith("/api/validate-yaml"):
            self.send(200, {"errors": [], "warnings": []})
        elif "/preupload/" in self.path:
            names = [file["path"] for file in json.loads(body)["files"]]
            answer = [
                {"path": n, "uploadMode": "regular", "shouldIgnore": False, "oid": None}
                for n in names
            ]
            self.send(200, {"files": answer})
        elif "/commit/" in self.path:
            for line in body.splitlines():
                entry = json.loads(line)
                if entry["key"] == "file":
                    value = entry["value"]
                    self.files[value["path"]] = base64.b64decode(value["content"])
            self.send(
                200,
                {
                    "success": True,
                    "commitUrl": f"http://{self.headers['Host']}/someone/model/commit/aaa",
                    "commitOid": "a" * 40,
                },
            )
        else:
            self.send(404, {})

    def do_HEAD(self):
        """Answers whether there is a README.md, which this server has none of."""
        self.send_response(404)
        self.send_header("X-Error-Code", "EntryNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_GET(self):
        self.send(200, {"id": "someone/model", "sha": "a" * 40, "siblings": []})

    def send(self, status: int, data: dict) -> None:
        body = json.dumps(data).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def serve_uploads() -> Iterator[str]:
    """The server's address; `Hub.files` and `Hub.created` are what it was sent."""
    Hub.files.clear()
    Hub.created.clear()
    Hub.refuse = False
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
