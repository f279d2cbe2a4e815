"""callback_on_step_end: passes the values of a run to callbacks, and takes their changes."""

import copy
import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from diffusax.boundary.convert import shortened
from diffusax.boundary.tensors import as_numpy, as_tensor, as_tensors, function_wants_tensors
from diffusax.models.adapters.freeu import freeu_rows
from diffusax.models.autoencoders.latents import LatentFormat
from diffusax.pipelines.components.components import Components
from diffusax.pipelines.families import Family
from diffusax.pipelines.families.policies import negatives_first, of_branch
from diffusax.pipelines.plan.arguments import Call, as_list, read_numbers
from diffusax.pipelines.plan.guidance import weights_by_row
from diffusax.pipelines.plan.plan import Conditions, PreparedRun
from diffusax.pipelines.run.images import check_latents
from diffusax.pipelines.run.sample import OnRow

_NEGATIVES = {
    "negative_prompt_embeds": "context",
    "negative_pooled_prompt_embeds": "pooled",
    "negative_add_time_ids": "time_ids",
}
"""The negative prompts' conditions that callbacks may read, by diffusers' names."""
_IMAGES = (*("latents", "image", "image_latents", "mask", "masked_image_latents", "control_image"),)
"""The images that callbacks may read, by diffusers' names."""
_CHANGEABLE = ("latents", "mask", "control_image")


def row_callback(pipe: Any, call: Call) -> OnRow:
    """Returns the function for `run_plan` that calls a call's callback_on_step_end after each row.

    pipe: the pipeline, which is passed to the callback; it may set its `_guidance_scale`.
    """
    return functools.partial(_call_back, pipe, call)


def view_of(pipe: Any, c: Components) -> Any:
    """Returns a pipeline for one run beside others: it shares all but what belongs to the run.

    Its components are those that run, and the guidance scale, the number of timesteps and the wish
    to stop, which callbacks read and set, concern no other run.
    """
    view = copy.copy(pipe)
    vars(view).update(parts=c, _interrupt=False)
    return view


def _call_back(
    pipe: Any, call: Call, row: int, state: jax.Array, run: PreparedRun
) -> tuple[jax.Array, PreparedRun, bool]:
    """Calls the callback, applies its changes, and returns whether it asked to stop.

    Raises:
        ValueError: it asks for or returns a tensor that is not there, or of another shape.
    """
    names = call.callback_on_step_end_tensor_inputs or ["latents"]
    readable, form = pipe.family.callback_tensors, pipe.parts.latents
    tensors = {name: _tensor(name, pipe.family, run, state, form) for name in names}
    timestep, freeu = float(run.schedule.timesteps[row]), pipe.parts.freeu
    vars(pipe)["_current_timestep"] = timestep
    result, changed = _changes(pipe, call, row, timestep, tensors)
    vars(pipe)["_current_timestep"] = None
    for name, value in changed.items():
        state, run = _take(name, value, readable, run, state, form)
    scale = pipe.guidance_scale
    before = call.guidance_scale if run.guidance_scale is None else run.guidance_scale
    if run.weights and scale != before:
        run = _reweigh(run, call, pipe.parts, scale)
    if pipe.parts.freeu != freeu:
        rows = len(run.plan.step_inputs.rescale)
        run = _with_step_inputs(run, freeu=freeu_rows(pipe.parts.freeu, rows))
    return state, run, isinstance(result, bool | np.bool_) and not result


