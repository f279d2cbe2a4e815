"""A small server that speaks as much of the Hub's API as downloads need."""

import contextlib
import hashlib
import http.server
import json
import threading
from collections.abc import Iterator

COMMIT = "a" * 40


class Hub(http.server.BaseHTTPRequestHandler):
    """`repos` maps "models/someone/tiny" or "datasets/someone/tiny" to its files, to None where it
    is gated, or to the status to answer with; `requested` lists the files that were fetched.
    """

    repos: dict[str, dict[str, bytes] | int | None]
    requested: list[str]

    def do_HEAD(self):
        self.answer(body=False)

    def do_GET(self):
        self.answer(body=True)

    def log_message(self, *_):
        pass

    def answer(self, *, body):
        path = self.path.split("?")[0].removeprefix("/")
        for repo, files in self.repos.items():
            if isinstance(files, int) and repo.removeprefix("models/") in path:
                return self.send(files, b"", {}, body)
            if path.startswith(f"api/{repo}"):
                return self.describe(path, repo, files, body)
            prefix = f"{repo.removeprefix('models/')}/resolve/"
            if path.startswith(prefix):
                name = path.removeprefix(prefix).split("/", 1)[1]
                if body:
                    self.requested.append(name)
                etag = hashlib.sha1(name.encode()).hexdigest()
                headers = {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT}
                return self.send(200, files[name], headers, body)
        return self.send(404, b"", {"X-Error-Code": "RepoNotFound"}, body)

    def describe(self, path, repo, files, body):
        if files is None:
            return self.send(403, b"", {"X-Error-Code": "GatedRepo"}, body)
        revision = path.partition("/revision/")[2] or "main"
        if revision not in ("main", COMMIT):
            return self.send(404, b"", {"X-Error-Code": "RevisionNotFound"}, body)
        if "/tree/" in path:
            answer = [
                {"type": "file", "path": name, "size": len(data), "oid": "0" * 40}
                for name, data in files.items()
            ]
        else:
            siblings = [{"rfilename": name} for name in files]
            answer = {"id": repo.split("/", 1)[1], "sha": COMMIT, "siblings": siblings}
        return self.send(200, json.dumps(answer).encode(), {}, body)

    def send(self, status, data, headers, body):
        self.send_response(status)
        for key, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if body:
            self.wfile.write(data)


@contextlib.contextmanager
def serve(repos: dict[str, dict[str, bytes] | int | None]) -> Iterator[tuple[str, list[str]]]:
    """The server's address, and the list of files fetched from it."""
    handler = type("Handler", (Hub,), {"repos": repos, "requested": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", handler.requested
    server.shutdown()
