"""Uploading a result with the real huggingface_hub client, to a small server on this machine."""

import base64
import http.server
import json
import os
import subprocess
import sys
import textwrap
import threading
from typing import ClassVar

import pytest
import yaml
from toy_run import Toy

from diffusax.training import DataConfig, EMAConfig, TrainConfig
from diffusax.training.results.export import write_model_card


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
            self.send(200, {"url": "http://127.0.0.1/someone/model", "id": "someone/model"})
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


@pytest.fixture
def hub():
    Hub.files.clear()
    Hub.created.clear()
    Hub.refuse = False
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def push(endpoint: str, folder) -> subprocess.CompletedProcess:
    program = f"""
        from pathlib import Path
        from diffusax.training.results.export import push_to_hub
        try:
            push_to_hub(Path({str(folder)!r}), "someone/model")
        except ValueError as error:
            print("refused:", error)
    """
    environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_TOKEN": "hf_x", "HF_HUB_OFFLINE": "0"}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "unet").mkdir()
    (tmp_path / "README.md").write_text("card")
    (tmp_path / "unet" / "config.json").write_text("{}")
    return tmp_path


def test_a_folder_arrives_whole(hub, folder):
    done = push(hub, folder)
    assert done.returncode == 0, done.stderr
    assert "refused" not in done.stdout
    assert Hub.created == ["model"]
    assert Hub.files == {"README.md": b"card", "unet/config.json": b"{}"}


def test_a_refusal_is_one_sentence(hub, folder):
    Hub.refuse = True
    done = push(hub, folder)
    assert done.returncode == 0, done.stderr
    assert "refused: the Hub gives an error for 'someone/model'" in done.stdout


@pytest.mark.parametrize("address", [None, "someone/model"])
def test_a_card_says_where_the_model_is_and_how_long_it_was_trained(tmp_path, address):
    class Drawing(Toy):
        def card(self):
            return {"base_model": "someone/base", "pipeline_tag": "text-to-image"}

    folder = tmp_path / "model_ema"
    folder.mkdir()
    config = TrainConfig(
        output=str(tmp_path), steps=5, ema=EMAConfig("ramp"), data=DataConfig("pictures")
    )
    write_model_card(folder, Drawing(), config, steps=40, address=address, average="ramp")
    card = (folder / "README.md").read_text()
    assert f'from_pretrained("{address or folder}")' in card
    assert "40 steps of 16 examples on `pictures`" in " ".join(card.split())
    assert "averaged (ramp)" in card
    assert "pypi" not in card
    _, front, _ = card.split("---\n", 2)
    assert yaml.safe_load(front)["base_model"] == "someone/base"
