"""`Lora`: what a LoRA adds to a pipeline's networks, checked against them, on the host."""

import dataclasses
import difflib
import hashlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from diffusax.boundary.tensors import as_numpy
from diffusax.lora.changes import Change, misfit
from diffusax.lora.files import ROWS, FileLayers, LoraFile, Parts
from diffusax.lora.keys import seems, split_key
from diffusax.models.adapters.low_rank import kernel_shapes, layer_shapes

Pair = tuple[np.ndarray, ...]
"""A: c r, or kh kw c r for a convolution, and B: r d, which includes alpha / rank; after them the
bias of B, d, which includes it, too, where there is one."""
_WEIGHTS = ("kernel", "scale", "embedding")
"""The names in the tree of what PyTorch calls a layer's weight."""
_ALONE = {"diff": "", "diff_b": "bias", "w_norm": "scale", "b_norm": "bias"}
"""The parameters of a layer to which tensors are added as they are, of which "" is the weight."""
_READS_LATENTS = "x_embedder"
"""The layer of FLUX.1's transformer that reads the latents."""


@dataclasses.dataclass(frozen=True, eq=False)
class Lora:
    """A LoRA: a product A B beside the kernels of some layers, as arrays on the host."""

    components: Mapping[str, Mapping[str, Pair]]
    """For each component (unet, text_encoder, ...) the pairs by the layers' paths in the parameter
    tree, joined by dots."""
    changes: Mapping[str, Mapping[str, Change]] = dataclasses.field(default_factory=dict)
    """For each component what is no product, by the parameters' paths, such as "conv_in.kernel";
    it is merged into the parameters."""
    references_layout: str | None = None
    """The layout by which it has learned to look at images, see `Denoiser.references_layout`; None
    where it has not, or its file does not say so."""

    @property
    def rank(self) -> int:
        """The largest rank of a layer's product; 0 without products."""
        pairs = (pair for layers in self.components.values() for pair in layers.values())
        return max(map(columns, pairs), default=0)

    @property
    def names(self) -> tuple[str, ...]:
        """The components that it changes."""
        return tuple(dict.fromkeys((*self.components, *self.changes)))

    @property
    def digest(self) -> str:
        """The SHA-256 of its arrays and paths."""
        found = hashlib.sha256()
        for part in (self.components, self.changes):
            for component, own in sorted(part.items()):
                for path, change in sorted(own.items()):
                    found.update(f"{component} {path} {jax.tree.structure(change)}".encode())
                    for leaf in map(np.asarray, jax.tree.leaves(change)):
                        found.update(f"{leaf.dtype} {leaf.shape}".encode() + leaf.tobytes())
        return found.hexdigest()

    def beside(self, other: "Lora") -> "Lora":
        """Returns a LoRA that also changes the components of another one, which are others."""
        return dataclasses.replace(
            self,
            components={**self.components, **other.components},
            changes={**self.changes, **other.changes},
        )

    def parameter_changes(self, *, products: bool) -> Iterator[tuple[str, str, Change]]:
        """Returns the component, the parameter and the change of all that is merged.

        products: whether the products are merged, too.
        """
        for component, own in self.changes.items():
            for name, change in own.items():
                yield component, name, change
        for component, layers in self.components.items() if products else ():
            for path, (down, up, *bias) in layers.items():
                yield component, f"{path}.kernel", _transposed(down, up)
                for one in bias:
                    yield component, f"{path}.bias", {"diff": one}


def columns(pair: Pair) -> int:
    """Returns the columns that a pair takes in a stack: its rank, and one for a bias."""
    return len(pair[1]) + len(pair) - 2


