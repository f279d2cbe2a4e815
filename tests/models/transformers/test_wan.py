"""Wan's transformer against diffusers' own, live, with all weights random."""

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from support.tiny import randomize
from support.tiny_transformers import WAN, WAN_VACE

import diffusax
from diffusax.models import WanTransformer3DConfig, WanVACETransformer3DConfig

IMAGE = {"image_dim": 10, "added_kv_proj_dim": 28}
CASES = {
    "text": {},
    "patches": {"patch_size": (2, 1, 2), "cross_attn_norm": False, "eps": 1e-3},
    "image": IMAGE,
    "two images": {**IMAGE, "pos_embed_seq_len": 6},
}


def build(case="text"):
    return randomize(diffusers.WanTransformer3DModel(**{**WAN, **CASES[case]}), seed=1).eval()


def inputs(case="text", *, per_token=False):
    """Latents b c f h w, times, 512 states of a text, and those of images."""
    rng = np.random.default_rng(0)

    def normal(*shape):
        return rng.standard_normal(shape, np.float32)

    x = normal(2, 5, 4, 6, 4)
    size = CASES[case].get("patch_size", (1, 2, 2))
    tokens = int(np.prod([n // p for n, p in zip(x.shape[2:], size)]))
    times = rng.uniform(0, 1000, (2, tokens) if per_token else 2).astype(np.float32)
    given = {"hidden_states": x, "timestep": times, "encoder_hidden_states": normal(2, 512, 12)}
    if "image" in case:
        images = 4 if case == "two images" else 2
        given["encoder_hidden_states_image"] = normal(images, 3, 10)
    return given


@torch.no_grad()
def theirs_of(network, given):
    return network(**{name: torch.tensor(x) for name, x in given.items()}).sample.numpy()


@pytest.mark.parametrize(
    ("case", "per_token"), [*((case, False) for case in CASES), ("text", True)]
)
def test_the_prediction_is_that_of_diffusers(tmp_path, case, per_token):
    theirs = build(case)
    theirs.save_pretrained(tmp_path)
    ours = diffusax.WanTransformer3DModel.from_pretrained(tmp_path)
    given = inputs(case, per_token=per_token)
    expected, found = theirs_of(theirs, given), ours(**given).sample
    assert found.shape == expected.shape == (2, 4, 4, 6, 4)
    assert np.abs(found - expected).max() <= 1e-4 * np.abs(expected).max()
    for name, x in given.items():
        changed = theirs_of(theirs, {**given, name: x[..., ::-1].copy()})
        assert np.abs(changed - expected).max() > 1e-2 * np.abs(expected).max(), name


def test_a_prefix_stands_for_text_and_images(tmp_path):
    build("image").save_pretrained(tmp_path)
    ours = diffusax.WanTransformer3DModel.from_pretrained(tmp_path)
    given = inputs("image")
    x, times, text, image = (jnp.asarray(value) for value in given.values())
    x = jnp.moveaxis(x, 1, -1)
    prefix = ours.run(text, image, method="prefix")
    expected, found = ours.run(x, times, text, image), ours.run(x, times, prefix=prefix)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    half = jax.tree.map(lambda leaf: 0.5 * leaf, prefix)
    assert np.abs(ours.run(x, times, prefix=half) - expected).max() > 1e-2


def test_saved_parameters_are_those_of_diffusers(tmp_path):
    theirs = build("two images")
    theirs.save_pretrained(tmp_path / "theirs")
    ours = diffusax.AutoModel.from_pretrained(tmp_path / "theirs")
    assert isinstance(ours, diffusax.WanTransformer3DModel)
    ours.save_pretrained(tmp_path / "ours")
    back = diffusers.WanTransformer3DModel.from_pretrained(tmp_path / "ours")
    for name, value in theirs.state_dict().items():
        assert torch.equal(back.state_dict()[name], value), name


VACE = {**WAN, **WAN_VACE}


@pytest.mark.parametrize("kind", ["text", "image"])
def test_what_a_network_is_shown_counts_as_in_diffusers(tmp_path, kind):
    config = {**VACE, **CASES[kind]}
    theirs = randomize(diffusers.WanVACETransformer3DModel(**config), seed=1).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    ours = diffusax.AutoModel.from_pretrained(tmp_path / "theirs")
    assert isinstance(ours, diffusax.WanVACETransformer3DModel)
    rng = np.random.default_rng(1)
    given = inputs(kind)
    given["control_hidden_states"] = rng.standard_normal((2, 12, 4, 6, 4), np.float32)
    given["control_hidden_states_scale"] = np.float32([0.7, 1.6])
    expected, found = theirs_of(theirs, given), ours(**given).sample
    assert np.abs(found - expected).max() <= 1e-4 * np.abs(expected).max()
    for name, x in given.items():
        changed = theirs_of(theirs, {**given, name: x[..., ::-1].copy()})
        assert np.abs(changed - expected).max() > 1e-2 * np.abs(expected).max(), name
    seen = []
    handle = theirs.vace_blocks[1].register_forward_hook(lambda *of: seen.append(of[2]))
    theirs_of(theirs, given)
    handle.remove()
    kept = ours(**given, hooks={r"vace_blocks\.1": lambda value, at: (value, value)}).kept
    for x, y in zip(seen[0], kept["vace_blocks.1"], strict=True):
        np.testing.assert_allclose(y, x, atol=1e-4 * float(x.abs().max()))
    del given["control_hidden_states_scale"]
    whole = theirs_of(theirs, given)
    assert np.abs(ours(**given).sample - whole).max() <= 1e-4 * np.abs(whole).max()
    ours.save_pretrained(tmp_path / "ours")
    back = diffusers.WanVACETransformer3DModel.from_pretrained(tmp_path / "ours")
    for name, value in theirs.state_dict().items():
        assert torch.equal(back.state_dict()[name], value), name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"control_hidden_states": None}, "control_hidden_states must be given"),
        ({"control_hidden_states": np.zeros((2, 11, 4, 6, 4), np.float32)}, "batch, 12, frames"),
        ({"control_hidden_states": np.zeros((2, 12, 4, 4, 4), np.float32)}, "rows and columns of"),
        ({"control_hidden_states_scale": np.ones(3)}, "must have 2 numbers"),
    ],
)
def test_controls_that_do_not_fit_are_errors(change, message):
    ours = diffusax.WanVACETransformer3DModel(WanVACETransformer3DConfig(**VACE))
    shown = {"control_hidden_states": np.zeros((2, 12, 4, 6, 4), np.float32)}
    with pytest.raises(ValueError, match=message):
        ours(**{**inputs(), **shown, **change})


