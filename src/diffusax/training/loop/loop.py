"""The training loop: opens a run, does one compiled step after the other, and writes the result."""

import contextlib
import functools
import logging
import signal
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import huggingface_hub
import jax
from jax.sharding import Mesh

from diffusax.boundary.files import locked
from diffusax.checkpoints.publishing import create_repository
from diffusax.models.arranged import unwrapped
from diffusax.runtime.devices.mesh import (
    batch_size,
    check_processes,
    make_mesh,
    put_batch,
    to_host,
)
from diffusax.runtime.programs.cache import enable_compilation_cache
from diffusax.runtime.programs.topology import DoesNotFitError
from diffusax.runtime.switches import in_mesh
from diffusax.training.config import TrainConfig
from diffusax.training.data.batches import Batches
from diffusax.training.data.opening import own_share
from diffusax.training.ema.snapshots import AVERAGES, remove_snapshots_after, write_snapshots
from diffusax.training.ema.update import copy_as_average, short_window
from diffusax.training.loop.checkpoints import Checkpoints
from diffusax.training.loop.export import CONFIG, export, leave_finished, results
from diffusax.training.loop.program import (
    abstract_batch,
    abstract_frozen,
    abstract_state,
    bytes_on_device,
    check_arguments,
    check_step,
    chosen,
    compile_in_background,
    count_step,
    creation,
    does_not_fit,
    kernel_order,
    optimizer_of,
    spread,
    state_places,
    step_program,
)
from diffusax.training.loop.reports import Meter, Reports, batch_arithmetic
from diffusax.training.loop.signals import Interrupted, Preempted, TrainingStop, stop_signals
from diffusax.training.optimizers import learning_rate
from diffusax.training.options import by_name, read_config, to_yaml
from diffusax.training.recipes.recipe import Recipe
from diffusax.training.step.step import TrainState

log = logging.getLogger(__name__)


def train(recipe: Recipe, config: TrainConfig) -> TrainState:
    """Trains until `config.steps`, from the last checkpoint in the output folder if there is one.

    A run that was killed and started again gives the same parameters, bit for bit, as one that was
    not. At the end the output folder holds `model`, and `model_ema` where there is an average. A
    run that has reached its steps already is left as it is; only a missing result is written.

    Raises:
        ValueError: the batch cannot be split over the devices, or the step does not fit into their
            memory; too many rows are broken; another run writes to the same folder, or the one
            there cannot be continued.
        OSError: the disk is full.
        Preempted: SIGTERM or Ctrl-C came, and the state is saved; a second signal ends the process.
    """
    folder = Path(config.output)
    folder.mkdir(parents=True, exist_ok=True)
    enable_compilation_cache()
    with _alone_in(folder), stop_signals() as stop:
        if config.push_to_hub and jax.process_index() == 0:
            # A mistake shows before the training.
            create_repository(huggingface_hub.HfApi(), config.push_to_hub)
        mesh = make_mesh(config.mesh)
        _check_options(config, mesh)
        checkpoints = _open_checkpoints(recipe, config, mesh)
        restored = checkpoints.restore(functools.partial(abstract_state, recipe, config, mesh))
        if restored is not None and restored[0] >= config.steps:
            checkpoints.finish()
            state = checkpoints.order.of_layers(restored[1])
            return leave_finished(recipe, config, restored[0], state)
        run = _Run(recipe, config, mesh, stop, checkpoints, restored)
        try:
            while run.step < config.steps:
                run.advance()
                if stop.reached(run.step):
                    run.save()
                    raise Preempted(stop.number or signal.SIGTERM, run.step)
            run.save()
            stop.answer = "the result is written, then the run ends"
            state = run.in_order_of_layers()
            export(recipe, config, steps=run.step, **results(state))
        except Interrupted:
            if run.step:
                run.save()
            raise Preempted(stop.number or signal.SIGTERM, run.step) from None
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise does_not_fit(config, error) from None
        finally:
            run.close()
    return state


