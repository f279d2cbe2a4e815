"""A plain PyTorch loop that trains Wan with diffusers' networks, and ours, on given draws.

diffusers has no script for Wan. The loop is what musubi-tuner's wan_train_network.py and
DiffSynth-Studio's training of Wan do, with networks called as diffusers' pipelines call them.
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from PIL import Image

from diffusax.training import OptimizerConfig, TextToVideoConfig, VideoDataConfig
from diffusax.training.optimizers import make_optimizer
from diffusax.training.step.draws import Draws, Dropped
from diffusax.training.step.given_frames import GivenFrames
from diffusax.utils import export_to_gif
from support.lora_training import trained_tree
from support.tiny_transformers import (
    WAN22_VAE,
    wan_autoencoder,
    wan_image_components,
    wan_pipeline,
    wan_transformer,
)

PROMPTS = ["a red apple", "an old house on a hill by the sea, and two dogs that run before it"]
FRAMES = 5
WAN22 = "tokens-first-wan22"
"""The kind with Wan 2.2's autoencoder, of which a latent is of 16x16 pixels and four frames."""
LENGTH = 512
Arrays = dict[str, np.ndarray]


def write_clips(folder: Path, count: int = 3, *, frames: int = 8, size: tuple[int, int] = (40, 24)):
    """Writes GIFs of moving squares at 20 frames a second, with captions beside them."""
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(count):
        rng = np.random.default_rng(i)
        colours = [tuple(map(int, rng.integers(0, 256, 3))) for _ in range(2)]
        shown = []
        for frame in range(frames):
            image = Image.new("RGB", size, colours[0])
            image.paste(colours[1], (2 * frame, i, 2 * frame + 8, i + 8))
            shown.append(image)
        export_to_gif(shown, folder / f"{i}.gif", fps=20)
        (folder / f"{i}.txt").write_text(f"clip {i}")
    return folder


def sizes(kind: str) -> tuple[tuple[int, int], tuple[int, int, int, int]]:
    """The height and width of clips, and f h w c of their latents with the tiny autoencoder."""
    return ((32, 64), (2, 2, 4, 6)) if kind == WAN22 else ((16, 32), (3, 8, 16, 4))


def options(model: Any, path: Any, kind: str = "", **changes: Any) -> TextToVideoConfig:
    height, width = sizes(kind)[0]
    own = {"num_frames": (FRAMES,), "fps": 20.0, "buckets": (f"{width}x{height}",)}
    clips = VideoDataConfig(str(path), **{**own, **changes.pop("data", {})})
    given = {"batch_size": 2, "compute_dtype": "float32", **changes}
    return TextToVideoConfig(model=str(model), data=clips, **given)


def pipeline(folder: Any, kind: str) -> Any:
    """A tiny pipeline of PyTorch, saved in the folder."""
    if kind == "image-to-video":
        return wan_pipeline(folder, "WanImageToVideoPipeline", **wan_image_components())
    if kind == "first-and-last":
        return wan_pipeline(folder, "WanImageToVideoPipeline", **wan_image_components(places=10))
    if kind == "channels":
        return wan_pipeline(
            folder, "WanImageToVideoPipeline", transformer=wan_transformer(4, in_channels=10)
        )
    if kind in ("high_noise", "low_noise"):
        return wan_pipeline(folder, transformer_2=wan_transformer(7), boundary_ratio=0.7)
    more: dict[str, Any] = {"expand_timesteps": True} if kind.startswith("tokens") else {}
    if kind == WAN22:
        more["vae"] = wan_autoencoder(**WAN22_VAE)
        more["transformer"] = wan_transformer(in_channels=6, out_channels=6)
    return wan_pipeline(folder, **more)


def draw_batches(kind: str, *, steps: int) -> list[Arrays]:
    """Clips, and every random number of each step."""
    rng, (size, latents) = np.random.default_rng(0), sizes(kind)
    return [
        {
            "pixel_values": rng.integers(0, 256, (2, FRAMES, *size, 3), np.uint8),
            "noise": rng.standard_normal((2, *latents), np.float32),
            "timesteps": rng.uniform(0.2, 1.0, 2).astype(np.float32),
            "first_frame": np.array([True, False]),
        }
        for _ in range(steps)
    ]


def ncfhw(x: np.ndarray) -> torch.Tensor:
    return torch.tensor(np.moveaxis(np.asarray(x, np.float32), -1, 1).copy())


def _normalised(pipe: Any, pixels: torch.Tensor) -> torch.Tensor:
    config = pipe.vae.config
    mean = torch.tensor(config.latents_mean).view(1, -1, 1, 1, 1)
    std = 1.0 / torch.tensor(config.latents_std).view(1, -1, 1, 1, 1)
    return (pipe.vae.encode(pixels).latent_dist.mode() - mean) * std


