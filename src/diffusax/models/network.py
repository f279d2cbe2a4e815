"""A network as a pure function of (parameters, inputs); the parameters' dtypes and first values."""

import dataclasses
import functools
import math
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from diffusax.models.adapters.image_prompts import ImagePrompts, attach_images
from diffusax.models.adapters.low_rank import Attachable, attach, layer_at
from diffusax.models.caches.step_cache import Evaluation
from diffusax.models.hooks import HookFunctions, Hooks, HookSession, as_hooks
from diffusax.models.layers.rngs import ShapeRngs
from diffusax.models.parameter_tree import (
    fill,
    fitted_tree,
    numbers_as_keys,
    ordered_leaves,
    replaces,
    texts_as_keys,
)
from diffusax.models.streaming import ordered, stream_parameters, streamed
from diffusax.runtime.compat import unchecked_modules
from diffusax.runtime.devices.host import in_host_memory
from diffusax.runtime.devices.mesh import Rule, Rules, counted_rules
from diffusax.runtime.switches import in_auto_axes, standard_promotion

Params = Any
"""A plain nested dict of arrays. Keys are the names in the checkpoint, split at dots: all texts."""


@dataclasses.dataclass(frozen=True)
class Network:
    """A class of networks at one configuration: static, hashable and without arrays.

    Compiled programs take it as a static argument, so that all checkpoints of one architecture
    share them. A network from elsewhere (PyTorch through torchax) has the same attributes.
    """

    module_class: Any
    """A Flax NNX module class with a `config_class`; a class of models stands for its own."""
    config: Any
    """The network's options, a frozen dataclass."""

    def __post_init__(self) -> None:
        module_class = getattr(self.module_class, "module_class", self.module_class)
        object.__setattr__(self, "module_class", module_class)

    @property
    def class_name(self) -> str:
        """The name of the class."""
        return self.module_class.__name__

    @property
    def upstream_name(self) -> str:
        """The name in checkpoints, which is diffusers' or transformers' own."""
        return upstream_name(self.module_class)

    @property
    def tensor_rules(self) -> Rules:
        """The rules by which a mesh's tensor axis splits the parameters."""
        return counted_tensor_rules(self.module_class, self.config)

    @property
    def adapter_groups(self) -> tuple[str, ...]:
        """Regular expressions for the layers that adapters mostly change, the fewest first."""
        return getattr(self.module_class, "adapter_groups", ())

    @property
    def skeleton(self) -> Any:
        """The Flax module with shapes in the place of parameters."""
        return _with_shapes(self.module_class, self.config)

    @property
    def shapes(self) -> Params:
        """The parameter tree as shapes; computes nothing."""
        return _abstract(self.module_class, self.config)[1]

    def apply(
        self,
        params: Params,
        *args: Any,
        method: str = "__call__",
        adapters: Attachable | None = None,
        image_prompts: ImagePrompts | None = None,
        context_keys: Mapping[str, Any] | None = None,
        step_cache: Evaluation | None = None,
        hooks: Mapping[str, Any] | Hooks | None = None,
        **kwargs: Any,
    ) -> Any:
        """Calls the named method of the network with these parameters, and with adapters, if any.

        adapters: LoRAs of any network, or those in training. image_prompts: IP-Adapters of a UNet
        and their images. context_keys: the keys and values of the context that were computed
        before, see `context_keys.project_context`. step_cache: what a cache of steps has kept of
        earlier calls; the result is then a pair of the method's own and of what it keeps. hooks:
        functions that read or change what passes through layers, see `hooks.as_hooks`; the result
        is then a pair of the method's own and of what they keep by the names of points.

        Raises:
            ValueError: the parameters are not the network's, adapters have a layer that it lacks,
                or not as many rows of weights as the inputs have, or hooks cannot be.
        """
        if hooks is not None:
            hooks = _checked_hooks(hooks, step_cache, kwargs)
        with standard_promotion():
            run = functools.partial(self._apply, method)
            beside = adapters, image_prompts, context_keys, step_cache, hooks
            return in_auto_axes(run, params, args, kwargs, *beside, rows=(args, kwargs))

    def _apply(
        self,
        method: str,
        params: Params,
        args: Any,
        kwargs: Any,
        adapters: Attachable | None,
        image_prompts: ImagePrompts | None,
        context_keys: Mapping[str, Any] | None,
        step_cache: Evaluation | None,
        hooks: Hooks | None,
    ) -> Any:
        def build() -> Any:
            return self._attached(params, adapters, image_prompts, context_keys)

        def call(module: Any) -> Any:
            return streamed(lambda *given: getattr(module, method)(*given, **kwargs))(*args)

        def run() -> Any:
            if hooks is not None:
                return HookSession(hooks).run(build(), call)
            if step_cache is None:
                return call(build())
            return step_cache.cache.run(build, call, step_cache.memory, step_cache.active)

        return ordered(run) if any(map(in_host_memory, jax.tree.leaves(params))) else run()

    def _attached(
        self,
        params: Params,
        adapters: Attachable | None,
        image_prompts: ImagePrompts | None,
        context_keys: Mapping[str, Any] | None,
    ) -> Any:
        """Returns the module with its parameters and with all that is attached to its layers."""
        module = self.module(params)
        if adapters is not None:
            attach(module, adapters)
        if image_prompts is not None:
            attach_images(module, image_prompts)
        for path, own in (context_keys or {}).items():
            # An attribute of this trace's module alone, which is no part of Flax's state.
            object.__setattr__(layer_at(module, path), "keys_values", own)
        return module

    def module(self, params: Params) -> Any:
        """Returns the Flax module with these parameters.

        Its layers copy those that lie in the host's memory to the device, see `streaming`.

        Raises:
            ValueError: the parameters are not the network's; see `fitted`.
        """
        graphdef, _ = _abstract(self.module_class, self.config)
        params = self.fitted(params)
        module = nnx.merge(graphdef, numbers_as_keys(params))
        if any(map(in_host_memory, jax.tree.leaves(params))):
            stream_parameters(module)
        return module

    def fitted(self, params: Params) -> Params:
        """Returns parameters in the network's own form, see `parameter_tree.fitted_tree`.

        Raises:
            ValueError: one is missing, unexpected, or of another shape; names it.
        """
        return fitted_tree(self.shapes, params, self.class_name)


