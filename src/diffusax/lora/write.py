"""Writes LoRAs in diffusers' format, and with the names of the original code in kohya's and
ComfyUI's, which ai-toolkit writes, too.

Layers that are one in the original code get A's below each other, and B's in blocks along the
diagonal.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from diffusax.checkpoints.original.flux import FLUX, FLUX2, FLUX3
from diffusax.checkpoints.original.krea2 import KREA2
from diffusax.checkpoints.original.layout import named
from diffusax.checkpoints.original.unet import unet_names
from diffusax.checkpoints.original.wan import WAN_VACE
from diffusax.checkpoints.tensors import write_tensors
from diffusax.lora.files import LAYOUT, METADATA, ROWS, FileLayers, Parts
from diffusax.lora.keys import KOHYA
from diffusax.models.unet.unet import UNet2DConditionConfig

_SWAPPED = (*FLUX.swapped, *FLUX3.swapped)
# Other models have double blocks, and single blocks without feed-forward layers of their own.
_ONLY_FLUX3 = re.compile(
    r"mode_blocks|_modulations|single_transformer_blocks\.\d+\.(ff|.*to_out\.0)"
)

_KOHYA = {"down": "lora_down.weight", "up": "lora_up.weight", "mid": "lora_mid.weight"}
_COMFYUI = {"down": "lora_A.weight", "up": "lora_B.weight", "magnitude": "dora_scale"}
_KOHYA_MODELS = {768: "sd_v1", 1024: "sd_v2", 2048: "sdxl_base_v1-0"}
"""What sd-scripts calls a model (`ss_base_model_version`), by the width of its texts."""
_EMBEDDINGS = ("token_embedding", "position_embedding", "embed_tokens", "shared")
"""The ends of the names of tables, whose products PEFT has under names of its own."""
_PEFT = {
    "down": "lora_A.weight",
    "up": "lora_B.weight",
    "bias": "lora_B.bias",
    "magnitude": "lora_magnitude_vector",
}

_MLP = "proj_mlp"
"""The layer that has four outputs where others, with which it is one, have one."""


def write_lora(
    path: Path,
    layers: FileLayers,
    kind: str,
    *,
    options: Mapping[str, Any] | None = None,
    encoders: int = 1,
    unet: UNet2DConditionConfig | None = None,
    transformer: str | None = None,
    references_layout: str | None = None,
) -> None:
    """Writes a LoRA's file; it appears only when it is whole.

    Args:
        path: the file.
        layers: the tensors by component and layer; see `find_layers`.
        kind: "diffusers", "kohya" or "comfyui". Where the layers tell the model, a file of kohya's
            has the header by which A1111 and others know it, rank and alpha. Layers of FLUX, Krea
            2, Wan and SDXL get the names of the original code in it and in ComfyUI's.
        options: PEFT's options for diffusers' header, by component and name; by default those that
            the tensors' ranks and alphas stand for.
        encoders: the text encoders of the model, whose names in kohya's files follow from it.
        unet: the config of the model's UNet, by which layers of SDXL's are known.
        transformer: the class of the model's transformer, by which layers of Krea 2's and Wan's
            are known.
        references_layout: the layout by which the LoRA has learned to look at images, which the
            header says then; None where it has not.

    Raises:
        ValueError: the format has no such tensors.
    """
    own = {} if references_layout is None else {LAYOUT: references_layout}
    if kind != "diffusers":
        _check_own(layers)
        layers = _with_original_names(layers, unet, transformer)
    if kind == "comfyui":
        write_tensors(path, _to_comfyui(layers), metadata={"format": "pt", **own})
        return
    if kind == "kohya":
        header = {**(_kohya_header(layers, encoders) or {}), **own}
        write_tensors(path, _to_kohya(layers, encoders), metadata=header or None)
        return
    tensors, found = _to_diffusers(layers)
    header = {"format": "pt", **own}
    if options or found:
        text = json.dumps(dict(options) if options else found, indent=2, sort_keys=True)
        header[METADATA] = text
    write_tensors(path, tensors, metadata=header)


def _check_own(layers: FileLayers) -> None:
    for (component, path), parts in layers.items():
        if "bias" in parts:
            raise ValueError(
                f"kohya's format has no bias of B ({component}'s {path}); write diffusers'"
            )
        if ROWS in parts:
            raise ValueError(
                f"{component}'s {path} has a part of a LoHa or LoKr of several layers, which is "
                "none of its own; keep the file as it is"
            )


def _to_kohya(layers: FileLayers, encoders: int) -> dict[str, np.ndarray]:
    tensors: dict[str, np.ndarray] = {}
    for (component, path), parts in layers.items():
        name = _kohya_name(component, path, encoders)
        if "magnitude" in parts:
            size = parts["up"].shape[0], *(1,) * (parts["down"].ndim - 1)
            parts = {**parts, "dora_scale": parts["magnitude"].reshape(size)}
            del parts["magnitude"]
        if "down" in parts and "alpha" not in parts:
            parts = {**parts, "alpha": np.array(len(parts["down"]), np.float32)}
        tensors |= {f"{name}.{_KOHYA.get(part, part)}": x for part, x in parts.items()}
    return tensors


def _to_comfyui(layers: FileLayers) -> dict[str, np.ndarray]:
    tensors: dict[str, np.ndarray] = {}
    for (component, path), parts in layers.items():
        if component != "transformer":
            raise ValueError(
                f"ComfyUI's format is written for transformers alone, and there are layers of "
                f"{component}; write kohya's"
            )
        names = {part: _COMFYUI.get(part, part) for part in parts}
        tensors |= {f"diffusion_model.{path}.{names[part]}": x for part, x in parts.items()}
    return tensors


def _kohya_name(component: str, path: str, encoders: int) -> str:
    """Returns the name of a layer in kohya's files, in diffusers' layout.

    encoders: the text encoders of the model; the only one is not numbered.

    Raises:
        ValueError: kohya's files have no such component.
    """
    if component not in KOHYA:
        raise ValueError(f"kohya's files have no layers of {component}")
    numbered = component == "text_encoder" and encoders > 1
    if component == "text_encoder_2":
        numbered = path.startswith("encoder.block.")  # T5's
    return KOHYA[component][numbered] + path.replace(".", "_")


def _with_original_names(
    layers: FileLayers,
    unet: UNet2DConditionConfig | None = None,
    transformer: str | None = None,
) -> FileLayers:
    """Returns the layers of a LoRA, of which those of FLUX, Krea 2, Wan and SDXL have the original
    code's names. Those of Stable Diffusion 1 and 2 have diffusers' in kohya's scripts, too, and
    those of Z-Image in ai-toolkit.

    unet, transformer: see `write_lora`.

    Raises:
        ValueError: layers that are one in the original code have more than A, B and alpha.
    """
    paths = [path for component, path in layers if component == "transformer"]
    modules = _modules(paths, transformer)
    found = {key: parts for key, parts in layers.items() if key[0] != "transformer"}
    names = _names_of_sdxl(unet)
    found = {(c, names.get(p, p) if c == "unet" else p): parts for (c, p), parts in found.items()}
    known = {path for own in modules.values() for path in own}
    found |= {("transformer", p): layers["transformer", p] for p in paths if p not in known}
    for name, own in modules.items():
        there = {p: layers["transformer", p] for p in own if ("transformer", p) in layers}
        parts = there[own[0]] if len(own) == 1 else _joined(own, there)
        found["transformer", name] = _swapped(parts) if name in _SWAPPED else parts
    return found


def _modules(paths: Sequence[str], transformer: str | None) -> dict[str, tuple[str, ...]]:
    """Returns the paths of a transformer's layers by their names in the original code."""
    if transformer == "Krea2Transformer2DModel":
        return named(KREA2.modules, paths)
    if transformer in ("WanTransformer3DModel", "WanVACETransformer3DModel"):
        return named(WAN_VACE.modules, paths)
    if any(_ONLY_FLUX3.search(path) for path in paths):
        return named(FLUX3.modules, paths)
    return named(FLUX.modules, paths) | named(FLUX2.modules, paths)