class _Run:
    """A run between two steps: its state, its position in the data, and the compiled steps."""

    def __init__(
        self,
        recipe: Recipe,
        config: TrainConfig,
        mesh: Mesh,
        stop: TrainingStop,
        checkpoints: Checkpoints,
        restored: tuple[int, TrainState, dict[str, Any]] | None,
    ):
        """Opens the data, and loads the parameters unless the state is restored.

        Raises:
            DoesNotFitError: the memory does not hold the step's arguments.
        """
        self.recipe, self.config, self.mesh, self.stop = recipe, config, mesh, stop
        self.order = checkpoints.order
        self.checkpoints, self.batches = checkpoints, _open_batches(recipe, config)
        self.step, self.saved = 0, None if restored is None else restored[0]
        if restored is None:
            state = abstract_state(recipe, config, mesh, averaged=False)
        else:
            self.step, state, position = restored
            self.batches.set_state(position)
            log.info("continuing from step %d", self.step)
        try:
            example, _ = chosen(recipe, self.batches.example(), self.batches.bucket, None)
            shapes = abstract_batch(example, config, mesh)
            check_arguments(config, mesh, state, abstract_frozen(recipe, mesh), shapes)
        except BaseException:
            self.batches.close()
            raise
        self.state = _first_state(recipe, config, mesh) if restored is None else state
        if jax.process_index() == 0:
            output = Path(config.output)
            remove_snapshots_after(output / AVERAGES, self.step)
            log.info("%s", batch_arithmetic(config, mesh))
            if late := short_window(config.ema, config.steps, config.batch_size):
                log.warning("%s", late)
            if restored is not None:
                _log_changes(config, output / CONFIG)
            (output / CONFIG).write_text(to_yaml(config), "utf-8")
        self.frozen = spread(recipe, mesh, recipe.frozen(mesh))
        self.reports = Reports(config, name=recipe.name, start=self.step)
        self.meter = Meter(config, self.step)
        self.learning_rate = learning_rate(config.chosen_optimizer, config.steps)
        self.position = self.batches.get_state()
        """The position in the data after `step`; while a size compiles, a batch more is taken."""
        self.average_from = config.ema.start_step(config.steps)
        """The step after which the average begins; None without an average."""
        # By the size of a batch's images, see `Batches.bucket`; the first size is the largest.
        self.shapes: dict[str, Any] = {self.batches.bucket: shapes}
        self.compiled: dict[str, jax.stages.Compiled] = {}
        self.operations: dict[str, int] = {}

    def advance(self) -> None:
        """Does one step, and what is due after it."""
        config = self.config
        if self.average_from is not None and self.step >= self.average_from:
            self._begin_average()
        if not self.compiled:
            # The largest images first, so that a run that does not fit ends at its beginning.
            self._compile(next(iter(self.shapes)))
        batch = next(self.batches)
        examples, size = chosen(self.recipe, batch, self.batches.bucket, self.step)
        if size not in self.compiled:
            one = {name: values[0] for name, values in examples.items()}
            self.shapes[size] = abstract_batch(one, config, self.mesh)
            self._compile(size)
        placed = put_batch(self.mesh, examples)
        with jax.profiler.StepTraceAnnotation("train", step_num=self.step):
            self.state, metrics = self.compiled[size](self.state, self.frozen, placed)
        self.step, self.position = self.step + 1, self.batches.get_state()
        self.meter.add(metrics, self.operations[size])
        self.reports.advance(self.step)
        if self.step % config.log_every == 0 or self.step == config.steps:
            values = self.meter.read(self.step)
            # The optimizer counts only the steps that were not skipped.
            updates = self.step - int(values["skipped"])
            values["lr"] = float(self.learning_rate(max(updates - 1, 0)))
            self.reports.scalars(self.step, values)
        if config.validation.every and self.step % config.validation.every == 0:
            self.validate()
        # Before the checkpoint, because a resumed run does not repeat what comes after it.
        if self.step % config.ema.snapshot_every == 0 or self.step == config.steps:
            self.snapshot()
        if self.step % config.checkpoint_every == 0:
            self.save()

    def validate(self) -> None:
        """Generates the recipe's images, with averaged parameters where there are any."""
        trained, frozen = (self.state.ema or self.state).params, self.frozen
        mesh, trained = self.mesh, self.order.wrapped(trained)
        if jax.process_count() > 1:
            # One process generates them, on its own devices.
            mesh = make_mesh("fsdp=-1", devices=jax.local_devices())
            local = functools.partial(spread, self.recipe, mesh)
            trained, frozen = local(to_host(trained)), local(to_host(frozen))
        if jax.process_index() == 0:
            with in_mesh(mesh):
                self.reports.images(self.step, self.recipe.validate(trained, frozen))
        self.meter.restart(self.step)

    def save(self) -> None:
        """Writes a checkpoint of this step, unless it exists."""
        if self.saved != self.step:
            self.checkpoints.save(self.step, self.state, self.position)
            self.saved = self.step

    def snapshot(self) -> None:
        """Stores the averages of the rule power, once they have begun."""
        options, ema = self.config.ema, self.state.ema
        if options.rule == "power" and ema is not None:
            write_snapshots(
                Path(self.config.output) / AVERAGES,
                self.step,
                self.order.of_layers(ema),
                options,
                start=self.average_from or 0,
                recipe=self.recipe.name,
            )

    def in_order_of_layers(self) -> TrainState:
        """Returns the state with kernels as files have them; it takes the place of the run's."""
        self.state = self.order.of_layers(self.state)
        return self.state

    def close(self) -> None:
        """Waits until the last checkpoint is written."""
        self.batches.close()
        self.reports.close()
        self.checkpoints.finish()

    def _begin_average(self) -> None:
        """Adds an average to a state that has none; it begins as a copy of the parameters."""
        if self.state.ema is not None:
            return
        copy = functools.partial(copy_as_average, averages=self.config.ema.averages)
        kept = state_places(self.recipe, jax.eval_shape(copy, self.state.params), self.mesh)
        ema = jax.jit(copy, out_shardings=kept)(self.state.params)
        self.state, self.compiled = self.state._replace(ema=ema), {}

    def _compile(self, size: str) -> None:
        """Compiles the step for the present state and images of a size.

        Raises:
            DoesNotFitError: the devices' memory does not hold it.
            Interrupted: a signal came.
        """
        config, mesh, began = self.config, self.mesh, time.perf_counter()
        program = step_program(self.recipe, config, optimizer_of(config), mesh, self.state)
        arguments = (self.state, self.frozen, self.shapes[size])
        with self.reports.compiling(size) as show, self.stop.at_once():

            def tick() -> None:
                self.stop.check()
                show()

            if size not in self.operations:
                self.operations[size] = count_step(self.recipe, config, *arguments).operations
            with in_mesh(mesh):
                lowered = program.lower(*arguments)
            try:
                compiled = compile_in_background(lowered, tick)
            except DoesNotFitError as error:
                raise does_not_fit(config, error) from None
        later = 0
        if self.average_from is not None and self.state.ema is None:
            later = config.ema.averages * bytes_on_device(self.state.params)
        check_step(config, mesh, compiled, later)
        self.meter.pause(time.perf_counter() - began)
        self.compiled[size] = compiled