@pytest.mark.parametrize("layers", [(1, 2), (0, 3), (0, 2, 1)])
def test_layers_of_a_control_are_ascending_and_there(layers):
    with pytest.raises(ValueError, match="vace_layers must be ascending"):
        WanVACETransformer3DConfig(**{**VACE, "vace_layers": layers})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_states": np.zeros((2, 4, 6, 4, 5), np.float32)}, r"transpose\(0, 4, 1, 2, 3\)"),
        ({"hidden_states": np.zeros((2, 5, 4, 5, 4), np.float32)}, "patches of .* divide"),
        ({"hidden_states": np.zeros((2, 5, 33, 2, 2), np.float32)}, "at most 32 tokens"),
        ({"timestep": np.zeros((2, 3), np.float32)}, "one for each of their 24 tokens"),
        ({"encoder_hidden_states": np.zeros((2, 8, 11), np.float32)}, "batch, tokens, 12"),
        ({"encoder_hidden_states_image": np.zeros((2, 3, 10), np.float32)}, "a text alone"),
        ({"attention_kwargs": {"scale": 0.5}}, "attention_kwargs must be None"),
    ],
)
def test_inputs_that_do_not_fit_are_errors(change, message):
    ours = diffusax.WanTransformer3DModel(WanTransformer3DConfig(**WAN))
    with pytest.raises(ValueError, match=message):
        ours(**{**inputs(), **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image_dim": 10}, "image_dim and added_kv_proj_dim must both"),
        ({"attention_head_dim": 13}, "attention_head_dim=13 must be even"),
        ({"patch_size": (1, 2)}, "patch_size"),
    ],
)
def test_options_that_do_not_fit_are_errors(change, message):
    with pytest.raises(ValueError, match=message):
        WanTransformer3DConfig(**{**WAN, **change})
