"""Samplers on alpha-bar, under diffusers' names."""

import dataclasses
from typing import Any, Literal

import numpy as np

from diffusax.boundary.tensors import for_reader
from diffusax.samplers.methods import alpha_methods
from diffusax.samplers.rows import NOISE, Row
from diffusax.samplers.runs import Run, RunOptions
from diffusax.samplers.schedulers.discrete import DiscreteScheduler, limits_of
from diffusax.samplers.schedulers.options import (
    Beta,
    BetaSchedule,
    Count,
    DDPMBetaSchedule,
    NoisePrediction,
    Positive,
    Quantile,
    Spacing,
)
from diffusax.samplers.schedulers.step_signatures import step_without_noise
from diffusax.samplers.terms import NAMES, Terms

__all__ = ["DDIMScheduler", "DDPMScheduler", "LCMScheduler", "PNDMScheduler", "TCDScheduler"]


def _final_alpha_cumprod(self: DiscreteScheduler) -> Any:
    """alpha-bar after the last step, a scalar, float32; see `timesteps`."""
    return for_reader(np.array(self.final_alpha, np.float32))


def _custom_timesteps(self: DiscreteScheduler) -> bool:
    """Whether the run has timesteps of one's own."""
    return self._has_own_timesteps


@dataclasses.dataclass(frozen=True, kw_only=True)
class BoundedScheduler(DiscreteScheduler, sampler=False):
    """A sampler whose predicted sample can be clipped or thresholded."""

    timestep_spacing: Spacing = "leading"
    clip_sample: bool = True
    clip_sample_range: Positive = 1.0
    thresholding: bool = False
    dynamic_thresholding_ratio: Quantile = 0.995
    sample_max_value: Positive = 1.0
    rescale_betas_zero_snr: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class DDPMScheduler(BoundedScheduler):
    """Denoising diffusion probabilistic models (Ho et al. 2020)."""

    custom = ("timesteps",)
    counts_rows = False
    second_output = "pred_original_sample"

    beta_schedule: DDPMBetaSchedule = "linear"  # type: ignore[assignment]
    variance_type: Literal["fixed_small", "fixed_small_log", "fixed_large"] | None = "fixed_small"

    custom_timesteps = property(_custom_timesteps)

    def _run(self, wanted: RunOptions) -> Run:
        limits = limits_of(self)
        timesteps = self._integer_timesteps(wanted)
        return Run(
            alpha_methods.ddpm(self, timesteps, variance_type=self.variance_type, limits=limits)
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DDIMScheduler(BoundedScheduler):
    """Denoising diffusion implicit models (Song et al. 2021)."""

    custom = ("use_clipped_model_output",)
    takes_eta = True
    counts_rows = False
    draws_in_vain = True
    second_output = "pred_original_sample"

    set_alpha_to_one: bool = True

    final_alpha_cumprod = property(_final_alpha_cumprod)  # type: ignore[assignment]

    def _run(self, wanted: RunOptions) -> Run:
        limits = limits_of(self)
        timesteps = self._integer_timesteps(wanted)
        stride = self.num_train_timesteps // wanted.steps
        rows = alpha_methods.ddim(
            self,
            timesteps,
            stride=stride,
            eta=wanted.eta,
            limits=limits,
            clipped=wanted.use_clipped_model_output,
        )
        last = alpha_methods.alpha_after(self, timesteps[-1] - stride)
        return Run(rows, last_level=alpha_methods.alpha_level(last))

    def step(  # type: ignore[override]
        self,
        model_output: Any,
        timestep: Any,
        sample: Any,
        eta: float = 0.0,
        use_clipped_model_output: bool = False,
        generator: Any = None,
        variance_noise: Any = None,
        return_dict: bool = True,
    ) -> Any:
        """Returns the sample after the row of this timestep; see `Stepped.step`.

        Args:
            model_output: see `Stepped.step`, as are the others that are not named here.
            timestep: any one of the training.
            sample: b ....
            eta: the share of noise.
            use_clipped_model_output: whether to take the noise from the predicted sample that was
                clipped, instead of from the network.
            generator: the source of the noise.
            variance_noise: the noise itself, of the sample's shape, instead of a generator.
            return_dict: whether to return a `SchedulerOutput` rather than a tuple.
        """
        method = {"eta": eta, "use_clipped_model_output": use_clipped_model_output}
        options = {"method": method, "generator": generator, "variance_noise": variance_noise}
        return self._step(model_output, timestep, sample, return_dict, **options)

    def _row_at(
        self, timestep: float, steps: int, *, eta: float, use_clipped_model_output: bool
    ) -> Row:
        total = self.num_train_timesteps
        if not 0 <= timestep < total or timestep != int(timestep):
            raise ValueError(
                f"timestep must be an integer from 0 to {total - 1} (got {timestep:g})"
            )
        at, limits = np.array([int(timestep)]), limits_of(self)
        (row,) = alpha_methods.ddim(
            self,
            at,
            stride=total // steps,
            eta=eta,
            limits=limits,
            clipped=use_clipped_model_output,
        )
        return row


@dataclasses.dataclass(frozen=True, kw_only=True)
class PNDMScheduler(DiscreteScheduler):
    """Pseudo numerical methods for diffusion models (Liu et al. 2022)."""

    step = step_without_noise  # type: ignore[assignment]

    prediction_type: NoisePrediction = "epsilon"
    timestep_spacing: Spacing = "leading"
    skip_prk_steps: bool = False
    set_alpha_to_one: bool = False

    final_alpha_cumprod = property(_final_alpha_cumprod)  # type: ignore[assignment]

    def _run(self, wanted: RunOptions) -> Run:
        n, begin = wanted.steps, wanted.begin
        if n < 4 and not self.skip_prk_steps:
            raise ValueError(
                "the number of steps (num_inference_steps) must be at least 4 with "
                f"skip_prk_steps=False (got {n})"
            )
        stride = self.num_train_timesteps // n
        ascending = self._integer_timesteps(wanted)[::-1]
        prk, plms = alpha_methods.pndm_timesteps(
            ascending, stride, skip_prk_steps=self.skip_prk_steps
        )
        rows = alpha_methods.pndm(self, prk, plms, stride=stride, begin=0)
        if begin:
            rows = rows[:begin] + alpha_methods.pndm(self, prk, plms, stride=stride, begin=begin)
        # The second row of the multistep phase has the same target as the first one.
        repeats = not len(prk) and len(rows) - begin == 2
        last = alpha_methods.alpha_after(self, plms[-1] - (0 if repeats else stride))
        return Run(rows, last_level=alpha_methods.alpha_level(last))


@dataclasses.dataclass(frozen=True, kw_only=True)
class LCMScheduler(BoundedScheduler):
    """Latent consistency models, for networks distilled to few steps (Luo et al. 2023)."""

    custom = ("timesteps", "original_inference_steps", "strength")
    second_output = "denoised"
    swappable = False

    beta_start: Beta = 0.00085
    beta_end: Beta = 0.012
    beta_schedule: BetaSchedule = "scaled_linear"
    original_inference_steps: Count = 50
    clip_sample: bool = False
    set_alpha_to_one: bool = True
    timestep_scaling: Positive = 10.0

    custom_timesteps = property(_custom_timesteps)

    final_alpha_cumprod = property(_final_alpha_cumprod)  # type: ignore[assignment]

    def _run(self, wanted: RunOptions) -> Run:
        limits = limits_of(self)
        timesteps = self._distilled_timesteps(wanted)
        scaling = self.timestep_scaling
        return Run(alpha_methods.lcm(self, timesteps, timestep_scaling=scaling, limits=limits))

    def _second_output(self, row: Row) -> np.ndarray:
        # The sample before the noise: signal x + noise NOISE, with signal^2 + noise^2 = 1.
        noise = row.x[NAMES.index("NOISE")]
        return (Terms(row.x) - noise * NOISE).coefficients / np.sqrt(1 - noise**2)

    def _distilled_timesteps(self, wanted: RunOptions) -> np.ndarray:
        """Returns timesteps evenly spaced among those of the distillation, up to the strength.

        Raises:
            ValueError: there are fewer timesteps than steps.
        """
        n, strength = wanted.steps, wanted.strength
        if wanted.timesteps is not None:
            skipped = n - min(int(n * strength), n)
            return wanted.timesteps.astype(int)[skipped:]
        grid = self._grid(wanted.original_inference_steps, strength)
        if n > len(grid):
            raise ValueError(
                "the number of steps (num_inference_steps) must be at most original_inference_steps"
                f" times strength, {len(grid)} (got {n})"
            )
        return grid[::-1][np.floor(np.linspace(0, len(grid), n, endpoint=False)).astype(int)]

    def _grid(self, original_inference_steps: int | None, strength: float) -> np.ndarray:
        """Returns the timesteps that the model was distilled at, up to the strength, ascending."""
        origin = original_inference_steps or self.original_inference_steps
        if origin > self.num_train_timesteps:
            raise ValueError(
                "original_inference_steps must be at most num_train_timesteps="
                f"{self.num_train_timesteps} (got {origin})"
            )
        stride = self.num_train_timesteps // origin
        return np.arange(1, int(origin * strength) + 1) * stride - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class TCDScheduler(LCMScheduler):
    """Trajectory consistency distillation (Zheng et al. 2024); `eta` is its gamma."""

    takes_eta = True
    second_output = "pred_noised_sample"

    def step(  # type: ignore[override]
        self,
        model_output: Any,
        timestep: Any,
        sample: Any,
        eta: float = 0.3,
        generator: Any = None,
        return_dict: bool = True,
    ) -> Any:
        """Returns the sample after the row of this timestep; see `Stepped.step`. eta: gamma."""
        options = {"method": {"eta": eta}, "generator": generator}
        return self._step(model_output, timestep, sample, return_dict, **options)

    def _run(self, wanted: RunOptions) -> Run:
        if not 0 <= wanted.eta <= 1:
            raise ValueError(f"eta must be between 0 and 1 (got {wanted.eta:g})")
        timesteps = self._distilled_timesteps(wanted)
        rows = alpha_methods.tcd(self, timesteps, eta=wanted.eta)
        return Run(rows, last_level=alpha_methods.alpha_level(alpha_methods.alpha_after(self, 0)))

    def _grid(self, original_inference_steps: int | None, strength: float) -> np.ndarray:
        if original_inference_steps is None:
            return super()._grid(None, strength)
        # With original_inference_steps, all timesteps count (scheduling_tcd.py, set_timesteps).
        return np.arange(int(self.num_train_timesteps * strength))
