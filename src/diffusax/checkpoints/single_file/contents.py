"""Finds out what a single file holds, from the names and shapes of its tensors."""

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from diffusax.checkpoints.gguf import as_in_transformers
from diffusax.checkpoints.markings import marked
from diffusax.checkpoints.original.transformers import ORIGINALS
from diffusax.checkpoints.original.wan import UMT5_KNOWN_BY
from diffusax.checkpoints.tensors import Entry, read_entries, read_metadata
from diffusax.checkpoints.torch_file import read_torch_file

Layout = Literal["original", "diffusers", "open_clip", "transformers"]
Family = Literal["sd1", "sd2", "sdxl", "refiner"]
FileKind = Literal["model", "controlnet", "lora", "embedding", "other"]

SUFFIXES = (".safetensors", ".gguf")
"""The endings of the names of single files."""
TORCH_SUFFIXES = (".pth",)
"""Those of PyTorch's own files, as Wan's autoencoders and text encoder are published."""
_UNET = ("model.diffusion_model.", "")
_TRANSFORMER = ("model.diffusion_model.", "diffusion_model.", "")
_AUTOENCODER = ("first_stage_model.", "vae.", "")
_TEXT_ENCODERS: dict[str, tuple[tuple[str, Layout], ...]] = {
    "text_encoder": (
        ("cond_stage_model.transformer.", "transformers"),
        ("cond_stage_model.model.", "open_clip"),
        ("conditioner.embedders.0.transformer.", "transformers"),
        ("text_encoders.clip_l.transformer.", "transformers"),
        ("text_encoders.qwen3_4b.transformer.", "transformers"),
        ("text_encoders.qwen3_8b.transformer.", "transformers"),
        ("text_encoders.umt5xxl.transformer.", "transformers"),
    ),
    "text_encoder_2": (
        ("conditioner.embedders.1.model.", "open_clip"),
        ("conditioner.embedders.0.model.", "open_clip"),
        ("cond_stage_model.1.transformer.", "transformers"),
        ("text_encoders.t5xxl.transformer.", "transformers"),
    ),
}
_FRAMES: dict[str, dict[Layout, str]] = {
    "AutoencoderKLQwenImage21": {
        "original": "decoder.upsamples.0.upsamples.0.residual.2.weight",
        "diffusers": "decoder.up_blocks.0.upsampler.resample.1.weight",
    },
    "AutoencoderKLQwenImage": {
        "original": "decoder.middle.0.residual.0.gamma",
        "diffusers": "decoder.mid_block.resnets.0.norm1.gamma",
    },
}
"""The tensors by which autoencoders of frames are known; the first has those of the second, too."""
_ALIKE = {
    "AutoencoderKLQwenImage": "AutoencoderKLWan",
    "AutoencoderKLQwenImage21": "AutoencoderKLWan",
}
"""For each class of autoencoders of frames, another whose files have the same names."""
_ALONE = {
    "text_encoder": (
        "text_model.embeddings.token_embedding.weight",
        "model.layers.0.self_attn.q_norm.weight",
        "model.language_model.layers.0.self_attn.q_norm.weight",
        # T5 has biases in its first layer alone.
        "encoder.block.1.layer.0.SelfAttention.relative_attention_bias.weight",
    ),
    "text_encoder_2": ("encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",),
}
"""The tensors by which files with a text encoder alone are known: CLIP's, Qwen3's, Qwen3-VL's,
UMT5's and T5's."""
_FAMILIES: dict[int, Family] = {768: "sd1", 1024: "sd2", 2048: "sdxl", 1280: "refiner"}
"""By the width of the text embeddings that the denoiser attends to."""
_PREDICTION_TYPES = {
    "v": "v_prediction",
    "v_prediction": "v_prediction",
    "epsilon": "epsilon",
    "eps": "epsilon",
}
_MARKERS = frozenset(
    ("v_pred", "ztsnr", "edm_mean", "edm_std", "edm_vpred.sigma_max", "edm_vpred.sigma_min")
)
"""Tensors that say how a model is sampled from, under the names that ComfyUI gives them."""
_LORA = "a LoRA; give it to load_lora_weights of a pipeline"
_EMBEDDING = "a textual inversion; give it to load_textual_inversion of a pipeline"
_FOREIGN = {
    "joint_blocks.": "Stable Diffusion 3, which diffusax does not have",
    "lora_controlnet": "a ControlNet as a LoRA, which diffusax does not read",
    "lora_unet_": _LORA,
    ".lora_down.": _LORA,
    ".lora_A.": _LORA,
    ".lora.down.": _LORA,
    ".hada_w1_a": _LORA,
    ".lokr_w1": _LORA,
    ".processor.qkv_lora": _LORA,
    ".processor.proj_lora": _LORA,
    "double_blocks.": "another model of the Flux family, such as Chroma, which diffusax lacks",
    "emb_params": _EMBEDDING,
    "clip_l": _EMBEDDING,
    "to_k_ip": "an IP-Adapter; give it to load_ip_adapter of a pipeline",
    "token_embd": "a language model that diffusax lacks",
    "image_proj": "an IP-Adapter; give it to load_ip_adapter of a pipeline",
}
"""What other files are, by a part of the name of a tensor."""


