"""Texts that are encoded, and text encoders that are freed, before other networks are read."""

import jax
import numpy as np
import pytest
from support.tiny import build_stable_diffusion
from support.tiny_transformers import Z_IMAGE_LANGUAGE, Z_IMAGE_SIZE, z_image_pipeline

import diffusax
from diffusax.cli.console import main
from diffusax.pipelines.components import loading

PROMPTS = ["a red apple", "an old house on a hill by the sea, and two dogs that run before it"]
CALL = {"num_inference_steps": 2, "seed": 3, "output_type": "np", **Z_IMAGE_SIZE}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("z-image")
    z_image_pipeline(found)
    return found


def opened(folder, **options):
    pipe = diffusax.AutoPipelineForText2Image.from_pretrained(folder, **options)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def test_the_text_encoder_is_gone_before_the_transformer_is_read(folder, monkeypatch):
    table = Z_IMAGE_LANGUAGE["vocab_size"], Z_IMAGE_LANGUAGE["hidden_size"]
    load, seen = loading.load_network, {}

    def watched(path, **options):
        seen[path.name] = any(x.shape == table for x in jax.live_arrays())
        model = load(path, **options)
        if path.name == "text_encoder":
            assert any(x.shape == table for x in jax.tree.leaves(model.params))
        return model

    before = len([x for x in jax.live_arrays() if x.shape == table])
    assert before == 0
    monkeypatch.setattr(loading, "load_network", watched)
    first = opened(folder, encode_first=PROMPTS)
    assert list(seen) == ["text_encoder", "vae", "transformer"]
    assert not any(seen.values())
    plain = {"guidance_scale": 0.0, **CALL}
    images = [pipe(PROMPTS[0], **plain).images for pipe in (first, opened(folder))]
    np.testing.assert_array_equal(*images)
    _of_others(first, folder)


@pytest.mark.slow
def test_prompts_of_several_lengths_with_guidance(folder):
    pipes = opened(folder, encode_first=PROMPTS), opened(folder)
    images = [pipe(PROMPTS, guidance_scale=3.0, **CALL).images for pipe in pipes]
    # Texts that are encoded alone have other paddings, which round otherwise.
    np.testing.assert_allclose(*images, atol=1e-5)


def _of_others(first, folder):
    """What the pipeline cannot do, and what it shares."""
    with pytest.raises(ValueError, match=r"'a hat' is not among the texts of encode_first"):
        first("a hat", **CALL)
    with pytest.raises(ValueError, match=r"max_sequence_length cannot be given after encode_first"):
        first(PROMPTS[0], max_sequence_length=64, **CALL)
    with pytest.raises(ValueError, match=r"Qwen3Model was freed by encode_first"):
        first.save_pretrained(folder / "again")
    with pytest.raises(ValueError, match=r"generate_fn needs the text encoders"):
        first.prepare_inputs(PROMPTS[0], **CALL)
    other = diffusax.ZImageImg2ImgPipeline.from_pipe(first)
    assert other.parts.encoded is first.parts.encoded


@pytest.mark.slow
def test_two_text_encoders_and_a_pipeline_that_needs_them(tmp_path):
    build_stable_diffusion(tmp_path / "model")
    first, other = opened(tmp_path / "model", encode_first=["a", "b"]), opened(tmp_path / "model")
    call = {"num_inference_steps": 2, "seed": 3, "output_type": "np", "negative_prompt": "b"}
    assert "CLIPTextModel(without parameters)" in repr(first)
    np.testing.assert_allclose(*(pipe("a", **call).images for pipe in (first, other)), atol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"encode_first": "a text"},
            r"^encode_first must be a list of texts, or .* \(got 'a text'\)",
        ),
        ({"encode_first": ["a"], "text_encoder": None}, "^only one of text_encoder and encode_fir"),
    ],
)
def test_what_cannot_be_is_said(folder, options, message):
    with pytest.raises(ValueError, match=message):
        diffusax.ZImagePipeline.from_pretrained(folder, **options)


@pytest.mark.slow
def test_the_command_encodes_the_prompts_of_all_runs_first(folder, tmp_path, monkeypatch):
    order = []
    load = loading.load_network
    monkeypatch.setattr(
        loading, "load_network", lambda path, **o: order.append(path.name) or load(path, **o)
    )
    for name, more in (("first.png", ["--encode-first"]), ("plain.png", [])):
        size = ["--height", "24", "--width", "40"]
        options = ["--steps", "2", "--guidance", "0", "--seed", "1", *size, *more]
        output = str(tmp_path / name)
        main(["generate", PROMPTS[0], "--model", str(folder), "--output", output, *options])
    assert order == ["text_encoder", "vae", "transformer", "vae", "text_encoder", "transformer"]
    first, plain = ((tmp_path / name).read_bytes() for name in ("first.png", "plain.png"))
    assert first == plain
    with pytest.raises(SystemExit):
        main(["generate", "a", "--model", str(folder), "--encode-first", "--clip-skip", "1"])
