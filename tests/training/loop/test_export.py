"""Uploading a result with the real huggingface_hub client, to a small server on this machine."""

import os
import subprocess
import sys
import textwrap

import pytest
import yaml
from support.runs.toy_run import Toy
from support.upload_server import Hub, serve_uploads

from diffusax.training import DataConfig, EMAConfig, TrainConfig
from diffusax.training.loop.export import write_model_card


@pytest.fixture
def hub():
    with serve_uploads() as address:
        yield address


def push(endpoint: str, folder) -> subprocess.CompletedProcess:
    program = f"""
        from pathlib import Path
        from diffusax.training.loop.export import push_to_hub
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
