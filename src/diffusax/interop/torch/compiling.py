"""Replaces a method of a PyTorch module by a compiled program that takes and returns tensors."""

import contextlib
import dataclasses
import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import Mesh

from diffusax.interop.torch.compat import parameters_of, version_of
from diffusax.interop.torch.environment import is_traced, unwrap, wrap
from diffusax.interop.torch.explaining import NotTraceable, explain
from diffusax.interop.torch.functional import Kernel, State, read_state, run_traced
from diffusax.interop.torch.numbers import Numbers
from diffusax.interop.torch.session import current
from diffusax.interop.torch.structures import Structure, fix, flatten, rebuild
from diffusax.interop.torch.switches import Switches
from diffusax.interop.torch.tensors import to_array, to_tensor
from diffusax.models.network import parse_dtype
from diffusax.runtime.devices.mesh import (
    Rules,
    batch_sharding,
    batch_size,
    make_mesh,
    param_sharding,
    replicated,
    turned_sharding,
)
from diffusax.runtime.programs.program import Program
from diffusax.runtime.switches import in_mesh

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class CompileOptions:
    """The options of `compile`; torchax's own CompileOptions has the second and the third field."""

    components: tuple[str, ...] | None = None
    """The components to compile; None for all but the safety checker."""
    methods_to_compile: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    """More methods by component, such as {"text_encoder": ("get_text_features",)}. `forward` and,
    where a module has them, `encode` and `decode` are compiled anyway."""
    jax_jit_kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    """The options of jax.jit, such as compiler_options."""
    exclude: tuple[str, ...] = ()
    """The components that continue to run in PyTorch."""
    dtype: Any = None
    """The dtype of parameters and computation in JAX; None for the modules' own."""
    mesh: Mesh | str | None = None
    """The devices to split batches and parameters over, such as "data=4,fsdp=2"."""
    rules: Rules = ()
    """The axis of a parameter that the mesh's tensor axis splits, by the end of its name."""
    fuse_loop: bool = False
    """Whether the pipeline's denoising loop becomes one program with its networks, guidance and
    sampler, where every iteration does the same and diffusax has the scheduler."""
    on_error: Literal["raise", "eager"] = "raise"
    """The handling of a component that cannot be traced; "eager" leaves it with PyTorch."""


class Placement:
    """The devices and dtypes of parameters and arguments."""

    def __init__(self, options: CompileOptions):
        self.mesh = None if options.mesh is None else make_mesh(options.mesh)
        self.rules = options.rules
        self.dtype = None if options.dtype is None else parse_dtype(options.dtype)

    def parameter(self, name: str, array: np.ndarray) -> jax.Array | Kernel:
        """Puts a parameter on the devices."""
        array, place = self.cast(array), None
        if self.mesh is not None:
            place = param_sharding(self.mesh, name, array.shape, self.rules)
        # Parameters may be read while something is traced.
        with jax.ensure_compile_time_eval():
            # Other parameters with four axes are rare and small; their program transposes them.
            if array.ndim != len(Kernel.AXES):
                return jax.device_put(array, place)
            turned = None if place is None else turned_sharding(place, Kernel.AXES)
            return Kernel(jax.device_put(array.transpose(Kernel.AXES), turned))

    def argument(self, leaf: Any) -> Any:
        """Puts an argument on the devices; a batch that they can share is split among them."""
        array = self.cast(to_array(leaf))
        array = array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)
        if self.mesh is None:
            return array
        shared = array.ndim > 1 and array.shape[0] % batch_size(self.mesh) == 0
        return jax.device_put(array, (batch_sharding if shared else replicated)(self.mesh))

    def cast(self, array: Any) -> Any:
        """Casts a floating-point array to the dtype of the computation, if one was chosen."""
        if self.dtype is None or not jnp.issubdtype(array.dtype, jnp.floating):
            return array
        return array.astype(self.dtype)


