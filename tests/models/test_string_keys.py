"""Parameters have texts as keys, so that the tools of JAX and Flax take them as they are."""

import flax.serialization
import flax.traverse_util
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint
import pytest
import safetensors.flax
from support.tiny import TEXT

from diffusax.lora.trained import LayerPlan, TrainedLora
from diffusax.models import CLIPTextModel, FluxTransformer2DModel
from diffusax.models.adapters.low_rank import kernel_shapes
from diffusax.models.network import Network
from diffusax.models.parameter_tree import fill, ordered_leaves
from diffusax.networks import Model, initialize
from diffusax.training.ema.update import copy_as_average
from diffusax.training.recipes.cached import fingerprint
from diffusax.training.step.step import initial_state

IDS = np.array([[5, 3, 7]])
LAYERS = "text_model/encoder/layers"


@pytest.fixture(scope="module")
def encoder():
    """Twelve layers, whose numbers are in another order as texts: 0, 1, 10, 11, 2."""
    config = {**TEXT, "vocab_size": 16, "num_hidden_layers": 12, "max_position_embeddings": 4}
    return initialize(CLIPTextModel, CLIPTextModel.config_class(**config))


def assert_same(tree, other):
    jax.tree.map(np.testing.assert_array_equal, tree, other)


def keys_of(tree):
    paths = (path for path, _ in jax.tree_util.tree_leaves_with_path(tree))
    return {key.key for path in paths for key in path if isinstance(key, jax.tree_util.DictKey)}


def test_flatten_dict_joins_the_names(encoder):
    flat = flax.traverse_util.flatten_dict(encoder.params, sep="/")
    assert f"{LAYERS}/10/mlp/fc1/kernel" in flat
    assert_same(flax.traverse_util.unflatten_dict(flat, sep="/"), encoder.params)


def test_orbax_restores_without_a_target(encoder, tmp_path):
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "params", encoder.params)
        checkpointer.wait_until_finished()
        assert_same(checkpointer.restore(tmp_path / "params"), encoder.params)


def test_msgpack_gives_the_tree_back(encoder):
    data = flax.serialization.to_bytes(encoder.params)
    assert_same(flax.serialization.msgpack_restore(data), encoder.params)
    assert_same(flax.serialization.from_bytes(encoder.params, data), encoder.params)


def test_safetensors_holds_the_flat_tree(encoder, tmp_path):
    file = tmp_path / "params.safetensors"
    safetensors.flax.save_file(flax.traverse_util.flatten_dict(encoder.params, sep="."), file)
    params = flax.traverse_util.unflatten_dict(safetensors.flax.load_file(file), sep=".")
    assert_same(params, encoder.params)
    assert Model(encoder.network, params).params is params


def test_optax_masks_by_path(encoder):
    def last(path, _):
        return "/".join(path).startswith(f"{LAYERS}/11/")

    mask = flax.traverse_util.path_aware_map(last, encoder.params)
    labels = jax.tree.map(lambda chosen: "train" if chosen else "keep", mask)
    for optimizer in (
        optax.chain(
            optax.masked(optax.sgd(1.0), mask),
            optax.masked(optax.set_to_zero(), jax.tree.map(lambda chosen: not chosen, mask)),
        ),
        optax.multi_transform({"train": optax.sgd(1.0), "keep": optax.set_to_zero()}, labels),
    ):
        ones = jax.tree.map(jnp.ones_like, encoder.params)
        updates, _ = optimizer.update(ones, optimizer.init(encoder.params), encoder.params)
        flat = flax.traverse_util.flatten_dict(updates, sep="/")
        changed = {path for path, update in flat.items() if np.any(update)}
        assert changed == {path for path in flat if path.startswith(f"{LAYERS}/11/")}
        assert changed


def test_an_exported_function_takes_parameters_as_arguments(encoder):
    def states(params, ids):
        return encoder.network.apply(params, ids).last_hidden_state

    exported = jax.export.export(jax.jit(states))(encoder.params, IDS)
    again = jax.export.deserialize(exported.serialize())
    np.testing.assert_array_equal(
        again.call(encoder.params, IDS), jax.jit(states)(encoder.params, IDS)
    )


def test_trees_in_training_have_texts_as_keys(encoder):
    layers = dict.fromkeys(kernel_shapes(encoder.network), LayerPlan(2, 1.0))
    lora = TrainedLora({"text_encoder": layers})
    optimizer = optax.adamw(1e-3)
    for params in (
        {"text_encoder": encoder.params},
        jax.tree.map(lambda x: jnp.zeros(x.shape), lora.shapes({"text_encoder": encoder.network})),
    ):
        state = initial_state(params, optimizer, seed=0)
        state = state._replace(ema=copy_as_average(state.params))
        assert len(keys_of(state)) > 2
        assert {type(key) for key in keys_of(state)} == {str}


def test_lists_are_in_the_order_of_numbers(encoder):
    def numbers(names, part=".layers."):
        found = [name.split(part)[1] for name in names if part in name]
        return list(dict.fromkeys(int(name.split(".")[0]) for name in found))

    order = list(range(12))
    assert numbers(kernel_shapes(encoder.network)) == order
    assert numbers(name for name, _ in encoder.named_parameters()) == order
    assert numbers(encoder.state_dict()) == order
    flux = Network(
        FluxTransformer2DModel,
        FluxTransformer2DModel.config_class(num_layers=12, num_single_layers=12),
    )
    shapes = jax.tree.map(lambda x: x, flux.shapes)
    assert numbers(Model(flux, shapes).attn_processors, "transformer_blocks.") == order
    places = fill(encoder.params, range(10**4)[: len(jax.tree.leaves(encoder.params))])
    assert [place for _, place in ordered_leaves(places)] == sorted(jax.tree.leaves(places))
    assert jax.tree.leaves(places) != sorted(jax.tree.leaves(places))


def test_first_values_and_digests_are_those_of_earlier_versions(encoder):
    """Both go by the order of layers; caches of latents on disks hold such digests."""
    layers = encoder.params["text_model"]["encoder"]["layers"]
    first = {i: layers[i]["mlp"]["fc1"]["kernel"][0, :2] for i in ("2", "10")}
    np.testing.assert_allclose(first["2"], [0.0616957061, -0.2649418116], rtol=1e-6)
    np.testing.assert_allclose(first["10"], [-0.1731482446, 0.2701502442], rtol=1e-6)
    assert fingerprint(encoder.params).startswith("78c58b536ce609c2")
