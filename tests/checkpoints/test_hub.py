"""The real huggingface_hub client, against a small server that speaks the Hub's API."""

import json
import os
import subprocess
import sys
import textwrap

import pytest
from hub_server import serve

from diffusax.checkpoints.files import choose_weights
from diffusax.checkpoints.hub import resolve

FILES = {
    "model_index.json": b"{}",
    "unet/config.json": b"{}",
    "unet/diffusion_pytorch_model.safetensors": b"full",
    "unet/diffusion_pytorch_model.fp16.safetensors": b"half",
    "unet/diffusion_pytorch_model.bin": b"pickle",
    "vae/config.json": b"{}",
    "vae/diffusion_pytorch_model.safetensors": b"vae",
    "safety_checker/model.safetensors": b"not used",
    "text_encoder/model.safetensors.index.json": json.dumps(
        {"weight_map": {"a": "model-00001-of-00001.safetensors"}}
    ).encode(),
    "text_encoder/model-00001-of-00001.safetensors": b"shard",
    "text_encoder/model-00009-of-00009.safetensors": b"stray",
    "tokenizer/merges.txt": b"#version: 0.2",
}


@pytest.fixture(scope="module")
def server():
    with serve({"models/someone/tiny": FILES, "models/someone/gated": None}) as address_and_log:
        yield address_and_log


@pytest.fixture
def hub(server):
    return server[0]


@pytest.fixture
def requested(server):
    server[1].clear()
    return server[1]


def fetch(hub, home, call, **environment):
    """Runs `resolve(...)` in a process whose Hub is ours; the folder, or the error."""
    program = f"""
        from diffusax.checkpoints.hub import resolve
        try:
            print(resolve({call}))
        except ValueError as error:
            print("error:", error)
    """
    environment = {**os.environ, "HF_ENDPOINT": hub, "HF_HOME": str(home), **environment}
    environment["HF_HUB_DISABLE_XET"] = "1"
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    return done.stdout.strip()


def test_only_what_is_used_is_fetched_and_the_cache_serves_offline(hub, requested, tmp_path):
    folder = fetch(hub, tmp_path, "'someone/tiny', variant='fp16'")
    assert not folder.startswith("error"), folder
    assert sorted(set(requested)) == [
        "model_index.json",
        "text_encoder/model-00001-of-00001.safetensors",
        "text_encoder/model.safetensors.index.json",
        "tokenizer/merges.txt",
        "unet/config.json",
        "unet/diffusion_pytorch_model.fp16.safetensors",
        "vae/config.json",
        "vae/diffusion_pytorch_model.safetensors",
    ]
    requested.clear()
    assert fetch(hub, tmp_path, "'someone/tiny'", HF_HUB_OFFLINE="1") == folder
    assert fetch(hub, tmp_path, "'someone/tiny', local_files_only=True") == folder
    assert fetch("http://127.0.0.1:9", tmp_path, "'someone/tiny'") == folder
    assert requested == []


@pytest.mark.parametrize(
    ("call", "environment", "message"),
    [
        ("'someone/absent'", {}, "no such repository on the Hub"),
        ("'someone/gated'", {}, "is gated"),
        ("'someone/tiny', revision='v9'", {}, "has no revision 'v9'"),
        ("'someone/tiny'", {"HF_HUB_OFFLINE": "1"}, "not in the local cache"),
        ("'a b c'", {}, "neither a folder here nor a Hub repository id"),
    ],
)
def test_what_cannot_be_fetched_is_one_clear_sentence(hub, tmp_path, call, environment, message):
    answer = fetch(hub, tmp_path, call, **environment)
    assert answer.startswith("error:")
    assert message in answer
    assert "\n" not in answer


def test_local_folders_are_taken_as_they_are(tmp_path):
    assert resolve(tmp_path) == tmp_path
    for path in (tmp_path / "no", str(tmp_path / "no"), "./no"):
        with pytest.raises(ValueError, match="there is no folder"):
            resolve(path)


def test_choice_of_weights():
    plain, half = "diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.fp16.safetensors"
    assert choose_weights([plain, half]) == plain
    assert choose_weights([plain, half], "fp16") == half
    assert choose_weights([plain], "fp16") == plain
    assert choose_weights([half]) is None
    assert choose_weights(["model.safetensors.index.fp16.json"], "fp16") is not None
