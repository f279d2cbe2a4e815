"""Keys and values of the context: the same numbers, computed before the loop over the steps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.adapted import inputs_of, network_of

import diffusax
from diffusax.models.adapters.image_prompts import cross_attentions
from diffusax.models.adapters.low_rank import Adapters, LowRank, kernel_shapes
from diffusax.models.network import initialize_params
from diffusax.models.unet.context_keys import project_context
from diffusax.pipelines.run.programs import denoise
from diffusax.runtime.programs.program import recorded_requests


@pytest.mark.parametrize("name", ["unet", "unet_sd1"])
def test_a_network_with_keys_that_were_computed_before(name):
    network, given = network_of(name), inputs_of(name)
    params = initialize_params(network.shapes)
    keys = project_context(network, params, given["encoder_hidden_states"])
    assert list(keys) == list(cross_attentions(network))

    @jax.jit
    def run(context, keys):
        call = {**given, "encoder_hidden_states": context}
        return jax.tree.leaves(network.apply(params, **call, context_keys=keys))

    context = given["encoder_hidden_states"]
    for one, other in zip(run(context, None), run(jnp.zeros_like(context), keys), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    other = {path: (2 * k, v) for path, (k, v) in keys.items()}
    changed = run(context, other)
    assert max(np.abs(a - b).max() for a, b in zip(run(context, keys), changed)) > 1e-3


@pytest.mark.parametrize("adapted", ["all", "values"])
def test_adapters_are_added_to_keys_that_were_computed_before(adapted):
    network, given = network_of("unet"), inputs_of("unet")
    params = initialize_params(network.shapes)
    context = given.pop("encoder_hidden_states")
    rng = np.random.default_rng(0)

    def low_rank(shape):
        down, up = (rng.normal(size=size).astype(np.float32) for size in (shape[:-1], shape[-1:]))
        return LowRank(down[..., None], up[None], np.zeros(1, np.int32))

    end = {"all": ("to_q", "to_k", "to_v"), "values": ("attn2.to_v",)}[adapted]
    layers = {p: low_rank(s) for p, s in kernel_shapes(network).items() if p.endswith(end)}

    @jax.jit
    def run(context, given_context, weights):
        adapters = Adapters(layers, weights)
        keys = None
        if given_context is not None:
            keys = project_context(network, params, given_context, adapters)
        options = {"adapters": adapters, "context_keys": keys}
        return jax.tree.leaves(
            network.apply(params, encoder_hidden_states=context, **given, **options)
        )

    rows = len(context)
    results = {}
    for scale in (0.0, 0.7):
        weights = jnp.full((rows, 1), scale)
        direct = run(context, None, weights)
        results[scale] = run(jnp.zeros_like(context), context, weights)
        for one, other in zip(direct, results[scale], strict=True):
            np.testing.assert_allclose(one, other, atol=1e-4)
    assert max(np.abs(a - b).max() for a, b in zip(results[0.0], results[0.7])) > 1e-2


def products(jaxpr, tokens):
    """The products of two rows of tokens with a matrix, in a program and in what it calls."""
    found = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            shape = equation.invars[0].aval.shape
            # Attention's own products have an axis for the heads.
            found += shape[:-1] in ((2, tokens), (2 * tokens,))
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else [value]:
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    found += products(inner, tokens)
    return found


def test_no_step_computes_them_again(tiny_checkpoints):
    folder, _ = tiny_checkpoints.pipeline("sd", "a")
    pipe = diffusax.StableDiffusionPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    with recorded_requests() as requests:
        pipe("a cat", num_inference_steps=2, output_type="latent")
    request = next(r for r in requests if r.program is denoise)
    function = functools.partial(denoise.__wrapped__, **dict(request.static))
    given = dict(zip(request.program.dynamic, request.dynamic))
    whole = jax.make_jaxpr(lambda given: function(**given))(given).jaxpr
    (loop,) = [e for e in eqns(whole) if e.primitive.name == "while"]
    tokens = pipe.tokenizer.model_max_length
    assert products(whole, tokens) >= 2 * len(cross_attentions(pipe.unet.network))
    assert products(loop.params["body_jaxpr"].jaxpr, tokens) == 0


def eqns(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        inner = equation.params.get("jaxpr")
        if inner is not None:
            yield from eqns(getattr(inner, "jaxpr", inner))