def _names_of_sdxl(unet: UNet2DConditionConfig | None) -> dict[str, str]:
    """Returns the original names by those of diffusers; none for a UNet that is not as SDXL's.

    diffusers reads original names only where all levels have as many layers.
    """
    if unet is None or unet.addition_embed_type != "text_time":
        return {}
    if len(set(unet.per_level("layers_per_block"))) > 1:
        return {}
    return {path: name for name, path in unet_names(unet).items()}


def _joined(paths: Sequence[str], layers: Mapping[str, Parts]) -> Parts:
    """Returns the tensors of layers in one, of which some may have no adapter."""
    for path, parts in layers.items():
        if set(parts) - {"alpha"} != {"down", "up"}:
            raise ValueError(
                f"kohya's files have {path} in one layer with others, for which there is no "
                f"{', '.join(sorted(set(parts) - {'down', 'up', 'alpha'}))}; write diffusers'"
            )
    ranks = {path: len(parts["down"]) for path, parts in layers.items()}
    alphas = {p: float(np.reshape(parts.get("alpha", ranks[p]), ())) for p, parts in layers.items()}
    scales = {path: alpha / ranks[path] for path, alpha in alphas.items()}
    # One alpha serves all where their scales agree; else B's hold what differs.
    common = next(iter(scales.values())) if len(set(scales.values())) == 1 else 1.0
    first = next(iter(layers))
    width = len(layers[first]["up"]) // _share(first)
    total, dtype = sum(ranks.values()), layers[first]["up"].dtype
    up = np.zeros((width * sum(map(_share, paths)), total), dtype)
    row = column = 0
    for path in paths:
        rows = width * _share(path)
        if path in layers:
            own = layers[path]["up"]
            own = own if scales[path] == common else own * np.asarray(scales[path], dtype)
            up[row : row + rows, column : column + ranks[path]] = own
            column += ranks[path]
        row += rows
    down = np.concatenate([layers[path]["down"] for path in paths if path in layers])
    return {"down": down, "up": up, "alpha": np.array(common * total, np.float32)}


