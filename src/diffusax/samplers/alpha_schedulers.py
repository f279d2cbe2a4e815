"""The samplers on alpha-bar, by their diffusers names."""

import dataclasses
from typing import Any, ClassVar, Literal

import numpy as np

from diffusax.samplers import alpha_methods
from diffusax.samplers.alpha_methods import Limits
from diffusax.samplers.discrete import DiscreteScheduler
from diffusax.samplers.options import Beta, BetaSchedule, Count, NoisePrediction, Positive, Spacing
from diffusax.samplers.runs import Request, Run

__all__ = ["DDIMScheduler", "DDPMScheduler", "LCMScheduler", "PNDMScheduler", "TCDScheduler"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DDPMScheduler(DiscreteScheduler):
    """Ho et al. 2020."""

    fixed: ClassVar[dict[str, Any]] = {"thresholding": (False,)}
    ignored = frozenset({"dynamic_thresholding_ratio", "sample_max_value"})
    custom = ("timesteps",)

    timestep_spacing: Spacing = "leading"
    variance_type: Literal["fixed_small", "fixed_small_log", "fixed_large"] = "fixed_small"
    clip_sample: bool = True
    clip_sample_range: Positive = 1.0
    rescale_betas_zero_snr: bool = False

    def _run(self, request: Request) -> Run:
        limits = Limits(self.clip_sample_range if self.clip_sample else np.inf)
        timesteps = self._integer_timesteps(request)
        return Run(
            alpha_methods.ddpm(self, timesteps, variance_type=self.variance_type, limits=limits)
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DDIMScheduler(DiscreteScheduler):
    """Song et al. 2021."""

    fixed: ClassVar[dict[str, Any]] = {"thresholding": (False,)}
    ignored = frozenset({"dynamic_thresholding_ratio", "sample_max_value"})

    timestep_spacing: Spacing = "leading"
    clip_sample: bool = True
    clip_sample_range: Positive = 1.0
    set_alpha_to_one: bool = True
    rescale_betas_zero_snr: bool = False

    def _run(self, request: Request) -> Run:
        limits = Limits(self.clip_sample_range if self.clip_sample else np.inf)
        timesteps = self._integer_timesteps(request)
        stride = self.num_train_timesteps // request.steps
        return Run(
            alpha_methods.ddim(self, timesteps, stride=stride, eta=request.eta, limits=limits)
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PNDMScheduler(DiscreteScheduler):
    """Liu et al. 2022."""

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
        return Run(rows)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LCMScheduler(DiscreteScheduler):
    """Luo et al. 2023, for consistency-distilled models."""

    fixed: ClassVar[dict[str, Any]] = {"thresholding": (False,)}
    ignored = frozenset({"dynamic_thresholding_ratio", "sample_max_value"})
    custom = ("timesteps",)
    swappable = False

    beta_start: Beta = 0.00085
    beta_end: Beta = 0.012
    beta_schedule: BetaSchedule = "scaled_linear"
    timestep_spacing: Spacing = "leading"
    original_inference_steps: Count = 50
    clip_sample: bool = False
    clip_sample_range: Positive = 1.0
    set_alpha_to_one: bool = True
    timestep_scaling: Positive = 10.0
    rescale_betas_zero_snr: bool = False

    def _run(self, request: Request) -> Run:
        limits = Limits(self.clip_sample_range if self.clip_sample else np.inf)
        timesteps = self._distilled_timesteps(request)
        scaling = self.timestep_scaling
        return Run(alpha_methods.lcm(self, timesteps, timestep_scaling=scaling, limits=limits))

    def _distilled_timesteps(self, request: Request) -> np.ndarray:
        """Of the timesteps that the model was distilled at, those of the run."""
        n, origin = request.steps, self.original_inference_steps
        stride = self.num_train_timesteps // origin
        every = np.arange(1, origin + 1) * stride - 1
        if request.timesteps is not None:
            return request.timesteps.astype(int)
        if n > origin:
            raise ValueError(
                "the number of steps (num_inference_steps) must be at most "
                f"original_inference_steps={origin} (got {n})"
            )
        return every[::-1][np.floor(np.linspace(0, origin, n, endpoint=False)).astype(int)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TCDScheduler(LCMScheduler):
    """Zheng et al. 2024; `eta` is its gamma."""

    def _run(self, request: Request) -> Run:
        if not 0 <= request.eta <= 1:
            raise ValueError(f"eta must be between 0 and 1 (got {request.eta:g})")
        timesteps = self._distilled_timesteps(request)
        return Run(alpha_methods.tcd(self, timesteps, eta=request.eta))
