"""The keys of LoRA files: the layer that a tensor belongs to, and what it is there."""

import contextlib
import functools
import logging
import re
from collections.abc import Container, Iterable, Mapping
from typing import Any

import numpy as np

from diffusax.checkpoints.original.layout import Module, Names
from diffusax.checkpoints.original.transformers import adapter_names
from diffusax.checkpoints.original.unet import unet_names
from diffusax.lora.files import ROWS, FileLayers, LoraFile, Parts, with_alphas
from diffusax.models.adapters.low_rank import kernel_shapes, layer_shapes
from diffusax.models.unet.unet import UNet2DConditionModel

log = logging.getLogger(__name__)

KOHYA = {
    "unet": ("lora_unet_", "lycoris_"),
    "transformer": ("lora_unet_", "lycoris_", "lora_transformer_"),
    "text_encoder": ("lora_te_", "lora_te1_"),
    "text_encoder_2": ("lora_te2_", "lora_te3_"),
}
"""The prefixes of a component's layers in kohya's files, whose dots are underscores.

FLUX.1's second text encoder is the third there, as Stable Diffusion 3 has it.
"""
_COMFYUI = ("diffusion_model.", "model.diffusion_model.")
_DOTTED = {
    "unet": ("",),
    "transformer": ("", *_COMFYUI),
    "text_encoder": ("text_encoders.clip_l.transformer.",),
    "text_encoder_2": ("text_encoders.clip_g.transformer.", "text_encoders.t5xxl.transformer."),
}
"""The prefixes of a component's layers beside its name, as ComfyUI and others have them."""
_OF_TABLE = "lora_embedding_"
"""What PEFT's A and B of a table of embeddings are called, which are B and A of its weight, each
transposed."""
_SAME = (
    *("alpha", "scale", "dora_scale", "diff", "diff_b", "w_norm", "b_norm", "weight", "on_input"),
    *(f"hada_{name}" for name in ("w1_a", "w1_b", "w2_a", "w2_b", "t1", "t2")),
    *(f"lokr_{name}" for name in ("w1", "w1_a", "w1_b", "w2", "w2_a", "w2_b", "t1", "t2")),
)
_PARTS = (
    (r"lora_down\.weight|lora_A(\.[^.]+)?\.weight|lora(_linear_layer)?\.down\.weight", "down"),
    (r"lora_up\.weight|lora_B(\.[^.]+)?\.weight|lora(_linear_layer)?\.up\.weight", "up"),
    (r"lora_mid\.weight", "mid"),
    (r"lora_B(\.[^.]+)?\.bias|lora_up\.bias|lora(_linear_layer)?\.up\.bias", "bias"),
    (rf"{_OF_TABLE}A(\.[^.]+)?", "up"),
    (rf"{_OF_TABLE}B(\.[^.]+)?", "down"),
    (r"lora_magnitude_vector(\.[^.]+)?(\.weight)?", "magnitude"),
    *((name, name) for name in _SAME),
)
# Keys of diffusers before it used PEFT: `attn1.processor.to_q_lora.down.weight`.
_PROCESSOR = re.compile(r"(.*?)\.(?:processor\.)?to_(q|k|v|out)_lora\.(down|up)\.weight")
# XLabs' keys, which have no dot before "lora": `double_blocks.0.processor.qkv_lora1.down.weight`.
_XLABS = re.compile(r"(.*\.processor\.(?:qkv|proj)_lora\d?)\.(down|up)\.weight")
_CONTROL = ("query_norm.scale", "key_norm.scale")
"""The ends of keys that Black Forest Labs' LoRAs for depth and edges have, and no others."""
_REFUSED = (
    (r"(^|[._])b?oft_", "OFT or BOFT, which turn weights"),
    (r"\.[ab][12]\.weight$", "GLoRA"),
    (r"(^|[._])vera_", "VeRA"),
    (r"\.ia3_l", "IA3 in PEFT's layout"),
    (r"^bundle_emb\.", "OneTrainer's embeddings, which load_textual_inversion reads from files"),
    (r"trainable_tokens", "PEFT's trainable_token_indices"),
    (r"(^|\.)prompt_", "a tuned prompt"),
    (r"\.(re)?set_weight$|\.reshape_weight$", "weights of other shapes than the model's"),
    (r"modules_to_save|\.weight$", "a whole weight, as PEFT's modules_to_save writes it"),
    (r"\.bias$", "a whole bias, as PEFT's bias='all' and 'lora_only' write it"),
)
"""What keys that are not applied stand for."""
_WHOLE = ("down", "mid", "alpha", "scale")
_BY_OUTPUT = ("up", "bias", "diff", "diff_b", "dora_scale", "magnitude")
"""The tensors that layers in one have in common, and those that have a row for each output."""
_IGNORED = ("base_model.model.", "module.")
# So some files of FLUX.2 have it, from which "diffusion_model.tran" was cut.
_CUT = "diffusion_model.sformer_blocks."
_UNREAD = ("text_projection", "logit_scale")
"""The ends of the names of what a model's CLIP may lack, and no image of it depends on then."""
_TRANSFORMER = "a transformer such as FLUX"
_OF_TRANSFORMERS = (
    *("transformer.", "lora_transformer_", "double_blocks", "single_blocks"),
    "cross_attn",  # Wan's
)
_WIDTHS = {
    768: "Stable Diffusion 1",
    1024: "Stable Diffusion 2",
    2048: "Stable Diffusion XL",
    1280: "the Stable Diffusion XL refiner",
}


