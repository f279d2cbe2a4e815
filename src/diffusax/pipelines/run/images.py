"""Decodes the latents of a run to what its call returns, and encodes images to latents.

Large images are decoded and encoded in overlapping tiles where the autoencoder is set to.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from diffusax.boundary.messages import require_extra
from diffusax.boundary.tensors import as_tensor
from diffusax.images.conversion import to_pil
from diffusax.images.outputs import ImagePipelineOutput, VideoPipelineOutput
from diffusax.models.autoencoders.latents import LatentFormat, to_unit, unpatchify
from diffusax.models.autoencoders.tiling import (
    TILED_ENCODERS,
    encoder_tiles,
    tile_of,
    tiled_decode,
    tiled_encode,
)
from diffusax.pipelines.components.components import Components
from diffusax.pipelines.plan.arguments import Call, read_numbers
from diffusax.pipelines.plan.plan import DecoderCondition, Decoding, PreparedRun
from diffusax.pipelines.run import autoencoding
from diffusax.pipelines.run.sample import Sampled
from diffusax.runtime.devices.shares import own_images, put
from diffusax.runtime.switches import in_mesh


def decode_result(
    c: Components, call: Call, run: PreparedRun, sampled: Sampled, *, flags: bool = False
) -> Any:
    """Returns the result of a call, whose run has ended so.

    flags: see `DiffusionPipeline.returns_flags`.

    Raises:
        FloatingPointError: the latents or the images are not finite.
    """
    given = sampled.latents, run.decoding, run.decoder_condition, call.output_type
    images = to_output(c, *given)
    return result_of(c, call, images, run.overlay, flags=flags, kept=sampled.kept)


def to_output(
    c: Components,
    latents: jax.Array,
    decoding: Decoding,
    condition: DecoderCondition | None,
    output_type: str,
) -> Any:
    """Converts latents b h w c after a run to the output that the call asked for.

    Args:
        c: the components.
        latents: b h w c; of videos b f h w c.
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
            latents = autoencoding.own_latents(*own, latents, normalize=decoding.normalize)
            return jnp.transpose(latents, (0, 3, 1, 2))
        return c.latents.outward(latents)
    images, finite = decode(c, latents, decoding, condition, tiled=c.tiled)
    if not np.asarray(finite).all():
        culprit = "images" if np.isfinite(np.asarray(latents)).all() else "latents"
        raise FloatingPointError(_not_finite(c, culprit))
    match output_type:
        case "jax":
            return images
        case "pil":
            shown = np.asarray(images)
            return [to_pil(frames) for frames in shown] if shown.ndim == 5 else to_pil(shown)
        case "pt":
            torch = require_extra("torch", "torch")
            return torch.from_numpy(np.moveaxis(np.asarray(images), -1, -3).copy())
    return np.asarray(images)


def result_of(
    c: Components,
    call: Call,
    images: Any,
    overlay: Callable[[Any], Any] | None,
    *,
    flags: bool,
    kept: dict[str, Any] | None = None,
) -> Any:
    """Returns what a call returns.

    Args:
        c: the components.
        call: the call.
        images: what `to_output` gave.
        overlay: see `PreparedRun.overlay`.
        flags: see `DiffusionPipeline.returns_flags`.
        kept: what the call's hooks have kept; None without hooks.
    """
    images = images if overlay is None else overlay(images)
    if call.tensors and call.output_type == "latent":
        images = as_tensor(images)
    if call.return_dict and c.family.draws_videos:
        return VideoPipelineOutput(images, kept)
    if call.return_dict:
        return ImagePipelineOutput(images, kept=kept)
    result = (images, None) if flags else (images,)
    return result if kept is None else (*result, kept)


def decode(
    c: Components,
    latents: Any,
    decoding: Decoding,
    condition: DecoderCondition | None = None,
    *,
    tiled: bool = False,
) -> tuple[Any, Any]:
    """Decodes latents b h w c to images b H W 3 in [0, 1]; also returns whether each is finite, b.

    Args:
        c: the components.
        latents: arrays on the host or on any device.
        decoding: the static options of the decoder.
        condition: the image and the mask that an inpainting decoder reads; None for other decoders.
        tiled: whether to decode large images in overlapping tiles.
    """
    options = dataclasses.asdict(decoding)
    if tiled:
        return _decode_tiles(c, latents, condition, **options)
    mesh, given = c.local_mesh, (latents, condition)
    with in_mesh(mesh):
        if mesh is not None:
            given = jax.tree.map(functools.partial(put, mesh), given)
        decoded = autoencoding.decode(c.autoencoder, c.autoencoder_params, *given, **options)
    if mesh is not None:
        decoded = [own_images(mesh, x, len(latents)) for x in decoded]
    images, finite = decoded
    return images, finite


