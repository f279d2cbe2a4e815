"""The compiled programs of text to image: encode, denoise, decode.

All that a user turns between calls (prompt, steps, sampler, guidance, seed) is an argument; a new
shape or dtype compiles a new program, nothing else does.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from diffusax.models.embeddings import guidance_scale_embedding
from diffusax.models.network import Network, Params
from diffusax.samplers import Table, init_state, run
from diffusax.text.prompts import apply_weights


class Guidance(NamedTuple):
    """Classifier-free guidance: scale (Ho and Salimans 2022), rescale (Lin et al. 2024, eq. 15)."""

    scale: Any
    rescale: Any


@dataclasses.dataclass(frozen=True)
class Programs:
    """Pure functions of (params, inputs), for one set of networks; the methods can be jitted."""

    text_encoder: Network
    unet: Network
    vae: Network

    def encode(
        self,
        params: Params,
        input_ids: jax.Array,
        weights: jax.Array | None = None,
        *,
        clip_skip: int | None = None,
        repeats: int = 1,
    ) -> jax.Array:
        """Prompts to what the UNet attends to.

        input_ids: n w t (w windows of t tokens), weights: n w t -> (n repeats) (w t) d. Each
        prompt's copies stand together.
        """
        n, w, t = input_ids.shape
        hidden = self.text_encoder.apply(
            params, input_ids.reshape(n * w, t), method="encode", clip_skip=clip_skip
        )
        if weights is not None:
            hidden = apply_weights(hidden, weights.reshape(n * w, t))
        return jnp.repeat(hidden.reshape(n, w * t, -1), repeats, axis=0)

    def begin(self, noise: jax.Array, scale: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """The sampler's state before the first row.

        noise: latents b h w c in any real dtype, or one random key per image (b), from which
        latents of `shape` (h w c) are drawn. scale: the initial standard deviation.
        """
        if _is_keys(noise):
            noise = _draw(noise, 0, shape)
        return init_state(noise * scale)

    def denoise(
        self,
        params: Params,
        state: jax.Array,
        context: jax.Array,
        table: Table,
        start: jax.Array | int,
        stop: jax.Array | int,
        noise: jax.Array,
        guidance: Guidance,
    ) -> jax.Array:
        """Rows start..stop of the sampler's table.

        Args:
            params: the UNet's.
            state: as from `begin`, b h w c in each slot.
            context: b s d; or 2b s d, the negative prompts first, which turns guidance on.
            table: from `Schedule.table`.
            start: the first row.
            stop: the row after the last.
            noise: random keys (b), or the noise of these rows (b h w c).
            guidance: the scale and rescale, scalars.
        """
        b = state.shape[1]
        guided = context.shape[0] == 2 * b
        conditions = self._conditions(guidance, context.shape[0])

        def model(x: jax.Array, t: jax.Array, row: jax.Array) -> jax.Array:
            doubled = jnp.concatenate([x, x]) if guided else x
            prediction = self.unet.apply(params, doubled, t, context, **conditions)
            prediction = prediction.astype(jnp.float32)
            return _guide(prediction, guidance) if guided else prediction

        def draw(row: jax.Array) -> jax.Array:
            return _draw(noise, row + 1, state.shape[2:]) if _is_keys(noise) else noise

        return run(model, state, table, start, stop, draw)

    def decode(self, params: Params, latents: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Latents b h w c -> pictures b H W 3 in [0, 1], float32, and whether each is finite, b."""
        images = self.decode_raw(params, latents)
        finite = jnp.isfinite(images).all((1, 2, 3)) & jnp.isfinite(latents).all((1, 2, 3))
        return to_unit_range(images), finite

    def decode_raw(self, params: Params, latents: jax.Array) -> jax.Array:
        """Latents b h w c -> pictures b H W 3 around [-1, 1], float32."""
        config = self.vae.config
        z = latents / config.scaling_factor + (config.shift_factor or 0.0)
        return self.vae.apply(params, z, method="decode").astype(jnp.float32)

    def generate(self, params: Params, inputs: dict[str, Any]) -> jax.Array:
        """The whole of text to image as one pure function, for jit, vmap and grad.

        Args:
            params: {"text_encoder": ..., "unet": ..., "vae": ...}.
            inputs: from `StableDiffusionPipeline.prepare_inputs`. The table is not padded, so that
                the number of steps is static and the loop differentiable in reverse.

        Returns:
            Pictures b H W 3 in [0, 1], float32.
        """
        if "context" in inputs:
            context = inputs["context"]
        else:
            context = self.encode(params["text_encoder"], inputs["input_ids"])
        state = self.begin(inputs["noise"], inputs["init_noise_sigma"], inputs["noise"].shape[1:])
        rows = inputs["table"].timestep.shape[0]
        draws = inputs.get("keys", inputs["noise"])
        state = self.denoise(
            params["unet"], state, context, inputs["table"], 0, rows, draws, inputs["guidance"]
        )
        return to_unit_range(self.decode_raw(params["vae"], state[0]))

    def _conditions(self, guidance: Guidance, b: int) -> dict[str, jax.Array]:
        dim = getattr(self.unet.config, "time_cond_proj_dim", None)
        if dim is None:
            return {}
        scale = jnp.broadcast_to(guidance.scale - 1, (b,))
        return {"timestep_cond": guidance_scale_embedding(scale, dim)}


def to_unit_range(images: jax.Array) -> jax.Array:
    """[-1, 1] -> [0, 1], clipped."""
    return jnp.clip(images / 2 + 0.5, 0.0, 1.0)


def image_keys(seeds: jax.Array, indices: jax.Array) -> jax.Array:
    """One key per image: fold_in(key(seed), index), whatever else is in the batch."""
    return jax.vmap(lambda s, i: jax.random.fold_in(jax.random.key(s), i))(seeds, indices)


def _guide(prediction: jax.Array, guidance: Guidance) -> jax.Array:
    uncond, cond = jnp.split(prediction, 2)
    guided = uncond + guidance.scale * (cond - uncond)
    axes = tuple(range(1, guided.ndim))
    std = cond.std(axes, keepdims=True, ddof=1)
    guided_std = guided.std(axes, keepdims=True, ddof=1)
    rescaled = guided * (std / guided_std)
    mixed = guidance.rescale * rescaled + (1 - guidance.rescale) * guided
    return jnp.where(guidance.rescale > 0, mixed, guided)


def _is_keys(noise: jax.Array) -> bool:
    return jnp.issubdtype(noise.dtype, jax.dtypes.prng_key)


def _draw(keys: jax.Array, index: jax.Array | int, shape: tuple[int, ...]) -> jax.Array:
    draw = jax.vmap(lambda key: jax.random.normal(jax.random.fold_in(key, index), shape))
    return draw(keys)
