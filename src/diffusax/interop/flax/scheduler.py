"""diffusers' Flax schedulers: a state that the caller carries, over diffusax's samplers.

A sampler here is a table of coefficients with a row for each evaluation (`diffusax.samplers`); a
step runs one row. Where the old classes deliberately differed from PyTorch's of the same name, the
difference is kept, see the classes' `constants`.
"""

import functools
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from diffusax.boundary.files import write_json
from diffusax.checkpoints.keywords import OF_HUB
from diffusax.interop.flax.models import LOADING
from diffusax.interop.flax.outputs import FlaxSchedulerOutput
from diffusax.interop.flax.signatures import Constructed
from diffusax.samplers import Schedule, Scheduler, Table, run
from diffusax.samplers.rows import SLOTS
from diffusax.samplers.schedulers.files import FILE
from diffusax.samplers.schedulers.options import Options

LEVELS = {
    "num_train_timesteps": 1000,
    "beta_start": 0.0001,
    "beta_end": 0.02,
    "beta_schedule": "linear",
    "trained_betas": None,
}
"""The arguments that give the noise levels of training, and their defaults."""


class CommonSchedulerState(flax.struct.PyTreeNode):
    """The noise levels of training: alphas, betas and alphas_cumprod, one for each timestep."""

    alphas: Any
    betas: Any
    alphas_cumprod: Any


class SchedulerState(flax.struct.PyTreeNode):
    """The state that the caller passes from step to step.

    common: the noise levels of training. init_noise_sigma: the deviation of the initial sample.
    timesteps: those of the run. sigmas: the noise levels of samplers on sigma, n+1. memory: 5 ...,
    earlier predictions. counter, first: the number of steps taken and the row of the first one, for
    samplers that use them.
    """

    common: CommonSchedulerState
    init_noise_sigma: Any
    timesteps: Any
    sigmas: Any = None
    num_inference_steps: int | None = flax.struct.field(pytree_node=False, default=None)
    memory: Any = None
    counter: Any = None
    first: Any = None


class FlaxSchedulerMixin(Constructed):
    """A scheduler without state, with methods to load and save its config.

    Attributes:
        config: the options, by key and by attribute.
        dtype: the dtype of the state's arrays.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls._defaults = {
            name: parameter.default
            for name, parameter in inspect.signature(cls.__init__).parameters.items()
            if parameter.default is not inspect.Parameter.empty
        }

    _defaults: ClassVar[dict[str, Any]] = {}

    def _configure(self, given: Mapping[str, Any]) -> None:
        values = {name: given[name] for name in self._defaults if name != "dtype"}
        self.config = Options({"_class_name": type(self).__name__, **values})
        self.dtype = jnp.dtype(given.get("dtype", jnp.float32))

    @property
    def has_state(self) -> bool:
        """Returns True: the caller carries the state of every Flax scheduler."""
        return True

    @classmethod
    def from_config(cls, config: Mapping[str, Any], **overrides: Any) -> Self:
        """Makes the scheduler of any class's config; options that it does not have are ignored."""
        known = {name: value for name, value in config.items() if name in cls._defaults}
        return cls(**{**known, **overrides})

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | Path,
        subfolder: str | None = None,
        return_unused_kwargs: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Loads the scheduler of a folder or Hub repository, and its state.

        Args:
            pretrained_model_name_or_path: a folder, an embedded checkpoint or a Hub repository.
            subfolder: usually "scheduler".
            return_unused_kwargs: whether to return unused arguments, too; there never are any.
            **kwargs: revision, token, local_files_only, cache_dir, and options that replace the
                config's.

        Raises:
            ValueError: there is no such file, or an option's value is not supported.
        """
        hub = {name: kwargs.pop(name) for name in LOADING & kwargs.keys()}
        known = {name: hub[name] for name in OF_HUB if hub.get(name) is not None}
        source = pretrained_model_name_or_path
        config = Scheduler.load_config(source, subfolder=subfolder, **known)
        scheduler = cls.from_config(config, **kwargs)
        state = scheduler.create_state()  # type: ignore[attr-defined]
        return (scheduler, state, {}) if return_unused_kwargs else (scheduler, state)

    def save_pretrained(self, save_directory: str | Path) -> None:
        """Writes a scheduler_config.json for PyTorch's class that computes the same."""
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / FILE, self._saved())

    def _saved(self) -> dict[str, Any]:
        return {**self.config, "_class_name": type(self).__name__.removeprefix("Flax")}


