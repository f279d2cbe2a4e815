"""Inputs in another layout are one sentence that names the mend, wherever their shape shows it."""

import re

import jax.numpy as jnp
import numpy as np
import pytest
from tiny import ASYMMETRIC, SMALLEST_UNET, SMALLEST_VAE, TEXT

from diffusax.models import (
    AsymmetricAutoencoderKL,
    AutoencoderKL,
    AutoencoderTiny,
    CLIPTextModel,
    ControlNetModel,
    UNet2DConditionModel,
    initialize,
)

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
