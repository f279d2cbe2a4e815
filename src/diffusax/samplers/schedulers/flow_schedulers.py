"""Samplers of flow matching, under diffusers' names."""

import dataclasses
from collections.abc import Callable
from typing import Annotated, Any, ClassVar

import jax
import numpy as np
from msgspec import Meta

from diffusax.samplers import noise_levels
from diffusax.samplers.methods import flow_methods
from diffusax.samplers.processes import Flow
from diffusax.samplers.runs import Run, RunOptions, check_highest
from diffusax.samplers.schedulers.discrete import check_one_spacing, respaced
from diffusax.samplers.schedulers.options import Count, Positive, Terminal, TimeShift
from diffusax.samplers.schedulers.scheduler import Scheduler
from diffusax.samplers.schedulers.step_signatures import step_with_churn
from diffusax.samplers.schedulers.stepped import Untimed

__all__ = [
    "FlowMatchEulerDiscreteScheduler",
    "FlowMatchHeunDiscreteScheduler",
    "FlowMatchLCMScheduler",
]

_Shift = Annotated[float, Meta(ge=-1e6, le=1e6)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlowMatchScheduler(Scheduler, sampler=False):
    """A sampler for models that predict the velocity from samples to noise."""

    swappable = False
    on_sigmas = True
    # diffusers' classes lack this option, because flow matching has one kind of prediction.
    prediction_type: ClassVar[str] = "flow_prediction"  # type: ignore[misc]

    shift: Positive = 1.0

    @property
    def forward_process(self) -> Flow:
        """The process that its networks were trained for."""
        return Flow(self.shift, self.num_train_timesteps)

    def scale_noise(self, sample: Any, timestep: Any, noise: Any) -> Any:
        """Returns (1 - sigma) sample + sigma noise at timesteps, b ...; see `add_noise`.

        Args:
            sample: b ..., clean.
            timestep: b, or one for all.
            noise: b ..., standard normal.
        """
        return self.add_noise(sample, noise, timestep)

    @property
    def sigma_min(self) -> float:
        """The lowest noise level of the training."""
        return self.forward_process.ends()[1]

    @property
    def sigma_max(self) -> float:
        """The highest noise level of the training."""
        return self.forward_process.ends()[0]

    def _untimed(self) -> Untimed:
        total = self.num_train_timesteps
        sigmas = self.forward_process.shifted(np.arange(total, 0, -1) / total)
        return Untimed(sigmas * total, sigmas)

    def _training_levels(self, timesteps: jax.Array) -> tuple[jax.Array, jax.Array]:
        return self.forward_process.levels(timesteps / self.num_train_timesteps)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpacedFlowMatchScheduler(FlowMatchScheduler, sampler=False):
    """A sampler whose levels may be shifted by the size of an image, and spaced in several ways."""

    custom = ("timesteps", "sigmas")
    paired = True
    sigmas_hold_last = False
    needs_mu = True
    draws_in_vain = True

    use_dynamic_shifting: bool = False
    base_shift: _Shift | None = 0.5
    max_shift: _Shift | None = 1.15
    base_image_seq_len: Count = 256
    max_image_seq_len: Count = 4096
    invert_sigmas: bool = False
    shift_terminal: Terminal | None = None
    use_karras_sigmas: bool = False
    use_exponential_sigmas: bool = False
    use_beta_sigmas: bool = False
    time_shift_type: TimeShift = "exponential"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_one_spacing(self)

    @property
    def forward_process(self) -> Flow:
        """How the networks were trained; not shifted where the shift depends on the image."""
        shift = 1.0 if self.use_dynamic_shifting else self.shift
        return Flow(shift, self.num_train_timesteps)

    def dynamic_mu(self, image_seq_len: int) -> float:
        """Returns `mu` for images of `image_seq_len` tokens, on the line that the options define.

        Raises:
            ValueError: the options do not define a line.
        """
        return noise_levels.dynamic_mu(self.config, image_seq_len)

    def _check_custom(self, name: str, values: np.ndarray) -> None:
        check_highest(name, values, 1 if name == "sigmas" else self.num_train_timesteps)

    def _levels(self, wanted: RunOptions) -> tuple[np.ndarray, np.ndarray]:
        """Returns the timesteps, n, and sigmas, n+1, of a run."""
        total = self.num_train_timesteps
        sigmas = self._shifted(self._unshifted(wanted), wanted.mu)
        if self.shift_terminal:
            sigmas = noise_levels.stretched(sigmas, self.shift_terminal)
        spaced = respaced(self, len(sigmas), sigmas.astype(np.float64))
        sigmas = noise_levels.in_float32(sigmas if spaced is None else spaced)
        timesteps = sigmas * total
        if wanted.timesteps is not None:
            timesteps = noise_levels.in_float32(wanted.timesteps)
        if self.invert_sigmas:
            sigmas = 1 - sigmas
            timesteps = sigmas * total
        last = np.float32(self.invert_sigmas)
        return timesteps.astype(np.float64), np.append(sigmas, last).astype(np.float64)

    def _run_by(self, method: Callable[[np.ndarray, np.ndarray], Any], wanted: RunOptions) -> Run:
        """Returns the run whose rows a method makes of timesteps and sigmas."""
        timesteps, sigmas = self._levels(wanted)
        return Run(method(timesteps, sigmas), last_level=(1 - sigmas[-1], sigmas[-1]))

    def _unshifted(self, wanted: RunOptions) -> np.ndarray:
        """Returns the caller's sigmas, those of the caller's timesteps, or evenly spaced ones.

        The ends of the latter are shifted already, and so shifted twice, as in diffusers.
        """
        total = self.num_train_timesteps
        if wanted.sigmas is not None:
            return noise_levels.in_float32(wanted.sigmas)
        if wanted.timesteps is not None:
            return noise_levels.in_float32(wanted.timesteps) / total
        high, low = self.forward_process.ends()
        return np.linspace(high * total, low * total, wanted.steps) / total

    def _shifted(self, sigmas: np.ndarray, mu: float | None) -> np.ndarray:
        if mu is None:
            return self.forward_process.shifted(sigmas)
        return noise_levels.time_shifted(sigmas, mu, self.time_shift_type)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlowMatchEulerDiscreteScheduler(SpacedFlowMatchScheduler):
    """Euler steps along the velocity (Esser et al. 2024)."""

    stochastic_sampling: bool = False

    def step(  # type: ignore[override]
        self,
        model_output: Any,
        timestep: Any,
        sample: Any,
        s_churn: float = 0.0,
        s_tmin: float = 0.0,
        s_tmax: float = float("inf"),
        s_noise: float = 1.0,
        generator: Any = None,
        per_token_timesteps: Any = None,
        return_dict: bool = True,
    ) -> Any:
        """Returns the sample after the row of this timestep; see `Stepped.step`.

        As in diffusers, s_churn, s_tmin, s_tmax and s_noise do nothing.

        Raises:
            ValueError: per_token_timesteps are given.
        """
        if per_token_timesteps is not None:
            raise ValueError("per_token_timesteps must be None; all tokens share a timestep here")
        return self._step(model_output, timestep, sample, return_dict, generator=generator)

    def _run(self, wanted: RunOptions) -> Run:
        stochastic = self.stochastic_sampling
        method = flow_methods.euler_stochastic if stochastic else flow_methods.euler
        return self._run_by(method, wanted)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlowMatchLCMScheduler(SpacedFlowMatchScheduler):
    """Steps to the predicted sample, to which fresh noise is added (Luo et al. 2023).

    Latents keep their size: diffusers' scale_factors, by which they grow from step to step, are
    refused.
    """

    fixed: ClassVar[dict[str, Any]] = {
        "scale_factors": (None, []),
        # How latents would grow.
        "upscale_mode": (
            *("bicubic", "nearest", "linear", "bilinear", "trilinear", "area", "nearest-exact"),
        ),
    }

    def _run(self, wanted: RunOptions) -> Run:
        return self._run_by(flow_methods.euler_stochastic, wanted)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlowMatchHeunDiscreteScheduler(FlowMatchScheduler):
    """Heun's second-order steps along the velocity."""

    order = 2
    step = step_with_churn  # type: ignore[assignment]

    def _run(self, wanted: RunOptions) -> Run:
        total = self.num_train_timesteps
        high, low = self.forward_process.ends()
        sigmas = np.linspace(high * total, low * total, wanted.steps) / total
        sigmas = self.forward_process.shifted(sigmas).astype(np.float32)
        timesteps = (sigmas * total).astype(np.float64)
        return Run(flow_methods.heun(timesteps, np.append(sigmas, 0.0).astype(np.float64)))
