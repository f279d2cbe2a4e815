"""What examples of InstructPix2Pix go without, against diffusers' script."""

import jax
import numpy as np
import pytest
import torch

from diffusax.training.step.draws import drop_conditions


def diffusers_masks(u: np.ndarray, p: float) -> tuple[np.ndarray, np.ndarray]:
    """Whose prompt and whose image train_instruct_pix2pix.py drops."""
    random_p = torch.tensor(u)
    prompt_mask = random_p < 2 * p
    image_mask = 1 - (random_p >= p).float() * (random_p < 3 * p).float()
    return prompt_mask.numpy(), image_mask.numpy() == 0


@pytest.mark.parametrize("p", [0.0, 0.05, 0.2, 1 / 3])
def test_the_masks_are_those_of_diffusers(p):
    u = np.random.default_rng(0).random(10_000, np.float32)
    edges = np.array([0, p, 2 * p, min(3 * p, 1 - 1e-7)], np.float32)
    u = np.concatenate([u, edges, np.nextafter(edges, np.float32(0))])
    result = drop_conditions(u, p)
    for ours, theirs in zip(result, diffusers_masks(u, p), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_twentieth_each_goes_without_text_without_both_and_without_picture():
    n, p = 100_000, 0.05
    u = jax.random.uniform(jax.random.key(0), (n,))
    text, image = (np.asarray(mask) for mask in drop_conditions(u, p))
    shares = {
        "text alone": (text & ~image).mean(),
        "both": (text & image).mean(),
        "picture alone": (~text & image).mean(),
    }
    # Four deviations of a share of n draws.
    tolerance = 4 * (p * (1 - p) / n) ** 0.5
    assert all(abs(share - p) < tolerance for share in shares.values()), shares
    assert abs((text | image).mean() - 3 * p) < 2 * tolerance
