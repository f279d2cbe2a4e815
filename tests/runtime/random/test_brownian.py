import warnings

import numpy as np
import pytest
import torch
import torchsde
from diffusers.schedulers.scheduling_dpmsolver_sde import BrownianTreeNoiseSampler

from diffusax.runtime.random.brownian import BrownianNoise, BrownianTree, Motion

LOW, HIGH = 0.0291675, 14.614647


@pytest.mark.parametrize(("seed", "shape"), [(0, (4, 6, 6)), (7, (3,)), (2**60 + 1, (2, 4, 8, 8))])
def test_increments_are_those_of_torchsde_bit_for_bit(seed, shape):
    """Whatever is asked for before, and beyond the ends, of which torchsde warns."""
    options = {"tol": 1e-6, "pool_size": 24, "halfway_tree": True}
    theirs = torchsde.BrownianInterval(LOW, HIGH, size=shape, entropy=seed, **options)
    ours = BrownianTree(seed, LOW, HIGH, shape)
    rng = np.random.default_rng(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for low, high in np.sort(rng.uniform(LOW - 0.5, HIGH + 0.5, (40, 2))):
            np.testing.assert_array_equal(ours.increment(low, high), theirs(low, high).numpy())
        np.testing.assert_array_equal(ours.increment(0, 20), theirs(0.0, 20.0).numpy())


def test_levels_closer_than_the_tree_is_fine_have_no_increment():
    np.testing.assert_array_equal(BrownianTree(0, LOW, HIGH, (3,)).increment(1.0, 1.0000001), 0)


@pytest.mark.parametrize("seed", [5, (5, 9)])
def test_noise_is_that_of_the_noise_sampler_of_diffusers(seed):
    steps = ((HIGH, 6.5), (6.5, 2.25), (0.3, LOW))
    noise = BrownianNoise(Motion(seed, LOW, HIGH, (*steps, None)), (2, 5, 6, 4))
    seeds = list(seed) if isinstance(seed, tuple) else seed
    theirs = BrownianTreeNoiseSampler(torch.zeros(2, 4, 5, 6), LOW, HIGH, seeds)
    for row, (high, low) in enumerate(steps):
        expected = theirs(torch.tensor(high), torch.tensor(low)).numpy()
        np.testing.assert_allclose(noise.row(row).transpose(0, 3, 1, 2), expected, atol=1e-6)
    assert not noise.row(3).any()


def test_several_seeds_are_one_for_each_image():
    with pytest.raises(ValueError, match=r"noise_sampler_seed has 3 entries for 2 images; give"):
        BrownianNoise(Motion((1, 2, 3), LOW, HIGH, ()), (2, 5, 6, 4))