def _decode_tiles(
    c: Components, latents: Any, condition: DecoderCondition | None, **options: bool
) -> tuple[Any, Any]:
    """Decodes as `autoencoding.decode` does, in overlapping tiles where the images are large."""
    params, factor = c.autoencoder_params, c.latents.factor

    def decode_tile(part: np.ndarray, *shown: np.ndarray) -> jax.Array:
        given = part, DecoderCondition(*shown) if shown else None
        with in_mesh(c.local_mesh):
            return autoencoding.decode_pixels(c.autoencoder, params, *given, **options)

    tile = tile_of(c.autoencoder.config, factor)
    patch = getattr(c.autoencoder.config, "patch", 1)
    given = latents, *(condition or ())
    images = tiled_decode(decode_tile, *given, tile=tile, factor=factor, patch=patch)
    finite = np.isfinite(images).all(tuple(range(1, images.ndim)))
    return to_unit(jnp.asarray(images)), finite


def _not_finite(c: Components, what: str) -> str:
    if what == "images":
        dtype = c.autoencoder_model.dtype
        return (
            f"the decoded images are not finite in {dtype}: load the autoencoder in float32 "
            "with from_pretrained(..., vae_dtype='float32')"
        )
    return (
        f"the latents are not finite in {c.dtype}: use dtype='bfloat16' or 'float32', and check "
        "that the scheduler's prediction_type is the model's"
    )


def encode_pixels(
    c: Components, pixels: Any, noise: Any, *, upcast: bool, **options: Any
) -> jax.Array:
    """Encodes images b H W 3, or videos b f H W 3, in [-1, 1]; see `autoencoding.encode_image`.

    Args:
        c: the components; their autoencoder's switches say whether there are tiles.
        pixels: the images.
        noise: what samples the latents; None takes their mode.
        upcast: whether float16 parameters are cast to float32.
        **options: scale and normalize.
    """
    vae, params = c.autoencoder, c.autoencoder_params
    in_tiles = c.tiled and vae.class_name in TILED_ENCODERS
    tiles = encoder_tiles(vae.config) if in_tiles else None
    if tiles is None or max(pixels.shape[-3:-1]) <= tiles["whole"] * tiles["factor"]:
        given = vae, params, pixels, noise
        whole: jax.Array = autoencoding.encode_image(*given, upcast=upcast, **options)
        return whole

    def encode_tile(part: np.ndarray) -> jax.Array:
        moments: jax.Array = autoencoding.encode_moments(vae, params, part, upcast=upcast)
        return moments

    moments = tiled_encode(encode_tile, pixels, **tiles)
    latents: jax.Array = autoencoding.sample_moments(vae, params, moments, noise, **options)
    return latents


def check_latents(
    form: LatentFormat, latents: Any, b: int, *sizes: int, name: str = "latents"
) -> np.ndarray:
    """Returns latents b c h w, or packed ones b t (c patch patch), as float32, b h w c.

    sizes: h and w; of videos f, h and w, whose latents are b c f h w and become b f h w c.

    Raises:
        ValueError: they have another shape, or are not numbers.
    """
    (*_, h, w), patch = sizes, form.patch
    shape = b, form.channels, *sizes
    tokens = (b, (h // patch) * (w // patch), form.channels * patch**2)
    given = tuple(getattr(latents, "shape", ()))
    if given == tokens and form.packed:
        numbers: Any = read_numbers(name, latents)
        return np.asarray(unpatchify(numbers, patch, h, w, channels_first=True))
    if given != shape:
        packed = f", or (images, tokens, width) = {tokens}" if form.packed else ""
        axes = "videos, channels, frames" if len(sizes) > 2 else "images, channels"
        raise ValueError(
            f"{name} must have shape ({axes}, height, width) = {shape}{packed} for this "
            f"call (got {getattr(latents, 'shape', type(latents).__name__)})"
        )
    return np.moveaxis(read_numbers(name, latents), 1, -1)
