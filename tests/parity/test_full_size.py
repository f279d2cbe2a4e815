"""Full-size networks with random weights against PyTorch, one forward each."""

import gc
import inspect

import diffusers
import jax
import numpy as np
import pytest
import torch
import transformers
from full_size import (
    FLUX_DEV,
    QWEN3_4B,
    QWEN3_VL_8B,
    SD1,
    SD2,
    SDXL,
    T5_XXL,
    UMT5_XXL,
    VAE,
    VIT_H,
    VIT_L,
    WAN_2_2_VAE,
    WAN_5B,
    Z_IMAGE,
)
from support.tiny import randomize
from support.tiny_flux3 import flux3_inputs, flux3_transformer, upstream_flux3
from support.tiny_transformers import (
    flux_inputs,
    krea2_inputs,
    krea2_transformer,
    qwen_image21_transformer,
    qwen_image_inputs,
    qwen_image_transformer,
    upstream_flux,
    upstream_krea2,
    upstream_qwen_image,
    upstream_z_image,
    z_image_inputs,
)

import diffusax
from diffusax.models.transformers.flux import image_rotation
from diffusax.networks import load_network

pytestmark = pytest.mark.full_size


def normal(*shape):
    return np.random.default_rng(0).standard_normal(shape, np.float32)


def load(model, folder):
    return saved(randomize(model), folder)


def saved(model, folder):
    model.save_pretrained(folder)
    return load_network(folder)


def assert_close(actual, expected):
    actual, expected = np.asarray(actual), expected.detach().numpy()
    if expected.ndim == 4:
        expected = expected.transpose(0, 2, 3, 1)
    assert np.abs(actual - expected).max() <= 1e-4 * np.abs(expected).max()


@torch.no_grad()
@pytest.mark.parametrize("config", [SD1, SD2])
def test_a_full_size_unet_equals_diffusers(tmp_path, config):
    unet = diffusers.UNet2DConditionModel(**config)
    network = load(unet, tmp_path)
    x, context = normal(2, 4, 64, 64), normal(2, 77, config["cross_attention_dim"])
    expected = unet(torch.tensor(x), torch.tensor(500), torch.tensor(context)).sample
    x = x.transpose(0, 2, 3, 1)
    assert_close(jax.jit(network.apply)(network.params, x, np.float32(500), context), expected)


def random_bfloat16(model_class, config):
    """A PyTorch network whose weights were never held in float32, scaled as in `randomize`."""
    with torch.device("meta"):
        model = model_class(**config).to(torch.bfloat16)
    model = model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            deviation = (parameter.shape[0] / parameter.numel()) ** 0.5
            parameter.normal_(0.0, deviation, generator=generator)
        else:
            parameter.normal_(float(name.endswith("weight")), 0.2, generator=generator)
    return model.eval()


# Some 600 roundings to 8 bits stand between input and output, each of a relative 1e-3 in the mean;
# as a random walk they add up to 2.5%. Measured: 1.1%.
BFLOAT16_ERROR = 0.03


@torch.no_grad()
def test_sdxl_unet_of_2_6_billion_parameters_in_bfloat16(tmp_path):
    reference = random_bfloat16(diffusers.UNet2DConditionModel, SDXL)
    reference.save_pretrained(tmp_path)
    assert sum(p.numel() for p in reference.parameters()) == 2_567_463_684
    x, context, text = normal(1, 4, 32, 32), normal(1, 77, 2048), normal(1, 1280)
    ids = np.array([[1024, 1024, 0, 0, 1024, 1024]], np.float32)

    def half(array):
        return torch.tensor(array, dtype=torch.bfloat16)

    added = {"text_embeds": half(text), "time_ids": half(ids)}
    args = half(x), torch.tensor(500), half(context)
    expected = reference(*args, added_cond_kwargs=added).sample.float().numpy()
    expected = expected.transpose(0, 2, 3, 1)
    del reference
    gc.collect()

    network = load_network(tmp_path)
    assert all(leaf.dtype == "bfloat16" for leaf in jax.tree.leaves(network.params))

    @jax.jit
    def ours(params, ids):
        added = {"text_embeds": text, "time_ids": ids}
        args = x.transpose(0, 2, 3, 1), np.float32(500), context
        return network.apply(params, *args, added_cond=added).astype(np.float32)

    def distance(actual):
        return np.linalg.norm(actual - expected) / np.linalg.norm(expected)

    assert distance(np.asarray(ours(network.params, ids))) < BFLOAT16_ERROR
    # The measure sees the smallest of the conditions.
    assert distance(np.asarray(ours(network.params, ids + 64))) > 2 * BFLOAT16_ERROR


@torch.no_grad()
@pytest.mark.parametrize("config", [VIT_L, VIT_H])
def test_a_full_size_text_encoder_equals_transformers(tmp_path, config):
    encoder = transformers.CLIPTextModel(transformers.CLIPTextConfig(**config))
    network = load(encoder, tmp_path)
    ids = np.random.default_rng(0).integers(0, 49407, (2, 77)).astype(np.int32)
    ids[:, -1] = 49407
    expected = encoder(torch.tensor(ids)).last_hidden_state
    assert_close(jax.jit(network.apply)(network.params, ids).last_hidden_state, expected)


