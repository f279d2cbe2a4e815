"""Converts latents to the kind of output that a call asked for: images, arrays or latents."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from diffusax.boundary.messages import require_extra
from diffusax.boundary.tensors import as_tensor
from diffusax.images.outputs import ImagePipelineOutput
from diffusax.images.pictures import to_pil
from diffusax.pipelines import programs
from diffusax.pipelines.arguments import Call
from diffusax.pipelines.components import Components
from diffusax.pipelines.plan import DecoderCondition, Decoding
from diffusax.pipelines.sample import decode


def output(
    c: Components,
    latents: jax.Array,
    decoding: Decoding,
    condition: DecoderCondition | None,
    output_type: str,
) -> Any:
    """Converts latents b h w c after a run to the output that the call asked for.

    Args:
        c: the components.
        latents: b h w c.
        decoding: the static options of the decoder.
        condition: see `PreparedRun.decoder_condition`.
        output_type: "pil", "np", "pt", "jax" or "latent".

    Raises:
        FloatingPointError: the latents or the images are not finite.
    """
    if output_type == "latent":
        if not np.isfinite(np.asarray(latents)).all():
            raise FloatingPointError(_not_finite(c, "latents"))
        if c.latents.fold > 1:
            # diffusers' pipeline_flux2_klein.py returns what the autoencoder decodes.
            own = c.autoencoder, c.autoencoder_params
            latents = programs.own_latents(*own, latents, normalize=decoding.normalize)
            return jnp.transpose(latents, (0, 3, 1, 2))
        return c.latents.outward(latents)
    tiled = c.autoencoder_name is not None and c.autoencoder_model.switches.tiling
    images, finite = decode(c, latents, decoding, condition, tiled=tiled)
    if not np.asarray(finite).all():
        culprit = "pictures" if np.isfinite(np.asarray(latents)).all() else "latents"
        raise FloatingPointError(_not_finite(c, culprit))
    match output_type:
        case "jax":
            return images
        case "pil":
            return to_pil(np.asarray(images))
        case "pt":
            torch = require_extra("torch", "torch")
            return torch.from_numpy(np.asarray(images).transpose(0, 3, 1, 2).copy())
    return np.asarray(images)


def result_of(call: Call, images: Any, finish: Callable[[Any], Any] | None, *, flags: bool) -> Any:
    """Returns what a call returns.

    Args:
        call: the call.
        images: what `output` gave.
        finish: see `PreparedRun.finish`.
        flags: see `DiffusionPipeline.returns_flags`.
    """
    images = images if finish is None else finish(images)
    if call.tensors and call.output_type == "latent":
        images = as_tensor(images)
    if call.return_dict:
        return ImagePipelineOutput(images)
    return (images, None) if flags else (images,)


def _not_finite(c: Components, what: str) -> str:
    if what == "pictures":
        dtype = c.autoencoder_model.dtype
        return (
            f"the decoded pictures are not finite in {dtype}: load the autoencoder in float32 "
            "with from_pretrained(..., vae_dtype='float32')"
        )
    return (
        f"the latents are not finite in {c.dtype}: use dtype='bfloat16' or 'float32', and check "
        "that the scheduler's prediction_type is the model's"
    )
