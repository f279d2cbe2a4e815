"""Models and pipelines are uploaded with the real client, to a small server on this machine."""

import os
import subprocess
import sys
import textwrap

import diffusers
import pytest
from support.tiny import SMALLEST_UNET, randomize
from support.upload_server import Hub, serve_uploads

import diffusax
from diffusax.checkpoints.hub import EMBEDDED

PROGRAM = """
    import sys
    import diffusax
    made = {make}
    for line in sys.stdin:
        try:
            print(eval(line), flush=True)
        except ValueError as error:
            print("error:", error, flush=True)
"""


def publish(address, make, *calls):
    """The answers to calls on `made`, in a process whose Hub is the server."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM).format(make=make)],
        input="\n".join(calls),
        env={**os.environ, "HF_ENDPOINT": address, "HF_TOKEN": "hf_x", "HF_HUB_OFFLINE": "0"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_a_model_and_a_pipeline_arrive_whole(tmp_path):
    randomize(diffusers.UNet2DConditionModel(**SMALLEST_UNET)).save_pretrained(tmp_path)
    make = f"diffusax.UNet2DConditionModel.from_pretrained({str(tmp_path)!r})"
    with serve_uploads() as address:
        calls = "made.push_to_hub('someone/model')", "made.push_to_hub('model', subfolder='unet')"
        first, _ = publish(address, make, *calls)
        assert first.endswith("/someone/model/commit/aaa")
        assert Hub.created == ["model", "model"]
        weights = "diffusion_pytorch_model.safetensors"
        names = {"README.md", "config.json", weights}
        assert set(Hub.files) == {*names, "unet/config.json", f"unet/{weights}"}
        assert "UNet2DConditionModel" in Hub.files["README.md"].decode()
        saved = tmp_path / "sent"
        saved.mkdir()
        for name in names:
            (saved / name).write_bytes(Hub.files[name])
        assert diffusers.UNet2DConditionModel.from_pretrained(saved).num_parameters() > 0

        make = "diffusax.DiffusionPipeline.from_pretrained('emoji')"
        publish(address, make, "made.push_to_hub('someone/model', commit_message='new')")
        assert {"model_index.json", f"unet/{weights}"} <= set(Hub.files)
        Hub.refuse = True
        (refused,) = publish(address, make, "made.push_to_hub('someone/model')")
        assert refused.startswith("error: the Hub gives an error for 'someone/model'")


def test_a_checkpoint_is_found_without_being_loaded():
    folder = diffusax.DiffusionPipeline.download("emoji", torch_dtype="bfloat16")
    assert folder == str(EMBEDDED["emoji"])
    with pytest.raises(ValueError, match="/nowhere is no folder here"):
        diffusax.DiffusionPipeline.download("/nowhere")


def test_a_tokenizer_is_loaded_alone():
    tokenizer = diffusax.CLIPTokenizer.from_pretrained("emoji", subfolder="tokenizer")
    pipe = diffusax.DiffusionPipeline.from_pretrained("emoji")
    assert tokenizer("a cat") == pipe.tokenizer("a cat")
