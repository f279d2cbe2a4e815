"""Samplers for models with the preconditioning of Karras et al. 2022, under diffusers' names."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from diffusax.samplers.methods import sigma_methods, snr_methods
from diffusax.samplers.noise_levels import exponential_sigmas, karras_sigmas, rounded
from diffusax.samplers.processes import Kind
from diffusax.samplers.rows import RAW, X
from diffusax.samplers.runs import Run, RunOptions
from diffusax.samplers.schedulers.discrete import limits_of
from diffusax.samplers.schedulers.options import (
    FinalSigma,
    NoisePrediction,
    Order,
    Positive,
    Quantile,
    SigmaSchedule,
    adopt,
)
from diffusax.samplers.schedulers.scheduler import Scheduler
from diffusax.samplers.schedulers.step_signatures import step_with_churn
from diffusax.samplers.schedulers.stepped import Untimed
from diffusax.samplers.terms import Terms

__all__ = ["EDMDPMSolverMultistepScheduler", "EDMEulerScheduler"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class EDMScheduler(Scheduler, sampler=False):
    """The preconditioning that both samplers share (Karras et al. 2022, table 1)."""

    on_sigmas = True
    scales_input = True

    prediction_type: NoisePrediction = "epsilon"
    sigma_min: Positive = 0.002
    sigma_max: Positive = 80.0
    sigma_data: Positive = 0.5
    sigma_schedule: SigmaSchedule = "karras"
    rho: Positive = 7.0
    final_sigmas_type: FinalSigma = "zero"

    @property
    def compatibles(self) -> list[type[Scheduler]]:
        """The samplers that can be swapped for this one, as diffusers lists them."""
        return [type(self)]

    @property
    def process(self) -> Kind:
        """The process that the networks were trained for."""
        unit = (self.prediction_type, self.sigma_data) == ("v_prediction", 1.0)
        return "continuous" if unit else "edm"

    def _levels(self, n: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the timesteps, n, and the sigmas, n, of a run."""
        if self.sigma_schedule == "karras":
            sigmas = karras_sigmas(n, self.sigma_min, self.sigma_max, rho=self.rho)
        else:
            sigmas = exponential_sigmas(n, self.sigma_max, self.sigma_min)[::-1]
        sigmas = rounded(sigmas)
        return np.log(sigmas) / 4, sigmas

    def _training_levels(self, timesteps: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.ones_like(timesteps), jnp.exp(4 * timesteps)

    def _x0(self, signal: float, sigma: float) -> Terms:
        """Returns the predicted sample as coefficients of X and RAW, at signal 1."""
        total = sigma**2 + self.sigma_data**2
        sign = 1 if self.prediction_type == "epsilon" else -1
        out = sign * sigma * self.sigma_data / np.sqrt(total)
        return self.sigma_data**2 / total * X + out * RAW

    def _epsilon(self, signal: float, sigma: float) -> Terms:
        """Returns the predicted noise as coefficients of X and RAW, at signal 1."""
        return (X - self._x0(signal, sigma)) / sigma

    def _in_scale(self, sigma: float) -> float:
        return 1 / np.hypot(sigma, self.sigma_data)

    def _init_sigma(self) -> float:
        return np.hypot(self.sigma_max, 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EDMEulerScheduler(EDMScheduler):
    """Euler steps (Karras et al. 2022, algorithm 2)."""

    second_output = "pred_original_sample"
    step = step_with_churn  # type: ignore[assignment]

    def _untimed(self) -> Untimed:
        # diffusers' class begins with one more than the timesteps of the training.
        timesteps, sigmas = self._levels(len(self) + 1)
        return Untimed(timesteps, np.append(sigmas, self._last(sigmas)), self._init_sigma())

    def _last(self, sigmas: np.ndarray) -> float:
        """Returns the sigma that a run at these sigmas ends at."""
        return float(sigmas[-1]) if self.final_sigmas_type == "sigma_min" else 0.0

    def _run(self, wanted: RunOptions) -> Run:
        timesteps, sigmas = self._levels(wanted.steps)
        last = self._last(sigmas)
        rows = sigma_methods.euler(
            timesteps, np.append(sigmas, last), self._x0, self._epsilon, self._in_scale
        )
        return Run(rows, self._init_sigma(), (1.0, last))


@dataclasses.dataclass(frozen=True, kw_only=True)
class EDMDPMSolverMultistepScheduler(EDMScheduler):
    """DPM-Solver++ 2M and 3M (Lu et al. 2022) on sigmas."""

    swappable = False
    draws_in_vain = True

    solver_order: Order = 2
    thresholding: bool = False
    dynamic_thresholding_ratio: Quantile = 0.995
    sample_max_value: Positive = 1.0
    algorithm_type: Literal["dpmsolver++", "sde-dpmsolver++"] = "dpmsolver++"
    solver_type: Literal["midpoint", "heun"] = "midpoint"
    lower_order_final: bool = True
    euler_at_final: bool = False

    def __post_init__(self) -> None:
        adopt(self, "algorithm_type", ("deis",), "dpmsolver++")
        adopt(self, "solver_type", ("logrho", "bh1", "bh2"), "midpoint")
        super().__post_init__()
        if self.algorithm_type == "sde-dpmsolver++" and self.solver_order == 3:
            raise ValueError("solver_order=3 is not defined for 'sde-dpmsolver++'; use 1 or 2")

    def _run(self, wanted: RunOptions) -> Run:
        timesteps, sigmas = self._levels(wanted.steps)
        to_zero = self.final_sigmas_type == "zero"
        levels = [
            snr_methods.Level(1.0, sigma, -np.log(sigma), self._in_scale(sigma))
            for sigma in np.append(sigmas, 0.0 if to_zero else self.sigma_min)
        ]
        solver = snr_methods.DPM(
            self._x0,
            self._epsilon,
            self.solver_order,
            self.algorithm_type,
            self.solver_type,
            self.lower_order_final,
            self.euler_at_final,
            to_zero,
            limits_of(self),
        )
        rows = snr_methods.dpm_multistep(solver, timesteps, levels, begin=wanted.begin)
        return Run(rows, self._init_sigma(), levels[-1][:2])