class FlaxTableScheduler(FlaxSchedulerMixin):
    """A scheduler whose steps are the rows of a diffusax sampler."""

    # The rows after which the sampler's memory no longer depends on the row a run began at.
    depth: ClassVar[int] = 0
    # Whether x is the sample plus sigma times noise; otherwise noise replaces part of the sample.
    on_sigmas: ClassVar[bool] = False
    # diffusax's sampler, which takes the scheduler's arguments but those that are unused, and
    # options that the scheduler has no arguments for.
    sampler_class: ClassVar[type[Scheduler]]
    unused: ClassVar[tuple[str, ...]] = ()
    constants: ClassVar[Mapping[str, Any]] = {}

    sampler: Scheduler

    def _configure(self, given: Mapping[str, Any]) -> None:
        super()._configure({name: given[name] for name in self._defaults})
        self.sampler = self._sampler()

    def _sampler(self) -> Scheduler:
        shared = {*LEVELS, "prediction_type", "dtype", *self.unused}
        own = {name: self.config[name] for name in self.arguments if name not in shared}
        return self.sampler_class(**self._levels(), **own, **self.constants)

    def _saved(self) -> dict[str, Any]:
        return self.sampler.to_config()

    def _levels(self) -> dict[str, Any]:
        """Returns the options that give the noise levels and the prediction type of training."""
        betas = self.config.trained_betas
        given = {name: self.config[name] for name in (*LEVELS, "prediction_type")}
        return {**given, "trained_betas": None if betas is None else np.asarray(betas).tolist()}

    def __len__(self) -> int:
        return self.config.num_train_timesteps

    def create_state(self, common: CommonSchedulerState | None = None) -> SchedulerState:
        """Returns the state before `set_timesteps`.

        common: the noise levels of training, by default those of the options.
        """
        if common is None:
            cumprod = self.sampler.alphas_cumprod
            alphas = cumprod / np.concatenate([[1.0], cumprod[:-1]])
            leaves = (alphas, 1 - alphas, cumprod)
            common = CommonSchedulerState(*(jnp.asarray(x, self.dtype) for x in leaves))
        timesteps = jnp.arange(self.config.num_train_timesteps)[::-1]
        scale = jnp.asarray(self._training_sigma(), self.dtype)
        sigmas = self._training_sigmas() if self.on_sigmas else None
        return SchedulerState(common, scale, timesteps, sigmas)

    def set_timesteps(
        self, state: SchedulerState, num_inference_steps: int, shape: tuple[int, ...] = ()
    ) -> SchedulerState:
        """Returns the state at the start of a run of samples of this shape.

        Raises:
            ValueError: there are too few or too many steps, or the options allow no such run.
        """
        schedule = self.schedule(num_inference_steps)
        timesteps = jnp.asarray(schedule.timesteps)
        if (schedule.timesteps == schedule.timesteps.round()).all():
            timesteps = timesteps.astype(jnp.int32)
        state = state.replace(timesteps=timesteps, num_inference_steps=num_inference_steps)
        if self.on_sigmas:
            sigmas = schedule.levels[:, 1] / schedule.levels[:, 0]
            scale = jnp.asarray(schedule.init_noise_sigma, self.dtype)
            state = state.replace(sigmas=jnp.asarray(sigmas, self.dtype), init_noise_sigma=scale)
        if not self.depth:
            return state
        memory = jnp.zeros((SLOTS - 1, *shape), jnp.float32)
        return state.replace(memory=memory, counter=jnp.int32(0), first=jnp.int32(0))

    def schedule(
        self, num_inference_steps: int, begin: int = 0, end: int | None = None
    ) -> Schedule:
        """Returns diffusax's schedule for this number of steps, or its rows from begin to end."""
        return self.sampler.schedule(num_inference_steps, begin=begin, end=end)

    def scale_model_input(
        self, state: SchedulerState, sample: jax.Array, timestep: Any = None
    ) -> jax.Array:
        """Returns the sample scaled for the model's input."""
        if not self.on_sigmas:
            return sample
        scales = jnp.asarray([row.in_scale for row in self.schedule(_steps(state)).rows])
        return sample * scales[_nearest(state.timesteps, timestep)].astype(sample.dtype)

    def step(
        self,
        state: SchedulerState,
        model_output: jax.Array,
        timestep: Any,
        sample: jax.Array,
        return_dict: bool = True,
    ) -> Any:
        """Returns the sample at the next timestep of the run, and the state.

        Args:
            state: from `set_timesteps` or the step before.
            model_output: the model's prediction, of the sample's shape.
            timestep: the sample's, one of `state.timesteps`; a run may begin at any of them.
            sample: of any shape.
            return_dict: whether to return FlaxSchedulerOutput instead of a tuple.

        Raises:
            ValueError: `set_timesteps` was not called.
        """
        return self._step(state, model_output, timestep, sample, return_dict)

    def add_noise(
        self, state: SchedulerState, original_samples: jax.Array, noise: jax.Array, timesteps: Any
    ) -> jax.Array:
        """Adds noise to samples as in training, at these timesteps, one for each sample."""
        signal, level = self._level(state, timesteps, original_samples.ndim)
        return signal * original_samples + level * noise

    def get_velocity(
        self, state: SchedulerState, sample: jax.Array, noise: jax.Array, timesteps: Any
    ) -> jax.Array:
        """Returns the training target of v-prediction (Salimans and Ho 2022)."""
        signal, level = _variance_preserving(state, timesteps, sample.ndim)
        return signal * noise - level * sample

    def _level(self, state: SchedulerState, timesteps: Any, ndim: int) -> tuple[Any, Any]:
        signal, level = _variance_preserving(state, timesteps, ndim)
        return (1.0, level / signal) if self.on_sigmas else (signal, level)

    def _step(
        self,
        state: SchedulerState,
        model_output: jax.Array,
        timestep: Any,
        sample: jax.Array,
        return_dict: bool,
        noise: Any = None,
    ) -> Any:
        n = _steps(state)
        nearest = _nearest(state.timesteps, timestep)
        slots = jnp.zeros((SLOTS - 1, *sample.shape), jnp.float32)
        index = nearest
        if self.depth:
            # The first step of a run shows the row it begins at; timesteps may repeat later.
            first = jnp.where(state.counter == 0, nearest, state.first)
            late = jnp.minimum(state.counter, self.depth)
            row = jnp.minimum(first + state.counter, len(state.timesteps) - 1)
            index, slots = row * (self.depth + 1) + late, state.memory
        before = jnp.concatenate([sample.astype(jnp.float32)[None], slots])
        noise = jnp.zeros_like(before[0]) if noise is None else noise
        after = _take(self.sampler, n, self.depth, before, model_output, noise, index)
        if self.depth:
            state = state.replace(memory=after[1:], counter=state.counter + 1, first=first)
        output = FlaxSchedulerOutput(prev_sample=after[0].astype(sample.dtype), state=state)
        return output if return_dict else output.to_tuple()

    def _training_sigmas(self) -> jax.Array:
        cumprod = self.sampler.alphas_cumprod
        return jnp.asarray(np.sqrt((1 - cumprod) / cumprod), self.dtype)

    def _training_sigma(self) -> float:
        """Returns the deviation of the initial sample, as far as it is known without a run."""
        if not self.on_sigmas:
            return 1.0
        highest = float(self._training_sigmas()[-1])
        leading = self.sampler.to_config()["timestep_spacing"] == "leading"
        return float(np.hypot(highest, 1)) if leading else highest


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _take(
    sampler: Scheduler, n: int, depth: int, before: Any, output: Any, noise: Any, index: Any
) -> jax.Array:
    """Returns the sampler's state, 6 ..., after one of the rows of `_rows`."""
    table = _rows(sampler, n, depth)
    return run(lambda x, t, i: output, before, table, index, index + 1, lambda i: noise)


