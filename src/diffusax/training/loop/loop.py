"""The training loop: it runs one compiled step repeatedly, and can stop after any of them."""

import contextlib
import dataclasses
import functools
import logging
import signal
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jax

from diffusax.boundary.files import locked
from diffusax.models.network import Params
from diffusax.runtime.devices.layouts import in_order
from diffusax.runtime.devices.mesh import (
    batch_size,
    check_processes,
    in_mesh,
    make_mesh,
    put_batch,
    to_host,
    tree_sharding,
)
from diffusax.runtime.programs.cache import enable_compilation_cache
from diffusax.runtime.programs.flops import count_training_flops
from diffusax.runtime.programs.topology import DoesNotFitError
from diffusax.runtime.random.noise import seed_key
from diffusax.training.config import TrainConfig
from diffusax.training.data.batches import Batches
from diffusax.training.data.opening import own_share
from diffusax.training.ema.snapshots import AVERAGES, remove_snapshots_after, write_snapshots
from diffusax.training.ema.update import copy_as_average, short_window
from diffusax.training.loop.checkpoints import Checkpoints
from diffusax.training.loop.export import CONFIG, create_on_hub, export, leave_finished, results
from diffusax.training.loop.memory import (
    bytes_on_device,
    check_arguments,
    check_step,
    does_not_fit,
)
from diffusax.training.loop.program import (
    abstract_batch,
    abstract_frozen,
    abstract_state,
    compile_in_background,
    optimizer_of,
    places,
    step_program,
    tensor_rules,
)
from diffusax.training.loop.reports import Meter, Reports, batch_arithmetic
from diffusax.training.loop.signals import Interrupted, Preempted, TrainingStop, stop_signals
from diffusax.training.optimizers import learning_rate
from diffusax.training.options import by_name, read_config, to_yaml
from diffusax.training.recipes.recipe import Recipe
from diffusax.training.step.step import TrainState, initial_state

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
            create_on_hub(config.push_to_hub)
        mesh = make_mesh(config.mesh)
        _check_options(config, mesh)
        create = _creation(config)
        checkpoints = _open_checkpoints(recipe, config)
        restored = checkpoints.restore(
            functools.partial(abstract_state, create, recipe, mesh, config.ema.averages)
        )
        if restored is not None and restored[0] >= config.steps:
            checkpoints.finish()
            return leave_finished(recipe, config, *restored[:2])
        run = _Run.start(recipe, config, mesh, stop, checkpoints, restored)
        try:
            while run.step < config.steps:
                run.advance()
                if stop.reached(run.step):
                    run.save()
                    raise Preempted(stop.number or signal.SIGTERM, run.step)
            run.save()
            stop.answer = "the result is written, then the run ends"
            export(recipe, config, steps=run.step, **results(run.state))
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
    return run.state


