"""The training step as a program for a mesh of devices, which may be TPUs that are elsewhere."""

import atexit
import concurrent.futures
import functools
import itertools
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from diffusax.models import TENSOR_RULES
from diffusax.models.network import Params
from diffusax.runtime.devices.layouts import tree_places
from diffusax.runtime.devices.lowering import lowering_for, lowering_platforms
from diffusax.runtime.devices.mesh import (
    Rules,
    batch_sharding,
    in_mesh,
    rules_below,
    tree_sharding,
)
from diffusax.runtime.programs.flops import count_training_flops
from diffusax.runtime.programs.topology import compile_there
from diffusax.runtime.random.noise import seed_key
from diffusax.training.config import TrainConfig
from diffusax.training.data.batches import Element
from diffusax.training.data.buckets import largest_row
from diffusax.training.ema.update import copy_as_average
from diffusax.training.optimizers import make_optimizer
from diffusax.training.recipes.recipe import Recipe
from diffusax.training.step.step import TrainState, initial_state, make_train_step


def optimizer_of(config: TrainConfig) -> optax.GradientTransformation:
    """Makes the optimizer of a run."""
    return make_optimizer(config.chosen_optimizer, config.steps, config.component_rates)


def tensor_rules(recipe: Recipe) -> Rules:
    """Returns the rules by which the tensor axis splits the recipe's parameters, by component."""
    networks = getattr(recipe, "networks", {})
    own = (rules_below(name, network.tensor_rules) for name, network in networks.items())
    return (*itertools.chain.from_iterable(own), *TENSOR_RULES)


def places(recipe: Recipe, tree: Any, mesh: Mesh) -> Any:
    """Returns where on the mesh each array (or shape) of a recipe lies, and in which order."""
    return tree_places(tree, tree_sharding(mesh, tree, tensor_rules(recipe)))


def step_program(
    recipe: Recipe,
    config: TrainConfig,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    state: TrainState,
) -> jax.stages.Wrapped:
    """Jits the step of a run; it donates its state, which keeps its place and order on the mesh.

    state: the state, or its shapes.
    """
    rules = tensor_rules(recipe)
    step = make_train_step(
        recipe.loss,
        optimizer,
        accumulate=config.accumulate,
        ema=config.ema,
        ema_start=config.ema.start_step(config.steps) or 0,
        by_rows=_whole_on_gpus(mesh),
    )

    def train_step(state: TrainState, frozen: Params, batch: Any) -> Any:
        with lowering_for(lowering_platforms(mesh)):
            state, metrics = step(state, frozen, batch)
        shardings = tree_sharding(mesh, state, rules)
        return jax.lax.with_sharding_constraint(state, shardings), metrics

    kept = places(recipe, state, mesh)
    if kept == tree_sharding(mesh, state, rules):
        return jax.jit(train_step, donate_argnums=0)
    # A constraint inside the program says nothing of the order in which its results are stored.
    return jax.jit(train_step, donate_argnums=0, out_shardings=(kept, None))


def _whole_on_gpus(mesh: Mesh) -> bool:
    """Returns whether the devices are GPUs, each with all parameters."""
    return mesh.devices.flat[0].platform == "gpu" and mesh.size == mesh.shape["data"]


def abstract_state(
    create: Callable[[Params], TrainState],
    recipe: Recipe,
    mesh: Mesh,
    averages: int,
    averaged: bool,
) -> TrainState:
    """Returns the state as shapes with shardings; averages: their number, if it is averaged."""
    shapes = jax.eval_shape(create, recipe.shapes())
    if averaged:
        copy = functools.partial(copy_as_average, averages=averages)
        shapes = shapes._replace(ema=jax.eval_shape(copy, shapes.params))
    return _placed(shapes, places(recipe, shapes, mesh))


def abstract_arguments(recipe: Recipe, config: TrainConfig, mesh: Mesh) -> tuple[Any, ...]:
    """Returns the arguments of the step as shapes with shardings: state, frozen parameters, batch.

    No parameters are read. The state includes the averages of `config.ema`. The batch is of the
    largest images.
    """
    optimizer = optimizer_of(config)
    create = functools.partial(initial_state, optimizer=optimizer, seed=config.seed)
    averages = config.ema.averages
    state = abstract_state(create, recipe, mesh, averages, bool(averages))
    example = recipe.example(recipe.source[largest_row(recipe.source)], np.random.default_rng(0))
    return state, abstract_frozen(recipe, mesh), abstract_batch(example, config, mesh)


def abstract_frozen(recipe: Recipe, mesh: Mesh) -> Params:
    """Returns the frozen parameters as shapes with shardings; none are read."""
    frozen = recipe.frozen_shapes()
    return _placed(frozen, places(recipe, frozen, mesh))


def abstract_batch(example: Element, config: TrainConfig, mesh: Mesh) -> Any:
    """Returns a batch of examples like this one as shapes with shardings."""
    batch = {
        name: jax.ShapeDtypeStruct((config.batch_size, *np.shape(x)), _dtype(x))
        for name, x in example.items()
    }
    return _placed(batch, jax.tree.map(lambda _: batch_sharding(mesh), batch))


def lower_step(recipe: Recipe, config: TrainConfig, mesh: Mesh) -> jax.stages.Lowered:
    """Lowers the step of a run for devices that may be elsewhere (`topology_mesh`)."""
    optimizer = optimizer_of(config)
    arguments = abstract_arguments(recipe, config, mesh)
    with in_mesh(mesh):
        program = step_program(recipe, config, optimizer, mesh, arguments[0])
        traced = program.trace(*arguments)
        return traced.lower(lowering_platforms=lowering_platforms(mesh))


def step_operations(recipe: Recipe, config: TrainConfig, mesh: Mesh) -> int:
    """Returns the operations that a step needs, over all devices; see `count_training_flops`."""
    state, frozen, batch = abstract_arguments(recipe, config, mesh)
    keys = jax.eval_shape(lambda: jax.random.split(seed_key(0), config.batch_size))
    return count_training_flops(recipe.loss, state.params, frozen, batch, keys)


def _dtype(x: Any) -> np.dtype:
    """Returns the dtype that JAX would use, without putting an array on a device."""
    return jax.dtypes.canonicalize_dtype(np.asarray(x).dtype)


def _placed(tree: Any, shardings: Any) -> Any:
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings
    )


_TICK_SECONDS = 0.5


def compile_in_background(
    lowered: jax.stages.Lowered, tick: Callable[[], None]
) -> jax.stages.Compiled:
    """Compiles a program in a thread of its own, while this one waits and answers signals.

    Args:
        lowered: the program.
        tick: a function that is called twice in a second. If it raises an error, the wait ends, and
            the process can then end without waiting for the compiler.

    Raises:
        DoesNotFitError: the compiler finds that the devices' memory does not hold the program.
    """
    future: concurrent.futures.Future[jax.stages.Compiled] = concurrent.futures.Future()

    def work() -> None:
        try:
            future.set_result(compile_there(lowered, effort=None))
        except BaseException as error:
            future.set_exception(error)

    thread = threading.Thread(target=work, name="compile", daemon=True)
    thread.start()
    try:
        while not concurrent.futures.wait([future], _TICK_SECONDS).done:
            tick()
    except BaseException as error:
        atexit.register(_leave, thread, getattr(error, "exit_code", 1))
        raise
    return future.result()


def _leave(thread: threading.Thread, code: int) -> None:
    """Ends the process while the thread still compiles, where Python itself would abort."""
    if not thread.is_alive():
        return
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)
