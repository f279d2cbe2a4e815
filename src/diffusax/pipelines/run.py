"""Running a job: in one dispatch, or in pieces where somebody watches."""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm.auto import tqdm

from diffusax.extras import require_extra
from diffusax.models.tiling import tiled_decode
from diffusax.pictures import to_html, to_pil
from diffusax.pipelines import programs
from diffusax.pipelines.arguments import Call
from diffusax.pipelines.components import Components
from diffusax.pipelines.guidance import per_row
from diffusax.pipelines.noise import TorchNoise
from diffusax.pipelines.tasks import Job, Task, check_latents

# A piece shorter than this is made twice as long, so that watching costs little.
_SECONDS_PER_PIECE = 0.1


def draw(pipe: Any, task: Task, call: Call) -> Any:
    """The pictures of a call, in the form that `output_type` asks for.

    pipe: handed to callbacks, which may set its `_interrupt` and `_guidance_scale`.

    Raises:
        ValueError: an argument that cannot be.
        FloatingPointError: latents or pictures are not finite.
    """
    c: Components = pipe.parts
    job = task(c, call)
    # Once, not at every piece: pictures of ControlNets are megabytes.
    job.plan = jax.device_put(job.plan)
    pipe.begin_run(call, job)
    state = run_rows(pipe, c, job, call)
    options = {"tiled": pipe.vae.tiling, "normalized": job.normalized}
    images = output(c, programs.final_latents(state), call.output_type, **options)
    return job.finish(images) if job.finish is not None else images


def run_rows(pipe: Any, c: Components, job: Job, call: Call) -> jax.Array:
    """All rows of the job; the sampler's last state, 6 b h w c."""
    denoiser, params = c.denoiser, c.denoiser_params
    n, shape = len(job.schedule), job.plan.latents.shape[1:]
    state = programs.first_state(job.plan.latents)
    callback = call.callback_on_step_end
    draws = job.schedule.draws_noise
    hand_in = isinstance(job.noise, TorchNoise) and bool(draws.any())
    bar = tqdm(total=n, **{"leave": True, **pipe.progress_bar_options, "desc": "compiling"})
    if bar.disable and callback is None and not hand_in:
        return programs.denoise(denoiser, params, state, job.plan, np.int32(0), np.int32(n))
    row, size = 0, 1
    with bar:
        while row < n and not pipe.interrupt:
            stop = row + 1 if callback is not None or hand_in else min(row + size, n)
            plan, began = job.plan, time.perf_counter()
            if isinstance(job.noise, TorchNoise) and hand_in:
                plan = plan._replace(noise=job.noise.row(shape, draws=bool(draws[row])))
            state = programs.denoise(denoiser, params, state, plan, np.int32(row), np.int32(stop))
            if callback is not None:
                state, stopped = call_back(pipe, c, job, call, row, state)
                if stopped:
                    break
            if not bar.disable:
                state.block_until_ready()
                _advance(bar, stop - row, first=row == 0, desc=pipe.progress_bar_options)
                size *= 1 + (time.perf_counter() - began < _SECONDS_PER_PIECE)
            row = stop
    return state


def _advance(bar: Any, rows: int, *, first: bool, desc: dict[str, Any]) -> None:
    bar.update(rows)
    if first:
        # The first piece may have compiled; the estimate of what is left must not count that.
        bar.set_description(desc.get("desc"))
        bar.unpause()


TENSOR_INPUTS = (
    "latents",
    "prompt_embeds",
    "negative_prompt_embeds",
    "add_text_embeds",
    "add_time_ids",
    "negative_pooled_prompt_embeds",
    "negative_add_time_ids",
    "image",
    "image_latents",
    "mask",
    "masked_image_latents",
)
"""What callback_on_step_end_tensor_inputs may name, as in diffusers."""


def call_back(
    pipe: Any, c: Components, job: Job, call: Call, row: int, state: jax.Array
) -> tuple[jax.Array, bool]:
    """Calls callback_on_step_end and takes what it changed; whether it wants to stop.

    Raises:
        ValueError: it asks for or returns a tensor that is not there, or of another shape.
    """
    names = call.callback_on_step_end_tensor_inputs or ["latents"]
    tensors = {name: _tensor(name, job, state) for name in names}
    timestep = float(job.schedule.timesteps[row])
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
    if scale != call.guidance_scale and job.weights:
        _reweigh(job, call, scale)
    return state, isinstance(result, bool | np.bool_) and not result