def lora_of_layers(
    layers: FileLayers, file: LoraFile, networks: Mapping[str, Any], *, strict: bool = True
) -> Lora:
    """Returns what the layers of a file add to networks.

    Args:
        layers: the tensors by layer, see `find_layers`.
        file: the LoRA's file, for errors.
        networks: the networks by component.
        strict: whether a layer whose shapes do not fit is an error; else it is left out.

    Raises:
        ValueError: tensors of a layer are missing or do not fit it; names the layer.
    """
    products: dict[str, dict[str, Pair]] = {}
    changes: dict[str, dict[str, Change]] = {}
    known = {name: layer_shapes(networks[name]) for name in {component for component, _ in layers}}
    for (component, path), parts in layers.items():
        shapes = known[component]
        weight = next((leaf for leaf in _WEIGHTS if f"{path}.{leaf}" in shapes), _WEIGHTS[0])
        kernel = shapes.get(f"{path}.kernel")
        parts = _with_bias_of_b(_without_zeros(parts)) if kernel else _without_zeros(parts)
        if not parts:
            continue
        if kernel and (component, path) == ("transformer", _READS_LATENTS):
            parts = _with_more_inputs(parts, kernel[-2])
        try:
            found = {leaf: (c, _misfit(c, leaf, path, shapes)) for leaf, c in _split(parts, weight)}
        except (KeyError, ValueError, IndexError, ZeroDivisionError) as error:
            where = f"{file.name}: {component}'s {path}"
            raise ValueError(f"{where} {_lacks(error, parts)}") from None
        for leaf, (change, wrong) in found.items():
            if wrong and strict:
                raise ValueError(
                    f"{file.name}: {component}'s {path} does not fit its {leaf} of "
                    f"{_torch_shape(shapes, path, leaf)} ({wrong}){seems(file.tensors, networks)}; "
                    "strict=False leaves out what does not fit"
                )
            if wrong:
                continue
            if kernel and leaf == "kernel" and _is_product(change):
                products.setdefault(component, {})[path] = pair_of(change, kernel)
            else:
                changes.setdefault(component, {})[f"{path}.{leaf}"] = change
    if not products and not changes:
        raise ValueError(f"{file.name} has no layer whose shapes fit {', '.join(networks)}")
    return Lora(products, changes, file.references_layout)


def lora_of_arrays(name: str, layers: Any, networks: Mapping[str, Any]) -> Lora:
    """Returns a LoRA of arrays or tensors, checked against the networks that it changes.

    Args:
        name: the LoRA's name, for errors.
        layers: for each component the pairs (A, B), or (A, B, bias), by path, see `Lora`.
        networks: the networks of the components that may have adapters.

    Raises:
        ValueError: there is no such component or layer, or its shapes do not fit.
    """
    if not isinstance(layers, Mapping) or not all(
        isinstance(own, Mapping) and own for own in layers.values()
    ):
        raise ValueError(
            f"the adapter {name!r} must be a dictionary such as "
            "{'unet': {'mid_block.attentions.0.proj_in': (A, B)}} "
            f"(got {type(layers).__name__})"
        )
    if not layers:
        raise ValueError(f"the adapter {name!r} has no layers; give at least one")
    lora = Lora(
        {
            component: {path: _read_pair(name, component, path, pair) for path, pair in own.items()}
            for component, own in layers.items()
        }
    )
    check_fits(name, lora, networks)
    return lora


def layers_of_arrays(component: str, given: Mapping[str, Any]) -> FileLayers:
    """Returns a component's layers as a file has them.

    given: PEFT's state dictionary, or the pairs (A, B) or (A, B, bias) by path, see `Lora`.

    Raises:
        ValueError: a key or value is neither.
    """
    found: FileLayers = {}
    for key, value in given.items():
        if isinstance(value, tuple | list):
            down, up, *bias = map(as_numpy, value)
            found[component, key] = _transposed(down, up) | dict(zip(("bias",), bias))
            continue
        path, part = split_key(key.removeprefix(f"{component}."))
        if part not in ("down", "up", "bias", "magnitude", "alpha"):
            raise ValueError(f"{component}'s {key} is no tensor of a LoRA in PEFT's format")
        found.setdefault((component, path), {})[part] = as_numpy(value)
    return found


def pair_of(parts: Change, kernel: tuple[int, ...]) -> Pair:
    """Returns a file's product as A and B for a kernel, kh kw c d or c d, in float32.

    parts: the product's tensors, see `changes`, whose factor is 1 where there is none.
    """
    down, up = (np.asarray(parts[name], np.float32) for name in ("down", "up"))
    factor = np.float32(parts.get("factor", 1.0))
    up = up.reshape(len(up), -1).T * factor
    if "mid" in parts:
        core = np.asarray(parts["mid"], np.float32)
        down = np.einsum("mnhw,nc->mchw", core, down.reshape(len(down), -1))
    size = (*kernel[:-2], kernel[-2], len(down))
    down = down.reshape(len(down), kernel[-2], *kernel[:-2])
    pair = down.transpose(*range(2, len(kernel)), 1, 0).reshape(size), up
    return (*pair, np.asarray(parts["bias"], np.float32) * factor) if "bias" in parts else pair