def find_layers(
    file: LoraFile, networks: Mapping[str, Any], *, strict: bool = True, others: Iterable[str] = ()
) -> FileLayers:
    """Returns the tensors of a LoRA by layer, with the alphas of PEFT's options in its header.

    Where a file has the names of both diffusers' layout and the original one, as some of SDXL
    have, the latter are left out. A layer of the original code that is several here, as a fused
    q, k and v, gives each its part of the output.

    Args:
        file: the LoRA.
        networks: the networks by component.
        strict: whether a key that fits no layer is an error; else it is left out.
        others: components that the pipeline's family has and this pipeline lacks, whose layers are
            left out, as are projections of texts that no network of the pipeline has.

    Raises:
        ValueError: keys fit no layer; names one, and the model that the LoRA seems to be for. Or
            PEFT's options cannot be applied.
    """
    if any(key.endswith(_CONTROL) for key in file.tensors):
        raise ValueError(
            f"{file.name} is a Control LoRA, which widens the input of FLUX.1's transformer by "
            "another image's; load it into PyTorch's FluxControlPipeline, see docs/tasks/torch.md"
        )
    found: FileLayers = {}
    original: FileLayers = {}
    unknown, absent = [], 0
    names = {prefixless(key) for key in file.tensors}
    own_names = {name: _own_names(name, network) for name, network in networks.items()}
    split = {key: split_key(key) for key in file.tensors}
    places = {key: _place(layer, own_names) for key, (layer, _) in split.items()}
    originals: dict[str, Names] = {}
    if not all(places.values()):
        originals = {name: _original_names(name, network) for name, network in networks.items()}
    lacking = tuple(prefix for name in others for prefix in (f"{name}.", *KOHYA.get(name, ())))
    for key, tensor in file.tensors.items():
        layer, part = split[key]
        tensor = tensor.T if _OF_TABLE in key else tensor
        place, older, shares = places[key], _place(layer, originals), {}
        if part and older and not place:
            shares = _shares(part, tensor, networks, older)
        if part == "weight" and f"{layer}.on_input" not in names:
            unknown.append(key)
        elif part and place:
            found.setdefault(place, {})[part] = tensor
        elif shares:
            for owner, share in shares.items():
                original.setdefault(owner, {}).update(share)
        elif layer.endswith(_UNREAD) or layer.startswith(lacking):
            absent += 1
        else:
            unknown.append(key)
    if absent:
        log.warning("%s: %d tensors are of what the pipeline lacks", file.name, absent)
    twice = {component for component, _ in found} & {"unet"}
    found |= {k: v for k, v in original.items() if k not in found and k[0] not in twice}
    if unknown and strict:
        raise ValueError(_misfit(file, unknown, networks))
    if unknown:
        log.warning("%s: %d tensors fit no layer; %s", file.name, len(unknown), unknown[0])
    if not found:
        guess = seems(file.tensors, networks)
        raise ValueError(f"{file.name} has no layer of {', '.join(networks)}{guess}")
    return with_alphas(found, file)


def split_key(key: str) -> tuple[str, str | None]:
    """Returns the layer's name and what the tensor is of it; None where that is not known."""
    key = prefixless(key)
    if old := _PROCESSOR.fullmatch(key):
        layer, kind, part = old.groups()
        if ".self_attn" in layer or layer.startswith("text_encoder"):
            return f"{layer}.{kind}_proj", part
        return f"{layer}.to_{'out.0' if kind == 'out' else kind}", part
    if xlabs := _XLABS.fullmatch(key):
        return xlabs[1], xlabs[2]
    for pattern, part in _PARTS:
        if match := re.fullmatch(rf"(.+?)\.(?:{pattern})", key):
            return match[1], part
    return key, None


def prefixless(key: str) -> str:
    """Returns a key without what PEFT and wrappers of modules put before and into it."""
    for prefix in _IGNORED:
        key = key.replace(prefix, "")
    return key.replace(_CUT, "diffusion_model.transformer_blocks.")


