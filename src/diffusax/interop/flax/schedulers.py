"""diffusers' Flax schedulers by name, with the arguments that they had in 0.35.2.

Each names the sampler of diffusax that computes what the old class did.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from diffusax import samplers
from diffusax.interop.flax.scheduler import LEVELS, FlaxTableScheduler, SchedulerState
from diffusax.runtime.random.noise import as_key, seed_key


def _arguments(**own: Any) -> dict[str, Any]:
    """Returns all arguments of a scheduler with these of its own, in their order."""
    return {**LEVELS, **own, "prediction_type": "epsilon", "dtype": jnp.float32}


class FlaxDDIMScheduler(FlaxTableScheduler):
    """DDIM without noise (Song et al. 2021)."""

    arguments = _arguments(
        clip_sample=True, clip_sample_range=1.0, set_alpha_to_one=True, steps_offset=0
    )
    sampler_class = samplers.DDIMScheduler

    def step(
        self,
        state: SchedulerState,
        model_output: jax.Array,
        timestep: Any,
        sample: jax.Array,
        eta: float = 0.0,
        return_dict: bool = True,
    ) -> Any:
        """Returns the sample at the next timestep, see `FlaxTableScheduler.step`.

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
    """DDPM, ancestral sampling (Ho et al. 2020).

    A run of fewer steps than training's makes larger steps, as PyTorch's class does; the Flax class
    made each as one training step, which left most of the noise in.
    """

    arguments = _arguments(variance_type="fixed_small", clip_sample=True)
    sampler_class = samplers.DDPMScheduler

    def step(
        self,
        state: SchedulerState,
        model_output: jax.Array,
        timestep: Any,
        sample: jax.Array,
        key: jax.Array | None = None,
        return_dict: bool = True,
    ) -> Any:
        """Returns the sample at the next timestep, see `FlaxTableScheduler.step`.

        key: the random key of the step's noise; without one, as in diffusers, it is
        jax.random.key(0) in every step. Without `set_timesteps` the run is that of training.
        """
        key = seed_key(0) if key is None else as_key(key)
        noise = jax.random.normal(jax.random.split(key, 1)[0], sample.shape, self.dtype)
        asked = state
        if state.num_inference_steps is None:
            asked = self.set_timesteps(state, self.config.num_train_timesteps)
        output = self._step(asked, model_output, timestep, sample, True, noise)
        output = output.replace(state=state)
        return output if return_dict else output.to_tuple()


class FlaxPNDMScheduler(FlaxTableScheduler):
    """PNDM, pseudo linear multistep (Liu et al. 2022)."""

    arguments = _arguments(skip_prk_steps=False, set_alpha_to_one=False, steps_offset=0)
    sampler_class = samplers.PNDMScheduler
    # The Flax class ended at timestep 0 whatever set_alpha_to_one said
    # (scheduling_pndm_flax.py, step_plms).
    unused = ("set_alpha_to_one",)

    @property
    def depth(self) -> int:  # type: ignore[override]
        """The number of evaluations after which the sampler's memory is filled.

        These are four in the multistep phase, after twelve in the Runge-Kutta phase.
        """
        return 4 if self.config.skip_prk_steps else 16


class FlaxDPMSolverMultistepScheduler(FlaxTableScheduler):
    """DPM-Solver and DPM-Solver++ 1, 2M and 3M (Lu et al. 2022)."""

    arguments = _arguments(
        solver_order=2,
        prediction_type="epsilon",
        thresholding=False,
        dynamic_thresholding_ratio=0.995,
        sample_max_value=1.0,
        algorithm_type="dpmsolver++",
        solver_type="midpoint",
        lower_order_final=True,
        timestep_spacing="linspace",
    )
    sampler_class = samplers.DPMSolverMultistepScheduler
    # The Flax class ended at timestep 0, not without noise
    # (scheduling_dpmsolver_multistep_flax.py, step).
    constants: ClassVar[Mapping[str, Any]] = {"final_sigmas_type": "sigma_min"}
    depth = 3


class FlaxEulerDiscreteScheduler(FlaxTableScheduler):
    """Euler steps on sigma (Karras et al. 2022, algorithm 2).

    With "linspace" the model is evaluated at fractional timesteps, as in PyTorch's class. The Flax
    pipelines truncated them, and the class then used the first noise level for every step.
    """

    arguments = _arguments(prediction_type="epsilon", timestep_spacing="linspace")
    sampler_class = samplers.EulerDiscreteScheduler
    # "leading" had an offset of 1 (scheduling_euler_discrete_flax.py, set_timesteps).
    constants: ClassVar[Mapping[str, Any]] = {"steps_offset": 1}
    on_sigmas = True


class FlaxLMSDiscreteScheduler(FlaxTableScheduler):
    """Linear multistep of order 4 (k-diffusion)."""

    arguments = _arguments()
    sampler_class = samplers.LMSDiscreteScheduler
    depth = 4
    on_sigmas = True

    def step(
        self,
        state: SchedulerState,
        model_output: jax.Array,
        timestep: Any,
        sample: jax.Array,
        order: int = 4,
        return_dict: bool = True,
    ) -> Any:
        """Returns the sample at the next timestep, see `FlaxTableScheduler.step`.

        Raises:
            ValueError: order is not 4.
        """
        if order != 4:
            raise ValueError(f"order must be 4, the sampler's (got {order})")
        return self._step(state, model_output, timestep, sample, return_dict)
