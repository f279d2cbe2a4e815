"""The changes of parameters that a LoRA's tensors stand for."""

import json
import logging
import math
import re
import reprlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from diffusax.checkpoints.tree import torch_shape
from diffusax.lora.files import METADATA, LoraFile
from diffusax.lora.keys import ROWS, TABLE_DOWN, TABLE_UP, Layers, Parts, seems
from diffusax.models.adapters.weight_changes import (
    Decomposed,
    Difference,
    Ia3,
    LoHa,
    LoKr,
    Product,
    Rows,
    check_change,
)
from diffusax.runtime.devices.mesh import tree_name

log = logging.getLogger(__name__)

Changes = dict[str, dict[str, Any]]
"""The changes by component and by the parameter's path in the tree: `conv_in.kernel`."""
_WEIGHTS = ("kernel", "scale", "embedding")
"""The names in the tree of what PyTorch calls a layer's weight."""
_ALONE = {"diff": "", "diff_b": "bias", "w_norm": "scale", "b_norm": "bias"}
"""The parameters of a layer to which tensors are added as they are, of which "" is the weight."""
_KINDS = ("LORA", "LOHA", "LOKR")
"""PEFT's kinds of adapters that are applied."""
_UNAPPLIED = (
    *("alora_invocation_tokens", "use_qalora", "use_bdlora", "monteclora_config", "kasa_config"),
    *("arrow_config", "target_parameters", "layer_replication", "trainable_token_indices"),
)
"""PEFT's options by which an adapter is more than products beside weights."""
_CHANGED_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
_READS_LATENTS = "x_embedder"
"""The layer of FLUX.1's transformer that reads the latents."""


def changes_of(
    layers: Layers, file: LoraFile, networks: Mapping[str, Any], *, strict: bool = True
) -> Changes:
    """Returns the changes of parameters for the tensors of a LoRA.

    Args:
        layers: the tensors by layer, see `find_layers`.
        file: the LoRA, for errors and for its metadata.
        networks: the networks by component.
        strict: whether a layer whose shapes do not fit is an error; else it is left out.

    Raises:
        ValueError: tensors of a layer are missing or do not fit it; names the layer.
    """
    found: Changes = {}
    known = {name: _shapes(networks[name]) for name in {component for component, _ in layers}}
    for (component, path), parts in with_alphas(layers, file).items():
        where = f"{file.name}: {component}'s {path}"
        shapes = known[component]
        weight = next((leaf for leaf in _WEIGHTS if f"{path}.{leaf}" in shapes), _WEIGHTS[0])
        if (component, path) == ("transformer", _READS_LATENTS) and f"{path}.{weight}" in shapes:
            parts = _with_more_inputs(parts, shapes[f"{path}.{weight}"][1])
        parts = _of_table(parts)
        try:
            changes = _layer_changes(parts, weight)
        except (KeyError, ValueError, IndexError, ZeroDivisionError) as error:
            raise ValueError(f"{where} {_lacks(error, parts)}") from None
        for leaf, change in changes.items():
            name = f"{path}.{leaf}"
            shape = shapes.get(name)
            wrong = "it has none" if shape is None else check_change(change, shape)
            if wrong is None:
                found.setdefault(component, {})[name] = change
            elif strict:
                guess = seems(file.tensors, networks)
                raise ValueError(
                    f"{where} does not fit its {leaf} of {shape} ({wrong}){guess}; strict=False "
                    "leaves out what does not fit"
                )
    if not found:
        raise ValueError(f"{file.name} has no layer whose shapes fit {', '.join(networks)}")
    return found


def _of_table(parts: Parts) -> Parts:
    """Returns a layer's tensors with PEFT's of a table of embeddings as those of its weight."""
    names = {TABLE_UP: "up", TABLE_DOWN: "down"}
    return {names.get(k, k): x.T if k in names else x for k, x in parts.items()}


def _with_more_inputs(parts: Parts, inputs: int) -> Parts:
    """Returns a layer's tensors with zeros in A for inputs that its LoRA was not trained with.

    FLUX.1 Fill reads an image and a mask after the latents that FLUX.1-dev reads (diffusers
    lora_pipeline.py, _maybe_expand_lora_state_dict).
    """
    down = parts.get("down")
    if down is None or down.ndim != 2 or down.shape[1] >= inputs:
        return parts
    return {**parts, "down": np.pad(down, ((0, 0), (0, inputs - down.shape[1])))}


