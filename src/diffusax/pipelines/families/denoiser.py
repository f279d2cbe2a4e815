"""The denoiser as the sampler calls it: a network with its conditions, and what steers it."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple, Self

import jax
import numpy as np

from diffusax.checkpoints.files import numbered
from diffusax.models.caches import Evaluation, Memory
from diffusax.models.hooks import Hooks
from diffusax.models.network import Network, Params
from diffusax.pipelines.plan.guidance import apply_guidance
from diffusax.pipelines.plan.plan import Conditions, StepInputs
from diffusax.runtime.devices.mesh import Rules, rules_below


class DenoiserInputs(NamedTuple):
    """What a denoiser is given for the branches of a batch; see `Denoiser.__call__`."""

    x: jax.Array
    timestep: jax.Array
    conditions: Conditions
    inputs: StepInputs


@dataclasses.dataclass(frozen=True)
class Denoiser:
    """A network with the ControlNets beside it. It is hashable and holds no arrays.

    A family's own says at least how the network is called. Any object with these attributes and
    methods serves.
    """

    network: Network
    """The main network."""
    controlnets: tuple[Network, ...] = ()

    component: ClassVar[str] = "transformer"
    """The main network's name among the components."""
    sample_size: ClassVar[Any]
    """A property of each family's: the rows and columns of latents that the network was trained
    at."""
    predict: ClassVar[Callable[..., jax.Array]]
    """A method of each family's (params, `DenoiserInputs`, options) -> the prediction, b h w c;
    options are the arguments of `Network.apply` that all networks of a denoiser share."""

    @classmethod
    def of(cls, networks: Mapping[str, Network]) -> Self:
        """Returns the denoiser of a checkpoint's networks, which are given by name."""
        return cls(networks[cls.component], beside(networks, "controlnet"))

    @functools.cached_property
    def components(self) -> tuple[str, ...]:
        """The names of the components whose parameters it reads, the main network's first."""
        return (self.component, *self.control_names)

    @property
    def networks(self) -> dict[str, Network]:
        """The networks by the names of their components."""
        return dict(zip(self.components, (self.network, *self.controlnets)))

    @property
    def predicting(self) -> tuple[str, ...]:
        """The names of the networks that predict, each in some of the steps.

        Where there are several, caches of steps and what they keep are dictionaries by these names.
        """
        return (self.component,)

    @functools.cached_property
    def control_names(self) -> tuple[str, ...]:
        """The names of the ControlNets among the components."""
        return numbered("controlnet", len(self.controlnets))

    @functools.cached_property
    def in_channels(self) -> int:
        """The channels of the main network's input."""
        return int(self.network.config.in_channels)

    @property
    def context_dim(self) -> int | None:
        """The width of the text embeddings; None where any width is accepted."""
        return None

    @property
    def embeds_guidance(self) -> bool:
        """Whether the guidance scale is an input of the network."""
        return False

    @property
    def references_layout(self) -> str | None:
        """Which tokens those of images to look at see, of which a LoRA must have learned the same.

        "joint" for all, "blind" for each other alone, "causal" for the text before them, too; None
        where the network looks at no images.
        """
        return None

    def guidance_inputs(self, scales: Any) -> dict[str, Any]:
        """Returns what training adds to the conditions for guidance scales, b or b 1."""
        return {}

    def targets(self, timesteps: np.ndarray, padded: int) -> np.ndarray | None:
        """Returns the timestep that each row of a run leads to; None if the network has no use.

        timesteps: those of the rows, n. padded: the rows of the result, of which later ones count
        for nothing.
        """
        return None

    @functools.cached_property
    def tensor_rules(self) -> Rules:
        """The axes of the networks' parameters, by component, that a mesh's tensor axis splits."""
        own = (rules_below(name, network.tensor_rules) for name, network in self.networks.items())
        return tuple(itertools.chain.from_iterable(own))

    def embed(
        self, params: Params, images: tuple[Any, ...], weights: Any = None
    ) -> tuple[Any, ...]:
        """Computes once per run what follows from images alone, b 1 H W c in [0, 1] each.

        Returns b 1 h w c for each ControlNet, then a tuple of such maps for each T2I-Adapter.

        weights: the weights of a adapters, b a; it is given only in calls with adapters.
        """
        return ()

    def prepare(self, params: Params, conditions: Conditions, inputs: StepInputs) -> Conditions:
        """Returns the conditions with what a run computes from them once, in its program.

        Arguments as those of a call; of the inputs there are those that are the same in all rows,
        the weights of adapters. It may return the conditions as they are.
        """
        return conditions

    def __call__(
        self,
        params: Params,
        x: jax.Array,
        timestep: jax.Array,
        conditions: Conditions,
        inputs: StepInputs | None = None,
        *,
        gradient_checkpointing: str = "none",
    ) -> jax.Array:
        """Predicts for each branch, b h w c.

        Args:
            params: the parameters by component, and in calls with some, under "adapters" the
                layers of adapters by component (`models.adapters.low_rank.Layers`), and under
                "ip_adapters" those of IP-Adapters (`models.adapters.image_prompts.ImageLayers`).
            x: b h w c, the scaled latents; b counts images times branches.
            timestep: b, of flow matching from 1000 for noise to 0.
            conditions: conditions without the axis of the branches, which is merged into the batch.
            inputs: those of one row for each entry of the batch, such as adapters: b a; None for
                none.
            gradient_checkpointing: "none", "blocks" or "full": what is computed again for
                gradients.
        """
        options = {"gradient_checkpointing": gradient_checkpointing}
        given = DenoiserInputs(x, timestep, conditions, inputs or StepInputs(None, None))
        return self.predict(params, given, options)

    def with_memory(
        self,
        params: Params,
        x: jax.Array,
        timestep: jax.Array,
        conditions: Conditions,
        inputs: StepInputs | None,
        evaluation: Evaluation,
    ) -> tuple[jax.Array, Memory]:
        """Predicts as a call by a network with a cache of steps; also returns what this keeps.

        evaluation: the cache, and what it has kept of each entry of the batch.
        """
        return self._beside(params, x, timestep, conditions, inputs, step_cache=evaluation)

    def with_hooks(
        self,
        params: Params,
        x: jax.Array,
        timestep: jax.Array,
        conditions: Conditions,
        inputs: StepInputs | None,
        hooks: Hooks,
    ) -> tuple[jax.Array, dict[str, Any]]:
        """Predicts as a call by a main network with hooks; also returns what these keep."""
        return self._beside(params, x, timestep, conditions, inputs, hooks=hooks)

    def _beside(
        self,
        params: Params,
        x: jax.Array,
        timestep: jax.Array,
        conditions: Conditions,
        inputs: StepInputs | None,
        **options: Any,
    ) -> tuple[jax.Array, Any]:
        """Predicts as a call; also returns what the network returns beside with these options."""
        network: Any = _WithOptions(self.network, options)
        given = params, x, timestep, conditions, inputs
        y = dataclasses.replace(self, network=network)(*given)
        return y, network.kept

    def guide(self, predictions: jax.Array, inputs: StepInputs) -> jax.Array:
        """Combines the predictions of the branches by guidance: b k ... -> b ..., float32.

        By default by classifier-free guidance or InstructPix2Pix's; see `apply_guidance`.
        """
        return apply_guidance(predictions, inputs.weights, inputs.rescale)


class _WithOptions:
    """A network that returns a pair with some options, which denoisers call as the network."""

    def __init__(self, network: Network, options: Mapping[str, Any]):
        self._network: Any = network
        self._options = options
        self.kept: Any = None
        """The second of the pair, once the network was called."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network, name)

    def apply(self, params: Params, *args: Any, **kwargs: Any) -> Any:
        options = {**kwargs, **self._options}
        result, self.kept = self._network.apply(params, *args, **options)
        return result


def beside(networks: Mapping[str, Network], name: str) -> tuple[Network, ...]:
    """Returns the networks of a numbered role in order: controlnet, controlnet_1 and so on."""
    return tuple(networks[n] for n in numbered(name, len(networks)) if n in networks)
