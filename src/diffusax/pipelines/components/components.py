"""The components of a pipeline, as tasks and training use them."""

import contextlib
import copy
import dataclasses
import functools
import weakref
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, SingleDeviceSharding

from diffusax.models.adapters.freeu import FreeU
from diffusax.models.autoencoders.latents import LatentFormat
from diffusax.models.autoencoders.pixels import pixels
from diffusax.models.network import Network, Params, fit
from diffusax.models.parameter_tree import first_parameter
from diffusax.networks import Model
from diffusax.pipelines.components.adapters import ROLES, AdapterStore
from diffusax.pipelines.components.ip_adapters import IPAdapterStore
from diffusax.pipelines.components.offload import Offload, Stay
from diffusax.pipelines.families.family import NUMBERED_ROLES, Denoiser, Family, Role
from diffusax.pipelines.families.placement import (
    device_of,
    for_devices,
    param_places,
    put_params,
    put_streamed,
    to_host,
)
from diffusax.pipelines.plan.plan import Decoding
from diffusax.runtime.devices.host import first_place, in_host_memory
from diffusax.runtime.devices.layouts import in_order
from diffusax.samplers.processes import Kind, check_process

_DERIVED = (
    *("adaptable", "denoiser", "local_mesh", "context_dim", "text_encoders"),
    *("autoencoder_name", "autoencoder", "latents", "decoding", "_fitting"),
)
"""The cached properties that follow from models, tokenizers and mesh alone, and hold no arrays."""