def qwen3(**changes):
    options = {k: v for k, v in QWEN3_4B.items() if k != "rope_theta"} | changes
    rope = {"rope_type": "default", "rope_theta": QWEN3_4B["rope_theta"]}
    return transformers.Qwen3Config(**options, rope_parameters=rope)


@torch.no_grad()
@pytest.mark.parametrize(
    ("model_class", "config"),
    [
        (transformers.Qwen3Model, qwen3(num_hidden_layers=1, vocab_size=1000)),
        (
            transformers.T5EncoderModel,
            transformers.T5Config(**T5_XXL | {"num_layers": 1, "vocab_size": 1000}),
        ),
        (
            transformers.UMT5EncoderModel,
            transformers.UMT5Config(**UMT5_XXL | {"num_layers": 1, "vocab_size": 1000}),
        ),
    ],
)
def test_a_layer_of_a_language_model(tmp_path, model_class, config):
    reference = model_class(config)
    network = load(reference, tmp_path)
    lengths = np.array([200, 513], np.int32)
    ids = np.random.default_rng(0).integers(0, 1000, (2, 513)).astype(np.int32)
    mask = np.arange(513) < lengths[:, None]
    expected = reference(torch.tensor(ids), torch.tensor(mask)).last_hidden_state
    assert_close(jax.jit(network.apply)(network.params, ids, lengths).last_hidden_state, expected)


def test_a_block_of_each_kind_of_flux(tmp_path):
    reference = diffusers.FluxTransformer2DModel(**FLUX_DEV, num_layers=1, num_single_layers=1)
    network = load(reference, tmp_path)
    given = flux_inputs(2, (12, 20), 64, text_width=4096, pooled_width=768)
    rotation = image_rotation(network.config.axes_dims_rope, 64, given.size)
    call = given.tokens, given.times, given.text, given.pooled, rotation, given.scales
    actual = jax.jit(network.apply)(network.params, *call)
    assert_close(actual, torch.tensor(upstream_flux(reference, given)))


def test_a_block_of_each_kind_of_z_image(tmp_path):
    changes = {"n_layers": 1, "n_refiner_layers": 1, "axes_lens": list(Z_IMAGE["axes_lens"])}
    reference = diffusers.ZImageTransformer2DModel(**changes)
    network = load(reference, tmp_path)
    given = z_image_inputs((40, 77), (24, 40), 2560)
    x = given.latents.transpose(0, 2, 3, 1)
    actual = jax.jit(network.apply)(network.params, x, given.times, *given.padded)
    assert_close(actual, torch.tensor(upstream_z_image(reference, given)))


def of_real(module_class, **changes):
    """The options of a real network, whose config is its class's defaults."""
    given = inspect.signature(module_class).parameters.items()
    return {name: parameter.default for name, parameter in given} | changes


def test_a_block_of_each_kind_of_flux3(tmp_path):
    options = of_real(diffusers.Flux3Transformer2DModel, num_layers=1, num_single_layers=1)
    reference = flux3_transformer(**options)
    network = saved(reference, tmp_path)
    given = flux3_inputs((6, 8), size=(12, 20), text=160, channels=128, text_width=20480)
    call = jax.jit(lambda p, *args, **kw: network.apply(p, *args, **kw))
    x = call(network.params, given.latents, given.times, given.text, references=given.references)
    assert_close(x, torch.tensor(upstream_flux3(reference, given).transpose(0, 3, 1, 2)))


def test_a_block_of_each_kind_of_krea2(tmp_path):
    counts = {"num_layers": 1, "num_layerwise_text_blocks": 1, "num_refiner_text_blocks": 1}
    reference = krea2_transformer(**of_real(diffusers.Krea2Transformer2DModel, **counts))
    network = saved(reference, tmp_path)
    given = krea2_inputs((40, 77), (24, 40), channels=16, layers=(12, 2560))
    text, lengths = given.padded
    actual = jax.jit(network.apply)(network.params, given.latents, given.times, text, lengths)
    assert_close(actual, torch.tensor(upstream_krea2(reference, given).transpose(0, 3, 1, 2)))


def test_a_block_of_qwen_image(tmp_path):
    kind = diffusers.QwenImageTransformer2DModel
    reference = qwen_image_transformer(**of_real(kind, num_layers=1, zero_cond_t=True))
    network = saved(reference, tmp_path)
    given = qwen_image_inputs((40, 77), (24, 40), (16, 24), channels=16, width=3584)
    text, lengths = given.padded
    read = given.latents, given.times, text, lengths
    actual = jax.jit(network.apply)(network.params, *read, references=tuple(given.references))
    assert_close(actual, torch.tensor(upstream_qwen_image(reference, given).transpose(0, 3, 1, 2)))


