"""The compiled programs: encode, denoise, decode.

All that a user turns between calls is an argument. Compiled programs belong to the networks, which
hold no parameters: a second checkpoint of the same architecture, and another task on the same
shapes, compile nothing. What compiles is listed in the README under "Shapes and compilation".
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from diffusax.models.latents import sample_latents, scale_latents, to_unit, unscale_latents
from diffusax.models.network import Network, Params, cast_params
from diffusax.pipelines.families import Denoiser
from diffusax.pipelines.plan import DecoderCondition, Plan, repeat_branches
from diffusax.runtime.mesh import split_images
from diffusax.runtime.noise import draw_rows
from diffusax.runtime.program import Program
from diffusax.samplers import Schedule, Table, init_state, run, stack_tables


@functools.partial(Program, static=("denoiser",), donate=("state",), shape_of="state")
def denoise(
    denoiser: Denoiser, params: Params, state: jax.Array, plan: Plan, start: Any, stop: Any
) -> jax.Array:
    """Rows start..stop of the plan's table; the state is 6 b h w c, slot 0 the latents.

    The plan's control images are embedded, see `embed_control`.
    """
    return advance(denoiser, params, state, plan, start, stop)


def advance(
    denoiser: Denoiser,
    params: Params,
    state: jax.Array,
    plan: Plan,
    start: Any,
    stop: Any,
    *,
    rematerialize: bool = False,
) -> jax.Array:
    """As `denoise`, a pure function; static bounds let a gradient go back through the rows.

    rematerialize: compute predictions again for a gradient instead of keeping what led to them.
    """
    predict = jax.checkpoint(denoiser) if rematerialize else denoiser
    b, k = state.shape[1], plan.step_inputs.weights.shape[-1] + 1
    conditions = jax.tree.map(lambda y: repeat_branches(y, k), plan.conditions)
    row_keys = jnp.issubdtype(plan.noise.dtype, jax.dtypes.prng_key)

    def model(x: jax.Array, timestep: jax.Array, i: jax.Array) -> jax.Array:
        inputs = jax.tree.map(lambda column: jnp.asarray(column)[i], plan.step_inputs)
        branches = repeat_branches(x[:, None], k)
        t = repeat_branches(jnp.broadcast_to(timestep, (b,))[:, None], k)
        y = predict(params, branches, t, conditions, inputs)
        y = y.astype(jnp.float32)[..., : x.shape[-1]]
        return denoiser.guide(y.reshape(b, k, *y.shape[1:]), inputs)

    def draw(i: jax.Array) -> jax.Array:
        return draw_rows(plan.noise, state.shape[2:], i + 1) if row_keys else plan.noise

    def put_back(x: jax.Array, signal: jax.Array, noise: jax.Array, i: jax.Array) -> jax.Array:
        assert plan.inpainting is not None
        given = signal * plan.inpainting.latents + noise * plan.inpainting.noise
        return (1 - plan.inpainting.mask) * given + plan.inpainting.mask * x

    constrain = None if plan.inpainting is None else put_back
    return run(model, state, plan.table, start, stop, draw, constrain)


@functools.partial(Program, static=("denoiser",), shape_of="images")
def embed_control(
    denoiser: Denoiser, params: Params, images: tuple[jax.Array, ...]
) -> tuple[jax.Array, ...]:
    """The images of `Conditions.control` as `denoise` wants them; see `Denoiser.embed`."""
    return denoiser.embed(params, images)


@jax.jit
def begin(noise: jax.Array, scale: Any, clean: jax.Array | None, signal: Any) -> jax.Array:
    """The latents that a run starts from: signal clean + scale noise, b h w c.

    clean: latents b h w c (or fewer, which are repeated); None for pure noise.
    """
    x = noise.astype(jnp.float32) * scale
    return x if clean is None else x + signal * repeat_to(clean, x.shape[0])


@jax.jit
def final_latents(state: jax.Array) -> jax.Array:
    """The latents in the sampler's state, b h w c."""
    return state[0]


@jax.jit
def first_state(latents: jax.Array) -> jax.Array:
    """The sampler's state before the first row, 6 b h w c."""
    return init_state(latents)


@functools.partial(Program, static=("vae", "upcast", "scale", "normalize"), shape_of="pixels")
def encode_image(
    vae: Network,
    params: Params,
    pixels: jax.Array,
    noise: jax.Array | None,
    *,
    upcast: bool = False,
    scale: bool = True,
    normalize: bool = False,
) -> jax.Array:
    """Pictures b H W 3 in [-1, 1] to latents b h w z, float32.

    noise: b h w z, which latents of the autoencoder's distribution to take (more rows than pictures
    repeat these); None takes the most likely ones. scale, normalize: see `latents.scale_latents`.
    """
    params = _upcast(params) if upcast else params
    encoded = vae.apply(params, split_images(pixels), method="encode")
    encoded = jax.tree.map(lambda x: x[: len(pixels)], encoded)
    mean, logvar = encoded if isinstance(encoded, tuple) else (encoded, None)
    z = mean.astype(jnp.float32)
    if noise is not None:
        z = repeat_to(z, noise.shape[0])
        if logvar is not None:
            z = sample_latents(z, repeat_to(logvar.astype(jnp.float32), z.shape[0]), noise)
    return scale_latents(vae.config, z, normalize=normalize) if scale else z