@dataclasses.dataclass
class Components:
    """The models, tokenizers and scheduler of a pipeline, by their names in the checkpoint.

    Properties that are derived from models and tokenizers are cached; call `forget` after changing
    one of these.
    """

    family: Family
    models: dict[str, Model]
    params: dict[str, Params]
    """The models' parameters by component."""
    tokenizers: dict[str, Any]
    """The tokenizers, and the processor of an image encoder's images, by component."""
    scheduler: Any
    options: dict[str, Any]
    mesh: Mesh | None = None
    """The mesh of devices over which parameters and batches are split; None for a single device."""
    encoder_mesh: Mesh | None = None
    """The devices of the text encoders, where they are others than those of the other components;
    None for the same."""
    process: Kind | None = None
    """The process that the networks were trained with, from the scheduler that they came with; None
    where it is not known."""
    text_cache: Any = None
    """A cache of encoded texts, a `TextCache`; None to encode all texts of a call together."""
    encoded: Any = None
    """The embeddings of all texts that calls may have, an `EncodedTexts`, where `encode_first` has
    freed the text encoders; None with text encoders."""
    adapters: AdapterStore = dataclasses.field(default_factory=AdapterStore)
    """The adapters that calls may name."""
    fused: dict[str, Any] = dataclasses.field(default_factory=dict)
    """What adapters were merged into each component, a `Fused`."""
    offload: Offload | None = None
    """What stays in the host's memory; None where all is on the devices."""
    ip_adapters: IPAdapterStore = dataclasses.field(default_factory=IPAdapterStore)
    """The IP-Adapters that are loaded."""
    latent_config: Any = None
    """The config of an autoencoder that was taken out, which still says what latents are."""

    @classmethod
    def of(
        cls, family: Family, networks: Mapping[str, Network], params: dict[str, Params], **rest: Any
    ) -> "Components":
        """Returns components for networks whose parameters, or shapes, are given separately."""
        models = {name: Model(net, params.get(name)) for name, net in networks.items()}
        return cls(family, models, params, **rest)

    def forget(self) -> None:
        """Clears the cached properties, after models or tokenizers have changed."""
        for name in [n for n in vars(self) if n not in self.__dataclass_fields__]:
            del vars(self)[name]

    def copied(self) -> "Components":
        """Returns components that share all arrays and adapters, and are assigned apart."""
        new = dataclasses.replace(self, params={}, tokenizers=dict(self.tokenizers))
        new.models = {n: model.bound_to(new.params, n) for n, model in self.models.items()}
        new.options, new.fused = dict(self.options), dict(self.fused)
        return new

    def variant(self, **changes: Any) -> "Components":
        """Returns components with the same networks, and other values of some fields.

        What follows from the networks is computed once, for all variants.
        """
        new = dataclasses.replace(self, **changes)
        for name in _DERIVED:
            # Where there is none, this is an error of the call that needs it.
            with contextlib.suppress(ValueError):
                vars(new)[name] = getattr(self, name)
        return new

    def snapshot(self, **changes: Any) -> "Components":
        """Returns a variant of which later changes of these are no concern; arrays are shared."""
        own: dict[str, Any] = {"params": {}, "tokenizers": dict(self.tokenizers)}
        own |= {"adapters": self.adapters.snapshot(), "ip_adapters": self.ip_adapters.snapshot()}
        new = self.variant(**own, **changes)
        new.models = {n: model.bound_to(new.params, n) for n, model in self.models.items()}
        return new

    def __getstate__(self) -> dict[str, Any]:
        """Returns what a pickle holds: no devices, on which `spread_over` puts the pipeline again.

        What is computed from the components is left out.
        """
        return {**self._fields(), "mesh": None, "encoder_mesh": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> "Components":
        """Returns components with arrays of their own, on the same devices."""
        memo |= {id(mesh): mesh for mesh in (self.mesh, self.encoder_mesh)}
        new = object.__new__(type(self))
        memo[id(self)] = new
        new.__setstate__(copy.deepcopy(self._fields(), memo))
        return new

    def _fields(self) -> dict[str, Any]:
        return {name: vars(self)[name] for name in self.__dataclass_fields__}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.models = {n: model.bound_to(self.params, n) for n, model in self.models.items()}

    def require(self, *names: str) -> None:
        """Raises ValueError where a component that a call needs is not there."""
        for name in names:
            if name in self.models:
                continue
            if name != self.family.scheduler_name or self.scheduler is None:
                raise ValueError(
                    f"this pipeline has no {name}, which was loaded as None or taken out; assign "
                    f"one, pipe.{name} = ..., or load the pipeline with it"
                )

    @property
    def networks(self) -> dict[str, Network]:
        """The networks of the models."""
        return {name: model.network for name, model in self.models.items()}

    @functools.cached_property
    def adaptable(self) -> dict[str, Network]:
        """The networks that take adapters, by component; see `adaptable_networks`."""
        return {name: n for name, n in self.networks.items() if self.family.role(name) in ROLES}

    @property
    def controlnets(self) -> list[str]:
        """The names of the ControlNets, in order."""
        return self.of_role("controlnet")

    def of_role(self, role: Role) -> list[str]:
        """Returns the names of the models with a role, in order."""
        return [name for name in self.models if self.family.role(name) == role]

    @functools.cached_property
    def denoiser(self) -> Denoiser:
        """The denoiser that the sampler calls: the main network and those that steer it.

        Raises:
            ValueError: the main network was taken out.
        """
        self.require(self.family.names("denoiser")[0])
        roles = ("denoiser", *NUMBERED_ROLES)
        return self.family.denoiser(
            {k: net for k, net in self.networks.items() if self.family.role(k) in roles}
        )

    @property
    def fitting_scheduler(self) -> Any:
        """The scheduler, which is for these networks, without the state of a loop by hand.

        Calls make their schedules by it.

        Raises:
            ValueError: there is none, or the networks were trained with another process.
        """
        if self.scheduler is None:
            self.require(self.family.scheduler_name)
        found = self._fitting.get(self.scheduler)
        if found is None:
            # CosXL is trained as EDM is, and its checkpoints may come with any scheduler.
            if self.process is not None and not self.options.get("is_cosxl_edit"):
                name = f"scheduler={self.scheduler.class_name}"
                check_process(name, self.scheduler, self.process)
            found = self._fitting[self.scheduler] = self.scheduler.without_run()
        return found

    @functools.cached_property
    def _fitting(self) -> weakref.WeakKeyDictionary[Any, Any]:
        """The schedulers that were found to fit, without the state of a loop by hand."""
        return weakref.WeakKeyDictionary()

    @functools.cached_property
    def local_mesh(self) -> Mesh | None:
        """The part of the mesh that belongs to this process."""
        return None if self.mesh is None else self.mesh.local_mesh

    @property
    def denoiser_params(self) -> dict[str, Params]:
        """The parameters that `denoiser` reads, by component."""
        params = self.params
        return {name: params[name] for name in self.denoiser.components}

    def placed(self, name: str, params: Params) -> Params:
        """Returns a component's parameters where they stay between calls, checked.

        Raises:
            ValueError: they are not its network's; names the first that is wrong.
        """
        # Text encoders that were freed have none.
        if params or self.params.get(name):
            params = self.fitted(name, params)
        stay, mesh = self.stay(name), self.mesh_for(name)
        streams = self.offload is not None and self.offload.method != "model"
        streams = streams or any(map(in_host_memory, jax.tree.leaves(params)))
        if mesh is not None and stay != "turn" and not streams:
            return self._on_mesh(mesh, name, params)
        params = self._for_devices(name, params)
        if stay == "turn":
            return to_host(params, self._place(name, params))
        if streams:
            return put_streamed(params, self._place(name, params), stay)
        return in_order(params)

    def fitted(self, name: str, params: Params) -> Params:
        """Returns a component's parameters in its network's form, see `models.network.fit`."""
        try:
            return fit(self.models[name].network, params)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None

    def mesh_for(self, name: str) -> Mesh | None:
        """Returns the mesh that a component belongs to; None for a single device."""
        encodes = self.family.role(name) == "text_encoder"
        return self.encoder_mesh if encodes and self.encoder_mesh is not None else self.mesh

    def stay(self, name: str) -> Stay:
        """Returns where a component's parameters are between calls."""
        if self.offload is None:
            return "device"
        return self.offload.stay(name, self.family.role(name), self.models[name].network)

    def _place(self, name: str, params: Params) -> Any:
        """Returns the place on the devices of each of a component's parameters, or of all."""
        if (mesh := self.mesh_for(name)) is not None:
            return param_places(mesh, self.family.role(name), self.models[name].network, params)
        if self.offload is not None and self.offload.device is not None:
            return SingleDeviceSharding(self.offload.device)
        return device_of(params) or device_of(self.denoiser_params) or first_place()

    def ready(self, name: str) -> Params:
        """Returns a component's parameters as its programs take them.

        Those that come for their turn are copied to its devices.
        """
        params = self.params[name]
        if not on_host(params):
            return params
        if (mesh := self.mesh_for(name)) is not None:
            return self._on_mesh(mesh, name, params)
        return in_order(jax.device_put(params, device_of(self.denoiser_params)))

    def _for_devices(self, name: str, params: Params) -> Params:
        """Returns a component's parameters in the order of its devices, wherever they lie."""
        role, network = self.family.role(name), self.models[name].network
        return for_devices(self.mesh_for(name), role, network, params)

    def _on_mesh(self, mesh: Mesh, name: str, params: Params) -> Params:
        return put_params(mesh, self.family.role(name), self.models[name].network, params)

    @property
    def freeu(self) -> FreeU | None:
        """The numbers of FreeU where the denoiser runs with it, else None."""
        return self.models[self.denoiser.components[0]].switches.freeu

    @property
    def step_cache(self) -> Any:
        """The cache of steps with which the denoiser runs, as data of a plan; None without one.

        Of a denoiser with several networks that predict, the caches of those with one, by name.
        """
        names = self.denoiser.predicting
        configs = {name: self.models[name].switches.cache for name in names}
        found = {name: own.method() for name, own in configs.items() if own is not None}
        return found if found and len(names) > 1 else found.get(names[0])

    @property
    def dtype(self) -> Any:
        """The dtype of the denoiser's parameters; without it, of the first network's."""
        return self.first_leaf.dtype

    @property
    def first_leaf(self) -> Any:
        """A parameter of the denoiser; without it, of the first network.

        Raises:
            ValueError: there is no network.
        """
        denoiser = self.family.names("denoiser")[0]
        first = [self.params[denoiser]] if denoiser in self.params else self.params.values()
        leaf = first_parameter(list(first))
        if leaf is None:
            self.require(denoiser)
        return leaf

    @functools.cached_property
    def context_dim(self) -> int | None:
        """The width of the text embeddings; None where any is accepted, and without a denoiser."""
        there = self.family.names("denoiser")[0] in self.models
        return self.denoiser.context_dim if there else None

    @functools.cached_property
    def text_encoders(self) -> list[tuple[Any, Network, str]]:
        """The tokenizer, the network and the name of each text encoder that is loaded.

        Raises:
            ValueError: there is none; embeddings must be given then.
        """
        found = [
            (self.tokenizers[encoder.tokenizer], self.models[encoder.name].network, encoder.name)
            for encoder in self.family.text_encoders
            if encoder.name in self.models and encoder.tokenizer in self.tokenizers
        ]
        if not found:
            raise ValueError(
                "this pipeline has no text encoder; give prompt_embeds and, with guidance, "
                "negative_prompt_embeds"
            )
        return found

    @functools.cached_property
    def autoencoder_name(self) -> str | None:
        """The autoencoder's name among the components; None where the denoiser works on pixels."""
        return next(iter(self.family.names("autoencoder")), None)

    @functools.cached_property
    def autoencoder(self) -> Network:
        """The autoencoder's network; a family without one has one that leaves pixels as they are.

        Raises:
            ValueError: the autoencoder was taken out.
        """
        if self.autoencoder_name is None:
            return pixels(self.denoiser.in_channels)
        self.require(self.autoencoder_name)
        return self.networks[self.autoencoder_name]

    @property
    def autoencoder_params(self) -> Params:
        """The autoencoder's parameters, on its devices (see `ready`); empty without one."""
        return {} if self.autoencoder_name is None else self.ready(self.autoencoder_name)

    @property
    def autoencoder_model(self) -> Model:
        """The autoencoder.

        Raises:
            ValueError: there is none.
        """
        if self.autoencoder_name is None:
            raise ValueError(
                f"{self.family.name} has no autoencoder, as its networks work on pixels; leave out "
                "what concerns one, such as enable_vae_tiling"
            )
        self.require(self.autoencoder_name)
        return self.models[self.autoencoder_name]

    @property
    def tiled(self) -> bool:
        """Whether the autoencoder is set to decode and encode large images in tiles."""
        model = self.models.get(self.autoencoder_name or "")
        return model is not None and model.switches.tiling

    @functools.cached_property
    def latents(self) -> LatentFormat:
        """The format of the latents: channels, pixels per latent, and options of their decoding."""
        if self.autoencoder_name in (None, *self.models):
            return self.family.latents(self.autoencoder.config)
        config = self.latent_config or self.family.usual_autoencoder
        return self.family.latents(self.autoencoder.config if config is None else config)

    @functools.cached_property
    def default_size(self) -> tuple[int, int]:
        """The height and width in pixels that the denoiser was trained at."""
        rows, columns = self.denoiser.sample_size
        return rows * self.latents.factor, columns * self.latents.factor

    @functools.cached_property
    def decoding(self) -> Decoding:
        """The options of the decoder."""
        return Decoding(self.latents.upcast, self.latents.normalize)


def on_host(params: Params) -> bool:
    """Returns whether parameters lie in the host's memory, as NumPy arrays."""
    return isinstance(next(iter(jax.tree.leaves(params)), None), np.ndarray)


class MultiControlNetModel:
    """Several ControlNets, whose residuals are added up."""

    def __init__(self, nets: Any):
        self.nets = list(nets)

    def __repr__(self) -> str:
        return f"MultiControlNetModel({self.nets})"
