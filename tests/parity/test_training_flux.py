"""Training of FLUX.1 against diffusers' examples/dreambooth/train_dreambooth_lora_flux.py.

The reference is that script's inner loop on the same pictures, prompts, noise and noise levels.
"""

from typing import Any

import diffusers
import fluxes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers.training_utils import compute_loss_weighting_for_sd3
from lora import ATTENTION
from lora_training import ALPHA, add_trained, trained_tree
from test_training_z_image import (
    GRADIENT,
    LOSS,
    PROMPTS,
    draw_batches,
    nchw,
    options,
    trained_run,
)
from training.pictures import row, write_parquet

import diffusax
from diffusax.training import LoRAConfig, text_to_image
from diffusax.training.denoising import DenoisingLoss, Draws
from diffusax.training.diffusion.conditioning_dropout import Dropped

RANK, SCALE, SCHEME = 4, 2.5, "cosmap"


def torch_losses(pipe: Any, batch: dict[str, np.ndarray]) -> torch.Tensor:
    """The loss of each example as the script computes it."""
    with torch.no_grad():
        found = pipe.vae.encode(nchw(batch["pixel_values"] / 127.5 - 1)).latent_dist
        texts, pooled, text_ids = pipe.encode_prompt(list(PROMPTS), None)
    model_input = found.mean + found.std * nchw(batch["latent_noise"])
    model_input = (model_input - pipe.vae.config.shift_factor) * pipe.vae.config.scaling_factor
    b, c, h, w = model_input.shape
    sigmas = torch.tensor(batch["timesteps"]).reshape(-1, 1, 1, 1)
    noise, timesteps = nchw(batch["noise"]), 1000 * sigmas.flatten()
    noisy = (1.0 - sigmas) * model_input + sigmas * noise
    kind = diffusers.FluxPipeline
    reads = pipe.transformer.config.guidance_embeds
    pred = pipe.transformer(
        hidden_states=kind._pack_latents(noisy, b, c, h, w),
        timestep=timesteps / 1000,
        guidance=torch.tensor([SCALE]).expand(b) if reads else None,
        pooled_projections=pooled,
        encoder_hidden_states=texts,
        txt_ids=text_ids,
        img_ids=kind._prepare_latent_image_ids(b, h // 2, w // 2, "cpu", torch.float32),
    ).sample
    factor = pipe.vae_scale_factor
    pred = kind._unpack_latents(pred, h * factor, w * factor, factor)
    weighting = compute_loss_weighting_for_sd3(SCHEME, sigmas)
    return (weighting * (pred - (noise - model_input)) ** 2).reshape(b, -1).mean(1)


@pytest.mark.slow
@pytest.mark.parametrize("guided", [True, False])
def test_losses_and_gradients_of_adapters_are_upstreams(tmp_path, guided):
    pipe = fluxes.pipeline(tmp_path / "model", guidance_embeds=guided)
    data = write_parquet(tmp_path / "data", [row(i) for i in range(2)])
    add_trained(pipe.transformer, RANK, ATTENTION)
    lora = LoRAConfig(rank=RANK, alpha=ALPHA * RANK)
    more = {"weighting_scheme": SCHEME, "guidance_scale": SCALE, "lora": lora}
    recipe = text_to_image(options(tmp_path / "model", data, **more))
    base, batch = recipe.base, draw_batches()[0]
    loss = DenoisingLoss.of(
        recipe.config, base.family, base.networks, base.scheduler, lora=recipe.lora
    )
    # The script trains checkpoints whose shift depends on the image without any.
    assert loss.process.shift == 1
    tokens = [base.tokenize(prompt) for prompt in PROMPTS]
    text = {name: np.stack([own[name] for own in tokens]) for name in tokens[0]}
    none = jnp.zeros(2, bool)

    @jax.jit
    def value_and_grad(trained, frozen, batch):
        drawn = Draws(
            *(batch[n] for n in ("latent_noise", "noise", "timesteps")), Dropped(none, none)
        )

        def mean(trained):
            given = {"pixel_values": batch["pixel_values"], **text}
            losses = loss.with_draws(trained, frozen, given, drawn)
            return losses.mean(), losses

        return jax.grad(mean, has_aux=True)(trained)

    own = {"transformer": trained_tree(pipe.transformer)}
    gradient, losses = value_and_grad(own, recipe.frozen(), batch)
    expected = torch_losses(pipe, batch)
    expected.mean().backward()
    np.testing.assert_allclose(losses, expected.detach(), rtol=LOSS)
    theirs = {"transformer": trained_tree(pipe.transformer, gradients=True)}
    assert jax.tree.structure(gradient) == jax.tree.structure(theirs)
    largest = max(np.abs(g).max() for g in jax.tree.leaves(theirs))
    leaves, _ = jax.tree_util.tree_flatten_with_path(theirs)
    for (path, value), found in zip(leaves, jax.tree.leaves(gradient), strict=True):
        scale = max(np.abs(value).max(), 1e-3 * largest)
        assert np.abs(np.asarray(found) - value).max() < GRADIENT * scale, path


@pytest.mark.slow
def test_pytorch_draws_the_same_with_the_adapters_of_a_run(tmp_path):
    theirs = fluxes.pipeline(tmp_path / "model")
    data = write_parquet(tmp_path / "data", [row(i) for i in range(6)])
    found = trained_run(tmp_path / "model", data, tmp_path / "out", weighting_scheme="mode")

    def draw(pipe: Any) -> np.ndarray:
        pipe.set_progress_bar_config(disable=True)
        call = {"num_inference_steps": 2, "output_type": "np", **fluxes.SIZE}
        return pipe("a red apple", generator=torch.Generator().manual_seed(0), **call).images

    plain = draw(theirs)
    theirs.load_lora_weights(found)
    expected = draw(theirs)
    assert np.abs(expected - plain).max() > 0.01
    ours = diffusax.DiffusionPipeline.from_pretrained(tmp_path / "model")
    ours.load_lora_weights(found)
    assert np.abs(draw(ours) - expected).max() < 1e-4
