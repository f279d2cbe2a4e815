"""`diffusax serve` as a process: its first line, keys, signals."""

import contextlib
import dataclasses
import http.client
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from urllib.parse import urlsplit

import pytest

from diffusax.cli import main
from diffusax.cli.serve import KEYS, Serve
from diffusax.serving.web.server import listen


def ask(url, method, path, value=None, key=""):
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    with contextlib.closing(connection):
        connection.request(method, path, value and json.dumps(value), headers)
        answer = connection.getresponse()
        return answer.status, answer.read()


@contextlib.contextmanager
def serving(*args, **environment):
    """Runs the command; gives the process, the address that it prints, and its log."""
    command = [sys.executable, "-m", "diffusax", "serve", "--port", "0", *args]
    with tempfile.TemporaryFile("w+") as log:
        pipes = {"stdout": subprocess.PIPE, "stderr": log, "text": True}
        process = subprocess.Popen(command, env={**os.environ, **environment}, **pipes)
        try:
            yield process, process.stdout.readline().strip(), log
        finally:
            process.kill()
            process.communicate()


def wait_ready(url):
    until = time.monotonic() + 60
    while ask(url, "GET", "/ready")[0] != 200:
        assert time.monotonic() < until
        time.sleep(0.05)


def log_of(process, log):
    """The entries of the log of a process, once it has ended."""
    process.wait(30)
    log.seek(0)
    return [json.loads(line) for line in log if line.startswith("{")]


@pytest.mark.slow
def test_a_server_says_where_it_is_and_drains_at_sigterm(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("first-key-1234\n\nsecond-key-1234\n")
    with serving("--api-key-file", str(keys), **{KEYS: "third-key-1234"}) as (process, url, log):
        assert url.startswith("http://127.0.0.1:")
        assert ask(url, "GET", "/health") == (200, b'{"status":"ok"}')
        assert ask(url, "GET", "/jobs")[0] == 401
        wait_ready(url)
        fields = {"prompt": "a secret", "num_inference_steps": 60}
        key = "third-key-1234"
        status, body = ask(url, "POST", "/jobs", fields, key)
        assert status == 202
        path = f"/jobs/{json.loads(body)['id']}"
        while json.loads(ask(url, "GET", path, key=key)[1])["progress"] == 0:
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        while (status := ask(url, "POST", "/jobs", fields, key)[0]) == 202:
            time.sleep(0.02)
        assert status == 503
        assert ask(url, "GET", "/ready")[0] == 503
        while json.loads(ask(url, "GET", path, key=key)[1])["state"] == "running":
            time.sleep(0.02)
        assert ask(url, "GET", f"{path}/images/0")[1].startswith(b"\x89PNG")
        entries = log_of(process, log)
        assert process.returncode == 0
    assert {"request", "job", "job ended", "draining"} <= {entry["event"] for entry in entries}
    assert "a secret" not in str(entries)
    assert "key-1234" not in str(entries)


@pytest.mark.slow
def test_a_second_signal_ends_a_server_at_once():
    with serving("--log-prompts") as (process, url, log):
        wait_ready(url)
        fields = {"prompt": "a cat", "num_inference_steps": 200, "num_images": 8}
        assert ask(url, "POST", "/jobs", fields)[0] == 202
        process.send_signal(signal.SIGINT)
        time.sleep(1.5)
        assert process.poll() is None
        begun = time.monotonic()
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 128 + signal.SIGINT
        assert time.monotonic() - begun < 2
        assert "a cat" in str(log_of(process, log))


@pytest.mark.slow
def test_a_server_that_is_killed_can_be_started_again():
    for _ in range(2):
        with serving() as (process, url, _):
            wait_ready(url)
            fields = {"prompt": "a", "num_inference_steps": 2, "response_format": "url"}
            assert ask(url, "POST", "/v1/images/generations", fields)[0] == 200
            process.send_signal(signal.SIGKILL)
            process.wait(10)
            with pytest.raises(OSError):
                ask(url, "GET", "/health")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--port", "70000"], "port must be a whole number from 0 up to 65535"),
        (["--api-key", "short"], "--api-key must have at least 8"),
        (["--api-key-file", "/dev/null"], "--api-key-file /dev/null has no keys"),
        (["--priority-key-file", "/dev/null"], "--priority-key-file /dev/null has no keys"),
        (["--warm", "big"], "--warm must be height and width, such as 512x768"),
        (["--lanes", "3"], "--lanes must be a power of two, at least 4 (got 3)"),
        (["--model", "/nix/none"], "/nix/none"),
        (["--host", "192.0.2.1"], "cannot listen at 192.0.2.1"),
    ],
)
def test_mistakes_are_told_before_anything_is_served(capsys, args, said):
    with pytest.raises(SystemExit) as stop:
        main(["serve", "--port", "0", *args])
    shown = capsys.readouterr()
    assert stop.value.code == 2
    assert said in " ".join(shown.err.split())
    assert shown.out == ""


def test_keys_come_from_the_options_a_file_and_the_environment(tmp_path, monkeypatch):
    file = tmp_path / "keys"
    file.write_text("from-file-1\nfrom-file-2\n")
    monkeypatch.setenv(KEYS, "from-env-1 from-env-2")
    options = Serve(api_key=("given-12", "given-12"), api_key_file=file)
    own = ("given-12", "from-env-1", "from-env-2", "from-file-1", "from-file-2")
    assert options.keys() == own
    with_priorities = tmp_path / "priorities"
    with_priorities.write_text("5 comes-first\n\n -1\tfrom-file-2\n")
    options = dataclasses.replace(options, priority_key_file=with_priorities)
    assert options.keys() == (*own, "comes-first")
    assert options.priorities() == {"comes-first": 5, "from-file-2": -1}
    with_priorities.write_text("5 comes-first\nsecret-key\n")
    with pytest.raises(ValueError, match=r"\(line 2 has not\)") as wrong:
        options.priorities()
    assert "secret-key" not in str(wrong.value)


def test_a_port_that_is_taken_is_named():
    taken = listen("127.0.0.1", 0)
    port = taken.getsockname()[1]
    with contextlib.closing(taken), pytest.raises(OSError, match=f"port {port} .*--port"):
        listen("127.0.0.1", port)


def test_without_the_extra_the_command_says_how_to_get_it(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(SystemExit):
        main(["serve"])
    shown = capsys.readouterr().err
    assert "uvicorn is needed here; install it with pip install 'diffusax[serve]'" in shown