@dataclasses.dataclass(frozen=True)
class Part:
    """The tensors of one network in a single file."""

    path: Path
    name: str
    """The component: unet, transformer, controlnet, vae, text_encoder or text_encoder_2."""
    layout: Layout
    entries: Mapping[str, Entry] = dataclasses.field(repr=False)
    """The places of the tensors by their names without the part's prefix."""
    averages: Mapping[str, Entry] = dataclasses.field(default_factory=dict, repr=False)
    """Of a UNet, the places of the averaged parameters by the same names, if the file has them."""
    class_name: str = ""
    """The class in diffusers, where the component may be of several that differ in layout."""

    def read_as(self, class_name: str | None) -> "Part":
        """Returns the part as of another class, where files of both have the same names."""
        if class_name is None or _ALIKE.get(self.class_name) != class_name:
            return self
        return dataclasses.replace(self, class_name=class_name)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Returns the shape of a tensor; None where there is none of this name."""
        return self.entries[name].shape if name in self.entries else None

    def count(self, start: str) -> int:
        """Returns the number of blocks whose tensors' names begin so."""
        return len({n[len(start) :].split(".")[0] for n in self.entries if n.startswith(start)})

    @functools.cached_property
    def context_dim(self) -> int | None:
        """The width of the text embeddings that a denoiser attends to; None without attention."""
        found = (e for name, e in self.entries.items() if name.endswith(".attn2.to_k.weight"))
        entry = next(found, None)
        return None if entry is None or len(entry.shape) != 2 else entry.shape[1]

    @property
    def family(self) -> Family | None:
        """The family that a denoiser belongs to; None where it is of none that is known."""
        return _FAMILIES.get(self.context_dim or 0)

    @property
    def in_channels(self) -> int | None:
        """The number of channels of a denoiser's input."""
        name = "input_blocks.0.0.weight" if self.layout == "original" else "conv_in.weight"
        shape = self.shape(name)
        return None if shape is None or len(shape) != 4 else shape[1]


@dataclasses.dataclass(frozen=True)
class Contents:
    """What a single file holds."""

    path: Path
    entries: Mapping[str, Entry] = dataclasses.field(repr=False)
    metadata: Mapping[str, str]
    """The texts in the file's header, by name."""
    parts: Mapping[str, Part]
    """The networks, by the names of the components."""

    @property
    def is_pipeline(self) -> bool:
        """Whether it holds a whole model or more than one network of it, not a network alone."""
        return len(self.parts) > 1

    @property
    def prediction_type(self) -> str | None:
        """The prediction type that the file names; None where it names none.

        It does so by a tensor named `v_pred`, or in its header in the words of Stability AI's
        specification (github.com/Stability-AI/ModelSpec): sd-scripts writes `prediction_type`,
        ComfyUI `predict_key`.
        """
        if "v_pred" in self.entries or self.has_continuous_levels:
            return "v_prediction"
        for name in ("modelspec.prediction_type", "modelspec.predict_key"):
            if (said := self.metadata.get(name, "").lower()) in _PREDICTION_TYPES:
                return _PREDICTION_TYPES[said]
        v = "768-v" in self.metadata.get("modelspec.architecture", "")
        return "v_prediction" if v else None

    @property
    def has_zero_terminal_snr(self) -> bool:
        """Whether the file says that the last noise level is pure noise (Lin et al. 2024)."""
        return "ztsnr" in self.entries

    @property
    def has_continuous_levels(self) -> bool:
        """Whether the file names the noise levels of EDM with v prediction, as CosXL's do."""
        return "edm_vpred.sigma_max" in self.entries


def read_contents(path: Path) -> Contents:
    """Finds the networks in a single file, from its header alone.

    Raises:
        ValueError: the file is neither safetensors nor GGUF nor PyTorch's, or holds no network
            that diffusax knows; says what it is instead, as far as that can be told.
    """
    _check_suffix(path)
    entries, metadata = _read(path)
    parts = {part.name: part for part in _find(path, entries)}
    if not parts:
        raise ValueError(f"{path} holds {_foreign(entries)}")
    return Contents(path, entries, metadata, parts)


def kind_of_file(path: Path) -> FileKind:
    """Finds out what kind of thing a file holds, from its header alone.

    Raises:
        ValueError: the file is neither safetensors nor GGUF, or cannot be read.
    """
    _check_suffix(path)
    entries, _ = _read(path)
    names = {part.name for part in _find(path, entries)}
    if names:
        whole = bool(names & {"unet", "transformer"}) and len(names) > 1
        return "model" if whole else "controlnet" if names == {"controlnet"} else "other"
    foreign = _foreign(entries)
    return "lora" if foreign == _LORA else "embedding" if foreign == _EMBEDDING else "other"


def is_single_file(path: Path) -> bool:
    """Returns whether a path is a file that only `read_contents` can read.

    PyTorch's own files are read where they are named, but not looked for.
    """
    return path.suffix.lower() in SUFFIXES and path.is_file()


