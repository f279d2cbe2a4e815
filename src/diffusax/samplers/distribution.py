"""The distribution of a stochastic step: its mean and deviation, and log probabilities.

Policy gradients take a run as a decision process, whose actions are the samples after each step
(Black et al. 2023, "Training Diffusion Models with Reinforcement Learning", section 4).
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from diffusax.samplers.by_hand import functional_step
from diffusax.samplers.rows import Table
from diffusax.samplers.step import spread
from diffusax.samplers.terms import NAMES

_NOISE = NAMES.index("NOISE")


class StepDistribution(NamedTuple):
    """The normal distribution of the sample after a step, p(x_{t-1} | x_t), for each image.

    mean: b ..., the sample after the step without noise. std: (), or b where images have rows of
    their own, its deviation in each number; 0 where the step draws no noise.
    """

    mean: jax.Array
    std: jax.Array

    def log_prob(self, sample: jax.Array) -> jax.Array:
        """Returns the logarithm of the density of samples, b ..., for each image: b.

        It is the sum over an image's numbers. DDPO's own program takes their mean instead, which
        is another scale of its clipping. A step without noise has no density, and gives 0.
        """
        std = spread(jnp.asarray(self.std), sample)
        safe = jnp.where(std > 0, std, 1)
        each = -0.5 * ((sample - self.mean) / safe) ** 2 - jnp.log(safe) - _LOG_ROOT_TWO_PI
        return jnp.where(std > 0, each, 0).reshape(sample.shape[0], -1).sum(-1)

    def noise_of(self, sample: jax.Array) -> jax.Array:
        """Returns the noise, b ..., with which the step gives these samples; 0 without noise.

        With it, the step of `functional` goes on as in a run that is replayed from its samples,
        whatever a sampler keeps of the noise.
        """
        std = spread(jnp.asarray(self.std), sample)
        return jnp.where(std > 0, (sample - self.mean) / jnp.where(std > 0, std, 1), 0)


def step_distribution(state: jax.Array, row: Table, prediction: jax.Array) -> StepDistribution:
    """Returns the distribution of the sample after a row, as a pure function to differentiate.

    All samplers that draw noise have it, because rows are linear in their noise: DDPM, DDIM with
    eta above 0, the ancestral and SDE samplers, LCM, TCD. Of a step with two rows, each is one.
    Where a sampler keeps the noise of a row for the next (DPMSolverSDEScheduler), the next row's
    distribution is given the state, and the product of both is that of the whole step.

    Args:
        state: 6 b ..., see `Stepped.functional`.
        row: a row of the table, without the table's first axis.
        prediction: b ..., what the network says of row.in_scale * state[0] at row.timestep.

    Raises:
        ValueError: the shapes do not agree.
    """
    mean = functional_step(state, row, prediction)[0]
    return StepDistribution(mean, jnp.abs(jnp.asarray(row.update)[..., 0, _NOISE]))


_LOG_ROOT_TWO_PI = 0.5 * math.log(2 * math.pi)
