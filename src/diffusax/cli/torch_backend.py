"""Generates images with a PyTorch diffusers pipeline whose modules run in JAX."""

import inspect
from typing import Any

from diffusax.boundary.messages import require_extra
from diffusax.cli.generation import Generator, write_texts
from diffusax.cli.parsing import given_flags

_NATIVE_ONLY = (
    "sampler",
    "vae_dtype",
    "weights",
    "step_cache",
    "compiled",
    "controlnet",
    "lora_dir",
    "embeddings",
    "clip_skip",
    "long_prompt",
    "prompt_weighting",
    "mask_crop",
    "encode_first",
    "reference",
)
"""Options that have no meaning for a PyTorch pipeline."""


def check(options: Any) -> None:
    """Raises ValueError where an option is given that this backend does not know."""
    if flags := given_flags(options, _NATIVE_ONLY):
        raise ValueError(f"{flags[0]} is nothing that --backend torch knows; leave it out")


def opened(options: Any, inputs: dict[str, Any], runs: Any = None) -> Generator:
    """Loads a checkpoint with its own pipeline; returns a function that generates with it.

    Args:
        options: the options of `diffusax generate`.
        inputs: image and mask_image, if they are given.
        runs: ignored, because the pipeline keeps its own sampler.

    Raises:
        ImportError: torch, torchax or diffusers is missing.
    """
    torch = require_extra("torch", "torch")
    pipe = _load(options, torch, inputs)
    known = inspect.signature(type(pipe).__call__).parameters

    def generate(options: Any, seed: int) -> tuple[list[Any], list[str]]:
        asked = {
            "prompt": options.prompt,
            "negative_prompt": options.negative_prompt,
            "num_inference_steps": options.steps,
            "guidance_scale": options.guidance,
            "num_images_per_prompt": options.num_images if options.num_images > 1 else None,
            "strength": options.strength,
            "height": None if inputs else options.height,
            "width": None if inputs else options.width,
            **inputs,
        }
        given = {name: value for name, value in asked.items() if value is not None}
        for name in given:
            if name not in known:
                raise ValueError(f"{type(pipe).__name__} has no {name}; leave the option out")
        images = pipe(**given, generator=torch.Generator("cpu").manual_seed(seed)).images
        return images, _describe(pipe, options, images, seed)

    return generate


def _load(options: Any, torch: Any, inputs: dict[str, Any]) -> Any:
    diffusers = require_extra("diffusers", "torch")
    compiler = require_extra("diffusax.torch", "torch")
    kind = "Inpainting" if "mask_image" in inputs else "Image2Image"
    cls = getattr(diffusers, f"AutoPipelineFor{kind}") if inputs else diffusers.DiffusionPipeline
    loading = {"variant": options.variant, "revision": options.revision}
    dtype = getattr(torch, options.dtype)
    try:
        pipe = cls.from_pretrained(options.model, torch_dtype=dtype, **loading)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{options.model} cannot be loaded by diffusers: {reason}") from None
    if options.vae_tiling:
        pipe.vae.enable_tiling()
    return compiler.compile(pipe, mesh=options.mesh, fuse_loop=True, on_error="eager")


def _describe(pipe: Any, options: Any, images: list[Any], seed: int) -> list[str]:
    defaults = inspect.signature(type(pipe).__call__).parameters
    known = {n: p.default for n, p in defaults.items() if p.default is not p.empty}
    guidance, strength = options.guidance, options.strength
    fields = {
        "num_inference_steps": options.steps or known.get("num_inference_steps"),
        "sampler": type(pipe.scheduler).__name__,
        "guidance_scale": known.get("guidance_scale") if guidance is None else guidance,
        "noise": "torch",
    }
    if options.image:
        fields["strength"] = known.get("strength") if strength is None else strength
    if options.mask:
        fields["mask_blur"] = options.mask_blur
    more = {
        "Backend": "torch",
        "Dtype": None if options.dtype == "float32" else options.dtype,
        "Image": options.image and options.image.name,
        "Mask": options.mask and options.mask.name,
    }
    return write_texts(options, images, seed, fields, more)
