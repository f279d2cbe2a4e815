"""Hooks in networks alone, beside PyTorch's attention processors and forward hooks."""

import contextlib
import re
import sys
from unittest import mock

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.tree_util import Partial
from support.attention_processors import CrossProcessor, JointProcessor, outputs, processed
from support.tiny import UNET, randomize
from support.tiny_flux3 import flux3_inputs, flux3_transformer
from support.tiny_transformers import (
    flux_arguments,
    flux_inputs,
    flux_transformer,
    klein_inputs,
    klein_transformer,
    krea2_inputs,
    krea2_transformer,
    qwen_image_inputs,
    qwen_image_transformer,
    z_image_inputs,
    z_image_transformer,
)

import diffusax
from diffusax.runtime.programs.compilations import count_compilations

TOLERANCE = 1e-4
BLOCK = "up_blocks.1.attentions.0.transformer_blocks.0"
TOKENS = 7


def keep(value, at):
    return value, value


def reweigh(weights, probs, at):
    """Prompt-to-prompt's reweighting (Hertz et al. 2022, section 3), which sums to one again."""
    probs = probs * weights
    return probs / probs.sum(-1, keepdims=True), None


def reweighed(weights):
    def edit(probs):
        probs = probs * weights
        return probs / probs.sum(-1, keepdim=True)

    return edit


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.fixture(scope="module")
def unets(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unet")
    theirs = randomize(diffusers.UNet2DConditionModel(**UNET["sd1"])).requires_grad_(False)
    theirs.save_pretrained(folder)
    return theirs, diffusax.UNet2DConditionModel.from_pretrained(folder)


@pytest.fixture(scope="module")
def fluxes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("flux")
    theirs = flux_transformer()
    theirs.save_pretrained(folder)
    return theirs, diffusax.FluxTransformer2DModel.from_pretrained(folder)


X, T, CONTEXT = normal(2, 4, 16, 16), np.array([40, 700]), normal(2, TOKENS, 32, seed=1)


def predicted(unet, **options):
    found = unet(*map(torch.from_numpy, (X, T, CONTEXT)), **options)
    return found.sample


def close(found, expected, tolerance=TOLERANCE):
    expected = np.asarray(expected)
    assert found.shape == expected.shape
    assert np.abs(expected).max() > 100 * tolerance
    np.testing.assert_allclose(found, expected, atol=tolerance)


def test_maps_of_a_unet_are_those_of_a_processor(unets):
    theirs, ours = unets
    block = theirs.get_submodule(BLOCK)
    with (
        processed(block.attn2, CrossProcessor()) as cross,
        processed(block.attn1, CrossProcessor()) as own,
    ):
        predicted(theirs)
    plain = ours(X, T, CONTEXT)
    found = ours(X, T, CONTEXT, hooks={r".*\.attention_probs": keep})
    # Whoever only reads changes nothing.
    np.testing.assert_array_equal(found.sample, plain.sample)
    assert plain.kept is None
    assert len(found.kept) == 2 * len([n for n in theirs.attn_processors if "attn2" in n])
    close(found.kept[f"{BLOCK}.attn2.attention_probs"], cross.maps[0])
    close(found.kept[f"{BLOCK}.attn1.attention_probs"], own.maps[0])
    assert found.to_tuple()[1] is found.kept
    cross = {r".*attn2\.attention_probs": keep}
    _, kept = ours(X, T, CONTEXT, hooks=cross, return_dict=False)
    assert len(kept) == len(found.kept) / 2


def test_features_are_those_of_forward_hooks(unets):
    theirs, ours = unets
    names = ["mid_block", "up_blocks.0", "conv_in", "down_blocks.0.resnets.0"]
    names += ["up_blocks.1.attentions.1", f"{BLOCK}.attn2", f"{BLOCK}.ff", BLOCK]
    layers = [theirs.get_submodule(name) for name in (*names, "down_blocks.0")]
    with contextlib.ExitStack() as stack:
        expected = [stack.enter_context(outputs(layer)) for layer in layers]
        predicted(theirs)
    kept = ours(X, T, CONTEXT, hooks={"|".join((*names, "down_blocks.0")): keep}).kept
    for name, (value,) in zip(names, expected):
        value = value[0] if isinstance(value, tuple) else value
        value = value if value.ndim == 3 else value.permute(0, 2, 3, 1)
        close(kept[name], value)
    x, skips = kept["down_blocks.0"]
    close(x, expected[-1][0][0].permute(0, 2, 3, 1))
    for skip, value in zip(skips, expected[-1][0][1], strict=True):
        close(skip, value.permute(0, 2, 3, 1))


def test_queries_keys_and_values_are_those_of_the_projections(unets):
    theirs, ours = unets
    layer = theirs.get_submodule(f"{BLOCK}.attn2")
    with outputs(layer.to_q) as q, outputs(layer.to_k) as k, outputs(layer.to_v) as v:
        predicted(theirs)
    kept = ours(X, T, CONTEXT, hooks={rf"{BLOCK}\.attn2\.(query|key|value)": keep}).kept
    for name, (value,) in (("query", q), ("key", k), ("value", v)):
        close(kept[f"{BLOCK}.attn2.{name}"], value.unflatten(-1, (4, -1)))


def test_an_edit_and_its_gradient_are_those_of_pytorch(unets):
    theirs, ours = unets
    weights = np.array([1, 3, 0.2, 1, 1, 2, 0.5], np.float32)
    leaf = torch.from_numpy(weights.copy()).requires_grad_()
    layer = theirs.get_submodule(f"{BLOCK}.attn2")
    with processed(layer, CrossProcessor(reweighed(leaf))):
        expected = predicted(theirs)
        (expected**2).mean().backward()
    pattern = rf"{BLOCK}\.attn2\.attention_probs"
    found = ours(X, T, CONTEXT, hooks={pattern: Partial(reweigh, weights)}).sample
    close(found, expected.detach())
    assert np.abs(found - ours(X, T, CONTEXT).sample).max() > 100 * TOLERANCE

    def loss(weights):
        y = ours(X, T, CONTEXT, hooks={pattern: Partial(reweigh, weights)}).sample
        return (y**2).mean()

    close(jax.grad(loss)(weights), leaf.grad)
    with count_compilations() as compiled:
        ours(X, T, CONTEXT, hooks={pattern: Partial(reweigh, weights + 1)})
    assert compiled == []


def test_residuals_are_those_of_a_controlnet(unets):
    theirs, ours = unets
    mid = normal(2, 64, 8, 8, seed=3)
    expected = predicted(
        theirs,
        down_block_additional_residuals=[torch.zeros(1)] * 4,
        mid_block_additional_residual=torch.from_numpy(mid),
    )

    def add(residual, x, at):
        return x + residual, None

    found = ours(X, T, CONTEXT, hooks={"mid_block": Partial(add, mid.transpose(0, 2, 3, 1))})
    close(found.sample, expected)


def test_maps_of_joint_attention_are_those_of_a_processor(fluxes):
    theirs, ours = fluxes
    given = flux_inputs()
    names = ["transformer_blocks.1.attn", "single_transformer_blocks.2.attn"]
    weights = np.linspace(0.2, 4, given.text.shape[1] + given.tokens.shape[1], dtype=np.float32)
    arguments = {k: v.numpy() for k, v in flux_arguments(given).items()}
    for name in names:
        with processed(theirs.get_submodule(name), JointProcessor()) as read:
            theirs(**flux_arguments(given))
        hooks = {rf"{name}\.attention_probs": keep}
        found = ours(**arguments, hooks=hooks)
        close(found.kept[f"{name}.attention_probs"], read.maps[0])
        np.testing.assert_array_equal(found.sample, ours(**arguments).sample)
        edit = JointProcessor(reweighed(torch.from_numpy(weights)))
        with processed(theirs.get_submodule(name), edit):
            expected = theirs(**flux_arguments(given)).sample
        edited = ours(**arguments, hooks={rf"{name}\.attention_probs": Partial(reweigh, weights)})
        close(edited.sample, expected)
    for name in ("transformer_blocks.0", "single_transformer_blocks.1"):
        with outputs(theirs.get_submodule(name)) as expected:
            theirs(**flux_arguments(given))
        kept = ours(**arguments, hooks={name: keep}).kept[name]
        if name.startswith("single"):
            # diffusers gives a text's and an image's tokens, which are one sequence here.
            close(kept, torch.cat(expected[0], 1))
        else:
            # diffusers gives those of the text first.
            close(kept[1], expected[0][0])
            close(kept[0], expected[0][1])


def z_image_arguments():
    given = z_image_inputs((5, 40))
    return {"x": list(given.latents[:, :, None]), "t": given.times, "cap_feats": given.captions}


OTHERS = {
    "klein": (
        klein_transformer,
        lambda: klein_inputs().arguments(),
        r"(single_)?transformer_blocks\.\d+\.attn",
    ),
    "flux3": (
        flux3_transformer,
        lambda: flux3_inputs().arguments(),
        r".*blocks.*\.attn",
    ),
    "krea2": (
        krea2_transformer,
        lambda: krea2_inputs((3, 8)).arguments(),
        r"transformer_blocks\.\d+\.attn",
    ),
    "qwen_image": (
        qwen_image_transformer,
        lambda: qwen_image_inputs((3, 8)).arguments(),
        r"transformer_blocks\.\d+\.attn",
    ),
    "z_image": (z_image_transformer, z_image_arguments, r"layers\.\d+\.attention"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_maps_of_other_transformers_are_those_by_which_they_attend(name, tmp_path):
    build, arguments, attention = OTHERS[name]
    theirs = build()
    theirs.save_pretrained(tmp_path)
    ours = diffusax.AutoModel.from_pretrained(tmp_path)
    given = jax.tree.map(np.asarray, arguments())

    def same(probs, at):
        # Another array, so that the result is computed of it.
        return 1 * probs, probs.sum(-1)

    plain = jax.tree.leaves(ours(**given).sample)
    found = ours(**given, hooks={rf"{attention}\.attention_probs": same})
    for x, y in zip(jax.tree.leaves(found.sample), plain, strict=True):
        close(x, y, 2e-5)
    assert len(found.kept) >= 2
    for total in found.kept.values():
        np.testing.assert_allclose(total, 1, atol=1e-5)
    dropped = ours(**given, hooks={rf"{attention}\.attention_probs": drop}).sample
    changed = [np.abs(x - y).max() for x, y in zip(jax.tree.leaves(dropped), plain)]
    assert max(changed) > 100 * TOLERANCE


def drop(probs, at):
    return probs.at[..., :2].set(0), None


ORDERS = {"klein": lambda x, s: x, "qwen_image": lambda x, s: np.roll(x, -s, axis=-1)}
"""What brings PyTorch's tokens, of which the text's s come first, into our order."""


@pytest.mark.parametrize("name", ORDERS)
def test_joint_maps_of_newer_transformers_are_pytorchs(name, tmp_path):
    build, arguments, _ = OTHERS[name]
    theirs = build()
    theirs.save_pretrained(tmp_path)
    ours = diffusax.AutoModel.from_pretrained(tmp_path)
    given = arguments()
    module, maps = sys.modules[type(theirs).__module__], []
    attend = module.dispatch_attention_fn

    def recorded(query, key, value, attn_mask=None, **options):
        scores = torch.einsum("bthd,bshd->bhts", query, key) * query.shape[-1] ** -0.5
        if attn_mask is not None:
            seen = attn_mask if attn_mask.ndim == 4 else attn_mask[:, None, None]
            scores = scores.masked_fill(~seen, -torch.inf)
        maps.append(scores.softmax(-1).numpy())
        return attend(query, key, value, attn_mask=attn_mask, **options)

    with mock.patch.object(module, "dispatch_attention_fn", recorded), torch.no_grad():
        theirs(**given)
    point = "transformer_blocks.1.attn.attention_probs"
    found = ours(**jax.tree.map(np.asarray, given), hooks={re.escape(point): keep}).kept[point]
    s = given["encoder_hidden_states"].shape[1]
    expected = ORDERS[name](maps[1], s)
    expected = ORDERS[name](expected.swapaxes(-1, -2), s).swapaxes(-1, -2)
    # What a text's padding reads concerns nobody.
    image = slice(0, -s) if name == "qwen_image" else slice(None)
    close(found[:, :, image], expected[:, :, image])


def test_a_function_of_ones_own_has_hooks_in_jit_and_vmap(unets):
    _, ours = unets
    network, given = ours.network, (X.transpose(0, 2, 3, 1), T, CONTEXT)

    @jax.jit
    def features(params, scale):
        hooks = {"mid_block": Partial(lambda scale, x, at: (scale * x, x.mean((1, 2))), scale)}
        return network.apply(params, *given, hooks=hooks)

    y, kept = features(ours.params, jnp.float32(1))
    close(y, network.apply(ours.params, *given))
    assert kept["mid_block"].shape == (2, 64)
    many, _ = jax.vmap(lambda scale: features(ours.params, scale))(jnp.array([0.0, 1.0]))
    close(many[1], y)
    assert np.abs(many[0] - y).max() > 100 * TOLERANCE
    both = {"conv_in|mid_block": lambda x, at: (x, None if at.name == "conv_in" else x.mean())}
    assert [*network.apply(ours.params, *given, hooks=both)[1]] == ["mid_block"]
    assert at_of(network, ours.params, given) == ("mid_block", 1, None, None)


def at_of(network, params, given):
    found = []
    network.apply(params, *given, hooks={"mid_block": lambda x, at: (x, found.append(at))})
    return tuple(found[0])


@pytest.mark.parametrize(
    ("hooks", "said"),
    [
        ({"mid": keep}, "'mid'] is never called: it matches no whole name"),
        ({"up_blocks": keep}, "'up_blocks' is not called as a layer of its own"),
        ({"mid_block": lambda x, at: x}, "must return a pair"),
        ({"mid_block": lambda x, at: (x[:1], None)}, "must return a value of the shape"),
        ({"mid_block": keep, "mid_block.?": keep}, "two functions that keep something"),
        ({"(": keep}, "regular expressions as keys"),
        ({"mid_block": 3}, r"must be a function of \(value, at\)"),
        ({"mid_block": Partial(keep, "no number")}, "numbers as leaves"),
        ([keep], "must be a dictionary"),
    ],
)
def test_mistakes_are_named(unets, hooks, said):
    with pytest.raises(ValueError, match=said):
        unets[1](X, T, CONTEXT, hooks=hooks)


def test_hooks_exclude_what_computes_layers_apart(unets):
    _, ours = unets
    given = ours.params, X.transpose(0, 2, 3, 1), T, CONTEXT
    with pytest.raises(ValueError, match="gradient_checkpointing"):
        ours.network.apply(*given, hooks={"mid_block": keep}, gradient_checkpointing="blocks")
