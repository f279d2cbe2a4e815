import numpy as np
import pytest
import torch
from support.tiny_transformers import flux_arguments, flux_controlnet, flux_inputs
from support.torch_params import assert_close

from diffusax.networks import load_network


@pytest.mark.parametrize(
    ("changes", "more"),
    [
        ({"num_mode": 3}, {"controlnet_mode": torch.tensor([[2], [0]])}),
        pytest.param(
            # As XLabs' are: pixels as inputs, and no blocks of the second kind.
            {"conditioning_embedding_channels": 16, "patch_size": 2, "num_single_layers": 0},
            {},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_residuals_are_those_of_diffusers(tmp_path, changes, more):
    network = flux_controlnet(**changes)
    network.save_pretrained(tmp_path)
    model = load_network(tmp_path, dtype="float32")
    call = flux_arguments(flux_inputs())
    shape = (2, 3, 48, 80) if "patch_size" in changes else (2, 15, 64)
    cond = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    given = {**call, **more, "controlnet_cond": cond, "conditioning_scale": 0.7}
    expected, actual = network(**given), model(**given)
    for name in ("controlnet_block_samples", "controlnet_single_block_samples"):
        theirs, ours = (getattr(output, name) or [] for output in (expected, actual))
        for one, other in zip(theirs, ours, strict=True):
            assert_close(other.numpy(), one.numpy())
    other = model(**{**given, "controlnet_cond": cond + 1}).controlnet_block_samples
    assert np.abs(other[0].numpy() - expected.controlnet_block_samples[0].numpy()).max() > 0.01


def test_a_missing_mode_is_an_error(tmp_path):
    flux_controlnet(num_mode=3).save_pretrained(tmp_path)
    model = load_network(tmp_path, dtype="float32")
    with pytest.raises(ValueError, match="controlnet_mode must be given"):
        model(**flux_arguments(flux_inputs()), controlnet_cond=torch.zeros(2, 15, 64))