def _read(path: Path) -> tuple[dict[str, Entry], dict[str, str]]:
    """Returns the tensors of a file and the texts in its header, by name."""
    if path.suffix.lower() in TORCH_SUFFIXES:
        return read_torch_file(path), {}
    metadata = read_metadata(path)
    (entries,) = marked([as_in_transformers(read_entries(path))], metadata)
    return entries, metadata


def _check_suffix(path: Path) -> None:
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    if path.suffix.lower() not in (*SUFFIXES, *TORCH_SUFFIXES):
        raise ValueError(
            f"{path} is not a .safetensors file, and loading it could run code; convert "
            "it to safetensors where you trust it, or take the model's .safetensors file"
        )


def _find(path: Path, entries: Mapping[str, Entry]) -> list[Part]:
    """Returns the parts of a file, at most one for each component."""
    found = [
        _denoiser(path, entries),
        _transformer(path, entries),
        _controlnet(path, entries),
        _autoencoder(path, entries),
        *(_text_encoder(path, entries, name) for name in _TEXT_ENCODERS),
    ]
    return [part for part in found if part is not None] or _text_encoder_alone(path, entries)


def _denoiser(path: Path, entries: Mapping[str, Entry]) -> Part | None:
    for prefix in _UNET:
        if f"{prefix}input_blocks.0.0.weight" in entries:
            own = _without(prefix, entries)
            if any(name.startswith(("input_hint_block.", "zero_convs.")) for name in own):
                return None
            flat = {name: f"model_ema.diffusion_model{name.replace('.', '')}" for name in own}
            averages = {name: entries[key] for name, key in flat.items() if key in entries}
            return Part(path, "unet", "original", own, averages)
        if f"{prefix}conv_in.weight" in entries and f"{prefix}conv_norm_out.weight" in entries:
            return Part(path, "unet", "diffusers", _without(prefix, entries))
    return None


def _transformer(path: Path, entries: Mapping[str, Entry]) -> Part | None:
    for prefix in _TRANSFORMER:
        for class_name, original in ORIGINALS.items():
            layouts: dict[Layout, tuple[str, ...]] = {
                "original": original.known_by,
                "diffusers": original.known_by_in_diffusers,
            }
            for layout, names in layouts.items():
                if all(prefix + name in entries for name in names):
                    own = _without(prefix, entries)
                    return Part(path, "transformer", layout, own, class_name=class_name)
    return None


def _controlnet(path: Path, entries: Mapping[str, Entry]) -> Part | None:
    for prefix in ("control_model.", ""):
        if f"{prefix}input_hint_block.0.weight" in entries:
            return Part(path, "controlnet", "original", _without(prefix, entries))
        if f"{prefix}controlnet_cond_embedding.conv_in.weight" in entries:
            return Part(path, "controlnet", "diffusers", _without(prefix, entries))
    return None


def _autoencoder(path: Path, entries: Mapping[str, Entry]) -> Part | None:
    for prefix in _AUTOENCODER:
        for class_name, layouts in _FRAMES.items():
            for layout, name in layouts.items():
                if f"{prefix}{name}" in entries:
                    own = _without(prefix, entries)
                    return Part(path, "vae", layout, own, class_name=class_name)
        if f"{prefix}decoder.conv_in.weight" in entries:
            own = _without(prefix, entries)
            blocks = any(name.startswith("decoder.up_blocks.") for name in own)
            # FLUX.2's holds the statistics of its latents.
            kind = "AutoencoderKLFlux2" if "bn.running_mean" in own else "AutoencoderKL"
            return Part(path, "vae", "diffusers" if blocks else "original", own, class_name=kind)
    return None


def _text_encoder(path: Path, entries: Mapping[str, Entry], name: str) -> Part | None:
    for prefix, layout in _TEXT_ENCODERS[name]:
        if own := _without(prefix, entries):
            return Part(path, name, layout, own)
    return None


def _text_encoder_alone(path: Path, entries: Mapping[str, Entry]) -> list[Part]:
    if any(name.startswith("vision_model.") for name in entries):
        return []
    if UMT5_KNOWN_BY in entries:
        return [Part(path, "text_encoder", "original", _without("", entries))]
    for name, known in _ALONE.items():
        if any(tensor in entries for tensor in known):
            return [Part(path, name, "transformers", _without("", entries))]
    return []


def _without(prefix: str, entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """Returns the entries whose names have the prefix, by their names without it."""
    found = (name for name in entries if name.startswith(prefix) and name not in _MARKERS)
    return {name[len(prefix) :]: entries[name] for name in found}


def _foreign(entries: Mapping[str, Entry]) -> str:
    """Says what a file holds in which no network is known."""
    for part, text in _FOREIGN.items():
        if any(part in name for name in entries):
            return text
    first = next(iter(entries), None)
    what = "no tensors" if first is None else f"tensors such as {first!r}"
    return f"{what}, and no UNet, ControlNet or autoencoder that diffusax knows"
