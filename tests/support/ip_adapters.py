"""Tiny IP-Adapters with all weights random, in files as they are on the Hub."""

from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from support.tiny import randomize

# The widths of the image encoder's hidden states and embeddings, and its side in pixels.
HIDDEN, EMBED, SIDE = 24, 16, 30
VISION = {
    "hidden_size": HIDDEN,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "projection_dim": EMBED,
    "image_size": SIDE,
    "patch_size": 8,
}
KINDS = ("plain", "plus", "full")


def build_image_encoder(folder: Path, **changes: Any) -> Any:
    """A tiny image encoder, saved in `folder`."""
    config = transformers.CLIPVisionConfig(**{**VISION, **changes})
    encoder = randomize(transformers.CLIPVisionModelWithProjection(config), 5)
    encoder.save_pretrained(folder)
    return encoder


def processor() -> Any:
    """The image processor of transformers that Pillow resizes for, as ours."""
    return CLIPImageProcessorPil(size=SIDE, crop_size=SIDE)


def random_tensors(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, shape in shapes.items():
        values = torch.randn(shape, generator=generator)
        norm = "norm" in name or name.endswith((".proj.3.weight", ".1.0.weight"))
        if name.endswith("bias"):
            values *= 0.2
        elif norm:
            values = 1 + 0.2 * values
        elif len(shape) == 2:
            values *= shape[1] ** -0.5
        found[name] = values
    return found


def tensors_of(unet: Any, kind: str, seed: int = 0) -> dict[str, torch.Tensor]:
    """The tensors of an IP-Adapter for a UNet of diffusers, by their names in a file."""
    width = unet.config.cross_attention_dim
    shapes = {f"image_proj.{name}": shape for name, shape in projection_shapes(kind, width).items()}
    number = 1
    for name in unet.attn_processors:
        if name.endswith("attn2.processor"):
            attention = unet.get_submodule(name.removesuffix(".processor"))
            inner = attention.to_k.weight.shape[0]
            for matrix in ("to_k_ip", "to_v_ip"):
                shapes[f"ip_adapter.{number}.{matrix}.weight"] = (inner, width)
            number += 2
    return random_tensors(shapes, seed)


def projection_shapes(kind: str, width: int) -> dict[str, tuple[int, ...]]:
    if kind == "plain":
        return {
            "proj.weight": (4 * width, EMBED), "proj.bias": (4 * width,), **norm("norm", width)
        }  # fmt: skip
    if kind == "full":
        return {
            "proj.0.weight": (HIDDEN, HIDDEN), "proj.0.bias": (HIDDEN,),
            "proj.2.weight": (width, HIDDEN), "proj.2.bias": (width,), **norm("proj.3", width),
        }  # fmt: skip
    # diffusers has no resamplers of another depth, nor of heads of another width.
    c, inner = 20, 128
    shapes: dict[str, tuple[int, ...]] = {
        "latents": (1, 5, c),
        "proj_in.weight": (c, HIDDEN), "proj_in.bias": (c,),
        "proj_out.weight": (width, c), "proj_out.bias": (width,), **norm("norm_out", width),
    }  # fmt: skip
    for i in range(4):
        own = f"layers.{i}"
        shapes |= norm(f"{own}.0.norm1", c) | norm(f"{own}.0.norm2", c) | norm(f"{own}.1.0", c)
        shapes |= {
            f"{own}.0.to_q.weight": (inner, c), f"{own}.0.to_kv.weight": (2 * inner, c),
            f"{own}.0.to_out.weight": (c, inner),
            f"{own}.1.1.weight": (4 * c, c), f"{own}.1.3.weight": (c, 4 * c),
        }  # fmt: skip
    return shapes


def norm(name: str, width: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def write_ip_adapters(folder: Path, unet: Any, kinds: tuple[str, ...] = KINDS) -> None:
    """Files of each kind, and an image encoder beside them, in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for seed, kind in enumerate(kinds):
        save_file(tensors_of(unet, kind, seed), folder / f"{kind}.safetensors")
    build_image_encoder(folder / "image_encoder")


def write_hub_files(folder: Path, unet: Any, family: str) -> None:
    """The files of h94/IP-Adapter for a family, "sd" or "xl", as far as guides name them."""
    folder.mkdir(parents=True, exist_ok=True)
    suffix = "sd15" if family == "sd" else "sdxl"
    for kind, name in (("plain", "ip-adapter"), ("plus", "ip-adapter-plus")):
        save_file(tensors_of(unet, kind), folder / f"{name}_{suffix}.safetensors")
    build_image_encoder(folder / "image_encoder")


def load_both(theirs: Any, ours: Any, folder: Path, *kinds: str) -> None:
    """Loads IP-Adapters of these kinds into a pipeline of diffusers and into ours."""
    names = [f"{kind}.safetensors" for kind in kinds]
    for pipe in (theirs, ours):
        pipe.load_ip_adapter(str(folder), subfolder="", weight_name=names)
    theirs.feature_extractor = processor()


def set_both(theirs: Any, ours: Any, scale: Any) -> None:
    for pipe in (theirs, ours):
        pipe.set_ip_adapter_scale(scale)
