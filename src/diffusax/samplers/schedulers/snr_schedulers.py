"""Samplers on log-SNR, under diffusers' names."""

import dataclasses
import functools
from typing import Any, ClassVar, Literal

import jax
import numpy as np

from diffusax.boundary.tensors import for_reader
from diffusax.samplers import noise_levels
from diffusax.samplers.methods import snr_methods
from diffusax.samplers.methods.alpha_methods import Limits
from diffusax.samplers.processes import Flow, Process
from diffusax.samplers.rows import epsilon_from, x0_from
from diffusax.samplers.runs import Run, RunOptions, check_highest
from diffusax.samplers.schedulers.discrete import DiscreteScheduler, limits_of, respaced, spacings
from diffusax.samplers.schedulers.options import (
    AnyPrediction,
    FinalSigma,
    Offset,
    Order,
    Positive,
    Quantile,
    Terminal,
    TimeShift,
    UpperBounded,
    adopt,
)
from diffusax.samplers.schedulers.step_signatures import (
    step_with_variance_noise,
    step_without_noise,
)
from diffusax.samplers.schedulers.stepped import Untimed

__all__ = [
    "DEISMultistepScheduler",
    "DPMSolverMultistepScheduler",
    "DPMSolverSinglestepScheduler",
    "UniPCMultistepScheduler",
]

_LEAST_SIGNAL = 1e-6


