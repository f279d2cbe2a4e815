"""LoRAs of FLUX and SDXL under the names of the original code, as kohya's scripts have them.

Layers that are one there get A's below each other, and B's in blocks along the diagonal.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from diffusax.checkpoints.original.flux import FLUX, FLUX2
from diffusax.checkpoints.original.layout import named
from diffusax.checkpoints.original.unet import unet_names
from diffusax.lora.keys import Layers, Parts
from diffusax.models.unet.unet import UNet2DConditionConfig

_MLP = "proj_mlp"
"""The layer that has four outputs where others, with which it is one, have one."""


def with_original_names(layers: Layers, unet: UNet2DConditionConfig | None = None) -> Layers:
    """Returns the layers of a LoRA, of which those of FLUX and of SDXL have the original code's
    names. Those of Stable Diffusion 1 and 2 have diffusers' in kohya's scripts, too.

    unet: the config of the UNet that the layers are for.

    Raises:
        ValueError: layers that are one in the original code have more than A, B and alpha.
    """
    paths = [path for component, path in layers if component == "transformer"]
    modules = named(FLUX.modules, paths) | named(FLUX2.modules, paths)
    found = {key: parts for key, parts in layers.items() if key[0] != "transformer"}
    names = _names_of_sdxl(unet)
    found = {(c, names.get(p, p) if c == "unet" else p): parts for (c, p), parts in found.items()}
    known = {path for own in modules.values() for path in own}
    found |= {("transformer", p): layers["transformer", p] for p in paths if p not in known}
    for name, own in modules.items():
        there = {p: layers["transformer", p] for p in own if ("transformer", p) in layers}
        parts = there[own[0]] if len(own) == 1 else _joined(own, there)
        found["transformer", name] = _swapped(parts) if name in FLUX.swapped else parts
    return found


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
