"""A whole call as one pure function of (parameters, inputs), for jit, vmap and grad."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.export
import jax.numpy as jnp
import msgspec

from diffusax.models.adapters.image_prompts import ImageLayers
from diffusax.models.adapters.low_rank import Layers
from diffusax.models.network import Network, Params
from diffusax.pipelines.components.components import Components
from diffusax.pipelines.families import Denoiser, Family
from diffusax.pipelines.pipeline.call import prepare_call
from diffusax.pipelines.plan.arguments import Call
from diffusax.pipelines.plan.plan import (
    Conditions,
    DecoderCondition,
    Decoding,
    HiddenLayers,
    ImageSpans,
    Inpainting,
    Plan,
    Prompt,
    StepInputs,
    TextImages,
    Tokens,
)
from diffusax.pipelines.run import autoencoding
from diffusax.pipelines.run.sample import LoadedDenoiser, differentiably, sample
from diffusax.pipelines.tasks.prompts import (
    encode_adapted,
    given_embeds,
    split_groups,
    stack_prompts,
    token_groups,
)
from diffusax.pipelines.tasks.tasks import Task
from diffusax.runtime.programs.program import Program
from diffusax.runtime.programs.room import make_room
from diffusax.runtime.switches import (
    call_under_own_switches,
    in_auto_axes,
    is_double,
    is_traced,
    standard_promotion,
)
from diffusax.samplers import Table


class Inputs(NamedTuple):
    """The inputs of `generate_fn` besides parameters: arrays, and `decoding`, which is static.

    ids: for each text encoder g n w t, the tokens of the prompts and, where g is 2, of the negative
    prompts; texts that are given as embeddings are left out.
    plan: the run. Its table has no padding, so that the number of rows is static and the loop
    differentiable in reverse; its context is computed from the ids and the embeddings.
    decoder_condition, decoding: see `PreparedRun`.
    embeds: the call's embeddings, if any, under the names of its arguments: prompt_embeds n s d,
    pooled_prompt_embeds n p, and their negative_ forms.
    lengths: g n, the number of tokens that are not padding, where the family has it.
    layers: the hidden states of a language model that the call asks for.
    images: those that the texts speak of, whose arrays begin with g n, too.
    adapters: the layers of the call's adapters by component, text encoders among them; their
    weights are those in the first row of the plan's step inputs.
    ip_adapters: the layers of the IP-Adapters, whose images are in the plan's conditions.
    """

    ids: tuple[Any, ...]
    plan: Plan
    decoder_condition: DecoderCondition | None
    embeds: dict[str, Any]
    decoding: Decoding
    lengths: Any = None
    adapters: Mapping[str, Layers] | None = None
    ip_adapters: tuple[ImageLayers, ...] = ()
    layers: HiddenLayers | None = None
    images: TextImages | None = None


_TUPLES = (Inputs, Plan, Conditions, Table, StepInputs, Inpainting, DecoderCondition, TextImages)
for _tuple in _TUPLES:
    jax.export.register_namedtuple_serialization(
        _tuple, serialized_name=f"diffusax.{_tuple.__name__}"
    )
for _static in (Decoding, HiddenLayers, ImageSpans):
    jax.export.register_pytree_node_serialization(
        _static,
        serialized_name=f"diffusax.{_static.__name__}",
        serialize_auxdata=msgspec.json.encode,
        deserialize_auxdata=functools.partial(msgspec.json.decode, type=_static),
    )


def prepare_inputs(c: Components, task: Task, call: Call) -> Inputs:
    """Returns the inputs of `generate_fn` for a call.

    Raises:
        ValueError: the call needs what a pure function of arrays cannot do.
    """
    refused = {
        "callback_on_step_end": (call.callback_on_step_end, "change its inputs instead"),
        "noise='torch'": (call.noise != "jax", "give seed, or latents with PyTorch's numbers"),
        "prompt_weighting": (call.prompt_weighting, "give prompt_embeds of pipe.encode_prompt"),
        "clip_skip": (call.clip_skip, "give prompt_embeds of pipe.encode_prompt"),
    }
    for name, (given, mend) in refused.items():
        if given:
            raise ValueError(f"generate_fn, for which inputs are prepared, has no {name}; {mend}")
    # A caller that jits generate_fn compiles next, where nothing here can make room.
    make_room()
    run = prepare_call(task, c, call)
    n, guided = len(run.schedule), bool(run.weights)
    columns = run.plan.table, run.plan.step_inputs
    table, inputs = jax.tree.map(lambda column: jnp.asarray(column[:n]), columns)
    plan = run.plan._replace(table=table, step_inputs=inputs)
    embeds = {
        f"{prefix}{name}": leaf
        for prefix, leaves in given_embeds(c, call, guided=guided).items()
        for name, leaf in zip(c.family.embeds, leaves)
    }
    tokens = token_groups(c, call, guided=guided)
    shown, decoding = run.decoder_condition, run.decoding
    low_rank = c.adapters.stacked(c, run.loras) if run.loras else None
    rest = tokens.lengths, low_rank, run.ip_adapters, tokens.layers, tokens.images
    found = Inputs(tokens.ids, plan, shown, embeds, decoding, *rest)
    # A caller who forbids implicit transfers may jit generate_fn.
    return jax.tree.map(jnp.asarray, found)


def generate_fn(c: Components) -> Callable[..., Any]:
    """Returns the function (params, inputs) -> images b H W 3 in [0, 1], float32.

    Where the plan has hooks, it returns the pair of the images and of what the hooks have kept. It
    also takes rematerialize, which is static: whether a gradient computes each row's prediction
    again (`jax.checkpoint`) instead of keeping its activations in memory, which is the default.
    """
    names = (encoder.name for encoder in c.family.text_encoders if encoder.name in c.networks)
    encoders = tuple((name, c.networks[name]) for name in names)
    vae = c.autoencoder_name, c.autoencoder
    return functools.partial(_run, c.family, encoders, c.denoiser, vae)


def _run(*args: Any, rematerialize: bool = True) -> Any:
    """Runs `_generate`, compiled unless the caller is being traced."""
    _check(*args)
    *_, params, inputs = args
    if not is_traced(args):
        return call_under_own_switches(is_double(params), _compiled, *args, rematerialize)
    with standard_promotion():
        generate = functools.partial(_generate, rematerialize=rematerialize)
        return in_auto_axes(generate, *args, rows=inputs)


def _check(
    family: Family, encoders: Any, denoiser: Denoiser, vae: Any, params: Any, inputs: Any
) -> None:
    """Raises ValueError unless params and inputs are those of `generate_fn`."""
    if not isinstance(inputs, Inputs):
        raise ValueError(
            "inputs must be those that pipe.prepare_inputs returns (got "
            f"{type(inputs).__name__}); generate_fn takes (params, inputs)"
        )
    encode = [name for name, _ in encoders] if inputs.ids else []
    wanted = [*encode, *denoiser.components, *([] if vae[0] is None else [vae[0]])]
    missing = [n for n in wanted if not isinstance(params, Mapping) or n not in params]
    if missing:
        raise ValueError(
            f"params must have the parameters of {', '.join(wanted)}, as pipe.params has (lacks "
            f"{', '.join(missing)})"
        )
    noise, shape = inputs.plan.noise, jnp.shape(inputs.plan.latents)
    keys = jnp.issubdtype(noise.dtype, jax.dtypes.prng_key)
    if noise.shape != (shape[:1] if keys else shape):
        raise ValueError(
            f"inputs.plan.noise must be a random key of jax.random.key for each of the {shape[0]} "
            f"images, such as jax.random.split(key, {shape[0]}) (got {noise.dtype} of shape "
            f"{noise.shape})"
        )


def _generate(
    family: Family,
    encoders: tuple[tuple[str, Network], ...],
    denoiser: Denoiser,
    vae: tuple[str | None, Network],
    params: Params,
    inputs: Inputs,
    rematerialize: bool,
) -> Any:
    plan = inputs.plan
    found = _embed(family, encoders, params, inputs)
    if found:
        plan = plan._replace(conditions=_told(plan, found))
    rows = plan.table.timestep.shape[0]
    if inputs.adapters is not None:
        params = {**params, "adapters": inputs.adapters}
    if inputs.ip_adapters:
        params = {**params, "ip_adapters": inputs.ip_adapters}
    loop = differentiably(rows, rematerialize=rematerialize)
    latents, kept = sample(LoadedDenoiser(denoiser, params), plan, loop)
    options = dataclasses.asdict(inputs.decoding)
    shown = inputs.decoder_condition
    name, network = vae
    decoder = {} if name is None else params[name]
    images, _ = autoencoding.decode(network, decoder, latents, shown, **options)
    return images if kept is None else (images, kept)


def _told(plan: Plan, found: dict[str, Prompt]) -> Conditions:
    """Returns the plan's conditions with the embeddings of prompts."""
    repeats = plan.latents.shape[0] // found[""].context.shape[0]
    branches = plan.step_inputs.weights.shape[-1] + 1
    prompt = stack_prompts(found, branches=branches, repeats=repeats)
    return plan.conditions.told(prompt)