def _tensor(name: str, job: Job, state: jax.Array) -> Any:
    conditions = job.plan.conditions
    added = conditions.added or {}
    match name:
        case "latents":
            return jnp.transpose(state[0], (0, 3, 1, 2))
        case "prompt_embeds":
            return _negative_first(conditions.context)
        case "negative_prompt_embeds" if job.weights:
            return conditions.context[:, 1]
        case "add_text_embeds" if "text_embeds" in added:
            return _negative_first(added["text_embeds"])
        case "negative_pooled_prompt_embeds" if "text_embeds" in added and job.weights:
            return added["text_embeds"][:, 1]
        case "add_time_ids" if "time_ids" in added:
            return _negative_first(added["time_ids"])
        case "negative_add_time_ids" if "time_ids" in added and job.weights:
            return added["time_ids"][:, 1]
        case "image" if conditions.control:
            return jnp.transpose(conditions.control[0][:, 0], (0, 3, 1, 2))
        case "image_latents" if conditions.channels is not None:
            return jnp.transpose(_negative_first(conditions.channels), (0, 3, 1, 2))
        case "mask" if job.plan.known is not None:
            return jnp.transpose(jnp.asarray(job.plan.known.mask), (0, 3, 1, 2))
        case "mask" if conditions.channels is not None:
            return jnp.transpose(conditions.channels[:, 0, ..., :1], (0, 3, 1, 2))
        case "masked_image_latents" if conditions.channels is not None:
            return jnp.transpose(conditions.channels[:, 0, ..., 1:], (0, 3, 1, 2))
        case _ if name in TENSOR_INPUTS:
            return None
    raise ValueError(
        f"callback_on_step_end_tensor_inputs may name {', '.join(TENSOR_INPUTS)} (got {name!r})"
    )


def _take(name: str, value: Any, job: Job, state: jax.Array) -> jax.Array:
    if name == "latents":
        b, h, w, c = state.shape[1:]
        return state.at[0].set(check_latents(value, (b, c, h, w)).transpose(0, 2, 3, 1))
    fields = {"prompt_embeds": "context", "add_text_embeds": "text_embeds"}
    fields |= {"add_time_ids": "time_ids"}
    if name not in fields:
        raise ValueError(
            f"callback_on_step_end may change latents, {', '.join(fields)} (got {name!r})"
        )
    conditions, field = job.plan.conditions, fields[name]
    if field == "context":
        changed = conditions._replace(context=_branches(name, value, conditions.context))
    else:
        added = dict(conditions.added or {})
        if field not in added:
            raise ValueError(f"{name} is nothing that this pipeline's UNet is given")
        added[field] = _branches(name, value, added[field])
        changed = conditions._replace(added=added)
    job.plan = job.plan._replace(conditions=changed)
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
    c: Components, latents: jax.Array, output_type: str, *, tiled: bool, normalized: bool = True
) -> Any:
    """Latents b h w c as what the call asked for.

    Raises:
        FloatingPointError: they, or the pictures, are not finite.
    """
    if output_type == "latent":
        if not np.isfinite(np.asarray(latents)).all():
            raise FloatingPointError(_not_finite(c, "latents"))
        return jnp.transpose(latents, (0, 3, 1, 2))
    images, finite = decode_images(c, latents, tiled=tiled, normalized=normalized)
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
    c: Components, latents: Any, *, tiled: bool = False, normalized: bool = True
) -> tuple[Any, Any]:
    """Latents b h w c to pictures b H W 3 in [0, 1] and whether each is finite, b.

    normalized: see `Job.normalized`.
    """
    network, params = c.networks["vae"], c.params["vae"]
    options = {"upcast": c.upcasts, "normalize": normalized and c.family.normalizes_latents}
    side = getattr(network.config, "sample_size", 512)
    tile = (side[0] if isinstance(side, tuple) else side) // c.factor
    if not tiled or max(latents.shape[1:3]) <= tile:
        return programs.decode(network, params, latents, **options)

    def decode(part: np.ndarray) -> jax.Array:
        return programs.decode_pixels(network, params, part, **options)

    images = tiled_decode(decode, np.asarray(latents), tile=tile, factor=c.factor)
    return jnp.asarray(np.clip(images / 2 + 0.5, 0, 1)), np.isfinite(images).all((1, 2, 3))


def _not_finite(c: Components, what: str) -> str:
    def dtype(name: str) -> Any:
        return jax.tree.leaves(c.params[name])[0].dtype

    if what == "pictures":
        return (
            f"the decoded pictures are not finite in {dtype('vae')}: load the autoencoder in "
            "float32 with from_pretrained(..., vae_dtype='float32')"
        )
    return (
        f"the latents are not finite in {dtype('unet')}: use dtype='bfloat16' or 'float32', and "
        "check that the scheduler's prediction_type is the model's"
    )


@dataclasses.dataclass
class ImagePipelineOutput:
    """What a call gives: `images`, also as the first of a tuple.

    images: PIL images, or an array: b h w 3 in [0, 1] ("pt": b 3 h w), or latents b c h w.
    nsfw_content_detected: None, for there is no safety checker.
    """

    images: Any
    nsfw_content_detected: list[bool] | None = None

    def __getitem__(self, index: int | str) -> Any:
        """As in diffusers: by position or by name."""
        if isinstance(index, str):
            return getattr(self, index)
        return self.to_tuple()[index]

    def to_tuple(self) -> tuple[Any, ...]:
        """The fields that are there."""
        fields = (self.images, self.nsfw_content_detected)
        return tuple(field for field in fields if field is not None)

    def _repr_html_(self) -> str | None:
        """The pictures, in a notebook."""
        return to_html(self.images) if _are_pictures(self.images) else None


def _are_pictures(images: Any) -> bool:
    return isinstance(images, Sequence) and all(hasattr(image, "save") for image in images)
