"""Running a job: in one dispatch, or in pieces where somebody watches."""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm.auto import tqdm

from diffusax.extras import require_extra
from diffusax.images.pictures import to_pil
from diffusax.models.freeu import freeu_rows
from diffusax.models.latents import to_unit
from diffusax.models.tiling import tiled_decode
from diffusax.pipelines import programs
from diffusax.pipelines.arguments import Call
from diffusax.pipelines.components import Components
from diffusax.pipelines.guidance import per_row
from diffusax.pipelines.placement import put_plan
from diffusax.pipelines.programs import Kept, Plan
from diffusax.pipelines.tasks import Job, check_latents
from diffusax.runtime.brownian import BrownianNoise
from diffusax.runtime.images import own_images, put
from diffusax.runtime.mesh import in_mesh
from diffusax.runtime.noise import TorchNoise

# A piece shorter than this is made twice as long, so that watching costs little.
_SECONDS_PER_PIECE = 0.1


def run_rows(pipe: Any, job: Job, call: Call) -> jax.Array:
    """All rows of the job; the latents after them, b h w c.

    pipe: handed to callbacks, which may set its `_interrupt` and `_guidance_scale`.

    Raises:
        ValueError: a callback returned what cannot be.
    """
    mesh, n, (images, *shape) = pipe.parts.mesh, len(job.schedule), job.plan.latents.shape
    # Once, not at every piece.
    source, placed = job.plan, _placed(pipe.parts, job.plan)
    state = programs.first_state(placed.latents)
    callback = call.callback_on_step_end
    row_noise = _row_noise(job, (images, *shape))
    bar = tqdm(total=n, **{"leave": True, **pipe.progress_bar_options, "desc": "compiling"})
    # Processes that share a mesh must dispatch alike, whatever their clocks and bars say.
    shared = mesh is not None and mesh != mesh.local_mesh
    if (bar.disable or shared) and callback is None and row_noise is None:
        state = denoise_plan(pipe.parts, state, placed, 0, n)
        return own_images(mesh, programs.final_latents(state), images)
    row, size = 0, 1
    with bar:
        while row < n and not pipe.interrupt:
            stop = row + 1 if callback is not None or row_noise is not None else min(row + size, n)
            began = time.perf_counter()
            if job.plan is not source:
                source, placed = job.plan, _placed(pipe.parts, job.plan, placed)
            plan = placed
            if row_noise is not None:
                plan = plan._replace(noise=put(mesh, row_noise(row)))
            state = denoise_plan(pipe.parts, state, plan, row, stop)
            if callback is not None:
                own = state if mesh is None else own_images(mesh, state, images, 1)
                changed, stopped = call_back(pipe, job, call, row, own)
                state = state if changed is own else put(mesh, changed, 1)
                if stopped:
                    break
            if not bar.disable:
                state.block_until_ready()
                bar.update(stop - row)
                if row == 0:
                    # It may have compiled; the estimate of what is left must not count that.
                    bar.set_description(pipe.progress_bar_options.get("desc"))
                    bar.unpause()
                size *= 1 + (time.perf_counter() - began < _SECONDS_PER_PIECE)
            row = stop
    return own_images(mesh, programs.final_latents(state), images)


def _row_noise(job: Job, shape: tuple[int, int, int, int]) -> Callable[[int], Any] | None:
    """PyTorch's numbers for each row, b h w c, where the call asks for them and rows draw any."""
    motion, noise, draws = job.schedule.motion, job.noise, job.schedule.draws_noise
    if not isinstance(noise, TorchNoise) or not draws.any():
        return None
    if motion is not None and motion.seed is not None:
        return BrownianNoise(motion, shape).row
    return lambda row: noise.row(shape[1:], draws=bool(draws[row]))


def _placed(c: Components, plan: Plan, before: Plan | None = None) -> Plan:
    """The plan on the devices, control pictures embedded, as they were in the plan before it."""
    if not plan.conditions.control:
        return put_plan(c.mesh, plan)
    if before is not None:
        without = plan._replace(conditions=plan.conditions._replace(control=()))
        placed, hints = put_plan(c.mesh, without), before.conditions.control
        return placed._replace(conditions=placed.conditions._replace(control=hints))
    with in_mesh(c.mesh):
        return programs.with_control(c.denoiser, c.denoiser_params, put_plan(c.mesh, plan))


def denoise_plan(c: Components, state: jax.Array, plan: Plan, start: int, stop: int) -> jax.Array:
    """Rows start..stop of a plan that lies on the devices; the sampler's state, 6 b h w c."""
    rows = np.int32(start), np.int32(stop)
    with in_mesh(c.mesh):
        return programs.denoise(c.denoiser, c.denoiser_params, state, plan, *rows)