_compiled = Program(_generate, static=("family", "encoders", "denoiser", "vae", "rematerialize"))


def _embed(
    family: Family, encoders: tuple[tuple[str, Network], ...], params: Params, inputs: Inputs
) -> dict[str, Prompt]:
    """Returns the embeddings of prompts ("") and, where there are some, negative prompts."""
    embeds, found = inputs.embeds, {}
    for prefix in ("", "negative_"):
        if f"{prefix}prompt_embeds" in embeds:
            found[prefix] = Prompt(*(embeds[f"{prefix}{name}"] for name in family.embeds))
    if not inputs.ids:
        return found
    groups, n = inputs.ids[0].shape[:2]
    own = {"lengths": inputs.lengths, "layers": inputs.layers, "images": inputs.images}
    given = Tokens(inputs.ids, **own)
    tokens = jax.tree.map(lambda x: x.reshape(groups * n, *x.shape[2:]), given)
    adapters: tuple[Layers | None, ...] = ()
    if inputs.adapters is not None:
        adapters = tuple(inputs.adapters.get(name) for name, _ in encoders)
        tokens = tokens._replace(adapters=_text_weights(inputs.plan, groups, n))
    encoded = encode_adapted(
        family,
        tuple(network for _, network in encoders),
        tuple(params[name] for name, _ in encoders),
        tokens,
        adapters,
    )
    texts = [prefix for prefix in ("", "negative_") if prefix not in found]
    return found | dict(zip(texts, split_groups(encoded, groups)))


def _text_weights(plan: Plan, groups: int, n: int) -> jax.Array:
    """Returns the weights of adapters for n prompts and negative prompts, (g n) a."""
    weights = jnp.asarray(plan.step_inputs.adapters)[0]
    if weights.ndim == 2:
        # The images of a prompt stand together.
        weights = weights[:: len(weights) // n]
    return jnp.tile(jnp.broadcast_to(weights, (n, weights.shape[-1])), (groups, 1))