def upstream_name(module_class: Any) -> str:
    """Returns the name in checkpoints of a class of networks.

    A class of one's own that is derived from one of diffusax's has that one's, so that diffusers or
    transformers opens what is saved.
    """
    networks = (c for c in module_class.__mro__ if hasattr(c, "config_class"))
    library = __name__.partition(".")[0]
    known = (c.__name__ for c in networks if c.__module__.partition(".")[0] == library)
    return next(known, module_class.__name__)


def hooks_for(network: Any, hooks: Any) -> HookFunctions | None:
    """Returns hooks as a tree whose leaves are their numbers, see `as_hooks`; None for none.

    Raises:
        ValueError: they cannot be, or the network is another library's, which has no place for
            them.
    """
    found = as_hooks(hooks)
    if found is not None and not isinstance(network, Network):
        raise ValueError("hooks must be None with a module of PyTorch, which has hooks of its own")
    return found


def _checked_hooks(hooks: Any, step_cache: Any, options: Mapping[str, Any]) -> Hooks:
    """Returns the hooks of a call.

    Raises:
        ValueError: they cannot be, or not together with what the call asks for.
    """
    if step_cache is not None:
        raise ValueError("hooks need all layers, some of which a cache of steps leaves out")
    if options.get("gradient_checkpointing", "none") != "none":
        raise ValueError(
            "hooks must be None where gradient_checkpointing is on; put jax.checkpoint around the "
            "whole call instead"
        )
    return hooks if isinstance(hooks, Hooks) else Hooks(as_hooks(hooks) or {})


def fit(network: Any, params: Params) -> Params:
    """Returns parameters in the form of a network, which may be another library's, checked.

    Raises:
        ValueError: they are not the network's; names the first that is wrong.
    """
    shapes = getattr(network, "shapes", None)
    return params if shapes is None else fitted_tree(shapes, params, network.class_name)


@functools.lru_cache(64)
def _abstract(module_class: Any, config: Any) -> tuple[Any, Params]:
    """Returns the structure of a network and the shapes of its parameters."""
    graphdef, state = nnx.split(_with_shapes(module_class, config))
    return graphdef, texts_as_keys(nnx.to_pure_dict(state))