def _transposed(down: np.ndarray, up: np.ndarray) -> Parts:
    """Returns A and B in PyTorch's layout. B of a convolution is one of 1x1."""
    ones = (1,) * (down.ndim - 2)
    down = down.transpose(-1, -2, *range(down.ndim - 2))
    return {"down": down, "up": up.T.reshape(up.shape[1], len(up), *ones)}


def check_fits(name: str, lora: Lora, networks: Mapping[str, Any]) -> None:
    """Raises ValueError unless the networks have the layers of the LoRA, in its shapes."""
    for component in (*lora.changes, *lora.components):
        if component not in networks:
            raise ValueError(
                f"the adapter {name!r} has the component {component!r}; those that take adapters "
                f"here are {', '.join(networks)}"
            )
    for component, layers in lora.components.items():
        known = kernel_shapes(networks[component])
        for path, (down, up, *bias) in layers.items():
            if path not in known:
                raise ValueError(
                    f"the adapter {name!r} has the layer {path!r}, which {component} lacks; "
                    f"{_nearest(path, known)}"
                )
            *size, c, d = known[path]
            if bias and bias[0].shape != (d,):
                raise ValueError(
                    f"the adapter {name!r} has a bias of shape {bias[0].shape} for {component}'s "
                    f"{path}, which takes {_text(d)}"
                )
            if down.shape[:-1] != (*size, c) or up.shape[1:] != (d,):
                raise ValueError(
                    f"the adapter {name!r} has A of shape {down.shape} and B of shape {up.shape} "
                    f"for {component}'s {path}, which takes {_text(*size, c, 'rank')} and "
                    f"{_text('rank', d)}"
                )


def _split(parts: Parts, weight: str) -> Iterator[tuple[str, Change]]:
    """Returns the changes of a layer's parameters. weight: the name of its weight in the tree."""
    found: dict[str, Change] = {
        leaf or weight: {"diff": parts[name]} for name, leaf in _ALONE.items() if name in parts
    }
    rest = {name: x for name, x in parts.items() if name not in _ALONE}
    if set(rest) - {"alpha", ROWS}:
        found[weight] = _change_of_weight(rest, weight)
    if not found:
        raise ValueError
    return iter(found.items())


def _change_of_weight(parts: Parts, weight: str) -> Change:
    """Returns the change of a layer's weight, with alpha and scale as a factor."""
    if "weight" in parts:
        on_input = np.asarray(parts.get("on_input", 0)).any()
        return {name: parts[name] for name in ("weight", "on_input")[: 1 + on_input]}
    kinds: tuple[str, ...]
    if {"down", "up", "bias"} & set(parts):
        rank = len(parts["down"])
        if not rank:
            raise ValueError("a rank of 0")
        if "bias" in parts and (weight != "kernel" or {"magnitude", "dora_scale"} & set(parts)):
            raise ValueError("a bias of B, which PEFT has neither with DoRA nor for tables")
        kinds, factor = ("down", "up", "mid", "bias"), _scale(parts, rank)
    elif any(name.startswith("hada_") for name in parts):
        kinds, factor = ("hada_",), _scale(parts, len(parts["hada_w1_b"]))
    elif any(name.startswith("lokr_") for name in parts):
        ranks = [len(parts[name]) for name in ("lokr_w2_b", "lokr_w1_b") if name in parts]
        # Without a rank, alpha has no meaning.
        scaled = ranks or "scale" in parts
        kinds, factor = ("lokr_",), _scale(parts, *ranks[:1]) if scaled else 1.0
    else:
        raise ValueError
    kinds = (*kinds, ROWS, "magnitude", "dora_scale")
    own: dict[str, Any] = {name: x for name, x in parts.items() if name.startswith(kinds)}
    return {**own, "factor": np.float32(factor)}


def _scale(parts: Parts, rank: int = 1) -> float:
    """Returns alpha / rank, 1 without alpha, or the scale that the file names instead."""
    name = "scale" if "scale" in parts else "alpha"
    if name not in parts:
        return 1.0
    (value,) = parts[name].astype(np.float32).reshape(-1)
    return float(value) / (rank if name == "alpha" else 1)


