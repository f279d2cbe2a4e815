"""Models as trees of JAX, and in the files of `jax.export` and `flax.serialization`."""

import contextlib
import dataclasses
import json
from typing import Any

import flax.serialization
import jax
import jax.export
from jax.tree_util import GetAttrKey

from diffusax.checkpoints.networks import config_of, network_of
from diffusax.models.adapters.freeu import FreeU
from diffusax.models.network import fit


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
    cache: Any = None
    """The options of a denoiser's cache of steps, if one is on."""


def register(cls: Any) -> None:
    """Makes the instances of a class pytrees, whose leaves are the parameters.

    `jax.export` and `flax.serialization` write them, too, by the class's name and the config.
    """

    def static(model: Any) -> tuple[Any, ...]:
        return model.network, *vars(model.switches).values()

    def flatten(model: Any) -> tuple[Any, Any]:
        return (model.params,), static(model)

    def flatten_with_keys(model: Any) -> tuple[Any, Any]:
        return ((GetAttrKey("params"), model.params),), static(model)

    def unflatten(own: tuple[Any, ...], children: Any) -> Any:
        return cls._holding(own[0], children[0], Switches(*own[1:]))

    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)
    # A class that is defined again, as in a notebook, has the name of the first one.
    with contextlib.suppress(ValueError):
        jax.export.register_pytree_node_serialization(
            cls,
            serialized_name=f"{cls.__module__}.{cls.__qualname__}",
            serialize_auxdata=_to_bytes,
            deserialize_auxdata=_from_bytes,
        )
    flax.serialization.register_serialization_state(
        cls,
        lambda model: flax.serialization.to_state_dict(model.params),
        lambda model, state: unflatten(static(model), (fit(model.network, state),)),
        override=True,
    )


def _to_bytes(static: tuple[Any, ...]) -> bytes:
    """Writes what is static in a model: its config and switches; no cache of steps is on in it."""
    network, tiling, freeu, *rest, _ = static
    return json.dumps([config_of(network), network.class_name, tiling, freeu, *rest]).encode()


def _from_bytes(data: bytes) -> tuple[Any, ...]:
    config, name, tiling, freeu, *rest = json.loads(data)
    options = {k: v for k, v in config.items() if k not in ("architectures", "dtype")}
    network = network_of(name, options, source="the exported function")
    return network, tiling, None if freeu is None else FreeU(*freeu), *rest, None
