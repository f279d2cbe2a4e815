"""`diffusax generate --server`, and the client behind it."""

import http.server
import threading

import numpy as np
import pytest
from PIL import Image
from support.running_server import picture, running

from diffusax.cli import main
from diffusax.serving.client import Client, Refusal
from diffusax.serving.engine.engine import EngineSettings

KEY = "a-key-of-this-test"
BRIEF = ["--steps", "2", "--seed", "7"]


@pytest.fixture(scope="module")
def server():
    bounds = EngineSettings(lanes=4, smallest=4, most_per_client=1)
    with running(bounds=bounds, keys=(KEY,), most_steps=50) as found:
        yield found


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DIFFUSAX_API_KEY", KEY)
    picture().save("photo.png")


def failure(capsys, *args):
    """What a command says that fails."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main(["generate", *map(str, args)])
    assert ended.value.code == 2
    return " ".join(capsys.readouterr().err.split())


def opened(path):
    return np.asarray(Image.open(path)).astype(int)


@pytest.mark.slow
def test_a_server_draws_what_this_machine_would(server, place, capsys):
    command = ["generate", "a red apple", *BRIEF, "--guidance", "1", "--sampler", "euler"]
    main([*command, "--server", server.url, "--output", "there.png", "--num-images", "2"])
    assert capsys.readouterr().out == "there.png (2 images, seed 7)\n"
    main([*command, "--output", "here.png"])
    # A batch of other size rounds its sums otherwise.
    assert abs(opened("there-0.png") - opened("here.png")).max() <= 2
    texts = [Image.open(f"there-{i}.png").text["parameters"] for i in range(2)]
    assert [f"Seed: {seed}, " in text for text, seed in zip(texts, (7, 8))] == [True, True]
    assert "Sampler: Euler, Schedule type: Automatic, CFG scale: 1, " in texts[0]


def test_a_grid_waits_where_the_server_has_no_room(server, place, capsys):
    axes = ["--guidance", "1", "--grid", "steps=1,2"]
    command = ["generate", "a red apple", "--server", server.url, "--seed", "1", *axes]
    main([*command, "--output", "grid.png"])
    texts = [Image.open(f"grid-{i}.png").text["parameters"] for i in range(2)]
    assert [text.split("\n")[1].partition(",")[0] for text in texts] == ["Steps: 1", "Steps: 2"]


@pytest.mark.slow
def test_pictures_go_to_the_server(server, place):
    image = ["--image", "photo.png", "--strength", "1", "--output", "new.png"]
    main(["generate", "a red apple", "--server", server.url, *BRIEF, *image])
    assert opened("new.png").shape == (64, 64, 3)
    assert "Denoising strength: 1" in Image.open("new.png").text["parameters"]


def test_mistakes_are_told_in_a_sentence(server, place, capsys, monkeypatch):
    given = ["a red apple", "--server", server.url]
    assert failure(capsys, *given, "--width", 65).endswith(
        "error: width must be divisible by 8 (got 65); use 64 or 72"
    )
    assert "num_inference_steps must be at most 50 steps" in failure(capsys, *given, "--steps", 51)
    for flag, value in (("--dtype", "bfloat16"), ("--step-cache", "deep=3")):
        expected = f"{flag} is for the machine that generates"
        assert expected in failure(capsys, *given, flag, value)
    assert "--api-key needs --server" in failure(capsys, "x", "--api-key", KEY)
    assert "an API key must be sent" in failure(capsys, *given, "--api-key", "another-key")
    assert "server must be an address such as http://" in failure(
        capsys, "x", "--server", "localhost"
    )
    monkeypatch.setenv("NO_PROXY", "*")
    nobody = failure(capsys, "x", "--server", "http://127.0.0.1:9")
    assert "http://127.0.0.1:9 does not answer" in nobody
    assert "does `diffusax serve` run there?" in nobody


class Elsewhere(http.server.BaseHTTPRequestHandler):
    """Another kind of server, which sends its visitors on and then answers in HTML."""

    def do_GET(self):
        self.send_response(302 if self.path.startswith("/jobs") else 200)
        self.send_header("Location", "http://127.0.0.1:9/")
        self.send_header("Content-Length", "6")
        self.end_headers()
        self.wfile.write(b"<html>")

    def log_message(self, *_):
        pass


def test_keys_follow_no_redirection():
    other = http.server.HTTPServer(("127.0.0.1", 0), Elsewhere)
    thread = threading.Thread(target=other.serve_forever)
    thread.start()
    try:
        client = Client(f"http://127.0.0.1:{other.server_port}", KEY)
        with pytest.raises(Refusal, match="answers 302 Found; is it `diffusax serve`"):
            client.job("x")
        with pytest.raises(ValueError, match="did not answer with JSON"):
            client.capabilities()
    finally:
        other.shutdown()
        thread.join()
        other.server_close()
