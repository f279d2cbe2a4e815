"""diffusers' Flax networks beside PyTorch's, their parameters, and Flax's own files."""

import json
import os
import re
import shutil
import subprocess
import sys

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax.serialization import to_bytes
from flax.traverse_util import unflatten_dict
from safetensors.numpy import load_file
from support.hub_server import serve

from diffusax.interop import flax

RNG = np.random.default_rng(0)
X = RNG.standard_normal((2, 4, 16, 16), np.float32)
CONTEXT = RNG.standard_normal((2, 7, 32), np.float32)
PICTURE = RNG.uniform(-1, 1, (2, 3, 64, 64)).astype(np.float32)


def torch_of(array):
    return torch.tensor(np.asarray(array))


@pytest.fixture(scope="module")
def sd(tiny_checkpoints):
    return tiny_checkpoints.pipeline("sd")


@pytest.fixture(scope="module")
def unet(sd):
    return flax.FlaxUNet2DConditionModel.from_pretrained(sd[0], subfolder="unet")


@pytest.mark.slow
@torch.no_grad()
def test_the_unet_with_a_controlnet_is_that_of_pytorch(tiny_checkpoints, sd, unet):
    folder, reference = tiny_checkpoints.controlnet("sd")
    controlnet, control_params = flax.FlaxControlNetModel.from_pretrained(folder)
    model, params = unet
    hint, t = np.abs(PICTURE), np.array([7, 400])
    scale = np.array([0.5, 0.9], np.float32)
    given = (torch_of(X), torch_of(t), torch_of(CONTEXT))
    down, mid = reference(*given, torch_of(hint), return_dict=False)
    shape = torch_of(scale).reshape(2, 1, 1, 1)
    residuals = {
        "down_block_additional_residuals": [r * shape for r in down],
        "mid_block_additional_residual": mid * shape,
    }
    expected = sd[1].unet(*given, **residuals).sample

    @jax.jit
    def ours(params, control_params):
        down, mid = controlnet.apply(
            {"params": control_params},
            jnp.array(X),
            jnp.array(t, dtype=jnp.int32),
            encoder_hidden_states=CONTEXT,
            controlnet_cond=hint,
            conditioning_scale=scale,
            return_dict=False,
        )
        return model.apply(
            {"params": params},
            jnp.array(X),
            jnp.array(t, dtype=jnp.int32),
            encoder_hidden_states=CONTEXT,
            down_block_additional_residuals=down,
            mid_block_additional_residual=mid,
        )

    output = ours(params, control_params)
    assert output.sample.shape == X.shape
    np.testing.assert_allclose(output.sample, expected, atol=1e-4)
    np.testing.assert_array_equal(output[0], output["sample"])


@torch.no_grad()
def test_the_autoencoder_is_that_of_pytorch(sd):
    vae, params = flax.FlaxAutoencoderKL.from_pretrained(sd[0], subfolder="vae")
    reference = sd[1].vae
    expected = reference.encode(torch_of(PICTURE)).latent_dist
    dist = vae.apply({"params": params}, PICTURE, method=vae.encode).latent_dist
    mean = dist.mean.transpose(0, 3, 1, 2)
    np.testing.assert_allclose(mean, expected.mean, atol=1e-4)
    np.testing.assert_allclose(dist.kl(), expected.kl(), rtol=1e-3)
    noise = jax.random.normal(jax.random.key(2), dist.mean.shape)
    np.testing.assert_allclose(dist.sample(jax.random.key(2)), dist.mean + dist.std * noise)
    nll = expected.nll(torch_of(mean) + 1)
    np.testing.assert_allclose(dist.nll(dist.mean + 1), nll, rtol=1e-3)
    decoded = reference.decode(torch_of(mean)).sample
    for latents in (mean, dist.mode()):
        ours = vae.apply({"params": params}, latents, method="decode").sample
        np.testing.assert_allclose(ours, decoded, atol=1e-4)
    np.testing.assert_allclose(vae.apply({"params": params}, PICTURE).sample, decoded, atol=1e-4)
    drawn = vae.apply(
        {"params": params},
        PICTURE,
        sample_posterior=True,
        rngs={"gaussian": jax.random.key(2)},
    ).sample
    again = vae.bind({"params": params}).decode(dist.sample(jax.random.key(2)))[0]
    np.testing.assert_allclose(drawn, again, atol=1e-5)
    assert np.abs(drawn - decoded.numpy()).max() > 0.01


