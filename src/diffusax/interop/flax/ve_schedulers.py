"""diffusers' Flax schedulers for models whose input is the noise level instead of a timestep.

No pipeline uses them. Both follow their papers; the loop of a run belongs to the caller.
"""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from diffusax.interop.flax.outputs import FlaxKarrasVeOutput, FlaxSdeVeOutput
from diffusax.interop.flax.scheduler import FlaxSchedulerMixin
from diffusax.runtime.random.noise import as_key


class KarrasVeSchedulerState(flax.struct.PyTreeNode):
    """The state of FlaxKarrasVeScheduler.

    timesteps: n-1 ... 0. schedule: the squared sigmas that belong to them.
    """

    num_inference_steps: int | None = flax.struct.field(pytree_node=False, default=None)
    timesteps: Any = None
    schedule: Any = None


class FlaxKarrasVeScheduler(FlaxSchedulerMixin):
    """Stochastic sampling with churn (Karras et al. 2022, algorithm 2)."""

    def __init__(
        self,
        sigma_min: float = 0.02,
        sigma_max: float = 100,
        s_noise: float = 1.007,
        s_churn: float = 80,
        s_min: float = 0.05,
        s_max: float = 50,
    ):
        self._configure(locals())

    def create_state(self) -> KarrasVeSchedulerState:
        """Returns the state before `set_timesteps`."""
        return KarrasVeSchedulerState()

    def set_timesteps(
        self, state: KarrasVeSchedulerState, num_inference_steps: int, shape: tuple[int, ...] = ()
    ) -> KarrasVeSchedulerState:
        """Returns the state with the noise levels of a run of at least two steps."""
        timesteps = jnp.arange(num_inference_steps)[::-1]
        low, high = self.config.sigma_min**2, self.config.sigma_max**2
        schedule = high * (low / high) ** (timesteps / (num_inference_steps - 1))
        return state.replace(
            num_inference_steps=num_inference_steps, timesteps=timesteps, schedule=schedule
        )

    def add_noise_to_input(
        self, state: KarrasVeSchedulerState, sample: jax.Array, sigma: Any, key: jax.Array
    ) -> tuple[jax.Array, Any]:
        """Raises the noise of a sample from sigma; returns the sample and its new sigma."""
        c, steps = self.config, state.num_inference_steps
        if steps is None:
            raise ValueError("the state has no run yet; call set_timesteps(state, ...)")
        churned = (sigma >= c.s_min) & (sigma <= c.s_max)
        gamma = jnp.where(churned, min(c.s_churn / steps, 2**0.5 - 1), 0.0)
        noise = c.s_noise * _normal(key, sample.shape)
        raised = sigma + gamma * sigma
        return sample + jnp.sqrt(raised**2 - sigma**2) * noise, raised

    def step(
        self,
        state: KarrasVeSchedulerState,
        model_output: jax.Array,
        sigma_hat: Any,
        sigma_prev: Any,
        sample_hat: jax.Array,
        return_dict: bool = True,
    ) -> Any:
        """Returns the Euler step from sigma_hat to sigma_prev, and its derivative."""
        derivative = -model_output
        output = FlaxKarrasVeOutput(
            prev_sample=sample_hat + (sigma_prev - sigma_hat) * derivative,
            derivative=derivative,
            state=state,
        )
        return output if return_dict else output.to_tuple()

    def step_correct(
        self,
        state: KarrasVeSchedulerState,
        model_output: jax.Array,
        sigma_hat: Any,
        sigma_prev: Any,
        sample_hat: jax.Array,
        sample_prev: jax.Array,
        derivative: jax.Array,
        return_dict: bool = True,
    ) -> Any:
        """Returns the second-order correction, from the model's output at sigma_prev."""
        mean = (derivative - model_output) / 2
        output = FlaxKarrasVeOutput(
            prev_sample=sample_hat + (sigma_prev - sigma_hat) * mean,
            derivative=derivative,
            state=state,
        )
        return output if return_dict else output.to_tuple()


class ScoreSdeVeSchedulerState(flax.struct.PyTreeNode):
    """The state of FlaxScoreSdeVeScheduler.

    timesteps: from 1 down to sampling_eps. discrete_sigmas: the noise levels, ascending. sigmas:
    the noise level of each timestep.
    """

    timesteps: Any = None
    discrete_sigmas: Any = None
    sigmas: Any = None


