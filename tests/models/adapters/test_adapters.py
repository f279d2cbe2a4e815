"""Adapters of networks against PEFT, live, all weights random."""

import json

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from support import adapted
from support.adapted import (
    CONFIGS,
    ROWS,
    effects,
    inputs_of,
    network_of,
    random_adapter,
    run,
    whole,
)
from support.effort import few, first
from support.lora import ATTENTION, TEXT_ATTENTION, add_lora, lora_layers, weighed
from support.many_devices import run_on_devices
from support.tiny import randomize

from diffusax.lora import Lora
from diffusax.lora.stacks import WeightGroups, stack
from diffusax.models.adapters.low_rank import (
    AdaptedNetwork,
    Adapters,
    LowRank,
    Mixed,
    kernel_shapes,
)
from diffusax.models.network import cast_params, initialize_params
from diffusax.networks import load_network
from diffusax.pipelines.run import mixing
from diffusax.runtime.programs.compilations import count_compilations

# Rows of one batch that take different adapters, also none.
WEIGHTS = [{"style": 0.7, "face": 0.4}, {"face": -0.5}, {}]
compiled = jax.jit(run, static_argnums=0)


def torch_network(name):
    class_name, config = CONFIGS[name]
    if name.startswith("text"):
        return getattr(transformers, class_name)(transformers.CLIPTextConfig(**config))
    return getattr(diffusers, class_name)(**config)


def torch_outputs(name, network, given, row):
    """The outputs of one row, channels last."""
    tensors = jax.tree.map(lambda x: torch.tensor(x[row : row + 1]), given)
    if name.startswith("text"):
        output = network(tensors["input_ids"], output_hidden_states=True)
        pooled = getattr(output, "text_embeds", None)
        last = [output.last_hidden_state, *output.hidden_states]
        return [*last, output.pooler_output if pooled is None else pooled]
    for key in ("sample", "cond"):
        if key in tensors:
            tensors[key] = tensors[key].permute(0, 3, 1, 2)
    if "cond" in tensors:
        tensors["controlnet_cond"] = tensors.pop("cond")
    if "added_cond" in tensors:
        tensors["added_cond_kwargs"] = tensors.pop("added_cond")
    output = network(**tensors, return_dict=False)
    maps = [*output[0], output[1]] if name == "controlnet" else output
    return [x.permute(0, 2, 3, 1) for x in maps]


def ours_in_that_order(name, leaves):
    """Without the pooled output where there is a projection, which transformers does not return."""
    if name == "text_encoder_2":
        return [*leaves[:-2], leaves[-1]]
    return leaves


@pytest.fixture(params=few(CONFIGS, "unet", "controlnet", "text_encoder_2"))
def peft(request, tmp_path):
    """A network of PyTorch with two adapters of other ranks and targets, and ours of the files."""
    name = request.param
    theirs = randomize(torch_network(name))
    theirs.save_pretrained(tmp_path)
    ours = load_network(tmp_path)
    some = TEXT_ATTENTION if name.startswith("text") else ATTENTION
    add_lora(theirs, "style", 4, some, seed=1)
    add_lora(theirs, "face", 7, seed=2)
    return name, theirs, ours


@torch.no_grad()
def test_rows_that_take_different_adapters_equal_peft(peft):
    name, theirs, ours = peft
    names = ["style", "face"]
    adapters = {n: Lora({name: lora_layers(theirs, n)}) for n in names}
    assert len(adapters["face"].components[name]) == len(kernel_shapes(ours.network))
    (layers,) = stack(adapters, {name: ours.network}).values()
    given = inputs_of(name)
    stacked = Adapters(layers, WeightGroups({name: ours.network}).table(names, WEIGHTS))
    actual = ours_in_that_order(name, compiled(ours.network, ours.params, stacked, given))
    changes = []
    for row, weights in enumerate(WEIGHTS):
        with weighed(weights, theirs):
            expected = torch_outputs(name, theirs, given, row)
        with weighed({}, theirs):
            plain = torch_outputs(name, theirs, given, row)
        for a, e in zip(actual, expected, strict=True):
            assert np.abs(a[row : row + 1] - e.numpy()).max() <= 1e-5 * e.abs().max()
        changes.append(max(float((e - p).abs().max()) for e, p in zip(expected, plain)))
    assert min(changes[:2]) > 0.05
    assert changes[2] == 0


