"""Uploading a result with the real huggingface_hub client, to a small server on this machine."""

import pytest
import yaml
from huggingface_hub import constants
from support.runs.toy_run import Toy
from support.upload_server import Hub, serve_uploads

from diffusax.training import DataConfig, EMAConfig, TrainConfig
from diffusax.training.loop.export import push_to_hub, write_model_card


@pytest.fixture
def hub(monkeypatch):
    """A Hub that is that of the client."""
    with serve_uploads() as address:
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", "hf_x")
        yield


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "unet").mkdir()
    (tmp_path / "README.md").write_text("card")
    (tmp_path / "unet" / "config.json").write_text("{}")
    return tmp_path


def test_a_folder_arrives_whole(hub, folder):
    push_to_hub(folder, "someone/model")
    assert Hub.created == ["model"]
    assert Hub.files == {"README.md": b"card", "unet/config.json": b"{}"}


def test_a_refusal_is_one_sentence(hub, folder):
    Hub.refuse = True
    with pytest.raises(ValueError, match=r"^the Hub gives an error for 'someone/model'"):
        push_to_hub(folder, "someone/model")


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