def _condition(pipe: Any, batch: Arrays, last: bool) -> tuple[torch.Tensor, Any]:
    """The mask and latents of the given frames (prepare_latents), and CLIP's view of them."""
    pixels = ncfhw(batch["pixel_values"] / 127.5 - 1)
    shown = torch.zeros_like(pixels)
    shown[:, :, 0] = pixels[:, :, 0]
    if last:
        shown[:, :, -1] = pixels[:, :, -1]
    latents = _normalised(pipe, shown)
    step = pipe.vae_scale_factor_temporal
    mask = torch.ones(2, 1, FRAMES, *latents.shape[3:])
    mask[:, :, list(range(1, FRAMES - 1)) if last else list(range(1, FRAMES))] = 0
    first = torch.repeat_interleave(mask[:, :, 0:1], dim=2, repeats=step)
    mask = torch.concat([first, mask[:, :, 1:]], dim=2)
    mask = mask.view(2, -1, step, *latents.shape[3:]).transpose(1, 2)
    seen = None
    if pipe.transformer.config.image_dim is not None:
        rows = [[clip[0], clip[-1]] if last else [clip[0]] for clip in batch["pixel_values"]]
        images = [Image.fromarray(frame) for row in rows for frame in row]
        seen = pipe.encode_image(images, "cpu")
    return torch.concat([mask, latents], dim=1), seen


def torch_losses(
    pipe: Any, run: list[Arrays], kind: str, *, adamw: float, adapters: bool
) -> tuple[list[float], Any]:
    """The losses of the steps, and the first gradients: of adapters, or by parameters' names."""
    low = kind == "low_noise"
    network = pipe.transformer_2 if low else pipe.transformer
    parameters = {n: p for n, p in network.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(parameters.values(), lr=adamw, weight_decay=1e-2, eps=1e-8)
    with torch.no_grad():
        texts, _ = pipe.encode_prompt(
            PROMPTS, do_classifier_free_guidance=False, max_sequence_length=LENGTH
        )
    losses, first = [], None
    for batch in run:
        with torch.no_grad():
            clean = _normalised(pipe, ncfhw(batch["pixel_values"] / 127.5 - 1))
            given, seen = None, None
            if network.config.in_channels > clean.shape[1]:
                given, seen = _condition(pipe, batch, kind == "first-and-last")
        sigmas = torch.tensor(batch["timesteps"]).reshape(-1, 1, 1, 1, 1)
        noise, timesteps = ncfhw(batch["noise"]), 1000 * sigmas.flatten()
        noisy, counted = (1 - sigmas) * clean + sigmas * noise, torch.ones_like(clean)
        if kind.startswith("tokens-first"):
            mask = torch.ones_like(clean)
            mask[torch.tensor(batch["first_frame"]), :, 0] = 0
            noisy = (1 - mask) * clean + mask * noisy
            timesteps = (mask[:, 0, :, ::2, ::2] * timesteps.view(-1, 1, 1, 1)).flatten(1)
            counted = mask / mask.mean((1, 2, 3, 4), keepdim=True)
        prediction = network(
            hidden_states=noisy if given is None else torch.cat([noisy, given], dim=1),
            timestep=timesteps,
            encoder_hidden_states=texts,
            encoder_hidden_states_image=seen,
        ).sample
        loss = (counted * (prediction - (noise - clean)) ** 2).mean()
        loss.backward()
        if first is None:
            first = _gradients(network, adapters)
        torch.nn.utils.clip_grad_norm_(parameters.values(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, first


def _gradients(network: Any, adapters: bool) -> Any:
    if adapters:
        return jax.tree.map(np.copy, trained_tree(network, gradients=True))
    return {
        name: np.zeros(p.shape, np.float32) if p.grad is None else p.grad.numpy().copy()
        for name, p in network.named_parameters()
    }


def our_losses(
    recipe: Any, trained: Any, run: list[Arrays], *, adamw: float
) -> tuple[list[float], Any]:
    """The losses of the recipe's loss, and the first gradients; see `torch_losses`."""
    none, loss = jnp.zeros(2, bool), dataclasses.replace(recipe.denoising, caption_dropout=0.0)
    made = make_optimizer(OptimizerConfig(learning_rate=adamw), len(run))
    optimizer = optax.with_extra_args_support(made)
    tokens = [recipe.base.tokenize(prompt) for prompt in PROMPTS]
    texts = {name: np.stack([one[name] for one in tokens]) for name in tokens[0]}
    given: GivenFrames | None = recipe.given

    @jax.jit
    def step(trained: Any, state: Any, frozen: Any, batch: Any, drawn: Any) -> Any:
        def mean(trained: Any) -> Any:
            shown = drawn["first_frame"] if given is not None and not given.in_channels else None
            own = Draws(None, drawn["noise"], drawn["timesteps"], Dropped(none, none), None, shown)
            return loss.with_draws(trained, frozen, batch, own).mean()

        value, gradient = jax.value_and_grad(mean)(trained)
        norm = optax.tree.norm(gradient)
        updates, state = optimizer.update(gradient, state, trained, grad_norm=norm)
        return value, gradient, optax.apply_updates(trained, updates), state

    frozen, losses, first = recipe.frozen(), [], None
    state = optimizer.init(trained)
    for drawn in run:
        clips = drawn["pixel_values"]
        seen = [recipe.base.seen_frames(list(clip)) for clip in clips]
        batch = {"pixel_values": clips, **texts}
        batch |= {name: np.stack([one[name] for one in seen]) for name in seen[0]}
        value, gradient, trained, state = step(trained, state, frozen, batch, drawn)
        first = gradient if first is None else first
        losses.append(float(value))
    return losses, first