class CompiledMethod:
    """A compiled replacement for a module's method.

    Tensors and arrays among the arguments are data; for other values, a program is compiled for
    each. A number that changes from call to call becomes data, too.
    """

    def __init__(self, component: "CompiledModule", name: str, original: Callable[..., Any]):
        self.component, self.name, self.original = component, name, original
        # Pipelines read from the signature which arguments exist, such as num_frames.
        self.__signature__ = inspect.signature(original)
        self.numbers = Numbers()
        self._results: dict[Any, Structure] = {}
        self._abstract: dict[Any, list[Any]] = {}
        jit_options = component.options.jax_jit_kwargs
        self._jitted = Program(
            self._traced, static=("flags", "structure"), uncounted=("state",), **jit_options
        )
        self._calls, self._fixes_masks = 0, False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the method's result."""
        leaves, structure = flatten((args, kwargs))
        session = current()
        if session is not None and session.watches and not self.component.is_eager:
            return session.call(self, leaves, structure)
        if any(map(_stays_with_torch, leaves)) or self.component.is_eager:
            return self.original(*args, **kwargs)
        try:
            return self.run(leaves, structure)
        except NotTraceable as failure:
            if self.component.options.on_error == "raise":
                raise
            log.warning("%s runs in PyTorch: %s", self.component.name, failure)
            self.component.is_eager = True
        return self.original(*args, **kwargs)

    def run(self, leaves: list[Any], structure: Structure) -> Any:
        """Runs the program, or one for these values of masks where they must be known.

        Raises:
            NotTraceable: the module cannot be compiled.
        """
        dtypes = {x.dtype for x in leaves if isinstance(x, torch.Tensor) and x.is_floating_point()}
        if not self._fixes_masks:
            try:
                return self._run(leaves, structure, dtypes)
            except NotTraceable as failure:
                if not failure.needs_values or not any(map(_is_mask, leaves)):
                    raise
                log.info("%s.%s is compiled for each mask", self.component.name, self.name)
        found = self._run(*fix(structure, leaves, _is_mask), dtypes)
        self._fixes_masks = True
        return found

    def _run(self, leaves: list[Any], structure: Structure, dtypes: set[torch.dtype]) -> Any:
        place, flags = self.component.placement, self.component.refresh()
        self.numbers.learn(structure, lambda found: self._shapes(flags, found, leaves, structure))
        found, leaves = self.numbers.split(structure, leaves)
        arrays = [place.argument(leaf) for leaf in leaves]
        seed = np.uint32((torch.initial_seed() + self._calls) % 2**32)
        self._calls += 1
        # No mesh can be set while a loop is recorded, which is a trace.
        with in_mesh(place.mesh) if current() is None else contextlib.nullcontext():
            results = self._jitted(flags, found, self.component.state, seed, arrays)
        tensors = [to_tensor(array) for array in results]
        if place.dtype is not None and len(dtypes) == 1:
            (dtype,) = dtypes
            tensors = [x.to(dtype) if x.is_floating_point() else x for x in tensors]
        return rebuild(self._results[_key(flags, found, arrays)], iter(tensors))

    def abstract(self, structure: Structure, arrays: list[Any]) -> tuple[list[Any], Structure]:
        """Returns the shapes of the results for arguments in JAX, and their structure."""
        flags = self.component.refresh()
        key = _key(flags, structure, arrays)
        if key not in self._abstract:
            traced = functools.partial(self._traced, flags, structure)
            arguments = self.component.state, np.uint32(0), [abstract_array(x) for x in arrays]
            self._abstract[key] = jax.eval_shape(traced, *arguments)
        return self._abstract[key], self._results[key]

    def inline(self, structure: Structure, arrays: list[Any], state: State) -> Any:
        """Returns the result while an outer function is traced, as the environment's tensors."""
        args = rebuild(structure, map(wrap, map(self.component.placement.cast, arrays)))
        result = run_traced(self.component.module, self.original, state, np.uint32(0), args)
        if self.component.placement.dtype is None:
            return result
        leaves, around = flatten(result)
        return rebuild(around, (wrap(_like(unwrap(leaf), arrays)) for leaf in leaves))

    def _shapes(
        self, flags: Any, found: Structure, leaves: list[Any], structure: Structure
    ) -> list[Any]:
        """Returns the shapes of the results with the numbers of `found` as data."""
        arrays = self.numbers.leaves(found, structure, leaves)
        arrays = [to_array(leaf) for leaf in arrays]
        traced = jax.eval_shape(
            lambda state, arrays: self._traced(flags, found, state, np.uint32(0), arrays),
            self.component.state,
            arrays,
        )
        return [(x.shape, x.dtype) for x in traced]

    def _traced(
        self, flags: Any, structure: Structure, state: State, seed: Any, arrays: list[Any]
    ) -> list[jax.Array]:
        args = rebuild(structure, map(wrap, map(jnp.asarray, arrays)))
        try:
            result = run_traced(self.component.module, self.original, state, seed, args)
            leaves, described = flatten(result)
            traced = [unwrap(leaf) for leaf in leaves]
        except Exception as error:
            raise explain(self.component.name, self.name, error) from error
        self._results[_key(flags, structure, arrays)] = described
        return traced


