"""Further keywords of diffusers' loading methods: what each means here, and those unknown.

diffusers logs a warning of keywords that it does not expect, and goes on; so do these methods.
"""

import difflib
import logging
from collections.abc import Collection, Mapping
from typing import Any

logger = logging.getLogger(__name__)

OF_HUB = ("revision", "token", "local_files_only", "cache_dir")
"""The keywords that say where and how files of the Hub are found."""
NO_EFFECT = frozenset(
    {
        # How PyTorch reads files and fills its modules.
        *("use_safetensors", "low_cpu_mem_usage", "disable_mmap", "fast_init"),
        *("ignore_mismatched", "offload_state_dict", "offload_folder", "offload_buffers"),
        *("device_map", "max_memory", "keep_in_fp32_modules", "attn_implementation", "use_fast"),
        *("flashpack_kwargs", "disable_mmap", "load_connected_pipeline", "trust_remote_code"),
        # What versions of huggingface_hub have dropped, or have no part in what is downloaded.
        *("resume_download", "proxies", "mirror", "local_dir", "local_dir_use_symlinks"),
        *("user_agent", "custom_revision", "etag_timeout", "_commit_hash", "commit_hash"),
        # ONNX Runtime's.
        *("provider", "provider_options", "sess_options", "file_name"),
        # What no component here reads.
        *("add_watermarker", "load_safety_checker", "from_flax", "from_tf", "safety_concept"),
        *("output_loading_info", "use_onnx", "use_flashpack"),
        *("silence_dtype_warnings", "is_main_process", "save_function", "return_unused_kwargs"),
    }
)
"""The keywords that are accepted and change nothing, as all of diffusers' that have no part here;
those in `_REFUSED` where they ask for nothing."""
_HUB = ("force_download", "use_auth_token")
_REFUSED = {
    "use_onnx": "must be False: diffusax runs networks by XLA; load the checkpoint's safetensors",
    "use_flashpack": "must be False: diffusax reads safetensors",
    "from_flax": "must be False: open files of Flax with FlaxStableDiffusionPipeline",
    "from_tf": "must be False: diffusax reads safetensors",
    "output_loading_info": "must be False: keys that do not fit are an error that lists them",
    "return_unused_kwargs": "must be False: unknown keywords are logged",
}
"""What is said of keywords that ask for what diffusax does not have."""


def take_keywords(
    owner: str, given: Mapping[str, Any], known: Collection[str] = (), *, strict: bool = False
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Splits further keywords of a loading method into those of `known` and those of the Hub.

    Unknown ones are logged and left out, as diffusers does.

    Args:
        owner: the class or function, for the warning.
        given: the keywords by name.
        known: the names that have a meaning to the method.
        strict: whether an unknown keyword is an error, where leaving it out would load other files.

    Returns:
        The keywords of `known`, and token and force_download where they are given, for
        `hub.resolve`.

    Raises:
        ValueError: one asks for what diffusax does not have, such as quantised weights.
        TypeError: one is unknown, with `strict`.
    """
    kept, rest = {}, {}
    for name, value in given.items():
        if name in known:
            kept[name] = value
        elif name in _REFUSED and value:
            raise ValueError(f"{name} {_REFUSED[name]} (got {value!r:.80})")
        elif name not in NO_EFFECT:
            rest[name] = value
    hub = {}
    if rest.pop("force_download", False):
        hub["force_download"] = True
    if (token := rest.pop("use_auth_token", None)) is not None:
        hub["token"] = token
    if rest and strict:
        raise TypeError(
            f"{owner}() has no argument {', '.join(map(repr, rest))}{_meant(rest, known)}"
        )
    if rest:
        logger.warning(
            "Keyword arguments %s are not expected by %s and will be ignored%s",
            rest,
            owner,
            _meant(rest, known),
        )
    return kept, hub


def stored_as(quantization_config: Any) -> Any:
    """Returns the `weights` that one of diffusers' configs of quantisation asks for.

    BitsAndBytesConfig, QuantoConfig and TorchAoConfig of eight bits are "int8" or "fp8", in the
    way of diffusax. GGUFQuantizationConfig is "file", as files say themselves how they are stored.
    PipelineQuantizationConfig gives them by component.

    Raises:
        ValueError: it asks for something else.
    """
    own = quantization_config if isinstance(quantization_config, Mapping) else None
    told = vars(quantization_config) if own is None else own
    if mapping := told.get("quant_mapping"):
        return {name: stored_as(config) for name, config in mapping.items()}
    if "quant_backend" in told:
        kinds = {"quant_method": told["quant_backend"], **(told.get("quant_kwargs") or {})}
        names = told.get("components_to_quantize") or ("default",)
        names = [names] if isinstance(names, str) else names
        return dict.fromkeys(names, stored_as(kinds))
    method = str(getattr(told.get("quant_method"), "value", told.get("quant_method")))
    fields = ("weights_dtype", "quant_type", "load_in_8bit", "_load_in_8bit")
    asked = {name: told[name] for name in fields if told.get(name)}
    kinds_of = {"int8": "int8", "float8": "fp8"}
    texts = [f"{value} {type(value).__name__}".lower() for value in asked.values()]
    found = next((kinds_of[k] for k in kinds_of if any(k in text for text in texts)), None)
    if method == "gguf":
        return "file"
    if found is None and any(name.endswith("load_in_8bit") for name in asked):
        return "int8"
    if found is None or "int4" in " ".join(texts):
        raise ValueError(
            "quantization_config must ask for weights of eight bits (got "
            f"{type(quantization_config).__name__} of {method}); give weights='int8' or 'fp8' "
            "instead, which halve what bfloat16 takes"
        )
    return found


def hub_keywords(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns token and force_download for `hub.resolve`, where further keywords give them.

    Raises:
        ValueError: one asks for what diffusax does not have.
    """
    own = {k: v for k, v in given.items() if k in _HUB or k in _REFUSED}
    return take_keywords("", own)[1]


def _meant(unknown: Mapping[str, Any], known: Collection[str]) -> str:
    """Returns the known names that unknown ones resemble; else nothing."""
    pairs = ((name, difflib.get_close_matches(name, known, 1)) for name in unknown)
    return "".join(f"; {name} may be meant to be {found[0]}" for name, found in pairs if found)
