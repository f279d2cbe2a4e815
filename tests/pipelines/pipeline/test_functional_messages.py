"""What the functional API and loops by hand say of arguments that cannot be: one sentence each."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.tiny import SMALLEST_UNET, SMALLEST_VAE, build_stable_diffusion

import diffusax

CALL = {"prompt": "a cat", "num_inference_steps": 2, "seed": 0, "height": 16, "width": 16}
TRACED = r"is traced by jit, grad, vmap or scan \(got "
X = np.zeros((1, 16, 16, 4), np.float32)
KEY = jax.random.key(0)


@pytest.fixture(scope="module")
def pipe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("messages") / "smallest"
    build_stable_diffusion(folder, unet=SMALLEST_UNET, vae=SMALLEST_VAE)
    return diffusax.StableDiffusionPipeline.from_pretrained(folder)


@pytest.fixture(scope="module")
def inputs(pipe):
    return pipe.prepare_inputs(**CALL)


def refused(message):
    """Expects one sentence, and none of JAX's own."""
    return pytest.raises(ValueError, match=f"^{message}")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"generator": 3, "seed": None}, "generator stands for PyTorch's numbers.*; give seed"),
        ({"noise": "torch"}, "generate_fn.* has no noise='torch'; give seed"),
        ({"clip_skip": 1}, "generate_fn.* has no clip_skip; give prompt_embeds"),
        ({"prompt_weighting": True}, "generate_fn.* has no prompt_weighting; give prompt_embeds"),
        ({"callback_on_step_end": print}, "generate_fn.* has no callback_on_step_end; change"),
        ({"seed": KEY, "noise": "torch"}, "noise must be 'jax' where seed is a key of jax.random"),
        (
            {"seed": jax.random.split(KEY, 3)},
            r"seed has keys of shape \(3,\) for 1 images",
        ),
    ],
)
def test_what_a_function_of_arrays_cannot_have_is_named(pipe, given, message):
    with refused(message):
        pipe.prepare_inputs(**{**CALL, **given})


NUMBERS = {
    "guidance_scale": 3.0,
    "guidance_rescale": 0.2,
    "eta": 0.5,
    "num_inference_steps": 2,
    "seed": 1,
    "height": 16,
    "num_images_per_prompt": 1,
    "sigmas": [3.0, 1.0],
    "timesteps": [500.0, 20.0],
    "latents": np.zeros((1, 4, 16, 16), np.float32),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_a_traced_number_is_refused_and_the_arrays_of_inputs_are_named(pipe, name):
    def prepare(value):
        return pipe.prepare_inputs(**{**CALL, name: value}).plan.latents

    with refused(f"{name} {TRACED}.*inputs._replace"):
        jax.eval_shape(prepare, jnp.asarray(NUMBERS[name]))


def test_traced_embeddings_are_inputs_but_not_of_a_call(pipe):
    call = {k: v for k, v in CALL.items() if k != "prompt"}
    embeds = np.asarray(pipe.encode_prompt("a cat")[0])
    found = jax.eval_shape(lambda x: pipe.prepare_inputs(prompt_embeds=x, **call).embeds, embeds)
    assert found["prompt_embeds"].shape == embeds.shape
    with refused(f"prompt_embeds {TRACED}.*pipe.generate_fn"):
        jax.eval_shape(lambda x: pipe(prompt_embeds=x, **call).images, embeds)


def other_plan(inputs, **changes):
    return inputs._replace(plan=inputs.plan._replace(**changes))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda p, i: (i, p), r"inputs must be those that pipe.prepare_inputs returns \(got dict"),
        (lambda p, i: (p, "a cat"), r"inputs must be .* \(got str\)"),
        (lambda p, i: ({**p, "vae": {}}, i), "params must be those of the AutoencoderKL"),
        (lambda p, i: ({"unet": p["unet"]}, i), r"params must have .*\(lacks text_encoder, vae\)"),
        (lambda p, i: (p["unet"], i), r"params must have .* as pipe.params has"),
        (
            lambda p, i: ({**p, "unet": {**p["unet"], "conv_in": {"kernel": X, "bias": X[0]}}}, i),
            r"params must be those of the UNet2DConditionModel.* differs in conv_in.bias",
        ),
        (
            lambda p, i: (p, other_plan(i, noise=jax.random.PRNGKey(0))),
            r"inputs.plan.noise must be a random key .* \(got uint32 of shape \(2,\)\)",
        ),
        (lambda p, i: (p, other_plan(i, noise=KEY)), r"inputs.plan.noise must .* of shape \(\)"),
        (
            lambda p, i: (p, other_plan(i, latents=X.transpose(0, 3, 1, 2))),
            "sample must have shape .* channels come last here",
        ),
        (lambda p, i: (p, other_plan(i, latents=X[0])), "inputs.plan.noise .* each of the 16 "),
    ],
)
def test_what_generate_fn_is_given_is_checked(pipe, inputs, given, message):
    params, own = given(pipe.params, inputs)
    with refused(message):
        pipe.generate_fn(params, own)


