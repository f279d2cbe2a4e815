"""The tiny PyTorch pipelines that other tests run on JAX: they run, and do the same twice."""

import numpy as np
import pytest
import torch
from torch_families import REGISTRY, WITHOUT_ENTRY, all_image_pipelines
from torch_families.check import arrays, problem, run
from torch_families.weights import randomize

QUICK = [
    "StableDiffusionPipeline",
    "StableDiffusionXLInpaintPipeline",
    "StableDiffusion3Pipeline",
    "FluxImg2ImgPipeline",
    "PixArtSigmaPipeline",
    "SanaPipeline",
    "QwenImagePipeline",
]
pytestmark = pytest.mark.filterwarnings("ignore")


def _check(name: str) -> None:
    first = arrays(run(REGISTRY[name]))
    assert not problem(first)
    second = arrays(run(REGISTRY[name]))
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", QUICK)
def test_small_call(name: str) -> None:
    _check(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(REGISTRY) - set(QUICK)))
def test_more_small_calls(name: str) -> None:
    _check(name)


def test_another_seed_draws_something_else() -> None:
    family = REGISTRY["FluxPipeline"]
    assert not np.array_equal(arrays(run(family))[0], arrays(run(family, seed=1))[0])


def test_no_parameter_is_left_at_zero() -> None:
    pipe, _ = REGISTRY["StableDiffusionControlNetPipeline"]()
    for name, parameter in pipe.controlnet.named_parameters():
        assert parameter.abs().max() > 0, name
        assert not parameter.requires_grad


def test_weights_follow_torch_seed() -> None:
    layer = torch.nn.Linear(3, 4)
    torch.manual_seed(5)
    first = randomize(layer).weight.clone()
    torch.manual_seed(5)
    assert torch.equal(randomize(layer).weight, first)


def test_every_image_pipeline_has_an_entry_or_a_reason() -> None:
    found = set(all_image_pipelines())
    assert len(found) > 150
    known = set(REGISTRY) | set(WITHOUT_ENTRY)
    assert not found - known
    assert not set(REGISTRY) & set(WITHOUT_ENTRY)
    assert all(WITHOUT_ENTRY.values())
