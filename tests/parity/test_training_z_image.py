"""Training of Z-Image against diffusers' examples/dreambooth/train_dreambooth_lora_z_image.py.

The reference is that script's inner loop on the same pictures, prompts, noise and noise levels.
"""

import dataclasses
from typing import Any

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import peft
import pytest
import torch
from diffusers.training_utils import compute_loss_weighting_for_sd3
from diffusers.utils import convert_state_dict_to_diffusers
from effort import few
from lora import ATTENTION
from lora_training import ALPHA, add_trained, trained_tree
from peft.utils import get_peft_model_state_dict
from training.pictures import row, write_parquet
from z_images import SIZE, pipeline

import diffusax
from diffusax.checkpoints.tree import params_to_tensors
from diffusax.training import (
    CacheConfig,
    CacheDataConfig,
    CaptionedDataConfig,
    LoRAConfig,
    OptimizerConfig,
    TextToImageConfig,
    cache_latents,
    text_to_image,
    train,
)
from diffusax.training.denoising import DenoisingLoss, Draws
from diffusax.training.diffusion.conditioning_dropout import Dropped

STEPS, RATE, RANK = 3, 0.05, 4
PROMPTS = ["a red apple", "an old house on a hill by the sea, and two dogs that run before it"]
LOSS, GRADIENT = 1e-5, 1e-4


@dataclasses.dataclass(frozen=True)
class Case:
    scheme: str
    adapters: bool


CASES = {
    "lora-cosmap": Case("cosmap", True),
    "lora-sigma-sqrt": Case("sigma_sqrt", True),
    "full-logit-normal": Case("logit_normal", False),
}


def draw_batches() -> list[dict[str, np.ndarray]]:
    """Pictures, and every random number of each step."""
    rng = np.random.default_rng(0)

    def one() -> dict[str, np.ndarray]:
        return {
            "pixel_values": rng.integers(0, 256, (2, 24, 40, 3), np.uint8),
            "latent_noise": rng.standard_normal((2, 12, 20, 16), np.float32),
            "noise": rng.standard_normal((2, 12, 20, 16), np.float32),
            "timesteps": rng.uniform(0.2, 1, 2).astype(np.float32),
        }

    return [one() for _ in range(STEPS)]


def nchw(x: np.ndarray) -> torch.Tensor:
    return torch.tensor(np.moveaxis(np.asarray(x, np.float32), -1, 1).copy())


def torch_losses(pipe: Any, run: list[dict[str, np.ndarray]], scheme: str) -> list[Any]:
    """The losses of the script's loop with plain gradient descent, and the first gradients."""
    parameters = [p for p in pipe.transformer.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=RATE)
    losses, first = [], None
    for batch in run:
        with torch.no_grad():
            found = pipe.vae.encode(nchw(batch["pixel_values"] / 127.5 - 1)).latent_dist
            # It writes the chat around each prompt into the list that it is given.
            captions, _ = pipe.encode_prompt(list(PROMPTS), do_classifier_free_guidance=False)
        model_input = found.mean + found.std * nchw(batch["latent_noise"])
        model_input = (model_input - pipe.vae.config.shift_factor) * pipe.vae.config.scaling_factor
        sigmas = torch.tensor(batch["timesteps"]).reshape(-1, 1, 1, 1)
        noise, timesteps = nchw(batch["noise"]), 1000 * sigmas.flatten()
        noisy = (1.0 - sigmas) * model_input + sigmas * noise
        latents = list(noisy.unsqueeze(2).unbind(0))
        pred = pipe.transformer(latents, (1000 - timesteps) / 1000, captions).sample
        pred = -torch.stack(pred).squeeze(2)
        weighting = compute_loss_weighting_for_sd3(scheme, sigmas)
        target = noise - model_input
        loss = (weighting.float() * (pred.float() - target.float()) ** 2).reshape(2, -1)
        loss = loss.mean(1).mean()
        loss.backward()
        if first is None:
            first = gradients(pipe)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return [losses, first]


