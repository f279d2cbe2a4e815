"""Writes the settings of an image as text, and reads such texts.

The text is what stable-diffusion-webui writes into its files (processing.py, create_infotext): the
prompt, the negative prompt, and a line of settings. webui quotes no prompt, so that one with a line
"Negative prompt: ..." comes back as another one. What its rules do not read back exactly is written
once more, as JSON, under the setting `diffusax`.
"""

import contextlib
import dataclasses
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from diffusax._version import __version__
from diffusax.infotext.samplers import UnknownSampler, resolve, to_webui

EXACT = "diffusax"
"""The setting with the fields that the rest of the text does not give exactly, as JSON."""
_SETTING = re.compile(r'(\w[\w \-/]{1,60}):\s*("(?:\\.|[^\\"])+"|[^,]*)(?:,|$)')
"""A setting in the last line, as in webui's infotext_utils.py, but names are bounded: without that,
a line without a colon takes time that grows with the square of its length."""
_RULE = "Strength rule"
"""The setting with the rule of how many steps a strength leaves, where it is not diffusers'."""
_SIZE = re.compile(r"(\d{1,6})x(\d{1,6})")
_FEWEST = 3
"""A last line of fewer settings belongs to the prompt, as there."""
_NEGATIVE = "Negative prompt:"

_PLAIN = {
    **{"prompt": "", "negative_prompt": "", "guidance_rescale": 0, "mask_blur": 0, "adapters": {}},
    **{"controls": [], "prompt_weighting": True, "long_prompt": True, "number": 0, "noise": "jax"},
    **{"eta": 0, "strength_rule": "diffusers", "variation_strength": 0, "masked_fill": "image"},
}
"""What the text leaves out: fields with these values."""
_NUMBERS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "Steps": ("num_inference_steps", int),
    "CFG scale": ("guidance_scale", float),
    "Image CFG scale": ("image_guidance_scale", float),
    "CFG rescale": ("guidance_rescale", float),
    "Seed": ("seed", int),
    "Denoising strength": ("strength", float),
    "Eta DDIM": ("eta", float),
    "Mask blur": ("mask_blur", float),
    "Image number": ("number", int),
    "Variation seed": ("variation_seed", int),
    "Variation seed strength": ("variation_strength", float),
    "Frames": ("num_frames", int),
    "FPS": ("fps", int),
    "CFG scale 2": ("guidance_scale_2", float),
}
"""The fields that are numbers, by webui's names for them."""
_SILENT = frozenset(
    (
        *("Model hash", "VAE hash", "Lora hashes", "TI hashes", "TI", "Hashes", "Version", "App"),
        *("Size", "Model", "Sampler", "Schedule type", "Clip skip", "Prompt weighting", "Emphasis"),
        *("Long prompt", "RNG", "Inpaint area", "Masked area padding", "Batch size", "Batch pos"),
        *("Created Date", "Civitai resources", "Civitai metadata", "User", "Time", EXACT),
        *("Lora weights", "Raw prompt", "Raw negative prompt", "Pipeline", "Operations"),
        *("Image", "Mask", _RULE),
    )
)
"""Settings that are read elsewhere, or that decide nothing about the pixels."""
_MASKED = {"noise": "latent noise", "nothing": "latent nothing"}
"""webui's words for what latents begin with under a mask."""
_OFF = {
    "Mask mode": ("Inpaint masked",),
    "Masked content": ("original",),
    "Tiling": ("False",),
    "Restore faces": ("False",),
    "Eta": ("0", "0.0"),
}
"""Values that leave a setting off."""


