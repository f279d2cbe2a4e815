"""Writes LoRAs in diffusers' format and in kohya's."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from diffusax.checkpoints.lora.changes import METADATA
from diffusax.checkpoints.lora.keys import Layers, Parts, kohya_name
from diffusax.checkpoints.tensors import write_tensors

FORMATS = ("diffusers", "kohya")
"""The formats that are written."""
_KOHYA = {"down": "lora_down.weight", "up": "lora_up.weight", "mid": "lora_mid.weight"}
_PEFT = {"down": "lora_A.weight", "up": "lora_B.weight", "magnitude": "lora_magnitude_vector"}


def write_lora(
    path: Path,
    layers: Layers,
    kind: str,
    *,
    options: Mapping[str, Any] | None = None,
    encoders: int = 1,
) -> None:
    """Writes a LoRA's file; it appears only when it is whole.

    Args:
        path: the file.
        layers: the tensors by component and layer; see `find_layers`.
        kind: "diffusers" or "kohya".
        options: PEFT's options for diffusers' header, by component and name; by default those that
            the tensors' ranks and alphas stand for.
        encoders: the text encoders of the model, whose names in kohya's files follow from it.

    Raises:
        ValueError: the format has no such tensors.
    """
    if kind == "kohya":
        write_tensors(path, _to_kohya(layers, encoders))
        return
    tensors, found = _to_diffusers(layers)
    header = {"format": "pt"}
    if options or found:
        text = json.dumps(dict(options) if options else found, indent=2, sort_keys=True)
        header[METADATA] = text
    write_tensors(path, tensors, metadata=header)


def _to_kohya(layers: Layers, encoders: int) -> dict[str, np.ndarray]:
    tensors: dict[str, np.ndarray] = {}
    for (component, path), parts in layers.items():
        name = kohya_name(component, path, encoders)
        if "magnitude" in parts:
            size = parts["up"].shape[0], *(1,) * (parts["down"].ndim - 1)
            parts = {**parts, "dora_scale": parts["magnitude"].reshape(size)}
            del parts["magnitude"]
        if "down" in parts and "alpha" not in parts:
            parts = {**parts, "alpha": np.array(len(parts["down"]), np.float32)}
        tensors |= {f"{name}.{_KOHYA.get(part, part)}": x for part, x in parts.items()}
    return tensors


def _to_diffusers(layers: Layers) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Returns the tensors by PEFT's names, and PEFT's options where some alpha is not its rank."""
    tensors: dict[str, np.ndarray] = {}
    for (component, path), parts in layers.items():
        rest = set(parts) - {*_PEFT, "alpha"}
        if rest or "down" not in parts:
            raise ValueError(
                f"diffusers' format has no {', '.join(sorted(rest or parts))} ({component}'s "
                f"{path}); write kohya's"
            )
        parts = {_PEFT[part]: x for part, x in parts.items() if part != "alpha"}
        tensors |= {f"{component}.{path}.{name}": x for name, x in parts.items()}
    options: dict[str, Any] = {}
    if any("alpha" in parts for parts in layers.values()):
        for component in dict.fromkeys(component for component, _ in layers):
            # transformers has dropped the first part of CLIP's names; PEFT reads both without it.
            own = {
                path.removeprefix("text_model."): parts
                for (name, path), parts in layers.items()
                if name == component
            }
            options |= {f"{component}.{k}": v for k, v in _options(own).items()}
    return tensors, options


def _options(layers: Mapping[str, Parts]) -> dict[str, Any]:
    """Returns PEFT's LoraConfig for the layers of a component."""
    ranks = {path: len(parts["down"]) for path, parts in layers.items()}
    alphas = {
        path: float(parts["alpha"].reshape(())) if "alpha" in parts else ranks[path]
        for path, parts in layers.items()
    }
    rank, alpha = next(iter(ranks.values())), next(iter(alphas.values()))
    return {
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": {path: r for path, r in ranks.items() if r != rank},
        "alpha_pattern": {path: a for path, a in alphas.items() if a != alpha},
        "target_modules": sorted(layers),
        "use_dora": any("magnitude" in parts for parts in layers.values()),
    }
