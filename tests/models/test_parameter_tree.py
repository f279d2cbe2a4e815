"""Parameters are taken in whichever containers they come, by path and shape, and never by order."""

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.core import FrozenDict
from support.tiny import TEXT

from diffusax.models import CLIPTextModel
from diffusax.models.parameter_tree import fitted_tree
from diffusax.networks import Model, initialize

IDS = np.array([[5, 3, 7]])


@pytest.fixture(scope="module")
def encoder():
    """Twelve layers, whose numbers are in another order as texts: 0, 1, 10, 11, 2."""
    config = {**TEXT, "vocab_size": 16, "num_hidden_layers": 12, "max_position_embeddings": 4}
    return initialize(CLIPTextModel, CLIPTextModel.config_class(**config))


def with_keys(tree, key):
    if not isinstance(tree, dict):
        return tree
    return {key(k): with_keys(v, key) for k, v in tree.items()}


def with_integers(tree, kind=int):
    """The tree with integers as indices of lists, as earlier versions had them."""
    return with_keys(tree, lambda k: kind(k) if k.isdecimal() else k)


def with_lists(tree):
    if not isinstance(tree, dict):
        return tree
    if all(k.isdecimal() for k in tree):
        return [with_lists(tree[k]) for k in sorted(tree, key=int)]
    return {k: with_lists(v) for k, v in tree.items()}


def as_struct(tree):
    if not isinstance(tree, dict):
        return tree
    if all(k.isdecimal() for k in tree):
        return tuple(as_struct(tree[k]) for k in sorted(tree, key=int))
    kind = flax.struct.dataclass(type("Part", (), {"__annotations__": dict.fromkeys(tree, object)}))
    return kind(**{k: as_struct(v) for k, v in tree.items()})


CONTAINERS = {
    "texts": lambda model: with_keys(model.params, str),
    "integers": lambda model: with_integers(model.params),
    "numpy_integers": lambda model: with_integers(model.params, np.int64),
    "lists": lambda model: with_lists(model.params),
    "dataclasses_and_tuples": lambda model: as_struct(model.params),
    "frozen": lambda model: FrozenDict(model.params),
    "frozen_integers": lambda model: FrozenDict(with_integers(model.params)),
    "state": lambda model: nnx.state(model.network.module(model.params)),
    "module": lambda model: model.network.module(model.params),
    "variables": lambda model: jax.tree.map(nnx.Param, model.params),
}


def leaves_equal(tree, other):
    assert jax.tree.structure(tree) == jax.tree.structure(other)
    return all(map(np.array_equal, jax.tree.leaves(tree), jax.tree.leaves(other)))


@pytest.mark.parametrize("kind", CONTAINERS)
def test_every_container_gives_the_networks_own_tree(encoder, kind):
    given = CONTAINERS[kind](encoder)
    network = encoder.network
    assert leaves_equal(network.fitted(given), encoder.params)
    assert leaves_equal(Model(network, given).params, encoder.params)


@pytest.mark.parametrize("given", [lambda tree: tree, with_integers])
def test_layers_run_in_the_order_of_numbers(encoder, given):
    params, apply = given(encoder.params), encoder.network.apply
    expected = encoder.run(IDS).last_hidden_state
    found = jax.jit(lambda params: apply(params, IDS).last_hidden_state)(params)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    gradient = jax.grad(lambda params: apply(params, IDS).last_hidden_state.sum())
    assert jax.tree.structure(jax.eval_shape(gradient, params)) == jax.tree.structure(params)


def test_a_tree_that_is_right_is_not_copied(encoder):
    assert encoder.network.fitted(encoder.params) is encoder.params
    shapes = encoder.network.shapes
    assert encoder.network.fitted(shapes) is shapes


def changed(tree, path, value):
    if not path:
        return value
    rest = {k: v for k, v in tree.items() if k != path[0]}
    new = changed(tree.get(path[0], {}), path[1:], value)
    return rest if new is None else {**rest, path[0]: new}


NORM = ("text_model", "final_layer_norm", "scale")
LAYERS = ("text_model", "encoder", "layers")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (NORM, None, "lacks text_model.final_layer_norm.scale"),
        (("text_model", "encoder"), {}, r"lacks text_model.encoder.\S+, .* and 189 more"),
        (("other", "0"), np.ones(1, np.float32), "has, beside the network's, other.0"),
        (
            LAYERS,
            {"1": np.ones(1, np.float32)},
            r"lacks .* 189 more, has, beside .*encoder.layers.1$",
        ),
        (NORM, np.ones(3), r"differs in text_model.final_layer_norm.scale \(\(3,\), not \(32,\)\)"),
        (NORM, np.ones(32, np.int32), r"scale \(\(32,\) int32, not \(32,\)\)"),
        (NORM, 1.0, r"scale \(a float, not \(32,\)\)"),
        (
            (*LAYERS, "10", "mlp", "fc1", "kernel"),
            np.ones((64, 32)),
            r"layers.10.mlp.fc1.kernel \(\(64, 32\), not \(32, 64\)\)",
        ),
    ],
)
def test_an_error_names_the_parameter(encoder, path, value, message):
    message = f"params must be those of the CLIPTextModel.*: the tree .*{message}"
    params, before = changed(encoder.params, path, value), encoder.params
    with pytest.raises(ValueError, match=message):
        Model(encoder.network, params)
    with pytest.raises(ValueError, match=message):
        encoder.params = params
    assert encoder.params is before
    with pytest.raises(ValueError, match=message):
        encoder.network.apply(params, IDS)


def test_two_keys_of_one_index_are_named(encoder):
    first = encoder.params["text_model"]["encoder"]["layers"]["0"]
    params = changed(encoder.params, (*LAYERS, 0), first)
    with pytest.raises(ValueError, match=r"has twice text_model\.encoder\.layers\.0"):
        Model(encoder.network, params)


def test_other_dtypes_and_tracers_are_parameters(encoder):
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), encoder.params)
    assert encoder.network.fitted(half) is half

    @jax.vmap
    def scaled(factor):
        params = jax.tree.map(lambda x: x * factor, with_integers(encoder.params))
        return fitted_tree(encoder.network.shapes, params, "encoder")["text_model"]

    assert scaled(jnp.ones(2))["final_layer_norm"]["scale"].shape == (2, 32)
