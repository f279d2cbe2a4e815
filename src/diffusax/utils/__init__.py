"""Functions and names that diffusers' users import from `diffusers.utils`."""

import importlib.metadata
import importlib.util
import re
import sys
import warnings
from typing import Any

from PIL import Image

from diffusax.boundary.tensors import Output as BaseOutput
from diffusax.boundary.tensors import as_numpy, is_tensor
from diffusax.images.reading import load_image
from diffusax.images.sheets import captioned, contact_sheet, labelled_grid, make_image_grid
from diffusax.images.vae_image_processor import VaeImageProcessor
from diffusax.images.videos import load_video
from diffusax.utils import logging
from diffusax.utils.export_utils import export_to_gif, export_to_video
from diffusax.utils.logging import get_logger
from diffusax.utils.torch_utils import randn_tensor

CONFIG_NAME = "config.json"
WEIGHTS_NAME = "diffusion_pytorch_model.bin"
SAFETENSORS_WEIGHTS_NAME = "diffusion_pytorch_model.safetensors"
SCHEDULER_CONFIG_NAME = "scheduler_config.json"
USE_PEFT_BACKEND = True
"""Whether adapters have names and weights, as they have with PEFT; not that PEFT is installed."""
PIL_INTERPOLATION = {
    "linear": Image.Resampling.BILINEAR,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
    "nearest": Image.Resampling.NEAREST,
}
"""Pillow's filters by name."""
_AVAILABLE = re.compile(r"is_(\w+)_(available|version)")
_NOT_HERE = ("torch_xla", "torch_npu", "torch_xpu", "torch_mlu", "xformers", "flax", "onnx")
"""What diffusers asks for to compute by it, and diffusax does without."""

__all__ = [
    "PIL_INTERPOLATION",
    "BaseOutput",
    "captioned",
    "contact_sheet",
    "deprecate",
    "export_to_gif",
    "export_to_video",
    "get_logger",
    "labelled_grid",
    "load_image",
    "load_video",
    "logging",
    "make_image_grid",
    "numpy_to_pil",
    "pt_to_pil",
    "randn_tensor",
]


def numpy_to_pil(images: Any) -> list[Image.Image]:
    """Converts arrays in [0, 1], h w c or b h w c with c 3 or 1, to PIL images."""
    return VaeImageProcessor.numpy_to_pil(as_numpy(images))


def pt_to_pil(images: Any) -> list[Image.Image]:
    """Converts tensors or arrays in [-1, 1], b c h w, to PIL images."""
    pixels = as_numpy(images).astype("float32")
    return numpy_to_pil((pixels / 2 + 0.5).clip(0, 1).transpose(0, 2, 3, 1))


def rescale_noise_cfg(noise_cfg: Any, noise_pred_text: Any, guidance_rescale: float = 0.0) -> Any:
    """Rescales a guided prediction, b ..., as Lin et al. 2024 do in section 3.4.

    Args:
        noise_cfg: the guided prediction.
        noise_pred_text: the prediction for the prompt.
        guidance_rescale: the share of the result that has the deviation of the prediction for the
            prompt.
    """
    axes = tuple(range(1, noise_cfg.ndim))
    # PyTorch's deviation divides by n - 1, and JAX's by n.
    options = {} if is_tensor(noise_cfg) else {"ddof": 1}
    wanted = noise_pred_text.std(axes, keepdims=True, **options)
    rescaled = noise_cfg * (wanted / noise_cfg.std(axes, keepdims=True, **options))
    return guidance_rescale * rescaled + (1 - guidance_rescale) * noise_cfg


def retrieve_timesteps(
    scheduler: Any,
    num_inference_steps: int | None = None,
    device: Any = None,
    timesteps: Any = None,
    sigmas: Any = None,
    **options: Any,
) -> tuple[Any, int]:
    """Begins a run of a scheduler, and returns its timesteps and their number.

    Arguments as of `set_timesteps`. device changes nothing.

    Raises:
        ValueError: both timesteps and sigmas are given, or the scheduler cannot take them.
    """
    if timesteps is not None and sigmas is not None:
        raise ValueError("only one of timesteps and sigmas can be given")
    custom = timesteps is not None or sigmas is not None
    steps = None if custom else num_inference_steps
    scheduler.set_timesteps(steps, timesteps=timesteps, sigmas=sigmas, **options)
    found = scheduler.timesteps
    return found, len(found) if custom else int(num_inference_steps or 0)


def retrieve_latents(
    encoder_output: Any, generator: Any = None, sample_mode: str = "sample"
) -> Any:
    """Returns the latents of what an autoencoder's `encode` returns.

    Args:
        encoder_output: the result, with `latent_dist` or `latents`.
        generator: see `DiagonalGaussianDistribution.sample`.
        sample_mode: "sample", or "argmax" for the mode.

    Raises:
        AttributeError: it has neither.
    """
    distribution = getattr(encoder_output, "latent_dist", None)
    if distribution is None:
        return encoder_output.latents
    return distribution.mode() if sample_mode == "argmax" else distribution.sample(generator)


def deprecate(
    *args: Any, take_from: Any = None, standard_warn: bool = True, stacklevel: int = 2
) -> Any:
    """Warns of names that a program should no longer use, as diffusers' function of this name.

    Args:
        *args: a name, the version that drops it and a message, or tuples of these.
        take_from: a dictionary of arguments, from which the names are taken.
        standard_warn: whether the warning names the version.
        stacklevel: the caller that the warning shows.

    Returns:
        The values that were taken; None, a single one, or a tuple.
    """
    entries = args if isinstance(args[0], tuple) else (args,)
    values = []
    for name, version, message in entries:
        if isinstance(take_from, dict):
            if name not in take_from:
                continue
            values.append(take_from.pop(name))
        start = f"`{name}` is deprecated and will be removed in version {version}. "
        text = (start if standard_warn else "") + message
        warnings.warn(text, FutureWarning, stacklevel=stacklevel)
    return values[0] if len(values) == 1 else tuple(values) or None


def check_min_version(min_version: str) -> None:
    """Does nothing: the version that a program asks for is diffusers', whose methods these are."""


def is_google_colab() -> bool:
    """Returns whether the program runs in Google Colab."""
    return "google.colab" in sys.modules


def replace_example_docstring(example_docstring: str) -> Any:
    """Returns a decorator that leaves a function as it is; programs use it for documentation."""
    return lambda function: function


def __getattr__(name: str) -> Any:
    """Returns diffusers' questions for libraries, `is_peft_available` and `is_torch_version`."""
    found = _AVAILABLE.fullmatch(name)
    if found is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, kind = found.groups()
    if kind == "version":
        return lambda operation, version: _compares(module, operation, version)
    return lambda: module not in _NOT_HERE and importlib.util.find_spec(module) is not None


def _compares(module: str, operation: str, version: str) -> bool:
    """Returns whether a library's version is as asked for; False where it is not installed."""
    try:
        own = importlib.metadata.version(module)
    except importlib.metadata.PackageNotFoundError:
        return False
    left, right = _numbers(own), _numbers(version)
    order = (left > right) - (left < right)
    return {"<": order < 0, "<=": order <= 0, "==": order == 0, "!=": order != 0}.get(
        operation, order > 0 if operation == ">" else order >= 0
    )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version.partition("+")[0])[:3]))
