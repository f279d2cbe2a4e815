"""The training step as a program: its arguments as shapes, whether it fits, and its compilation.

Nothing here reads parameters, and the devices of the mesh may be elsewhere.
"""

import atexit
import concurrent.futures
import functools
import itertools
import math
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
from diffusax.models.arranged import KernelOrder, arranged_tree
from diffusax.models.network import Params
from diffusax.runtime.devices.layouts import in_order, tree_places
from diffusax.runtime.devices.lowering import (
    compiler_options,
    lowering_for,
    lowering_platforms,
)
from diffusax.runtime.devices.memory import device_memory, host_memory
from diffusax.runtime.devices.mesh import (
    TENSOR_AXIS,
    Rules,
    batch_sharding,
    rules_below,
    tree_sharding,
)
from diffusax.runtime.programs.cost import cost_of
from diffusax.runtime.programs.flops import Work, count_work
from diffusax.runtime.programs.topology import DoesNotFitError, compile_there
from diffusax.runtime.random.noise import seed_key
from diffusax.runtime.switches import in_mesh
from diffusax.training.config import TrainConfig
from diffusax.training.data.batches import Element
from diffusax.training.data.buckets import largest_row
from diffusax.training.ema.update import copy_as_average
from diffusax.training.optimizers import global_norm_by_rows, global_norm_of_shares, make_optimizer
from diffusax.training.recipes.recipe import Recipe
from diffusax.training.step.step import TrainState, initial_state, make_train_step

_MEND = "use a smaller batch_size or a larger accumulate"
_TICK_SECONDS = 0.5


def chosen(recipe: Recipe, examples: Element, size: str, step: int | None) -> tuple[Element, str]:
    """Returns what a recipe takes of a batch, or of an example, and the name of its size.

    step: the step that it is for; None for the largest that any step may take.
    """
    choose = getattr(recipe, "choose", None)
    return (examples, size) if choose is None else choose(examples, size, step)


def optimizer_of(config: TrainConfig) -> optax.GradientTransformation:
    """Makes the optimizer of a run."""
    return make_optimizer(config.chosen_optimizer, config.steps, config.component_rates)


def creation(config: TrainConfig) -> Callable[[Params], TrainState]:
    """Returns the function that makes the first state from parameters."""
    return functools.partial(initial_state, optimizer=optimizer_of(config), seed=config.seed)


def tensor_rules(recipe: Recipe) -> Rules:
    """Returns the rules by which the tensor axis splits the recipe's parameters, by component."""
    networks = getattr(recipe, "networks", {})
    own = (rules_below(name, network.tensor_rules) for name, network in networks.items())
    return (*itertools.chain.from_iterable(own), *TENSOR_RULES)


def kernel_order(recipe: Recipe, mesh: Mesh) -> KernelOrder:
    """Returns the order in which a state on the mesh has the recipe's kernels."""
    return KernelOrder(tensor_rules(recipe), mesh.shape.get(TENSOR_AXIS, 1))


def state_places(recipe: Recipe, state: Any, mesh: Mesh) -> Any:
    """Returns where on the mesh each array (or shape) of a state lies, and in which order."""
    return tree_places(state, kernel_order(recipe, mesh).shardings(mesh, state))


def spread(recipe: Recipe, mesh: Mesh, params: Params) -> Params:
    """Puts parameters on the mesh, unless they are there, in its order."""
    rules = tensor_rules(recipe)
    params = arranged_tree(mesh, params, rules)
    return in_order(jax.device_put(params, tree_sharding(mesh, params, rules)))


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
    order = kernel_order(recipe, mesh)
    step = make_train_step(
        lambda trained, *given: recipe.loss(order.wrapped(trained), *given),
        optimizer,
        accumulate=config.accumulate,
        ema=config.ema,
        ema_start=config.ema.start_step(config.steps) or 0,
        norm=_norm(mesh, lambda: order.shardings(mesh, state.params)),
        check_updates=not config.optimizer.keeps_finite,
    )

    def train_step(state: TrainState, frozen: Params, batch: Any) -> Any:
        with lowering_for(lowering_platforms(mesh)):
            state, metrics = step(state, frozen, batch)
        shardings = order.shardings(mesh, state)
        return jax.lax.with_sharding_constraint(state, shardings), metrics

    # Those of GPUs are for products in the loop of a sampler.
    options = compiler_options(mesh) if mesh.devices.flat[0].platform == "cpu" else {}
    jit = functools.partial(jax.jit, train_step, donate_argnums=0, compiler_options=options or None)
    kept = state_places(recipe, state, mesh)
    # A constraint inside the program says nothing of the order in which its results are stored.
    return jit() if kept == order.shardings(mesh, state) else jit(out_shardings=(kept, None))


def _norm(mesh: Mesh, shardings: Callable[[], Any]) -> Callable[..., jax.Array] | None:
    """Returns how GPUs compute the norm of arrays of these shardings; None for other devices."""
    if mesh.devices.flat[0].platform != "gpu":
        return None
    if mesh.size == mesh.shape["data"]:
        return global_norm_by_rows
    return functools.partial(global_norm_of_shares, shardings=shardings())


def abstract_state(recipe: Recipe, config: TrainConfig, mesh: Mesh, averaged: bool) -> TrainState:
    """Returns the state as shapes with shardings, with the averages of `config.ema` or without."""
    shapes = jax.eval_shape(creation(config), recipe.shapes())
    if averaged:
        copy = functools.partial(copy_as_average, averages=config.ema.averages)
        shapes = shapes._replace(ema=jax.eval_shape(copy, shapes.params))
    return _placed(shapes, state_places(recipe, shapes, mesh))


