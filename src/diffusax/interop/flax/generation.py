"""Runs the call of a Flax pipeline: encodes the prompts, runs the sampler's rows, and decodes."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from diffusax.interop.flax.models import FlaxModelMixin, channels_last
from diffusax.models.autoencoders.latents import to_unit
from diffusax.pipelines.families import STABLE_DIFFUSION, STABLE_DIFFUSION_XL
from diffusax.pipelines.families.unet import UNetDenoiser
from diffusax.pipelines.plan.plan import Conditions, Plan, Prompt, StepInputs, Tokens
from diffusax.pipelines.run import autoencoding, programs
from diffusax.pipelines.run.sample import LoadedDenoiser, differentiably, sample
from diffusax.runtime.random.noise import as_key
from diffusax.samplers import Schedule

Params = Mapping[str, Any]


def encode_prompts(
    pipe: Any, params: Params, ids: jax.Array, negative_ids: jax.Array, branches: tuple[Any, ...]
) -> jax.Array:
    """Returns the context of Stable Diffusion, b k s d, for prompts b t.

    branches: for each of the k branches 0 for the prompt or 1 for the negative prompt.
    """
    encoder, b = pipe.text_encoder, ids.shape[0]
    both = jnp.concatenate([jnp.asarray(ids), jnp.asarray(negative_ids)])
    weights = encoder.narrowed(params["text_encoder"])
    prompt = STABLE_DIFFUSION.encode((encoder.network,), (weights,), Tokens((both[:, None],)))
    context = prompt.context
    (context,) = programs.stack_branches(
        ((context[:b],), (context[b:],)), order=branches, repeats=1
    )
    return context


def encode_xl(pipe: Any, params: Params, ids: jax.Array) -> Prompt:
    """Returns the context b s d and the pooled output b p of SDXL, for prompts b 2 t."""
    names = ("text_encoder", "text_encoder_2")
    encoders = tuple(getattr(pipe, name) for name in names)
    return STABLE_DIFFUSION_XL.encode(
        tuple(encoder.network for encoder in encoders),
        tuple(encoder.narrowed(params[name]) for encoder, name in zip(encoders, names)),
        Tokens((ids[:, :1], ids[:, 1:])),
    )


def initial_noise(
    pipe: Any,
    key: jax.Array,
    size: tuple[int, int, int],
    given: Any,
    dtype: Any = jnp.float32,
    *,
    multiple: int = 8,
) -> jax.Array:
    """Returns noise b h w c: the given array, b c h w, or normal numbers of the key in that shape.

    size: the number of images, and their height and width in pixels, which must be multiples of
        `multiple`.

    Raises:
        ValueError: they are not, or the given array has another shape.
    """
    b, height, width = size
    if height % multiple or width % multiple:
        raise ValueError(
            f"`height` and `width` have to be divisible by {multiple} but are {height} and {width}."
        )
    factor = pipe.vae_scale_factor
    shape = (b, pipe.vae.config.latent_channels, height // factor, width // factor)
    if given is None:
        given = jax.random.normal(as_key(key), shape, dtype)
    elif tuple(given.shape) != shape:
        raise ValueError(f"Unexpected latents shape, got {given.shape}, expected {shape}")
    return channels_last(given).astype(jnp.float32)


def encode_images(
    pipe: Any, params: Params, images: jax.Array, key: jax.Array | None, *, scale: bool = True
) -> jax.Array:
    """Encodes images b 3 H W in [-1, 1] to latents b h w z.

    key: the random key to sample the autoencoder's distribution with; None takes its mode.
    """
    network, weights = pipe.vae.network, pipe.vae.narrowed(params["vae"])
    height, width = (side // pipe.vae_scale_factor for side in images.shape[-2:])
    shape = (len(images), height, width, network.config.latent_channels)
    noise = None if key is None else jax.random.normal(as_key(key), shape, jnp.float32)
    dtype = jax.tree.leaves(weights)[0].dtype
    pixels = channels_last(images).astype(dtype)
    return autoencoding.encode_image(network, weights, pixels, noise, scale=scale)


def denoise(
    pipe: Any,
    params: Params,
    schedule: Schedule,
    latents: jax.Array,
    conditions: Conditions,
    weights: jax.Array,
    key: jax.Array,
    control: Any = None,
) -> jax.Array:
    """Runs all rows of the schedule and returns the latents, b h w c.

    Args:
        pipe: the pipeline with its networks.
        params: the parameters by component.
        schedule: the rows of the run.
        latents: the latents at the start of the run, b h w c.
        conditions: see `Conditions`.
        weights: the weights of guidance, b k-1.
        key: the random key of the noise that rows draw.
        control: the scales of a ControlNet's residuals, b; None without a ControlNet.
    """
    controlnets = () if control is None else (pipe.controlnet,)
    names = ("unet", "controlnet")[: 1 + len(controlnets)]
    models = (pipe.unet, *controlnets)
    denoiser = UNetDenoiser(pipe.unet.network, tuple(net.network for net in controlnets))
    narrowed = {name: model.narrowed(params[name]) for name, model in zip(names, models)}
    n, b = len(schedule), latents.shape[0]
    if control is not None:
        k, r = weights.shape[-1] + 1, _count_residuals(pipe.controlnet.network)
        control = jnp.broadcast_to(control.reshape(b, 1, 1, 1), (n, b, 1, k, r))
    inputs = StepInputs(jnp.broadcast_to(weights, (n, *weights.shape)), jnp.zeros(n), control)
    table = jax.tree.map(lambda column: column[:n], schedule.table())
    plan = Plan(latents, conditions, table, inputs, _row_keys(key, b))
    return sample(LoadedDenoiser(denoiser, narrowed), plan, differentiably(n)).latents


def decode(pipe: Any, params: Params, latents: jax.Array) -> jax.Array:
    """Decodes latents b h w c to images b H W 3 in [0, 1], float32."""
    weights = pipe.vae.narrowed(params["vae"])
    pixels = autoencoding.decode_pixels(
        pipe.vae.network, weights, latents, upcast=False, normalize=False
    )
    return to_unit(pixels)


def per_image(value: Any, b: int, name: str) -> Any:
    """Returns a number, or one for each image, as an array b.

    Raises:
        ValueError: there are not as many numbers as images.
    """
    value = jnp.asarray(value, jnp.float32).reshape(-1)
    if value.size not in (1, b):
        raise ValueError(f"{name} must be one number or one per image, {b} (got {value.size})")
    return jnp.broadcast_to(value, (b,))


def call(pipe: Any, jit: bool, arrays: dict[str, Any], static: dict[str, Any]) -> jax.Array:
    """Runs the pipeline's `_generate` on all devices where `jit` is set, else on one.

    arrays: the leaves have the axis of the devices first where `jit` is set; single numbers are
    copied to all devices.
    """
    devices = arrays["prompt_ids"].shape[0]
    for name in ("guidance_scale", "image_guidance_scale", "controlnet_conditioning_scale"):
        if name in arrays and jnp.ndim(arrays[name]) == 0:
            arrays[name] = jnp.full((devices, 1) if jit else (1,), arrays[name], jnp.float32)
    run = _generate_on_devices if jit else _generate
    return run(_Program(_key(pipe), tuple(static.items()), pipe), arrays)


@dataclasses.dataclass(frozen=True)
class _Program:
    """The hashable key of a compiled program; pipelines of equal networks and samplers share it."""

    key: tuple[Any, ...]
    static: tuple[tuple[str, Any], ...]
    pipe: Any = dataclasses.field(compare=False)

    def __call__(self, arrays: dict[str, Any]) -> jax.Array:
        return self.pipe._generate(**arrays, **dict(self.static))


@functools.partial(jax.jit, static_argnums=0)
def _generate(program: _Program, arrays: dict[str, Any]) -> jax.Array:
    return program(arrays)


@functools.partial(jax.pmap, in_axes=(None, 0), static_broadcasted_argnums=0)
def _generate_on_devices(program: _Program, arrays: dict[str, Any]) -> jax.Array:
    return program(arrays)


def _key(pipe: Any) -> tuple[Any, ...]:
    parts = pipe.components.values()
    models = [(part.network, part.dtype) for part in parts if isinstance(part, FlaxModelMixin)]
    return type(pipe), pipe.dtype, type(pipe.scheduler), pipe.scheduler.sampler, *models


def _row_keys(key: jax.Array, b: int) -> jax.Array:
    return jax.random.split(as_key(key), b)


def _count_residuals(network: Any) -> int:
    return len(network.shapes["controlnet_down_blocks"]) + 1
