"""What diffusers' schedulers offer to loops of one's own: timesteps, steps and noise."""

import copy
import dataclasses
from typing import Any, ClassVar, NamedTuple, Self, cast

import jax
import jax.numpy as jnp
import numpy as np

from diffusax.boundary.tensors import alike, as_numpy, for_reader
from diffusax.runtime.switches import is_traced, under_own_switches
from diffusax.samplers import by_hand
from diffusax.samplers.by_hand import METHOD, HandRun, SchedulerOutput, StepOptions, Stepping
from diffusax.samplers.processes import Diffusion, spread_level
from diffusax.samplers.rows import P, Row, Table
from diffusax.samplers.runs import Sampler, cached_schedule, checked_options, whole_number
from diffusax.samplers.step import init_state
from diffusax.samplers.traced import is_traced_list, traced_run


class FunctionalRun(NamedTuple):
    """A run for jit, scan and gradients.

    state: 6 b ..., whose slot 0 is the sample. table: the run's rows, a `Table` without padding, to
    scan over. step: a pure function (state, row, prediction, noise) -> state, see
    `by_hand.functional_step`.
    """

    state: jax.Array
    table: Table
    step: Any


class Untimed(NamedTuple):
    """What a scheduler shows before `set_timesteps`."""

    timesteps: np.ndarray
    sigmas: np.ndarray | None = None
    init_noise_sigma: float = 1.0