def abstract_frozen(recipe: Recipe, mesh: Mesh) -> Params:
    """Returns the frozen parameters as shapes with shardings."""
    rules = tensor_rules(recipe)
    frozen = arranged_tree(mesh, recipe.frozen_shapes(), rules)
    return _placed(frozen, tree_places(frozen, tree_sharding(mesh, frozen, rules)))


def abstract_batch(example: Element, config: TrainConfig, mesh: Mesh) -> Any:
    """Returns a batch of examples like this one as shapes with shardings."""

    def shape(x: Any) -> jax.ShapeDtypeStruct:
        # The dtype that JAX would use, without putting an array on a device.
        dtype = jax.dtypes.canonicalize_dtype(np.asarray(x).dtype)
        return jax.ShapeDtypeStruct((config.batch_size, *np.shape(x)), dtype)

    batch = {name: shape(x) for name, x in example.items()}
    return _placed(batch, jax.tree.map(lambda _: batch_sharding(mesh), batch))


def abstract_arguments(recipe: Recipe, config: TrainConfig, mesh: Mesh) -> tuple[Any, ...]:
    """Returns the step's arguments as shapes with shardings: state, frozen parameters, batch.

    The state includes the averages of `config.ema`, and the batch is of the largest images.
    """
    state = abstract_state(recipe, config, mesh, bool(config.ema.averages))
    row = recipe.source[largest_row(recipe.source)]
    example, _ = chosen(recipe, recipe.example(row, np.random.default_rng(0)), "", None)
    return state, abstract_frozen(recipe, mesh), abstract_batch(example, config, mesh)


def lower_step(recipe: Recipe, config: TrainConfig, mesh: Mesh) -> jax.stages.Lowered:
    """Lowers the step of a run for devices that may be elsewhere (`topology_mesh`)."""
    arguments = abstract_arguments(recipe, config, mesh)
    with in_mesh(mesh):
        program = step_program(recipe, config, optimizer_of(config), mesh, arguments[0])
        return program.trace(*arguments).lower(lowering_platforms=lowering_platforms(mesh))


def step_work(recipe: Recipe, config: TrainConfig, mesh: Mesh) -> Work:
    """Returns what products of a step need, over all devices; see `count_training_flops`."""
    return count_step(recipe, config, *abstract_arguments(recipe, config, mesh))


def count_step(
    recipe: Recipe, config: TrainConfig, state: TrainState, frozen: Params, batch: Any
) -> Work:
    """Counts the work of a step, without what is repeated to save memory.

    state, frozen, batch: the arguments of the step, or their shapes.
    """
    keys = jax.eval_shape(lambda: jax.random.split(seed_key(0), config.batch_size))
    trained, frozen, batch = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (state.params, frozen, batch)
    )
    return count_work(recipe.loss, trained, frozen, batch, keys, trained=True)


def _placed(tree: Any, shardings: Any) -> Any:
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings
    )


def check_arguments(config: TrainConfig, mesh: Mesh, state: Any, frozen: Any, batch: Any) -> None:
    """Checks, before any parameter is read, that the step's arguments alone fit into memory.

    state, frozen, batch: the arguments as shapes with shardings.

    Raises:
        DoesNotFitError: a device cannot hold its part of them, or this machine its part of a batch;
            names the batch size.
    """
    states, examples = bytes_on_device((state, frozen)), bytes_on_device(batch)
    available = device_memory(mesh.local_devices[0])
    own = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(batch))
    own //= jax.process_count()
    host = host_memory()
    if available is not None and states + examples > available:
        mend = "use more devices on the mesh's axis fsdp" if states > available else _MEND
        raise DoesNotFitError(
            f"{_what(config)} cannot fit: parameters and optimizer take {_gb(states)} and the "
            f"examples of a batch {_gb(examples)} of each device's {_gb(available)}; {mend}"
        )
    if host is not None and own > host:
        raise DoesNotFitError(
            f"{_what(config)} cannot fit: the examples of a batch take {_gb(own)} of this "
            f"machine's {_gb(host)}; use a smaller batch_size"
        )


def check_step(
    config: TrainConfig, mesh: Mesh, compiled: jax.stages.Compiled, later: int = 0
) -> None:
    """Checks that the devices' memory holds a compiled step.

    later: the number of bytes on each device that join the state during the run.

    Raises:
        DoesNotFitError: the step does not fit; gives the compiler's figures and the batch size.
    """
    needed, available = cost_of(compiled).peak * 1e9 + later, device_memory(mesh.local_devices[0])
    if available is None or needed <= available:
        return
    averages = f", {_gb(later)} of them for the averages that begin later" if later else ""
    raise DoesNotFitError(
        f"{_what(config)} cannot fit: the compiler says that the step needs {_gb(needed)} on each "
        f"device{averages}, and there are {_gb(available)}; {_MEND}"
    )


def does_not_fit(config: TrainConfig, error: Exception) -> DoesNotFitError:
    """Returns the error for one of the compiler, or of a device that had no memory left."""
    reason = " ".join(str(error).split())[:200]
    return DoesNotFitError(f"{_what(config)} cannot fit: {reason}; {_MEND}")


def bytes_on_device(tree: Any) -> int:
    """Returns the bytes that each device holds of a tree of arrays, or of shapes with shardings."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree)
    )


def _what(config: TrainConfig) -> str:
    return f"batch_size={config.batch_size} with accumulate={config.accumulate}"


def _gb(count: float) -> str:
    return f"{count / 1e9:,.1f} GB"


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