@pytest.mark.parametrize("name", few(CONFIGS, "unet", "controlnet", "text_encoder_2"))
def test_the_adapter_of_every_layer_counts(name):
    network, params, layers, weights = whole(name)
    assert set(layers) == set(kernel_shapes(network))
    found = effects(network, params, layers, weights, inputs_of(name))
    assert min(found.values()) > 1e-4, found


@pytest.mark.parametrize("name", few(CONFIGS, "unet_smallest"))
def test_the_adapter_of_every_layer_counts_where_devices_share_layers(tmp_path, name):
    out = tmp_path / "out"
    run_on_devices(adapted.__file__, str(out), name, devices=2)
    found = json.loads(out.read_text())
    assert max(found["differences"]) < 1e-5
    assert found["apart"] > 0.01
    assert set(found["effects"]) == set(kernel_shapes(network_of(name)))
    assert min(found["effects"].values()) > 1e-4, found["effects"]
    # As the kernels: B where columns are split, A where rows are.
    shares = {tuple(axes) for axes in found["split"].values()}
    assert shares - {(None, None, None)} == {(-2, -2, None), (-1, None, -1)}


def test_other_adapters_weights_and_numbers_of_adapters_compile_nothing():
    network = network_of("text_encoder_2")
    params, given = initialize_params(network.shapes), inputs_of("text_encoder_2")
    some = [path for path in kernel_shapes(network) if "_proj" in path]

    def encode(rows, **ranks):
        adapters = {
            n: random_adapter(network, "text", r, some[i : i + 4], seed=i)
            for i, (n, r) in enumerate(ranks.items())
        }
        (layers,) = stack(adapters, {"text": network}).values()
        stacked = Adapters(layers, WeightGroups({"text": network}).table(list(ranks), rows))
        return np.asarray(compiled(network, params, stacked, given)[0])

    first = encode([{"a": 1.0}] * ROWS, a=4)
    with count_compilations() as found:
        others = [
            encode([{"a": 0.5}, {"a": -1.0}, {}], a=4),
            encode([{"a": 1.0, "b": 2.0}] * ROWS, a=8, b=8),
            encode([{"a": 1.0}, {"b": 2.0}, {"c": 1.0}], a=1, b=3, c=7),
        ]
    assert found == []
    assert min(np.abs(other - first).max() for other in others) > 0.01


def test_weights_keep_their_digits_in_half_precision():
    rng = np.random.default_rng(0)
    x, down, up = (
        jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)
        for shape in ((2, 3, 4), (4, 5), (5, 6))
    )
    scale = jnp.float32([[1 / 3], [1.001]]) * jnp.ones(5)
    h = (jnp.matmul(x, down).astype(jnp.float32) * scale[:, None]).astype(jnp.bfloat16)
    which = np.zeros(5, np.int32)
    actual = LowRank(down, up, which, scale).linear(x, None)
    assert actual.dtype == jnp.bfloat16
    np.testing.assert_array_equal(actual, jnp.matmul(h, up))
    short = scale.astype(jnp.bfloat16).astype(jnp.float32)
    rounded = LowRank(down, up, which, short).linear(x, None)
    assert (actual != rounded).any()