def _is_product(change: Change) -> bool:
    return set(change) <= {"down", "up", "mid", "bias", "factor"}


def _misfit(
    change: Change, leaf: str, path: str, shapes: Mapping[str, tuple[int, ...]]
) -> str | None:
    """Returns why a change does not fit a layer's parameter; None if it does."""
    shape = _torch_shape(shapes, path, leaf)
    if shape is None:
        return "it has none"
    if "bias" in change and change["bias"].shape != shape[:1]:
        return f"its bias is {change['bias'].shape}"
    if _is_product(change) and "mid" not in change:
        down, up = change["down"], change["up"]
        own = len(up), up.size, down.size
        # Most layers are plain products, which need no trace.
        if own == (shape[0], shape[0] * len(down), len(down) * math.prod(shape[1:])):
            return None
    return misfit(change, shape)


def _torch_shape(
    shapes: Mapping[str, tuple[int, ...]], path: str, leaf: str
) -> tuple[int, ...] | None:
    """Returns the shape in PyTorch's layout of a layer's parameter; None where it has none."""
    shape = shapes.get(f"{path}.{leaf}")
    if shape is None or leaf != "kernel":
        return shape
    return shape[-1], shape[-2], *shape[:-2]


def _without_zeros(parts: Parts) -> Parts:
    """Returns a layer's tensors without sums of zeros, as files of Wan's have them for norms."""
    return {name: x for name, x in parts.items() if name not in _ALONE or np.any(x)}


def _with_bias_of_b(parts: Parts) -> Parts:
    """Returns a layer's tensors with what its bias gains as the bias of B, where that is the same.

    It then runs beside the parameters like the product (diffusers lora_conversion_utils.py,
    _convert_non_diffusers_wan_lora_to_diffusers).
    """
    beside = {"magnitude", "dora_scale", "bias"} & set(parts)
    if not {"diff_b", "down", "up"} <= set(parts) or beside or not len(parts["down"]):
        return parts
    scale = _scale(parts, len(parts["down"]))
    if not scale:
        return parts
    rest = {name: x for name, x in parts.items() if name != "diff_b"}
    return {**rest, "bias": np.asarray(parts["diff_b"], np.float32).reshape(-1) / scale}


def _with_more_inputs(parts: Parts, inputs: int) -> Parts:
    """Returns a layer's tensors with zeros in A for inputs that its LoRA was not trained with.

    FLUX.1 Fill reads an image and a mask after the latents that FLUX.1-dev reads (diffusers
    lora_pipeline.py, _maybe_expand_lora_state_dict).
    """
    down = parts.get("down")
    if down is None or down.ndim != 2 or down.shape[1] >= inputs:
        return parts
    return {**parts, "down": np.pad(down, ((0, 0), (0, inputs - down.shape[1])))}


def _lacks(error: Exception, parts: Parts) -> str:
    if isinstance(error, KeyError):
        return f"has {', '.join(sorted(parts))} but not {error.args[0]}"
    if error.args and type(error) is ValueError and str(error).startswith("a "):
        return f"has {error}"
    return f"has {', '.join(sorted(parts))}, which make no change"


def _read_pair(name: str, component: str, path: Any, pair: Any) -> Pair:
    """Returns A and B as arrays of the host, which keep their dtype."""
    arrays = tuple(map(as_numpy, pair)) if isinstance(pair, tuple | list) else ()
    if (
        len(arrays) not in (2, 3)
        or min(array.ndim for array in arrays[:2]) < 2
        or any(a.dtype.kind != "f" and a.dtype.name != "bfloat16" for a in arrays)
        or arrays[0].shape[-1] != len(arrays[1])
        or not len(arrays[1])
    ):
        got = [f"{a.dtype} {a.shape}" for a in arrays] or type(pair).__name__
        raise ValueError(
            f"the adapter {name!r} must have for {component}'s {path} a pair of arrays of floats, "
            f"A: c rank and B: rank d, and for a bias of B a third, d (got {got})"
        )
    return arrays


def _nearest(path: str, known: Mapping[str, Any]) -> str:
    if not known:
        return "it has none that take adapters, as it is no network of diffusax's own"
    near = difflib.get_close_matches(str(path), known, n=3, cutoff=0)
    return f"the nearest are {', '.join(near)}"


def _text(*shape: Any) -> str:
    return f"({', '.join(map(str, shape))})"
