"""A network with its parameters: what is loaded, called, saved and put into a pipeline."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from diffusax.boundary.messages import NETWORK, hinting
from diffusax.boundary.tensors import for_reader
from diffusax.checkpoints.networks import (
    LeftOut,
    check_saveable,
    read_parameters,
)
from diffusax.models.adapters.freeu import check_freeu
from diffusax.models.caches.configs import as_config
from diffusax.models.hooks import HookFunctions
from diffusax.models.network import (
    Network,
    Params,
    cast_params,
    fit,
    floating_dtype,
    hooks_for,
    initialize_params,
)
from diffusax.models.parameter_tree import first_parameter, ordered_leaves
from diffusax.models.quantized import (
    Weights,
    copied_dicts,
    parse_weights,
    quantize_in_place,
)
from diffusax.models.table import MODELS
from diffusax.networks.module_methods import ModuleMethods
from diffusax.networks.pretrained import Pretrained
from diffusax.networks.registration import Switches, register
from diffusax.runtime.compat import is_tracing
from diffusax.runtime.devices.mesh import beside
from diffusax.runtime.programs.program import Program
from diffusax.runtime.switches import under_own_switches

_CALLS = {"__call__", "encode", "decode"}
"""The methods of models in which a network is called."""


@hinting(NETWORK)
class Model(Pretrained, ModuleMethods):
    """A network with its parameters, which is loaded, called, saved and put into a pipeline.

    Each network has a subclass under diffusers' or transformers' name, such as
    `diffusax.UNet2DConditionModel`; `Model` itself, which is also `diffusax.AutoModel`, makes an
    instance of the subclass for the network. A subclass of one's own names its Flax module as
    `module_class`.

    It is called as diffusers' and transformers' models are, with images and latents b c h w. `run`
    is the compiled network as its Flax module is called: images and latents b h w c, outputs of
    text encoders b s d, tokens b t. Another layout is an error if its shape shows it; latents of
    eight channels and 8x8 look alike in both.

    A model is a pytree whose leaves are the parameters, so that `jax.jit`, `jax.grad` and
    `jax.device_put` take it as they take arrays. The network and the switches are static.

    Attributes:
        network: the static description, whose `apply` is the pure function of parameters.
        params: the parameters. A pipeline's model keeps them in `pipe.params`.
        switches: tiling, FreeU, and the growth of a text encoder's table.
    """

    kinds: ClassVar[dict[str, type["Model"]]] = {}
    """The subclasses by the names of their networks' classes."""
    module_class: ClassVar[Any] = None
    """The Flax module of a subclass's networks."""
    config_class: ClassVar[Any] = None
    """The options of a subclass's networks, a dataclass."""
    left_out: LeftOut | None = None
    """What the model was loaded without, which `save_pretrained` copies; None where nothing is."""

    def __init_subclass__(cls) -> None:
        if "module_class" in vars(cls):
            name = cls.module_class.__name__
            Model.kinds[name] = cls
            cls.config_class = cls.module_class.config_class
            MODELS.setdefault(name, cls.module_class)
        for name in _CALLS & vars(cls).keys():
            setattr(cls, name, under_own_switches(vars(cls)[name]))
        register(cls)

    def __new__(cls, network: Any = None, params: Any = None, **_: Any) -> Self:
        """Makes an instance of the subclass for the network, or for the network of a config."""
        name = network.class_name if _is_network(network) else cls._class_of(network)
        kind: Any = Model.kinds.get(name, cls)
        if not issubclass(kind, cls) and not issubclass(cls, kind):
            raise ValueError(f"network is a {name}, not a {cls._named()}")
        return super().__new__(kind if issubclass(kind, cls) else cls)

    def __init__(
        self,
        network: Any = None,
        params: Params = None,
        *,
        switches: Switches | None = None,
        **options: Any,
    ):
        """Makes a model of a network and its parameters, or of a config with random parameters.

        Args:
            network: a `Network`, or what `from_config` takes: a config, or None for the options.
            params: the network's parameters; None or {} for a model without any.
            switches: the features that are on; by default none.
            **options: with a config, the keywords of `from_config`.

        Raises:
            ValueError: the parameters are not the network's; names the first that is wrong.
        """
        if not _is_network(network):
            network, params = self._drawn(network, **options)
        elif options:
            raise TypeError(f"options are for a config, not for a network (got {[*options]})")
        params = fit(network, params) if params else params
        self._hold(network, params, switches or Switches())

    def _hold(self, network: Any, params: Params, switches: Switches) -> None:
        self.network, self.switches = network, switches
        self._store, self._name = {"params": params}, "params"

    @classmethod
    def _holding(
        cls, network: Any, params: Params, switches: Switches, left_out: LeftOut | None = None
    ) -> Self:
        """Makes a model of what another one had, unchecked: parameters may be anything."""
        model = object.__new__(cls)
        model._hold(network, params, switches)
        model.left_out = left_out
        return model

    def __reduce__(self) -> Any:
        """Returns what a copy or a file of the model holds: its parameters, and no pipeline's."""
        return self._holding, (self.network, self.params, self.switches, self.left_out)

    def bound_to(self, store: dict[str, Params], name: str) -> Self:
        """Returns a model of the same network that keeps its parameters in `store[name]`."""
        store[name] = self.params
        switches = dataclasses.replace(self.switches)
        model = self._holding(self.network, None, switches, self.left_out)
        model._store, model._name = store, name
        return model

    def of_network(self, network: Any) -> Self:
        """Returns a model with the same parameters, in the same place, and another config."""
        model = self._holding(network, None, self.switches, self.left_out)
        model._store, model._name = self._store, self._name
        return model

    def keep_params(self) -> None:
        """Makes the model keep its parameters itself, whatever happens to a store that had them."""
        self._store, self._name = {"params": self.params}, "params"

    @property
    def params(self) -> Params:
        """The parameters, a nested dict of arrays.

        What is assigned is checked, and may have integers as indices of lists.
        """
        return self._store[self._name]

    @params.setter
    def params(self, params: Params) -> None:
        self._store[self._name] = fit(self.network, params)

    @property
    def config(self) -> Any:
        """The network's configuration."""
        return self.network.config

    @property
    def class_name(self) -> str:
        """The network's class."""
        return self.network.class_name

    @property
    def tiling(self) -> bool:
        """Whether an autoencoder decodes images larger than its sample_size in tiles."""
        return self.switches.tiling

    @property
    def apply(self) -> Any:
        """The pure function of (params, inputs), see `Network.apply`."""
        return self.network.apply

    @property
    def num_params(self) -> int:
        """The number of parameters."""
        return self.num_parameters()

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """Returns the number of parameters, like diffusers' and transformers' method.

        Args:
            only_trainable: whether to count none where `requires_grad_(False)` was called.
            exclude_embeddings: whether to leave out the tables of embeddings.
        """
        leaves = ordered_leaves(self.params)
        if only_trainable and not self.switches.trainable:
            return 0
        kept = (
            leaf.size
            for path, leaf in leaves
            if not (exclude_embeddings and path[-1].key == "embedding")
        )
        return sum(kept)

    @property
    def dtype(self) -> Any:
        """The dtype of the parameters, in which the network computes; see `for_reader`."""
        return for_reader(first_parameter(self.params).dtype)

    @property
    def device(self) -> Any:
        """The device of the parameters, the first one of several; see `for_reader`."""
        devices = jax.tree.leaves(self.params)[0].devices()
        return for_reader(min(devices, key=lambda device: device.id))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the network as diffusers or transformers does; one without a subclass as `run`."""
        return self.run(*args, **kwargs)

    @property
    def is_double(self) -> bool:
        """Whether the parameters are of 64 bits."""
        return getattr(first_parameter(self.params), "dtype", None) == np.float64

    @property
    def is_explicit(self) -> bool:
        """Whether the parameters are on a mesh of the user's with explicit axes."""
        mesh = getattr(getattr(first_parameter(self.params), "sharding", None), "mesh", None)
        return mesh is not None and AxisType.Explicit in mesh.axis_types

    @under_own_switches
    def run(
        self,
        *args: Any,
        method: str = "__call__",
        channels_first: bool = False,
        hooks: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Runs a method of the network on arrays, compiled.

        Args:
            *args: the method's arguments.
            method: the name of the module's method.
            channels_first: whether images, videos and latents, which are all arrays of four or
                five axes, come and go as b c h w and b c f h w instead of b h w c and b f h w c.
            hooks: functions that read or change what passes through layers, see `as_hooks`, in
                which maps are b h w c; the result is then a pair of the method's own and of what
                they keep by the names of points.
            **kwargs: the method's arguments by name.

        Raises:
            ValueError: an array does not have the shape that the network takes, or hooks cannot be.
        """
        if self.switches.freeu is not None and method == "__call__":
            kwargs = {"freeu": np.array(self.switches.freeu, np.float32), **kwargs}
        if not is_tracing():
            args, kwargs = beside(first_parameter(self.params), (args, kwargs))
        given = self.network, self.params, method, channels_first, args, kwargs
        return _apply(*given, hooks_for(self.network, hooks))

    def run_with_hooks(
        self, hooks: Mapping[str, Any] | None, *args: Any, **kwargs: Any
    ) -> tuple[Any, dict[str, Any] | None]:
        """Runs as `run`; also returns what hooks keep, None without hooks."""
        result = self.run(*args, hooks=hooks, **kwargs)
        return (result, None) if hooks is None else result

    def to(self, *args: Any, dtype: Any = None, **_: Any) -> Self:
        """Returns the model itself, cast if a floating-point dtype is given.

        Devices are accepted and change nothing: JAX has placed the parameters already.
        """
        dtypes = [dtype, *args]
        found = next((d for d in map(floating_dtype, dtypes) if d is not None), None)
        if found is not None:
            self.params = cast_params(self.params, found)
        return self

    def quantize(self, weights: Weights = "int8") -> Self:
        """Stores the kernels inside of the network's blocks in eight bits; returns the model.

        Each kernel is freed when it is replaced, unless a model or pipeline shares it. Norms,
        biases, tables and the first and last layers stay in their dtype, in which the network goes
        on to compute. `save_pretrained` writes the kernels multiplied out.

        Args:
            weights: "int8", integers with a scale for each output channel; "int8_convrot", those of
                rotated inputs, which TPUs multiply as integers (see `int8_activations`); or "fp8",
                numbers of float8_e4m3fn.

        Raises:
            ValueError: it is another text, or the network is a PyTorch module's.
        """
        kind = parse_weights(weights)
        check_saveable(self)
        if kind is not None:
            # Other pipelines may have the same dicts.
            tree = self._store[self._name] = copied_dicts(self.params)
            quantize_in_place(tree, kind)
        return self

    def enable_tiling(self) -> None:
        """Makes an autoencoder take images larger than its sample_size in overlapping tiles.

        AutoencoderKL, AutoencoderKLFlux2, AutoencoderKLQwenImage and AutoencoderKLWan encode and
        decode in tiles, the others decode.
        """
        self.switches.tiling = True

    def disable_tiling(self) -> None:
        """Makes an autoencoder take every image in one piece."""
        self.switches.tiling = False

    def enable_freeu(self, s1: float, s2: float, b1: float, b2: float) -> None:
        """Runs a UNet with FreeU (Si et al. 2023) until `disable_freeu`, like diffusers' method.

        Changing the numbers compiles nothing. A zero among them means no FreeU, as in diffusers.

        Args:
            s1: the factor of the skip connections' low frequencies at the smallest maps.
            s2: the same at the next larger maps.
            b1: the factor of half the backbone's channels at the smallest maps.
            b2: the same at the next larger maps.

        Raises:
            ValueError: a factor is not a finite number, or the network is not a UNet.
        """
        if self.network.upstream_name != "UNet2DConditionModel":
            raise ValueError(f"FreeU is for a UNet2DConditionModel, not for a {self.class_name}")
        self.switches.freeu = check_freeu(s1, s2, b1, b2)

    def disable_freeu(self) -> None:
        """Runs the UNet without FreeU."""
        self.switches.freeu = None

    @property
    def is_cache_enabled(self) -> bool:
        """Whether a cache of steps is on, see `enable_cache`."""
        return self.switches.cache is not None

    def enable_cache(self, config: Any) -> None:
        """Lets pipelines leave out a part of the network in some steps, like diffusers' method.

        It holds for calls of pipelines until `disable_cache`. Turning it on or off compiles their
        programs once, and other numbers of the options compile nothing. A call of the network by
        itself computes all of it.

        Args:
            config: a `FirstBlockCacheConfig` or `TaylorSeerCacheConfig` for a transformer, a
                `DeepCacheConfig` for a UNet; or diffusers' own of these names.

        Raises:
            ValueError: the network has no such cache, or one is on already.
        """
        if self.is_cache_enabled:
            name = type(self.switches.cache).__name__
            raise ValueError(f"a cache is on already, of {name}; call disable_cache first")
        self.switches.cache = as_config(config, self.network)

    def disable_cache(self) -> None:
        """Computes all of the network in every step again."""
        self.switches.cache = None

    @contextlib.contextmanager
    def cache_context(self, name: str, **about: Any) -> Iterator[None]:
        """Does nothing, for code that is written for diffusers, where it says which branch is next.

        A pipeline here knows the branches of guidance, each of which has its own cache.

        Args:
            name: has no effect.
            **about: has no effect.
        """
        yield

    def __repr__(self) -> str:
        if not jax.tree.leaves(self.params):
            return f"{self.class_name}(without parameters)"
        size = f"{self.num_params / 1e6:.1f} M parameters"
        return f"{self.class_name}({size}, {self.dtype})"


@functools.partial(Program, static=("network", "method", "channels_first"))
def _apply(
    network: Network,
    params: Params,
    method: str,
    channels_first: bool,
    args: Any,
    kwargs: Any,
    hooks: HookFunctions | None,
) -> Any:
    if channels_first:
        args, kwargs = jax.tree.map(functools.partial(_move_axis, to=-1), (args, kwargs))
    if hooks is not None:
        kwargs = {**kwargs, "hooks": hooks}
    result = network.apply(params, *args, method=method, **kwargs)
    result, kept = (result, None) if hooks is None else result
    if channels_first:
        result = jax.tree.map(functools.partial(_move_axis, to=1), result)
    return result if hooks is None else (result, kept)


def _move_axis(x: Any, to: int) -> Any:
    """Moves the channels of images and videos from the second place to the last, or back."""
    return jnp.moveaxis(x, -to, to) if x.ndim in (4, 5) else x


def _is_network(value: Any) -> bool:
    """Returns whether the value is a network, which may be another library's."""
    return hasattr(type(value), "apply")


register(Model)


def initialize(module_class: Any, config: Any, *, seed: int = 0, dtype: Any = np.float32) -> Model:
    """Makes a model with random parameters, see `initialize_params`.

    module_class: a Flax module class, or the class of models that has it.
    """
    network = Network(module_class, config)
    return Model(network, initialize_params(network.shapes, seed=seed, dtype=dtype))


def load_network(
    path_or_repo: str | Path,
    *,
    subfolder: str | None = None,
    dtype: Any = None,
    variant: str | None = None,
    device: Any = None,
    changes: Mapping[str, Any] | None = None,
    weights: str | None = None,
    **hub: Any,
) -> Model:
    """Loads the network in a folder or Hub repository, as diffusers or transformers saved it.

    Args:
        path_or_repo: a folder that holds config.json and safetensors files (one, or several with an
            index), or a Hub repository id.
        subfolder: the folder inside it, such as "unet" for a pipeline's checkpoint.
        dtype: a name such as "bfloat16" or a JAX dtype; None keeps the file's.
        variant: a variant such as "fp16", for `diffusion_pytorch_model.fp16.safetensors`.
        device: see `Model.from_pretrained`, or a mesh over which each tensor is
            spread when it is read, see `runtime.mesh.param_sharding`.
        changes: options that replace those of the config; tensors that the network does not have
            with them are left out.
        weights: what kernels are stored as, see `Model.from_pretrained`; None for the dtype.
        **hub: revision, token, local_files_only, cache_dir: see `resolve`.

    Raises:
        ValueError: diffusax cannot read the folder or its config; says which and why.
    """
    options: dict[str, Any] = {"dtype": dtype, "variant": variant, "device": device, **hub}
    options["weights"] = weights
    return Model(*read_parameters(path_or_repo, subfolder=subfolder, changes=changes, **options))