def _open_checkpoints(recipe: Recipe, config: TrainConfig, mesh: Mesh) -> Checkpoints:
    """Opens the checkpoints in the output folder; refuses those there unless the run may resume."""
    folder = Path(config.output)
    lora = getattr(recipe, "lora", None)
    checkpoints = Checkpoints(
        folder / "checkpoints",
        keep=config.keep,
        order=kernel_order(recipe, mesh),
        average=config.ema.kind,
        alphas=None if lora is None else lora.alphas,
    )
    if checkpoints.steps() and not config.resume:
        raise ValueError(
            f"{folder} holds a run already, and resume is off; use another output folder"
        )
    return checkpoints


def _open_batches(recipe: Recipe, config: TrainConfig) -> Batches:
    """Opens this process's part of the data."""
    process_index, process_count = own_share(config.data)
    return Batches(
        recipe.source,
        recipe.example,
        batch_size=config.batch_size // jax.process_count(),
        seed=config.seed,
        workers=config.data.workers,
        threads=config.data.threads,
        process_index=process_index,
        process_count=process_count,
    )


def _first_state(recipe: Recipe, config: TrainConfig, mesh: Mesh) -> TrainState:
    """Makes the state of a new run from the recipe's parameters, whose memory it takes over."""
    create = creation(config)
    kept = state_places(recipe, jax.eval_shape(create, recipe.shapes()), mesh)
    make = jax.jit(create, out_shardings=kept, donate_argnums=0)
    return make(unwrapped(spread(recipe, mesh, recipe.trained(mesh))))


def _check_options(config: TrainConfig, mesh: Mesh) -> None:
    """Raises ValueError where options do not suit the devices or each other."""
    check_processes(mesh)
    parts = batch_size(mesh)
    if config.batch_size % (parts * config.accumulate):
        raise ValueError(
            f"batch_size={config.batch_size} must be divisible by {parts} devices times "
            f"accumulate={config.accumulate}"
        )
    start = config.ema.start_step(config.steps)
    if start is not None and start >= config.steps:
        raise ValueError(
            f"ema.start={config.ema.start} leaves none of the {config.steps} steps to average; a "
            "whole number is a step, a number with a point a fraction of the run"
        )


def _log_changes(config: TrainConfig, before: Path) -> None:
    """Logs which options a resumed run has changed."""
    if not before.is_file():
        return
    try:
        old = by_name(read_config(type(config), before))
    except ValueError:
        return
    changed = [f"{k}: {old[k]} -> {v}" for k, v in by_name(config).items() if old[k] != v]
    if changed:
        log.warning("the run goes on with other options: %s", "; ".join(changed))


def _alone_in(folder: Path) -> AbstractContextManager[None]:
    """Locks the folder against a second run, which would delete what the first is writing."""
    if jax.process_index():
        return contextlib.nullcontext()
    return locked(folder / ".lock", folder)