def _share(path: str) -> int:
    return 4 if path.endswith(_MLP) else 1


def _swapped(parts: Parts) -> Parts:
    """Returns the tensors of a layer whose halves of outputs are in the other order."""
    rows = ("up", "magnitude", "dora_scale")
    return {k: np.roll(x, len(x) // 2, axis=0) if k in rows else x for k, x in parts.items()}


def _kohya_header(layers: FileLayers, encoders: int) -> dict[str, str] | None:
    """Returns the least header of sd-scripts (networks/extract_lora_from_models.py).

    A1111 takes a file whose header does not name the model for one of Stable Diffusion 1. None
    where the layers do not tell the model, or are no products.
    """
    model = _kohya_model(layers, encoders)
    if model is None or not all("down" in parts for parts in layers.values()):
        return None
    ranks = {len(parts["down"]) for parts in layers.values()}
    alphas = {_alpha(parts) for parts in layers.values()}
    dora = any({"magnitude", "dora_scale"} & set(parts) for parts in layers.values())
    return {
        "ss_v2": str(model == _KOHYA_MODELS[1024]),
        "ss_base_model_version": model,
        "ss_network_module": "lycoris.kohya" if dora else "networks.lora",
        "ss_network_dim": "Dynamic" if len(ranks) > 1 else str(*ranks),
        "ss_network_alpha": "Dynamic" if len(alphas) > 1 else str(*alphas),
    }


def _kohya_model(layers: FileLayers, encoders: int) -> str | None:
    if any(component == "transformer" for component, _ in layers):
        return None
    for (_, path), parts in layers.items():
        if path.endswith(("attn2.to_k", "attn2.to_v")) and "down" in parts:
            return _KOHYA_MODELS.get(parts["down"].shape[1])
    return _KOHYA_MODELS[2048] if encoders > 1 else None


def _to_diffusers(layers: FileLayers) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Returns the tensors by PEFT's names, and PEFT's options where some alpha is not its rank."""
    tensors: dict[str, np.ndarray] = {}
    biased = {component for (component, _), parts in layers.items() if "bias" in parts}
    for (component, path), parts in layers.items():
        rest = set(parts) - {*_PEFT, "alpha"}
        if path.endswith(_EMBEDDINGS):
            raise ValueError(
                f"diffusers' format has no changes of embeddings ({component}'s {path}); write "
                "kohya's"
            )
        if rest or "down" not in parts:
            raise ValueError(
                f"diffusers' format has no {', '.join(sorted(rest or parts))} ({component}'s "
                f"{path}); write kohya's"
            )
        parts = {_PEFT[part]: x for part, x in parts.items() if part != "alpha"}
        if component in biased and _PEFT["bias"] not in parts:
            # PEFT has biases in all layers of a component, or in none.
            parts[_PEFT["bias"]] = np.zeros_like(parts[_PEFT["up"]], shape=len(parts[_PEFT["up"]]))
        if component.startswith("text_encoder") and _PEFT["magnitude"] in parts:
            # transformers leaves out what has PEFT's own name without this ending.
            parts[f"{_PEFT['magnitude']}.weight"] = parts.pop(_PEFT["magnitude"])
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
    alphas = {path: _alpha(parts) for path, parts in layers.items()}
    rank, alpha = next(iter(ranks.values())), next(iter(alphas.values()))
    return {
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": {path: r for path, r in ranks.items() if r != rank},
        "alpha_pattern": {path: a for path, a in alphas.items() if a != alpha},
        "target_modules": sorted(layers),
        "use_dora": any("magnitude" in parts for parts in layers.values()),
        "lora_bias": any("bias" in parts for parts in layers.values()),
    }


def _alpha(parts: Parts) -> float:
    """Returns a layer's alpha, which is its rank where it has none."""
    return float(parts["alpha"].reshape(())) if "alpha" in parts else float(len(parts["down"]))
