"""The loops of diffusers' scripts that train families of flow matching, and ours, on given draws.

Upstream: examples/dreambooth/train_dreambooth_lora_flux.py, _z_image.py, _flux2_klein.py,
_qwen_image.py and _krea2.py. There is none for FLUX.3 and Qwen-Image 2.1, whose networks are called
as in pipelines.
"""

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from diffusers.modular_pipelines.flux3.before_denoise import _prepare_image_ids
from diffusers.modular_pipelines.flux3.encoders import Flux3TextEncoderStep
from diffusers.training_utils import compute_loss_weighting_for_sd3
from PIL import Image

from diffusax.training import (
    CaptionedDataConfig,
    EditDataConfig,
    InstructPix2PixConfig,
    OptimizerConfig,
    TextToImageConfig,
)
from diffusax.training.data.examples import numbered_names
from diffusax.training.optimizers import make_optimizer
from diffusax.training.step.denoising import DenoisingLoss
from diffusax.training.step.draws import Draws, Dropped
from diffusax.training.step.encoding import original_names
from support import looking
from support.lora import ATTENTION
from support.lora_training import trained_tree
from support.pairs import picture
from support.qwen_edits import EDIT, with_positions
from support.tiny_flux3 import FLUX3_SIZE, flux3_pipeline
from support.tiny_transformers import (
    FLUX_SIZE,
    KLEIN_SIZE,
    KREA2_SIZE,
    Z_IMAGE_SIZE,
    flux_pipeline,
    klein_pipeline,
    krea2_pipeline,
    qwen_image21_pipeline,
    qwen_image_pipeline,
    z_image_pipeline,
)

PROMPTS = ["a red apple", "an old house on a hill by the sea, and two dogs that run before it"]
STEPS, RATE, SCALE = 3, 0.05, 2.5
Arrays = dict[str, np.ndarray]


def nchw(x: np.ndarray) -> torch.Tensor:
    return torch.tensor(np.moveaxis(np.asarray(x, np.float32), -1, 1).copy())


def _shifted_and_scaled(pipe: Any, batch: Arrays) -> torch.Tensor:
    found = pipe.vae.encode(nchw(batch["pixel_values"] / 127.5 - 1)).latent_dist
    drawn = batch.get("latent_noise")
    sample = found.mode() if drawn is None else found.mean + found.std * nchw(drawn)
    return (sample - pipe.vae.config.shift_factor) * pipe.vae.config.scaling_factor


def _normalized(pipe: Any, batch: Arrays) -> torch.Tensor:
    return _klein_latents(pipe, batch["pixel_values"])


def _klein_latents(pipe: Any, pixels: np.ndarray) -> torch.Tensor:
    mode = pipe.vae.encode(nchw(pixels / 127.5 - 1)).latent_dist.mode()
    mean = pipe.vae.bn.running_mean.view(1, -1, 1, 1)
    std = torch.sqrt(pipe.vae.bn.running_var.view(1, -1, 1, 1) + pipe.vae.config.batch_norm_eps)
    return (diffusers.Flux2KleinPipeline._patchify_latents(mode) - mean) / std


def _of_frames(pipe: Any, batch: Arrays) -> torch.Tensor:
    pixels = nchw(batch["pixel_values"] / 127.5 - 1)
    if diffusers.AutoencoderKLQwenImage21 is type(pipe.vae):
        pixels = torch.nn.functional.pad(pixels, (0, 0, 0, 0, 0, 1), value=1.0)
    found = pipe.vae.encode(pixels.unsqueeze(2)).latent_dist
    drawn = batch.get("latent_noise")
    sample = found.mode() if drawn is None else found.mean + found.std * nchw(drawn).unsqueeze(2)
    config = pipe.vae.config
    mean, std = (
        torch.tensor(x).view(1, -1, 1, 1) for x in (config.latents_mean, config.latents_std)
    )
    return (sample.squeeze(2) - mean) / std


def _z_image(pipe: Any, noisy: torch.Tensor, timesteps: torch.Tensor, batch: Arrays) -> Any:
    # It writes the chat around each prompt into the list that it is given.
    captions, _ = pipe.encode_prompt(list(PROMPTS), do_classifier_free_guidance=False)
    latents = list(noisy.unsqueeze(2).unbind(0))
    pred = pipe.transformer(latents, (1000 - timesteps) / 1000, captions).sample
    return -torch.stack(pred).squeeze(2)


