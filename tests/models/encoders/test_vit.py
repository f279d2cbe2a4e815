"""ViT and DINOv2 against transformers on the same weights."""

import numpy as np
import pytest
import torch
import transformers
from support.tiny import randomize

import diffusax
from diffusax.models.encoders.vit import bicubic

TINY = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}


def save(folder, name, **options):
    config = getattr(transformers, f"{name.removesuffix('Model')}Config")(**{**TINY, **options})
    model = randomize(getattr(transformers, name)(config))
    model.save_pretrained(folder)
    return model


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "options", "size"),
    [
        ("ViTModel", {"intermediate_size": 40}, (32, 32)),
        ("ViTModel", {"intermediate_size": 40, "qkv_bias": False, "hidden_act": "quick_gelu"}, 0),
        ("Dinov2Model", {}, (32, 32)),
        # Positions are interpolated, and pixels at the edges make no whole patch.
        ("Dinov2Model", {"layerscale_value": 0.1, "mlp_ratio": 2}, (45, 24)),
        ("Dinov2Model", {"use_swiglu_ffn": True, "use_mask_token": False}, (32, 40)),
    ],
)
def test_states_are_those_of_transformers(tmp_path, name, options, size):
    theirs = save(tmp_path, name, **options)
    ours = diffusax.load_network(tmp_path)
    assert type(ours) is getattr(diffusax, name)
    x = torch.randn(2, 3, *(size or (48, 16)), generator=torch.Generator().manual_seed(1))
    given = {"output_hidden_states": True}
    if name == "ViTModel":
        given["interpolate_pos_encoding"] = size == 0
    expected, actual = theirs(x, **given), ours(x.numpy(), **given)
    np.testing.assert_allclose(actual[0], expected[0], atol=1e-4)
    for a, b in zip(actual.hidden_states, expected.hidden_states, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)
    if name == "Dinov2Model":
        np.testing.assert_allclose(actual.pooler_output, expected.pooler_output, atol=1e-4)
    ours.save_pretrained(tmp_path / "again")
    again = type(theirs).from_pretrained(tmp_path / "again")
    np.testing.assert_array_equal(again(x, **given)[0], expected[0])


@pytest.mark.parametrize(("old", "new"), [(37, 16), (4, 7), (5, 5), (3, 1)])
def test_bicubic_weights_are_torchs(old, new):
    x = torch.randn(1, 1, old, old, generator=torch.Generator().manual_seed(0))
    expected = torch.nn.functional.interpolate(
        x, size=(new, new), mode="bicubic", align_corners=False
    )
    weights = bicubic(old, new)
    np.testing.assert_allclose(weights @ x[0, 0].numpy() @ weights.T, expected[0, 0], atol=1e-5)


def test_mistakes_are_one_sentence(tmp_path):
    save(tmp_path / "vit", "ViTModel", intermediate_size=40)
    save(tmp_path / "dino", "Dinov2Model")
    vit, dino = (diffusax.load_network(tmp_path / name) for name in ("vit", "dino"))
    with pytest.raises(ValueError, match=r"pixel_values must have 32x32 pixels .* \(got 40x40\)"):
        vit(np.zeros((1, 3, 40, 40), np.float32))
    with pytest.raises(ValueError, match="at least 8x8 pixels"):
        dino(np.zeros((1, 3, 40, 7), np.float32))
    with pytest.raises(ValueError, match="bool_masked_pos must be None"):
        dino(np.zeros((1, 3, 32, 32), np.float32), np.zeros((1, 16), bool))
    with pytest.raises(ValueError, match="image_size=7 must be at least patch_size=8"):
        diffusax.Dinov2Model.from_config({**TINY, "image_size": 7})
