"""What all samplers share: options, configs, and `schedule`."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import numpy as np

from diffusax.boundary.messages import SCHEDULER, hinting
from diffusax.samplers.processes import Kind, Process
from diffusax.samplers.rows import Schedule
from diffusax.samplers.runs import Run, RunOptions, cached_schedule, checked_options, whole_number
from diffusax.samplers.schedulers.files import SchedulerFiles
from diffusax.samplers.schedulers.options import (
    NO_OPTIONS,
    Count,
    Options,
    Prediction,
    check_options,
    fitting,
    given_ends,
)
from diffusax.samplers.schedulers.stepped import Stepped

SCHEDULERS: dict[str, "type[Scheduler]"] = {}
"""Every sampler by its diffusers name; each class is entered when it is defined."""


@hinting(SCHEDULER)
@dataclasses.dataclass(frozen=True, kw_only=True)
class Scheduler(Stepped, SchedulerFiles):
    """A sampler and its options, which are those of diffusers' class of the same name.

    Its options are immutable, and `schedule` returns a run of any length. `set_timesteps` and
    `step` are for loops of one's own; how far those have got is no part of the sampler's equality,
    hash or config, and pipelines do not see it.

    Raises:
        ValueError: the sampler does not support the value of an option.
    """

    class_name: ClassVar[str] = ""
    fixed: ClassVar[dict[str, Any]] = {}
    ignored: ClassVar[frozenset[str]] = frozenset()
    # The arguments that `schedule` takes besides the number of steps.
    custom: ClassVar[tuple[str, ...]] = ()
    # Whether timesteps and sigmas may be given together.
    paired: ClassVar[bool] = False
    # Whether a list of sigmas holds the one that the run ends at.
    sigmas_hold_last: ClassVar[bool] = True
    # Whether it refuses to run with use_dynamic_shifting and no `mu`.
    needs_mu: ClassVar[bool] = False
    # Whether it heeds `eta`.
    takes_eta: ClassVar[bool] = False
    # The number of rows per step.
    order: ClassVar[int] = 1
    # Whether sigma_min and sigma_max count where only another sampler has these options.
    heeds_ends: ClassVar[bool] = True
    # Whether diffusers counts it among those that can be swapped for each other.
    swappable: ClassVar[bool] = True

    num_train_timesteps: Count = 1000
    prediction_type: Prediction = "epsilon"
    given_options: Mapping[str, Any] = dataclasses.field(
        default_factory=dict, repr=False, compare=False
    )
    # sigma_min and sigma_max of another sampler's config, which some classes of diffusers heed.
    given_ends: tuple[float | None, float | None] = dataclasses.field(
        default=(None, None), init=False, repr=False
    )

    def __init_subclass__(cls, *, sampler: bool = True) -> None:
        super().__init_subclass__()
        cls.class_name = cls.__name__
        if sampler:
            SCHEDULERS[cls.__name__] = cls

    def __post_init__(self) -> None:
        for name, value in check_options(self).items():
            object.__setattr__(self, name, value)
        object.__setattr__(self, "given_ends", given_ends(self))

    @classmethod
    def from_config(cls, config: "Mapping[str, Any] | Scheduler", **overrides: Any) -> Self:
        """Makes this sampler with the options of a config, even another sampler's, like diffusers.

        Options that only other samplers have do nothing here, but are kept for the next swap.
        Options that another sampler was never given take this one's defaults, not its own.

        Args:
            config: a parsed scheduler_config.json, a scheduler's `config`, or a scheduler.
            overrides: options instead of the config's.

        Raises:
            ValueError: no sampler has an option, or this one does not support its value.
        """
        if isinstance(config, Scheduler):
            config = config.config
        values, kept = fitting(cls, config, _options_of_all())
        changed, _ = fitting(cls, overrides, frozenset())
        values |= changed
        return cls(**values, given_options={**kept, **values})

    def with_options(self, **options: Any) -> Self:
        """Returns this sampler with other values of some of its options.

        Raises:
            ValueError: it has no such option, or does not support its value.
        """
        return self.from_config(self.config, **options)

    @classmethod
    def option_names(cls) -> frozenset[str]:
        """Returns the names of all options that any sampler has."""
        return _options_of_all()

    @property
    def config(self) -> Options:
        """The options, read-only, by key and by attribute, like diffusers' `scheduler.config`.

        Holds the options of other samplers that were kept, and under "_use_default_values" the
        names of those that were never given.
        """
        own, given = self.to_config(), self.given_options
        never = [
            name
            for name, value in own.items()
            if name not in given and name[0] != "_" and value == self._defaults()[name]
        ]
        return Options({**given, **own, "_use_default_values": never})

    @property
    def compatibles(self) -> "list[type[Scheduler]]":
        """The samplers that can be swapped for this one, as diffusers lists them."""
        if not self.swappable:
            return [type(self)]
        return [cls for cls in SCHEDULERS.values() if cls.swappable]

    @property
    def process(self) -> Kind:
        """The process that the networks were trained for."""
        kind: str = self.prediction_type
        return "flow" if kind == "flow_prediction" else "diffusion"

    def to_config(self) -> dict[str, Any]:
        """Returns the scheduler_config.json that diffusers reads."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        values |= {name: list(v) for name, v in values.items() if isinstance(v, tuple)}
        values = {name: value for name, value in values.items() if name not in NO_OPTIONS}
        fixed = {name: allowed[0] for name, allowed in self.fixed.items()}
        return {"_class_name": self.class_name, **fixed, **values}

    @classmethod
    @functools.cache
    def _defaults(cls) -> dict[str, Any]:
        """Returns the options' default values, as `to_config` shows them."""
        return cls().to_config()

    def schedule(
        self,
        steps: int | None = None,
        *,
        begin: int = 0,
        end: int | None = None,
        timesteps: Sequence[float] | np.ndarray | None = None,
        sigmas: Sequence[float] | np.ndarray | None = None,
        eta: float = 0.0,
        original_inference_steps: int | None = None,
        strength: float = 1.0,
        mu: float | None = None,
        use_clipped_model_output: bool = False,
    ) -> Schedule:
        """Computes the rows of a run, or of a part of one; equal calls return the same object.

        Give exactly one of steps, timesteps and sigmas; FlowMatchEulerDiscreteScheduler also takes
        timesteps and sigmas together.

        Args:
            steps: the number of steps of the whole run, diffusers' num_inference_steps.
            begin: the first row, like diffusers' `set_begin_index`: rows that use earlier
                predictions count them from here.
            end: the row after the last; None for the whole run's last.
            timesteps: descending training timesteps instead of evenly spaced ones.
            sigmas: descending noise levels, including the one to end at; for flow matching, where
                runs end at 0, without it.
            eta: DDIM's share of noise, and TCD's gamma.
            original_inference_steps: the number of timesteps that a consistency model was distilled
                at, for LCM and TCD; None takes the option's value.
            strength: the share of those timesteps, from the lowest, that the run uses.
            mu: how far the sigmas of flow matching are shifted, with use_dynamic_shifting=True.
            use_clipped_model_output: whether DDIM takes the noise from the predicted sample that it
                has clipped, instead of from the network.

        Raises:
            ValueError: there are too few or too many steps or rows, or values that the sampler
                cannot take.
        """
        options = checked_options(
            steps=steps,
            timesteps=timesteps,
            sigmas=sigmas,
            eta=eta,
            original_inference_steps=original_inference_steps,
            strength=strength,
            mu=mu,
            use_clipped_model_output=use_clipped_model_output,
        )
        end = None if end is None else whole_number("end", end)
        return cached_schedule(self, begin=whole_number("begin", begin), end=end, **options)

    @property
    def forward_process(self) -> Process:
        """The process that its networks were trained for.

        Raises:
            ValueError: they were trained in a way that diffusax cannot train.
        """
        raise ValueError(f"{self.class_name} has no discrete noise levels; use another sampler")

    @property
    def alphas_cumprod(self) -> np.ndarray:
        """alpha-bar for each training timestep, float32, read-only.

        Raises:
            AttributeError: the sampler is for models that were not trained at discrete noise
                levels, and diffusers' class has no such list.
        """
        raise AttributeError(f"{self.class_name} has no discrete noise levels; use another sampler")

    @property
    def alphas(self) -> np.ndarray:
        """alpha for each training timestep, float64: the quotients of `alphas_cumprod`."""
        total = self.alphas_cumprod
        return np.append(total[:1], total[1:] / total[:-1])

    @property
    def betas(self) -> np.ndarray:
        """beta for each training timestep, float64: 1 - alpha."""
        return 1 - self.alphas

    @property
    def final_alpha_cumprod(self) -> float:
        """alpha-bar after the last timestep: one, or that of timestep 0."""
        return 1.0 if getattr(self, "set_alpha_to_one", True) else float(self.alphas_cumprod[0])

    def _check_custom(self, name: str, values: np.ndarray) -> None:
        """Raises an error for timesteps or sigmas, descending, that the sampler cannot take.

        Raises:
            ValueError: the sampler cannot take them.
        """
        total = self.num_train_timesteps
        if name == "timesteps" and values[0] >= total:
            raise ValueError(
                f"timesteps must start below num_train_timesteps={total} (got {values[0]:g})"
            )
        for option in ("use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas"):
            if name == "timesteps" and getattr(self, option, False):
                raise ValueError(f"timesteps cannot be given with {option}=True; set it to False")

    def _run(self, wanted: RunOptions) -> Run:
        raise TypeError(f"{type(self).__name__} is not a sampler; use one of its subclasses")


def _options_of_all() -> frozenset[str]:
    """Returns the names of all options that any sampler has."""
    return (
        frozenset()
        .union(
            *({*cls.__dataclass_fields__, *cls.fixed, *cls.ignored} for cls in SCHEDULERS.values())
        )
        .difference(NO_OPTIONS)
    )
