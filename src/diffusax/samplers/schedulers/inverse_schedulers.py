"""Samplers that run from images to noise, under diffusers' names."""

import dataclasses
from typing import Any, ClassVar, Literal

import numpy as np

from diffusax.boundary.tensors import for_reader
from diffusax.samplers import noise_levels
from diffusax.samplers.methods import alpha_methods, snr_methods
from diffusax.samplers.rows import Row
from diffusax.samplers.runs import Run, RunOptions
from diffusax.samplers.schedulers.discrete import DiscreteScheduler, limits_of, respaced
from diffusax.samplers.schedulers.options import Positive, UpperBounded, adopt
from diffusax.samplers.schedulers.scheduler import SCHEDULERS, Scheduler
from diffusax.samplers.schedulers.snr_schedulers import SNRScheduler, VarianceType
from diffusax.samplers.schedulers.step_signatures import (
    step_with_variance_noise,
    step_without_noise,
)
from diffusax.samplers.schedulers.stepped import Untimed

__all__ = ["DDIMInverseScheduler", "DPMSolverMultistepInverseScheduler"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DDIMInverseScheduler(DiscreteScheduler):
    """DDIM backwards, from an image to its noise (Song et al. 2021, section 4.3).

    Each step takes x from the level before a timestep to that of the timestep, with what the
    network predicts at the timestep. `set_alpha_to_one` says that the first level has no noise, and
    otherwise it is that of timestep 0.
    """

    counts_rows = False
    swappable = False
    second_output = "pred_original_sample"
    step = step_without_noise  # type: ignore[assignment]

    timestep_spacing: Literal["leading", "trailing"] = "leading"  # type: ignore[assignment]
    clip_sample: bool = True
    clip_sample_range: Positive = 1.0
    set_alpha_to_one: bool = True
    rescale_betas_zero_snr: bool = False

    @property
    def initial_alpha_cumprod(self) -> Any:
        """alpha-bar before the first step, a scalar, float32; see `timesteps`."""
        return for_reader(np.array(self.final_alpha, np.float32))

    def _run(self, wanted: RunOptions) -> Run:
        timesteps = self._integer_timesteps(wanted)[::-1]
        rows = self._rows(timesteps, wanted.steps)
        return Run(rows, last_level=alpha_methods.alpha_level(self.alphas_cumprod[timesteps[-1]]))

    def _rows(self, timesteps: np.ndarray, steps: int) -> list[Row]:
        stride = self.num_train_timesteps // steps
        return alpha_methods.ddim_inverse(self, timesteps, stride=stride, limits=limits_of(self))

    def _row_at(self, timestep: float, steps: int, **_: Any) -> Row:
        total = self.num_train_timesteps
        if not 0 <= timestep < total or timestep != int(timestep):
            raise ValueError(
                f"timestep must be an integer from 0 to {total - 1} (got {timestep:g})"
            )
        return self._rows(np.array([int(timestep)]), steps)[0]

    def _untimed(self) -> Untimed:
        return Untimed(np.arange(len(self), dtype=np.float64))


@dataclasses.dataclass(frozen=True, kw_only=True)
class DPMSolverMultistepInverseScheduler(SNRScheduler):
    """DPM-Solver and DPM-Solver++ 2M and 3M backwards, from an image to noise (Lu et al. 2022).

    diffusers' SDE forms and flow sigmas are left out: their backward steps are roots of negative
    numbers there, and their flow sigmas run forwards.
    """

    velocity_needs = "use_flow_sigmas=True, which runs forwards; use another prediction_type"
    custom: ClassVar[tuple[str, ...]] = ()
    swappable = False
    heeds_ends = False
    step = step_with_variance_noise  # type: ignore[assignment]

    algorithm_type: Literal["dpmsolver++", "dpmsolver"] = "dpmsolver++"
    solver_type: Literal["midpoint", "heun"] = "midpoint"
    lower_order_final: bool = True
    euler_at_final: bool = False
    lambda_min_clipped: UpperBounded = -np.inf  # type: ignore[misc]
    variance_type: VarianceType | None = None

    def __post_init__(self) -> None:
        adopt(self, "algorithm_type", ("deis",), "dpmsolver++")
        adopt(self, "solver_type", ("logrho", "bh1", "bh2"), "midpoint")
        super().__post_init__()
        if self.use_flow_sigmas:
            raise ValueError(
                "use_flow_sigmas=True is not supported by diffusax's "
                "DPMSolverMultistepInverseScheduler: diffusers' flow sigmas run forwards there"
            )

    @property
    def compatibles(self) -> list[type[Scheduler]]:
        """The samplers that can be swapped for this one, as diffusers lists them."""
        return [type(self), *(cls for cls in SCHEDULERS.values() if cls.swappable)]

    def _untimed(self) -> Untimed:
        return super()._untimed()._replace(timesteps=np.arange(len(self), dtype=np.float64))

    def _run(self, wanted: RunOptions) -> Run:
        timesteps, sigmas = self._ascending(wanted)
        levels = snr_methods.levels(noise_levels.rounded(sigmas))
        solver = snr_methods.DPM(
            *self._predictions(),
            self.solver_order,
            self.algorithm_type,
            self.solver_type,
            self.lower_order_final,
            self.euler_at_final,
            to_zero=False,
            limits=limits_of(self),
        )
        rows = snr_methods.dpm_multistep(solver, timesteps, levels, begin=wanted.begin)
        return Run(rows, last_level=levels[len(rows)][:2])

    def _ascending(self, wanted: RunOptions) -> tuple[np.ndarray, np.ndarray]:
        """Returns the timesteps, n, and the sigmas, n+1 or more, of a run, ascending.

        Spaced sigmas end where their last step begins, and timesteps that are equal when rounded
        count once, while their sigmas stay, as in diffusers
        (scheduling_dpmsolver_multistep_inverse.py, set_timesteps).
        """
        every = self.diffusion.sigmas
        spaced = respaced(self, wanted.steps, every)
        if spaced is None:
            timesteps, last = self._even_timesteps(wanted)
            sigmas = np.append(np.interp(timesteps, np.arange(len(every)), every), every[last])
        else:
            sigmas = np.append(spaced, spaced[-1])
            timesteps = noise_levels.sigmas_to_timesteps(spaced, every)
            timesteps = timesteps.round() if self.use_karras_sigmas else timesteps
        return np.trunc(np.unique(timesteps)), sigmas

    def _even_timesteps(self, wanted: RunOptions) -> tuple[np.ndarray, int]:
        """Returns ascending timesteps, evenly spaced, and the noisiest one, where a run ends."""
        descending = self._spaced(wanted, self.timestep_spacing, self.steps_offset)
        lambdas = self.lambda_t
        last = len(lambdas) - int(np.searchsorted(lambdas[::-1], self.lambda_min_clipped)) - 1
        n = wanted.steps
        if self.timestep_spacing == "linspace":
            return np.linspace(0, last, n + 1).round()[:-1], last
        if self.timestep_spacing == "leading":
            return np.arange(n) * ((last + 1) // (n + 1)) + self.steps_offset, last
        return descending[::-1], last
