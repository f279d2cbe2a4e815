"""Samplers on sigmas, under diffusers' names."""

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from diffusax.boundary.tensors import for_reader
from diffusax.runtime.random.brownian import Motion
from diffusax.samplers import noise_levels
from diffusax.samplers.methods import sigma_methods
from diffusax.samplers.processes import Kind
from diffusax.samplers.rows import Row, epsilon_from, x0_from
from diffusax.samplers.runs import Run, RunOptions
from diffusax.samplers.schedulers.discrete import DiscreteScheduler, respaced, spacings
from diffusax.samplers.schedulers.options import (
    Beta,
    FinalSigma,
    HeunBetaSchedule,
    NoisePrediction,
    Positive,
    Seed,
    Seeds,
)
from diffusax.samplers.schedulers.step_signatures import step_with_churn, step_without_noise
from diffusax.samplers.schedulers.stepped import Untimed

__all__ = [
    "DPMSolverSDEScheduler",
    "EulerAncestralDiscreteScheduler",
    "EulerDiscreteScheduler",
    "HeunDiscreteScheduler",
    "KDPM2AncestralDiscreteScheduler",
    "KDPM2DiscreteScheduler",
    "LMSDiscreteScheduler",
]


class SigmaScheduler(DiscreteScheduler, sampler=False):
    """A sampler whose x is the sample plus sigma times noise."""

    whole_timesteps = False
    on_sigmas = True
    scales_input = True
    second_output = "pred_original_sample"

    def _levels(self, wanted: RunOptions) -> tuple[np.ndarray, np.ndarray]:
        """Returns the timesteps, n, and sigmas, n+1, of a run."""
        every = self.diffusion.sigmas
        if wanted.sigmas is not None:
            sigmas = noise_levels.rounded(wanted.sigmas)
            return noise_levels.sigmas_to_timesteps(sigmas[:-1], every), sigmas
        n, timesteps = wanted.steps, wanted.timesteps
        if timesteps is None:
            timesteps = noise_levels.spaced_timesteps(
                n, self.num_train_timesteps, self.timestep_spacing, self.steps_offset
            )
        timesteps = noise_levels.rounded(timesteps)
        if getattr(self, "interpolation_type", "linear") == "log_linear":
            sigmas = noise_levels.exponential_sigmas(n + 1, every[0], every[-1])
        else:
            sigmas = np.interp(timesteps, np.arange(len(every)), every)
        spaced = respaced(self, n, sigmas)
        if spaced is not None:
            sigmas, timesteps = spaced, noise_levels.sigmas_to_timesteps(spaced, every)
        last = every[0] if getattr(self, "final_sigmas_type", "zero") == "sigma_min" else 0.0
        return timesteps, noise_levels.rounded(np.append(sigmas, last))

    def _training_levels(self, timesteps: jax.Array) -> tuple[jax.Array, jax.Array]:
        signal, noise = super()._training_levels(timesteps)
        return jnp.ones_like(signal), noise / signal

    def _untimed(self) -> Untimed:
        if self.begins_whole:
            return super()._untimed()
        every = self.diffusion.sigmas[::-1]
        timesteps = np.arange(len(every), dtype=np.float64)[::-1]
        return Untimed(timesteps, np.append(every, 0.0), self._deviation(every))

    def _result(self, rows: list[Row], sigmas: np.ndarray) -> Run:
        return Run(rows, self._deviation(sigmas), (1.0, sigmas[-1]))

    def _deviation(self, sigmas: np.ndarray) -> float:
        """Returns the standard deviation of the initial latents of a run at these sigmas."""
        highest = sigmas.max()
        leading = self.timestep_spacing == "leading"
        return float(np.sqrt(highest**2 + 1) if leading else highest)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EulerAncestralDiscreteScheduler(SigmaScheduler):
    """Ancestral sampling with Euler steps (k-diffusion)."""

    zero_snr_floor = True
    draws_in_vain = True

    prediction_type: NoisePrediction = "epsilon"
    rescale_betas_zero_snr: bool = False

    def _timesteps_dtype(self, *, begun: bool) -> Any:
        return np.float32 if begun else np.float64

    def _run(self, wanted: RunOptions) -> Run:
        timesteps, sigmas = self._levels(wanted)
        rows = sigma_methods.euler_ancestral(timesteps, sigmas, self.prediction_type)
        return self._result(rows, sigmas)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RespacedScheduler(SigmaScheduler, sampler=False):
    """A sampler on sigmas, which options can space in another way."""

    use_karras_sigmas: bool = False
    use_exponential_sigmas: bool = False
    use_beta_sigmas: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class LMSDiscreteScheduler(RespacedScheduler):
    """Linear multistep of order 4 (k-diffusion)."""

    heeds_ends = False
    begins_whole = True

    def _run(self, wanted: RunOptions) -> Run:
        timesteps, sigmas = self._levels(wanted)
        return self._result(sigma_methods.lms(timesteps, sigmas, self.prediction_type), sigmas)

    def step(  # type: ignore[override]
        self,
        model_output: Any,
        timestep: Any,
        sample: Any,
        order: int = 4,
        return_dict: bool = True,
    ) -> Any:
        """Returns the sample after the row of this timestep; see `Stepped.step`.

        Raises:
            ValueError: the order is not 4.
        """
        if order != 4:
            raise ValueError(f"order must be 4 (got {order}); the rows of a run are of that order")
        return self._step(model_output, timestep, sample, return_dict)

    def _second_output(self, row: Row) -> np.ndarray:
        return x0_from(self.prediction_type, *row.level).coefficients