@dataclasses.dataclass(frozen=True, kw_only=True)
class SNRScheduler(DiscreteScheduler, sampler=False):
    """What the integrators in log-SNR have in common."""

    # The lowest log-SNR of the timesteps; a number, or -inf for the schedule's own.
    lambda_min_clipped: ClassVar[float] = -np.inf
    custom: ClassVar[tuple[str, ...]] = ("timesteps",)
    # The spacings of sigmas that flow matching may have.
    flow_spacings: ClassVar[tuple[str, ...]] = ()
    # The option without which there are no flow predictions.
    velocity_needs: ClassVar[str] = ""

    prediction_type: AnyPrediction = "epsilon"  # type: ignore[assignment]
    solver_order: Order = 2
    thresholding: bool = False
    dynamic_thresholding_ratio: Quantile = 0.995
    sample_max_value: Positive = 1.0
    use_karras_sigmas: bool = False
    use_exponential_sigmas: bool = False
    use_beta_sigmas: bool = False
    use_flow_sigmas: bool = False
    flow_shift: Positive = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_flow()

    def _check_flow(self) -> None:
        """Raises an error for what diffusers cannot do with flow matching, or does wrongly."""
        flow, kind = self.use_flow_sigmas, self.prediction_type
        if kind == "flow_prediction" and not (flow and self._takes_velocity):
            need = "use_flow_sigmas=True" if self._takes_velocity else self.velocity_needs
            raise ValueError(f"prediction_type='flow_prediction' needs {need}")
        if flow and kind == "v_prediction":
            raise ValueError(
                "prediction_type='v_prediction' is not defined with use_flow_sigmas=True; use "
                "'flow_prediction'"
            )
        lu = ["use_lu_lambdas"] if getattr(self, "use_lu_lambdas", False) else []
        refused = [name for name in (*spacings(self), *lu) if name not in self.flow_spacings]
        if flow and refused:
            raise ValueError(f"use_flow_sigmas and {refused[0]} cannot both be True")

    @property
    def _takes_velocity(self) -> bool:
        """Whether the method takes a flow prediction, which those that integrate noise do not."""
        return True

    def _untimed(self) -> Untimed:
        return super()._untimed()._replace(sigmas=self.diffusion.sigmas)

    def _timesteps_dtype(self, *, begun: bool) -> Any:
        return np.int64 if begun else np.float32

    @property
    def alpha_t(self) -> Any:
        """The signal of each training timestep, float32."""
        return for_reader(np.sqrt(self.alphas_cumprod))

    @property
    def sigma_t(self) -> Any:
        """The noise of each training timestep, float32."""
        return for_reader(np.sqrt(np.float32(1) - self.alphas_cumprod))

    @property
    def lambda_t(self) -> Any:
        """log(alpha_t / sigma_t) of each training timestep, float32."""
        with np.errstate(divide="ignore"):
            found = np.log(self.alpha_t) - np.log(self.sigma_t)
        return for_reader(found)

    def _sigmas_of(self, levels: np.ndarray) -> np.ndarray:
        return levels[:, 1] if self.use_flow_sigmas else levels[:, 1] / levels[:, 0]

    def _training_levels(self, timesteps: jax.Array) -> tuple[jax.Array, jax.Array]:
        if not self.use_flow_sigmas:
            return super()._training_levels(timesteps)
        return self.forward_process.levels(timesteps / self.num_train_timesteps)

    @property
    def forward_process(self) -> Process:
        """The process that its networks were trained for."""
        if self.use_flow_sigmas:
            return Flow(self.flow_shift, self.num_train_timesteps)
        return self.diffusion

    def _flow_sigmas(self, wanted: RunOptions, spaced: np.ndarray | None) -> np.ndarray:
        """Returns the sigmas of flow matching: n. spaced: the result of `respaced`."""
        shift = self._shift(wanted)
        n, total = wanted.steps, self.num_train_timesteps
        sigmas = 1.0 - np.linspace(1, 1 / total, n + 1)
        return noise_levels.shifted(sigmas, shift)[::-1][:-1]

    def _shift(self, wanted: RunOptions) -> float:
        """Returns the shift of flow matching's sigmas."""
        return self.flow_shift

    def _spaced(self, wanted: RunOptions, spacing: str, offset: int) -> np.ndarray:
        """Returns the caller's timesteps, or evenly spaced ones down from the clipped lambda."""
        if wanted.timesteps is not None:
            return wanted.timesteps
        total, alphas = self.num_train_timesteps, self.diffusion.alphas_cumprod
        lambdas = np.log(alphas) / 2 - np.log(1 - alphas) / 2
        last = total - int(np.searchsorted(lambdas[::-1], self.lambda_min_clipped))
        return noise_levels.interior_timesteps(wanted.steps, total, last, spacing, offset)

    def _levels(
        self, wanted: RunOptions, timesteps: np.ndarray, *, to_zero: bool, own_last: bool = False
    ) -> tuple[np.ndarray, list[snr_methods.Level]]:
        """Returns the timesteps, n, and the levels, n+1, of a run.

        to_zero: whether it ends at zero. own_last: whether it otherwise ends at its own lowest
        sigma, where it has its own spacing of sigmas, and not at the schedule's.
        """
        n, every = wanted.steps, self.diffusion.sigmas
        spaced = respaced(self, n, every[::-1])
        lu = getattr(self, "use_lu_lambdas", False)
        if lu and not self.use_karras_sigmas:
            log_every = noise_levels.log_sigmas(every)
            spaced = np.exp(np.linspace(float(log_every[-1]), float(log_every[0]), n))
        last = every[0]
        if self.use_flow_sigmas:
            sigmas = self._flow_sigmas(wanted, spaced)
            timesteps = sigmas * self.num_train_timesteps
            last = sigmas[-1] if own_last else last
        elif spaced is None:
            sigmas = np.interp(timesteps, np.arange(len(every)), every)
        else:
            sigmas, timesteps = spaced, noise_levels.sigmas_to_timesteps(spaced, every)
            last = sigmas[-1] if own_last else last
        sigmas = noise_levels.rounded(np.append(sigmas, 0.0 if to_zero else last))
        to_levels = snr_methods.flow_levels if self.use_flow_sigmas else snr_methods.levels
        return timesteps, to_levels(sigmas)

    def _check_custom(self, name: str, values: np.ndarray) -> None:
        if name == "timesteps" and self.use_flow_sigmas:
            raise ValueError("timesteps cannot be given with use_flow_sigmas=True")
        super()._check_custom(name, values)

    def _predictions(self) -> tuple[snr_methods.Predicted, snr_methods.Predicted]:
        """Returns the predicted sample, and the predicted noise."""
        kind = self.prediction_type
        return functools.partial(x0_from, kind), functools.partial(epsilon_from, kind)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShiftedSNRScheduler(SNRScheduler, sampler=False):
    """A sampler that can shift the sigmas of flow matching by the size of an image."""

    use_dynamic_shifting: bool = False
    time_shift_type: TimeShift = "exponential"

    def _shift(self, wanted: RunOptions) -> float:
        if wanted.mu is None:
            return self.flow_shift
        if self.time_shift_type != "exponential":
            raise ValueError(
                f"{self.class_name} takes mu only with time_shift_type='exponential' (got "
                f"{self.time_shift_type!r})"
            )
        return float(np.exp(wanted.mu))


