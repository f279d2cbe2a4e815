"""The samplers by their diffusers names, with diffusers' config options."""

import dataclasses
import functools
from typing import Any, ClassVar, Self

import numpy as np

from diffusax.config import config_to_dict
from diffusax.samplers import ancestral, schedules
from diffusax.samplers.rows import Row, Schedule

NO_THRESHOLDING = {"thresholding": False}
THRESHOLDING_DETAILS = frozenset({"dynamic_thresholding_ratio", "sample_max_value"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scheduler:
    """A sampler and its options, those of diffusers' class of the same name.

    `schedule` gives the table of a run; there is no other state.
    """

    class_name: ClassVar[str] = ""
    fixed: ClassVar[dict[str, Any]] = {}
    ignored: ClassVar[frozenset[str]] = frozenset()
    # What `schedule` takes of timesteps and sigmas.
    custom: ClassVar[tuple[str, ...]] = ()
    zero_snr_floor: ClassVar[bool] = False

    num_train_timesteps: int = 1000
    beta_start: float = 0.0001
    beta_end: float = 0.02
    beta_schedule: str = "linear"
    trained_betas: tuple[float, ...] | None = None
    prediction_type: str = "epsilon"
    timestep_spacing: str = "linspace"
    steps_offset: int = 0

    def __post_init__(self) -> None:
        require_one_of(self, "prediction_type", ("epsilon", "v_prediction", "sample"))
        require_one_of(self, "timestep_spacing", ("linspace", "leading", "trailing"))
        spacings = ("use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas")
        chosen = [name for name in (*spacings, "use_lu_lambdas") if getattr(self, name, False)]
        if len(chosen) > 1:
            raise ValueError(f"only one of {', '.join(chosen)} can be True")
        _ = self.alphas_cumprod

    @classmethod
    def from_config(cls, config: "dict[str, Any] | Scheduler", **overrides: Any) -> Self:
        """This sampler with the options of a config, also of another sampler's, as in diffusers.

        Options that only other samplers have do nothing here, but are kept for the next swap.
        Options that another sampler was never given take this one's defaults, not its own.

        Raises:
            ValueError: an option that no sampler has, or a value that this one does not support.
        """
        data = config.given if isinstance(config, Scheduler) else dict(config)
        names = {field.name for field in dataclasses.fields(cls)}
        same = data.get("_class_name", cls.class_name) == cls.class_name
        values: dict[str, Any] = {}
        for key, value in {**data, **overrides}.items():
            if key.startswith("_") or key in cls.ignored:
                continue
            if key in names:
                values[key] = tuple(value) if isinstance(value, list) else value
            elif key in cls.fixed:
                _check_fixed(cls, key, value)
            elif key in overrides or not (_known(key) or not same):
                raise ValueError(f"{cls.class_name} has no option {key!r} in diffusax")
        scheduler = cls(**values)
        kept = {k: v for k, v in {**data, **overrides}.items() if not k.startswith("_")}
        object.__setattr__(scheduler, "_given", {**kept, "_class_name": cls.class_name})
        return scheduler

    @property
    def given(self) -> dict[str, Any]:
        """The options that a config or the caller gave, those of other samplers too."""
        changed = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        }
        return getattr(self, "_given", {**changed, "_class_name": self.class_name})

    def to_config(self) -> dict[str, Any]:
        """scheduler_config.json, as diffusers reads it."""
        return config_to_dict(self)

    @functools.cached_property
    def alphas_cumprod(self) -> np.ndarray:
        """alpha-bar for each training timestep, float64."""
        rescale = getattr(self, "rescale_betas_zero_snr", False)
        alphas = schedules.alphas_cumprod(
            num_train_timesteps=self.num_train_timesteps,
            beta_start=self.beta_start,
            beta_end=self.beta_end,
            beta_schedule=self.beta_schedule,
            trained_betas=self.trained_betas,
            rescale_zero_snr=rescale,
        )
        if rescale and self.zero_snr_floor:
            # An infinite first sigma would be of no use to these methods.
            alphas[-1] = 2.0**-24
        return alphas

    @property
    def final_alpha(self) -> float:
        """alpha-bar after the last step."""
        return 1.0 if getattr(self, "set_alpha_to_one", True) else self.alphas_cumprod[0]

    def noise_scales(self, timestep: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(signal, noise) of x_t = signal x_0 + noise eps at integer training timesteps."""
        alpha = self.alphas_cumprod[timestep]
        return np.sqrt(alpha), np.sqrt(1 - alpha)

    def schedule(
        self,
        num_inference_steps: int | None = None,
        *,
        timesteps: Any = None,
        sigmas: Any = None,
        eta: float = 0.0,
    ) -> Schedule:
        """The run's rows. Exactly one of num_inference_steps, timesteps and sigmas is given.

        Raises:
            ValueError: too few or too many steps, or custom values that the sampler cannot take.
        """
        given = {"timesteps": timesteps, "sigmas": sigmas}
        custom = {name: np.asarray(v, np.float64) for name, v in given.items() if v is not None}
        if len(custom) > 1:
            raise ValueError("only one of timesteps and sigmas can be given")
        for name, values in custom.items():
            if name not in self.custom:
                raise ValueError(f"{self.class_name} does not take custom {name}")
            _check_custom(self, name, values)
            steps = len(values) - (name == "sigmas")
        if not custom:
            steps = num_inference_steps or 0
        if steps < 1:
            raise ValueError(f"num_inference_steps must be at least 1 (got {num_inference_steps})")
        if steps > self.num_train_timesteps:
            raise ValueError(
                f"num_inference_steps must be at most num_train_timesteps="
                f"{self.num_train_timesteps} (got {steps})"
            )
        with np.errstate(divide="ignore", invalid="ignore"):
            rows, init_noise_sigma = self._rows(steps, eta=eta, **custom)
        return Schedule(tuple(rows), float(init_noise_sigma))

    def _rows(self, n: int, *, eta: float, **custom: np.ndarray) -> tuple[list[Row], float]:
        raise TypeError(f"{type(self).__name__} is not a sampler; use one of its subclasses")

    def _integer_timesteps(self, n: int, timesteps: np.ndarray | None = None) -> np.ndarray:
        if timesteps is None:
            timesteps = schedules.spaced_timesteps(
                n, self.num_train_timesteps, self.timestep_spacing, self.steps_offset
            )
        return timesteps.round().astype(int)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DDPMScheduler(Scheduler):
    """Ho et al. 2020."""

    class_name = "DDPMScheduler"
    fixed: ClassVar[dict[str, Any]] = NO_THRESHOLDING
    ignored = THRESHOLDING_DETAILS
    custom = ("timesteps",)

    timestep_spacing: str = "leading"
    variance_type: str = "fixed_small"
    clip_sample: bool = True
    clip_sample_range: float = 1.0
    rescale_betas_zero_snr: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require_one_of(self, "variance_type", ("fixed_small", "fixed_small_log", "fixed_large"))

    def _rows(self, n: int, *, eta: float, **custom: np.ndarray) -> tuple[list[Row], float]:
        return ancestral.ddpm(self, self._integer_timesteps(n, **custom)), 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class DDIMScheduler(Scheduler):
    """Song et al. 2021."""

    class_name = "DDIMScheduler"
    fixed: ClassVar[dict[str, Any]] = NO_THRESHOLDING
    ignored = THRESHOLDING_DETAILS

    timestep_spacing: str = "leading"
    clip_sample: bool = True
    clip_sample_range: float = 1.0
    set_alpha_to_one: bool = True
    rescale_betas_zero_snr: bool = False

    def _rows(self, n: int, *, eta: float, **custom: np.ndarray) -> tuple[list[Row], float]:
        return ancestral.ddim(self, self._integer_timesteps(n), eta), 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class PNDMScheduler(Scheduler):
    """Liu et al. 2022."""

    class_name = "PNDMScheduler"

    timestep_spacing: str = "leading"
    skip_prk_steps: bool = False
    set_alpha_to_one: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require_one_of(self, "prediction_type", ("epsilon", "v_prediction"))

    def _rows(self, n: int, *, eta: float, **custom: np.ndarray) -> tuple[list[Row], float]:
        if n < 4 and not self.skip_prk_steps:
            raise ValueError(
                f"num_inference_steps must be at least 4 with skip_prk_steps=False (got {n})"
            )
        ascending = self._integer_timesteps(n)[::-1]
        prk, plms = ancestral.pndm_timesteps(self, ascending)
        return ancestral.pndm(self, prk, plms, n), 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class LCMScheduler(Scheduler):
    """Luo et al. 2023, for consistency-distilled models."""

    class_name = "LCMScheduler"
    fixed: ClassVar[dict[str, Any]] = NO_THRESHOLDING
    ignored = THRESHOLDING_DETAILS
    custom = ("timesteps",)

    beta_start: float = 0.00085
    beta_end: float = 0.012
    beta_schedule: str = "scaled_linear"
    timestep_spacing: str = "leading"
    original_inference_steps: int = 50
    clip_sample: bool = False
    clip_sample_range: float = 1.0
    set_alpha_to_one: bool = True
    timestep_scaling: float = 10.0
    rescale_betas_zero_snr: bool = False

    def _rows(self, n: int, *, eta: float, **custom: np.ndarray) -> tuple[list[Row], float]:
        return ancestral.lcm(self, self._distilled_timesteps(n, **custom)), 1.0

    def _distilled_timesteps(self, n: int, timesteps: np.ndarray | None = None) -> np.ndarray:
        """N of the timesteps that the model was distilled at."""
        origin = self.original_inference_steps
        stride = self.num_train_timesteps // origin
        every = np.arange(1, origin + 1) * stride - 1
        if timesteps is not None:
            if not np.isin(timesteps, every).all():
                raise ValueError(f"timesteps must be among those distilled: {every[::-1].tolist()}")
            return timesteps.astype(int)
        if n > origin:
            raise ValueError(
                f"num_inference_steps must be at most original_inference_steps={origin} (got {n})"
            )
        return every[::-1][np.floor(np.linspace(0, origin, n, endpoint=False)).astype(int)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TCDScheduler(LCMScheduler):
    """Zheng et al. 2024; `eta` is its gamma."""

    class_name = "TCDScheduler"

    def _rows(self, n: int, *, eta: float, **custom: np.ndarray) -> tuple[list[Row], float]:
        if not 0 <= eta <= 1:
            raise ValueError(f"eta must be between 0 and 1 (got {eta})")
        return ancestral.tcd(self, self._distilled_timesteps(n, **custom), eta), 1.0


def require_one_of(scheduler: Scheduler, name: str, allowed: tuple[Any, ...]) -> None:
    value = getattr(scheduler, name)
    if value not in allowed:
        raise ValueError(
            f"{name}={value!r} is not supported by diffusax's {scheduler.class_name} "
            f"(only {', '.join(map(repr, allowed))})"
        )


def _check_fixed(cls: type[Scheduler], key: str, value: Any) -> None:
    allowed = cls.fixed[key] if isinstance(cls.fixed[key], tuple) else (cls.fixed[key],)
    if value not in allowed:
        raise ValueError(
            f"{key}={value!r} is not supported by diffusax's {cls.class_name} "
            f"(only {', '.join(map(repr, allowed))})"
        )


def _check_custom(scheduler: Scheduler, name: str, values: np.ndarray) -> None:
    if values.ndim != 1 or len(values) == 0 or (np.diff(values) >= 0).any():
        raise ValueError(f"{name} must be a descending list of numbers")
    if name == "timesteps" and values[0] >= scheduler.num_train_timesteps:
        raise ValueError(
            f"timesteps must start below num_train_timesteps={scheduler.num_train_timesteps} "
            f"(got {values[0]:g})"
        )
    for option in ("use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas"):
        if name == "timesteps" and getattr(scheduler, option, False):
            raise ValueError(f"timesteps cannot be given with {option}=True")


def _known(key: str) -> bool:
    """Whether some sampler of diffusers has this option."""
    classes: list[type[Scheduler]] = [Scheduler, *_subclasses(Scheduler)]
    return any(
        key in cls.fixed or key in cls.ignored or key in cls.__dataclass_fields__ for cls in classes
    )


def _subclasses(cls: type[Scheduler]) -> list[type[Scheduler]]:
    return [s for sub in cls.__subclasses__() for s in (sub, *_subclasses(sub))]