@dataclasses.dataclass(frozen=True, kw_only=True)
class EulerDiscreteScheduler(RespacedScheduler):
    """Euler steps (Karras et al. 2022, algorithm 2)."""

    step = step_with_churn  # type: ignore[assignment]
    custom = ("timesteps", "sigmas")
    zero_snr_floor = True

    interpolation_type: Literal["linear", "log_linear"] = "linear"
    sigma_min: Positive | None = None
    sigma_max: Positive | None = None
    timestep_type: Literal["discrete", "continuous"] = "discrete"
    rescale_betas_zero_snr: bool = False
    final_sigmas_type: FinalSigma = "zero"

    @property
    def process(self) -> Kind:
        """The process that the networks were trained for."""
        # In diffusers, the other prediction types keep discrete timesteps.
        kinds = self.timestep_type, self.prediction_type
        return "continuous" if kinds == ("continuous", "v_prediction") else "diffusion"

    def _untimed(self) -> Untimed:
        untimed = super()._untimed()
        if self.process != "continuous" or untimed.sigmas is None:
            return untimed
        return untimed._replace(timesteps=np.log(untimed.sigmas[:-1]) / 4)

    def _run(self, wanted: RunOptions) -> Run:
        timesteps, sigmas = self._levels(wanted)
        if self.process == "continuous":
            if wanted.timesteps is not None:
                raise ValueError(
                    "timesteps cannot be given with timestep_type='continuous'; give sigmas"
                )
            timesteps = np.log(sigmas[:-1]) / 4
        x0 = functools.partial(x0_from, self.prediction_type)
        epsilon = functools.partial(epsilon_from, self.prediction_type)
        return self._result(sigma_methods.euler(timesteps, sigmas, x0, epsilon), sigmas)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeunDiscreteScheduler(RespacedScheduler):
    """Heun's second-order steps (Karras et al. 2022, algorithm 2)."""

    custom = ("timesteps",)
    order = 2
    begins_whole = True
    step = step_without_noise  # type: ignore[assignment]

    beta_start: Beta = 0.00085
    beta_end: Beta = 0.012
    beta_schedule: HeunBetaSchedule = "linear"  # type: ignore[assignment]
    clip_sample: bool = False
    clip_sample_range: Positive = 1.0

    def _run(self, wanted: RunOptions) -> Run:
        timesteps, sigmas = self._levels(wanted)
        clip = self.clip_sample_range if self.clip_sample else np.inf
        rows = sigma_methods.heun(timesteps, sigmas, self.prediction_type, clip=clip)
        return self._result(rows, sigmas)


