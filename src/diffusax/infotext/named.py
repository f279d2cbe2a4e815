"""Settings under the names that various programs have for them."""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

from diffusax.infotext.text import write_others

_NAMES: dict[str, tuple[str, ...]] = {
    "prompt": ("prompt", "positive_prompt", "positive", "text_prompts"),
    "negative_prompt": (
        *("negative_prompt", "negativeprompt", "negative", "uc", "negative_prompts"),
    ),
    "Steps": ("steps", "num_inference_steps"),
    "Sampler": ("sampler", "sampler_name"),
    "Schedule type": ("scheduler", "schedule"),
    "CFG scale": ("cfg_scale", "cfgscale", "cfg", "guidance_scale", "scale"),
    "Seed": ("seed", "noise_seed"),
    "width": ("width",),
    "height": ("height",),
    "Size": ("size", "resolution"),
    "Model": (
        *("model", "model_name", "base_model", "ckpt", "ckpt_name", "stable_diffusion_model"),
        *("use_stable_diffusion_model",),
    ),
    "VAE": ("vae", "vae_model", "use_vae_model", "vae_name"),
    "Denoising strength": ("strength", "denoising_strength", "denoise"),
    "Clip skip": ("clip_skip",),
}
"""The names of each setting, in small letters with underscores, by webui's name."""
_BY_NAME = {name: own for own, names in _NAMES.items() for name in names}
_OF_FILES = (".safetensors", ".ckpt", ".sft", ".gguf", ".pt", ".pth", ".bin")

_SAMPLERS = {
    **{"euler": "Euler", "euler_ancestral": "Euler a", "euler_a": "Euler a", "heun": "Heun"},
    **{"dpm_2": "DPM2", "kdpm_2": "DPM2", "dpm_2_ancestral": "DPM2 a", "kdpm_2_a": "DPM2 a"},
    **{"lms": "LMS", "ddim": "DDIM", "ddim_v3": "DDIM", "plms": "PLMS", "pndm": "PLMS"},
    **{"uni_pc": "UniPC", "unipc": "UniPC", "lcm": "LCM", "tcd": "TCD", "ddpm": "DDPM"},
    **{"dpmpp_2m": "DPM++ 2M", "dpmpp_sde": "DPM++ SDE", "dpmpp_2m_sde": "DPM++ 2M SDE"},
    **{"dpmpp_3m_sde": "DPM++ 3M SDE", "dpmpp_2s": "DPM++ 2S", "dpmpp_3m": "DPM++ 3M"},
    **{"deis": "DEIS", "dpmpp_2s_ancestral": "DPM++ 2S a"},
}
"""webui's names of samplers by those of k-diffusion, ComfyUI and InvokeAI."""
_SCHEDULES = {
    **{"karras": "Karras", "normal": "Uniform", "simple": "Simple", "ddim_uniform": "DDIM"},
    **{"exponential": "Exponential", "polyexponential": "Polyexponential", "beta": "Beta"},
    **{"sgm_uniform": "SGM Uniform", "kl_optimal": "KL Optimal"},
}


@dataclasses.dataclass
class Settings:
    """Settings of an image by webui's names, with the prompts apart."""

    prompt: str
    negative_prompt: str
    settings: dict[str, Any]

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "Settings":
        """Makes them of a program's settings; `loras` are pairs of name and weight."""
        values = {_own(name): value for name, value in given.items() if not _empty(value)}
        prompt, negative = (_words(values.pop(n, "")) for n in ("prompt", "negative_prompt"))
        for name, weight in values.pop("loras", ()):
            if name and name != "None" and f"<lora:{stem(name)}:" not in prompt:
                prompt += f" <lora:{stem(name)}:{weight}>"
        width, height = values.pop("width", None), values.pop("height", None)
        if width and height:
            values["Size"] = f"{width}x{height}"
        for name in ("Model", "VAE"):
            if name in values:
                values[name] = stem(values[name])
        if "Sampler" in values:
            sampler, schedule = webui_sampler(str(values["Sampler"]), values.get("Schedule type"))
            values |= {"Sampler": sampler, "Schedule type": schedule}
        first = {name: values.pop(name) for name in _ORDER if not _empty(values.get(name))}
        rest = {name: _flat(value) for name, value in values.items() if not _empty(value)}
        return cls(prompt.strip(), negative.strip(), first | rest)

    @staticmethod
    def known(given: Mapping[str, Any]) -> dict[str, Any]:
        """Returns those of the settings that have a name here."""
        return {name: value for name, value in given.items() if _own(name) in _NAMES}

    @staticmethod
    def tells(given: Mapping[str, Any]) -> bool:
        """Returns whether these are settings of an image: a prompt, and two more."""
        own = {_own(name) for name in given}
        return "prompt" in own and len(own & set(_NAMES)) > 2


_ORDER = ("Steps", "Sampler", "Schedule type", "CFG scale", "Seed", "Size", "Model")


def to_text(found: Settings) -> str:
    """Returns the settings in webui's form."""
    return write_others(found.prompt, found.negative_prompt, found.settings)


def webui_sampler(name: str, schedule: Any = None) -> tuple[str, str | None]:
    """Returns webui's names of a sampler and a schedule type for those of other programs."""
    plain = name.lower().strip().removeprefix("sample_").removesuffix("_gpu")
    if plain.startswith("k_"):
        plain = plain.removeprefix("k_")
    for end in ("_karras", "_ka", "_k"):
        if plain.endswith(end) and plain.removesuffix(end) in _SAMPLERS:
            plain, schedule = plain.removesuffix(end), "karras"
    known = _SAMPLERS.get(plain, name)
    if schedule is None:
        # webui's own choice for these is Karras', which those programs name.
        return known, "Uniform" if plain in _SAMPLERS and known.startswith("DPM") else None
    return known, _SCHEDULES.get(str(schedule).lower(), str(schedule))


def stem(name: Any) -> str:
    """Returns a model's name for that of its file, which may be a path of either kind."""
    text = PurePosixPath(PureWindowsPath(str(name)).as_posix()).name or str(name)
    end = next((end for end in _OF_FILES if text.lower().endswith(end)), "")
    return text[: len(text) - len(end)]


def _own(name: str) -> str:
    # cfgScale, "Guidance Scale" and guidance_scale are one name.
    plain = re.sub(r"(?<=[a-z])(?=[A-Z])|[ -]+", "_", str(name)).lower()
    return _BY_NAME.get(plain, str(name))


def _words(value: Any) -> str:
    if isinstance(value, list):
        return "\n".join(map(_words, value))
    return value if isinstance(value, str) else ""


def _empty(value: Any) -> bool:
    return value is None or value is False or value in ("", [], {}, "None")


def _flat(value: Any) -> Any:
    """Returns a value for a line of settings, in a few words."""
    if isinstance(value, Mapping):
        return " ".join(map(str, value.values()))[:200]
    if isinstance(value, Iterable) and not isinstance(value, str):
        return " ".join(map(str, value))[:200]
    return value[:200] if isinstance(value, str) else value