def gradients(pipe: Any) -> dict[str, Any]:
    if hasattr(pipe.transformer, "peft_config"):
        return {"transformer": trained_tree(pipe.transformer, gradients=True)}
    return {n: p.grad.numpy().copy() for n, p in pipe.transformer.named_parameters()}


def our_losses(
    recipe: Any, trained: Any, run: list[dict[str, np.ndarray]], scheme: str
) -> list[Any]:
    """The losses of our loss with plain gradient descent, and the first gradients."""
    config = dataclasses.replace(recipe.config, weighting_scheme=scheme)
    base = recipe.base
    loss = DenoisingLoss.of(config, base.family, base.networks, base.scheduler, lora=recipe.lora)
    tokens = [base.tokenize(prompt) for prompt in PROMPTS]
    text = {name: np.stack([own[name] for own in tokens]) for name in tokens[0]}
    none = jnp.zeros(2, bool)

    @jax.jit
    def value_and_grad(trained, frozen, batch):
        drawn = (batch[name] for name in ("latent_noise", "noise", "timesteps"))

        def mean(trained):
            given = {"pixel_values": batch["pixel_values"], **text}
            draws = Draws(*drawn, Dropped(none, none))
            return loss.with_draws(trained, frozen, given, draws).mean()

        return jax.value_and_grad(mean)(trained)

    frozen, losses, first = recipe.frozen(), [], None
    for batch in run:
        value, gradient = value_and_grad(trained, frozen, batch)
        first = gradient if first is None else first
        trained = jax.tree.map(lambda x, g: x - RATE * g, trained, gradient)
        losses.append(float(value))
    return [losses, first]


def options(folder: Any, data: Any, **changes: Any) -> TextToImageConfig:
    return TextToImageConfig(
        model=str(folder),
        data=CaptionedDataConfig(str(data), resolution=24),
        batch_size=2,
        compute_dtype="float32",
        **changes,
    )


@pytest.fixture
def data(tmp_path):
    return write_parquet(tmp_path / "data", [row(i) for i in range(6)])


@pytest.mark.parametrize("name", few(CASES, "lora-cosmap"))
def test_losses_of_the_first_steps_and_gradients_are_upstreams(tmp_path, data, name):
    case = CASES[name]
    pipe = pipeline(tmp_path / "model")
    lora = {}
    if case.adapters:
        add_trained(pipe.transformer, RANK, ATTENTION)
        lora = {"lora": LoRAConfig(rank=RANK, alpha=ALPHA * RANK)}
    else:
        pipe.transformer.requires_grad_(True)
    recipe = text_to_image(
        options(tmp_path / "model", data, gradient_checkpointing="blocks", **lora)
    )
    trained = recipe.trained()
    if case.adapters:
        own = {"transformer": trained_tree(pipe.transformer)}
        assert jax.tree.map(np.shape, own) == jax.tree.map(np.shape, trained)
        trained = own
    run = draw_batches()
    losses, first = our_losses(recipe, trained, run, case.scheme)
    expected, theirs = torch_losses(pipe, run, case.scheme)
    assert np.ptp(expected) > 1e-3
    np.testing.assert_allclose(losses, expected, rtol=LOSS)
    ours = first if case.adapters else params_to_tensors(first["transformer"])
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    largest = max(np.abs(g).max() for g in jax.tree.leaves(theirs))
    leaves, _ = jax.tree_util.tree_flatten_with_path(theirs)
    for (path, value), gradient in zip(leaves, jax.tree.leaves(ours), strict=True):
        scale = max(np.abs(value).max(), 1e-3 * largest)
        assert np.abs(np.asarray(gradient) - value).max() < GRADIENT * scale, path


def draw(pipe: Any) -> np.ndarray:
    pipe.set_progress_bar_config(disable=True)
    call = {"num_inference_steps": 2, "guidance_scale": 0.0, "output_type": "np", **SIZE}
    return pipe("a red apple", generator=torch.Generator().manual_seed(0), **call).images