@dataclasses.dataclass
class Found:
    """What a text says of an image."""

    fields: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Its settings by the names of `write`; those that the text does not state are left out."""
    left_out: list[str] = dataclasses.field(default_factory=list)
    """What the text states and `fields` lacks, such as "Variation seed: 5"."""
    stated: dict[str, str] = dataclasses.field(default_factory=dict)
    """Where a field comes from, such as "Steps: 20" by num_inference_steps."""


def write(fields: Mapping[str, Any], more: Mapping[str, Any] | None = None) -> str:
    """Returns the text `parameters` for the file of one image, which `read` reads back exactly.

    Args:
        fields: its settings, some of: prompt, negative_prompt, num_inference_steps, sampler (a name
            of `SAMPLER_NAMES`, or a class), guidance_scale, image_guidance_scale, guidance_rescale,
            seed, variation_seed, variation_strength, number (of the image among those of its
            seed), masked_fill ("image", "noise" or "nothing"), noise, width, height, model,
            strength, strength_rule, eta, clip_skip (layers to leave out), mask_blur,
            padding_mask_crop, prompt_weighting, long_prompt, adapters (weights by name), num_frames
            and fps of a video, guidance_scale_2 (Wan 2.2's of the less noisy steps), controls
            (mappings with model, scale, start, end). Those that are None are left out.
        more: further settings by the names that the text has for them.
    """
    given = {name: value for name, value in fields.items() if value is not None}
    prompt, negative = str(given.get("prompt", "")), str(given.get("negative_prompt", ""))
    settings = _settings_of(given) | dict(more or {})
    settings["Version"] = f"diffusax {__version__}"
    text = _compose(_tagged(prompt, given.get("adapters")), negative, settings)
    read_back = read(text).fields
    exact = {
        name: value
        for name, value in given.items()
        if read_back.get(name, _PLAIN.get(name)) != value
    }
    exact |= {
        name: None
        for name, value in read_back.items()
        if name not in given and value != _PLAIN.get(name)
    }
    return f"{text}, {EXACT}: {_json(_json(exact))}" if exact else text


def write_others(prompt: str, negative_prompt: str, settings: Mapping[str, Any]) -> str:
    """Returns the text for settings of another program, by webui's names where it has them."""
    text = _compose(prompt, negative_prompt, settings)
    given = {"prompt": prompt, "negative_prompt": negative_prompt}
    read_back = dict(zip(given, parse(text)))
    exact = {name: value for name, value in given.items() if read_back[name] != value}
    return f"{text}, {EXACT}: {_json(_json(exact))}" if exact else text


def _tagged(prompt: str, adapters: Mapping[str, Any] | None) -> str:
    """Returns a prompt that names LoRAs, as webui has no other place for them."""
    tags = [f"<lora:{name}:{_weight(weight)}>" for name, weight in (adapters or {}).items()]
    return " ".join(filter(None, [prompt, *tags]))


def _weight(weight: Any) -> str:
    """Writes a LoRA's weight: one number, or those of the text encoders and the rest."""
    if not isinstance(weight, Mapping):
        return str(_number(weight))
    rest = weight.get("unet", weight.get("transformer", 0.0))
    return f"te={_number(weight.get('text_encoder', 0.0))}:unet={_number(rest)}"


def _settings_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of the last line by webui's names."""
    get = given.get
    sampler, schedule = to_webui(get("sampler") or "")
    crop = get("padding_mask_crop")
    size = f"{get('width')}x{get('height')}" if get("width") and get("height") else None
    settings = {
        "Steps": get("num_inference_steps"),
        "Sampler": sampler or None,
        "Schedule type": schedule,
        "CFG scale": get("guidance_scale"),
        "Image CFG scale": get("image_guidance_scale"),
        "CFG scale 2": get("guidance_scale_2"),
        "CFG rescale": get("guidance_rescale") or None,
        "Seed": get("seed"),
        "Image number": get("number") or None,
        "Variation seed": get("variation_seed") if get("variation_strength") else None,
        "Variation seed strength": get("variation_strength") or None,
        "Size": size,
        "Frames": get("num_frames"),
        "FPS": get("fps"),
        "Model": get("model") or None,
        "Denoising strength": get("strength"),
        _RULE: None if get("strength_rule") == "diffusers" else get("strength_rule"),
        "Eta DDIM": get("eta") or None,
        # There, 1 leaves no layer out.
        "Clip skip": None if get("clip_skip") is None else given["clip_skip"] + 1,
        "Masked content": _MASKED.get(get("masked_fill") or ""),
        "Mask blur": get("mask_blur"),
        "Inpaint area": None if crop is None else "Only masked",
        "Masked area padding": crop,
        "Prompt weighting": None if get("prompt_weighting", True) else False,
        "Long prompt": None if get("long_prompt", True) else False,
        # Its name there for the numbers of torch.Generator("cpu").
        "RNG": "CPU" if get("noise") == "torch" else "jax",
    }
    controls = {f"ControlNet {i}": _control(c) for i, c in enumerate(get("controls", ()))}
    return {name: _number(value) for name, value in {**settings, **controls}.items()}


def _control(control: Mapping[str, Any]) -> str:
    """Writes a ControlNet as webui's extension does."""
    settings = {
        "Model": control["model"],
        "Weight": control.get("scale", 1.0),
        "Guidance Start": control.get("start", 0.0),
        "Guidance End": control.get("end", 1.0),
        "Image": control.get("file"),
    }
    return _line(settings)


def _compose(prompt: str, negative: str, settings: Mapping[str, Any]) -> str:
    lines = [prompt, *([f"{_NEGATIVE} {negative}"] if negative else []), _line(settings)]
    # Broken characters of file names and arguments fit into no file.
    return "\n".join(lines).encode(errors="backslashreplace").decode()


def _line(settings: Mapping[str, Any]) -> str:
    given = {name: value for name, value in settings.items() if value is not None}
    return ", ".join(f"{name}: {_quoted(_number(value))}" for name, value in given.items())


def _number(value: Any) -> Any:
    """Writes a number as webui does: 7 and 7.5, not 7.0."""
    return repr(value).removesuffix(".0") if isinstance(value, float) else value


def _quoted(value: Any) -> str:
    """Quotes a value that would otherwise end the setting, or come back as another one."""
    text = str(value)
    plain = text.isprintable() and text == text.strip() and not {*text} & {",", ":"}
    return text if plain and text[:1] + text[-1:] != '""' else _json(text)


def _json(value: Any) -> str:
    """Returns JSON in one line, without the characters that break lines or files."""
    text = json.dumps(value, ensure_ascii=False)
    return "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text)


def read(text: str) -> Found:
    """Reads the settings from a text, of diffusax, of webui, or of a program with its form.

    A ControlNet's image is not in a text; its settings are in `controls`.
    """
    prompt, negative, settings = parse(text)
    if "FLUX" in settings.get("Civitai resources", "") or "FLUX" in settings.get("Model", ""):
        # Civitai writes one for FLUX, which has none (forge's infotext_utils.py).
        settings.pop("Clip skip", None)
    if "Distilled CFG Scale" in settings and settings.get("CFG scale", "1") in ("1", "1.0"):
        # forge's name for the guidance that FLUX was distilled with, which is the pipeline's.
        settings["CFG scale"] = settings.pop("Distilled CFG Scale")
    found = Found({"prompt": prompt, "negative_prompt": negative})
    _read_numbers(settings, found)
    _read_sampler(settings, found)
    _read_names(settings, found)
    if "strength" in found.fields or "Image" in settings:
        found.left_out.append(f"the image that it began with{_file(settings, 'Image')}")
    if "mask_blur" in found.fields or "Mask" in settings:
        found.left_out.append(f"the mask{_file(settings, 'Mask')}")
    for name, value in settings.items():
        if name.startswith("ControlNet ") and (control := _read_control(value)):
            found.fields.setdefault("controls", []).append(control)
        elif name not in _SILENT and name not in _NUMBERS and value not in _off(name):
            found.left_out.append(_shown(name, value))
    exact = _exact(settings)
    found.fields = {n: v for n, v in {**found.fields, **exact}.items() if v is not None}
    return found


def _off(name: str) -> tuple[str, ...]:
    """Returns the values of a setting that are off, or read elsewhere."""
    return (*_OFF.get(name, ()), *(_MASKED.values() if name == "Masked content" else ()))


def parse(text: str) -> tuple[str, str, dict[str, str]]:
    """Returns a text's prompt, negative prompt and settings, by webui's rules."""
    *lines, last = text.strip().split("\n")
    settings = dict(_settings(last))
    if len(_SETTING.findall(last)) < _FEWEST:
        lines, settings = [*lines, last], {}
    found: dict[bool, list[str]] = {False: [], True: []}
    negative = False
    for line in map(str.strip, lines):
        negative = negative or line.startswith(_NEGATIVE)
        part = found[negative]
        line = line.removeprefix(_NEGATIVE).strip() if line.startswith(_NEGATIVE) else line
        # An empty beginning is none there.
        if line or any(part):
            part.append(line)
    return "\n".join(found[False]), "\n".join(found[True]), settings


def webui_parameters(text: str) -> dict[str, Any]:
    """Returns a text's settings as webui's parse_generation_parameters does, with its defaults."""
    prompt, negative, settings = parse(text)
    exact = _exact(settings)
    found: dict[str, Any] = {
        "Prompt": _tagged(exact["prompt"], exact.get("adapters")) if "prompt" in exact else prompt,
        "Negative prompt": exact.get("negative_prompt") or negative,
    }
    for name, value in settings.items():
        if name == EXACT:
            continue
        if size := re.fullmatch(r"(\d+)x(\d+)", value):
            found |= {f"{name}-1": size[1], f"{name}-2": size[2]}
        else:
            found[name] = value
    if "Hypernet" in found:
        strength = found.get("Hypernet strength", "1.0")
        found["Prompt"] += f"<hypernet:{found['Hypernet']}:{strength}>"
    if "Hires resize-1" not in found:
        found |= {"Hires resize-1": 0, "Hires resize-2": 0}
    defaults = {
        "Clip skip": "1",
        "Hires sampler": "Use same sampler",
        "Hires schedule type": "Use same scheduler",
        "Hires checkpoint": "Use same checkpoint",
        "Hires prompt": "",
        "Hires negative prompt": "",
        "Mask mode": "Inpaint masked",
        "Masked content": "original",
        "Inpaint area": "Whole picture",
        "Masked area padding": 32,
        "RNG": "GPU",
        "Schedule type": "Automatic",
        "Schedule max sigma": 0,
        "Schedule min sigma": 0,
        "Schedule rho": 0,
        "VAE Encoder": "Full",
        "VAE Decoder": "Full",
        "FP8 weight": "Disable",
        "Refiner switch by sampling steps": False,
    }
    found = {**defaults, **found}
    if found["FP8 weight"] != "Disable":
        found.setdefault("Cache FP16 weight for LoRA", False)
    return _old_hires(found)


def _old_hires(found: dict[str, Any]) -> dict[str, Any]:
    """Turns the first pass's size of old versions into the size and the resize of today's."""
    try:
        width, height = int(found["First pass size-1"]), int(found["First pass size-2"])
        final = int(found.get("Size-1", 512)), int(found.get("Size-2", 512))
    except (KeyError, ValueError):
        return found
    if not width or not height:
        # 512 x 512 pixels in the final size's shape (processing.py).
        scale = (512 * 512 / max(final[0] * final[1], 1)) ** 0.5
        width, height = (-(-int(scale * side) // 64) * 64 for side in final)
    found |= {"Size-1": width, "Size-2": height}
    return found | {"Hires resize-1": final[0], "Hires resize-2": final[1]}


def _settings(line: str) -> Iterator[tuple[str, str]]:
    for name, value in _SETTING.findall(line):
        yield name, unquoted(value)


def unquoted(value: str) -> str:
    """Returns what a quoted value stands for; another one as it is, without spaces around it."""
    value = value.strip()
    if value[:1] == value[-1:] == '"':
        try:
            return str(json.loads(value))
        except (ValueError, RecursionError):
            pass
    return value


def _exact(settings: Mapping[str, str]) -> dict[str, Any]:
    """Returns the fields that were written as JSON beside the rest."""
    try:
        found = json.loads(settings.get(EXACT, "{}"))
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _read_numbers(settings: Mapping[str, str], found: Found) -> None:
    second_pass = any(name.startswith("Hires ") for name in settings)
    for name, (field, kind) in _NUMBERS.items():
        if name not in settings:
            continue
        value: float | None = None
        with contextlib.suppress(ValueError):
            value = kind(settings[name])
        # With hires fix it is the strength of the second pass, over the first one's image.
        if value is None or not math.isfinite(value) or (field == "strength" and second_pass):
            found.left_out.append(_shown(name, settings[name]))
            continue
        found.fields[field], found.stated[field] = value, _shown(name, settings[name])


def _read_sampler(settings: Mapping[str, str], found: Found) -> None:
    name, schedule = settings.get("Sampler"), settings.get("Schedule type")
    if not name:
        return
    try:
        found.fields["sampler"], unused = resolve(name, schedule)
    except UnknownSampler:
        found.left_out.append(_shown("Sampler", name))
        if schedule not in (None, "Automatic"):
            found.left_out.append(_shown("Schedule type", schedule))
        return
    found.stated["sampler"] = _shown("Sampler", name)
    if unused is not None:
        found.left_out.append(_shown("Schedule type", schedule or unused.title()))


def _read_names(settings: Mapping[str, str], found: Found) -> None:
    """Reads what is no number, or more than one."""
    for name, field in (("Prompt weighting", "prompt_weighting"), ("Long prompt", "long_prompt")):
        if settings.get(name) in ("True", "False"):
            found.fields[field] = settings[name] == "True"
    if settings.get(_RULE):
        found.fields["strength_rule"] = settings[_RULE]
        found.stated["strength_rule"] = _shown(_RULE, settings[_RULE])
    for fill, words in _MASKED.items():
        if settings.get("Masked content") == words:
            found.fields["masked_fill"] = fill
            found.stated["masked_fill"] = _shown("Masked content", words)
    emphasis = settings.get("Emphasis", "Original")
    if emphasis == "None":
        found.fields["prompt_weighting"] = False
    elif emphasis != "Original":
        found.left_out.append(_shown("Emphasis", emphasis))
    if settings.get("Model"):
        found.fields["model"] = settings["Model"]
        found.stated["model"] = _shown("Model", settings["Model"])
    if size := _SIZE.fullmatch(settings.get("Size", "")):
        found.fields |= {"width": int(size[1]), "height": int(size[2])}
        found.stated |= dict.fromkeys(("width", "height"), f"Size: {size[0]}")
    elif "Size" in settings:
        found.left_out.append(_shown("Size", settings["Size"]))
    skip = settings.get("Clip skip")
    if skip is not None and re.fullmatch(r"\d{1,4}", skip):
        # There, 1 leaves no layer out; some programs write 0 for that.
        found.fields["clip_skip"] = max(int(skip) - 1, 0)
        found.stated["clip_skip"] = _shown("Clip skip", skip)
    elif skip is not None:
        found.left_out.append(_shown("Clip skip", skip))
    padding = settings.get("Masked area padding", "32")
    if settings.get("Inpaint area") == "Only masked" and re.fullmatch(r"\d{1,6}", padding):
        found.fields["padding_mask_crop"] = int(padding)
    rng = settings.get("RNG", "jax")
    if rng == "CPU":
        found.fields["noise"] = "torch"
    elif rng != "jax":
        found.left_out.append(_shown("RNG", rng))


def _read_control(value: str) -> dict[str, Any] | None:
    """Returns the settings of a ControlNet; None where they are not ours."""
    found = dict(_settings(value))
    try:
        numbers = [float(found[n]) for n in ("Weight", "Guidance Start", "Guidance End")]
        control = {"model": found["Model"], **dict(zip(("scale", "start", "end"), numbers))}
    except (KeyError, ValueError):
        return None
    return {**control, "file": found["Image"]} if "Image" in found else control


def _file(settings: Mapping[str, str], name: str) -> str:
    return f" ({settings[name]})" if name in settings else ""


def _shown(name: str, value: str) -> str:
    value = " ".join(value.split())
    return f"{name}: {value if len(value) <= 60 else f'{value[:57]}...'}"
