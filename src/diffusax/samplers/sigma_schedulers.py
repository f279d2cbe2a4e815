"""The samplers on sigmas and on log-SNR, by their diffusers names."""

import dataclasses
from typing import Any, ClassVar

import numpy as np

from diffusax.samplers import dpm, schedules, sigma_space
from diffusax.samplers.rows import Row
from diffusax.samplers.schedulers import (
    NO_THRESHOLDING,
    THRESHOLDING_DETAILS,
    Scheduler,
    require_one_of,
)

_SPACINGS = ("use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas")
_NO_FLOW = {"use_flow_sigmas": False, "use_dynamic_shifting": False}
# DDPM's fixed variances mean nothing to these methods; learned ones would be a second output.
_FIXED = ("fixed_small", "fixed_small_log", "fixed_large", "fixed_large_log")
_VARIANCE = {"variance_type": (None, *_FIXED)}
_FLOW_DETAILS = frozenset({"flow_shift", "time_shift_type"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class EulerAncestralDiscreteScheduler(Scheduler):
    """Ancestral sampling with Euler steps (k-diffusion)."""

    class_name = "EulerAncestralDiscreteScheduler"
    zero_snr_floor = True

    rescale_betas_zero_snr: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require_one_of(self, "prediction_type", ("epsilon", "v_prediction"))

    def _rows(self, n: int, *, eta: float, **custom: np.ndarray) -> tuple[list[Row], float]:
        timesteps, sigmas = _run_sigmas(self, n, **custom)
        rows = sigma_space.euler_ancestral(timesteps, sigmas, self.prediction_type)
        return rows, _init_sigma(self, sigmas)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LMSDiscreteScheduler(Scheduler):
    """Linear multistep of order 4 (k-diffusion)."""

    class_name = "LMSDiscreteScheduler"

    use_karras_sigmas: bool = False
    use_exponential_sigmas: bool = False
    use_beta_sigmas: bool = False

    def _rows(self, n: int, *, eta: float, **custom: np.ndarray) -> tuple[list[Row], float]:
        timesteps, sigmas = _run_sigmas(self, n, **custom)
        rows = sigma_space.lms(timesteps, sigmas, self.prediction_type)
        return rows, _init_sigma(self, sigmas)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EulerDiscreteScheduler(LMSDiscreteScheduler):
    """Karras et al. 2022, algorithm 2 with Euler steps."""

    class_name = "EulerDiscreteScheduler"
    fixed: ClassVar[dict[str, Any]] = {"timestep_type": "discrete"}
    custom = ("timesteps", "sigmas")
    zero_snr_floor = True

    interpolation_type: str = "linear"
    sigma_min: float | None = None
    sigma_max: float | None = None
    rescale_betas_zero_snr: bool = False
    final_sigmas_type: str = "zero"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_one_of(self, "interpolation_type", ("linear", "log_linear"))
        require_one_of(self, "final_sigmas_type", ("zero", "sigma_min"))

    def _rows(self, n: int, *, eta: float, **custom: np.ndarray) -> tuple[list[Row], float]:
        timesteps, sigmas = _run_sigmas(self, n, **custom)
        rows = sigma_space.euler(timesteps, sigmas, self.prediction_type)
        return rows, _init_sigma(self, sigmas)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeunDiscreteScheduler(LMSDiscreteScheduler):
    """Karras et al. 2022, algorithm 2."""

    class_name = "HeunDiscreteScheduler"
    custom = ("timesteps",)

    beta_start: float = 0.00085
    beta_end: float = 0.012
    clip_sample: bool = False
    clip_sample_range: float = 1.0

    def _rows(self, n: int, *, eta: float, **custom: np.ndarray) -> tuple[list[Row], float]:
        timesteps, sigmas = _run_sigmas(self, n, **custom)
        clip = self.clip_sample_range if self.clip_sample else np.inf
        rows = sigma_space.heun(timesteps, sigmas, self.prediction_type, clip=clip)
        return rows, _init_sigma(self, sigmas)


@dataclasses.dataclass(frozen=True, kw_only=True)
class KDPM2DiscreteScheduler(LMSDiscreteScheduler):
    """DPM-Solver-2 with a midpoint in log sigma (k-diffusion)."""

    class_name = "KDPM2DiscreteScheduler"

    beta_start: float = 0.00085
    beta_end: float = 0.012

    def __post_init__(self) -> None:
        super().__post_init__()
        require_one_of(self, "prediction_type", ("epsilon", "v_prediction"))

    def _rows(self, n: int, *, eta: float, **custom: np.ndarray) -> tuple[list[Row], float]:
        timesteps, sigmas = _run_sigmas(self, n, **custom)
        if self.use_karras_sigmas:
            timesteps = timesteps.round()
        every = schedules.all_sigmas(self.alphas_cumprod)
        rows = self._method(timesteps, sigmas, self.prediction_type, every)
        return rows, _init_sigma(self, sigmas)

    _method = staticmethod(sigma_space.kdpm2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class KDPM2AncestralDiscreteScheduler(KDPM2DiscreteScheduler):
    """DPM-Solver-2 with ancestral noise (k-diffusion)."""

    class_name = "KDPM2AncestralDiscreteScheduler"
    _method = staticmethod(sigma_space.kdpm2_ancestral)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _LogSNRScheduler(Scheduler):
    """What the exponential integrators share."""

    custom: ClassVar[tuple[str, ...]] = ("timesteps",)

    solver_order: int = 2
    use_karras_sigmas: bool = False
    use_exponential_sigmas: bool = False
    use_beta_sigmas: bool = False
    final_sigmas_type: str = "zero"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_one_of(self, "solver_order", (1, 2, 3))
        require_one_of(self, "final_sigmas_type", ("zero", "sigma_min"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class DPMSolverSinglestepScheduler(_LogSNRScheduler):
    """DPM-Solver++ 2S and 3S (Lu et al. 2022)."""

    class_name = "DPMSolverSinglestepScheduler"
    fixed: ClassVar[dict[str, Any]] = {**NO_THRESHOLDING, **_NO_FLOW, **_VARIANCE}
    ignored = THRESHOLDING_DETAILS | _FLOW_DETAILS

    algorithm_type: str = "dpmsolver++"
    solver_type: str = "midpoint"
    lower_order_final: bool = False
    lambda_min_clipped: float = -np.inf

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_dpm(self, ("dpmsolver", "dpmsolver++", "sde-dpmsolver++"))

    def _rows(self, n: int, *, eta: float, **custom: np.ndarray) -> tuple[list[Row], float]:
        last = _last_timestep(self)
        spaced = schedules.interior_timesteps(n, self.num_train_timesteps, last, "linspace", 0)
        timesteps, sigmas = _log_snr_sigmas(self, n, custom.get("timesteps", spaced))
        if self.use_karras_sigmas:
            timesteps = timesteps.round()
        return dpm.dpm_singlestep(self, np.trunc(timesteps), sigmas), 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class DPMSolverMultistepScheduler(_LogSNRScheduler):
    """DPM-Solver and DPM-Solver++ 2M and 3M, and their SDE forms (Lu et al. 2022)."""

    class_name = "DPMSolverMultistepScheduler"
    fixed: ClassVar[dict[str, Any]] = {**NO_THRESHOLDING, **_NO_FLOW, **_VARIANCE}
    ignored = THRESHOLDING_DETAILS | _FLOW_DETAILS
    zero_snr_floor = True

    algorithm_type: str = "dpmsolver++"
    solver_type: str = "midpoint"
    lower_order_final: bool = True
    euler_at_final: bool = False
    use_lu_lambdas: bool = False
    lambda_min_clipped: float = -np.inf
    rescale_betas_zero_snr: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_dpm(self, ("dpmsolver", "dpmsolver++", "sde-dpmsolver", "sde-dpmsolver++"))
        if self.algorithm_type == "sde-dpmsolver" and self.solver_order == 3:
            raise ValueError("solver_order=3 is not defined for 'sde-dpmsolver'; use 1 or 2")

    def _rows(self, n: int, *, eta: float, **custom: np.ndarray) -> tuple[list[Row], float]:
        spaced = schedules.interior_timesteps(
            n,
            self.num_train_timesteps,
            _last_timestep(self),
            self.timestep_spacing,
            self.steps_offset,
        )
        timesteps, sigmas = _log_snr_sigmas(self, n, custom.get("timesteps", spaced))
        rounds = self.use_karras_sigmas or self.use_lu_lambdas
        if rounds and self.beta_schedule != "squaredcos_cap_v2":
            timesteps = timesteps.round()
        return dpm.dpm_multistep(self, np.trunc(timesteps), sigmas), 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class UniPCMultistepScheduler(_LogSNRScheduler):
    """UniPC (Zhao et al. 2023)."""

    class_name = "UniPCMultistepScheduler"
    fixed: ClassVar[dict[str, Any]] = {
        **NO_THRESHOLDING,
        **_NO_FLOW,
        "solver_p": None,
        "shift_terminal": None,
    }
    ignored = THRESHOLDING_DETAILS | _FLOW_DETAILS
    custom = ()
    zero_snr_floor = True

    predict_x0: bool = True
    solver_type: str = "bh2"
    lower_order_final: bool = True
    disable_corrector: tuple[int, ...] = ()
    rescale_betas_zero_snr: bool = False
    sigma_min: float | None = None
    sigma_max: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.solver_type in ("midpoint", "heun", "logrho"):
            object.__setattr__(self, "solver_type", "bh2")
        require_one_of(self, "solver_type", ("bh1", "bh2"))

    def _rows(self, n: int, *, eta: float, **custom: np.ndarray) -> tuple[list[Row], float]:
        total = self.num_train_timesteps
        timesteps = schedules.interior_timesteps(
            n, total, total, self.timestep_spacing, self.steps_offset
        )
        # With its own spacing of sigmas the last is the run's, not the schedule's.
        timesteps, sigmas = _log_snr_sigmas(self, n, timesteps, own_last=True)
        if self.use_karras_sigmas:
            timesteps = timesteps.round()
        return dpm.unipc(self, np.trunc(timesteps), sigmas), 1.0


def _check_dpm(scheduler: Any, algorithm_types: tuple[str, ...]) -> None:
    # diffusers maps the options of the schedulers that these are swapped with.
    if scheduler.algorithm_type == "deis":
        object.__setattr__(scheduler, "algorithm_type", "dpmsolver++")
    if scheduler.solver_type in ("logrho", "bh1", "bh2"):
        object.__setattr__(scheduler, "solver_type", "midpoint")
    require_one_of(scheduler, "algorithm_type", algorithm_types)
    require_one_of(scheduler, "solver_type", ("midpoint", "heun"))
    if not scheduler.algorithm_type.endswith("++") and scheduler.final_sigmas_type == "zero":
        raise ValueError(
            f"final_sigmas_type='zero' is not possible with {scheduler.algorithm_type!r}; use "
            "'sigma_min'"
        )


def _last_timestep(scheduler: Any) -> int:
    alphas = scheduler.alphas_cumprod
    lambdas = np.log(alphas) / 2 - np.log(1 - alphas) / 2
    clipped = int(np.searchsorted(lambdas[::-1], scheduler.lambda_min_clipped))
    return scheduler.num_train_timesteps - clipped


def _run_sigmas(
    s: Any, n: int, *, timesteps: Any = None, sigmas: Any = None
) -> tuple[np.ndarray, np.ndarray]:
    """The timesteps and the sigmas, one more, of a run in the variance-exploding form."""
    every = schedules.all_sigmas(s.alphas_cumprod)
    if sigmas is not None:
        return schedules.sigmas_to_timesteps(sigmas[:-1], every), sigmas
    if timesteps is None:
        timesteps = schedules.spaced_timesteps(
            n, s.num_train_timesteps, s.timestep_spacing, s.steps_offset
        )
    timesteps = timesteps.astype(np.float32).astype(np.float64)
    if getattr(s, "interpolation_type", "linear") == "log_linear":
        sigmas = schedules.exponential_sigmas(n + 1, every[0], every[-1])
    else:
        sigmas = np.interp(timesteps, np.arange(len(every)), every)
    respaced = _respaced(s, n, sigmas)
    if respaced is not None:
        sigmas = respaced
        timesteps = schedules.sigmas_to_timesteps(respaced, every)
    last = every[0] if getattr(s, "final_sigmas_type", "zero") == "sigma_min" else 0.0
    return timesteps, np.append(sigmas, last)


def _log_snr_sigmas(
    s: Any, n: int, timesteps: np.ndarray, *, own_last: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """As `_run_sigmas`, for the exponential integrators: respacing spans the whole schedule."""
    every = schedules.all_sigmas(s.alphas_cumprod)
    if getattr(s, "use_lu_lambdas", False):
        respaced = np.exp(np.linspace(np.log(every[-1]), np.log(every[0]), n))
    else:
        respaced = _respaced(s, n, every[::-1])
    last = every[0]
    if respaced is None:
        sigmas = np.interp(timesteps, np.arange(len(every)), every)
    else:
        sigmas, timesteps = respaced, schedules.sigmas_to_timesteps(respaced, every)
        last = sigmas[-1] if own_last else last
    return timesteps, np.append(sigmas, last if s.final_sigmas_type == "sigma_min" else 0.0)


def _respaced(s: Any, n: int, sigmas: np.ndarray) -> Any:
    """N sigmas between the ends of `sigmas`, as the options ask; None where they ask nothing."""
    chosen = [name for name in _SPACINGS if getattr(s, name, False)]
    if not chosen:
        return None
    function = {
        "use_karras_sigmas": schedules.karras_sigmas,
        "use_exponential_sigmas": schedules.exponential_sigmas,
        "use_beta_sigmas": schedules.beta_sigmas,
    }[chosen[0]]
    low, high = getattr(s, "sigma_min", None), getattr(s, "sigma_max", None)
    return function(n, sigmas[-1] if low is None else low, sigmas[0] if high is None else high)


def _init_sigma(s: Any, sigmas: np.ndarray) -> float:
    highest = sigmas.max()
    return highest if s.timestep_spacing != "leading" else np.sqrt(highest**2 + 1)
