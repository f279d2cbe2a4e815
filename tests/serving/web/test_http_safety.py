"""What a server refuses: keys, other sites' pages, long bodies, too many jobs."""

import asyncio
import base64
import contextlib
import http.client
import json
import logging
import socket
import threading
import time

import pytest
from starlette.requests import Request
from support.running_server import running

from diffusax.serving.engine.engine import EngineSettings
from diffusax.serving.web import bodies
from diffusax.serving.web.monitoring import JsonLines
from diffusax.serving.web.security import client_name, key_of

KEY, OTHER = "first-key-1234", "user:second-key-5678"


@pytest.fixture(scope="module")
def guarded():
    """A server with keys and narrow limits."""
    bounds = EngineSettings(lanes=4, smallest=4, most_queued=4, most_per_client=2)
    own = {"keys": (KEY, OTHER), "priorities": {OTHER: 3}, "most_body": 100_000}
    with running(bounds=bounds, **own) as found:
        yield found


@pytest.fixture(scope="module")
def public():
    """A server without keys."""
    with running(origins=("https://friend.example",), body_timeout=0.5) as found:
        yield found


def bearer(key):
    return f"Bearer {key}"


def basic(pair):
    return f"Basic {base64.b64encode(pair.encode()).decode()}"


@pytest.mark.parametrize(
    ("authorization", "found"),
    [
        (bearer(KEY), KEY),
        (bearer(OTHER), OTHER),
        (basic(f"anybody:{KEY}"), KEY),
        (basic(OTHER), OTHER),
        (bearer(KEY[:-1]), None),
        (bearer(""), None),
        (basic(KEY + ":"), None),
        ("Basic not-base64", None),
        ("", None),
        (bearer("ключ"), None),
    ],
)
def test_keys_come_as_bearer_or_basic(authorization, found):
    assert key_of(authorization, (KEY, OTHER)) == found


def test_a_clients_name_does_not_tell_its_key():
    assert KEY not in client_name(KEY)
    assert client_name(KEY) != client_name(OTHER)


def test_without_a_key_there_are_only_the_page_the_documentation_and_health(guarded):
    for path in ("/health", "/ready", "/docs", "/docs.css", "/openapi.json"):
        assert guarded.get(path).status == 200, path
    for path in ("/capabilities", "/jobs", "/metrics", "/v1/models", "/sdapi/v1/options"):
        answer = guarded.get(path)
        assert answer.status == 401, path
        assert guarded.get(path, Authorization=bearer(KEY)).status == 200
    assert guarded.get("/sdapi/v1/options").headers["www-authenticate"].startswith("Basic")
    assert guarded.get("/jobs").headers["www-authenticate"].startswith("Bearer")
    assert guarded.get("/nix").status == 401


def test_each_key_sees_its_own_jobs_and_has_its_own_limit(guarded):
    first, second = bearer(KEY), bearer(OTHER)
    fields = {"prompt": "a", "num_inference_steps": 200}
    jobs = [guarded.post("/jobs", fields, Authorization=first) for _ in range(2)]
    assert [job.status for job in jobs] == [202, 202]
    busy = guarded.post("/jobs", fields, Authorization=first)
    assert busy.status == 429
    assert int(busy.headers["retry-after"]) >= 1
    assert busy.json["error"]["code"] == "client_busy"
    path = f"/jobs/{jobs[0].json['id']}"
    assert guarded.get(path, Authorization=first).status == 200
    assert guarded.get(path, Authorization=second).status == 404
    assert guarded.ask("DELETE", path, Authorization=second).status == 404
    assert guarded.get("/jobs", Authorization=second).json == {"jobs": []}
    other = guarded.post("/jobs", fields, Authorization=second)
    assert other.status == 202
    for job, key in ((jobs[0], first), (jobs[1], first), (other, second)):
        state = guarded.ask("DELETE", f"/jobs/{job.json['id']}", Authorization=key).json["state"]
        assert state == "cancelled"


def test_a_job_has_the_priority_of_its_key(guarded):
    found = {}
    for key in (KEY, OTHER):
        job = guarded.post("/jobs", {"prompt": "a"}, Authorization=bearer(key)).json
        found[key] = guarded.engine.job(job["id"])
        found[key].cancel()
    assert {key: job.priority for key, job in found.items()} == {KEY: 0, OTHER: 3}


