"""Wan with kernels stored in eight bits, beside PyTorch's with those multiplied out."""

import diffusers
import jax
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.adapted import random_adapter
from support.many_devices import run_on_devices
from support.pairs import slow
from support.quantised import encoded, save_gguf
from support.runs import RUNS
from support.tiny_transformers import wan_pipeline, wan_transformer

import diffusax
from diffusax.checkpoints.converting import pack_single_file
from diffusax.models.parameter_tree import ordered_leaves
from diffusax.models.quantized import Quantized

CALL = {"prompt": "a photo of a cat", "negative_prompt": "dogs", "guidance_scale": 3.0}
CALL |= {"height": 16, "width": 32, "num_frames": 5, "num_inference_steps": 4}
CALL |= {"max_sequence_length": 24, "output_type": "np"}
WIDE = {"num_attention_heads": 4, "attention_head_dim": 32, "ffn_dim": 128}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A pipeline with two transformers, each of which predicts some of the steps."""
    path = tmp_path_factory.mktemp("wan")
    parts = {"transformer": wan_transformer(**WIDE), "transformer_2": wan_transformer(7, **WIDE)}
    wan_pipeline(path, **parts, boundary_ratio=0.9)
    return path


def opened(folder, **options):
    pipe = diffusax.DiffusionPipeline.from_pretrained(folder, **options)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def kernels(params):
    return [leaf for _, leaf in ordered_leaves(params) if isinstance(leaf, Quantized)]


def generator():
    return torch.Generator().manual_seed(0)


def is_kernel(leaf):
    return isinstance(leaf, Quantized)


@pytest.mark.parametrize("weights", ["int8", *map(slow, ("fp8", "int8_convrot"))])
def test_videos_are_pytorchs_with_the_kernels_multiplied_out(folder, tmp_path, weights):
    ours = opened(folder, weights=weights)
    counts = {name: len(kernels(params)) for name, params in ours.params.items()}
    # Attention's, the feed-forwards' of two blocks, and UMT5's.
    assert counts == {"transformer": 20, "transformer_2": 20, "text_encoder": 14, "vae": 0}
    found = ours(**CALL, generator=generator()).frames
    ours.save_pretrained(tmp_path)
    theirs = diffusers.DiffusionPipeline.from_pretrained(tmp_path)
    theirs.set_progress_bar_config(disable=True)
    expected = theirs(**CALL, generator=generator()).frames
    np.testing.assert_allclose(found, expected, atol=1e-4)
    plain = opened(folder)(**CALL, generator=generator()).frames
    assert np.abs(found - plain).max() > 1e-4


def test_with_loras_and_in_a_running_batch(folder):
    pipe, dense = opened(folder, weights="int8"), opened(folder)
    for name, model in pipe.parts.models.items():
        dense.parts.models[name].params = jax.tree.map(np.asarray, model.params, is_leaf=is_kernel)
    for one in (pipe, dense):
        for name in ("transformer", "transformer_2"):
            style = random_adapter(pipe.parts.networks[name], name, 4)
            one.add_adapter(name, style.components)
        one.set_adapters(["transformer", "transformer_2"], [0.7, 0.5])
    found = pipe(**CALL, seed=0).frames
    np.testing.assert_allclose(found, dense(**CALL, seed=0).frames, atol=1e-4)
    assert np.abs(pipe(**CALL, seed=0, adapters={}).frames - found).max() > 1e-3
    with diffusax.RunningBatch(pipe, smallest=2) as batch:
        jobs = [batch.submit(**CALL, seed=i) for i in range(2)]
        np.testing.assert_allclose(jobs[0].result(120).frames, found, atol=1e-4)


@pytest.mark.parametrize("kind", ["fp8 of ComfyUI", "Q4_0"])
def test_files_in_fewer_bits_stay_so_in_memory(folder, tmp_path, kind):
    network = wan_transformer(**WIDE, text_dim=64)
    network.save_pretrained(tmp_path / "transformer")
    pack_single_file(tmp_path / "transformer", tmp_path / "packed.safetensors")
    stored = load_file(tmp_path / "packed.safetensors")
    if kind == "Q4_0":
        path = tmp_path / "four.gguf"
        save_gguf(path, stored, kind, architecture="wan")
    else:
        path = tmp_path / "eight.safetensors"
        save_file(encoded(stored, kind)[0], path)
    models = [
        diffusax.WanTransformer3DModel.from_single_file(
            path, config=tmp_path / "transformer", weights=weights
        )
        for weights in ("file", None)
    ]
    assert len(kernels(models[0].params)) > 20
    rng = np.random.default_rng(0)
    given = {
        "hidden_states": rng.standard_normal((1, 4, 3, 8, 16)).astype(np.float32),
        "timestep": np.array([500.0]),
        "encoder_hidden_states": rng.standard_normal((1, 6, 64)).astype(np.float32),
    }
    own, other = (np.asarray(model(**given).sample) for model in models)
    np.testing.assert_allclose(own, other, atol=1e-4)


@pytest.mark.slow
def test_meshes_draw_what_one_device_does(folder):
    assert run_on_devices(RUNS / "quantized_on_mesh.py", folder, "wan")
