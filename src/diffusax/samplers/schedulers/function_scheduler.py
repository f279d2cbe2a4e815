"""A sampler of one's own, made of a function that computes the rows of a run."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import jax
import numpy as np

from diffusax.boundary.tensors import for_reader
from diffusax.samplers.processes import Kind, Process
from diffusax.samplers.rows import RAW, SLOTS, Row, X, x0_from
from diffusax.samplers.runs import Run, RunOptions
from diffusax.samplers.schedulers.alpha_schedulers import DDIMScheduler
from diffusax.samplers.schedulers.flow_schedulers import FlowMatchEulerDiscreteScheduler
from diffusax.samplers.schedulers.options import Options
from diffusax.samplers.schedulers.scheduler import Scheduler
from diffusax.samplers.schedulers.sigma_schedulers import EulerDiscreteScheduler
from diffusax.samplers.schedulers.stepped import Untimed
from diffusax.samplers.terms import NotLinearError, Terms

_OWN_ATTRIBUTES = (
    "custom",
    "paired",
    "sigmas_hold_last",
    "needs_mu",
    "swappable",
    "scales_input",
    "whole_timesteps",
)
_ONE_ROW: dict[str, tuple[type[Scheduler], dict[str, Any]]] = {
    "PNDMScheduler": (DDIMScheduler, {"clip_sample": False}),
    "HeunDiscreteScheduler": (EulerDiscreteScheduler, {}),
    "KDPM2DiscreteScheduler": (EulerDiscreteScheduler, {}),
    "KDPM2AncestralDiscreteScheduler": (EulerDiscreteScheduler, {}),
    "DPMSolverSDEScheduler": (EulerDiscreteScheduler, {}),
    "FlowMatchHeunDiscreteScheduler": (FlowMatchEulerDiscreteScheduler, {}),
}
"""The samplers with other timesteps than one for each step, and those with the same levels."""


@dataclasses.dataclass(frozen=True, eq=False)
class Steps:
    """The steps of a run, from which the function of a sampler makes rows.

    Everywhere x = signal x0 + noise eps: signal is 1 where the sampler that is imitated works on
    sigmas, sqrt(alpha-bar) where it works on alpha-bar, and 1 - sigma for flow matching.
    """

    rows: tuple[Row, ...]
    """A row for each step, in which P is the predicted sample x0, and x is to be replaced."""
    levels: np.ndarray
    """The (signal, noise) of x before each step and after the last, n+1 2, float64."""
    begin: int = 0
    """The first step that runs; methods that use earlier predictions count them from there."""
    eta: float = 0.0
    """The `eta` of the call, which a sampler may understand as it likes."""

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def timesteps(self) -> np.ndarray:
        """The network's time input in each step: n."""
        return np.array([row.timestep for row in self.rows])

    def row(self, step: int, x: np.ndarray, memory: Sequence[np.ndarray] = ()) -> Row:
        """Returns a row that evaluates the network at the level of a step.

        Args:
            step: the number of the step.
            x: the coefficients of the next x, a sum of X, M1 ... M5, RAW, P and NOISE.
            memory: the coefficients of M1, M2 ... after the row; the other slots do not change.
        """
        return dataclasses.replace(self.rows[step], x=x, memory=tuple(memory))