def _flux(pipe: Any, noisy: torch.Tensor, timesteps: torch.Tensor, batch: Arrays) -> Any:
    texts, pooled, text_ids = pipe.encode_prompt(list(PROMPTS), None)
    kind, (b, c, h, w) = diffusers.FluxPipeline, noisy.shape
    reads = pipe.transformer.config.guidance_embeds
    tokens = kind._pack_latents(noisy, b, c, h, w)
    ids = kind._prepare_latent_image_ids(b, h // 2, w // 2, "cpu", torch.float32)
    count = tokens.shape[1]
    if "original_pixel_values" in batch:
        found = pipe.vae.encode(nchw(batch["original_pixel_values"] / 127.5 - 1)).latent_dist
        config = pipe.vae.config
        seen = (found.mode() - config.shift_factor) * config.scaling_factor
        high, wide = seen.shape[2:]
        seen_ids = kind._prepare_latent_image_ids(b, high // 2, wide // 2, "cpu", torch.float32)
        seen_ids[..., 0] = 1
        tokens = torch.cat([tokens, kind._pack_latents(seen, b, c, high, wide)], dim=1)
        ids = torch.cat([ids, seen_ids])
    pred = pipe.transformer(
        hidden_states=tokens,
        timestep=timesteps / 1000,
        guidance=torch.tensor([SCALE]).expand(b) if reads else None,
        pooled_projections=pooled,
        encoder_hidden_states=texts,
        txt_ids=text_ids,
        img_ids=ids,
    ).sample[:, :count]
    factor = pipe.vae_scale_factor
    return kind._unpack_latents(pred, h * factor, w * factor, factor)


def _klein(pipe: Any, noisy: torch.Tensor, timesteps: torch.Tensor, batch: Arrays) -> Any:
    given = torch.tensor(batch["texts"]) if "texts" in batch else None
    texts, text_ids = pipe.encode_prompt(list(PROMPTS), prompt_embeds=given)
    kind, own = diffusers.Flux2KleinPipeline, diffusers.Flux2KleinPipeline._prepare_latent_ids
    tokens, ids = kind._pack_latents(noisy), own(noisy)
    count = tokens.shape[1]
    seen = [_klein_latents(pipe, batch[k]) for k in sorted(batch) if k.startswith("original")]
    if seen:
        seen_ids = kind._prepare_image_ids([x[:1] for x in seen]).expand(len(tokens), -1, -1)
        tokens = torch.cat([tokens, *map(kind._pack_latents, seen)], dim=1)
        ids = torch.cat([ids, seen_ids], dim=1)
    pred = pipe.transformer(
        hidden_states=tokens,
        timestep=timesteps / 1000,
        guidance=None,
        encoder_hidden_states=texts,
        txt_ids=text_ids,
        img_ids=ids,
    ).sample[:, :count]
    return kind._unpack_latents_with_ids(pred, own(noisy))


def _flux3(pipe: Any, noisy: torch.Tensor, timesteps: torch.Tensor, batch: Arrays) -> Any:
    # The number of tokens that a text is filled up to is its own, so that each image is alone.
    kind, given = diffusers.Flux2KleinPipeline, batch.get("texts")
    seen = None
    if "original_pixel_values" in batch:
        seen = _klein_latents(pipe, batch["original_pixel_values"])

    def one(i: int) -> torch.Tensor:
        own, call = noisy[i : i + 1], {}
        if given is None:
            embed = Flux3TextEncoderStep._get_qwen3_vl_prompt_embeds
            text = embed(pipe.text_encoder, pipe.tokenizer, PROMPTS[i])
        else:
            text = torch.tensor(given[i : i + 1])
        text_ids = torch.zeros(text.shape[1], 4)
        text_ids[:, 3] = torch.arange(text.shape[1])
        if seen is not None:
            call["image_cond_hidden_states"] = kind._pack_latents(seen[i : i + 1])
            call["image_cond_ids"] = _prepare_image_ids(*seen.shape[2:], 0.5, -1)
        pred = pipe.transformer(
            hidden_states=kind._pack_latents(own),
            timestep=timesteps[i : i + 1] / 1000,
            encoder_hidden_states=text,
            img_ids=_prepare_image_ids(*own.shape[2:], 0.5),
            txt_ids=text_ids,
            **call,
        ).sample
        return pred.transpose(1, 2).reshape(own.shape)

    return torch.cat([one(i) for i in range(len(noisy))])


def _looking(kind: str, layout: str) -> Any:
    """Krea 2 or Z-Image with images to look at, see `support.looking`."""

    def predict(pipe: Any, noisy: torch.Tensor, timesteps: torch.Tensor, batch: Arrays) -> Any:
        encode = _of_frames if kind == "krea2" else _shifted_and_scaled
        names = [name for name in sorted(batch) if name.startswith("original")]
        with torch.no_grad():
            seen = [encode(pipe, {"pixel_values": batch[name]}) for name in names]
        if kind == "krea2":
            with torch.no_grad():
                text, mask = pipe.encode_prompt(list(PROMPTS), max_sequence_length=240)
            given = pipe.transformer, noisy, timesteps / 1000, text, mask
            return looking.krea2(*given, seen, layout)
        captions, _ = pipe.encode_prompt(list(PROMPTS), do_classifier_free_guidance=False)
        rows = zip(noisy, (1000 - timesteps) / 1000, captions, strict=True)
        images = [[x[i] for x in seen] for i in range(len(noisy))]
        pairs = zip(rows, images, strict=True)
        return -torch.stack([looking.z_image(pipe.transformer, *r, x, layout) for r, x in pairs])

    return predict


def _krea2(pipe: Any, noisy: torch.Tensor, timesteps: torch.Tensor, batch: Arrays) -> Any:
    with torch.no_grad():
        text, mask = pipe.encode_prompt(list(PROMPTS), max_sequence_length=240)
    (b, c, h, w), kind = noisy.shape, diffusers.Krea2Pipeline
    tokens = noisy.view(b, c, h // 2, 2, w // 2, 2).permute(0, 2, 4, 1, 3, 5)
    pred = pipe.transformer(
        hidden_states=tokens.reshape(b, h // 2 * (w // 2), 4 * c),
        encoder_hidden_states=text,
        timestep=timesteps / 1000,
        position_ids=kind.prepare_position_ids(text.shape[1], h // 2, w // 2, noisy.device),
        encoder_attention_mask=mask,
    ).sample
    maps = pred.view(b, h // 2, w // 2, c, 2, 2).permute(0, 3, 1, 4, 2, 5)
    return maps.reshape(noisy.shape)


def _qwen_image(pipe: Any, noisy: torch.Tensor, timesteps: torch.Tensor, batch: Arrays) -> Any:
    with torch.no_grad():
        text, mask = pipe.encode_prompt(list(PROMPTS))
    (b, c, h, w), kind = noisy.shape, diffusers.QwenImagePipeline
    pred = pipe.transformer(
        hidden_states=kind._pack_latents(noisy, b, c, h, w),
        timestep=timesteps / 1000,
        encoder_hidden_states=text,
        encoder_hidden_states_mask=mask,
        img_shapes=[[(1, h // 2, w // 2)]] * b,
    ).sample
    factor = pipe.vae_scale_factor
    return kind._unpack_latents(pred, h * factor, w * factor, factor).squeeze(2)


def _qwen_image_edit(pipe: Any, noisy: torch.Tensor, timesteps: torch.Tensor, batch: Arrays) -> Any:
    (_, c, h, w), kind, factor = noisy.shape, diffusers.QwenImagePipeline, pipe.vae_scale_factor
    with torch.no_grad():
        seen = _of_frames(pipe, {"pixel_values": batch["original_pixel_values"]})
    dimensions = sys.modules[type(pipe).__module__].calculate_dimensions

    def one(i: int) -> torch.Tensor:
        image = Image.fromarray(batch["original_pixel_values"][i])
        width, height = dimensions(1024 * 1024, image.width / image.height)[:2]
        image = pipe.image_processor.resize(image, height, width)
        with torch.no_grad():
            text, mask = pipe.encode_prompt(prompt=PROMPTS[i], image=image)
        pair = [x[i : i + 1] for x in (noisy, seen)]
        tokens = [kind._pack_latents(x, 1, c, *x.shape[2:]) for x in pair]
        pred = pipe.transformer(
            hidden_states=torch.cat(tokens, dim=1),
            timestep=timesteps[i : i + 1] / 1000,
            encoder_hidden_states=text,
            encoder_hidden_states_mask=mask,
            img_shapes=[[(1, x.shape[2] // 2, x.shape[3] // 2) for x in pair]],
        ).sample[:, : tokens[0].shape[1]]
        return kind._unpack_latents(pred, h * factor, w * factor, factor).squeeze(2)

    return torch.cat([one(i) for i in range(len(noisy))])


def _qwen_image21(pipe: Any, noisy: torch.Tensor, timesteps: torch.Tensor, batch: Arrays) -> Any:
    # The layout of a batch is that of its first text, so that each image is alone.
    (_, c, h, w), pixels, seen = noisy.shape, batch.get("original_pixel_values"), None
    if pixels is not None:
        with torch.no_grad():
            seen = _of_frames(pipe, {"pixel_values": pixels})

    def one(i: int) -> torch.Tensor:
        maps, call = noisy[i : i + 1], {}
        if pixels is not None:
            image = Image.fromarray(pixels[i]).convert("RGBA")
            place = sys.modules[type(pipe).__module__]
            area = image.width * image.height
            width, height, _ = place.calculate_dimensions(area, image.width / image.height)
            call["image"] = [pipe.image_processor.resize(image, width=width, height=height)]
            maps = torch.cat([seen[i : i + 1], maps])
        with torch.no_grad():
            text, mask, images = pipe.encode_prompt(prompt=PROMPTS[i], **call)
        pred = pipe.transformer(
            hidden_states=maps.flatten(2).transpose(1, 2).reshape(1, -1, c),
            timestep=timesteps[i : i + 1] / 1000,
            encoder_hidden_states=text,
            encoder_hidden_states_mask=mask,
            img_shapes=[[(1, h, w)] * len(maps)],
            img_mask=torch.cat([images, images.new_ones(1, h * w // 4)], dim=1),
        ).sample[:, -h * w :]
        return pred.transpose(1, 2).reshape(1, c, h, w)

    return torch.cat([one(i) for i in range(len(noisy))])


@dataclasses.dataclass(frozen=True)
class Flow:
    """What differs between the scripts."""

    pipeline: Callable[..., Any]
    """Makes a tiny pipeline of PyTorch, saved in a folder."""
    latents: Callable[[Any, Arrays], torch.Tensor]
    predict: Callable[[Any, torch.Tensor, torch.Tensor, Arrays], torch.Tensor]
    call: dict[str, Any]
    """Arguments of a call for an image."""
    shape: tuple[int, int, int]
    """h w c of the latents."""
    size: tuple[int, int] = (24, 40)
    """The height and width of images in pixels."""
    sampled: bool = True
    """Whether the autoencoder's distribution is sampled."""
    targets: tuple[str, ...] = tuple(ATTENTION)


def _klein_pipeline(folder: Any, **options: Any) -> Any:
    # The script reads the layers that are the default.
    return klein_pipeline(folder, **{"layers": 28, **options})


def _flux3_pipeline(folder: Any, **options: Any) -> Any:
    return flux3_pipeline(folder, **{"layers": 32, **options})


def _qwen_image_edit_pipeline(folder: Any, **options: Any) -> Any:
    return with_positions(qwen_image_pipeline(folder, EDIT, **options))


def _kontext_pipeline(folder: Any, **options: Any) -> Any:
    return flux_pipeline(folder, "FluxKontextPipeline", **options)


FLOWS = {
    "flux": Flow(flux_pipeline, _shifted_and_scaled, _flux, FLUX_SIZE, (12, 20, 16)),
    "kontext": Flow(
        _kontext_pipeline,
        _shifted_and_scaled,
        _flux,
        {**FLUX_SIZE, "max_area": 24 * 40, "_auto_resize": False},
        (12, 20, 16),
        sampled=False,
    ),
    "z-image": Flow(
        z_image_pipeline,
        _shifted_and_scaled,
        _z_image,
        {"guidance_scale": 0.0, **Z_IMAGE_SIZE},
        (12, 20, 16),
    ),
    "klein": Flow(
        _klein_pipeline,
        _normalized,
        _klein,
        {"guidance_scale": 1.0, **KLEIN_SIZE},
        (6, 10, 16),
        sampled=False,
        targets=(
            *ATTENTION,
            "to_qkv_mlp_proj",
            *(f"single_transformer_blocks.{i}.attn.to_out" for i in range(2)),
        ),
    ),
    "flux3": Flow(
        _flux3_pipeline,
        _normalized,
        _flux3,
        {"guidance_scale": 1.0, **FLUX3_SIZE},
        (6, 10, 16),
        sampled=False,
        targets=(*ATTENTION, "linear_in", "linear_out", "early_stream_modulations.txt.linear"),
    ),
    "krea2": Flow(
        krea2_pipeline,
        _of_frames,
        _krea2,
        {"guidance_scale": 0.0, **KREA2_SIZE},
        (12, 20, 4),
        targets=(*ATTENTION, "to_gate", "ff.up", "text_fusion.projector"),
    ),
    "qwen-image": Flow(
        qwen_image_pipeline,
        _of_frames,
        _qwen_image,
        KREA2_SIZE,
        (12, 20, 4),
        targets=(*ATTENTION, "add_k_proj", "to_add_out", "img_mod.1"),
    ),
    "qwen-image-edit": Flow(
        _qwen_image_edit_pipeline,
        _of_frames,
        _qwen_image_edit,
        {"height": 24, "width": 40, "image": picture(1)},
        (12, 12, 4),
        size=(24, 24),
        sampled=False,
        targets=(*ATTENTION, "add_k_proj", "to_add_out", "img_mod.1"),
    ),
    "qwen-image21": Flow(
        qwen_image21_pipeline,
        _of_frames,
        _qwen_image21,
        {"height": 64, "width": 96},
        (4, 6, 6),
        size=(64, 96),
        sampled=False,
        targets=(*ATTENTION, "img_mlp.proj", "img_mlp.gate_layer", "modulation.1"),
    ),
    "qwen-image21-edit": Flow(
        qwen_image21_pipeline,
        _of_frames,
        _qwen_image21,
        {"height": 64, "width": 64, "output_resolution": 64, "image": picture(1)},
        (4, 4, 6),
        size=(64, 64),
        sampled=False,
        targets=(*ATTENTION, "img_mlp.proj", "img_mlp.gate_layer", "modulation.1"),
    ),
}


LOOKING = {
    f"{kind}-edit-{layout}": Flow(
        krea2_pipeline if kind == "krea2" else z_image_pipeline,
        _of_frames if kind == "krea2" else _shifted_and_scaled,
        _looking(kind, layout),
        {"guidance_scale": 0.0, **(KREA2_SIZE if kind == "krea2" else Z_IMAGE_SIZE)},
        (12, 20, 4 if kind == "krea2" else 16),
        sampled=False,
        targets=(*ATTENTION, "to_gate", "ff.up") if kind == "krea2" else tuple(ATTENTION),
    )
    for kind in ("krea2", "z-image")
    for layout in looking.LAYOUTS
}
"""Families of text to image that learn to look at images."""


def draw_batches(
    flow: Flow,
    *,
    edits: int | Sequence[tuple[int, int]] = 0,
    texts: tuple[int, int] | None = None,
    steps: int = STEPS,
) -> list[Arrays]:
    """Images, and every random number of each step.

    edits: the images before an edit, or their heights and widths. texts: with embeddings of this
    shape in the place of prompts.
    """
    sizes = [flow.size] * edits if isinstance(edits, int) else edits
    rng = np.random.default_rng(0)

    def one() -> Arrays:
        batch = {"pixel_values": rng.integers(0, 256, (2, *flow.size, 3), np.uint8)}
        if flow.sampled:
            batch["latent_noise"] = rng.standard_normal((2, *flow.shape), np.float32)
        for name, size in zip(numbered_names("original_pixel_values", len(sizes)), sizes):
            batch[name] = rng.integers(0, 256, (2, *size, 3), np.uint8)
        if texts is not None:
            batch["texts"] = rng.standard_normal((2, *texts), np.float32)
        batch["noise"] = rng.standard_normal((2, *flow.shape), np.float32)
        return {**batch, "timesteps": rng.uniform(0.2, 1, 2).astype(np.float32)}

    return [one() for _ in range(steps)]


def torch_losses(
    flow: Flow, pipe: Any, run: list[Arrays], scheme: str, *, adamw: float | None = None
) -> tuple[list[float], Any]:
    """The losses of the script's loop, and the first gradients.

    adamw: the learning rate of the script's optimizer; by default it is plain gradient descent.
    """
    parameters = [p for p in pipe.transformer.parameters() if p.requires_grad]
    optimizer: torch.optim.Optimizer = torch.optim.SGD(parameters, lr=RATE)
    if adamw is not None:
        optimizer = torch.optim.AdamW(parameters, lr=adamw, weight_decay=1e-2, eps=1e-8)
    losses, first = [], None
    for batch in run:
        with torch.no_grad():
            model_input = flow.latents(pipe, batch)
        sigmas = torch.tensor(batch["timesteps"]).reshape(-1, 1, 1, 1)
        noise, timesteps = nchw(batch["noise"]), 1000 * sigmas.flatten()
        noisy = (1.0 - sigmas) * model_input + sigmas * noise
        pred = flow.predict(pipe, noisy, timesteps, batch)
        weighting = compute_loss_weighting_for_sd3(scheme, sigmas)
        target = noise - model_input
        loss = (weighting.float() * (pred.float() - target.float()) ** 2).reshape(2, -1)
        loss = loss.mean(1).mean()
        loss.backward()
        if first is None:
            first = _gradients(pipe)
        if adamw is not None:
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, first


def _gradients(pipe: Any) -> dict[str, Any]:
    if hasattr(pipe.transformer, "peft_config"):
        return {"transformer": trained_tree(pipe.transformer, gradients=True)}
    # Nothing is read of what is for images to look at where there are none.
    return {
        n: np.zeros(p.shape, np.float32) if p.grad is None else p.grad.numpy().copy()
        for n, p in pipe.transformer.named_parameters()
    }


def our_losses(
    loss: DenoisingLoss, recipe: Any, trained: Any, run: list[Arrays], *, adamw: float | None = None
) -> tuple[list[float], Any]:
    """The losses of our loss, and the first gradients; see `torch_losses`."""
    none = jnp.zeros(2, bool)
    optimizer = optax.with_extra_args_support(optax.sgd(RATE))
    if adamw is not None:
        own = make_optimizer(OptimizerConfig(learning_rate=adamw), len(run))
        optimizer = optax.with_extra_args_support(own)

    @jax.jit
    def step(trained: Any, state: Any, gradient: Any) -> Any:
        norm = optax.tree.norm(gradient)
        updates, state = optimizer.update(gradient, state, trained, grad_norm=norm)
        return optax.apply_updates(trained, updates), state

    def text(batch: Arrays) -> Arrays:
        base, names = recipe.base, original_names(batch)
        seen = base.seen_images([batch[name].shape[1:3] for name in names])
        if seen is None or "texts" in batch:
            tokens = [base.tokenize(prompt) for prompt in PROMPTS]
        else:
            tokens = [
                seen.tokenize(prompt, [batch[name][i] for name in names])
                for i, prompt in enumerate(PROMPTS)
            ]
        return {name: np.stack([one[name] for one in tokens]) for name in tokens[0]}

    @jax.jit
    def value_and_grad(trained: Any, frozen: Any, batch: Any, text: Any) -> Any:
        drawn = (batch.get(name) for name in ("latent_noise", "noise", "timesteps"))
        given = {k: x for k, x in batch.items() if "pixel_values" in k} | text
        if "texts" in batch:
            given["encoder_hidden_states"] = batch["texts"]
            frozen = {**frozen, "empty": {"encoder_hidden_states": batch["texts"][0]}}

        def mean(trained: Any) -> Any:
            draws = Draws(*drawn, Dropped(none, none))
            return loss.with_draws(trained, frozen, given, draws).mean()

        return jax.value_and_grad(mean)(trained)

    frozen, losses, first = recipe.frozen(), [], None
    state = optimizer.init(trained)
    for batch in run:
        value, gradient = value_and_grad(trained, frozen, batch, text(batch))
        first = gradient if first is None else first
        trained, state = step(trained, state, gradient)
        losses.append(float(value))
    return losses, first


def options(folder: Any, data: Any, resolution: int = 24, **changes: Any) -> TextToImageConfig:
    return TextToImageConfig(
        model=str(folder),
        data=CaptionedDataConfig(str(data), resolution=resolution),
        batch_size=2,
        compute_dtype="float32",
        **changes,
    )


def edit_options(
    folder: Any, data: Any, resolution: int = 24, **changes: Any
) -> InstructPix2PixConfig:
    return InstructPix2PixConfig(
        model=str(folder),
        data=EditDataConfig(str(data), resolution=resolution),
        batch_size=2,
        compute_dtype="float32",
        **changes,
    )
