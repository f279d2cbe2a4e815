"""What docs/reference/with_jax.md says of JAX's switches, meshes, transformations and trees."""

import ast
import copy
import functools
import pickle
import re

import equinox
import flax.serialization
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.effort import few
from support.many_devices import run_on_devices
from support.repository import ROOT
from support.runs import RUNS
from support.tiny import SMALLEST_UNET, SMALLEST_VAE, build_stable_diffusion

import diffusax

SWITCHES = "tests/runtime/test_switches.py"
HERE = "tests/runtime/test_with_jax.py"
MODELS = "tests/networks/test_classes_of_models.py"
TREES = "tests/models/test_string_keys.py"
TESTS = {
    "`jax_enable_x64`": (SWITCHES, "test_a_network_computes_nothing_in_64_bits"),
    "`jax_numpy_dtype_promotion`": (SWITCHES, "test_a_network_is_traced_to_the_same_program"),
    "`jax_numpy_rank_promotion`": (SWITCHES, "test_a_function_is_traced_to_the_same_program"),
    "`jax_debug_nans`, `jax_debug_infs`": (SWITCHES, "test_a_call_gives_what_it_gives_without"),
    "`jax_disable_jit`": (SWITCHES, "test_a_call_gives_what_it_gives_without"),
    "`jax_check_tracer_leaks`": (SWITCHES, "test_a_call_gives_what_it_gives_without"),
    "`jax_transfer_guard`": (SWITCHES, "test_a_call_gives_what_it_gives_without"),
    "`jax_default_matmul_precision`": (SWITCHES, "test_a_call_gives_what_it_gives_without"),
    "`jax_default_prng_impl`": (SWITCHES, "test_the_numbers_of_a_seed_are_threefrys"),
    "keys of `jax.random`": (HERE, "test_a_key_stands_for_a_seed"),
    "axes of any names, Auto or Explicit": (HERE, "test_a_mesh_of_ones_own"),
    "parameters in shards": (HERE, "test_a_mesh_of_ones_own"),
    "`jax.shard_map`": (HERE, "test_a_mesh_of_ones_own"),
    "pipelines": (HERE, "test_a_mesh_of_ones_own"),
    "`jax.jit`": (MODELS, "test_jit_takes_a_model_and_new_parameters_compile_nothing"),
    "`jax.grad`, `jax.value_and_grad`": (MODELS, "test_losses_have_gradients_to_a_model"),
    "`jax.jvp`, `jax.linearize`, `jax.jacfwd`": (HERE, "test_derivatives_forward"),
    "`jax.vmap`": (HERE, "test_vmap"),
    "`jax.checkpoint`, `jax.lax.scan`": (HERE, "test_rows_are_scanned_and_computed_again"),
    "donation": (HERE, "test_parameters_are_donated"),
    "`jax.device_put`, `jax.eval_shape`": (MODELS, "test_models_are_placed_described_and_copied"),
    "`jax.export`": (HERE, "test_an_exported_function_takes_models_and_inputs"),
    "`equinox`": (HERE, "test_equinox_takes_models"),
    "`flax.traverse_util.flatten_dict`": (TREES, "test_flatten_dict_joins_the_names"),
    "`flax.serialization`": (HERE, "test_bytes_of_a_model"),
    "safetensors": (TREES, "test_safetensors_holds_the_flat_tree"),
    "Orbax": (TREES, "test_orbax_restores_without_a_target"),
    "Optax's masks": (HERE, "test_optax_masks_a_model_by_path"),
    "`copy.deepcopy`, `pickle`": (HERE, "test_copies_of_a_pipeline_draw_the_same"),
    "configs and networks": (HERE, "test_configs_are_static"),
}


