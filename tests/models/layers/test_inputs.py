"""Inputs in another layout are one sentence that names the mend, wherever their shape shows it."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.tiny import ASYMMETRIC, SMALLEST_UNET, SMALLEST_VAE, TEXT, UNET
from support.tiny_transformers import FLUX

from diffusax.models import (
    MODELS,
    AsymmetricAutoencoderKL,
    AutoencoderKL,
    AutoencoderTiny,
    CLIPTextModel,
    ControlNetModel,
    UNet2DConditionModel,
)
from diffusax.models.network import Network
from diffusax.models.unet.context_keys import project_context
from diffusax.networks import initialize

TIME = np.float32(7)
MAP, CONTEXT = np.zeros((1, 8, 6, 4), np.float32), np.zeros((1, 5, 32), np.float32)
IMAGE = np.zeros((1, 8, 6, 3), np.float32)
CONTROL = {k: v for k, v in SMALLEST_UNET.items() if k not in ("mid_block_type", "up_block_types")}
NETWORKS = {
    "unet": (UNet2DConditionModel, {**SMALLEST_UNET, "cross_attention_dim": 32}),
    "controlnet": (ControlNetModel, {**CONTROL, "cross_attention_dim": 32}),
    "vae": (AutoencoderKL, SMALLEST_VAE),
    "tiny": (AutoencoderTiny, {}),
    "asymmetric": (AsymmetricAutoencoderKL, ASYMMETRIC),
    "text": (CLIPTextModel, TEXT),
}
LAST = r"; channels come last here: {}\.transpose\(0, 2, 3, 1\)$"


@pytest.fixture(scope="module")
def model():
    made = {}

    def make(kind):
        if kind not in made:
            module, config = NETWORKS[kind]
            made[kind] = initialize(module, module.config_class(**config))
        return made[kind]

    return make


def first(x):
    return x.transpose(0, 3, 1, 2)


@pytest.mark.parametrize(
    ("kind", "method", "given", "message"),
    [
        ("unet", None, (first(MAP), TIME, CONTEXT), "sample must have shape .*" + LAST),
        (
            "unet",
            None,
            (MAP[0], TIME, CONTEXT),
            r"sample .* 4\) \(got float32 of shape \(8, 6, 4\)",
        ),
        ("unet", None, (MAP[..., :3], TIME, CONTEXT), r"sample .* \(got .* 3\)\)$"),
        ("unet", None, (MAP, TIME, CONTEXT[0]), r"encoder_hidden_states .* \(batch, tokens, 32\)"),
        ("unet", None, (MAP, TIME, CONTEXT[..., 1:]), r"encoder_hidden_states .* \(1, 5, 31\)"),
        ("controlnet", None, (first(MAP), TIME, CONTEXT), "sample must have shape .*" + LAST),
        ("controlnet", None, (MAP, TIME, CONTEXT), "cond_embedding must have shape"),
        ("controlnet", "embed_condition", (first(IMAGE),), "cond must have shape .*" + LAST),
        ("vae", "encode", (first(IMAGE),), "x must have shape .*" + LAST),
        ("vae", "decode", (first(MAP),), "z must have shape .*" + LAST),
        ("tiny", "encode", (first(IMAGE),), "x must have shape .*" + LAST),
        ("tiny", "decode", (first(MAP),), "z must have shape .*" + LAST),
        ("asymmetric", "decode", (first(MAP),), "z must have shape .*" + LAST),
        ("text", None, (np.zeros((1, 7)),), r"input_ids must be integers .* \(got float32"),
        ("text", None, (np.zeros(7, int),), r"input_ids must be integers .* of shape \(7,\)\)"),
        ("text", None, ([[1, 2]],), r"input_ids must be integers .* \(got list\)"),
    ],
)
def test_a_wrong_layout_is_one_sentence(model, kind, method, given, message):
    message = message.replace("{}", message.split()[0])
    more = {"cond_embedding": jnp.asarray(IMAGE)} if (kind, method) == ("controlnet", None) else {}
    with pytest.raises(ValueError, match=r"\(got") as caught:
        model(kind).run(*given, method=method or "__call__", **more)
    # Without the note about its traceback that JAX adds.
    assert re.match(message, str(caught.value))


def test_a_unet_that_does_not_attend_takes_any_context():
    plain = {"down_block_types": ["DownBlock2D"], "up_block_types": ["UpBlock2D"]}
    config = UNet2DConditionModel.config_class(**{**SMALLEST_UNET, **plain})
    unet = initialize(UNet2DConditionModel, config)
    assert unet.run(MAP, TIME, CONTEXT).shape == MAP.shape


def controlled(**changes):
    """A UNet with the residuals of a ControlNet whose config is the UNet's but for changes."""
    shared = {k: v for k, v in UNET["sd1"].items() if k not in ("sample_size", "up_block_types")}
    config = {**shared, "conditioning_embedding_out_channels": (4, 8, 16), **changes}
    latents, texts = jnp.ones((1, 16, 16, 4)), jnp.ones((1, 77, 32))
    nets = [(ControlNetModel, config), (UNet2DConditionModel, UNET["sd1"])]
    control, unet = (Network(module, module.config_class(**c)) for module, c in nets)

    def run(params, image):
        embedding = control.apply(params[0], image, method="embed_condition")
        down, mid = control.apply(params[0], latents, 1.0, texts, cond_embedding=embedding)
        residuals = {"down_block_additional_residuals": down, "mid_block_additional_residual": mid}
        return unet.apply(params[1], latents, 1.0, texts, **residuals)

    return jax.eval_shape(run, (control.shapes, unet.shapes), jnp.ones((1, 64, 64, 3)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"conditioning_embedding_out_channels": (4, 8)},
            r"latents, \(16, 16\) \(got \(32, 32\)\): .* divides control images by 2; is the",
        ),
        ({"conditioning_embedding_out_channels": (4, 8, 8, 16)}, "divides control images by 8"),
        ({"layers_per_block": 2}, "UNet's maps, .*is the ControlNet made for this UNet"),
        ({"block_out_channels": (32, 32)}, "UNet's maps, .*is the ControlNet made for this UNet"),
        ({"cross_attention_dim": 24}, r"encoder_hidden_states .*24\) \(got .* \(1, 77, 32\)\)"),
    ],
)
def test_a_controlnet_of_another_model_is_one_sentence(changes, message):
    assert controlled().shape == (1, 16, 16, 4)
    with pytest.raises(ValueError, match=message):
        controlled(**changes)