def scheduler_from_function(
    function: Callable[[Steps], Sequence[Row]], like: Scheduler, *, order: int = 1
) -> Scheduler:
    """Makes a sampler of a function that gives the rows of a run, to be assigned to a pipeline.

    The rows are data of the compiled programs, so that another function compiles nothing.

    Args:
        function: a function of `Steps` that returns one `Row` for each evaluation of the network,
            see `diffusax.samplers.rows`. It must be hashable, and is called once for each number of
            steps and the like.
        like: the sampler from which the timesteps, noise levels and prediction type of a run are
            taken, such as `pipe.scheduler`. For one with several rows in a step, and for PNDM,
            Euler's or DDIM's are taken at the same options. `save_pretrained` writes this sampler,
            because a file holds no function.
        order: the rows of each step but the last one, which may have fewer.

    Raises:
        ValueError: an argument is of another kind.
    """
    return FunctionScheduler(function=function, like=like, order=order)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FunctionScheduler(Scheduler, sampler=False):
    """A sampler made by `scheduler_from_function`; its options are those of `like`."""

    takes_eta = True

    function: Callable[[Steps], Sequence[Row]]
    like: Scheduler
    order: int = 1  # type: ignore[misc]

    def __post_init__(self) -> None:
        """Copies from `like` what it says of runs and options."""
        function, like, order = self.function, self.like, self.order
        if not callable(function) or getattr(function, "__hash__", None) is None:
            raise ValueError(
                f"function must be a hashable function that returns rows (got {function!r})"
            )
        if not isinstance(like, Scheduler):
            raise ValueError(
                f"like must be a scheduler, such as pipe.scheduler (got {type(like).__name__})"
            )
        if isinstance(order, bool) or not isinstance(order, int) or order < 1:
            raise ValueError(f"order must be an integer of at least 1 (got {order!r})")
        if like.class_name in _ONE_ROW:
            kind, options = _ONE_ROW[like.class_name]
            # The class name would have options refused that only the other sampler has.
            given = {k: v for k, v in like.to_config().items() if k != "_class_name"}
            like = kind.from_config(given, **options)
        own = {name: getattr(like, name) for name in _OWN_ATTRIBUTES}
        own |= {"num_train_timesteps": like.num_train_timesteps, "like": like.without_run()}
        own |= {"prediction_type": like.prediction_type, "class_name": _name(function)}
        for name, value in own.items():
            object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        """Returns the option of `like`."""
        if name.startswith("__") or "like" not in vars(self):
            raise AttributeError(name)
        return getattr(self.like, name)

    @classmethod
    def from_config(cls, config: Mapping[str, Any] | Scheduler, **overrides: Any) -> Self:
        """Raises an error, because a config holds no function.

        Raises:
            ValueError: always.
        """
        raise ValueError("a config holds no function; use scheduler_from_function(function, like)")

    def with_options(self, **options: Any) -> Self:
        """Returns this sampler with other options of `like`."""
        return dataclasses.replace(self, like=self.like.with_options(**options))

    @property
    def config(self) -> Options:
        """The options of `like`, and under "_function" the function's name."""
        name = f"{getattr(self.function, '__module__', None)}.{_name(self.function)}"
        return Options({**self.like.config, "_function": name})

    @property
    def process(self) -> Kind:
        """The process that the networks were trained for."""
        return self.like.process

    @property
    def forward_process(self) -> Process:
        """The process that its networks were trained for."""
        return self.like.forward_process

    @property
    def alphas_cumprod(self) -> Any:
        """alpha-bar for each training timestep, see the property of `like`."""
        return for_reader(self.like.alphas_cumprod)

    def to_config(self) -> dict[str, Any]:
        """Returns the scheduler_config.json of `like`."""
        return self.like.to_config()

    def _untimed(self) -> Untimed:
        return self.like._untimed()

    def _sigmas_of(self, levels: np.ndarray) -> np.ndarray | None:
        return self.like._sigmas_of(levels)

    def _training_levels(self, timesteps: jax.Array) -> tuple[jax.Array, jax.Array]:
        return self.like._training_levels(timesteps)

    def _check_custom(self, name: str, values: np.ndarray) -> None:
        self.like._check_custom(name, values)

    def _run(self, wanted: RunOptions) -> Run:
        whole = self.like._run(wanted._replace(begin=0))
        levels = np.array([row.level for row in whole.rows] + [whole.last_level], np.float64)
        rows = tuple(self._template(row) for row in whole.rows)
        steps = Steps(rows, levels, wanted.begin // self.order, wanted.eta)
        try:
            found = list(self.function(steps))
        except TypeError as error:
            # JAX's functions, and NumPy's of lists, do not ask terms before they refuse them.
            if isinstance(error, NotLinearError) or Terms.__name__ not in str(error):
                raise
            raise NotLinearError(f"{self.class_name} takes a function of terms: {error}") from error
        self._check_rows(found, len(steps))
        return Run(found, whole.init_noise_sigma, whole.last_level)

    def _template(self, row: Row) -> Row:
        """Returns a row of `like` in which P is the predicted sample."""
        if self.process == "edm":
            return dataclasses.replace(row, memory=())
        x0 = x0_from(self.prediction_type, *row.level).coefficients
        # Without signal there may be no prediction but what the row limits it to.
        prediction = x0 if np.isfinite(x0).all() else row.prediction
        return dataclasses.replace(row, prediction=prediction, memory=())

    def _check_rows(self, rows: list[Any], steps: int) -> None:
        """Raises an error for anything but a run of so many steps.

        Raises:
            ValueError: there are too few or too many rows, or one is of another form.
        """
        name, order, most = self.class_name, self.order, steps * self.order
        if not most - order < len(rows) <= most:
            wanted = f"{most - order + 1} to {most}" if order > 1 else f"{most}"
            raise ValueError(
                f"{name} must return {wanted} rows for {steps} steps with order={order}, the rows "
                f"of each step (got {len(rows)}); scheduler_from_function takes another order"
            )
        for row in rows:
            if not isinstance(row, Row):
                raise ValueError(f"{name} must return Rows (got {type(row).__name__})")
            terms = (row.x, row.prediction, *row.memory)
            whole = all(np.shape(term) == X.coefficients.shape for term in terms)
            if not whole or len(row.memory) >= SLOTS:
                raise ValueError(
                    f"{name} must give each Row an x and at most {SLOTS - 1} of memory that are "
                    "sums of X, M1 ... M5, RAW, P and NOISE"
                )
            if np.any(row.prediction[(X + RAW).coefficients == 0]):
                raise ValueError(f"{name} must make a Row's prediction of X and RAW alone")


def _name(function: Any) -> str:
    """Returns the name of a function, a partial one, or a callable object's class."""
    function = getattr(function, "func", function)
    return str(getattr(function, "__name__", type(function).__name__))
