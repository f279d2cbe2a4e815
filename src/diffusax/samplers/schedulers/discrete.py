"""Samplers for models trained at discrete noise levels."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from diffusax.boundary.tensors import alike, for_reader
from diffusax.runtime.switches import under_own_switches
from diffusax.samplers import noise_levels
from diffusax.samplers.by_hand import as_jax, check_alike
from diffusax.samplers.methods.alpha_methods import Limits
from diffusax.samplers.processes import Diffusion, Process
from diffusax.samplers.runs import RunOptions
from diffusax.samplers.schedulers.options import Beta, Betas, BetaSchedule, Offset, Spacing
from diffusax.samplers.schedulers.scheduler import Scheduler


@dataclasses.dataclass(frozen=True, kw_only=True)
class DiscreteScheduler(Scheduler, sampler=False):
    """A sampler for models trained at discrete noise levels, given by betas."""

    whole_timesteps = True
    # Whether an infinite first sigma is replaced, where rescale_betas_zero_snr asks for one.
    zero_snr_floor: ClassVar[bool] = False
    # The sigmas of a run by their number and those of the training, where no option spaces them.
    levels: ClassVar[Callable[[int, np.ndarray], np.ndarray] | None] = None

    beta_start: Beta = 0.0001
    beta_end: Beta = 0.02
    beta_schedule: BetaSchedule = "linear"
    trained_betas: Betas | None = None
    timestep_spacing: Spacing = "linspace"
    steps_offset: Offset = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_one_spacing(self)

    @property
    def alphas_cumprod(self) -> Any:
        """alpha-bar for each training timestep, float32, read-only; see `timesteps`."""
        return for_reader(noise_levels.alphas_cumprod(self._betas))

    @property
    def betas(self) -> Any:
        """The variance of the noise that each training timestep adds, float32, read-only."""
        return for_reader(noise_levels.betas_of(self._betas))

    @property
    def alphas(self) -> Any:
        """1 - beta for each training timestep, float32."""
        return for_reader(np.float32(1) - self.betas)

    @property
    def _betas(self) -> noise_levels.Betas:
        rescale = getattr(self, "rescale_betas_zero_snr", False)
        return noise_levels.Betas(
            self.num_train_timesteps,
            self.beta_start,
            self.beta_end,
            self.beta_schedule,
            self.trained_betas,
            rescale,
            rescale and self.zero_snr_floor,
        )

    @property
    def diffusion(self) -> Diffusion:
        """The process of its discrete noise levels."""
        return Diffusion(self.alphas_cumprod.astype(np.float64))

    @property
    def forward_process(self) -> Process:
        """The process that its networks were trained for."""
        return self.diffusion

    @under_own_switches
    def get_velocity(self, sample: Any, noise: Any, timesteps: Any) -> Any:
        """Returns sqrt(a_t) noise - sqrt(1 - a_t) sample, the target of v prediction, b ....

        Args:
            sample: b ..., clean.
            noise: b ..., standard normal.
            timesteps: b, or one for all, of the training.
        """
        x0, eps, t = map(as_jax, (sample, noise, timesteps))
        check_alike("sample", x0, eps)
        target = self.diffusion.target(x0, eps, t.astype(jnp.int32), "v_prediction")
        return alike(target.astype(x0.dtype), sample, noise)

    def get_predicted_original_sample(self, model_output: Any, timesteps: Any, sample: Any) -> Any:
        """Returns the clean sample that a network predicts, b ...: x_0 of Song et al. 2021.

        It is a function to trace and differentiate, and does not look at a run or at the options'
        limits of the sample. Under this name diffusers has it in its scripts of distillation.

        Args:
            model_output: b ..., the network's prediction for the sample, of `prediction_type`.
            timesteps: b, or one for all, of the training.
            sample: b ..., with noise.
        """
        return self._predicted(model_output, timesteps, sample)[0]

    def get_predicted_noise(self, model_output: Any, timesteps: Any, sample: Any) -> Any:
        """Returns the noise that a network predicts, b ...; see `get_predicted_original_sample`."""
        return self._predicted(model_output, timesteps, sample)[1]

    @under_own_switches
    def _predicted(self, model_output: Any, timesteps: Any, sample: Any) -> tuple[Any, Any]:
        raw, t, x = map(as_jax, (model_output, timesteps, sample))
        check_alike("sample", x, raw, "model_output")
        found = self.diffusion.predicted(raw, x, t.astype(jnp.int32), self.prediction_type)
        return tuple(alike(part.astype(x.dtype), sample, model_output) for part in found)

    @property
    def final_alpha(self) -> float:
        """alpha-bar after the last step."""
        return 1.0 if getattr(self, "set_alpha_to_one", True) else float(self.alphas_cumprod[0])

    def _integer_timesteps(self, wanted: RunOptions) -> np.ndarray:
        """Returns the timesteps of a run, rounded: n.

        Raises:
            ValueError: a timestep is beyond the last one of the training.
        """
        timesteps = wanted.timesteps
        if timesteps is None:
            timesteps = noise_levels.spaced_timesteps(
                wanted.steps, self.num_train_timesteps, self.timestep_spacing, self.steps_offset
            )
        timesteps = timesteps.round().astype(int)
        if timesteps[0] >= self.num_train_timesteps:
            raise ValueError(
                f"{wanted.steps} steps with timestep_spacing={self.timestep_spacing!r} and "
                f"steps_offset={self.steps_offset} would begin at timestep {timesteps[0]}, beyond "
                f"num_train_timesteps={self.num_train_timesteps}; use fewer steps or 'trailing'"
            )
        return timesteps


def limits_of(scheduler: Scheduler) -> Limits:
    """Returns the options' limits of the predicted sample; thresholding goes first."""
    options = scheduler.to_config()
    if options.get("thresholding"):
        ratio, highest = options["dynamic_thresholding_ratio"], options["sample_max_value"]
        return Limits(threshold=(ratio, highest))
    return Limits(options["clip_sample_range"]) if options.get("clip_sample") else Limits()


def spacings(scheduler: Scheduler) -> list[str]:
    """Returns the names of the set options that ask for a spacing of the sigmas."""
    names = ("use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas")
    return [name for name in names if getattr(scheduler, name, False)]


def check_one_spacing(scheduler: Scheduler) -> None:
    """Raises an error where options ask for two spacings of the sigmas.

    Raises:
        ValueError: two such options are set.
    """
    chosen = spacings(scheduler)
    if len(chosen) > 1:
        raise ValueError(f"only one of {', '.join(chosen)} can be True")


def respaced(scheduler: Any, n: int, sigmas: np.ndarray) -> np.ndarray | None:
    """Respaces the sigmas as use_karras_sigmas or `levels` ask; returns None if nothing asks.

    n: the number of sigmas to return. sigmas: descending; the options sigma_min and sigma_max
    replace its ends.
    """
    own = getattr(scheduler, "levels", None)
    if own is not None:
        return np.asarray(own(n, scheduler.diffusion.sigmas))
    low, high = scheduler.given_ends
    low = sigmas[-1] if low is None else low
    high = sigmas[0] if high is None else high
    if getattr(scheduler, "use_karras_sigmas", False):
        return noise_levels.karras_sigmas(n, low, high)
    if getattr(scheduler, "use_exponential_sigmas", False):
        return noise_levels.exponential_sigmas(n, low, high)
    if getattr(scheduler, "use_beta_sigmas", False):
        return noise_levels.beta_sigmas(n, low, high)
    return None