VarianceType = Literal[
    "fixed_small", "fixed_small_log", "fixed_large", "fixed_large_log", "learned", "learned_range"
]
"""What configs say of the noise in DDPM's steps; other methods ignore the fixed kinds."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DPMSolverScheduler(ShiftedSNRScheduler, sampler=False):
    """What the DPM solvers have in common.

    They ignore variance_type; where the variance is learned, `run` leaves its channels out.
    """

    velocity_needs = "algorithm_type='dpmsolver++' or 'sde-dpmsolver++'"
    draws_in_vain = True

    algorithm_type: str = "dpmsolver++"
    solver_type: str = "midpoint"
    lower_order_final: bool = True
    final_sigmas_type: FinalSigma = "zero"
    lambda_min_clipped: UpperBounded = -np.inf  # type: ignore[misc]
    variance_type: VarianceType | None = None

    def __post_init__(self) -> None:
        adopt(self, "algorithm_type", ("deis",), "dpmsolver++")
        adopt(self, "solver_type", ("logrho", "bh1", "bh2"), "midpoint")
        super().__post_init__()
        if not self.algorithm_type.endswith("++") and self.final_sigmas_type == "zero":
            raise ValueError(
                f"final_sigmas_type='zero' is not possible with {self.algorithm_type!r}; use "
                "'sigma_min'"
            )

    @property
    def _takes_velocity(self) -> bool:
        return self.algorithm_type.endswith("++")

    def _solver(self) -> snr_methods.DPM:
        return snr_methods.DPM(
            *self._predictions(),
            self.solver_order,
            self.algorithm_type,
            self.solver_type,
            self.lower_order_final,
            getattr(self, "euler_at_final", False),
            self.final_sigmas_type == "zero",
            limits_of(self),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DPMSolverSinglestepScheduler(DPMSolverScheduler):
    """DPM-Solver++ 2S and 3S (Lu et al. 2022)."""

    algorithm_type: Literal["dpmsolver++", "dpmsolver", "sde-dpmsolver++"] = "dpmsolver++"
    solver_type: Literal["midpoint", "heun"] = "midpoint"
    lower_order_final: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.use_flow_sigmas and self.thresholding and self.algorithm_type == "dpmsolver":
            # diffusers thresholds there as if the levels were those of the betas.
            raise ValueError(
                "thresholding with use_flow_sigmas=True needs algorithm_type='dpmsolver++'"
            )

    def _run(self, wanted: RunOptions) -> Run:
        timesteps = self._spaced(wanted, "linspace", 0)
        solver = self._solver()
        timesteps, levels = self._levels(wanted, timesteps, to_zero=solver.to_zero)
        if self.use_karras_sigmas:
            timesteps = timesteps.round()
        timesteps = np.trunc(timesteps)
        rows = snr_methods.dpm_singlestep(solver, timesteps, levels, begin=wanted.begin)
        return Run(rows, last_level=levels[-1][:2])


@dataclasses.dataclass(frozen=True, kw_only=True)
class DPMSolverMultistepScheduler(DPMSolverScheduler):
    """DPM-Solver and DPM-Solver++ 2M and 3M, and their SDE forms (Lu et al. 2022)."""

    zero_snr_floor = True
    step = step_with_variance_noise  # type: ignore[assignment]

    algorithm_type: Literal["dpmsolver++", "dpmsolver", "sde-dpmsolver", "sde-dpmsolver++"] = (
        "dpmsolver++"
    )
    solver_type: Literal["midpoint", "heun"] = "midpoint"
    euler_at_final: bool = False
    use_lu_lambdas: bool = False
    rescale_betas_zero_snr: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.algorithm_type == "sde-dpmsolver" and self.solver_order == 3:
            raise ValueError("solver_order=3 is not defined for 'sde-dpmsolver'; use 1 or 2")

    def _run(self, wanted: RunOptions) -> Run:
        timesteps = self._spaced(wanted, self.timestep_spacing, self.steps_offset)
        solver = self._solver()
        timesteps, levels = self._levels(wanted, timesteps, to_zero=solver.to_zero)
        rounds = self.use_karras_sigmas or self.use_lu_lambdas
        if rounds and self.beta_schedule != "squaredcos_cap_v2":
            timesteps = timesteps.round()
        timesteps = np.trunc(timesteps)
        rows = snr_methods.dpm_multistep(solver, timesteps, levels, begin=wanted.begin)
        return Run(rows, last_level=levels[-1][:2])


@dataclasses.dataclass(frozen=True, kw_only=True)
class UniPCMultistepScheduler(ShiftedSNRScheduler):
    """UniPC (Zhao et al. 2023)."""

    fixed: ClassVar[dict[str, Any]] = {"solver_p": (None,)}
    flow_spacings = ("use_karras_sigmas",)
    velocity_needs = "predict_x0=True"
    custom = ("sigmas",)
    sigmas_hold_last = False
    needs_mu = True
    zero_snr_floor = True
    step = step_without_noise  # type: ignore[assignment]

    predict_x0: bool = True
    solver_type: Literal["bh2", "bh1"] = "bh2"
    lower_order_final: bool = True
    disable_corrector: tuple[Offset, ...] = ()
    final_sigmas_type: FinalSigma = "zero"
    rescale_betas_zero_snr: bool = False
    sigma_min: Positive | None = None
    sigma_max: Positive | None = None
    shift_terminal: Terminal | None = None

    def __post_init__(self) -> None:
        adopt(self, "solver_type", ("midpoint", "heun", "logrho"), "bh2")
        super().__post_init__()
        if self.shift_terminal is not None and not self.use_flow_sigmas:
            raise ValueError("shift_terminal needs use_flow_sigmas=True")

    @property
    def _takes_velocity(self) -> bool:
        return self.predict_x0

    def _check_custom(self, name: str, values: np.ndarray) -> None:
        if not self.use_flow_sigmas or self.use_karras_sigmas:
            raise ValueError(
                "sigmas can be given with use_flow_sigmas=True and use_karras_sigmas=False only"
            )
        check_highest(name, values, 1)

    def _flow_sigmas(self, wanted: RunOptions, spaced: np.ndarray | None) -> np.ndarray:
        if spaced is not None:
            return spaced / (spaced + 1)
        sigmas = wanted.sigmas
        if sigmas is None:
            sigmas = np.linspace(1, 1 / self.num_train_timesteps, wanted.steps + 1)[:-1]
        if wanted.mu is None:
            sigmas = noise_levels.shifted(sigmas, self.flow_shift)
        else:
            sigmas = noise_levels.time_shifted(sigmas, wanted.mu, self.time_shift_type)
        if self.shift_terminal:
            sigmas = noise_levels.stretched(sigmas, self.shift_terminal)
        # Without signal the log-SNR is infinite.
        if abs(sigmas[0] - 1) < _LEAST_SIGNAL:
            sigmas = np.append(sigmas[0] - _LEAST_SIGNAL, sigmas[1:])
        return sigmas

    def _run(self, wanted: RunOptions) -> Run:
        timesteps = self._spaced(wanted, self.timestep_spacing, self.steps_offset)
        to_zero = self.final_sigmas_type == "zero"
        timesteps, levels = self._levels(wanted, timesteps, to_zero=to_zero, own_last=True)
        if self.use_karras_sigmas and not self.use_flow_sigmas:
            timesteps = timesteps.round()
        solver = snr_methods.UniPC(
            *self._predictions(),
            self.solver_order,
            self.predict_x0,
            self.solver_type,
            self.lower_order_final,
            self.disable_corrector,
            # diffusers limits no sample where the noise is integrated.
            limits_of(self) if self.predict_x0 else Limits(),
        )
        rows = snr_methods.unipc(solver, np.trunc(timesteps), levels, begin=wanted.begin)
        return Run(rows, last_level=levels[-1][:2])


@dataclasses.dataclass(frozen=True, kw_only=True)
class DEISMultistepScheduler(ShiftedSNRScheduler):
    """DEIS in log rho (Zhang and Chen 2023)."""

    custom = ()
    step = step_without_noise  # type: ignore[assignment]

    algorithm_type: Literal["deis"] = "deis"
    solver_type: Literal["logrho"] = "logrho"
    lower_order_final: bool = True

    def __post_init__(self) -> None:
        adopt(self, "algorithm_type", ("dpmsolver", "dpmsolver++"), "deis")
        adopt(self, "solver_type", ("midpoint", "heun", "bh1", "bh2"), "logrho")
        super().__post_init__()

    def _run(self, wanted: RunOptions) -> Run:
        timesteps = self._spaced(wanted, self.timestep_spacing, self.steps_offset)
        timesteps, levels = self._levels(wanted, timesteps, to_zero=False, own_last=True)
        if self.use_karras_sigmas:
            timesteps = timesteps.round()
        solver = snr_methods.DEIS(
            *self._predictions(), self.solver_order, self.lower_order_final, limits_of(self)
        )
        rows = snr_methods.deis(solver, np.trunc(timesteps), levels, begin=wanted.begin)
        return Run(rows, last_level=levels[-1][:2])
