"""A small server that speaks as much of the Hub's API as downloads need."""

import contextlib
import hashlib
import http.server
import json
import re
import threading
from collections.abc import Iterator

COMMIT = "a" * 40


class Hub(http.server.BaseHTTPRequestHandler):
    """`repos` maps "models/someone/tiny" or "datasets/someone/tiny" to its files, to None where it
    is gated, or to the status to answer with; `requested` lists the files that were fetched.

    `troubles` are what goes wrong when a file is fetched, by its name, one for each time: a status
    to answer with, ("cut", n) for a connection that ends after n bytes, ("stall", n) for one where
    nothing comes after n bytes, "whole" for the file where a range is asked for, or bytes in the
    place of the file's. `sent` lists the files that
    were fetched with the bytes that were sent of each.
    """

    repos: dict[str, dict[str, bytes] | int | None]
    requested: list[str]
    troubles: dict[str, list[int | bytes | str | tuple[str, int]]]
    sent: list[tuple[str, int]]

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
                if name not in files:
                    return self.send(404, b"", {"X-Error-Code": "EntryNotFound"}, body)
                if body:
                    self.requested.append(name)
                etag = hashlib.sha1(name.encode()).hexdigest()
                headers = {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT}
                return self.send_file(name, files[name], headers, body)
        return self.send(404, b"", {"X-Error-Code": "RepoNotFound"}, body)

    def describe(self, path, repo, files, body):
        if files is None:
            return self.send(403, b"", {"X-Error-Code": "GatedRepo"}, body)
        revision = path.partition("/revision/")[2] or "main"
        if revision not in ("main", COMMIT):
            return self.send(404, b"", {"X-Error-Code": "RevisionNotFound"}, body)
        if "/tree/" in path:
            below = path.partition("/tree/")[2].partition("/")[2]
            answer = tree(files, below, recursive="recursive=true" in self.path.lower())
        else:
            siblings = [{"rfilename": name} for name in files]
            answer = {"id": repo.split("/", 1)[1], "sha": COMMIT, "siblings": siblings}
            if card := files.get("card.json"):
                answer["cardData"] = json.loads(card)
        return self.send(200, json.dumps(answer).encode(), {}, body)

    def send_file(self, name, data, headers, body):
        """The file, or the range of it that is asked for, unless it has a trouble coming."""
        trouble = self.troubles[name].pop(0) if body and self.troubles.get(name) else None
        if isinstance(trouble, int):
            return self.send(trouble, b"", {}, body)
        if isinstance(trouble, bytes):
            data = trouble
        status, headers = 200, {**headers, "Accept-Ranges": "bytes"}
        asked = "" if trouble == "whole" else self.headers.get("Range", "")
        if found := re.fullmatch(r"bytes=(\d+)-(\d*)", asked):
            start, end = int(found[1]), min(int(found[2] or len(data)), len(data) - 1)
            status = 206
            headers["Content-Range"] = f"bytes {start}-{end}/{len(data)}"
            data = data[start : end + 1]
        if isinstance(trouble, tuple):
            return self.send_a_part(name, status, data, headers, *trouble)
        if body:
            self.sent.append((name, len(data)))
        return self.send(status, data, headers, body)

    def send_a_part(self, name, status, data, headers, how, count):
        self.send(status, data, headers, body=False)
        self.wfile.write(data[:count])
        self.wfile.flush()
        self.sent.append((name, count))
        self.close_connection = True
        if how == "stall":
            self.stalled.set()
            self.released.wait(60)

    def send(self, status, data, headers, body):
        self.send_response(status)
        for key, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if body:
            self.wfile.write(data)


def tree(files: dict[str, bytes], below: str = "", *, recursive: bool) -> list[dict]:
    """The Hub's listing of a folder. Shards of data sets are large files, which have SHA-256s."""
    found: dict[str, dict] = {}
    for name, data in files.items():
        if below and not name.startswith(f"{below}/"):
            continue
        rest = name.removeprefix(f"{below}/" if below else "")
        if "/" in rest and not recursive:
            folder = name.removesuffix(rest) + rest.split("/")[0]
            found[folder] = {"type": "directory", "path": folder, "oid": "0" * 40}
            continue
        git = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        found[name] = {"type": "file", "path": name, "size": len(data), "oid": git}
        if name.endswith((".parquet", ".tar")):
            digest = hashlib.sha256(data).hexdigest()
            found[name]["lfs"] = {"oid": digest, "size": len(data), "pointerSize": 134}
    return list(found.values())


@contextlib.contextmanager
def running(repos: dict[str, dict[str, bytes] | int | None], **state) -> Iterator[tuple[str, type]]:
    """The server's address and its class, which holds what it is asked and what goes wrong."""
    lists = {"requested": [], "sent": [], "troubles": {}}
    events = {"stalled": threading.Event(), "released": threading.Event()}
    handler = type("Handler", (Hub,), {"repos": repos, **lists, **events, **state})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", handler
    finally:
        handler.released.set()
        server.shutdown()


@contextlib.contextmanager
def serve(repos: dict[str, dict[str, bytes] | int | None]) -> Iterator[tuple[str, list[str]]]:
    """The server's address, and the list of files fetched from it."""
    with running(repos) as (address, hub):
        yield address, hub.requested