def with_alphas(layers: Layers, file: LoraFile) -> Layers:
    """Returns a LoRA's tensors by layer with an alpha where PEFT's options in the header have one.

    Raises:
        ValueError: the options cannot be read, say another rank than a layer has, or are of a kind
            of adapters that is not applied.
    """
    options = _read_options(file)
    own = {name: _options_of(options, name) for name, _ in layers}
    for given in own.values():
        _check_options(given, file)
    found: Layers = {}
    differing = 0
    for (component, path), parts in layers.items():
        try:
            more, rank = _peft_numbers(own[component], path, parts)
        except (TypeError, ValueError, AttributeError, OverflowError, re.error):
            raise ValueError(
                f"{file.name}: {METADATA} in its header has no alpha of {component}'s {path}"
            ) from None
        if rank is not None and "down" in parts and len(parts["down"]) != rank:
            raise ValueError(
                f"{file.name}: {component}'s {path} has a rank of {len(parts['down'])}, where "
                f"PEFT's options say {rank}; one of them is of another LoRA"
            )
        stated = {float(x) for k, x in parts.items() if k in more and np.size(x) == 1}
        differing += any(not np.isclose(x, list(more.values())).any() for x in stated)
        found[component, path] = {**parts, **{k: np.array(x, np.float32) for k, x in more.items()}}
    if differing:
        log.warning(
            "%s: %d layers have another alpha than PEFT's options, which are taken",
            file.name,
            differing,
        )
    return found


def _layer_changes(parts: Parts, weight: str) -> dict[str, Any]:
    """Returns the changes of a layer's parameters. weight: the name of its weight in the tree."""
    known = {_ALONE[name] or weight: Difference(x) for name, x in parts.items() if name in _ALONE}
    rest = {name: x for name, x in parts.items() if name not in _ALONE}
    main = _main_change(rest, weight)
    if main is not None:
        known[weight] = main
    if not known:
        raise ValueError
    return known


def _main_change(parts: Parts, weight: str) -> Any:
    if "weight" in parts:
        on_input = bool(np.asarray(parts.get("on_input", 0)).any())
        return Ia3(parts["weight"], on_input)
    if {"down", "up", "bias"} & set(parts):
        down, up = parts["down"], parts["up"]
        if not len(down):
            raise ValueError("a rank of 0")
        if "bias" in parts and (weight != "kernel" or {"magnitude", "dora_scale"} & set(parts)):
            raise ValueError("a bias of B, which PEFT has neither with DoRA nor for tables")
        given = parts.get("mid"), parts.get("bias")
        change: Any = Product(down, up, _factor(parts, len(down)), *given)
    elif any(name.startswith("hada_") for name in parts):
        w1_a, w1_b = parts["hada_w1_a"], parts["hada_w1_b"]
        w2_a, w2_b = parts["hada_w2_a"], parts["hada_w2_b"]
        cores = parts.get("hada_t1"), parts.get("hada_t2")
        change = LoHa(w1_a, w1_b, w2_a, w2_b, _factor(parts, len(w1_b)), *cores)
    elif any(name.startswith("lokr_") for name in parts):
        ranks = [len(parts[name]) for name in ("lokr_w2_b", "lokr_w1_b") if name in parts]
        scale = _factor(parts, *ranks[:1]) if ranks or "scale" in parts else 1.0
        change = LoKr(_kronecker(parts, 1), _kronecker(parts, 2), scale)
    else:
        if set(parts) - {"alpha", ROWS}:
            raise ValueError
        return None
    if ROWS in parts:
        start, total = map(int, parts[ROWS])
        change = Rows(change, start, total)
    if "magnitude" in parts:
        return Decomposed(change, parts["magnitude"])
    if "dora_scale" in parts:
        columns = parts["dora_scale"].shape[0] == 1 and parts["dora_scale"].size > 1
        return Decomposed(change, parts["dora_scale"], on_columns=columns, inside=False)
    return change


def _kronecker(parts: Parts, number: int) -> Any:
    """Returns a factor of a Kronecker product: whole, or as its own factors."""
    name = f"lokr_w{number}"
    if name in parts:
        return parts[name]
    pair = parts[f"{name}_a"], parts[f"{name}_b"]
    core = parts.get(f"lokr_t{number}")
    return pair if core is None else (core, *pair)


