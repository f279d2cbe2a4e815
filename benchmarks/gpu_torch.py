"""PyTorch diffusers with the networks and weights of a diffusax pipeline, for gpu.py."""

import argparse
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import jax
import torch
import transformers
from gpu_cases import (
    LR,
    PROMPT,
    TOKENS,
    Case,
    Prepare,
    call_arguments,
    first_latents,
    forget_params,
)

from diffusax.checkpoints.tree import checkpoint_name

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
torch.set_float32_matmul_precision("high")
diffusers.utils.logging.set_verbosity_error()
transformers.logging.set_verbosity_error()
warnings.filterwarnings("ignore", module=r"torch\._dynamo")


def take_networks(folder: Path, pipe: Any) -> dict[str, torch.nn.Module]:
    """diffusers' and transformers' networks with copies of those weights that are not only shapes.

    The pipeline keeps only shapes. Tensors are copied on the device, one network after the other.
    """
    networks = {}
    for name, params in list(pipe.params.items()):
        leaves, _ = jax.tree_util.tree_flatten_with_path(params)
        if isinstance(leaves[0][1], jax.Array):
            networks[name] = _network(folder / name, leaves)
    del leaves, params
    forget_params(pipe)
    return networks


def _network(folder: Path, leaves: list[Any]) -> torch.nn.Module:
    config = json.loads((folder / "config.json").read_text("utf-8"))
    dtype = getattr(torch, str(leaves[0][1].dtype))
    with torch.device(DEVICE):
        if "architectures" in config:
            (kind,) = config.pop("architectures")
            config = transformers.CLIPTextConfig(**config)
            network = getattr(transformers, kind)(config)
        else:
            network = getattr(diffusers, config.pop("_class_name")).from_config(config)
    network = network.to(DEVICE, dtype).eval()
    parameters = dict(network.named_parameters())
    for path, leaf in leaves:
        name = checkpoint_name(path)
        # Newer versions of transformers leave the prefix out.
        name = name if name in parameters else name.removeprefix("text_model.")
        with torch.no_grad():
            parameters.pop(name).copy_(_torch_order(torch.from_dlpack(leaf), path))
    if parameters:
        raise ValueError(f"{folder.name}: no weights for {', '.join(parameters)}")
    return network


def _torch_order(tensor: torch.Tensor, path: tuple[Any, ...]) -> torch.Tensor:
    """HWIO -> OIHW, (in, out) -> (out, in)."""
    if path[-1].key != "kernel":
        return tensor
    return tensor.permute(3, 2, 0, 1) if tensor.ndim == 4 else tensor.T


def compile_networks(
    networks: dict[str, Any], options: argparse.Namespace, *, trains: bool
) -> None:
    """torch.compile as diffusers' guide has it: channels_last, and decoding compiled, too."""
    mode = options.compile_mode or ("default" if trains else "max-autotune")
    # Tiny networks try the script; compiling these for a CPU would take minutes.
    how = {"backend": "eager"} if options.tiny else {"mode": mode}
    unet = networks["unet"].to(memory_format=torch.channels_last)
    networks["unet"] = torch.compile(unet, fullgraph=not trains, dynamic=False, **how)
    if "vae" in networks:
        vae = networks["vae"].to(memory_format=torch.channels_last)
        vae.decode = torch.compile(vae.decode, fullgraph=True, dynamic=False, **how)


def drawing(folder: Path, pipe: Any, networks: dict[str, Any], case: Case) -> Prepare:
    """A call of diffusers' pipeline."""
    index = json.loads((folder / "model_index.json").read_text("utf-8"))
    parts: dict[str, Any] = dict(networks)
    for name in index:
        if name.startswith("tokenizer"):
            parts[name] = transformers.CLIPTokenizer.from_pretrained(folder / name)
    scheduler = getattr(diffusers, index["scheduler"][1])
    parts["scheduler"] = scheduler.from_pretrained(folder / "scheduler")
    if index["_class_name"] == "StableDiffusionPipeline":
        parts |= {"safety_checker": None, "feature_extractor": None}
        parts["requires_safety_checker"] = False
    else:
        parts["add_watermarker"] = False
    reference = getattr(diffusers, index["_class_name"])(**parts)
    reference.set_progress_bar_config(disable=True)

    def prepare(batch: int) -> Callable[[], float]:
        _reset_peak()
        latents = torch.from_numpy(first_latents(pipe, batch)).to(DEVICE, torch.bfloat16)
        arguments = call_arguments(case) | {"output_type": "np"}

        def run() -> float:
            images = reference(
                PROMPT, num_images_per_prompt=batch, latents=latents.clone(), **arguments
            ).images
            return float(images.mean())

        return run

    return prepare


def training(
    pipe: Any, networks: dict[str, Any], case: Case, options: argparse.Namespace
) -> Prepare:
    """The inner loop of diffusers' train_text_to_image.py with mixed precision."""
    unet = networks["unet"]
    unet.train()
    if options.checkpointing:
        unet.enable_gradient_checkpointing()
    optimizer = torch.optim.AdamW(
        unet.parameters(), lr=LR, weight_decay=1e-2, fused=DEVICE == "cuda"
    )
    scheduler = diffusers.DDPMScheduler(beta_start=0.00085, beta_end=0.012)
    side, width = case.side(pipe), pipe.parts.denoiser.context_dim

    def prepare(batch: int) -> Callable[[], float]:
        _reset_peak()
        latents = torch.randn(batch, 4, side, side, device=DEVICE)
        hidden = torch.randn(batch, TOKENS, width, device=DEVICE, dtype=torch.bfloat16)

        def run() -> float:
            noise = torch.randn_like(latents)
            timesteps = torch.randint(0, 1000, (batch,), device=DEVICE)
            noisy = scheduler.add_noise(latents, noise, timesteps)
            with torch.autocast(DEVICE, torch.bfloat16):
                prediction = unet(noisy, timesteps, hidden, return_dict=False)[0]
            loss = torch.nn.functional.mse_loss(prediction.float(), noise)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(unet.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return loss.item()

        return run

    return prepare


def peak_memory() -> float | None:
    """The most device memory that PyTorch has used for this batch, in GB."""
    return round(torch.cuda.max_memory_allocated() / 1e9, 2) if DEVICE == "cuda" else None


def _reset_peak() -> None:
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