@torch.no_grad()
def test_a_block_of_qwen_image21(tmp_path):
    kind = diffusers.QwenImage21Transformer2DModel
    reference = qwen_image21_transformer(**of_real(kind, num_layers=1))
    network = saved(reference, tmp_path)
    (h, w), s = (16, 24), 77
    x, text, time = normal(1, h, w, 64), normal(1, s, 4096), np.array([0.7], np.float32)
    mask = torch.tensor([[False] * s + [True] * (h * w // 4)])
    tokens = torch.tensor(x.reshape(1, h * w, 64))
    read = torch.tensor(text), torch.tensor(time), [[(1, h, w)]], mask
    expected = reference(tokens, *read).sample[:, -h * w :].reshape(1, h, w, 64)
    actual = jax.jit(network.apply)(network.params, x, time, text, np.array([s], np.int32))
    assert_close(actual, expected.permute(0, 3, 1, 2))


WAN_IMAGES = {"in_channels": 36, "image_dim": 1280, "added_kv_proj_dim": 5120}


@torch.no_grad()
@pytest.mark.parametrize(
    "config", [{}, WAN_IMAGES, WAN_5B], ids=["14B", "14B from images", "TI2V-5B"]
)
def test_a_block_of_wan(tmp_path, config):
    reference = diffusers.WanTransformer3DModel(**{**config, "num_layers": 1})
    network = load(reference, tmp_path)
    x = normal(1, config.get("in_channels", 16), 3, 12, 20)
    tokens = 3 * 6 * 10
    # TI2V-5B has a time for each token, zero in a frame that is given.
    times = np.full((1, tokens) if config is WAN_5B else 1, 700, np.float32)
    text = normal(1, 512, 4096)
    images = normal(1, 257, 1280) if config is WAN_IMAGES else None
    theirs = (None if a is None else torch.tensor(a) for a in (x, times, text, images))
    expected = reference(*theirs).sample
    call = jax.jit(network.apply)
    actual = call(network.params, np.moveaxis(x, 1, -1), times, text, images)
    assert_close(np.moveaxis(actual, -1, 1), expected)


@torch.no_grad()
@pytest.mark.parametrize("config", [{}, WAN_2_2_VAE], ids=["2.1", "2.2"])
def test_a_full_size_autoencoder_of_videos(tmp_path, config):
    vae = diffusers.AutoencoderKLWan(**config)
    network = load(vae, tmp_path)
    side = 8 if config else 16
    x, z = normal(1, 3, 5, 128, 128), normal(1, vae.config.z_dim, 2, side, side)

    def run(method, value):
        apply = jax.jit(lambda params, v: network.apply(params, v, method=method))
        return apply(network.params, np.moveaxis(value, 1, -1))

    mean = np.moveaxis(run("encode", x)[0], -1, 1)
    assert_close(mean, vae.encode(torch.tensor(x)).latent_dist.mean)
    decoded = np.moveaxis(run("decode", z), -1, 1).clip(-1, 1)
    assert_close(decoded, vae.decode(torch.tensor(z)).sample)


@torch.no_grad()
def test_a_layer_of_each_network_of_qwen3_vl(tmp_path):
    text = {k: v for k, v in QWEN3_VL_8B["text_config"].items() if k != "rope_theta"}
    rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20]}
    tokens = {"image_token_id": 900, "video_token_id": 901, "vision_start_token_id": 902}
    config = transformers.Qwen3VLConfig(
        text_config={
            **text,
            "num_hidden_layers": 1,
            "vocab_size": 1000,
            "rope_parameters": {**rope, "mrope_interleaved": True},
        },
        vision_config={
            **QWEN3_VL_8B["vision_config"],
            "depth": 1,
            "deepstack_visual_indexes": [0],
        },
        **tokens,
        vision_end_token_id=903,
    )
    reference = transformers.Qwen3VLModel(config)
    load(reference, tmp_path)
    model = diffusax.Qwen3VLModel.from_pretrained(tmp_path)
    grid, before, after = np.array([[1, 8, 12]]), 20, 30
    count = 8 * 12 // 4
    ids = np.random.default_rng(0).integers(0, 900, (1, before + count + after))
    ids[:, before : before + count] = 900
    kinds = (ids == 900).astype(np.int64)
    patches = normal(8 * 12, 3 * 2 * 16 * 16)
    given = {"pixel_values": patches, "image_grid_thw": grid, "mm_token_type_ids": kinds}
    theirs = {name: torch.tensor(value) for name, value in given.items()}
    expected = reference(input_ids=torch.tensor(ids), **theirs).last_hidden_state
    assert_close(model(ids, **given).last_hidden_state, expected)


@torch.no_grad()
def test_a_full_size_autoencoder_equals_diffusers(tmp_path):
    vae = diffusers.AutoencoderKL(**VAE)
    network = load(vae, tmp_path)
    x, z = normal(1, 3, 256, 256), normal(1, 4, 64, 64)

    def run(method, value):
        apply = jax.jit(lambda params, v: network.apply(params, v, method=method))
        return apply(network.params, value.transpose(0, 2, 3, 1))

    assert_close(run("encode", x)[0], vae.encode(torch.tensor(x)).latent_dist.mean)
    assert_close(run("decode", z), vae.decode(torch.tensor(z)).sample)