def _factor(parts: Parts, rank: int = 1) -> float:
    """Returns alpha / rank, 1 without alpha, or the scale that the file names instead."""
    if "scale" in parts:
        return _number(parts["scale"])
    return _number(parts["alpha"]) / rank if "alpha" in parts else 1.0


def _number(tensor: np.ndarray) -> float:
    (value,) = tensor.astype(np.float32).reshape(-1)
    return float(value)


def _read_options(file: LoraFile) -> dict[str, Any]:
    """Returns PEFT's options in the header: `{"unet.lora_alpha": 4, ...}`."""
    text = file.metadata.get(METADATA)
    if text is None:
        return {}
    try:
        options = json.loads(text)
    except (ValueError, RecursionError):
        options = None
    if not isinstance(options, dict):
        raise ValueError(f"{file.name}: {METADATA} in its header is no JSON dictionary")
    return options


def _options_of(options: Mapping[str, Any], component: str) -> dict[str, Any]:
    """Returns a component's options, which one network's own file has without its name."""
    plain = {name: value for name, value in options.items() if "." not in name}
    prefix = f"{component}."
    return plain | {k.removeprefix(prefix): v for k, v in options.items() if k.startswith(prefix)}


def _check_options(options: Mapping[str, Any], file: LoraFile) -> None:
    """Raises ValueError where PEFT's options ask for more than products beside weights."""
    kind, begin = options.get("peft_type") or "LORA", options.get("init_lora_weights")
    if kind not in _KINDS:
        raise ValueError(
            f"{file.name} holds an adapter of PEFT's peft_type={kind!r}; those that are applied "
            f"are {', '.join(_KINDS)}"
        )
    for name in _UNAPPLIED:
        if options.get(name):
            raise ValueError(
                f"{file.name}: {name}={reprlib.repr(options[name])} in PEFT's options is not "
                "applied; merge the adapter with PEFT's merge_and_unload, and load the model"
            )
    if isinstance(begin, str) and begin.lower().startswith(_CHANGED_BASE):
        raise ValueError(
            f"{file.name} was trained with init_lora_weights={begin!r}, which changes the model's "
            "own weights, too; save it with PEFT's path_initial_model_for_weight_conversion"
        )


def _peft_numbers(
    options: Mapping[str, Any], path: str, parts: Parts
) -> tuple[dict[str, float], int | None]:
    """Returns what PEFT's options add to a layer's tensors, and the rank that they say.

    Without options both are empty. LoHa and LoKr get a scale, because a LoKr of PEFT has one even
    where both of its factors are whole.
    """
    factors = any(name.startswith(("hada_", "lokr_")) for name in parts)
    alpha = options.get("alpha" if factors else "lora_alpha")
    if alpha is None or not (factors or {"down", TABLE_DOWN} & set(parts)):
        return {}, None
    alpha = float(_of_pattern(options.get("alpha_pattern"), path, alpha))
    rank = _of_pattern(options.get("rank_pattern"), path, options.get("r"))
    rank = None if rank is None else int(rank)
    if factors:
        return {"scale": alpha / rank} if rank else {}, None
    if options.get("use_rslora"):
        alpha *= math.sqrt(len(parts["down"] if "down" in parts else parts[TABLE_DOWN].T))
    return {"alpha": alpha}, rank


def _of_pattern(patterns: Mapping[str, Any] | None, path: str, default: Any) -> Any:
    """Returns the value of the first pattern that ends the path (PEFT utils, get_pattern_key)."""
    near = (v for p, v in (patterns or {}).items() if re.match(rf"(.*\.)?({p})$", path))
    return next(near, default)


def _shapes(network: Any) -> dict[str, tuple[int, ...]]:
    """Returns the shapes in PyTorch's layout of a network's parameters, by path in the tree."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(network.shapes)
    return {tree_name(path): torch_shape(tuple(leaf.shape), path) for path, leaf in leaves}


def _lacks(error: Exception, parts: Parts) -> str:
    if isinstance(error, KeyError):
        return f"has {', '.join(sorted(parts))} but not {error.args[0]}"
    if error.args and type(error) is ValueError and str(error).startswith("a "):
        return f"has {error}"
    return f"has {', '.join(sorted(parts))}, which make no change"