@dataclasses.dataclass(frozen=True, kw_only=True)
class KDPM2DiscreteScheduler(RespacedScheduler):
    """DPM-Solver-2 with a midpoint in log sigma (k-diffusion)."""

    order = 2
    begins_whole = True
    step = step_without_noise  # type: ignore[assignment]

    prediction_type: NoisePrediction = "epsilon"
    beta_start: Beta = 0.00085
    beta_end: Beta = 0.012

    @property
    def sigmas_interpol(self) -> Any:
        """The midpoint that the run's second rows are at, float32; see `sigmas` for its places."""
        sigmas = self._own_sigmas().astype(np.float32)
        with np.errstate(all="ignore"):
            found = sigma_methods.log_midpoints(sigmas, np.roll(sigmas, 1))
        return for_reader(self._spread(found))

    @property
    def log_sigmas(self) -> Any:
        """The logarithms of the sigmas of the training, float32."""
        return for_reader(noise_levels.log_sigmas(self.diffusion.sigmas))

    def _run(self, wanted: RunOptions) -> Run:
        timesteps, sigmas = self._levels(wanted)
        if self.use_karras_sigmas:
            timesteps = timesteps.round()
        return self._result(self._rows(timesteps, sigmas, self.diffusion.sigmas), sigmas)

    def _rows(self, timesteps: np.ndarray, sigmas: np.ndarray, every: np.ndarray) -> list[Row]:
        middles = sigma_methods.log_midpoints(sigmas[1:], sigmas[:-1])
        return sigma_methods.kdpm2(timesteps, sigmas, middles, self.prediction_type, every)

    def _own_sigmas(self) -> np.ndarray:
        """Returns the sigmas of the run's steps, and the one that it ends at: n+1."""
        return np.append(self.sigmas[:1], self.sigmas[1:-1:2])

    def _sigmas_of(self, levels: np.ndarray) -> np.ndarray:
        # diffusers repeats the last one too, which no row is at.
        return np.append(levels[:, 1], levels[-1:, 1].repeat(2))

    @staticmethod
    def _spread(values: np.ndarray) -> np.ndarray:
        """Returns values of the steps, n+1, in the places that `sigmas` has them: 2n+2."""
        return np.concatenate([values[:1], values[1:].repeat(2), values[-1:]])

    def _timesteps_dtype(self, *, begun: bool) -> Any:
        return np.float64 if spacings(self) else np.float32


@dataclasses.dataclass(frozen=True, kw_only=True)
class KDPM2AncestralDiscreteScheduler(KDPM2DiscreteScheduler):
    """DPM-Solver-2 with ancestral noise (k-diffusion)."""

    step = SigmaScheduler.step  # type: ignore[assignment]

    @property
    def sigmas_interpol(self) -> Any:
        """The midpoint that the run's second rows are at, float32; see `sigmas` for its places."""
        return for_reader(self._spread(np.append(self._split().middle, np.float32(0))))

    @property
    def sigmas_up(self) -> Any:
        """The noise that each row adds, float32; see `sigmas` for its places."""
        # What follows the end of the run is 0 / 0 in diffusers.
        return for_reader(self._spread(np.append(self._split().up, np.float32(np.nan))))

    @property
    def sigmas_down(self) -> Any:
        """The level that each row steps down to, float32; see `sigmas` for its places."""
        return for_reader(self._spread(np.append(self._split().down, np.float32(0))))

    def _split(self) -> sigma_methods.AncestralSplit:
        with np.errstate(all="ignore"):
            return sigma_methods.ancestral_splits(self._own_sigmas())

    def _rows(self, timesteps: np.ndarray, sigmas: np.ndarray, every: np.ndarray) -> list[Row]:
        split = sigma_methods.ancestral_splits(sigmas)
        return sigma_methods.kdpm2_ancestral(timesteps, sigmas, split, self.prediction_type, every)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DPMSolverSDEScheduler(RespacedScheduler):
    """Stochastic DPM-Solver++ with a midpoint in log sigma (k-diffusion's sample_dpmpp_sde).

    noise_sampler_seed, one or one for each image, is the seed of the noise between steps in calls
    that ask for PyTorch's numbers. Where it is None, diffusers uses PyTorch's global generator;
    here the noise then comes from the call's seed, as JAX's numbers always do.
    """

    order = 2
    begins_whole = True
    heeds_ends = False

    prediction_type: NoisePrediction = "epsilon"
    beta_start: Beta = 0.00085
    beta_end: Beta = 0.012
    noise_sampler_seed: Seed | Seeds | None = None

    def step(  # type: ignore[override]
        self,
        model_output: Any,
        timestep: Any,
        sample: Any,
        return_dict: bool = True,
        s_noise: float = 1.0,
        *,
        generator: Any = None,
    ) -> Any:
        """Returns the sample after the row of this timestep; see `Stepped.step`.

        s_noise is the factor of the noise. generator, which diffusers' class lacks, is its source
        where noise_sampler_seed is None.
        """
        options = {"generator": generator, "noise_scale": s_noise}
        return self._step(model_output, timestep, sample, return_dict, **options)

    def _timesteps_dtype(self, *, begun: bool) -> Any:
        return np.float64

    def _run(self, wanted: RunOptions) -> Run:
        timesteps, sigmas = self._levels(wanted)
        every = self.diffusion.sigmas
        rows = sigma_methods.dpm_sde(timesteps, sigmas, self.prediction_type, every)
        steps = sigma_methods.brownian_steps(sigmas)
        low = sigmas.min(initial=np.inf, where=sigmas > 0)
        motion = Motion(self.noise_sampler_seed, float(low), float(sigmas.max()), steps)
        return self._result(rows, sigmas)._replace(motion=motion)