_PROMPTS = {
    "prompt_embeds": "context",
    "add_text_embeds": "text_embeds",
    "add_time_ids": "time_ids",
}
"""What callbacks may read of all branches, and change; by diffusers' names."""
_NEGATIVES = {
    "negative_prompt_embeds": "context",
    "negative_pooled_prompt_embeds": "text_embeds",
    "negative_add_time_ids": "time_ids",
}
_PICTURES = ("latents", "image", "image_latents", "mask", "masked_image_latents")


def call_back(
    pipe: Any, job: Job, call: Call, row: int, state: jax.Array
) -> tuple[jax.Array, bool]:
    """Calls callback_on_step_end and takes what it changed; whether it wants to stop.

    Raises:
        ValueError: it asks for or returns a tensor that is not there, or of another shape.
    """
    names = call.callback_on_step_end_tensor_inputs or ["latents"]
    tensors = {name: _tensor(name, job, state) for name in names}
    timestep, freeu = float(job.schedule.timesteps[row]), pipe.parts.freeu
    result = call.callback_on_step_end(pipe, row, timestep, dict(tensors))
    if isinstance(result, dict):
        for name, value in result.items():
            if value is not tensors.get(name):
                state = _take(name, value, job, state)
    elif result is not None and not isinstance(result, bool | np.bool_):
        raise ValueError(
            f"callback_on_step_end must return a dictionary, a boolean or None (got {result!r})"
        )
    scale = pipe.guidance_scale
    if job.weights and scale != (call.guidance_scale if job.scale is None else job.scale):
        _reweigh(job, call, scale)
        job.scale = scale
    if pipe.parts.freeu != freeu:
        knobs = job.plan.knobs
        numbers = freeu_rows(pipe.parts.freeu, len(knobs.rescale))
        job.plan = job.plan._replace(knobs=knobs._replace(freeu=numbers))
    return state, isinstance(result, bool | np.bool_) and not result


def _tensor(name: str, job: Job, state: jax.Array) -> Any:
    """What callbacks are handed under diffusers' name; None where the run has no such thing."""
    conditions, known = job.plan.conditions, job.plan.known
    if field := (_PROMPTS | _NEGATIVES).get(name):
        leaf = {"context": conditions.context, **(conditions.added or {})}.get(field)
        if leaf is None or name in _PROMPTS:
            return None if leaf is None else _embeddings(_negative_first(leaf))
        return _embeddings(leaf[:, 1]) if job.weights else None
    if name not in _PICTURES:
        names = ", ".join((*_PROMPTS, *_NEGATIVES, *_PICTURES))
        raise ValueError(f"callback_on_step_end_tensor_inputs may name {names} (got {name!r})")
    picture: Any = None
    if name == "latents":
        picture = state[0]
    elif name == "image":
        picture = conditions.control[0][:, 0] if conditions.control else None
    elif name == "mask" and known is not None:
        picture = known.mask
    elif conditions.channels is not None:
        picture = {
            "image_latents": _negative_first(conditions.channels),
            "mask": conditions.channels[:, 0, ..., :1],
            "masked_image_latents": conditions.channels[:, 0, ..., 1:],
        }[name]
    return None if picture is None else jnp.transpose(jnp.asarray(picture), (0, 3, 1, 2))


