"""Reads a LoRA's file: its tensors, the names and PEFT's options in its header."""

import contextlib
import json
import logging
import math
import os
import re
import reprlib
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from diffusax.boundary.files import load_json
from diffusax.boundary.tensors import as_numpy
from diffusax.checkpoints.tensors import read_metadata, read_tensors
from diffusax.checkpoints.weight_file import fetch_file, find_weight_file

log = logging.getLogger(__name__)
K = TypeVar("K", bound=Hashable)

WEIGHT_NAME = "pytorch_lora_weights.safetensors"
"""The name that diffusers gives LoRAs."""
PEFT_NAME, PEFT_CONFIG = "adapter_model.safetensors", "adapter_config.json"
"""The names that PEFT gives an adapter, and the file of its options."""
METADATA = "lora_adapter_metadata"
"""The text in a file's header that holds PEFT's options, as JSON."""

LAYOUT = "references_layout"
"""The text in a file's header that says by which layout a LoRA has learned to look at images. It is
ours: ai-toolkit, which trains such LoRAs, writes none."""

Parts = dict[str, np.ndarray]
"""The tensors of a layer by what they are: down, up, mid, alpha, dora_scale, hada_w1_a, ..."""
FileLayers = dict[tuple[str, str], Parts]
"""What a file says: the tensors, in PyTorch's layout, by component and by the layer's path in the
parameter tree, joined by dots."""
ROWS = "rows"
"""What a layer's LoHa or LoKr has beside its tensors where they are of several layers in one: the
number of rows before the layer's own, and that of all."""

_OUTPUT_NAME = "ss_output_name"
_KINDS = ("LORA", "LOHA", "LOKR")
"""PEFT's kinds of adapters that are applied."""
_UNAPPLIED = (
    *("alora_invocation_tokens", "use_qalora", "use_bdlora", "monteclora_config", "kasa_config"),
    *("arrow_config", "target_parameters", "layer_replication", "trainable_token_indices"),
)
"""PEFT's options by which an adapter is more than products beside weights."""
_CHANGED_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


class LoraFile(NamedTuple):
    """The tensors of a LoRA by key, the texts of its file's header, and what errors call it."""

    tensors: dict[str, np.ndarray]
    metadata: dict[str, str]
    name: str

    @property
    def references_layout(self) -> str | None:
        """The layout by which it has learned to look at images, where its header says one."""
        return self.metadata.get(LAYOUT)


def read_lora(source: Any, **where: Any) -> LoraFile:
    """Reads a LoRA.

    Args:
        source: a safetensors file, a folder or a Hub repository that holds one, or a dictionary of
            arrays or tensors by key.
        **where: weight_name, subfolder, revision, token, local_files_only and cache_dir; see
            `find_weight_file`.

    Raises:
        ValueError: there is no such file, it cannot be read, or holds what are not finite numbers.
    """
    if isinstance(source, Mapping):
        file = LoraFile({str(k): as_numpy(v) for k, v in source.items()}, {}, "the LoRA")
    else:
        path = find_weight_file(source, preferred=(WEIGHT_NAME, PEFT_NAME), **where)
        options, tensors, metadata = _peft_options(source, path, where), read_tensors(path), {}
        if options is not None:
            metadata[METADATA] = json.dumps(load_json(options))
        file = LoraFile(tensors, metadata | read_metadata(path), str(path))
    if not file.tensors:
        raise ValueError(f"{file.name} holds no tensors")
    for key, tensor in file.tensors.items():
        if tensor.dtype.kind in "biu":
            continue
        if tensor.dtype.kind not in "fV":
            raise ValueError(f"{file.name}: {key} holds {tensor.dtype}, which are no numbers")
        if not np.isfinite(tensor.astype(np.float32)).all():
            raise ValueError(f"{file.name}: {key} has numbers that are not finite")
    return file


def _peft_options(source: Any, path: Path, where: Mapping[str, Any]) -> Path | None:
    """Returns the file of options beside a file of PEFT's; None where there is none."""
    if path.name != PEFT_NAME:
        return None
    beside = path.with_name(PEFT_CONFIG)
    if not beside.is_file() and not os.path.exists(os.path.expanduser(source)):
        of_hub = {name: value for name, value in where.items() if name != "weight_name"}
        with contextlib.suppress(ValueError):
            return fetch_file(str(source), PEFT_CONFIG, **of_hub)
    return beside if beside.is_file() else None


def output_name(path: Path) -> str | None:
    """Returns the name in a LoRA's header, by which A1111 calls it; None where it has none.

    A file that cannot be read has none: what is wrong with it is told when it is loaded.
    """
    try:
        found = read_metadata(path).get(_OUTPUT_NAME)
    except (ValueError, OSError):
        return None
    return found if isinstance(found, str) and found.lower() != "none" else None


def layout_of(path: Path) -> str | None:
    """Returns the layout in a LoRA's header, see `LAYOUT`; None where it has none.

    A file that cannot be read has none, see `output_name`.
    """
    try:
        return read_metadata(path).get(LAYOUT)
    except (ValueError, OSError):
        return None


def called(name: str, files: Mapping[K, tuple[str, str | None]]) -> list[K]:
    """Returns the LoRAs that a name calls: none, one, or several where it does not say which.

    A file's name comes before the names in headers, and one that several headers have calls none of
    them in A1111 (stable-diffusion-webui, extensions-builtin/Lora/networks.py, load_networks).

    Args:
        name: the name.
        files: for each LoRA the name of its file without the ending, and that in its header.
    """
    own = [key for key, (stem, _) in files.items() if stem == name]
    return own or [key for key, (_, alias) in files.items() if alias == name]


def with_alphas(layers: FileLayers, file: LoraFile) -> FileLayers:
    """Returns a LoRA's layers with an alpha where PEFT's options in the header have one.

    Raises:
        ValueError: the options cannot be read, say another rank than a layer has, or are of a kind
            of adapters that is not applied.
    """
    options = _read_options(file)
    own = {name: _options_of(options, name) for name, _ in layers}
    for given in own.values():
        _check_options(given, file)
    found: FileLayers = {}
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
    if alpha is None or not (factors or "down" in parts):
        return {}, None
    alpha = float(_of_pattern(options.get("alpha_pattern"), path, alpha))
    rank = _of_pattern(options.get("rank_pattern"), path, options.get("r"))
    rank = None if rank is None else int(rank)
    if factors:
        return {"scale": alpha / rank} if rank else {}, None
    if options.get("use_rslora"):
        alpha *= math.sqrt(len(parts["down"]))
    return {"alpha": alpha}, rank


def _of_pattern(patterns: Mapping[str, Any] | None, path: str, default: Any) -> Any:
    """Returns the value of the first pattern that ends the path (PEFT utils, get_pattern_key)."""
    near = (v for p, v in (patterns or {}).items() if re.match(rf"(.*\.)?({p})$", path))
    return next(near, default)