def test_a_text_of_another_width_is_one_sentence():
    module = UNet2DConditionModel
    network = Network(module, module.config_class(**UNET["sd1"]))
    with pytest.raises(ValueError, match=r"encoder_hidden_states .* 32\) \(got .*\(1, 5, 24\)"):
        jax.eval_shape(lambda p: project_context(network, p, jnp.ones((1, 5, 24))), network.shapes)


def test_pooled_texts_of_another_width_are_one_sentence():
    module = MODELS["FluxTransformer2DModel"]
    network = Network(module, module.config_class(**FLUX))
    embed = network.module(jax.tree.map(lambda x: jnp.zeros(x.shape), network.shapes))
    with pytest.raises(ValueError, match=r"pooled must have shape \(batch, 16\) \(got .*\(1, 9\)"):
        embed.time_text_embed(jnp.ones(1), jnp.ones(1), jnp.ones((1, 9)))
    xl = Network(UNet2DConditionModel, UNet2DConditionModel.config_class(**UNET["xl"]))
    texts, added = (
        jnp.ones((1, 5, 56)),
        {"text_embeds": jnp.ones((1, 9)), "time_ids": jnp.ones((1, 6))},
    )
    with pytest.raises(ValueError, match=r"added_cond's text_embeds must have shape \(batch, 16\)"):
        jax.eval_shape(
            lambda p: xl.apply(p, jnp.ones((1, 8, 8, 4)), 1.0, texts, added_cond=added), xl.shapes
        )