def test_each_row_of_the_table_has_a_test():
    page = (ROOT / "docs/reference/with_jax.md").read_text("utf-8")
    rows = re.findall(r"^\| ([^|]+) \|", page, re.M)
    assert rows == list(TESTS)
    for file, name in TESTS.values():
        tree = ast.parse((ROOT / file).read_text("utf-8"))
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.fixture(scope="module", autouse=True)
def quick_compilation():
    """Halves the time, most of which is compilation; later tests get programs of their own."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
    jax.clear_caches()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("with_jax") / "smallest"
    build_stable_diffusion(made, unet=SMALLEST_UNET, vae=SMALLEST_VAE)
    return made


@pytest.fixture(scope="module")
def pipe(folder):
    made = diffusax.StableDiffusionPipeline.from_pretrained(folder)
    made.set_progress_bar_config(disable=True)
    # It draws noise on the way.
    made.scheduler = diffusax.EulerAncestralDiscreteScheduler.from_config(made.scheduler.config)
    return made


CALL = {"num_inference_steps": 2, "height": 16, "width": 16}
RNG = np.random.default_rng(0)
X = RNG.standard_normal((2, 4, 8, 8)).astype(np.float32)
CONTEXT = RNG.standard_normal((2, 5, 32)).astype(np.float32)


def predict(unet, x=X, t=5.0):
    return unet(x, t, CONTEXT).sample


def loss(unet):
    return (predict(unet) ** 2).mean()


def close(found, expected, atol=1e-5):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=atol),
        found,
        expected,
    )


def images(pipe, **given):
    return pipe("a cat", **{**CALL, "output_type": "np", **given}).images


def test_a_key_stands_for_a_seed(pipe):
    key, other = jax.random.key(7), jax.random.key(3)
    two = {"num_images_per_prompt": 2}
    of_seven, of_both = images(pipe, seed=7, **two), images(pipe, seed=[7, 3], **two)
    close(images(pipe, seed=key, **two), of_seven)
    close(images(pipe, generator=jax.random.PRNGKey(7), **two), of_seven)
    close(images(pipe, seed=[key, other], **two), of_both)
    close(images(pipe, seed=jnp.stack([key, other]), **two), of_both)
    others = images(pipe, seed=jax.random.key(7, impl="rbg"), **two)
    assert np.isfinite(others).all()
    assert np.abs(others - of_seven).max() > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("case", ["a_model", "mapped_shards", "shards", "pipelines"])
def test_a_mesh_of_ones_own(folder, case):
    assert run_on_devices(RUNS / "own_meshes_run.py", folder, case) == [case]


@pytest.mark.slow
def test_derivatives_forward(pipe):
    change = jax.tree.map(jnp.ones_like, pipe.unet)

    @jax.jit
    def slopes(unet):
        linear = jax.linearize(loss, unet)[1]
        along = jax.jacfwd(lambda s: loss(jax.tree.map(lambda x: x + s, unet)))(0.0)
        gradients = jax.tree.leaves(jax.grad(loss)(unet))
        slope = jax.jvp(loss, (unet,), (change,))[1]
        return slope, linear(change), along, sum(map(jnp.sum, gradients))

    slope, *others = slopes(pipe.unet)
    close(jnp.stack(others), jnp.full(3, slope), 1e-3 * abs(float(slope)))


def stacked(*trees):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def of_checkpoints(pipe):
    """Two checkpoints of one architecture, as models and as parameters."""
    two = [pipe.unet, jax.tree.map(lambda x: 0.9 * x, pipe.unet)]
    close(jax.vmap(predict)(stacked(*two)), stacked(*map(predict, two)))
    inputs = pipe.prepare_inputs("a cat", **CALL, seed=0)
    params = [pipe.params, {**pipe.params, "unet": two[1].params}]
    found = jax.jit(jax.vmap(pipe.generate_fn, (0, None)))(stacked(*params), inputs)
    close(found, stacked(*[pipe.generate_fn(one, inputs) for one in params]), 1e-4)


def of_prompts(pipe):
    given = [pipe.prepare_inputs(text, **CALL, seed=i) for i, text in enumerate(["a cat", "a dog"])]
    found = jax.jit(jax.vmap(pipe.generate_fn, (None, 0)))(pipe.params, stacked(*given))
    close(found, stacked(*[pipe.generate_fn(pipe.params, one) for one in given]), 1e-4)


def of_keys(pipe):
    keys = jax.random.split(jax.random.key(0), 2)

    def draw(key):
        return pipe.generate_fn(pipe.params, pipe.prepare_inputs("a cat", **CALL, seed=key))

    found = jax.jit(jax.vmap(draw))(keys)
    close(found, stacked(*[images(pipe, seed=key) for key in keys]), 1e-4)


def of_samples(pipe):
    found = jax.vmap(lambda x, c: pipe.unet(x[None], 5.0, c[None]).sample[0])(X, CONTEXT)
    close(found, predict(pipe.unet))
    times = jnp.array([5.0, 7.0])
    found = jax.vmap(lambda t: predict(pipe.unet, t=t))(times)
    close(found, stacked(*[predict(pipe.unet, t=t) for t in times]))


MAPPED = {case.__name__: case for case in (of_checkpoints, of_prompts, of_keys, of_samples)}


@pytest.mark.parametrize("case", few(MAPPED, "of_keys", "of_samples"))
def test_vmap(pipe, case):
    MAPPED[case](pipe)


def test_rows_are_scanned_and_computed_again(pipe):
    times = jnp.array([9.0, 5.0])

    def run(scale, body):
        return (jax.lax.scan(functools.partial(body, scale), X, times)[0] ** 2).mean()

    def body(scale, x, t):
        return predict(pipe.unet, scale * x, t), None

    gradient = jax.jit(jax.grad(run), static_argnums=1)
    plain = gradient(1.0, body)
    close(gradient(1.0, jax.checkpoint(body)), plain, 1e-4 * abs(float(plain)))
    step = 1e-2
    slope = (run(1 + step, body) - run(1 - step, body)) / (2 * step)
    close(plain, slope, 1e-2 * abs(float(slope)))


def test_parameters_are_donated(pipe):
    update = jax.jit(lambda unet: jax.tree.map(lambda x: 2 * x, unet), donate_argnums=0)
    given = jax.tree.map(jnp.copy, pipe.unet)
    close(update(given), jax.tree.map(lambda x: 2 * x, pipe.unet))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(given))


def test_an_exported_function_takes_models_and_inputs(pipe):
    unet = copy.deepcopy(pipe.unet)
    unet.enable_freeu(s1=0.9, s2=0.2, b1=1.2, b2=1.4)
    inputs = pipe.prepare_inputs("a cat", **CALL, seed=0)
    for function, given in (
        (predict, (pipe.unet,)),
        (predict, (unet,)),
        (pipe.generate_fn, (pipe.params, inputs)),
    ):
        exported = jax.export.export(jax.jit(function))(*given).serialize()
        close(jax.export.deserialize(exported).call(*given), function(*given), 1e-4)
    rows, network = jax.export.symbolic_shape("rows")[0], pipe.unet.network
    shapes = [(rows, 8, 8, 4), (rows,), (rows, 5, 32)]
    of_any = jax.export.export(jax.jit(network.apply))(
        pipe.unet.params, *[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    )
    found = of_any.call(
        pipe.unet.params, X.transpose(0, 2, 3, 1), np.full(2, 5.0, np.float32), CONTEXT
    )
    close(found.transpose(0, 3, 1, 2), predict(pipe.unet))


def test_equinox_takes_models(pipe):
    value, gradients = equinox.filter_jit(equinox.filter_value_and_grad(loss))(pipe.unet)
    assert type(gradients) is type(pipe.unet)
    close(equinox.filter_grad(loss)(pipe.unet), gradients)
    arrays, rest = equinox.partition(pipe.unet, equinox.is_array)
    close(loss(equinox.combine(arrays, rest)), value)
    stepped = equinox.apply_updates(pipe.unet, jax.tree.map(lambda g: -1e-3 * g, gradients))
    assert loss(stepped) < value


def test_bytes_of_a_model(pipe):
    data = flax.serialization.to_bytes(pipe.unet)
    empty = jax.tree.map(jnp.zeros_like, pipe.unet)
    restored = flax.serialization.from_bytes(empty, data)
    assert type(restored) is type(pipe.unet)
    close(restored, pipe.unet, 0)


def test_optax_masks_a_model_by_path(pipe):
    def attends(path, _):
        return "attn" in jax.tree_util.keystr(path)

    mask = jax.tree_util.tree_map_with_path(attends, pipe.unet)
    optimizer = optax.chain(
        optax.sgd(1.0),
        optax.masked(optax.set_to_zero(), jax.tree.map(lambda chosen: not chosen, mask)),
    )
    gradients = jax.tree.map(jnp.ones_like, pipe.unet)
    updates, _ = optimizer.update(gradients, optimizer.init(pipe.unet), pipe.unet)
    stepped = optax.apply_updates(pipe.unet, updates)
    assert type(stepped) is type(pipe.unet)
    moved = jax.tree.map(lambda a, b: bool(np.any(a != b)), stepped, pipe.unet)
    assert jax.tree.leaves(moved) == jax.tree.leaves(mask)
    assert {*jax.tree.leaves(mask)} == {True, False}


def test_copies_of_a_pipeline_draw_the_same(pipe):
    drawn = images(pipe, seed=0)
    copies = copy.deepcopy(pipe), pickle.loads(pickle.dumps(pipe))
    for again in copies:
        again.set_progress_bar_config(disable=True)
        close(images(again, seed=0), drawn)
        again.unet.params = jax.tree.map(jnp.zeros_like, again.unet.params)
    close(images(pipe, seed=0), drawn)


def test_configs_are_static(pipe):
    found = (pipe.unet.config, pipe.unet.network, pipe.vae.config, pipe.scheduler)
    again = pickle.loads(pickle.dumps(found))
    assert (again, hash(again)) == (found, hash(found))
    traces = []

    def count(things, x):
        traces.append(things)
        return x

    counted = jax.jit(count, static_argnums=0)
    counted(found, 1.0)
    counted(again, 2.0)
    assert len(traces) == 1
