"""One loss for text to image, InstructPix2Pix and ControlNet, with Stable Diffusion and SDXL.

The reference is the inner loop of diffusers' examples train_text_to_image.py,
train_text_to_image_sdxl.py, train_instruct_pix2pix.py, train_instruct_pix2pix_sdxl.py,
train_controlnet.py and train_controlnet_sdxl.py, on the same pictures, noise, timesteps and dropout
masks. train_instruct_pix2pix_sdxl.py samples the latents of the
picture before the edit, where the paper and the other scripts take their mode, as is done here.
"""

import dataclasses
from typing import Any

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers.training_utils import compute_snr
from support.tiny import LEVELS, build_stable_diffusion, build_stable_diffusion_xl, randomize

from diffusax.checkpoints.tree import params_to_tensors
from diffusax.models.network import Params
from diffusax.training.data.examples import mask_weights
from diffusax.training.recipes.base_model import BaseModel
from diffusax.training.step.denoising import DenoisingLoss
from diffusax.training.step.draws import Draws, Dropped, drop_conditions

PROBABILITY = 0.25
# Nothing dropped, text alone, both, picture alone.
U = np.array([0.9, 0.1, 0.3, 0.6], np.float32)
PROMPTS = ["make it snowy", "as a drawing", "", "two DOGS running at night!"]
LOSS = 1e-5
GRADIENT = 1e-4
"""Of the largest entry of the same tensor's gradient."""


@dataclasses.dataclass(frozen=True)
class Case:
    style: str
    prediction: str
    edits: bool
    gamma: float | None = None
    keep_pooled: bool = False
    control: bool = False
    masked: bool = False
    texts: bool = False
    """Whether the text encoders have gradients, too."""

    @property
    def trained(self) -> str:
        """The network whose gradient is compared."""
        return "controlnet" if self.control else "unet"


CASES = {
    "sd1-edit-epsilon": Case("sd1", "epsilon", True),
    "sd2-edit-v": Case("sd2", "v_prediction", True),
    "xl-edit-epsilon": Case("xl", "epsilon", True, keep_pooled=True),
    "xl-edit-v": Case("xl", "v_prediction", True, keep_pooled=True),
    "xl-edit-epsilon-pooled-dropped": Case("xl", "epsilon", True),
    "xl-text-epsilon-min-snr": Case("xl", "epsilon", False, gamma=5.0),
    "xl-text-v": Case("xl", "v_prediction", False),
    "sd1-control-v": Case("sd1", "v_prediction", False, control=True),
    "xl-control-epsilon": Case("xl", "epsilon", False, control=True),
    "sd1-text-masked": Case("sd1", "epsilon", False, gamma=5.0, masked=True),
}
REPETITIONS = (
    "sd1-edit-epsilon",
    "sd1-control-v",
    "sd2-edit-v",
    "xl-edit-v",
    "xl-control-epsilon",
    "xl-edit-epsilon",
    "xl-edit-epsilon-pooled-dropped",
    "xl-text-v",
    "sd1-text-masked",
)


def build(folder, case: Case) -> Any:
    """A checkpoint's pipeline, and under it a ControlNet where there is to be one."""
    pipe = build_pipeline(folder, case)
    if case.control:
        controlnet = diffusers.ControlNetModel.from_unet(
            pipe.unet, conditioning_embedding_out_channels=(8, 12, 16)
        )
        pipe.controlnet = randomize(controlnet, seed=1)
        pipe.controlnet.save_pretrained(folder / "controlnet")
    return pipe


def build_pipeline(folder, case: Case) -> Any:
    scheduler = diffusers.DDIMScheduler(
        **LEVELS, clip_sample=False, prediction_type=case.prediction
    )
    unet = {"in_channels": 8} if case.edits else {}
    if case.style == "xl":
        kind = diffusers.StableDiffusionXLInstructPix2PixPipeline
        kind = kind if case.edits else diffusers.StableDiffusionXLPipeline
        return build_stable_diffusion_xl(
            folder, unet=unet, scheduler=scheduler, pipeline_class=kind
        )
    return build_stable_diffusion(
        folder,
        style=case.style,
        unet=unet,
        scheduler=scheduler,
        pipeline_class=diffusers.StableDiffusionInstructPix2PixPipeline,
    )


