"""A network as a pure function of (parameters, inputs), and a network with its parameters."""

import dataclasses
import functools
import math
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from diffusax.boundary.messages import NETWORK, hinting
from diffusax.boundary.tensors import for_reader
from diffusax.models.adapters.freeu import FreeU, check_freeu
from diffusax.models.adapters.image_prompts import ImagePrompts, attach_images
from diffusax.models.adapters.low_rank import Attachable, attach, layer_at
from diffusax.models.layers.rngs import ShapeRngs
from diffusax.models.module_methods import ModuleMethods
from diffusax.models.parameter_tree import fitted_tree
from diffusax.runtime.devices.mesh import Rule, Rules, counted_rules
from diffusax.runtime.programs.program import Program
from diffusax.runtime.switches import in_auto_axes, standard_promotion, under_own_switches

Params = Any
"""A plain nested dict of arrays, keyed by the names in the checkpoint (list indices are ints)."""


@dataclasses.dataclass(frozen=True)
class Network:
    """A class of networks at one configuration: static, hashable and without arrays.

    Compiled programs take it as a static argument, so that all checkpoints of one architecture
    share them. A network from elsewhere (PyTorch through torchax) has the same attributes.
    """

    module_class: Any
    """A Flax NNX module class with a `config_class`."""
    config: Any
    """The network's options, a frozen dataclass."""

    @property
    def class_name(self) -> str:
        """The name in the checkpoint, which is diffusers' or transformers' own."""
        return self.module_class.__name__

    @property
    def tensor_rules(self) -> Rules:
        """The rules by which a mesh's tensor axis splits the parameters."""
        return counted_tensor_rules(self.module_class, self.config)

    @property
    def adapter_groups(self) -> tuple[str, ...]:
        """Regular expressions for the layers that adapters mostly change, the fewest first."""
        return getattr(self.module_class, "adapter_groups", ())

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
        **kwargs: Any,
    ) -> Any:
        """Calls the named method of the network with these parameters, and with adapters, if any.

        adapters: LoRAs of any network, or those in training. image_prompts: IP-Adapters of a UNet
        and their images. context_keys: the keys and values of the context that were computed
        before, see `context_keys.project_context`.

        Raises:
            ValueError: the parameters are not the network's, adapters have a layer that it lacks,
                or not as many rows of weights as the inputs have.
        """
        with standard_promotion():
            run = functools.partial(self._apply, method)
            beside = adapters, image_prompts, context_keys
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
    ) -> Any:
        module = self.module(params)
        if adapters is not None:
            attach(module, adapters)
        if image_prompts is not None:
            attach_images(module, image_prompts)
        for path, own in (context_keys or {}).items():
            # An attribute of this trace's module alone, which is no part of Flax's state.
            object.__setattr__(layer_at(module, path), "keys_values", own)
        return getattr(module, method)(*args, **kwargs)

    def module(self, params: Params) -> Any:
        """Returns the Flax module with these parameters.

        Raises:
            ValueError: the parameters are not the network's; see `fitted`.
        """
        graphdef, _ = _abstract(self.module_class, self.config)
        return nnx.merge(graphdef, self.fitted(params))

    def fitted(self, params: Params) -> Params:
        """Returns parameters in the network's own form, see `parameter_tree.fitted_tree`.

        Raises:
            ValueError: one is missing, unexpected, or of another shape; names it.
        """
        return fitted_tree(self.shapes, params, self.class_name)


_CALLS = {"__call__", "encode", "decode"}
"""The methods of models in which a network is called."""


@dataclasses.dataclass
class Switches:
    """The features of a model that can be turned on and off."""

    tiling: bool = False
    """Whether an autoencoder decodes images larger than its sample_size in tiles."""
    freeu: FreeU | None = None
    """The numbers of a UNet's FreeU, if it is on."""
    own_rows: int | None = None
    """The rows of a text encoder's table of embeddings before it grew; None if it has not grown."""
    trainable: bool = True
    """Whether `requires_grad_` says that the model is to be trained."""