class Stepped:
    """The attributes and methods of diffusers' schedulers that a hand-written loop uses.

    The first `set_timesteps` begins a run; every `step` runs its next row. All are eager: inside
    `jax.jit`, `jax.grad` and `jax.lax.scan` use `functional`. Arrays may be in any layout with the
    images first; they come back as arrays of JAX, or as tensors of PyTorch where samples are.
    """

    # Whether each step is the row after the last one; otherwise the timestep alone says which.
    counts_rows: ClassVar[bool] = True
    # Whether diffusers draws noise for every row of a run with noise, also where it adds none.
    draws_in_vain: ClassVar[bool] = False
    # The field of diffusers' output beside prev_sample.
    second_output: ClassVar[str | None] = None
    # Whether the rows' noise levels are what diffusers' `sigmas` has.
    on_sigmas: ClassVar[bool] = False
    # Whether the network is given the sample times a number.
    scales_input: ClassVar[bool] = False
    # Whether timesteps are integers.
    whole_timesteps: ClassVar[bool] = False
    # Whether diffusers' class begins a run over all timesteps when it is made.
    begins_whole: ClassVar[bool] = False

    @property
    def timesteps(self) -> Any:
        """The timesteps of the run, one for each row, or before `set_timesteps` of the training: n.

        A NumPy array to iterate over, of int64, float32 or float64 as in diffusers; a tensor of
        PyTorch where the module that reads it has imported PyTorch and not JAX.
        """
        run = self._hand_run
        values = self._untimed().timesteps if run is None else run.whole.exact_timesteps
        return for_reader(values.astype(self._timesteps_dtype(begun=run is not None)))

    @property
    def sigmas(self) -> Any:
        """The noise levels of the run's rows, and the one that it ends at: n+1, float32.

        An array or a tensor, see `timesteps`.

        Raises:
            AttributeError: the sampler works on alphas_cumprod, as diffusers' class does.
        """
        run = self._hand_run
        values = self._untimed().sigmas if run is None else self._sigmas_of(run.whole.levels)
        if values is None:
            raise AttributeError(
                f"{type(self).__name__!r} has no attribute 'sigmas'; its noise levels are "
                "alphas_cumprod"
            )
        return for_reader(values.astype(np.float32))

    @property
    def init_noise_sigma(self) -> float:
        """The standard deviation of a run's initial latents."""
        run = self._hand_run
        return self._untimed().init_noise_sigma if run is None else run.whole.init_noise_sigma

    @property
    def num_inference_steps(self) -> int | None:
        """The number of steps of the run; before `set_timesteps` None, or that of the training."""
        run = self._hand_run
        if run is None:
            return len(self) if self.begins_whole else None
        steps: int | None = run.options["steps"]
        return -(-len(run) // cast(Any, self).order) if steps is None else steps

    @property
    def state_in_first_order(self) -> bool:
        """Whether the next row is the first one of its step.

        Raises:
            AttributeError: the sampler's steps have one row, and diffusers' class no such state.
        """
        order = cast(Any, self).order
        if order == 1:
            raise AttributeError(
                f"{type(self).__name__!r} has no attribute 'state_in_first_order'; its steps have "
                "one row"
            )
        return (self.step_index or 0) % cast(int, order) == 0

    @property
    def begin_index(self) -> int | None:
        """The row that `set_begin_index` chose, or None."""
        run = self._hand_run
        return None if run is None else run.begin_index

    @property
    def step_index(self) -> int | None:
        """The row of the next step; None before the first one."""
        run = self._hand_run
        return None if run is None else run.step_index

    def __len__(self) -> int:
        """Returns the number of timesteps of the training."""
        return cast(int, cast(Any, self).num_train_timesteps)

    def __getstate__(self) -> dict[str, Any]:
        """Returns the attributes, for copies and pickles, whose runs go on by themselves."""
        run = self._hand_run
        state = dict(self.__dict__)
        if run is not None:
            # The streams of integers' generators go on with every draw.
            own = dataclasses.replace(run, noise=copy.deepcopy(run.noise))
            state["_run_by_hand"] = own
        return state

    def set_timesteps(
        self,
        num_inference_steps: int | None = None,
        device: Any = None,
        *,
        timesteps: Any = None,
        sigmas: Any = None,
        mu: float | None = None,
        original_inference_steps: int | None = None,
        strength: float = 1.0,
        num_train_timesteps: int | None = None,
    ) -> None:
        """Begins a run for `step`, from its first row.

        Args:
            num_inference_steps: the number of steps; leave it out for timesteps or sigmas of one's
                own.
            device: ignored; JAX's arrays go where the sample is.
            timesteps: see `schedule`, as are the next four.
            sigmas: descending noise levels.
            mu: the shift of flow matching.
            original_inference_steps: an option of LCM and TCD.
            strength: an option of LCM and TCD.
            num_train_timesteps: the option of this name, which it may repeat.

        Raises:
            ValueError: for the reasons of `schedule`, or num_train_timesteps is not the option's.
        """
        total = cast(Any, self).num_train_timesteps
        if num_train_timesteps not in (None, total):
            raise ValueError(
                f"num_train_timesteps must be that of the scheduler, {total} (got "
                f"{num_train_timesteps}); use from_config(..., num_train_timesteps=...)"
            )
        options = checked_options(
            steps=num_inference_steps,
            timesteps=timesteps,
            sigmas=sigmas,
            original_inference_steps=original_inference_steps,
            strength=strength,
            mu=mu,
        )
        for name in METHOD:
            del options[name]
        self.__dict__["_run_by_hand"] = by_hand.new_run(cast(Stepping, self), options)

    def set_begin_index(self, begin_index: int = 0) -> None:
        """Chooses the row that the run begins at, for example for image to image.

        Raises:
            ValueError: there is no run, or it has no such row.
        """
        run, begin = self._begun(), whole_number("begin_index", begin_index)
        if not 0 <= begin < len(run):
            raise ValueError(f"begin_index must be from 0 to {len(run) - 1} (got {begin})")
        run.begin_index = begin

    def index_for_timestep(self, timestep: Any, schedule_timesteps: Any = None) -> int:
        """Returns the row from which a run starts at this timestep.

        Args:
            timestep: one number.
            schedule_timesteps: the timesteps to look among, instead of those of the run.

        Raises:
            ValueError: it is none of the timesteps.
        """
        among = self.timesteps if schedule_timesteps is None else np.asarray(schedule_timesteps)
        place = by_hand.place_of(among.astype(np.float32), timestep)
        if place is None:
            raise ValueError(by_hand.no_timestep(among, timestep))
        return place

    @under_own_switches
    def scale_model_input(self, sample: Any, timestep: Any = None) -> Any:
        """Returns what the network is given for a sample, b ...: the sample times a number.

        Args:
            sample: b ....
            timestep: that of the step. It matters where the run begins there.

        Raises:
            ValueError: there is no run, it has no such timestep, or arrays are traced.
        """
        if not self.scales_input:
            return alike(by_hand.as_jax(sample), sample)
        by_hand.check_eager("scale_model_input", sample, timestep)
        run = self._begun()
        scale = run.whole.rows[by_hand.row_number(run, timestep)].in_scale
        return alike(by_hand.as_jax(sample) * float(scale), sample)

    def step(
        self,
        model_output: Any,
        timestep: Any,
        sample: Any,
        generator: Any = None,
        return_dict: bool = True,
    ) -> Any:
        """Returns the sample after the row of this timestep.

        The arguments of some classes are others, as in diffusers.

        Args:
            model_output: b ..., the network's prediction for `scale_model_input(sample, timestep)`.
            timestep: one of `timesteps`.
            sample: b ....
            generator: a torch.Generator, an integer (the numbers of PyTorch's generator of that
                seed, those after the initial latents'), a list with one for each image, or a key of
                `jax.random`. Without one, the numbers are the next ones of PyTorch's default
                generator where samples are tensors, and else JAX's, from a seed that
                `set_timesteps` takes from the system.
            return_dict: whether to return a `SchedulerOutput` rather than a tuple.

        Returns:
            The `SchedulerOutput`, with `prev_sample` and what else diffusers' class has.

        Raises:
            ValueError: there is no run, the timestep is not that of the next row, shapes do not
                agree, or arrays are traced.
        """
        return self._step(model_output, timestep, sample, return_dict, generator=generator)

    @under_own_switches
    def add_noise(self, original_samples: Any, noise: Any, timesteps: Any) -> Any:
        """Returns samples with noise at the level of timesteps, b ..., in the samples' dtype.

        For samplers on sigmas, after `set_timesteps` and `set_begin_index` the level is that of the
        next row, whatever the timesteps say, as in diffusers. Before `set_timesteps`, and inside
        traced functions, it is that of the training.

        Args:
            original_samples: b ..., clean.
            noise: b ..., standard normal.
            timesteps: b, or one for all.
        """
        x0, eps = by_hand.as_jax(original_samples), by_hand.as_jax(noise)
        by_hand.check_alike("original_samples", x0, eps)
        signal, level = (spread_level(part, x0) for part in self._levels_at(timesteps))
        return alike((signal * x0 + level * eps).astype(x0.dtype), original_samples, noise)

    def functional(
        self,
        num_inference_steps: int | None,
        sample: Any,
        *,
        begin: int = 0,
        timesteps: Any = None,
        sigmas: Any = None,
        eta: float = 0.0,
        mu: float | None = None,
        use_clipped_model_output: bool = False,
    ) -> FunctionalRun:
        """Returns a run as (state, table, step): arrays and a pure function, without counters.

        Args:
            num_inference_steps: the number of steps; None with timesteps or sigmas.
            sample: b ..., what the run begins with.
            begin: see `schedule`, as are the other arguments.
            timesteps: descending timesteps.
            sigmas: descending noise levels. These and timesteps that need not be whole numbers may
                be traced, so that the table has gradients to them, if the run ends as the
                sampler's own do, mostly at 0.
            eta: DDIM's share of noise, and TCD's gamma.
            mu: the shift of flow matching.
            use_clipped_model_output: an option of DDIM.

        Raises:
            ValueError: for the reasons of `schedule`.
        """
        numbers = {"eta": eta, "mu": mu, "use_clipped_model_output": use_clipped_model_output}
        begin = whole_number("begin", begin)
        if is_traced_list(sigmas, timesteps):
            options = checked_options(steps=num_inference_steps, **numbers)
            if options.pop("steps") is not None:
                raise ValueError(
                    "num_inference_steps must be None with timesteps or sigmas that are traced"
                )
            options = {k: v for k, v in options.items() if k not in ("timesteps", "sigmas")}
            rows, schedule = traced_run(self, {"begin": begin, **options}, sigmas, timesteps)
        else:
            lists = {"timesteps": timesteps, "sigmas": sigmas}
            options = checked_options(steps=num_inference_steps, **lists, **numbers)
            schedule = cached_schedule(cast(Sampler, self), begin=begin, **options)
            rows = jax.tree.map(lambda column: column[: len(schedule)], schedule.table())
        step = by_hand.noisy_step if schedule.draws_noise.any() else by_hand.functional_step
        return FunctionalRun(init_state(by_hand.as_jax(sample)), rows, step)

    @property
    def _has_own_timesteps(self) -> bool:
        """Whether `set_timesteps` was given the timesteps of the run."""
        run = self._hand_run
        return run is not None and run.options["timesteps"] is not None

    @property
    def _hand_run(self) -> HandRun | None:
        return self.__dict__.get("_run_by_hand")

    def without_run(self) -> Self:
        """Returns an equal scheduler without the run by hand, which holds samples, to be kept."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other.__dict__.pop("_run_by_hand", None)
        return other

    def _begun(self) -> HandRun:
        """Returns the run.

        Raises:
            ValueError: there is none.
        """
        if self._hand_run is None and not self.counts_rows:
            # As in diffusers' DDPM: all timesteps of the training.
            self.set_timesteps(len(self))
        run = self._hand_run
        if run is None:
            name = type(self).__name__
            raise ValueError(f"{name} has no run; call set_timesteps(num_inference_steps) first")
        return run

    def _step(
        self, model_output: Any, timestep: Any, sample: Any, return_dict: bool, **options: Any
    ) -> SchedulerOutput | tuple[Any, ...]:
        """Runs a row; options: those of `StepOptions`."""
        given = model_output, timestep, sample, StepOptions(**options)
        output = by_hand.take_step(cast(Stepping, self), self._begun(), *given)
        return output if return_dict else output.to_tuple()

    def _row_at(self, timestep: float, steps: int, **method: Any) -> Row:
        """Returns the row of a timestep that is not one of the run's.

        Raises:
            ValueError: the sampler has no such row.
        """
        raise ValueError(by_hand.no_timestep(self.timesteps, timestep))

    def _second_output(self, row: Row) -> np.ndarray:
        """Returns the coefficients of the second output of a step: 9."""
        return P.coefficients

    def _timesteps_dtype(self, *, begun: bool) -> Any:
        """Returns the dtype of `timesteps`, of a run that is `begun` or before."""
        return np.int64 if self.whole_timesteps else np.float32

    def _untimed(self) -> Untimed:
        """Returns what is shown before `set_timesteps`: the training, or a run of as many steps."""
        if not self.on_sigmas:
            return Untimed(np.arange(len(self), dtype=np.float64)[::-1])
        whole = cached_schedule(cast(Sampler, self), steps=len(self), uncut=True)
        return Untimed(whole.exact_timesteps, self._sigmas_of(whole.levels), whole.init_noise_sigma)

    def _sigmas_of(self, levels: np.ndarray) -> np.ndarray | None:
        """Returns the sigmas of levels, n 2; None for samplers on alphas_cumprod."""
        return levels[:, 1] if self.on_sigmas else None

    def _training_levels(self, timesteps: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the (signal, noise) of x at timesteps of the training."""
        alphas: np.ndarray = cast(Any, self).alphas_cumprod
        return Diffusion(alphas).levels(timesteps.astype(jnp.int32))

    def _levels_at(self, timesteps: Any) -> tuple[Any, Any]:
        """Returns the (signal, noise) at timesteps; see `add_noise`."""
        run = self._hand_run
        if run is None or self._sigmas_of(run.whole.levels) is None or is_traced(timesteps):
            return self._training_levels(by_hand.as_jax(timesteps))
        rows: Any = run.begin_index if run.step_index is None else run.step_index
        if run.begin_index is None:
            given = np.atleast_1d(as_numpy(timesteps))
            rows = [by_hand.place_of(run.whole.timesteps, t) for t in given]
            if None in rows:
                return self._training_levels(by_hand.as_jax(timesteps))
        signal, noise = np.moveaxis(run.whole.levels[rows].astype(np.float32), -1, 0)
        return jnp.asarray(signal), jnp.asarray(noise)