@functools.lru_cache(64)
def _rows(sampler: Scheduler, n: int, depth: int) -> Table:
    """Returns the rows of a run, with depth + 1 variants for each, by the row it began at.

    Row i (depth + 1) + j is row i of a run that began at row i - j, or earlier if j is depth.
    """
    whole = sampler.schedule(n)
    rows = []
    for i in range(len(whole)):
        for j in range(depth):
            begin = max(i - j, 0)
            rows.append(sampler.schedule(n, begin=begin).rows[i - begin])
        rows.append(whole.rows[i])
    table = Schedule(tuple(rows), whole.init_noise_sigma).table()
    return jax.tree.map(lambda column: column[: len(rows)], table)


def _steps(state: SchedulerState) -> int:
    if state.num_inference_steps is None:
        raise ValueError("the state has no run yet; call set_timesteps(state, num_inference_steps)")
    return state.num_inference_steps


def _nearest(timesteps: Any, timestep: Any) -> jax.Array:
    # Old loops cut fractional timesteps to integers.
    return jnp.abs(timesteps - timestep).argmin()


def _variance_preserving(state: SchedulerState, timesteps: Any, ndim: int) -> tuple[Any, Any]:
    alphas = state.common.alphas_cumprod
    places = jnp.asarray(timesteps, jnp.float32)
    alpha = jnp.interp(places, jnp.arange(len(alphas)), alphas)
    alpha = alpha.reshape(-1, *[1] * (ndim - 1))
    return jnp.sqrt(alpha), jnp.sqrt(1 - alpha)