class Embeddings(np.ndarray):
    """Embeddings as callbacks are handed them: read-only, with what diffusers' own examples use."""

    def chunk(self, chunks: int, dim: int = 0) -> list[np.ndarray]:
        """Parts of one size along an axis, the last one smaller if need be, as torch.chunk."""
        size = -(-self.shape[dim] // chunks)
        return np.split(self, range(size, self.shape[dim], size), axis=dim)


def _embeddings(leaf: Any) -> Embeddings:
    return np.asarray(leaf).view(Embeddings)


def _take(name: str, value: Any, job: Job, state: jax.Array) -> jax.Array:
    """The state and, in the job, the plan with what a callback changed."""
    if name == "latents":
        return state.at[0].set(check_latents(value, *state.shape[1:]))
    if name not in _PROMPTS:
        names = ", ".join(("latents", *_PROMPTS))
        raise ValueError(f"callback_on_step_end may change {names} (got {name!r})")
    conditions, field = job.plan.conditions, _PROMPTS[name]
    leaves = {"context": conditions.context, **(conditions.added or {})}
    if field not in leaves:
        raise ValueError(f"{name} is nothing that this pipeline's UNet is given")
    leaves[field] = _branches(name, value, leaves[field])
    context, added = leaves.pop("context"), leaves or None
    job.plan = job.plan._replace(conditions=conditions._replace(context=context, added=added))
    return state


def _negative_first(leaf: Any) -> jax.Array:
    """b k ... -> (k b) ... in diffusers' order: the negative prompts, then the prompts."""
    leaf = jnp.asarray(leaf)
    return jnp.concatenate([leaf[:, j] for j in reversed(range(leaf.shape[1]))])


def _branches(name: str, value: Any, like: Any) -> Any:
    """The inverse of `_negative_first`; prompts without negative ones leave these as they are."""
    b, k = like.shape[:2]
    value = jnp.asarray(np.asarray(value, np.float32), like.dtype)
    if value.shape[1:] != like.shape[2:] or value.shape[0] not in (b, k * b):
        raise ValueError(
            f"{name} must keep the shape {(k * b, *like.shape[2:])} in callback_on_step_end "
            f"(got {value.shape})"
        )
    if value.shape[0] == b:
        return jnp.asarray(like).at[:, 0].set(value)
    return jnp.stack(jnp.split(value, k)[::-1], axis=1)


def _reweigh(job: Job, call: Call, scale: float) -> None:
    """A guidance scale that the callback set; 1 and less is no guidance from here on."""
    change = max(scale, 1.0) - (call.guidance_scale or 1.0)
    weights = (job.weights[0] + change, *job.weights[1:]) if scale > 1 else [0.0] * len(job.weights)
    knobs = job.plan.knobs
    interval = call.guidance_start, call.guidance_end
    table = per_row(weights, len(job.schedule), len(knobs.rescale), interval)
    job.plan = job.plan._replace(knobs=knobs._replace(weights=table))


def output(
    c: Components,
    latents: jax.Array,
    output_type: str,
    *,
    tiled: bool,
    normalized: bool = True,
    kept: Kept | None = None,
) -> Any:
    """Latents b h w c as what the call asked for.

    normalized, kept: see `Job`.

    Raises:
        FloatingPointError: they, or the pictures, are not finite.
    """
    if output_type == "latent":
        if not np.isfinite(np.asarray(latents)).all():
            raise FloatingPointError(_not_finite(c, "latents"))
        return jnp.transpose(latents, (0, 3, 1, 2))
    options = {"tiled": tiled, "normalized": normalized}
    images, finite = decode_images(c, latents, kept, **options)
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


def decode_images(
    c: Components,
    latents: Any,
    kept: Kept | None = None,
    *,
    tiled: bool = False,
    normalized: bool = True,
) -> tuple[Any, Any]:
    """Latents b h w c to pictures b H W 3 in [0, 1], and whether each is finite, b.

    normalized, kept: see `Job`.
    """
    options = dataclasses.asdict(c.decoding(normalized=normalized))
    if tiled:
        return _decode_tiles(c, latents, kept, **options)
    n, mesh = len(latents), c.local_mesh
    with in_mesh(mesh):
        padded = jax.tree.map(functools.partial(put, mesh), (latents, kept))
        decoded = programs.decode(c.networks["vae"], c.params["vae"], *padded, **options)
    images, finite = (own_images(mesh, x, n) for x in decoded)
    return images, finite


def _decode_tiles(
    c: Components, latents: Any, kept: Kept | None, **options: bool
) -> tuple[Any, Any]:
    """As `programs.decode`, in overlapping tiles where the pictures are large."""
    side = getattr(c.vae_config, "sample_size", 512)
    tile = (side[0] if isinstance(side, tuple) else side) // c.factor

    def decode(part: np.ndarray, *shown: np.ndarray) -> jax.Array:
        given = part, Kept(*shown) if shown else None
        with in_mesh(c.local_mesh):
            return programs.decode_pixels(c.networks["vae"], c.params["vae"], *given, **options)

    images = tiled_decode(decode, latents, *(kept or ()), tile=tile, factor=c.factor)
    return to_unit(jnp.asarray(images)), np.isfinite(images).all((1, 2, 3))


def _not_finite(c: Components, what: str) -> str:
    if what == "pictures":
        dtype = jax.tree.leaves(c.params["vae"])[0].dtype
        return (
            f"the decoded pictures are not finite in {dtype}: load the autoencoder in float32 "
            "with from_pretrained(..., vae_dtype='float32')"
        )
    return (
        f"the latents are not finite in {c.dtype}: use dtype='bfloat16' or 'float32', and check "
        "that the scheduler's prediction_type is the model's"
    )