class FlaxScoreSdeVeScheduler(FlaxSchedulerMixin):
    """The variance-exploding SDE with predictor and corrector (Song et al. 2021)."""

    def __init__(
        self,
        num_train_timesteps: int = 2000,
        snr: float = 0.15,
        sigma_min: float = 0.01,
        sigma_max: float = 1348.0,
        sampling_eps: float = 1e-5,
        correct_steps: int = 1,
    ):
        self._configure(locals())

    def __len__(self) -> int:
        return self.config.num_train_timesteps

    def create_state(self) -> ScoreSdeVeSchedulerState:
        """Returns the state with the noise levels of training."""
        return self.set_sigmas(ScoreSdeVeSchedulerState(), self.config.num_train_timesteps)

    def set_timesteps(
        self,
        state: ScoreSdeVeSchedulerState,
        num_inference_steps: int,
        shape: tuple[int, ...] = (),
        sampling_eps: float | None = None,
    ) -> ScoreSdeVeSchedulerState:
        """Returns the state with the times of a run, from 1 down to sampling_eps."""
        end = self.config.sampling_eps if sampling_eps is None else sampling_eps
        return state.replace(timesteps=jnp.linspace(1, end, num_inference_steps))

    def set_sigmas(
        self,
        state: ScoreSdeVeSchedulerState,
        num_inference_steps: int,
        sigma_min: float | None = None,
        sigma_max: float | None = None,
        sampling_eps: float | None = None,
    ) -> ScoreSdeVeSchedulerState:
        """Returns the state with a run's noise levels, geometric from sigma_min to sigma_max."""
        low = self.config.sigma_min if sigma_min is None else sigma_min
        high = self.config.sigma_max if sigma_max is None else sigma_max
        if state.timesteps is None:
            state = self.set_timesteps(state, num_inference_steps, sampling_eps=sampling_eps)
        return state.replace(
            discrete_sigmas=jnp.geomspace(low, high, num_inference_steps),
            sigmas=low * (high / low) ** state.timesteps,
        )

    def get_adjacent_sigma(
        self, state: ScoreSdeVeSchedulerState, timesteps: jax.Array, t: jax.Array
    ) -> jax.Array:
        """Returns the sigma below each index, zero below the first."""
        return jnp.where(timesteps == 0, jnp.zeros_like(t), state.discrete_sigmas[timesteps - 1])

    def step_pred(
        self,
        state: ScoreSdeVeSchedulerState,
        model_output: jax.Array,
        timestep: Any,
        sample: jax.Array,
        key: jax.Array,
        return_dict: bool = True,
    ) -> Any:
        """Returns the predictor's step back in time from `timestep`, in [0, 1].

        model_output: the score.
        """
        times = timestep * jnp.ones(sample.shape[0])
        indices = (times * (len(state.timesteps) - 1)).astype(jnp.int32)
        sigma = state.discrete_sigmas[indices]
        below = self.get_adjacent_sigma(state, indices, times)
        diffusion = jnp.sqrt(sigma**2 - below**2).reshape(-1, *[1] * (sample.ndim - 1))
        noise = _normal(key, sample.shape)
        mean = sample + diffusion**2 * model_output
        output = FlaxSdeVeOutput(state, mean + diffusion * noise, mean)
        if return_dict:
            return output
        return output.prev_sample, output.prev_sample_mean, state

    def step_correct(
        self,
        state: ScoreSdeVeSchedulerState,
        model_output: jax.Array,
        sample: jax.Array,
        key: jax.Array,
        return_dict: bool = True,
    ) -> Any:
        """Returns the corrector's Langevin step. model_output: the score."""
        noise = _normal(key, sample.shape)
        ratio = jnp.linalg.norm(noise) / jnp.linalg.norm(model_output)
        size = 2 * (self.config.snr * ratio) ** 2
        moved = sample + size * model_output + jnp.sqrt(2 * size) * noise
        return FlaxSdeVeOutput(state, moved) if return_dict else (moved, state)


def _normal(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns normal numbers of the key, float32, as diffusers' classes split it."""
    return jax.random.normal(jax.random.split(as_key(key), 1)[0], shape, jnp.float32)