class CompiledModule:
    """A component with its parameters in JAX; its module's methods are the compiled ones."""

    def __init__(
        self, name: str, module: torch.nn.Module, methods: tuple[str, ...], options: CompileOptions
    ):
        self.name, self.module, self.options = name, module, options
        self.placement = Placement(options)
        self.is_eager = False
        self.state: State = {}
        self._seen: Any = None
        self._parts: int | None = None
        self._holders: list[dict[str, Any]] = []
        self._switches = Switches(module)
        self.methods = {m: CompiledMethod(self, m, getattr(module, m)) for m in methods}
        for method, compiled in self.methods.items():
            module.__dict__[method] = compiled

    def refresh(self) -> int:
        """Reads parameters again that were replaced or changed; returns the switches' state."""
        parts, switches = self._switches.read()
        if parts != self._parts:
            self._parts = parts
            self._holders = [*filter(None, map(parameters_of, self.module.modules()))]
        # Any of them: adapters are fused into some of the weights only, in place.
        found = parts, [_mark(x) for holder in self._holders for x in holder.values()]
        if found != self._seen:
            self.state = read_state(self.module, self.placement.parameter)
            self._seen = found
        return switches

    def restore(self) -> None:
        """Restores the module's own methods."""
        for method, compiled in self.methods.items():
            if self.module.__dict__.get(method) is compiled:
                del self.module.__dict__[method]


def _stays_with_torch(leaf: Any) -> bool:
    """Returns whether a call is part of another trace, or needs PyTorch's gradients."""
    wants_gradient = isinstance(leaf, torch.Tensor) and leaf.requires_grad
    return is_traced(leaf) or (wants_gradient and torch.is_grad_enabled())


def abstract_array(leaf: Any) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype of an argument in JAX."""
    array = leaf if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) else to_array(leaf)
    return jax.ShapeDtypeStruct(array.shape, jax.dtypes.canonicalize_dtype(array.dtype))


def _like(array: jax.Array, arrays: list[Any]) -> jax.Array:
    """Casts the array to the arguments' floating-point dtype, if they have only one."""
    dtypes = {x.dtype for x in arrays if jnp.issubdtype(x.dtype, jnp.floating)}
    floating = jnp.issubdtype(array.dtype, jnp.floating)
    return array.astype(dtypes.pop()) if floating and len(dtypes) == 1 else array


def _is_mask(leaf: Any) -> bool:
    """Returns whether a tensor may be a mask of tokens: integers or booleans, b s or more axes."""
    if not isinstance(leaf, torch.Tensor) or leaf.ndim < 2:
        return False
    return not (leaf.is_floating_point() or leaf.is_complex())


def _key(flags: Any, structure: Structure, arrays: list[Any]) -> Any:
    return flags, structure, tuple((x.shape, jnp.dtype(x.dtype)) for x in arrays)


def _mark(tensor: torch.Tensor | None) -> tuple[Any, ...] | None:
    """Returns a key that changes when a parameter is cast, moved, replaced or written to."""
    return None if tensor is None else (tensor.dtype, tensor.data_ptr(), version_of(tensor))
