"""The adapters of a run as files: where it goes on from, what it writes, and how it draws."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from diffusax.lora import (
    Layers,
    LoraFile,
    changes_of,
    find_layers,
    read_lora,
    with_alphas,
    write_lora,
)
from diffusax.lora.adapter import Adapter, adapter_of, layers_of, product_pair
from diffusax.lora.files import WEIGHT_NAME
from diffusax.lora.trained import LayerPlan, LoRA
from diffusax.models.adapters.low_rank import kernel_shapes
from diffusax.models.adapters.weight_changes import Product
from diffusax.models.network import Params

log = logging.getLogger(__name__)

KOHYA_NAME = "kohya.safetensors"
"""The name of the result in kohya's format."""
_PARTS = {"down", "up", "mid", "alpha", "magnitude", "dora_scale"}


def lora_of_file(
    path: str, networks: Mapping[str, Any], *, train_text_encoder: bool, dropout: float = 0.0
) -> LoRA:
    """Returns the adapters of a LoRA that training goes on from, of all components that it has.

    Args:
        path: a file, a folder or a Hub repository id, in any format of `load_lora_weights`.
        networks: the networks that the file may have layers of, by component.
        train_text_encoder: whether text encoders are trained. It must be so just where the file has
            layers of one.
        dropout: that of the training.

    Raises:
        ValueError: it cannot be read, does not fit the networks, has layers of text encoders that
            are not trained or none of those that are, or layers of a kind that is no product of low
            rank.
    """
    layers, file = _layers(path, networks)
    # This checks the shapes of all tensors.
    changes_of(layers, file, networks)
    found = [name for name in networks if any(name == component for component, _ in layers)]
    encoders = [name for name in found if name.startswith("text_encoder")]
    if train_text_encoder and not encoders:
        raise ValueError(
            f"{file.name} has no layers of text encoders; leave out train_text_encoder, or begin "
            "anew with lora.rank"
        )
    if encoders and not train_text_encoder:
        raise ValueError(
            f"{file.name} has layers of {' and '.join(encoders)}; give train_text_encoder, so that "
            "they are trained further"
        )
    if untrained := [name for name in networks if train_text_encoder and name not in found]:
        log.info("%s has no layers of %s to train", file.name, " and ".join(untrained))
    plans: dict[str, dict[str, LayerPlan]] = {name: {} for name in found}
    kernels = {name: kernel_shapes(networks[name]) for name in found}
    for (component, layer), parts in layers.items():
        product = {"down", "up"} <= set(parts) <= _PARTS and layer in kernels[component]
        if not product or _of_columns(parts.get("dora_scale")):
            raise ValueError(
                f"{file.name}: {component}'s {layer} has {', '.join(sorted(parts))}, which is no "
                "product of low rank beside a kernel; only such can be trained further"
            )
        plans[component][layer] = _plan(parts)
    return LoRA(plans, dropout)


def params_of_file(path: str, networks: Mapping[str, Any]) -> Params:
    """Returns the parameters of a LoRA that training goes on from, see `lora_of_file`."""
    layers, _ = _layers(path, networks)
    found: Params = {}
    for (component, layer), parts in layers.items():
        kernel = kernel_shapes(networks[component])[layer]
        product = Product(parts["down"], parts["up"], 1.0, parts.get("mid"))
        pair = map(np.ascontiguousarray, product_pair(product, kernel))
        own = dict(zip(("down", "up"), pair))
        lengths = _lengths(parts)
        if lengths is not None:
            own["magnitude"] = lengths.astype(np.float32).reshape(-1)
        found.setdefault(component, {})[layer] = own
    return found


def write_result(
    lora: LoRA,
    params: Params,
    folder: Path,
    *,
    kind: str,
    encoders: int,
    networks: Mapping[str, Any],
) -> list[Path]:
    """Writes the adapters to a folder, in diffusers' format, kohya's, or both; returns the files.

    Args:
        lora: the adapters.
        params: their parameters.
        folder: the folder.
        kind: "diffusers", "kohya" or "both".
        encoders: the number of the model's text encoders; see `write_lora`.
        networks: the model's networks by component.

    Raises:
        ValueError: the format has no such layers.
    """
    folder.mkdir(parents=True, exist_ok=True)
    names = {"diffusers": WEIGHT_NAME, "kohya": KOHYA_NAME}
    chosen = [name for name in names if kind in (name, "both")]
    layers, unet = to_layers(lora, params), None
    if "unet" in networks:
        unet = networks["unet"].config
    for name in chosen:
        write_lora(folder / names[name], layers, name, encoders=encoders, unet=unet)
    return [folder / names[name] for name in chosen]


def to_adapter(lora: LoRA, params: Params, networks: Mapping[str, Any]) -> Adapter:
    """Returns the adapters as pipelines hold them that have loaded the result's file."""
    layers = to_layers(lora, params)
    return adapter_of(changes_of(layers, LoraFile({}, {}, "the LoRA"), networks), networks)


def to_layers(lora: LoRA, params: Params) -> Layers:
    """Returns the adapters as a file has them, in PyTorch's layout."""
    found: Layers = {}
    for component, plans in lora.plans.items():
        own = {
            path: {k: np.asarray(x) for k, x in params[component][path].items()} for path in plans
        }
        pairs = {path: (layer["down"], layer["up"]) for path, layer in own.items()}
        for (_, path), parts in layers_of(component, pairs).items():
            plan, lengths = plans[path], own[path].get("magnitude")
            more = {"alpha": np.array(plan.scale * plan.rank, np.float32)}
            if lengths is not None:
                # PEFT has those of a convolution on the axis of its channels.
                ones = (1,) * (parts["down"].ndim - 2)
                more["magnitude"] = lengths.reshape(1, -1, *ones) if ones else lengths
            found[component, path] = {**parts, **more}
    return found


def _layers(path: str, networks: Mapping[str, Any]) -> tuple[Layers, LoraFile]:
    file = read_lora(path)
    return with_alphas(find_layers(file, networks), file), file


def _plan(parts: Mapping[str, np.ndarray]) -> LayerPlan:
    rank = len(parts["down"])
    alpha = float(parts["alpha"].astype(np.float32).reshape(())) if "alpha" in parts else rank
    return LayerPlan(rank, alpha / rank, _lengths(parts) is not None)


def _lengths(parts: Mapping[str, np.ndarray]) -> np.ndarray | None:
    return parts.get("magnitude", parts.get("dora_scale"))


def _of_columns(lengths: np.ndarray | None) -> bool:
    """Returns whether DoRA's lengths are those of a kernel's inputs, as some programs have it."""
    return lengths is not None and lengths.shape[0] == 1 and lengths.size > 1
