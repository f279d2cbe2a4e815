"""What the nodes for ComfyUI do before servers that are full, guarded, broken or not there."""

import http.server
import json
import threading
import time
import tomllib

import pytest
from support.comfyui import PACKAGE, InterruptProcessingException, loaded_nodes
from support.repository import ROOT
from support.running_server import running

from diffusax.serving.engine.engine import EngineSettings

KEY = "a-key-of-this-test"
NOWHERE = "http://127.0.0.1:9"
BRIEF = {"num_inference_steps": 1, "sampler": "euler", "seed": 1}


@pytest.fixture(scope="module")
def server():
    """A server that takes one job of a client, and asks for a key."""
    bounds = EngineSettings(lanes=4, smallest=4, most_per_client=1)
    with running(bounds=bounds, keys=(KEY,)) as found:
        yield found


@pytest.fixture
def comfy(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "*")
    with loaded_nodes(NOWHERE) as found:
        yield found


class Broken(http.server.BaseHTTPRequestHandler):
    """Another server: it sends visitors on, and breaks off or withholds streams of events."""

    streams, breaks, asked = 0, 2, ()
    silent, cancelled = False, threading.Event()

    def do_POST(self):
        self.answer(json.dumps({"id": "a", "steps": 4, "images": [None]}).encode())

    def do_GET(self):
        if self.path == "/capabilities":
            self.answer(b"<html>")
        elif self.path.endswith("/events"):
            type(self).streams += 1
            if self.silent:
                self.cancelled.wait(30)
            done = self.streams > self.breaks
            state = {"state": "done" if done else "running", "steps_done": 4 if done else 1}
            data = json.dumps({**state, "steps": 4, "position": 0, "error": None})
            event = f"event: {'end' if done else 'progress'}\ndata: {data}\n\n".encode()
            self.answer(event, length=len(event) + (not done))
        else:
            self.answer(b"", 302)

    def do_DELETE(self):
        type(self).asked = (*self.asked, self.path)
        self.cancelled.set()
        self.answer(b"{}")

    def answer(self, body, status=200, length=None):
        self.send_response(status)
        self.send_header("Location", f"{NOWHERE}/")
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def broken():
    """The address and the class of such a server."""
    kind = type("Broken", (Broken,), {"cancelled": threading.Event()})
    other = http.server.ThreadingHTTPServer(("127.0.0.1", 0), kind)
    thread = threading.Thread(target=other.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{other.server_port}", kind
    other.shutdown()
    thread.join()
    other.server_close()


def test_without_a_server_names_are_texts(comfy):
    types = comfy.nodes.NODE_CLASS_MAPPINGS["DiffusaxGenerate"].INPUT_TYPES()["required"]
    assert (types["model"][0], types["model"][1]["default"]) == ("STRING", "default")
    lora = comfy.nodes.NODE_CLASS_MAPPINGS["DiffusaxLora"].INPUT_TYPES()["required"]
    assert (lora["name"][0], lora["name"][1]["default"]) == ("STRING", "")
    connect = {"class_type": "DiffusaxConnect", "inputs": {"url": ""}}
    with pytest.raises(ValueError, match=rf"{NOWHERE} does not answer .*`diffusax serve` run"):
        comfy.run({"1": connect})
    with pytest.raises(ValueError, match="url must be an address such as http://"):
        comfy.run({"1": {**connect, "inputs": {"url": "localhost"}}})


def test_the_lists_are_those_of_the_server_that_was_connected(comfy, server):
    inputs = {"url": server.url, "api_key": KEY}
    comfy.run({"1": {"class_type": "DiffusaxConnect", "inputs": inputs}})
    types = comfy.nodes.NODE_CLASS_MAPPINGS["DiffusaxGenerate"].INPUT_TYPES()["required"]
    assert types["model"][0] == ["default", "emoji"]


def test_the_environments_key_goes_to_its_server_alone(comfy, server, monkeypatch):
    connect = {"class_type": "DiffusaxConnect", "inputs": {"url": server.url}}
    monkeypatch.setenv("DIFFUSAX_API_KEY", KEY)
    with pytest.raises(ValueError, match="an API key must be sent"):
        comfy.run({"1": connect})
    monkeypatch.setenv("DIFFUSAX_SERVER", f"{server.url}/")
    assert comfy.run({"1": connect})["1"][1].startswith("emoji: ")


def test_jobs_wait_for_a_place_at_the_server(comfy, server):
    there = comfy.nodes.nodes.Server(server.url, KEY)
    requests = [{**BRIEF, "prompt": text} for text in ("a frog", "a cat")]
    files = comfy.nodes.nodes.run(there, requests, "7")
    assert len(files) == 2
    assert any("at most 1" in text for id, text in comfy.texts if id == "7"), comfy.texts


def test_an_interruption_ends_the_wait_for_a_place(comfy, server):
    there = comfy.nodes.nodes.Server(server.url, KEY)
    held = there.submit({**BRIEF, "prompt": "x", "num_images": 16, "num_inference_steps": 200})
    threading.Timer(0.3, comfy.interrupted.set).start()
    try:
        with pytest.raises(InterruptProcessingException):
            comfy.nodes.nodes.run(there, [{**BRIEF, "prompt": "a frog"}], "7")
    finally:
        there.cancel(held["id"])
    assert there.job(held["id"])["state"] == "cancelled"


def test_a_job_that_another_cancels_is_an_error(comfy, server):
    there = comfy.nodes.nodes.Server(server.url, KEY)

    def cancel_it():
        while not (jobs := [job for job in server.engine.jobs() if not job.is_over]):
            pass
        jobs[0].cancel()

    thread = threading.Thread(target=cancel_it)
    thread.start()
    request = {**BRIEF, "prompt": "a frog", "num_inference_steps": 200, "num_images": 8}
    with pytest.raises(
        ValueError, match=r"the job was cancelled at http.*; queue the prompt again"
    ):
        comfy.nodes.nodes.run(there, [request], "7")
    thread.join()


def test_streams_that_break_off_are_opened_again(comfy, broken):
    url, kind = broken
    there = comfy.nodes.nodes.Server(url)
    # The image is elsewhere, where keys must not go.
    with pytest.raises(ValueError, match="answers 302 Found; is it `diffusax serve`"):
        comfy.nodes.nodes.run(there, [{"prompt": "a"}], "7")
    assert kind.streams == 3
    assert comfy.progress == [(1, 4), (1, 4)]
    assert kind.asked == ("/jobs/a",)
    with pytest.raises(ValueError, match="did not answer with JSON"):
        there.capabilities()


def test_an_interruption_is_noticed_while_the_server_is_silent(comfy, broken):
    url, kind = broken
    kind.silent = True
    threading.Timer(0.3, comfy.interrupted.set).start()
    start = time.monotonic()
    with pytest.raises(InterruptProcessingException):
        comfy.nodes.nodes.run(comfy.nodes.nodes.Server(url), [{"prompt": "a"}], "7")
    assert time.monotonic() - start < 10
    assert (kind.asked, comfy.progress) == (("/jobs/a",), [])


def test_the_registry_takes_the_package():
    about = tomllib.loads((PACKAGE / "pyproject.toml").read_text())
    project = about["project"]
    assert "comfyui" not in project["name"].lower()
    assert project["version"].split(".") == [
        n for n in project["version"].split(".") if n.isdigit()
    ]
    version = (ROOT / "src/diffusax/_version.py").read_text()
    assert f'"{project["version"]}' in version
    assert project["dependencies"] == []
    assert {"PublisherId", "DisplayName"} <= set(about["tool"]["comfy"])