@pytest.mark.parametrize("share", first([0.25, 0, 1], 2))
def test_a_mixture_of_all_rows_equals_the_weights_of_each(monkeypatch, share):
    network, params, layers, weights = whole("unet")
    params, given = jax.tree.map(jnp.asarray, params), inputs_of("unet")
    biased = {path: layer._replace(which=layer.which.copy()) for path, layer in layers.items()}
    for layer in biased.values():
        # A column of the adapter, after which there may be room for others.
        layer.which[0] = -1 - layer.which[0]
    row = weights[:1]
    alike = Adapters(biased, np.repeat(row, ROWS, axis=0))
    monkeypatch.setattr(mixing, "_SHARE", share)
    changed, left = mixing.mixed(network, params, biased, row[0])
    found = compiled(network, changed, Adapters(left, row), given)[0]
    expected, plain = (compiled(network, params, own, given)[0] for own in (alike, None))
    np.testing.assert_allclose(found, expected, atol=5e-5)
    assert np.abs(expected - plain).max() > 0.01
    same = Adapters(layers, alike.weights)
    assert np.abs(expected - compiled(network, params, same, given)[0]).max() > 0.01
    beside = {path: layer for path, layer in left.items() if isinstance(layer, Mixed)}
    together = [path for path, layer in beside.items() if layer.together is not None]
    of_queries = {path for path in layers if path.endswith("attn1.to_q")}
    if share == 1:
        # The keys and values of a prompt are computed once a run.
        assert {path.rpartition("attn2.")[2] for path in beside} == {"to_k", "to_v"}
    elif share:
        kernels = {path: np.prod(shape) for path, shape in kernel_shapes(network).items()}
        merged = sum(kernels[path] for path in layers if path not in beside)
        whole_size = sum(leaf.size for leaf in jax.tree.leaves(params))
        assert 0.15 < merged / whole_size <= share
    else:
        assert set(beside) == set(layers)
        assert set(together) == of_queries


def test_mixtures_change_no_kernels_where_these_are_split_or_a_device_is_small(monkeypatch):
    network, params, layers, weights = whole("unet")
    params = jax.tree.map(jnp.asarray, params)

    def beside():
        changed, left = mixing.mixed(network, params, layers, weights[0])
        same = jax.tree.map(lambda a, b: a is b, changed, params)
        assert all(jax.tree.leaves(same)) == all(isinstance(x, Mixed) for x in left.values())
        return all(jax.tree.leaves(same))

    assert not beside()
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    with monkeypatch.context() as patch:
        patch.setattr(mixing, "device_memory", lambda device: 2 * size - 1)
        assert beside()
    for axis in ("data", "fsdp", "tensor", "context"):
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((2,), (axis,))):
            assert beside() == (axis != "data")


def test_a_network_in_half_precision():
    network, params, layers, weights = whole("unet")
    given = inputs_of("unet")
    stacked, none = Adapters(layers, weights), Adapters(layers, 0 * weights)
    exact, plain = (compiled(network, params, a, given)[0] for a in (stacked, none))
    layers = {
        path: layer._replace(down=jnp.bfloat16(layer.down), up=jnp.bfloat16(layer.up))
        for path, layer in layers.items()
    }
    half = compiled(network, cast_params(params, jnp.bfloat16), Adapters(layers, weights), given)[0]
    assert half.dtype == jnp.bfloat16
    change = np.abs(exact - plain).max()
    assert np.abs(half.astype(jnp.float32) - exact).max() < 0.1 * change


def test_rows_of_one_text_share_their_weights():
    network, params, layers, weights = whole("text_encoder")
    ids = inputs_of("text_encoder")["input_ids"]
    repeated = np.repeat(weights, 2, axis=0)
    windows = np.concatenate([ids, ids[::-1]])
    expected = network.apply(params, windows, adapters=Adapters(layers, repeated))
    of_texts = AdaptedNetwork(network, Adapters(layers, weights))
    actual = of_texts.apply(params, windows, method="encode")
    np.testing.assert_array_equal(actual, expected.last_hidden_state)
    assert of_texts.config is network.config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights": np.ones((2, 1), np.float32)}, "one row for each of the 3 rows.*got 2"),
        ({"layers": "mid_block.attentions.7.proj_in"}, "mid_block.attentions.7.proj_in.*lacks"),
        ({"layers": "mid_block.attentions.0.norm"}, "mid_block.attentions.0.norm"),
    ],
)
def test_adapters_that_do_not_fit_are_errors(change, message):
    network, params, layers, weights = whole("unet")
    if "layers" in change:
        layers = {change["layers"]: next(iter(layers.values()))}
    adapters = Adapters(layers, change.get("weights", weights))
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda: run(network, params, adapters, inputs_of("unet")))


def test_a_network_forgets_its_adapters():
    network, params, layers, weights = whole("text_encoder")
    given = inputs_of("text_encoder")
    before = run(network, params, None, given)
    changed = run(network, params, Adapters(layers, weights), given)
    after = run(network, params, None, given)
    np.testing.assert_array_equal(after[0], before[0])
    assert np.abs(changed[0] - before[0]).max() > 0.01
