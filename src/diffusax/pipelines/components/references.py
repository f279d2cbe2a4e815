"""What images to look at see in a pipeline, which networks and LoRAs have learned one way."""

import dataclasses
from collections.abc import Mapping
from typing import Any, get_args

from diffusax.lora.lora import Lora
from diffusax.models.network import Network
from diffusax.models.transformers.references import Layout
from diffusax.networks import Model

_SEEN = {
    "blind": "see each other alone",
    "joint": "see all tokens",
    "causal": "see what stands before them",
}


def learned_layout(network: Any) -> str | None:
    """Returns the layout by which a network of text to image has learned to look at images.

    None where it has not, or is of a family of networks that look at images anyway.
    """
    found: str | None = getattr(network.config, "references_layout", None)
    return found


def with_layout(network: Network, layout: str) -> Network:
    """Returns a network that looks at images by a layout.

    Raises:
        ValueError: there is no such layout.
    """
    if layout not in get_args(Layout):
        raise ValueError(f"references_layout must be 'blind' or 'joint' (got {layout!r})")
    config = dataclasses.replace(network.config, references_layout=layout)
    return dataclasses.replace(network, config=config)


def set_layout(parts: Any, layout: str) -> None:
    """Makes the denoiser of components look at images by a layout.

    Raises:
        ValueError: there is no such layout, or a LoRA has learned another.
    """
    name = parts.family.names("denoiser")[0]
    parts.require(name)
    model: Model = parts.models[name]
    network = with_layout(model.network, layout)
    for own, lora in parts.adapters.adapters.items():
        if lora.references_layout not in (None, layout):
            raise ValueError(
                f"references_layout must be {lora.references_layout!r} for the LoRA {own!r}, which "
                f"is loaded (got {layout!r}); delete_adapters removes it"
            )
    if network != model.network:
        parts.models[name] = model.of_network(network)
        parts.forget()


def check_layout(parts: Any, lora: Lora, source: str) -> None:
    """Raises ValueError where a LoRA has learned to look at images by another layout.

    A network of text to image whose config says no layout looks at none.

    source: what errors call the LoRA.
    """
    learned, name = lora.references_layout, parts.family.names("denoiser")[0]
    if learned is None or name not in parts.models:
        return
    config = parts.networks[name].config
    settable = hasattr(config, "references_layout")
    looks_by = getattr(parts.denoiser, "references_layout", None)
    own = config.references_layout if settable else looks_by
    if own in (None, learned):
        return
    mend = (
        f"assign pipe.references_layout = {learned!r} before it is loaded, or give from_pretrained "
        "references_layout"
        if settable and learned in get_args(Layout)
        else "load it into the model that it was trained on"
    )
    raise ValueError(
        f"{source} was trained with images to look at that {_SEEN.get(learned, learned)} "
        f"({learned}), and those of {parts.family.name} {_SEEN[own]} here ({own}); {mend}"
    )


def lora_layout(adapters: Mapping[str, Lora]) -> str | None:
    """Returns the layout by which LoRAs have learned to look at images; None where none has."""
    known = (lora.references_layout for lora in adapters.values())
    return next((layout for layout in known if layout is not None), None)