@torch.no_grad()
def test_text_encoders_are_those_of_pytorch(tiny_checkpoints):
    folder, reference = tiny_checkpoints.pipeline("xl")
    ids = RNG.integers(0, 49408, (2, 77))
    ids[:, -1] = 49407
    model = flax.FlaxCLIPTextModel.from_pretrained(folder, subfolder="text_encoder")
    expected = reference.text_encoder(torch_of(ids), output_hidden_states=True)
    output = model(ids, params=model.params, output_hidden_states=True)
    np.testing.assert_allclose(output[0], expected[0], atol=1e-4)
    np.testing.assert_allclose(output["hidden_states"][-2], expected.hidden_states[-2], atol=1e-4)
    np.testing.assert_allclose(output.pooler_output, expected.pooler_output, atol=1e-4)
    second, params = flax.FlaxCLIPTextModelWithProjection.from_pretrained(
        folder, subfolder="text_encoder_2", _do_init=False
    )
    assert second.params is None
    expected = reference.text_encoder_2(torch_of(ids)).text_embeds
    np.testing.assert_allclose(second(ids, params=params).text_embeds, expected, atol=1e-4)
    with pytest.raises(ValueError, match="holds no parameters"):
        second(ids)


@pytest.mark.slow
def test_training_computes_in_the_models_dtype_and_keeps_its_parameters(sd):
    unet, params = flax.FlaxUNet2DConditionModel.from_pretrained(
        sd[0], subfolder="unet", dtype=jnp.bfloat16
    )
    assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {"float32"}

    def loss(params):
        sample = unet.apply({"params": params}, X, 5, CONTEXT, train=True).sample
        assert sample.dtype == jnp.bfloat16
        return (sample.astype(jnp.float32) ** 2).mean()

    gradients = jax.eval_shape(jax.grad(loss), params)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(gradients)} == {"float32"}
    wide = flax.FlaxUNet2DConditionModel.from_config(unet.config)
    narrow = unet.to_bf16(params)
    output = jax.eval_shape(lambda p: wide.apply({"params": p}, X, 5, CONTEXT), narrow)
    assert (wide.dtype, output.sample.dtype) == (jnp.float32, jnp.bfloat16)


def test_parameters_are_cast_whole_or_by_mask(unet):
    model, params = unet[0], {name: unet[1][name] for name in ("conv_in", "conv_norm_out")}
    assert {leaf.dtype.name for leaf in jax.tree.leaves(model.to_bf16(params))} == {"bfloat16"}
    mask = jax.tree.map(lambda leaf: leaf.ndim > 1, params)
    mixed = model.to_fp16(params, mask)
    assert mixed["conv_in"]["kernel"].dtype == jnp.float16
    assert mixed["conv_in"]["bias"].dtype == jnp.float32
    assert {leaf.dtype.name for leaf in jax.tree.leaves(model.to_fp32(mixed))} == {"float32"}


def test_new_parameters_are_drawn_from_the_key():
    options = {"block_out_channels": (32, 64), "cross_attention_dim": 32, "layers_per_block": 1}
    down = {"down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D")}
    up = {"up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D")}
    model = flax.FlaxUNet2DConditionModel(**options, **down, **up, split_head_dim=True)
    assert (model.config.sample_size, model.config.split_head_dim) == (32, True)
    shapes = jax.eval_shape(model.init_weights, rng=jax.random.PRNGKey(0))
    params = model.init_weights(jax.random.PRNGKey(0))
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(lambda leaf: leaf.shape, shapes)
    again = model.init({"params": jax.random.key(0)}, None)["params"]
    other = model.init_weights(jax.random.PRNGKey(1))
    kernel = params["conv_in"]["kernel"]
    np.testing.assert_array_equal(kernel, again["conv_in"]["kernel"])
    assert np.abs(kernel - other["conv_in"]["kernel"]).max() > 0.1
    copy = flax.FlaxUNet2DConditionModel.from_config(model.config, dtype=jnp.bfloat16)
    assert (copy.network, copy.dtype) == (model.network, jnp.bfloat16)

    controlnet = flax.FlaxControlNetModel(**options, **down)
    fresh = controlnet.init_weights(jax.random.key(0))
    assert not np.any(fresh["controlnet_mid_block"]["kernel"])
    assert not np.any(fresh["controlnet_cond_embedding"]["conv_out"]["kernel"])
    assert np.any(fresh["controlnet_cond_embedding"]["conv_in"]["kernel"])


def test_a_saved_network_is_opened_by_pytorch(unet, sd, tmp_path):
    model, params = unet
    model.save_pretrained(tmp_path, params)
    saved = diffusers.UNet2DConditionModel.from_pretrained(tmp_path).state_dict()
    for name, tensor in sd[1].unet.state_dict().items():
        torch.testing.assert_close(saved[name], tensor)


