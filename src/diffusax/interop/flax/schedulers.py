"""diffusers' Flax schedulers by name, with the options that they had.

Each `_sampler` says which of diffusax's samplers computes what the class of diffusers 0.35.2 did.
"""

from typing import Any

import jax
import jax.numpy as jnp

from diffusax import samplers
from diffusax.interop.flax.scheduler import FlaxTableScheduler, SchedulerState
from diffusax.samplers import Scheduler


class FlaxDDIMScheduler(FlaxTableScheduler):
    """Song et al. 2021, without noise."""

    def __init__(
        self,
        num_train_timesteps: int = 1000,
        beta_start: float = 0.0001,
        beta_end: float = 0.02,
        beta_schedule: str = "linear",
        trained_betas: Any = None,
        clip_sample: bool = True,
        clip_sample_range: float = 1.0,
        set_alpha_to_one: bool = True,
        steps_offset: int = 0,
        prediction_type: str = "epsilon",
        dtype: Any = jnp.float32,
    ):
        self._configure(locals())

    def _sampler(self) -> Scheduler:
        names = ("clip_sample", "clip_sample_range", "set_alpha_to_one", "steps_offset")
        options = {name: self.config[name] for name in names}
        return samplers.DDIMScheduler(**self._levels(), **options)

    def step(
        self,
        state: SchedulerState,
        model_output: jax.Array,
        timestep: Any,
        sample: jax.Array,
        eta: float = 0.0,
        return_dict: bool = True,
    ) -> Any:
        """See `FlaxTableScheduler.step`.

        Raises:
            ValueError: eta is not 0: the Flax class left its noise out, so that samples came out
                too smooth.
        """
        if eta:
            raise ValueError(
                f"eta must be 0 (got {eta}); use FlaxDDPMScheduler for a random sampler"
            )
        return self._step(state, model_output, timestep, sample, return_dict)


class FlaxDDPMScheduler(FlaxTableScheduler):
    """Ho et al. 2020.

    A run of fewer steps than training's takes them with their strides, as PyTorch's class does; the
    Flax class took each as one training step, which left most of the noise in.
    """

    def __init__(
        self,
        num_train_timesteps: int = 1000,
        beta_start: float = 0.0001,
        beta_end: float = 0.02,
        beta_schedule: str = "linear",
        trained_betas: Any = None,
        variance_type: str = "fixed_small",
        clip_sample: bool = True,
        prediction_type: str = "epsilon",
        dtype: Any = jnp.float32,
    ):
        self._configure(locals())

    def _sampler(self) -> Scheduler:
        kind, clip = self.config.variance_type, self.config.clip_sample
        return samplers.DDPMScheduler(**self._levels(), variance_type=kind, clip_sample=clip)

    def step(
        self,
        state: SchedulerState,
        model_output: jax.Array,
        timestep: Any,
        sample: jax.Array,
        key: jax.Array | None = None,
        return_dict: bool = True,
    ) -> Any:
        """See `FlaxTableScheduler.step`.

        key: of the step's noise; without one, as in diffusers, that of jax.random.key(0), the same
        in every step. Without `set_timesteps` the run is training's.
        """
        key = jax.random.key(0) if key is None else key
        noise = jax.random.normal(jax.random.split(key, 1)[0], sample.shape, self.dtype)
        asked = state
        if state.num_inference_steps is None:
            asked = self.set_timesteps(state, self.config.num_train_timesteps)
        output = self._step(asked, model_output, timestep, sample, True, noise)
        output = output.replace(state=state)
        return output if return_dict else output.to_tuple()


