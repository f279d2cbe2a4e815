"""With each of JAX's own switches, networks, calls and steps give what they give without."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from support.effort import few
from support.many_devices import run_on_devices
from support.pairs import mask, picture
from support.runs import RUNS
from support.tiny import (
    ASYMMETRIC,
    SMALLEST_UNET,
    SMALLEST_VAE,
    T2I_ADAPTER,
    TEXT,
    UNET,
    build_stable_diffusion,
)
from support.tiny_transformers import FLUX as FLUX
from support.tiny_transformers import KLEIN as FLUX2
from support.tiny_transformers import KLEIN_VAE as VAE_FLUX2
from support.tiny_transformers import (
    KREA2,
    QWEN_IMAGE,
    QWEN_IMAGE21,
    QWEN_IMAGE21_VAE,
    QWEN_IMAGE_VAE,
    WAN_VAE,
)
from support.tiny_transformers import Z_IMAGE as Z_IMAGE
from support.tiny_unconditional import UNET as UNET_2D

import diffusax
from diffusax.models import MODELS, Network
from diffusax.models.ops.rotation import Rotation
from diffusax.runtime.random.noise import noise_source
from diffusax.training.step.denoising import DenoisingLoss
from diffusax.training.step.step import initial_state, make_train_step

SWITCHES = {
    "64 bits": {"jax_enable_x64": True},
    "strict promotion": {"jax_numpy_dtype_promotion": "strict"},
    "no rank promotion": {"jax_numpy_rank_promotion": "raise"},
    "rbg": {"jax_default_prng_impl": "rbg"},
    "unsafe_rbg": {"jax_default_prng_impl": "unsafe_rbg"},
    "custom keys": {"jax_enable_custom_prng": True},
    "older numbers of threefry": {"jax_threefry_partitionable": False},
    "transfer guard": {"jax_transfer_guard": "disallow"},
    "nans": {"jax_debug_nans": True, "jax_debug_infs": True},
    "leaks": {"jax_check_tracer_leaks": True},
    "no jit": {"jax_disable_jit": True},
    "matmul precision": {"jax_default_matmul_precision": "highest"},
    "all of a careful program": {
        "jax_enable_x64": True,
        "jax_numpy_dtype_promotion": "strict",
        "jax_numpy_rank_promotion": "raise",
        "jax_debug_nans": True,
        "jax_transfer_guard": "disallow",
    },
}


@contextlib.contextmanager
def switched(kind):
    """Sets switches for the whole process, as `jax.config.update` of a program does."""
    before = {name: getattr(jax.config, name) for name in SWITCHES[kind]}
    try:
        for name, value in SWITCHES[kind].items():
            jax.config.update(name, value)
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value if name != "jax_transfer_guard" else "allow")


def zeros(*shape, dtype=np.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


WIDTH = {"cross_attention_dim": 32}
CONTROL = {k: v for k, v in SMALLEST_UNET.items() if k not in ("mid_block_type", "up_block_types")}
LANGUAGE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
T5 = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}
IDS, LENGTHS = zeros(2, 7, dtype=np.int32), zeros(2, dtype=np.int32)
MAP, TIME, CONTEXT = zeros(2, 8, 8, 4), zeros(2), zeros(2, 5, 32)
MAP_OF_SIX = zeros(2, 4, 4, 6)
TEXT_TIME = {
    "added_cond": {"text_embeds": zeros(2, 16), "time_ids": zeros(2, 6)},
}


def rotation(tokens, width=6):
    return Rotation(zeros(2, tokens, width), zeros(2, tokens, width))


FORWARD = {
    "UNet2DConditionModel": ({**UNET["sd1"], **WIDTH}, (MAP, TIME, CONTEXT), {}),
    "of SDXL": (UNET["xl"], (MAP, TIME, zeros(2, 5, 56)), TEXT_TIME),
    "UNet2DModel": (UNET_2D, (zeros(2, 16, 16, 3), TIME), {}),
    "ControlNetModel": (
        {**CONTROL, **WIDTH},
        (MAP, TIME, CONTEXT),
        {"cond_embedding": zeros(2, 8, 8, 8)},
    ),
    "T2IAdapter": (T2I_ADAPTER["sd"], (zeros(2, 32, 32, 3),), {}),
    "AutoencoderKL": (SMALLEST_VAE, (MAP,), {"method": "decode"}),
    "AsymmetricAutoencoderKL": (ASYMMETRIC, (MAP,), {"method": "decode"}),
    "AutoencoderTiny": ({}, (MAP,), {"method": "decode"}),
    "AutoencoderKLFlux2": (VAE_FLUX2, (zeros(2, 16, 16, 3),), {"method": "encode"}),
    "AutoencoderKLQwenImage": (QWEN_IMAGE_VAE, (zeros(2, 16, 16, 3),), {"method": "encode"}),
    "AutoencoderKLWan": (WAN_VAE, (zeros(2, 2, 4, 4, 4),), {"method": "decode"}),
    "AutoencoderKLQwenImage21": (QWEN_IMAGE21_VAE, (MAP_OF_SIX,), {"method": "decode"}),
    "QwenImage21Transformer2DModel": (
        QWEN_IMAGE21,
        (MAP_OF_SIX, TIME, zeros(2, 5, 20), LENGTHS),
        {"references": ((zeros(2, 3, 20), zeros(2, 4, 2, 6)),)},
    ),
    "CLIPTextModel": (TEXT, (IDS,), {}),
    "CLIPVisionModel": (VISION, (zeros(2, 32, 32, 3),), {}),
    "Qwen3Model": (LANGUAGE, (IDS, LENGTHS), {}),
    "T5EncoderModel": (T5, (IDS, LENGTHS), {}),
    "FluxTransformer2DModel": (
        FLUX,
        (zeros(2, 16, 64), TIME, zeros(2, 5, 20), zeros(2, 16), rotation(21), TIME),
        {},
    ),
    "Flux2Transformer2DModel": (FLUX2, (zeros(2, 4, 4, 16), TIME, zeros(2, 5, 48)), {}),
    "Krea2Transformer2DModel": (
        KREA2,
        (zeros(2, 8, 8, 4), TIME, zeros(2, 5, 3, 24), LENGTHS),
        {},
    ),
    "QwenImageTransformer2DModel": (
        {**QWEN_IMAGE, "zero_cond_t": True},
        (zeros(2, 8, 8, 4), TIME, zeros(2, 5, 20), LENGTHS),
        {"references": (zeros(2, 4, 4, 4),)},
    ),
    "ZImageTransformer2DModel": (Z_IMAGE, (zeros(2, 8, 8, 16), TIME, zeros(2, 5, 24), LENGTHS), {}),
}

# One that convolves and attends, one of transformers' blocks, one of text.
SOME = few(FORWARD, "AutoencoderKL", "FluxTransformer2DModel", "CLIPTextModel")


def network(name):
    config, args, kwargs = FORWARD[name]
    module = MODELS["UNet2DConditionModel" if name == "of SDXL" else name]
    known = {k: v for k, v in config.items() if k in module.config_class.__dataclass_fields__}
    return Network(module, module.config_class(**known)), args, kwargs


def forward(name, place=lambda x: x):
    net, args, kwargs = network(name)
    static = {k: v for k, v in kwargs.items() if isinstance(v, str)}
    given = {k: v for k, v in kwargs.items() if not isinstance(v, str)}

    def call(params, args, kwargs):
        return net.apply(params, *args, **kwargs, **static)

    return jax.make_jaxpr(call)(net.shapes, *jax.tree.map(place, (args, given)))


@functools.cache
def plain_forward(name):
    return str(forward(name))


def doubles(jaxpr):
    """The equations whose results have 64 bits and are no integers."""
    for equation in jaxpr.eqns:
        if any(getattr(v.aval, "dtype", None) == np.float64 for v in equation.outvars):
            yield equation
        for inner in jax.tree.leaves(
            equation.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
        ):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from doubles(inner)


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("kind", ["strict promotion", "no rank promotion"])
def test_a_network_is_traced_to_the_same_program(name, kind):
    with switched(kind):
        assert str(forward(name)) == plain_forward(name)


@pytest.mark.parametrize("name", SOME)
def test_a_network_computes_nothing_in_64_bits(name):
    with switched("64 bits"):
        found = forward(name)
    assert not list(doubles(found.jaxpr))


@pytest.mark.parametrize("name", SOME)
def test_a_network_takes_arrays_that_are_split_over_explicit_axes(name):
    """The rows of a batch, which the network's results are split by, too."""
    mesh = AbstractMesh((2, 1), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    rows = NamedSharding(mesh, PartitionSpec("x"))

    def place(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows)

    # The mesh is set, or it is the arrays' alone.
    for context in (jax.sharding.use_abstract_mesh(mesh), contextlib.nullcontext()):
        with context:
            found = forward(name, place).out_avals
        assert [x.shape for x in found] == [x.shape for x in forward(name).out_avals]
        assert {x.sharding.spec[0] for x in found if x.shape[:1] == (2,)} == {"x"}


@pytest.fixture(scope="module")
def pipe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("switches") / "smallest"
    build_stable_diffusion(folder, unet=SMALLEST_UNET, vae=SMALLEST_VAE)
    made = diffusax.StableDiffusionPipeline.from_pretrained(folder)
    made.set_progress_bar_config(disable=True)
    # It draws noise on the way.
    made.scheduler = diffusax.EulerAncestralDiscreteScheduler.from_config(made.scheduler.config)
    return made


@pytest.fixture(scope="module")
def controlled(pipe):
    config = {**UNET["sd1"], **CONTROL, **WIDTH, "mid_block_type": "UNetMidBlock2D"}
    config = {k: v for k, v in config.items() if k not in ("up_block_types", "sample_size")}
    controlnet = diffusax.ControlNetModel.from_config(
        {**config, "conditioning_embedding_out_channels": (4,)}
    )
    make = diffusax.StableDiffusionControlNetInpaintPipeline.from_pipe
    made = make(pipe, controlnet=controlnet)
    made.set_progress_bar_config(disable=True)
    return made


CALL = {"num_inference_steps": 2, "seed": 0, "guidance_scale": 3.0}
SMALL = {"height": 16, "width": 16}
PICTURES = {
    "image": picture(1, 16, 16),
    "mask_image": mask(1, 16, 16),
    "control_image": picture(11, 16, 16),
    "strength": 1.0,
}


def text_to_image(pipe, controlled):
    return pipe("a cat", **CALL, **SMALL, output_type="np").images


def own_latents(pipe, controlled):
    """An array of JAX, of 64 bits where the switches make it so."""
    latents = jax.device_put(np.random.default_rng(0).standard_normal((1, 4, 16, 16)))
    return pipe("a cat", **CALL, **SMALL, latents=latents, output_type="np").images


def inpainting_with_a_controlnet(pipe, controlled):
    return controlled("a cat", **CALL, **PICTURES, output_type="np").images


def functional(pipe, controlled):
    return pipe.generate_fn(pipe.params, pipe.prepare_inputs("a cat", **CALL, **SMALL))


KEY = jax.random.key(0, impl="threefry2x32")


def by_hand(pipe, controlled):
    """With the noise of a key, and of the run itself for latents of the autoencoder."""
    scheduler = pipe.scheduler
    tokens = pipe.tokenizer("a cat", padding="max_length", return_tensors="np").input_ids
    context = pipe.text_encoder(tokens)[0]
    scheduler.set_timesteps(2)
    start = np.random.default_rng(0).standard_normal((1, 4, 16, 16))
    latents = start.astype(np.float32) * np.float32(scheduler.init_noise_sigma)
    for t in scheduler.timesteps:
        scaled = scheduler.scale_model_input(latents, t)
        prediction = pipe.unet(scaled, t, encoder_hidden_states=context).sample
        latents = scheduler.step(prediction, t, latents, generator=KEY).prev_sample
    pixels = pipe.vae.decode(latents).sample
    return pipe.vae.encode(pixels).latent_dist.sample(KEY)


def scheduled(pipe, controlled):
    scheduler, x = diffusax.DDIMScheduler(), np.ones((2, 3), np.float32)
    times = np.array([3, 900])
    velocity = scheduler.get_velocity(x, 2 * x, times)
    predicted = scheduler.get_predicted_original_sample(velocity, times, x)
    return np.stack([scheduler.add_noise(x, 2 * x, times), velocity, predicted])


def gradients(pipe, controlled):
    """To a model, through its call, which a user's function jits."""
    context = np.ones((1, 5, pipe.unet.config.cross_attention_dim), np.float32)
    x = np.random.default_rng(0).standard_normal((1, 4, 8, 8)).astype(np.float32)
    given = jax.device_put((x, np.float32(5.0), context))

    def loss(unet, x, t, context):
        return jnp.square(unet(x, t, context).sample).mean()

    return jax.jit(jax.grad(loss))(pipe.unet, *given).params["conv_in"]["kernel"]


def training(pipe, controlled):
    """A step of one's own loop."""
    step, given = traced_training(pipe)
    state, metrics = jax.jit(step)(*jax.device_put(given))
    return jnp.stack([metrics["loss"], state.params["unet"]["conv_in"]["kernel"].sum()])


def random_keys(pipe, controlled):
    return pipe("a cat", **{**CALL, "seed": KEY}, **SMALL, output_type="np").images


CASES = {
    case.__name__: case
    for case in (
        text_to_image,
        own_latents,
        inpainting_with_a_controlnet,
        functional,
        by_hand,
        scheduled,
        gradients,
        training,
        random_keys,
    )
}


@pytest.fixture(scope="module")
def expected(pipe, controlled):
    return functools.cache(lambda name: np.asarray(CASES[name](pipe, controlled)))


@pytest.mark.parametrize("name", few(CASES, "own_latents", "scheduled"))
@pytest.mark.parametrize("kind", few(SWITCHES, "rbg", "all of a careful program"))
def test_a_call_gives_what_it_gives_without(pipe, controlled, expected, kind, name):
    plain = expected(name)
    with switched(kind):
        found = np.asarray(jax.device_get(CASES[name](pipe, controlled)))
    assert found.dtype == plain.dtype
    np.testing.assert_allclose(found, plain, atol=1e-4)


def traced_generation(pipe):
    inputs = pipe.prepare_inputs("a cat", **CALL, **SMALL)
    return pipe.generate_fn, (pipe.params, inputs)


def traced_training(pipe):
    names = ("unet", "vae", "text_encoder")
    networks = {name: pipe.parts.networks[name] for name in names}
    process = pipe.scheduler.forward_process
    loss = DenoisingLoss(pipe.family, networks, process, "epsilon")
    frozen = {name: pipe.params[name] for name in names}
    frozen["empty"] = {"input_ids": np.zeros(77, np.int32)}
    trained = {"unet": frozen.pop("unet")}
    optimizer = optax.sgd(0.1)
    batch = {
        "pixel_values": np.zeros((2, 16, 16, 3), np.uint8),
        "input_ids": np.zeros((2, 77), np.int32),
    }
    state = initial_state(trained, optimizer, seed=0)
    return make_train_step(loss, optimizer), (state, frozen, batch)


TRACING = ("strict promotion", "no rank promotion", "rbg", "64 bits")
TRACED = {"generation": traced_generation, "training": traced_training}


@pytest.mark.parametrize("name", few(TRACED, "training"))
@pytest.mark.parametrize("kind", few(TRACING, "strict promotion"))
def test_a_function_is_traced_to_the_same_program(pipe, kind, name):
    function, given = TRACED[name](pipe)
    with switched(kind):
        found = jax.make_jaxpr(function)(*given)
    assert not list(doubles(found.jaxpr))
    if kind != "64 bits":
        assert str(found) == str(jax.make_jaxpr(function)(*given))


def test_the_numbers_of_a_seed_are_threefrys(pipe):
    """As the documentation says: image i's come from fold_in(key(seed), i)."""
    key = jax.random.fold_in(jax.random.key(7, impl="threefry2x32"), 1)
    with switched("rbg"):
        noise = noise_source("jax", 7, 2).draw("start", (2, 2, 3))
        state = initial_state({"w": jnp.ones(1)}, optax.sgd(0.1), seed=7)
    own = jax.random.normal(jax.random.fold_in(key, 0), (2, 2, 3))
    np.testing.assert_array_equal(noise[1], own)
    np.testing.assert_array_equal(state.key, [0, 7])


@pytest.mark.slow
def test_calls_of_a_pipeline_are_the_same_inside_a_users_mesh(pipe, tmp_path):
    pipe.save_pretrained(tmp_path)
    assert run_on_devices(RUNS / "users_mesh_run.py", tmp_path) == ["equal"]