@dataclasses.dataclass
class _Run:
    recipe: Recipe
    config: TrainConfig
    mesh: jax.sharding.Mesh
    stop: TrainingStop
    state: TrainState
    frozen: Params
    batches: Batches
    shapes: dict[str, Any]
    """A batch as shapes with shardings, by the size of its images, of which the first is the
    largest; see `Batches.bucket`."""
    checkpoints: Checkpoints
    reports: Reports
    meter: Meter
    step: int
    position: dict[str, Any]
    """The position in the data after `step`; while a size compiles, a batch more is taken."""
    saved: int | None
    compiled: dict[str, jax.stages.Compiled] = dataclasses.field(default_factory=dict)
    """The compiled steps for the run's present state, which has an average or not, by size."""
    flops: dict[str, int] = dataclasses.field(default_factory=dict)
    """The operations of a step by size."""

    @classmethod
    def start(
        cls,
        recipe: Recipe,
        config: TrainConfig,
        mesh: jax.sharding.Mesh,
        stop: TrainingStop,
        checkpoints: Checkpoints,
        restored: tuple[int, TrainState, dict[str, Any]] | None,
    ) -> "_Run":
        output = Path(config.output)
        batches = _open_batches(recipe, config)
        create = _creation(config)
        if restored is not None:
            step, state, position = restored
            batches.set_state(position)
            log.info("continuing from step %d", step)
        else:
            step = 0
            state = abstract_state(create, recipe, mesh, config.ema.averages, False)
        try:
            shapes = abstract_batch(batches.example(), config, mesh)
            check_arguments(config, mesh, state, abstract_frozen(recipe, mesh), shapes)
        except BaseException:
            batches.close()
            raise
        if restored is None:
            state = _first_state(create, recipe, mesh)
        if jax.process_index() == 0:
            remove_snapshots_after(output / AVERAGES, step)
            _say_what_is_done(config, mesh)
            _note_changes(config, output / CONFIG, resumed=restored is not None)
            (output / CONFIG).write_text(to_yaml(config), "utf-8")
        return cls(
            recipe,
            config,
            mesh,
            stop,
            state,
            _spread(recipe, mesh, recipe.frozen(mesh)),
            batches,
            {batches.bucket: shapes},
            checkpoints,
            Reports(config, name=recipe.name, start=step),
            Meter(config, step),
            step,
            batches.get_state(),
            None if restored is None else step,
        )

    def advance(self) -> None:
        """Does one step, and what is due after it."""
        config = self.config
        start = config.ema.start_step(config.steps)
        if start is not None and self.step >= start and self.state.ema is None:
            self.state = _with_average(self.state, self.recipe, config, self.mesh)
            self.compiled = {}
        if not self.compiled:
            # The largest images first, so that a run that does not fit ends at its beginning.
            self._compile(next(iter(self.shapes)))
        examples = next(self.batches)
        size = self.batches.bucket
        if size not in self.compiled:
            one = {name: values[0] for name, values in examples.items()}
            self.shapes[size] = abstract_batch(one, config, self.mesh)
            self._compile(size)
        batch = put_batch(self.mesh, examples)
        with jax.profiler.StepTraceAnnotation("train", step_num=self.step):
            self.state, metrics = self.compiled[size](self.state, self.frozen, batch)
        self.step, self.position = self.step + 1, self.batches.get_state()
        self.meter.add(metrics, self.flops[size])
        self.reports.advance(self.step)
        if self.step % config.log_every == 0 or self.step == config.steps:
            values = self.meter.read(self.step)
            # The optimizer counts only the steps that were not skipped.
            updates = self.step - int(values["skipped"])
            rates = learning_rate(config.chosen_optimizer, config.steps)
            values["lr"] = float(rates(max(updates - 1, 0)))
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
        mesh = self.mesh
        if jax.process_count() > 1:
            # One process generates them, on its own devices.
            mesh = make_mesh("fsdp=-1", devices=jax.local_devices())
            local = functools.partial(_spread, self.recipe, mesh)
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
                ema,
                options,
                start=options.start_step(self.config.steps) or 0,
                recipe=self.recipe.name,
            )

    def close(self) -> None:
        """Waits until the last checkpoint is written."""
        self.batches.close()
        self.reports.close()
        self.checkpoints.finish()

    def _compile(self, size: str) -> None:
        """Compiles the step for the present state and images of a size.

        Raises:
            DoesNotFitError: the devices' memory does not hold it.
            Interrupted: a signal came.
        """
        config, mesh, began = self.config, self.mesh, time.perf_counter()
        program = step_program(self.recipe, config, optimizer_of(config), mesh, self.state)
        with self.reports.compiling(size) as show, self.stop.at_once():

            def tick() -> None:
                self.stop.check()
                show()

            if size not in self.flops:
                self.flops[size] = self._count_flops(self.shapes[size])
            with in_mesh(mesh):
                lowered = program.lower(self.state, self.frozen, self.shapes[size])
            try:
                compiled = compile_in_background(lowered, tick)
            except DoesNotFitError as error:
                raise does_not_fit(config, error) from None
        later = 0
        if config.ema.start_step(config.steps) is not None and self.state.ema is None:
            later = config.ema.averages * bytes_on_device(self.state.params)
        check_step(config, mesh, compiled, later)
        self.meter.pause(time.perf_counter() - began)
        self.compiled[size] = compiled

    def _count_flops(self, shapes: Any) -> int:
        """Counts the operations of a step, without those that are repeated to save memory."""
        keys = jax.eval_shape(lambda: jax.random.split(seed_key(0), self.config.batch_size))
        trained, frozen, batch = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype),
            (self.state.params, self.frozen, shapes),
        )
        return count_training_flops(self.recipe.loss, trained, frozen, batch, keys)


def _creation(config: TrainConfig) -> Callable[[Params], TrainState]:
    """Returns the function that makes the first state from parameters."""
    optimizer = optimizer_of(config)
    return functools.partial(initial_state, optimizer=optimizer, seed=config.seed)


def _open_checkpoints(recipe: Recipe, config: TrainConfig) -> Checkpoints:
    """Opens the checkpoints in the output folder; refuses those there unless the run may resume."""
    folder = Path(config.output)
    lora = getattr(recipe, "lora", None)
    checkpoints = Checkpoints(
        folder / "checkpoints",
        keep=config.keep,
        average=config.ema.kind,
        alphas=None if lora is None else lora.alphas,
    )
    if checkpoints.steps() and not config.resume:
        raise ValueError(
            f"{folder} holds a run already, and resume is off; use another output folder"
        )
    return checkpoints


def _with_average(
    state: TrainState, recipe: Recipe, config: TrainConfig, mesh: jax.sharding.Mesh
) -> TrainState:
    """Adds an average to the state, which begins as a copy of the parameters."""
    copy = functools.partial(copy_as_average, averages=config.ema.averages)
    kept = places(recipe, jax.eval_shape(copy, state.params), mesh)
    return state._replace(ema=jax.jit(copy, out_shardings=kept)(state.params))


def _check_options(config: TrainConfig, mesh: jax.sharding.Mesh) -> None:
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


def _say_what_is_done(config: TrainConfig, mesh: jax.sharding.Mesh) -> None:
    log.info("%s", batch_arithmetic(config, mesh))
    late = short_window(config.ema, config.steps, config.batch_size)
    if late is not None:
        log.warning("%s", late)


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


def _first_state(
    create: Callable[[Params], TrainState], recipe: Recipe, mesh: jax.sharding.Mesh
) -> TrainState:
    """Makes the state of a new run from the recipe's parameters, whose memory it takes over."""
    kept = places(recipe, jax.eval_shape(create, recipe.shapes()), mesh)
    make = jax.jit(create, out_shardings=kept, donate_argnums=0)
    return make(_spread(recipe, mesh, recipe.trained(mesh)))


def _spread(recipe: Recipe, mesh: jax.sharding.Mesh, params: Params) -> Params:
    """Puts the parameters on the mesh, unless they are there, in the order of its devices."""
    return in_order(jax.device_put(params, tree_sharding(mesh, params, tensor_rules(recipe))))


def _note_changes(config: TrainConfig, before: Path, *, resumed: bool) -> None:
    """Logs which options a resumed run has changed."""
    if not resumed or not before.is_file():
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
