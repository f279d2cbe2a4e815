"""The samplers on log-SNR, by their diffusers names."""

import dataclasses
from typing import Any, ClassVar, Literal

import numpy as np

from diffusax.samplers import noise_levels, snr_methods
from diffusax.samplers.discrete import DiscreteScheduler, respaced
from diffusax.samplers.options import FinalSigma, Offset, Order, Positive, UpperBounded
from diffusax.samplers.runs import Request, Run

__all__ = [
    "DPMSolverMultistepScheduler",
    "DPMSolverSinglestepScheduler",
    "UniPCMultistepScheduler",
]

# DDPM's fixed variances mean nothing to these methods; learned ones would be a second output.
_VARIANCES = (None, "fixed_small", "fixed_small_log", "fixed_large", "fixed_large_log")
_NO_FLOW = {"use_flow_sigmas": (False,), "use_dynamic_shifting": (False,)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SNRScheduler(DiscreteScheduler, sampler=False):
    """What the exponential integrators share."""

    custom: ClassVar[tuple[str, ...]] = ("timesteps",)
    fixed: ClassVar[dict[str, Any]] = {"thresholding": (False,), **_NO_FLOW}
    ignored = frozenset(
        {"flow_shift", "time_shift_type", "dynamic_thresholding_ratio", "sample_max_value"}
    )

    solver_order: Order = 2
    use_karras_sigmas: bool = False
    use_exponential_sigmas: bool = False
    use_beta_sigmas: bool = False
    final_sigmas_type: FinalSigma = "zero"

    def _levels(
        self, n: int, timesteps: np.ndarray, *, own_last: bool = False
    ) -> tuple[np.ndarray, np.ndarray]:
        """The timesteps, n, and the ratios sigma / alpha, n+1, of a run."""
        every = noise_levels.all_sigmas(self.alphas_cumprod)
        spaced = respaced(self, n, every[::-1])
        if getattr(self, "use_lu_lambdas", False):
            spaced = np.exp(np.linspace(np.log(every[-1]), np.log(every[0]), n))
        last = every[0]
        if spaced is None:
            sigmas = np.interp(timesteps, np.arange(len(every)), every)
        else:
            sigmas, timesteps = spaced, noise_levels.sigmas_to_timesteps(spaced, every)
            last = sigmas[-1] if own_last else last
        return timesteps, np.append(sigmas, last if self.final_sigmas_type == "sigma_min" else 0.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DPMSolverScheduler(SNRScheduler, sampler=False):
    """What the DPM solvers share."""

    fixed: ClassVar[dict[str, Any]] = {**SNRScheduler.fixed, "variance_type": _VARIANCES}

    algorithm_type: str = "dpmsolver++"
    solver_type: str = "midpoint"
    lower_order_final: bool = True
    lambda_min_clipped: UpperBounded = -np.inf

    def __post_init__(self) -> None:
        # diffusers maps the options of the schedulers that these are swapped with.
        if self.algorithm_type == "deis":
            object.__setattr__(self, "algorithm_type", "dpmsolver++")
        if self.solver_type in ("logrho", "bh1", "bh2"):
            object.__setattr__(self, "solver_type", "midpoint")
        super().__post_init__()
        if not self.algorithm_type.endswith("++") and self.final_sigmas_type == "zero":
            raise ValueError(
                f"final_sigmas_type='zero' is not possible with {self.algorithm_type!r}; use "
                "'sigma_min'"
            )

    def _solver(self) -> snr_methods.DPM:
        return snr_methods.DPM(
            self.prediction_type,
            self.solver_order,
            self.algorithm_type,
            self.solver_type,
            self.lower_order_final,
            getattr(self, "euler_at_final", False),
            self.final_sigmas_type == "zero",
        )

    def _spaced(self, request: Request, spacing: str, offset: int) -> np.ndarray:
        """The timesteps, the caller's or evenly spaced down from the clipped lambda."""
        if request.timesteps is not None:
            return request.timesteps
        total, alphas = self.num_train_timesteps, self.alphas_cumprod
        lambdas = np.log(alphas) / 2 - np.log(1 - alphas) / 2
        last = total - int(np.searchsorted(lambdas[::-1], self.lambda_min_clipped))
        return noise_levels.interior_timesteps(request.steps, total, last, spacing, offset)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DPMSolverSinglestepScheduler(DPMSolverScheduler):
    """DPM-Solver++ 2S and 3S (Lu et al. 2022)."""

    algorithm_type: Literal["dpmsolver++", "dpmsolver", "sde-dpmsolver++"] = "dpmsolver++"
    solver_type: Literal["midpoint", "heun"] = "midpoint"
    lower_order_final: bool = False

    def _run(self, request: Request) -> Run:
        timesteps = self._spaced(request, "linspace", 0)
        timesteps, sigmas = self._levels(request.steps, timesteps)
        if self.use_karras_sigmas:
            timesteps = timesteps.round()
        timesteps = np.trunc(timesteps)
        begin = request.begin
        return Run(snr_methods.dpm_singlestep(self._solver(), timesteps, sigmas, begin=begin))


@dataclasses.dataclass(frozen=True, kw_only=True)
class DPMSolverMultistepScheduler(DPMSolverScheduler):
    """DPM-Solver and DPM-Solver++ 2M and 3M, and their SDE forms (Lu et al. 2022)."""

    zero_snr_floor = True

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

    def _run(self, request: Request) -> Run:
        timesteps = self._spaced(request, self.timestep_spacing, self.steps_offset)
        timesteps, sigmas = self._levels(request.steps, timesteps)
        rounds = self.use_karras_sigmas or self.use_lu_lambdas
        if rounds and self.beta_schedule != "squaredcos_cap_v2":
            timesteps = timesteps.round()
        timesteps = np.trunc(timesteps)
        begin = request.begin
        return Run(snr_methods.dpm_multistep(self._solver(), timesteps, sigmas, begin=begin))


@dataclasses.dataclass(frozen=True, kw_only=True)
class UniPCMultistepScheduler(SNRScheduler):
    """UniPC (Zhao et al. 2023)."""

    fixed: ClassVar[dict[str, Any]] = {
        **SNRScheduler.fixed,
        "solver_p": (None,),
        "shift_terminal": (None,),
    }
    custom = ()
    zero_snr_floor = True

    predict_x0: bool = True
    solver_type: Literal["bh2", "bh1"] = "bh2"
    lower_order_final: bool = True
    disable_corrector: tuple[Offset, ...] = ()
    rescale_betas_zero_snr: bool = False
    sigma_min: Positive | None = None
    sigma_max: Positive | None = None

    def __post_init__(self) -> None:
        # diffusers maps the options of the schedulers that this one is swapped with.
        if self.solver_type in ("midpoint", "heun", "logrho"):
            object.__setattr__(self, "solver_type", "bh2")
        super().__post_init__()

    def _run(self, request: Request) -> Run:
        n, total = request.steps, self.num_train_timesteps
        timesteps = noise_levels.interior_timesteps(
            n, total, total, self.timestep_spacing, self.steps_offset
        )
        # With its own spacing of sigmas the last is the run's, not the schedule's.
        timesteps, sigmas = self._levels(n, timesteps, own_last=True)
        if self.use_karras_sigmas:
            timesteps = timesteps.round()
        solver = snr_methods.UniPC(
            self.prediction_type,
            self.solver_order,
            self.predict_x0,
            self.solver_type,
            self.lower_order_final,
            self.disable_corrector,
        )
        return Run(snr_methods.unipc(solver, np.trunc(timesteps), sigmas, begin=request.begin))