@hinting(NETWORK)
class Model(ModuleMethods):
    """A network with its parameters, which is loaded, saved and put into a pipeline.

    It is called as diffusers' and transformers' models are, with images and latents b c h w; what a
    network takes and returns is in `diffusax.models.calls`. `run` is the compiled network as its
    module in `diffusax.models` is called: images and latents b h w c, outputs of text encoders
    b s d, tokens b t. Another layout is an error if its shape shows it; latents of eight channels
    and 8x8 look alike in both.

    Attributes:
        network: the static description.
        params: the parameters. A pipeline's model keeps them in `pipe.params`.
        switches: tiling, FreeU, and the growth of a text encoder's table.
    """

    kinds: ClassVar[dict[str, type["Model"]]] = {}
    """The subclass for each network that is called as in diffusers, by the network's class."""
    class_names: ClassVar[tuple[str, ...]] = ()
    """The classes of networks that a subclass is for."""

    def __init_subclass__(cls) -> None:
        Model.kinds.update(dict.fromkeys(cls.class_names, cls))
        for name in _CALLS & vars(cls).keys():
            setattr(cls, name, under_own_switches(vars(cls)[name]))

    def __new__(cls, network: Any = None, *_: Any, **__: Any) -> "Model":
        """Makes an instance of the subclass for the network."""
        kind = Model.kinds.get(getattr(network, "class_name", ""), cls) if cls is Model else cls
        return super().__new__(kind)

    def __init__(self, network: Network, params: Params, *, switches: Switches | None = None):
        """Makes a model of a network and its parameters; of None or {}, one without any.

        Raises:
            ValueError: the parameters are not the network's; names the first that is wrong.
        """
        self.network, self.switches = network, switches or Switches()
        params = fit(network, params) if params else params
        self._store, self._name = {"params": params}, "params"

    def __getstate__(self) -> dict[str, Any]:
        """Returns what a copy or a file of the model holds: its parameters, and no pipeline's."""
        return {"network": self.network, "switches": self.switches, "params": self.params}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["network"], state["params"], switches=state["switches"])  # type: ignore[misc]

    def bound_to(self, store: dict[str, Params], name: str) -> "Model":
        """Returns a model of the same network that keeps its parameters in `store[name]`."""
        store[name] = self.params
        model = Model(self.network, None, switches=dataclasses.replace(self.switches))
        model._store, model._name = store, name
        return model

    def keep_params(self) -> None:
        """Makes the model keep its parameters itself, whatever happens to a store that had them."""
        self._store, self._name = {"params": self.params}, "params"

    @property
    def params(self) -> Params:
        """The parameters, a nested dict of arrays.

        What is assigned is checked, and may have texts such as "10" as indices of lists.
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
        leaves = jax.tree_util.tree_leaves_with_path(self.params)
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
        return for_reader(jax.tree.leaves(self.params)[0].dtype)

    @property
    def device(self) -> Any:
        """The device of the parameters, the first one of several; see `for_reader`."""
        devices = jax.tree.leaves(self.params)[0].devices()
        return for_reader(min(devices, key=lambda device: device.id))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the network as diffusers or transformers does; see `diffusax.models.calls`.

        A network that has no such call there runs as `run` does.
        """
        return self.run(*args, **kwargs)

    @property
    def is_double(self) -> bool:
        """Whether the parameters are of 64 bits."""
        return any(leaf.dtype == np.float64 for leaf in jax.tree.leaves(self.params)[:1])

    @under_own_switches
    def run(
        self, *args: Any, method: str = "__call__", channels_first: bool = False, **kwargs: Any
    ) -> Any:
        """Runs a method of the network on arrays, compiled.

        Args:
            *args: the method's arguments.
            method: the name of the module's method.
            channels_first: whether images and latents, which are all arrays of four axes, come and
                go as b c h w instead of b h w c.
            **kwargs: the method's arguments by name.

        Raises:
            ValueError: an array does not have the shape that the network takes.
        """
        if self.switches.freeu is not None and method == "__call__":
            kwargs = {"freeu": np.array(self.switches.freeu, np.float32), **kwargs}
        return _apply(self.network, self.params, method, channels_first, args, kwargs)

    def to(self, *args: Any, dtype: Any = None, **_: Any) -> "Model":
        """Returns the model itself, cast if a floating-point dtype is given.

        Devices are accepted and change nothing: JAX has placed the parameters already.
        """
        dtypes = [dtype, *args]
        found = next((d for d in map(floating_dtype, dtypes) if d is not None), None)
        if found is not None:
            self.params = cast_params(self.params, found)
        return self

    def enable_tiling(self) -> None:
        """Makes an autoencoder take images larger than its sample_size in overlapping tiles.

        AutoencoderKL and AutoencoderKLFlux2 encode and decode in tiles, the others decode.
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
        if self.class_name != "UNet2DConditionModel":
            raise ValueError(f"FreeU is for a UNet2DConditionModel, not for a {self.class_name}")
        self.switches.freeu = check_freeu(s1, s2, b1, b2)

    def disable_freeu(self) -> None:
        """Runs the UNet without FreeU."""
        self.switches.freeu = None

    def __repr__(self) -> str:
        if not jax.tree.leaves(self.params):
            return f"{self.class_name}(without parameters)"
        size = f"{self.num_params / 1e6:.1f} M parameters"
        return f"{self.class_name}({size}, {self.dtype})"


@functools.partial(Program, static=("network", "method", "channels_first"))
def _apply(
    network: Network, params: Params, method: str, channels_first: bool, args: Any, kwargs: Any
) -> Any:
    if not channels_first:
        return network.apply(params, *args, method=method, **kwargs)
    args, kwargs = jax.tree.map(functools.partial(_transpose, axes=(0, 2, 3, 1)), (args, kwargs))
    result = network.apply(params, *args, method=method, **kwargs)
    return jax.tree.map(functools.partial(_transpose, axes=(0, 3, 1, 2)), result)


def _transpose(x: Any, axes: tuple[int, ...]) -> Any:
    return x.transpose(axes) if len(x.shape) == len(axes) else x


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
    graphdef, state = nnx.split(module_class(config, rngs=ShapeRngs()))
    return graphdef, nnx.to_pure_dict(state)


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
        lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, params
    )


def cast_shapes(params: Params, dtype: Any) -> Params:
    """Returns the shapes of the result of `cast_params`; parameters may be shapes."""
    return jax.eval_shape(lambda tree: cast_params(tree, dtype), params)


def initialize(
    module_class: type[nnx.Module], config: Any, *, seed: int = 0, dtype: Any = np.float32
) -> Model:
    """Makes a model with random parameters, see `initialize_params`."""
    network = Network(module_class, config)
    return Model(network, initialize_params(network.shapes, seed=seed, dtype=dtype))


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
        if kind in ("scale", "bias", "running_mean", "running_var"):
            return jnp.full(leaf.shape, kind in ("scale", "running_var"), dtype)
        deviation = 0.02 if kind.endswith("embedding") else math.prod(leaf.shape[:-1]) ** -0.5
        if len(path) > 1 and path[-2].key in zero:
            deviation = 0.0
        return jnp.asarray(rng.standard_normal(leaf.shape, np.float32) * deviation, dtype)

    return jax.tree_util.tree_map_with_path(draw, shapes)


@functools.lru_cache(64)
def counted_tensor_rules(module_class: Any, config: Any) -> Rules:
    """Returns the rules of a class of networks with the heads that its layers have by a config.

    Heads that the devices do not divide are not cut: their projections stay whole on each device,
    because a head's channels would have to be gathered again before they can be used.
    """
    rules: Rules = getattr(module_class, "tensor_rules", ())
    pieces = {rule.pieces for rule in rules if isinstance(rule, Rule)}
    names = sorted(name for name in pieces if isinstance(name, str))
    if not names:
        return rules
    counts: dict[str, dict[str, int]] = {name: {} for name in names}
    for path, layer in nnx.iter_modules(module_class(config, rngs=ShapeRngs())):
        for name in names:
            if hasattr(layer, name):
                counts[name][".".join(map(str, path))] = getattr(layer, name)
    return counted_rules(rules, counts)
