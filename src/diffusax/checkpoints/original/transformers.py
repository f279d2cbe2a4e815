"""The names of transformers in their authors' code, which ComfyUI and kohya's scripts keep."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import jax

from diffusax.checkpoints.tree import checkpoint_name

Names = dict[str, tuple[str, ...]]
"""For each module in the original code, the paths in diffusers of those that it is made of, whose
outputs lie one after the other in it: {"layers.0.attention.out": ("layers.0.attention.to_out.0",)}.
"""


@dataclasses.dataclass(frozen=True)
class Original:
    """How a transformer's modules are named in the original code."""

    first: str
    """A tensor that no other network has, by which a file is known."""
    renamed: Mapping[str, str]
    """The parts of paths in diffusers that differ, with the original ones."""
    fused: Mapping[str, tuple[str, ...]]
    """The ends of original paths that several of diffusers' are one module of."""
    leftovers: tuple[str, ...] = ()
    """The beginnings of tensors' names that no image depends on."""


ORIGINALS: dict[str, Original] = {
    "ZImageTransformer2DModel": Original(
        "layers.0.adaLN_modulation.0.weight",
        {
            "all_x_embedder.2-1": "x_embedder",
            "all_final_layer.2-1": "final_layer",
            "attention.norm_q": "attention.q_norm",
            "attention.norm_k": "attention.k_norm",
            "attention.to_out.0": "attention.out",
        },
        {"attention.qkv": ("attention.to_q", "attention.to_k", "attention.to_v")},
        ("norm_final.",),
    ),
}
"""The transformers by the name of their class; enter one here, and its files can be read."""


def transformer_names(network: Any) -> Names:
    """Returns the original modules of a network; none for one that is not in `ORIGINALS`."""
    original = ORIGINALS.get(getattr(network, "class_name", ""))
    if original is None:
        return {}
    leaves, _ = jax.tree_util.tree_flatten_with_path(network.shapes)
    paths = (checkpoint_name(path).rpartition(".")[0] for path, _ in leaves)
    return _named(original, dict.fromkeys(path for path in paths if path))


def _named(original: Original, paths: Iterable[str]) -> Names:
    found: Names = {}
    for path in paths:
        end = next((e for e, own in original.fused.items() if path.endswith(own)), None)
        if end is not None:
            own = original.fused[end]
            start = next(path.removesuffix(part) for part in own if path.endswith(part))
            found[start + end] = tuple(start + part for part in own)
            continue
        name = path
        for ours, theirs in original.renamed.items():
            name = name.replace(ours, theirs)
        found[name] = (path,)
    return found