def flax_file(folder, joined):
    """The folder's weights in Flax's file, as diffusers' and transformers' converters wrote it."""
    (path,) = folder.glob("*.safetensors")
    flat = {}
    for name, tensor in load_file(path).items():
        if joined:
            name = re.sub(r"(\w+)\.(\d+)", r"\1_\2", name)
        elif not name.startswith(("text_model.", "text_projection.")):
            name = f"text_model.{name}"
        *parents, leaf = name.split(".")
        if folder.name == "vae":
            old = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out_0": "proj_attn"}
            parents = [old.get(part, part) for part in parents]
        if leaf == "weight" and "embedding" in parents[-1] and tensor.ndim == 2 and not joined:
            leaf = "embedding"
        elif leaf == "weight":
            leaf = "kernel" if tensor.ndim > 1 else "scale"
            tensor = tensor.transpose(2, 3, 1, 0) if tensor.ndim == 4 else tensor.T
        flat[(*parents, leaf)] = np.ascontiguousarray(tensor)
    path.unlink()
    names = {True: "diffusion_flax_model.msgpack", False: "flax_model.msgpack"}
    (folder / names[joined]).write_bytes(to_bytes(unflatten_dict(flat)))


@pytest.fixture
def flax_folder(sd, tmp_path):
    """A checkpoint as diffusers' Flax pipeline saved it."""
    folder = shutil.copytree(sd[0], tmp_path / "flax")
    for name in ("unet", "vae", "text_encoder"):
        flax_file(folder / name, joined=name != "text_encoder")
    path = folder / "model_index.json"
    index = json.loads(path.read_text())
    for name in ("unet", "vae", "text_encoder", "scheduler"):
        index[name][1] = f"Flax{index[name][1]}"
    path.write_text(json.dumps(index))
    return folder


def test_flax_checkpoints_are_read(sd, flax_folder):
    folder, load = flax_folder, flax.FlaxStableDiffusionPipeline.from_pretrained
    _, params = load(folder, safety_checker=None, feature_extractor=None)
    _, expected = load(sd[0], from_pt=True, safety_checker=None)
    jax.tree.map(np.testing.assert_array_equal, params, expected)
    with pytest.raises(ValueError, match=r"diffusion_flax_model\.msgpack is not a safetensors"):
        load(folder, from_pt=True)
    (folder / "unet" / "diffusion_flax_model.msgpack").write_bytes(b"version https://git-lfs")
    with pytest.raises(ValueError, match="is no Flax checkpoint"):
        load(folder)
    flax_weights = {"conv_in": {"kernel": np.zeros((3, 3, 4, 5), np.float32)}}
    (folder / "unet" / "diffusion_flax_model.msgpack").write_bytes(to_bytes(flax_weights))
    with pytest.raises(ValueError, match=r"conv_in/kernel \(has \(3, 3, 4, 5\), the config asks"):
        load(folder)


def test_another_class_than_the_folders_is_an_error(sd):
    with pytest.raises(ValueError, match="holds a AutoencoderKL, not a UNet2DConditionModel"):
        flax.FlaxUNet2DConditionModel.from_pretrained(sd[0], subfolder="vae")


LOAD = """
import jax
from diffusax.interop import flax
for options in ({}, {"from_pt": True}):
    _, params = flax.FlaxStableDiffusionPipeline.from_pretrained("someone/both", **options)
_, params = flax.FlaxUNet2DConditionModel.from_pretrained("someone/torch", subfolder="unet")
_, state = flax.FlaxPNDMScheduler.from_pretrained("someone/torch", subfolder="scheduler")
"""


@pytest.mark.slow
def test_repositories_give_flax_weights_or_safetensors(sd, flax_folder, tmp_path):
    def files(folder):
        found = (path for path in folder.rglob("*") if path.is_file())
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}

    torch_files = files(sd[0])
    checker = {"safety_checker/flax_model.msgpack": b"large"}
    both = {**torch_files, **files(flax_folder), **checker}
    both["model_index.json"] = torch_files["model_index.json"]
    with serve({"models/someone/both": both, "models/someone/torch": torch_files}) as served:
        url, requested = served
        env = {**os.environ, "HF_ENDPOINT": url, "HF_HOME": str(tmp_path / "home")}
        done = subprocess.run([sys.executable, "-c", LOAD], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    weights = [name for name in requested if name.endswith((".msgpack", ".safetensors"))]
    stem = "diffusion_pytorch_model.safetensors"
    first = {"unet/diffusion_flax_model.msgpack", "vae/diffusion_flax_model.msgpack"}
    assert set(weights[:3]) == {*first, "text_encoder/flax_model.msgpack"}
    assert set(weights[3:6]) == {f"unet/{stem}", f"vae/{stem}", "text_encoder/model.safetensors"}
    assert weights[6:] == [f"unet/{stem}"]