def _changes(
    pipe: Any, call: Call, row: int, timestep: float, tensors: Mapping[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Calls the callback, and returns its result and the values that it changed.

    It is given tensors of PyTorch where its module works with them, of which changes in place
    count as in diffusers.

    Raises:
        ValueError: its result is neither a dictionary nor a boolean.
    """
    callback, given, told = call.callback_on_step_end, dict(tensors), cast(Any, timestep)
    in_torch = pipe.tensors is None and function_wants_tensors(callback, call.tensors)
    if in_torch or pipe.tensors == "pt":
        given = as_tensors(given)
        whole = pipe.scheduler.whole_timesteps
        told = as_tensor(np.array(timestep, np.int64 if whole else np.float32))
    result = callback(pipe, row, told, dict(given))
    if not (result is None or isinstance(result, dict | bool | np.bool_)):
        raise ValueError(
            "callback_on_step_end must return a dictionary, a boolean or None (got "
            f"{shortened(result)})"
        )
    changed = {name: x for name, x in given.items() if not _equal(x, tensors[name])}
    if isinstance(result, dict):
        changed |= {name: x for name, x in result.items() if x is not given.get(name)}
    return result, changed


def _equal(value: Any, before: Any) -> bool:
    """Returns whether tensors that a callback was given have the values of before."""
    if value is before or value is None:
        return True
    if isinstance(value, list):
        return len(value) == len(before) and all(map(_equal, value, before))
    return np.array_equal(as_numpy(value), np.asarray(before))


def _with_step_inputs(run: PreparedRun, **changes: Any) -> PreparedRun:
    inputs = run.plan.step_inputs._replace(**changes)
    return dataclasses.replace(run, plan=run.plan._replace(step_inputs=inputs))


def _tensor(
    name: str, family: Family, run: PreparedRun, state: jax.Array, form: LatentFormat
) -> Any:
    """Returns the tensor of diffusers' name for callbacks; None where the run has none."""
    conditions, inpainting = run.plan.conditions, run.plan.inpainting
    readable = family.callback_tensors
    if field := {**readable, **_NEGATIVES}.get(name):
        leaf = _leaves(run).get(field)
        if leaf is None:
            return None
        lengths = conditions.lengths if field == "context" else None
        if name not in readable:
            return _embeddings(of_branch(leaf, lengths, 1)) if run.weights else None
        return _embeddings(family.callback_view(leaf, lengths))
    if name not in _IMAGES:
        names = ", ".join((*readable, *_NEGATIVES, *_IMAGES))
        raise ValueError(f"callback_on_step_end_tensor_inputs may name {names} (got {name!r})")
    if name == "latents":
        return form.outward(state[0])
    image: Any = None
    if name == "control_image":
        images = [_control_image(image, form) for image in conditions.control]
        return images if len(images) > 1 else next(iter(images), None)
    if name == "image":
        image = conditions.control[0][:, 0] if conditions.control else None
    elif name == "mask" and inpainting is not None:
        image = inpainting.mask
    elif conditions.channels is not None:
        image = {
            "image_latents": negatives_first(conditions.channels),
            "mask": conditions.channels[:, 0, ..., :1],
            "masked_image_latents": conditions.channels[:, 0, ..., 1:],
        }[name]
    return None if image is None else jnp.transpose(jnp.asarray(image), (0, 3, 1, 2))


def _control_image(image: jax.Array, form: LatentFormat) -> Any:
    """Returns what a ControlNet is given, b 1 h w c, as diffusers has it: latents or pixels."""
    image = jnp.asarray(image)[:, 0]
    if image.shape[-1] == form.channels:
        return form.outward(image)
    return jnp.transpose(image, (0, 3, 1, 2))


class Embeddings(np.ndarray):
    """Embeddings for callbacks: read-only arrays with the method that diffusers' examples use."""

    def chunk(self, chunks: int, dim: int = 0) -> list[np.ndarray]:
        """Splits along an axis into parts of one size, the last maybe smaller, as torch.chunk."""
        size = -(-self.shape[dim] // chunks)
        return np.split(self, range(size, self.shape[dim], size), axis=dim)


def _embeddings(given: Any) -> Any:
    if isinstance(given, list):
        return [_embeddings(one) for one in given]
    return np.asarray(given).view(Embeddings)


def _take(
    name: str,
    value: Any,
    readable: Mapping[str, str],
    run: PreparedRun,
    state: jax.Array,
    form: LatentFormat,
) -> tuple[jax.Array, PreparedRun]:
    """Returns the state and the run with a value that a callback changed."""
    if name == "latents":
        return state.at[0].set(check_latents(form, value, *state.shape[1:-1])), run
    plan = run.plan
    if name == "mask" and plan.inpainting is not None:
        mask = _like(name, value, plan.inpainting.mask)
        plan = plan._replace(inpainting=plan.inpainting._replace(mask=mask))
    elif name == "control_image" and plan.conditions.control:
        control = _take_control(value, plan.conditions.control, form)
        plan = plan._replace(conditions=plan.conditions._replace(control=control))
    elif name in readable:
        plan = plan._replace(conditions=_take_condition(name, value, readable[name], run))
    else:
        names = ", ".join((*_CHANGEABLE, *readable))
        raise ValueError(f"callback_on_step_end may change {names} (got {name!r})")
    return state, dataclasses.replace(run, plan=plan)


def _take_condition(name: str, value: Any, field: str, run: PreparedRun) -> Conditions:
    """Returns the conditions with a changed one, which ControlNets that read it are given, too."""
    conditions = run.plan.conditions
    leaf, own = _leaves(run).get(field), dict(conditions.added or {})
    if leaf is None:
        raise ValueError(f"{name} is nothing that this pipeline's denoiser is given")
    if field == "context" and conditions.lengths is not None:
        changed = _take_list(name, value, leaf, np.asarray(conditions.lengths))
    else:
        changed = _branches(name, value, leaf)
    if (shared := f"control_{field}") in own:
        own[shared] = changed[:, :1]
    if field not in conditions._fields:
        return conditions._replace(added={**own, field: changed})
    changes: dict[str, Any] = {field: changed, "added": own or None}
    return conditions._replace(**changes)


def _take_list(name: str, values: Any, like: Any, lengths: np.ndarray) -> jax.Array:
    """Returns embeddings b k s d with other ones of the prompts, a list of b arrays t d.

    lengths: b k.
    """
    shapes = [(int(length), like.shape[-1]) for length in lengths[:, 0]]
    given = [tuple(getattr(value, "shape", ())) for value in values]
    if given != shapes:
        raise ValueError(
            f"{name} must keep the shapes {shapes} in callback_on_step_end (got {given})"
        )
    changed = jnp.asarray(like)
    for i, value in enumerate(values):
        numbers = jnp.asarray(read_numbers(name, value), changed.dtype)
        changed = changed.at[i, 0, : len(numbers)].set(numbers)
    return changed


def _take_control(value: Any, like: tuple[Any, ...], form: LatentFormat) -> tuple[Any, ...]:
    """Returns the ControlNets' images, b 1 h w c each, that `_control_image` shows."""
    values = as_list(value)
    if len(values) != len(like):
        raise ValueError(f"control_image must have {len(like)} entries (got {len(values)})")
    found = []
    for one, image in zip(values, like):
        b, _, h, w, channels = image.shape
        if channels == form.channels:
            taken: Any = check_latents(form, one, b, h, w, name="control_image")
        else:
            taken = _like("control_image", one, image[:, 0])
        found.append(jnp.asarray(taken, image.dtype)[:, None])
    return tuple(found)


def _like(name: str, value: Any, like: Any) -> jax.Array:
    """Returns maps b c h w as b h w c of the shape and dtype of others."""
    value = read_numbers(name, value)
    wanted = tuple(like.shape[i] for i in (0, 3, 1, 2))
    if value.shape != wanted:
        raise ValueError(
            f"{name} must keep the shape {wanted} in callback_on_step_end (got {value.shape})"
        )
    return jnp.asarray(value.transpose(0, 2, 3, 1), like.dtype)


def _leaves(run: PreparedRun) -> dict[str, Any]:
    """Returns the denoiser's conditions of the prompts by the names of fields, b k ... ."""
    conditions = run.plan.conditions
    own = {"context": conditions.context, "pooled": conditions.pooled}
    return {**own, **(conditions.added or {})}


def _branches(name: str, value: Any, like: Any) -> Any:
    """Inverts `negatives_first`; where only prompts are given, the negative ones are unchanged."""
    b, k = like.shape[:2]
    value = jnp.asarray(read_numbers(name, value), like.dtype)
    if value.shape[1:] != like.shape[2:] or value.shape[0] not in (b, k * b):
        raise ValueError(
            f"{name} must keep the shape {(k * b, *like.shape[2:])} in callback_on_step_end "
            f"(got {value.shape})"
        )
    if value.shape[0] == b:
        return jnp.asarray(like).at[:, 0].set(value)
    return jnp.stack(jnp.split(value, k)[::-1], axis=1)


def _reweigh(run: PreparedRun, call: Call, c: Components, scale: float) -> PreparedRun:
    """Returns the run at a guidance scale that the callback set, which may turn guidance off."""
    weights, guidance = [0.0] * len(run.weights), c.family.guidance
    changed = dataclasses.replace(call, guidance_scale=scale)
    if run.reweigh is not None:
        weights = list(run.reweigh(max(guidance.scale(changed), 1.0)))
    elif now := guidance.weights(c, changed):
        (before,) = guidance.weights(c, call) or (0.0,)
        weights = [run.weights[0] + now[0] - before, *run.weights[1:]]
    rows = len(run.plan.step_inputs.rescale)
    table = weights_by_row(call, weights, run.schedule.timesteps, rows)
    return dataclasses.replace(_with_step_inputs(run, weights=table), guidance_scale=scale)
