"""Classifier guidance and CLIP guidance, beside PyTorch by hand."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from conftest import SIDE, torch_parts
from guidance import COLOURS, clip_score, colour_score, guided, sample
from jax.tree_util import Partial
from support.evaluation_rows import build_clip

import diffusax

LABELS, WIDTH = [0, 3], 2


def torch_colour_score(images):
    mask = torch.ones(SIDE, SIDE, dtype=bool)
    mask[WIDTH:-WIDTH, WIDTH:-WIDTH] = False
    mean = (images / 2 + 0.5)[:, :, mask].mean(-1)
    colours = torch.tensor([*COLOURS.values()])
    logits = -((mean[:, None] - colours) ** 2).sum(-1) / (2 * 0.2**2)
    return logits.log_softmax(-1)[range(len(LABELS)), LABELS]


def torch_guided(pipe, score, scale, x, t, context):
    x = x.clone().requires_grad_()
    raw = pipe.unet(x, t, context).sample
    x0, _ = torch_parts(pipe.scheduler, raw, t, x)
    images = pipe.vae.decode(x0 / pipe.vae.config.scaling_factor).sample
    (gradient,) = torch.autograd.grad(score(images).sum(), x)
    alpha_bar = pipe.scheduler.alphas_cumprod[t]
    moved = scale * (1 - alpha_bar) ** 0.5 * gradient
    if pipe.scheduler.config.prediction_type == "v_prediction":
        moved = moved / alpha_bar**0.5 if alpha_bar > 0 else 0
    return (raw - moved).detach()


def test_a_guided_prediction_and_its_samples_match_pytorch(sides):
    pipe, score = sides.jax, Partial(partial(colour_score, width=WIDTH), jnp.array(LABELS))
    x, context = sides.noise(2), sides.context(2)
    tensors = torch.tensor(x), torch.tensor(context)
    scale = 3.0
    expected = torch_guided(sides.torch, torch_colour_score, scale, tensors[0], 400, tensors[1])
    found = guided(pipe.unet, pipe.vae, pipe.scheduler, score, scale, x, 400, context)
    unguided = pipe.unet(x, 400, context).sample
    assert np.abs(found - unguided).max() > 1e-2
    np.testing.assert_allclose(found, expected, atol=1e-4)

    scheduler, y = sides.torch.scheduler, tensors[0]
    scheduler.set_timesteps(3)
    for t in scheduler.timesteps:
        raw = torch_guided(sides.torch, torch_colour_score, scale, y, t, tensors[1])
        y = scheduler.step(raw, t, y).prev_sample
    expected = sides.torch.vae.decode(y / sides.torch.vae.config.scaling_factor).sample
    given = pipe.unet, pipe.vae, score, scale, context, x
    found = sample(*given, scheduler=pipe.scheduler, steps=3)
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_clip_s_score_and_its_gradient_match_pytorch(sides, tmp_path):
    theirs = build_clip(tmp_path).requires_grad_(False)
    ours = diffusax.CLIPModel.from_pretrained(tmp_path)
    tokens = transformers.CLIPTokenizer.from_pretrained(tmp_path)(
        ["a red apple", "the sea"], padding=True, return_tensors="pt"
    )
    mean, std = np.full((3, 1, 1), 0.4, np.float32), np.full((3, 1, 1), 0.3, np.float32)

    def torch_score(images):
        # PyTorch's bicubic kernel is another than JAX's (a = -0.75, not -0.5).
        side = theirs.config.vision_config.image_size
        weights = torch.tensor(np.asarray(bicubic(SIDE, side)))
        images = torch.einsum("hi,wj,bcij->bchw", weights, weights, images / 2 + 0.5)
        output = theirs(tokens.input_ids, (images - torch.tensor(mean)) / torch.tensor(std))
        return output.logits_per_image.diagonal()

    score = Partial(clip_score, ours, tokens.input_ids.numpy(), mean, std)
    x, context = sides.noise(2), sides.context(2)
    expected = torch_guided(sides.torch, torch_score, 1.0, *map(torch.tensor, (x, 400, context)))
    pipe = sides.jax
    found = guided(pipe.unet, pipe.vae, pipe.scheduler, score, 1.0, x, 400, context)
    assert np.abs(found - pipe.unet(x, 400, context).sample).max() > 1e-2
    np.testing.assert_allclose(found, expected, atol=1e-4)


def bicubic(small, large):
    """The matrix of JAX's resizing, large small."""
    return jax.image.resize(np.eye(small, dtype=np.float32), (large, small), "bicubic")
