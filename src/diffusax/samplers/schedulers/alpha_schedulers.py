"""Samplers on alpha-bar, under diffusers' names."""

import dataclasses
from typing import Literal

import numpy as np

from diffusax.samplers.methods import alpha_methods
from diffusax.samplers.runs import Request, Run
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

__all__ = ["DDIMScheduler", "DDPMScheduler", "LCMScheduler", "PNDMScheduler", "TCDScheduler"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DDPMScheduler(DiscreteScheduler):
    """Denoising diffusion probabilistic models (Ho et al. 2020)."""

    custom = ("timesteps",)

    timestep_spacing: Spacing = "leading"
    beta_schedule: DDPMBetaSchedule = "linear"  # type: ignore[assignment]
    variance_type: Literal["fixed_small", "fixed_small_log", "fixed_large"] | None = "fixed_small"
    clip_sample: bool = True
    clip_sample_range: Positive = 1.0
    thresholding: bool = False
    dynamic_thresholding_ratio: Quantile = 0.995
    sample_max_value: Positive = 1.0
    rescale_betas_zero_snr: bool = False

    def _run(self, request: Request) -> Run:
        limits = limits_of(self)
        timesteps = self._integer_timesteps(request)
        return Run(
            alpha_methods.ddpm(self, timesteps, variance_type=self.variance_type, limits=limits)
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DDIMScheduler(DiscreteScheduler):
    """Denoising diffusion implicit models (Song et al. 2021)."""

    custom = ("use_clipped_model_output",)

    timestep_spacing: Spacing = "leading"
    clip_sample: bool = True
    clip_sample_range: Positive = 1.0
    thresholding: bool = False
    dynamic_thresholding_ratio: Quantile = 0.995
    sample_max_value: Positive = 1.0
    set_alpha_to_one: bool = True
    rescale_betas_zero_snr: bool = False

    def _run(self, request: Request) -> Run:
        limits = limits_of(self)
        timesteps = self._integer_timesteps(request)
        stride = self.num_train_timesteps // request.steps
        rows = alpha_methods.ddim(
            self,
            timesteps,
            stride=stride,
            eta=request.eta,
            limits=limits,
            clipped=request.use_clipped_model_output,
        )
        last = alpha_methods.alpha_after(self, timesteps[-1] - stride)
        return Run(rows, last_level=alpha_methods.alpha_level(last))


@dataclasses.dataclass(frozen=True, kw_only=True)
class PNDMScheduler(DiscreteScheduler):
    """Pseudo numerical methods for diffusion models (Liu et al. 2022)."""

    prediction_type: NoisePrediction = "epsilon"
    timestep_spacing: Spacing = "leading"
    skip_prk_steps: bool = False
    set_alpha_to_one: bool = False

    def _run(self, request: Request) -> Run:
        n, begin = request.steps, request.begin
        if n < 4 and not self.skip_prk_steps:
            raise ValueError(
                "the number of steps (num_inference_steps) must be at least 4 with "
                f"skip_prk_steps=False (got {n})"
            )
        stride = self.num_train_timesteps // n
        ascending = self._integer_timesteps(request)[::-1]
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
class LCMScheduler(DiscreteScheduler):
    """Latent consistency models, for networks distilled to few steps (Luo et al. 2023)."""

    custom = ("timesteps", "original_inference_steps", "strength")
    swappable = False

    beta_start: Beta = 0.00085
    beta_end: Beta = 0.012
    beta_schedule: BetaSchedule = "scaled_linear"
    timestep_spacing: Spacing = "leading"
    original_inference_steps: Count = 50
    clip_sample: bool = False
    clip_sample_range: Positive = 1.0
    thresholding: bool = False
    dynamic_thresholding_ratio: Quantile = 0.995
    sample_max_value: Positive = 1.0
    set_alpha_to_one: bool = True
    timestep_scaling: Positive = 10.0
    rescale_betas_zero_snr: bool = False

    def _run(self, request: Request) -> Run:
        limits = limits_of(self)
        timesteps = self._distilled_timesteps(request)
        scaling = self.timestep_scaling
        return Run(alpha_methods.lcm(self, timesteps, timestep_scaling=scaling, limits=limits))

    def _distilled_timesteps(self, request: Request) -> np.ndarray:
        """Returns timesteps evenly spaced among those of the distillation, up to the strength.

        Raises:
            ValueError: there are fewer timesteps than steps.
        """
        n, strength = request.steps, request.strength
        if request.timesteps is not None:
            skipped = n - min(int(n * strength), n)
            return request.timesteps.astype(int)[skipped:]
        grid = self._grid(request.original_inference_steps, strength)
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

    def _run(self, request: Request) -> Run:
        if not 0 <= request.eta <= 1:
            raise ValueError(f"eta must be between 0 and 1 (got {request.eta:g})")
        timesteps = self._distilled_timesteps(request)
        rows = alpha_methods.tcd(self, timesteps, eta=request.eta)
        return Run(rows, last_level=alpha_methods.alpha_level(self.alphas_cumprod[0]))

    def _grid(self, original_inference_steps: int | None, strength: float) -> np.ndarray:
        if original_inference_steps is None:
            return super()._grid(None, strength)
        # With original_inference_steps, all timesteps count (scheduling_tcd.py, set_timesteps).
        return np.arange(int(self.num_train_timesteps * strength))
