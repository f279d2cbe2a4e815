"""SA-Solver, under diffusers' name."""

import dataclasses
from typing import Any, Literal

import numpy as np

from diffusax.boundary.tensors import for_reader
from diffusax.samplers.by_hand import as_jax
from diffusax.samplers.methods import sa_method, snr_methods
from diffusax.samplers.methods.alpha_methods import alpha_level
from diffusax.samplers.runs import Run, RunOptions, number
from diffusax.samplers.schedulers.discrete import limits_of
from diffusax.samplers.schedulers.options import Options, UpperBounded, adopt
from diffusax.samplers.schedulers.scheduler import SCHEDULERS, Scheduler
from diffusax.samplers.schedulers.snr_schedulers import SNRScheduler, VarianceType

__all__ = ["SASolverScheduler"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SASolverScheduler(SNRScheduler):
    """SA-Solver, stochastic Adams methods (Xue et al. 2023).

    tau_func says how stochastic the step from a timestep is: 0 as an ODE's, 1 as an SDE's. None is
    diffusers' choice, 1 from timestep 200 to 800 and 0 elsewhere. It is called on the host, once
    for each step of a run, must be hashable, and is lost in files, which hold no functions.
    """

    custom = ()
    swappable = False
    draws_in_vain = True
    velocity_needs = "algorithm_type='data_prediction'"

    predictor_order: Literal[1, 2, 3, 4] = 2
    corrector_order: Literal[1, 2, 3, 4] = 2
    tau_func: Any = None
    algorithm_type: Literal["data_prediction", "noise_prediction"] = "data_prediction"
    lower_order_final: bool = True
    lambda_min_clipped: UpperBounded = -np.inf  # type: ignore[misc]
    variance_type: VarianceType | None = None

    def __post_init__(self) -> None:
        others = ("deis", "dpmsolver", "dpmsolver++", "sde-dpmsolver", "sde-dpmsolver++")
        adopt(self, "algorithm_type", others, "data_prediction")
        super().__post_init__()
        tau = self.tau_func
        if tau is not None and not (callable(tau) and getattr(tau, "__hash__", None)):
            raise ValueError(f"tau_func must be a hashable function of a timestep (got {tau!r})")
        if self.thresholding and not self._takes_velocity:
            # diffusers looks for the level of a timestep that it does not have.
            raise ValueError("thresholding needs algorithm_type='data_prediction'")

    @property
    def compatibles(self) -> list[type[Scheduler]]:
        """The samplers that can be swapped for this one, as diffusers lists them."""
        return [type(self), *(cls for cls in SCHEDULERS.values() if cls.swappable)]

    @property
    def predict_x0(self) -> bool:
        """Whether predicted samples are integrated, and not the predicted noise."""
        return self.algorithm_type == "data_prediction"

    @property
    def sigmas(self) -> Any:
        """The noise levels of the run's rows, and the one that it ends at: n+1, float32."""
        run = self._hand_run
        if run is None:
            return for_reader(super().sigmas)
        _, levels = self._timed_levels(RunOptions(len(run)))
        ratios = [(1.0 if self.use_flow_sigmas else level.alpha, level.sigma) for level in levels]
        return for_reader(np.array([sigma / alpha for alpha, sigma in ratios], np.float32))

    @property
    def config(self) -> Options:
        """The options, with the function that `to_config` leaves out; see `Scheduler.config`."""
        return Options({**super().config, "tau_func": self.tau_func})

    def to_config(self) -> dict[str, Any]:
        """Returns the scheduler_config.json that diffusers reads, which holds no function."""
        return {**super().to_config(), "tau_func": None}

    @property
    def _takes_velocity(self) -> bool:
        return self.predict_x0

    def _tau(self, timestep: float) -> float:
        """Returns how stochastic the step from a timestep is.

        Raises:
            ValueError: tau_func returns no finite number.
        """
        t = int(timestep)
        return float(200 <= t <= 800) if self.tau_func is None else number("tau", self.tau_func(t))

    def _timed_levels(self, wanted: RunOptions) -> tuple[np.ndarray, list[snr_methods.Level]]:
        """Returns the timesteps, n, and the levels, n+1, of a run."""
        timesteps = self._spaced(wanted, self.timestep_spacing, self.steps_offset)
        timesteps, levels = self._levels(wanted, timesteps, to_zero=False, own_last=True)
        return np.trunc(timesteps.round() if self.use_karras_sigmas else timesteps), levels

    def _run(self, wanted: RunOptions) -> Run:
        timesteps, levels = self._timed_levels(wanted)
        solver = sa_method.SA(
            *self._predictions(),
            self.predictor_order,
            self.corrector_order,
            self._tau,
            self.predict_x0,
            self.lower_order_final,
            limits_of(self),
        )
        rows = sa_method.sa_solver(solver, timesteps, levels, begin=wanted.begin)
        if not self.use_flow_sigmas:
            # Noise is added by timesteps, which spacings of the sigmas leave between two.
            rows = [dataclasses.replace(row, level=self._level_at(row.timestep)) for row in rows]
        return Run(rows, last_level=levels[-1][:2])

    def _level_at(self, timestep: float) -> tuple[float, float]:
        return alpha_level(float(self.alphas_cumprod[int(timestep)]))

    def _levels_at(self, timesteps: Any) -> tuple[Any, Any]:
        # Whatever the run, as in diffusers.
        return self._training_levels(as_jax(timesteps))