def draw_batch() -> dict[str, np.ndarray]:
    """Pictures and every random number, with sizes of SDXL."""
    rng = np.random.default_rng(0)
    b = len(PROMPTS)
    return {
        "pixel_values": rng.integers(0, 256, (b, 32, 32, 3), np.uint8),
        "conditioning_pixel_values": rng.integers(0, 256, (b, 32, 32, 3), np.uint8),
        "original_pixel_values": rng.integers(0, 256, (b, 32, 32, 3), np.uint8),
        "time_ids": np.array([[40 + i, 50, i, 3, 32, 32] for i in range(b)], np.int32),
        "latent_noise": rng.standard_normal((b, 8, 8, 4), np.float32),
        "noise": rng.standard_normal((b, 8, 8, 4), np.float32),
        "timesteps": np.array([1, 250, 700, 999], np.int32),
        "mask": rng.integers(0, 256, (b, 32, 32), np.uint8),
    }


def nchw(x: np.ndarray) -> torch.Tensor:
    return torch.tensor(np.moveaxis(np.asarray(x, np.float32), -1, 1).copy())


def encode_prompts(pipe: Any, prompts: list[str]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """encode_prompt of the scripts: last hidden states, or SDXL's penultimate ones and pooled."""

    def ids(tokenizer):
        options = {"padding": "max_length", "max_length": 77, "truncation": True}
        return tokenizer(prompts, **options, return_tensors="pt").input_ids

    if not hasattr(pipe, "text_encoder_2"):
        return pipe.text_encoder(ids(pipe.tokenizer))[0], None
    embeds = []
    for tokenizer, encoder in (
        (pipe.tokenizer, pipe.text_encoder),
        (pipe.tokenizer_2, pipe.text_encoder_2),
    ):
        output = encoder(ids(tokenizer), output_hidden_states=True)
        embeds.append(output.hidden_states[-2])
    return torch.cat(embeds, dim=-1), output[0]


def torch_loss(pipe: Any, batch: dict[str, np.ndarray], case: Case) -> torch.Tensor:
    """The loss of each example as the scripts compute it."""
    scheduler = diffusers.DDPMScheduler.from_config(pipe.scheduler.config)
    timesteps = torch.tensor(batch["timesteps"]).long()
    noise = nchw(batch["noise"])
    with torch.no_grad():
        latent_dist = pipe.vae.encode(nchw(batch["pixel_values"] / 127.5 - 1)).latent_dist
        latents = latent_dist.mean + latent_dist.std * nchw(batch["latent_noise"])
        latents = latents * pipe.vae.config.scaling_factor
        null, null_pooled = encode_prompts(pipe, [""])
        original = pipe.vae.encode(nchw(batch["original_pixel_values"] / 127.5 - 1))
        original = original.latent_dist.mode()
    with torch.set_grad_enabled(case.texts):
        context, pooled = encode_prompts(pipe, PROMPTS)
    sample = scheduler.add_noise(latents, noise, timesteps)
    if case.edits:
        random_p = torch.tensor(U)
        prompt_mask = (random_p < 2 * PROBABILITY).reshape(-1, 1, 1)
        context = torch.where(prompt_mask, null, context)
        if pooled is not None and not case.keep_pooled:
            pooled = torch.where(prompt_mask[:, 0], null_pooled, pooled)
        image_mask = 1 - ((random_p >= PROBABILITY).float() * (random_p < 3 * PROBABILITY).float())
        sample = torch.cat([sample, image_mask.reshape(-1, 1, 1, 1) * original], dim=1)
    added = None
    if pooled is not None:
        added = {"text_embeds": pooled, "time_ids": torch.tensor(batch["time_ids"])}
    residuals = {}
    if case.control:
        picture = nchw(batch["conditioning_pixel_values"] / 255)
        down, mid = pipe.controlnet(
            sample,
            timesteps,
            context,
            added_cond_kwargs=added,
            controlnet_cond=picture,
            return_dict=False,
        )
        residuals["down_block_additional_residuals"] = down
        residuals["mid_block_additional_residual"] = mid
    options = {"added_cond_kwargs": added, **residuals}
    prediction = pipe.unet(sample, timesteps, context, **options).sample
    if case.prediction == "epsilon":
        target = noise
    else:
        target = scheduler.get_velocity(latents, noise, timesteps)
    loss = torch.nn.functional.mse_loss(prediction, target, reduction="none")
    if case.masked:
        # kohya's apply_masked_loss, and then the division by the mean.
        mask = torch.tensor(batch["mask"])[:, None].float() / 255
        mask = torch.nn.functional.interpolate(mask, size=loss.shape[2:], mode="area")
        loss = loss * mask / mask.mean((1, 2, 3), keepdim=True)
    loss = loss.mean((1, 2, 3))
    if case.gamma is not None:
        snr = compute_snr(scheduler, timesteps)
        loss = loss * torch.stack([snr, case.gamma * torch.ones_like(snr)], 1).min(1)[0] / snr
    return loss


def our_loss(
    folder, batch: dict[str, np.ndarray], case: Case, lora: Any = None, adapters: Params = None
) -> tuple[np.ndarray, Params]:
    """The loss of each example, and the gradient of their mean.

    It is that of the trained network, or of a LoRA's parameters by component.
    """
    base = BaseModel.open(str(folder), edits=case.edits)
    if case.control:
        base = base.with_controlnet(str(folder / "controlnet"))
    params = {name: base.load(name).params for name in base.networks}
    loss = DenoisingLoss(
        base.family,
        base.networks,
        base.scheduler.forward_process,
        base.scheduler.prediction_type,
        snr_gamma=case.gamma,
        keep_pooled=case.keep_pooled,
        lora=lora,
    )
    none = jnp.zeros(len(PROMPTS), bool)
    dropped = drop_conditions(jnp.asarray(U), PROBABILITY) if case.edits else Dropped(none, none)
    draws = Draws(batch["latent_noise"], batch["noise"], batch["timesteps"], dropped)
    tokens = [base.tokenize(prompt) for prompt in PROMPTS]
    kept = {k: v for k, v in batch.items() if k in ("pixel_values", "time_ids")}
    if case.edits:
        kept["original_pixel_values"] = batch["original_pixel_values"]
    kept |= {name: np.stack([ids[name] for ids in tokens]) for name in tokens[0]}
    if case.control:
        kept["conditioning_pixel_values"] = batch["conditioning_pixel_values"]
    if case.masked:
        masks = [mask_weights(mask, base.factor, normalized=True) for mask in batch["mask"]]
        kept["loss_weights"] = np.stack(masks)
    frozen = {**params, "empty": base.tokenize("")}
    trained = {case.trained: frozen.pop(case.trained)} if lora is None else adapters

    @jax.jit
    def value_and_grad(trained, frozen, batch, draws):
        def mean(trained):
            losses = loss.with_draws(trained, frozen, batch, draws)
            return losses.mean(), losses

        return jax.grad(mean, has_aux=True)(trained)

    gradient, losses = value_and_grad(trained, frozen, kept, draws)
    return np.asarray(losses), gradient


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in REPETITIONS)) for n in CASES]
)
def test_losses_and_gradients_are_those_of_diffusers(tmp_path, name):
    case = CASES[name]
    pipe, batch = build(tmp_path / "model", case), draw_batch()
    expected = torch_loss(pipe, batch, case)
    expected.mean().backward()
    losses, gradient = our_loss(tmp_path / "model", batch, case)
    np.testing.assert_allclose(losses, expected.detach(), rtol=LOSS)
    network = getattr(pipe, case.trained)
    theirs = {name: parameter.grad.numpy() for name, parameter in network.named_parameters()}
    ours = params_to_tensors(gradient[case.trained])
    assert set(ours) == set(theirs)
    largest = max(np.abs(g).max() for g in theirs.values())
    for key, value in theirs.items():
        scale = max(np.abs(value).max(), 1e-3 * largest)
        assert np.abs(np.asarray(ours[key]) - value).max() < GRADIENT * scale, key