class FlaxPNDMScheduler(FlaxTableScheduler):
    """Liu et al. 2022."""

    def __init__(
        self,
        num_train_timesteps: int = 1000,
        beta_start: float = 0.0001,
        beta_end: float = 0.02,
        beta_schedule: str = "linear",
        trained_betas: Any = None,
        skip_prk_steps: bool = False,
        set_alpha_to_one: bool = False,
        steps_offset: int = 0,
        prediction_type: str = "epsilon",
        dtype: Any = jnp.float32,
    ):
        self._configure(locals())

    @property
    def depth(self) -> int:  # type: ignore[override]
        """Four evaluations of the multistep phase, after twelve of the Runge-Kutta phase."""
        return 4 if self.config.skip_prk_steps else 16

    def _sampler(self) -> Scheduler:
        # The Flax class ended at timestep 0 whatever set_alpha_to_one said
        # (scheduling_pndm_flax.py, step_plms).
        return samplers.PNDMScheduler(
            **self._levels(),
            skip_prk_steps=self.config.skip_prk_steps,
            steps_offset=self.config.steps_offset,
        )


class FlaxDPMSolverMultistepScheduler(FlaxTableScheduler):
    """DPM-Solver and DPM-Solver++ 1, 2M and 3M (Lu et al. 2022)."""

    depth = 3

    def __init__(
        self,
        num_train_timesteps: int = 1000,
        beta_start: float = 0.0001,
        beta_end: float = 0.02,
        beta_schedule: str = "linear",
        trained_betas: Any = None,
        solver_order: int = 2,
        prediction_type: str = "epsilon",
        thresholding: bool = False,
        dynamic_thresholding_ratio: float = 0.995,
        sample_max_value: float = 1.0,
        algorithm_type: str = "dpmsolver++",
        solver_type: str = "midpoint",
        lower_order_final: bool = True,
        timestep_spacing: str = "linspace",
        dtype: Any = jnp.float32,
    ):
        self._configure(locals())

    def _sampler(self) -> Scheduler:
        names = (
            "solver_order",
            "thresholding",
            "dynamic_thresholding_ratio",
            "sample_max_value",
            "algorithm_type",
            "solver_type",
            "lower_order_final",
            "timestep_spacing",
        )
        options = {name: self.config[name] for name in names}
        # The Flax class ended at timestep 0, not without noise
        # (scheduling_dpmsolver_multistep_flax.py, step).
        return samplers.DPMSolverMultistepScheduler(
            **self._levels(), **options, final_sigmas_type="sigma_min"
        )


class FlaxEulerDiscreteScheduler(FlaxTableScheduler):
    """Karras et al. 2022, algorithm 2 with Euler steps.

    With "linspace" the model is asked at fractional timesteps, as PyTorch's class does; the Flax
    pipelines cut them, and the class then took the first noise level for every step.
    """

    on_sigmas = True

    def __init__(
        self,
        num_train_timesteps: int = 1000,
        beta_start: float = 0.0001,
        beta_end: float = 0.02,
        beta_schedule: str = "linear",
        trained_betas: Any = None,
        prediction_type: str = "epsilon",
        timestep_spacing: str = "linspace",
        dtype: Any = jnp.float32,
    ):
        self._configure(locals())

    def _sampler(self) -> Scheduler:
        # "leading" had an offset of 1 (scheduling_euler_discrete_flax.py, set_timesteps).
        return samplers.EulerDiscreteScheduler(
            **self._levels(), timestep_spacing=self.config.timestep_spacing, steps_offset=1
        )


class FlaxLMSDiscreteScheduler(FlaxTableScheduler):
    """Linear multistep of order 4 (k-diffusion)."""

    depth = 4
    on_sigmas = True

    def __init__(
        self,
        num_train_timesteps: int = 1000,
        beta_start: float = 0.0001,
        beta_end: float = 0.02,
        beta_schedule: str = "linear",
        trained_betas: Any = None,
        prediction_type: str = "epsilon",
        dtype: Any = jnp.float32,
    ):
        self._configure(locals())

    def _sampler(self) -> Scheduler:
        return samplers.LMSDiscreteScheduler(**self._levels())

    def step(
        self,
        state: SchedulerState,
        model_output: jax.Array,
        timestep: Any,
        sample: jax.Array,
        order: int = 4,
        return_dict: bool = True,
    ) -> Any:
        """See `FlaxTableScheduler.step`.

        Raises:
            ValueError: order is not 4.
        """
        if order != 4:
            raise ValueError(f"order must be 4, the sampler's (got {order})")
        return self._step(state, model_output, timestep, sample, return_dict)