def test_bodies_that_are_too_long_are_refused(guarded):
    key = bearer(KEY)
    answer = guarded.post("/jobs", {"prompt": "x" * 200_000}, Authorization=key)
    assert (answer.status, answer.json["error"]["code"]) == (413, "body_too_large")
    # One that is announced is refused before it comes.
    host, port = guarded.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        head = f"POST /jobs HTTP/1.1\r\nHost: localhost\r\nAuthorization: {key}\r\n"
        connection.sendall(f"{head}Content-Length: 1000000000000\r\n\r\n".encode())
        assert b" 413 " in connection.recv(1000)
    # One whose length is not told beforehand is refused on the way.
    pieces = (b"x" * 50_000 for _ in range(10))
    headers = {"Authorization": key, "Content_Type": "application/json"}
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        assert guarded.ask("POST", "/jobs", body=pieces, **headers).status == 413
    assert guarded.get("/health").status == 200


def test_a_body_that_stops_is_given_up(public):
    host, port = public.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        head = "POST /jobs HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: 100\r\n\r\n{{".encode())
        assert b" 408 " in connection.recv(1000)


def test_a_body_that_trickles_in_is_given_up(public):
    with connect(public) as connection:
        head = "POST /jobs HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: 100\r\n\r\n{{".encode())
        connection.settimeout(0.1)
        answer = b""
        for _ in range(50):
            with contextlib.suppress(TimeoutError):
                answer = connection.recv(1000)
                break
            connection.sendall(b" ")
    assert b" 408 " in answer


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Origin": "{url}"}, 200),
        ({"Origin": "https://friend.example"}, 200),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://[broken"}, 403),
        ({"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "cors"}, 403),
        ({"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "navigate"}, 200),
        ({"Sec_Fetch_Site": "same-origin", "Sec_Fetch_Mode": "cors"}, 200),
        ({"Host": "evil.example"}, 421),
        ({"Host": "evil.example:7860"}, 421),
        ({"Host": "localhost:7860"}, 200),
        ({"Host": "192.168.1.2:7860"}, 200),
        ({"Host": "[::1]:7860"}, 200),
        ({"Host": "127.0.0.1.evil.example"}, 421),
    ],
)
def test_pages_of_other_sites_and_rebound_names_are_refused(public, headers, status):
    headers = {name: value.replace("{url}", public.url) for name, value in headers.items()}
    assert public.get("/capabilities", **headers).status == status


def test_other_sites_are_let_in_only_where_they_are_named(public):
    friend = public.get("/capabilities", Origin="https://friend.example")
    assert friend.headers["access-control-allow-origin"] == "https://friend.example"
    asked = {"Access_Control_Request_Method": "POST"}
    preflight = public.ask("OPTIONS", "/jobs", Origin="https://friend.example", **asked)
    assert preflight.status == 204
    assert "POST" in preflight.headers["access-control-allow-methods"]
    refused = public.ask("OPTIONS", "/jobs", Origin="https://evil.example", **asked)
    assert refused.status == 403
    assert "access-control-allow-origin" not in refused.headers
    assert "access-control-allow-origin" not in public.get("/capabilities").headers


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_what_a_form_of_another_site_could_send_is_no_json(public, kind):
    body = json.dumps({"prompt": "a"}).encode()
    answer = public.ask("POST", "/jobs", body=body, **({"Content_Type": kind} if kind else {}))
    assert answer.status == 415


@pytest.mark.parametrize("body", [b"[" * 100_000, b'{"a":' * 50 + b"1" + b"}" * 50, b"{", b"3"])
def test_what_is_no_json_object_of_few_levels_is_refused(public, body):
    answer = public.ask("POST", "/jobs", body=body, Content_Type="application/json")
    assert answer.status == 400
    assert answer.json["error"]["message"].startswith("the body must be ")


@pytest.mark.parametrize(("length", "elsewhere"), [(10, False), (100_000, True)])
def test_long_bodies_are_read_outside_the_event_loop(monkeypatch, length, elsewhere):
    threads = []
    monkeypatch.setattr(bodies, "check_depth", lambda value: threads.append(threading.get_ident()))
    body = json.dumps({"prompt": "a" * length}).encode()

    async def receive():
        return {"type": "http.request", "body": body, "more_body": False}

    headers = [(b"content-type", b"application/json")]
    request = Request({"type": "http", "method": "POST", "headers": headers}, receive)
    assert len(asyncio.run(bodies.read_json(request))["prompt"]) == length
    assert (threads != [threading.get_ident()]) == elsewhere


def test_every_answer_tells_browsers_to_be_careful(public):
    for path in ("/docs", "/health", "/nix", "/openapi.json"):
        headers = public.get(path).headers
        assert "default-src 'self'" in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cross-origin-resource-policy"] == "same-origin"
        assert "server" not in headers


@pytest.mark.parametrize(
    "path",
    [
        "/page/../../../../etc/passwd",
        "/page/%2e%2e/%2e%2e/__init__.py",
        "/page//etc/passwd",
        "/models/../../etc/passwd",
        "/v1/models/..%2f..%2fetc%2fpasswd",
        "/jobs/../../etc/passwd",
        "/jobs/x/images/0",
    ],
)
def test_no_path_of_a_request_reaches_a_file(public, path):
    for method in ("GET", "POST"):
        answer = public.ask(method, path)
        assert answer.status in (404, 405)
        assert b"root:" not in answer.body


def test_a_full_queue_says_when_to_come_again(guarded):
    """Many threads ask at once: all are answered, with an image's job or with 429."""
    answers = []

    def ask(key):
        fields = {"prompt": "a", "num_inference_steps": 100}
        answers.append(guarded.post("/jobs", fields, Authorization=bearer(key)))

    threads = [threading.Thread(target=ask, args=(key,)) for key in (KEY, OTHER) * 8]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {answer.status for answer in answers} == {202, 429}
    taken = [answer.json["id"] for answer in answers if answer.status == 202]
    assert len(taken) == len(set(taken)) == 4
    for answer in answers:
        if answer.status == 429:
            assert "retry-after" in answer.headers
    for id in taken:
        guarded.engine.job(id).cancel()


def test_prompts_are_not_logged_unless_asked(public, caplog):
    caplog.set_level(logging.INFO, "diffusax.serving")
    id = public.post("/jobs", {"prompt": "a secret", "num_inference_steps": 1}).json["id"]
    public.finish(id)
    fields = [getattr(record, "fields", {}) for record in caplog.records]
    assert id in [entry.get("job") for entry in fields]
    assert "a secret" not in str(fields)


def test_a_server_that_drains_finishes_and_takes_nothing_more(public):
    server = public
    id = server.post("/jobs", {"prompt": "a", "num_inference_steps": 30}).json["id"]
    server.service.draining = True
    answer = server.post("/jobs", {"prompt": "b"})
    assert (answer.status, answer.json["error"]["code"]) == (503, "closing")
    assert int(answer.headers["retry-after"]) >= 1
    ready = server.get("/ready")
    assert (ready.status, "retry-after" in ready.headers) == (503, True)
    assert server.get("/health").status == 200
    assert server.finish(id)["state"] == "done"
    assert server.get(f"/jobs/{id}/images/0").status == 200
    server.service.draining = False


def connect(server):
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=10)


@pytest.fixture(scope="module")
def small():
    """A server of few connections, whose clients must hurry."""
    with running(head_timeout=0.5, most_connections=8) as found:
        yield found


def test_silent_connections_keep_nobody_out(small):
    deadline, status = time.monotonic() + 60, None
    # On a crowded machine a client may be too late with its own head.
    while status is None and time.monotonic() < deadline:
        with contextlib.ExitStack() as stack:
            silent = [stack.enter_context(connect(small)) for _ in range(20)]
            with contextlib.suppress(ConnectionError, http.client.HTTPException):
                status = small.get("/health").status
            # The oldest have made room.
            with contextlib.suppress(ConnectionResetError):
                assert silent[0].recv(1) == b""
    assert status == 200


@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Slow: "])
def test_heads_that_do_not_come_are_given_up(small, sent):
    with connect(small) as connection:
        connection.sendall(
            b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" + sent if sent else b""
        )
        data = b""
        with contextlib.suppress(ConnectionResetError):
            while part := connection.recv(1000):
                data += part
                # Byte by byte does not help.
                connection.sendall(b"x")
        assert data.count(b"HTTP/1.1 200") == bool(sent)


def test_connections_that_all_ask_for_something_stay_and_others_come_again(small):
    head = b"POST /jobs HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with contextlib.ExitStack() as stack:
        asking = [stack.enter_context(connect(small)) for _ in range(4)]
        for connection in asking:
            connection.sendall(head + b"Content-Length: 2\r\n\r\n{")
        # What they have sent is read before the next one comes.
        deadline = time.monotonic() + 5
        while (answer := small.get("/health")).status == 200 and time.monotonic() < deadline:
            pass
        assert (answer.status, answer.headers["retry-after"]) == (503, "10")
        for connection in asking:
            connection.sendall(b"}")
            assert b" 202 " in connection.recv(1000)
    assert small.get("/health").status == 200


def test_a_body_of_two_lengths_ends_its_connection(public):
    with connect(public) as connection:
        head = "POST /jobs HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        both = "Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"
        connection.sendall((head + both).encode())
        data = b""
        while part := connection.recv(1000):
            data += part
    assert b"connection: close" in data.lower()


def test_a_line_of_the_log_has_no_separators_or_marks_of_direction():
    record = logging.LogRecord("x", logging.INFO, "", 0, "job", (), None)
    record.fields = {"prompt": 'りんご\u2028\u202e\x1b[31m\x85\ud800\U000e0001 "x"\n'}
    line = JsonLines().format(record)
    assert line.isprintable()
    assert "りんご" in line
    assert json.loads(line)["prompt"] == record.fields["prompt"]