def seems(tensors: Mapping[str, np.ndarray], networks: Container[str]) -> str:
    """Returns the end of a sentence on a LoRA that does not fit: the model that it seems to be for.

    networks: the components that it does not fit, which may be a transformer's themselves.
    """
    guess = _seems_to_be_for(tensors)
    if guess is None or (guess == _TRANSFORMER and "transformer" in networks):
        return ""
    return f"; it seems to be a LoRA for {guess}"


def _seems_to_be_for(tensors: Mapping[str, np.ndarray]) -> str | None:
    """Returns the model that a LoRA seems to be for, by its keys and its widths."""
    if any(word in key for key in tensors for word in _OF_TRANSFORMERS):
        return _TRANSFORMER
    for key, tensor in tensors.items():
        layer, part = split_key(key)
        if part == "down" and layer.endswith(("attn2.to_k", "attn2_to_k")) and tensor.ndim > 1:
            return _WIDTHS.get(tensor.shape[1])
    return None


def _misfit(file: LoraFile, keys: list[str], networks: Mapping[str, Any]) -> str:
    """Returns the sentence on keys of a LoRA that are not applied."""
    known = (what for pattern, what in _REFUSED if re.search(pattern, keys[0]))
    what = next(known, None)
    if split_key(keys[0])[1] not in (None, "weight"):
        what = None
    why = f"fits no layer of {', '.join(networks)}"
    if what:
        why = f"is of {what}, and is not applied"
    return (
        f"{file.name}: the key {keys[0]!r}{_and_more(keys)} {why}"
        f"{seems(file.tensors, networks)}; strict=False leaves out what does not fit"
    )


def _and_more(keys: list[str]) -> str:
    return f" and {len(keys) - 1} more" if len(keys) > 1 else ""


def _place(layer: str, names: Mapping[str, Mapping[str, Any]]) -> tuple[str, Any] | None:
    return next(((name, own[layer]) for name, own in names.items() if layer in own), None)


def _shares(
    part: str, tensor: np.ndarray, networks: Mapping[str, Any], older: tuple[str, Module]
) -> dict[tuple[str, str], Parts]:
    """Returns a tensor of an original layer for each of the layers that this one is made of.

    It is empty where the tensor cannot be split or swapped like the layer's outputs.
    """
    component, (paths, swapped) = older
    owners = [(component, path) for path in paths]
    of_factors = part.startswith(("hada_", "lokr_"))
    if swapped and of_factors:
        return {}
    if swapped and part in _BY_OUTPUT:
        tensor = np.roll(tensor, len(tensor) // 2, axis=0)
    if len(paths) == 1 or part in _WHOLE:
        return {owner: {part: tensor} for owner in owners}
    kernels = kernel_shapes(networks[component])
    ends = np.cumsum([kernels[path][-1] for path in paths])
    if of_factors:
        starts = [0, *ends[:-1]]
        rows = zip(owners, starts, strict=True)
        return {owner: {part: tensor, ROWS: np.array([i, ends[-1]])} for owner, i in rows}
    if part not in _BY_OUTPUT or tensor.shape[:1] != (ends[-1],):
        return {}
    split = zip(owners, np.split(tensor, ends[:-1]), strict=True)
    return {owner: {part: share} for owner, share in split}


@functools.lru_cache(64)
def _own_names(component: str, network: Any) -> dict[str, str]:
    """Returns the paths of a network's layers by the names that files in its layout have."""
    kohya = KOHYA.get(component, ())
    found: dict[str, str] = {}
    shorter = getattr(getattr(network, "module_class", None), "key_prefix", "")
    for path in dict.fromkeys(name.rpartition(".")[0] for name in layer_shapes(network)):
        aliases = [path, path.removeprefix(shorter)] if shorter else [path]
        for alias in aliases:
            found[f"{component}.{alias}"] = path
            found |= {prefix + alias.replace(".", "_"): path for prefix in kohya}
        found |= {prefix + path: path for prefix in _DOTTED.get(component, ())}
    return found


@functools.lru_cache(64)
def _original_names(component: str, network: Any) -> Names:
    """Returns a network's layers by the names in the original code's layout.

    A layer of the original code may be several here.
    """
    names: Names = {}
    prefixes: tuple[str, ...] = _COMFYUI
    if component == "transformer":
        names, prefixes = adapter_names(network), (f"{component}.", *_DOTTED[component])
    elif getattr(network, "module_class", None) is UNet2DConditionModel:
        with contextlib.suppress(ValueError):
            names = {name: Module((path,)) for name, path in unet_names(network.config).items()}
    found = {prefix + name: own for name, own in names.items() for prefix in prefixes}
    for prefix in KOHYA.get(component, ()):
        found |= {prefix + name.replace(".", "_"): own for name, own in names.items()}
    return found