TIME, CONTEXT = np.ones(1, np.float32), np.zeros((1, 5, 32), np.float32)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((X, np.ones(2), CONTEXT), r"timestep must have as many rows as the sample, 1 \(got"),
        ((X, np.ones((1, 1)), CONTEXT), "timestep must be a number, or one for each row"),
        ((X, TIME, np.zeros((2, 5, 32))), "encoder_hidden_states must have as many rows"),
        ((X[0], TIME, CONTEXT), r"sample must have shape \(batch, height, width, 4\)"),
    ],
)
def test_a_networks_rows_agree(pipe, given, message):
    with refused(message):
        pipe.unet.network.apply(pipe.unet.params, *given)


@pytest.fixture(scope="module")
def hand():
    state, table, step = diffusax.EulerAncestralDiscreteScheduler().functional(4, X)
    row = jax.tree.map(lambda column: column[0], table)
    return {"state": state, "row": row, "prediction": X, "noise": X, "table": table}, step


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prediction": X.transpose(0, 3, 1, 2)}, r"prediction must have the sample's shape"),
        ({"prediction": X[0]}, r"prediction must have the sample's shape"),
        ({"state": X}, r"state must have shape \(6, batch, ...\)"),
        ({"row": "table"}, "row must be one row of the table"),
        ({"noise": X[:, :2]}, "noise must have the sample's shape"),
        ({"noise": None}, "noise must be given to this sampler's step"),
    ],
)
def test_a_step_by_hand_checks_shapes(hand, changes, message):
    given, step = hand
    changes = {"row": given["table"]} if "row" in changes else changes
    arguments = {k: v for k, v in {**given, **changes}.items() if k != "table"}
    with refused(message):
        step(*arguments.values())


def test_a_step_by_hand_takes_a_learned_variance(hand):
    given, step = hand
    both = np.concatenate([X, X], -1)
    after = step(given["state"], given["row"], both, X)
    np.testing.assert_array_equal(after, step(given["state"], given["row"], X, X))


@pytest.mark.parametrize(
    "ask",
    [
        lambda s, n: s.functional(n, X),
        lambda s, n: s.set_timesteps(n),
        lambda s, n: s.schedule(n),
        lambda s, n: s.schedule(4, begin=n),
        lambda s, n: s.schedule(4, eta=1.0 * n),
        lambda s, n: diffusax.DDIMScheduler(beta_end=1e-2 * n),
    ],
)
def test_the_numbers_of_a_run_are_known_before(ask):
    scheduler = diffusax.EulerDiscreteScheduler()
    with refused(rf"\w+ {TRACED}"):
        jax.eval_shape(functools.partial(ask, scheduler), jnp.int32(4))


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (jnp.uint32(3), "a random key must be one of jax.random.key"),
        (jnp.ones(2), "a random key must be one of jax.random.key"),
        (jnp.zeros(3, jnp.uint32), "a random key must be one of jax.random.key"),
        (jax.random.split(KEY), "generator must be one random key, or one for each of the 1"),
    ],
)
def test_a_step_says_what_a_key_is(key, message):
    scheduler = diffusax.EulerAncestralDiscreteScheduler()
    scheduler.set_timesteps(2)
    with refused(re.escape(message)):
        scheduler.step(X, scheduler.timesteps[0], X, generator=key)


def test_only_one_argument_may_be_a_key(pipe):
    with refused("only one of generator and seed can be given"):
        pipe(**{**CALL, "generator": KEY, "seed": 0})


@pytest.mark.parametrize("name", ["add_noise", "get_velocity"])
def test_noise_has_the_samples_layout(name):
    with refused(r"noise must have the shape of \w+, \(1, 16, 16, 4\)"):
        getattr(diffusax.DDIMScheduler(), name)(X, X.transpose(0, 3, 1, 2), np.array([3]))