@functools.lru_cache(64)
def _with_shapes(module_class: Any, config: Any) -> Any:
    """Returns the module of a network with shapes in the place of parameters."""
    with unchecked_modules():
        return module_class(config, rngs=ShapeRngs())


def parse_dtype(dtype: Any) -> np.dtype:
    """Returns a floating-point dtype from its name, a JAX or NumPy dtype, or PyTorch's.

    Raises:
        ValueError: the value is none of these.
    """
    parsed = floating_dtype(dtype)
    if parsed is None:
        raise ValueError(
            f"dtype must be a floating-point type (got {dtype!r}); use 'float32', 'bfloat16' or "
            "'float16'"
        )
    return parsed


def floating_dtype(dtype: Any) -> np.dtype | None:
    """Parses like `parse_dtype`, but returns None for what is not a floating-point dtype."""
    name = str(dtype)
    if name.startswith("torch."):
        dtype = name.removeprefix("torch.")
    try:
        parsed = None if dtype is None else jnp.dtype(dtype)
    except TypeError:
        return None
    if parsed is None or not jnp.issubdtype(parsed, jnp.floating):
        return None
    return np.dtype(np.float32) if parsed == np.float64 and not _x64() else parsed


def _x64() -> bool:
    return bool(jax.config.read("jax_enable_x64"))


def cast_params(params: Params, dtype: Any) -> Params:
    """Casts the tree's floating-point leaves; gradients keep their first dtype."""
    return jax.tree.map(
        lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x,
        params,
        is_leaf=replaces,
    )


def cast_shapes(params: Params, dtype: Any) -> Params:
    """Returns the shapes of the result of `cast_params`; parameters may be shapes."""
    return jax.eval_shape(lambda tree: cast_params(tree, dtype), params)


def initialize_params(
    shapes: Params, *, seed: int = 0, dtype: Any = np.float32, zero: Collection[str] = ()
) -> Params:
    """Draws random parameters for a tree of arrays or shapes.

    Kernels are normal with variance 1 / fan-in (LeCun et al. 1998), embeddings with deviation 0.02,
    norms and variances one, biases and means zero. It runs on the host, because compiling
    initialisers would take longer.

    Args:
        shapes: a tree whose leaves have a shape.
        seed: the seed of NumPy's generator.
        dtype: the dtype of the result.
        zero: names of layers whose kernels start at zero, like those that end residual branches.
    """
    rng = np.random.default_rng(seed)

    def draw(path: tuple[Any, ...], leaf: Any) -> jax.Array:
        kind = path[-1].key
        if kind == "logit_scale":  # CLIP's, Radford et al. 2021, section 2.5.
            return jnp.full(leaf.shape, -math.log(0.07), dtype)
        if kind in _ONES + _ZEROS:
            return jnp.full(leaf.shape, kind in _ONES, dtype)
        deviation = 0.02 if kind.endswith("embedding") else math.prod(leaf.shape[:-1]) ** -0.5
        if len(path) > 1 and path[-2].key in zero:
            deviation = 0.0
        return jnp.asarray(rng.standard_normal(leaf.shape, np.float32) * deviation, dtype)

    return fill(shapes, [draw(path, leaf) for path, leaf in ordered_leaves(shapes)])


_ONES = ("scale", "gamma", "lambda1", "running_var")
_ZEROS = ("bias", "centred_scale", "scale_shift_table", "running_mean")
"""The names of parameters that start as ones and as zeros."""


@functools.lru_cache(64)
def counted_tensor_rules(module_class: Any, config: Any) -> Rules:
    """Returns the rules of a class of networks with the heads and widths that its layers have.

    Heads that the devices do not divide are not cut: their projections stay whole on each device,
    because a head's channels would have to be gathered again before they can be used.
    """
    rules: Rules = getattr(module_class, "tensor_rules", ())
    given = [value for rule in rules if isinstance(rule, Rule) for value in rule[2:]]
    names = sorted({value for value in given if isinstance(value, str)})
    if not names:
        return rules
    counts: dict[str, dict[str, Any]] = {name: {} for name in names}
    for path, layer in nnx.iter_modules(_with_shapes(module_class, config)):
        for name in names:
            if hasattr(layer, name):
                counts[name][".".join(map(str, path))] = getattr(layer, name)
    return counted_rules(rules, counts)