def trained_run(folder: Any, data: Any, output: Any, steps: int = 3, **changes: Any) -> Any:
    config = options(
        folder,
        data,
        output=str(output),
        steps=steps,
        lora=LoRAConfig(rank=2, alpha=3.0),
        optimizer=OptimizerConfig(learning_rate=0.1),
        **changes,
    )
    train(text_to_image(config), config)
    return output / "model"


@pytest.mark.slow
def test_pytorch_draws_the_same_with_the_adapters_of_a_run(tmp_path, data):
    theirs = pipeline(tmp_path / "model")
    found = trained_run(tmp_path / "model", data, tmp_path / "out", weighting_scheme="mode")
    plain = draw(theirs)
    theirs.load_lora_weights(found)
    expected = draw(theirs)
    assert np.abs(expected - plain).max() > 0.01
    ours = diffusax.DiffusionPipeline.from_pretrained(tmp_path / "model")
    ours.load_lora_weights(found)
    assert np.abs(draw(ours) - expected).max() < 1e-4


@pytest.mark.slow
def test_adapters_of_peft_are_trained_further(tmp_path, data):
    pipe = pipeline(tmp_path / "model")
    config = peft.LoraConfig(r=3, lora_alpha=6, target_modules=ATTENTION, init_lora_weights=False)
    pipe.transformer.add_adapter(config)
    layers = convert_state_dict_to_diffusers(get_peft_model_state_dict(pipe.transformer))
    diffusers.ZImagePipeline.save_lora_weights(tmp_path / "lora", transformer_lora_layers=layers)
    lora = LoRAConfig(path=str(tmp_path / "lora"))
    recipe = text_to_image(options(tmp_path / "model", data, lora=lora))
    recipe.save(recipe.trained(), tmp_path / "out")
    again = text_to_image(
        options(tmp_path / "model", data, lora=LoRAConfig(path=str(tmp_path / "out")))
    )
    jax.tree.map(np.testing.assert_array_equal, again.trained(), recipe.trained())


@pytest.mark.slow
def test_a_run_goes_on_in_the_same_bits(tmp_path, data):
    pipeline(tmp_path / "model")
    whole = trained_run(tmp_path / "model", data, tmp_path / "whole", steps=4)
    part = tmp_path / "part"
    trained_run(tmp_path / "model", data, part, steps=2)
    (part / "model").rename(tmp_path / "old")
    parted = trained_run(tmp_path / "model", data, part, steps=4)
    name = "pytorch_lora_weights.safetensors"
    assert (whole / name).read_bytes() == (parted / name).read_bytes()
    assert (tmp_path / "old" / name).read_bytes() != (parted / name).read_bytes()


@pytest.mark.slow
def test_cached_latents_and_captions_have_the_same_loss(tmp_path, data):
    pipeline(tmp_path / "model")
    cached = CacheConfig(
        model=str(tmp_path / "model"),
        output=str(tmp_path / "cache"),
        text_embeddings=True,
        data=CacheDataConfig(str(data), resolution=24),
    )
    assert cache_latents(cached) == 6
    losses = []
    for source, changes in ((data, {}), (tmp_path / "cache", {"data": str(tmp_path / "cache")})):
        config = options(tmp_path / "model", source, caption_dropout=0.5)
        if changes:
            config = dataclasses.replace(config, data=CaptionedDataConfig(changes["data"]))
        recipe = text_to_image(config)
        rows = [
            recipe.example(recipe.source[i], np.random.default_rng((0, 0, i))) for i in range(4)
        ]
        batch = {name: np.stack([own[name] for own in rows]) for name in rows[0]}
        assert ("encoder_hidden_states" in batch) is bool(changes)
        keys = jax.vmap(jax.random.key)(jnp.arange(4))
        losses.append(recipe.loss(recipe.trained(), recipe.frozen(), batch, keys))
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4)