@functools.partial(Program, static=("vae", "upcast", "normalize"), shape_of="latents")
def decode(
    vae: Network,
    params: Params,
    latents: jax.Array,
    condition: DecoderCondition | None = None,
    *,
    upcast: bool,
    normalize: bool,
) -> tuple[jax.Array, jax.Array]:
    """Latents b h w z to pictures b H W 3 in [0, 1], float32, and whether each is finite, b."""
    images = decode_pixels(vae, params, latents, condition, upcast=upcast, normalize=normalize)
    finite = jnp.isfinite(images).all((1, 2, 3)) & jnp.isfinite(latents).all((1, 2, 3))
    return to_unit(images), finite


@functools.partial(Program, static=("vae", "upcast", "normalize"), shape_of="latents")
def decode_pixels(
    vae: Network,
    params: Params,
    latents: jax.Array,
    condition: DecoderCondition | None = None,
    *,
    upcast: bool,
    normalize: bool,
) -> jax.Array:
    """Latents b h w z to pictures b H W 3 around [-1, 1], float32."""
    params = _upcast(params) if upcast else params
    z = unscale_latents(vae.config, latents, normalize=normalize)
    shown = {} if condition is None else condition._asdict()
    return vae.apply(params, z, method="decode", **shown).astype(jnp.float32)


@functools.partial(jax.jit, static_argnames=("order", "repeats"))
def stack_branches(
    branches: tuple[Any, ...], *, order: tuple[int | None, ...], repeats: int
) -> tuple[jax.Array, ...]:
    """What some prompts became, as leaves of `Conditions`: (n repeats) k ....

    branches: per branch a tuple of arrays n ... (context, pooled). order: which of them each of the
    k branches takes; None stands for zeros. Each prompt's copies stand together.
    """

    def one(*leaves: jax.Array) -> jax.Array:
        chosen = [jnp.zeros_like(leaves[0]) if i is None else leaves[i] for i in order]
        return jnp.repeat(jnp.stack(chosen, axis=1), repeats, axis=0)

    return jax.tree.map(one, *branches)


def batch_plans(plans: list[Plan]) -> Plan:
    """Plans of one shape as one plan, in which every image keeps its own sampler and inputs.

    Keys, not handed-in noise, must be their randomness.
    """

    def join(axis: int, trees: list[Any]) -> Any:
        return jax.tree.map(lambda *leaves: jnp.concatenate(leaves, axis), *trees)

    sizes = [plan.latents.shape[0] for plan in plans]
    spread_rows = [
        jax.tree.map(lambda c, b=b: jnp.repeat(jnp.asarray(c)[:, None], b, 1), plan.step_inputs)
        for plan, b in zip(plans, sizes)
    ]
    tables = [plan.table for plan, b in zip(plans, sizes) for _ in range(b)]
    return Plan(
        join(0, [plan.latents for plan in plans]),
        join(0, [plan.conditions for plan in plans]),
        stack_tables(tables),
        join(1, spread_rows),
        jnp.concatenate([plan.noise for plan in plans]),
        None if plans[0].inpainting is None else join(0, [plan.inpainting for plan in plans]),
    )


@functools.lru_cache(64)
def device_table(schedule: Schedule) -> Table:
    """The schedule's table, on the device once for all calls."""
    # Also where a call is only traced: the cache must hold arrays.
    with jax.ensure_compile_time_eval():
        return jax.device_put(schedule.table())


@functools.partial(jax.jit, static_argnums=1)
def tile(x: jax.Array, b: int) -> jax.Array:
    """x repeated along its first axis, as a whole, until there are b. Float32."""
    return repeat_to(x.astype(jnp.float32), b)


@jax.jit
def join_channels(mask: jax.Array, latents: jax.Array) -> jax.Array:
    """An inpainting network's further input, b 1 h w c+1: the mask, then the masked latents."""
    return jnp.concatenate([mask, latents], axis=-1)[:, None]


def repeat_to(x: jax.Array, b: int) -> jax.Array:
    """x repeated along its first axis, as a whole, until there are b."""
    return x if x.shape[0] == b else jnp.tile(x, (b // x.shape[0], *(1,) * (x.ndim - 1)))


def _upcast(params: Params) -> Params:
    """Float16 parameters in float32, others as they are."""
    half = jax.tree.leaves(params)[0].dtype == jnp.float16
    return cast_params(params, jnp.float32) if half else params
