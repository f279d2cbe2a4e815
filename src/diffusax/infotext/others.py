"""Turns the settings that other programs write into images to stable-diffusion-webui's text.

What a program states and the text has no name for stays in the text under the program's own name,
so that its reader sees what is not taken over.
"""

import contextlib
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from diffusax.infotext import comfyui
from diffusax.infotext.named import Settings, to_text

Texts = Mapping[str, str]
Size = tuple[int, int]
_SURE = re.compile(r"(?:^|\s)(?:Steps:\s*\d|Version: diffusax )")
"""What tells a text of settings from any other comment."""
_LONGEST = 4_000_000
"""The most characters of JSON; graphs may be long."""


def webui_text(texts: Texts, size: Size) -> str:
    """Returns the settings in a file's texts in webui's form; "" where there are none.

    Args:
        texts: the texts by name, see `files.texts_of`.
        size: the image's width and height.
    """
    for read in _READERS:
        with contextlib.suppress(ValueError, TypeError, AttributeError, KeyError, RecursionError):
            if found := read(texts, size):
                return found if isinstance(found, str) else to_text(found)
    return ""


def _json(text: str | None) -> dict[str, Any] | None:
    """Returns the JSON object that a text is; None for any other text."""
    if not text or len(text) > _LONGEST or not text.lstrip().startswith("{"):
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _novelai(texts: Texts, size: Size) -> Settings | None:
    """Reads what NovelAI writes into Description and Comment."""
    given = _json(texts.get("Comment"))
    if given is None or not (texts.get("Software") == "NovelAI" or "uc" in given):
        return None
    prompt, negative = texts.get("Description") or given.get("prompt"), given.pop("uc", "")
    captions = [_caption(given.pop(name, None)) for name in ("v4_prompt", "v4_negative_prompt")]
    given["prompt"], given["negative_prompt"] = captions[0] or prompt, captions[1] or negative
    if "cfg_rescale" in given:
        given["CFG rescale"] = given.pop("cfg_rescale")
    schedule = given.pop("noise_schedule", None)
    given["scheduler"] = None if schedule == "native" else schedule
    if not given.get("width"):
        given["width"], given["height"] = size
    for name in [n for n in given if given[n] in _NOVELAI_OFF.get(n, ())]:
        del given[name]
    if re.match(r"Stable Diffusion [0-9A-F]{8}$", texts.get("Source", "Stable Diffusion 00000000")):
        # The first models leave out a layer, which the file does not state (webui's images.py).
        given |= {"Clip skip": 2, "ENSD": 31337}
    if re.search(r"[{}\[\]]|::", given["prompt"] or ""):
        given["Weights"] = "NovelAI's brackets"
    return Settings.of({name: given[name] for name in _NOVELAI_KEPT if name in given})


_NOVELAI_OFF: dict[str, tuple[Any, ...]] = {
    **{"uncond_scale": (1, 0), "noise": (0,), "controlnet_strength": (1,), "strength": (1,)},
    **{"skip_cfg_above_sigma": (0,), "skip_cfg_below_sigma": (0,)},
}
"""Values of NovelAI that leave a setting off."""
_NOVELAI_KEPT = (
    *("prompt", "negative_prompt", "steps", "sampler", "scheduler", "scale", "seed", "CFG rescale"),
    *("width", "height", "strength", "noise", "uncond_scale", "controlnet_model", "sm", "sm_dyn"),
    *("dynamic_thresholding", "controlnet_strength", "skip_cfg_above_sigma", "Clip skip", "ENSD"),
    *("skip_cfg_below_sigma", "reference_strength_multiple", "Weights"),
)
"""Those of its settings that decide the image."""


def _caption(given: Any) -> str:
    """Returns the prompt of NovelAI's models from version 4 on, with those of its characters."""
    caption = given.get("caption") if isinstance(given, dict) else None
    if not isinstance(caption, dict):
        return ""
    people = [one.get("char_caption") for one in caption.get("char_captions") or []]
    return "\n".join(filter(None, [caption.get("base_caption"), *people]))


def _invokeai(texts: Texts, size: Size) -> Settings | None:
    """Reads InvokeAI's metadata, of version 3 and later."""
    given = _json(texts.get("invokeai_metadata"))
    if given is None:
        return None
    model, vae = given.pop("model", None), given.pop("vae", None)
    given["model"] = _named(model)
    if vae:
        given["VAE"] = _named(vae)
    given["loras"] = [
        (_named(one.get("model") or one.get("lora")), one.get("weight", 1))
        for one in given.pop("loras", None) or []
    ]
    given["sampler"] = given.pop("scheduler", None)
    if "cfg_rescale_multiplier" in given:
        given["CFG rescale"] = given.pop("cfg_rescale_multiplier")
    for side in ("positive", "negative"):
        style = given.pop(f"{side}_style_prompt", None)
        if style not in (None, "", given.get(f"{side}_prompt")):
            given[f"{side} style prompt"] = style
    # Here it is the number of layers that are left out.
    given["Clip skip"] = int(given.pop("clip_skip", 0) or 0) + 1
    if "txt2img" in str(given.get("generation_mode")):
        given.pop("strength", None)
    for name in (
        "app_version",
        "generation_mode",
        "rand_device",
        "created_by",
        "canvas_v2_metadata",
    ):
        given.pop(name, None)
    return Settings.of(given)


def _named(model: Any) -> Any:
    """Returns a model's name."""
    if isinstance(model, dict):
        return model.get("name") or model.get("model_name") or model.get("key")
    return model


def _old_invokeai(texts: Texts, size: Size) -> Settings | None:
    """Reads InvokeAI's metadata of version 2, and the command of version 1."""
    given = _json(texts.get("sd-metadata"))
    if given is not None:
        image = dict(given["image"])
        prompt = image.get("prompt")
        image["prompt"] = prompt[0]["prompt"] if isinstance(prompt, list) else prompt
        image["model"] = given.get("model_weights")
        for name in ("type", "postprocessing", "variations", "image"):
            if not image.get(name) or name == "type":
                image.pop(name, None)
    elif found := re.match(r'\s*"(.*)"((?:\s+-.*)?)$', texts.get("Dream", ""), re.DOTALL):
        options = dict(re.findall(r"(?:^|\s)-([a-zA-Z])\s*([^\s-]\S*)", found[2]))
        names = {"s": "steps", "S": "seed", "W": "width", "H": "height", "C": "cfg_scale"}
        names |= {"A": "sampler", "f": "strength"}
        image = {names.get(key, f"-{key}"): value for key, value in options.items()}
        image["prompt"] = found[1]
    else:
        return None
    # What stands in brackets is the negative prompt there.
    negative = re.findall(r"\[([^\[\]]*)\]", image["prompt"])
    image["prompt"] = re.sub(r" ?\[[^\[\]]*\]", "", image["prompt"]).strip()
    image["negative_prompt"] = " ".join(negative)
    return Settings.of(image)


def _fooocus(texts: Texts, size: Size) -> Settings | None:
    """Reads Fooocus' own scheme; its other one is webui's."""
    for name in ("parameters", "UserComment", "Comment"):
        given = _json(texts.get(name))
        if given and ("base_model" in given or texts.get("fooocus_scheme") == "fooocus"):
            break
    else:
        return None
    sides = re.findall(r"\d+", str(given.pop("resolution", "")))
    given["width"], given["height"] = map(int, sides if len(sides) == 2 else size)
    loras = given.pop("loras", None) or []
    given["loras"] = [(one[0], one[1]) for one in loras]
    combined = sorted(name for name in given if name.startswith("lora_combined_"))
    for name in combined:
        lora, _, weight = str(given.pop(name)).rpartition(" : ")
        if not loras:
            given["loras"].append((lora, weight))
    given["model"] = given.pop("base_model", None)
    full = {name: given.pop(f"full_{name}", None) for name in ("prompt", "negative_prompt")}
    for name, value in full.items():
        # Styles and the expansion made this of the prompt.
        text = ", ".join(value) if isinstance(value, list) else value
        given[name] = text or given.get(name)
    if given.get("refiner_model") in (None, "", "None"):
        given.pop("refiner_switch", None)
        given.pop("refiner_model", None)
    for name in ("base_model_hash", "refiner_model_hash", "version", "metadata_scheme", "styles"):
        given.pop(name, None)
    return Settings.of(given)


def _swarmui(texts: Texts, size: Size) -> Settings | None:
    """Reads SwarmUI's parameters."""
    for name in ("parameters", "UserComment"):
        whole = _json(texts.get(name))
        if whole and isinstance(whole.get("sui_image_params"), dict):
            break
    else:
        return None
    given = dict(whole["sui_image_params"])
    given["sampler"] = given.pop("comfyuisampler", None) or given.pop("sampler", None)
    names, weights = (_list(given.pop(name, None)) for name in ("loras", "loraweights"))
    given["loras"] = list(zip(names, weights + ["1"] * (len(names) - len(weights))))
    layer = given.pop("clipstopatlayer", None)
    if layer is not None:
        given["Clip skip"] = abs(int(layer))
    creativity = given.pop("initimagecreativity", None)
    if creativity and "initimage" in " ".join(whole.get("sui_extra_data") or {}):
        given["strength"] = creativity
    if not given.get("width"):
        given["width"], given["height"] = size
    for name in ("swarm_version", "date", "generation_time", "aspectratio", "original_prompt"):
        given.pop(name, None)
    for name in ("automaticvae", "nopreviews", "imageformat", "images", "used_wildcards"):
        given.pop(name, None)
    return Settings.of(given)


def _list(value: Any) -> list[str]:
    found = value.split(",") if isinstance(value, str) else value or []
    return [str(one).strip() for one in found]


def _draw_things(texts: Texts, size: Size) -> Settings | None:
    """Reads Draw Things' JSON in the comment of XMP."""
    given = _json(texts.get("UserComment"))
    if given is None or "c" not in given or "uc" not in given:
        return None
    given["prompt"], given["negative_prompt"] = given.pop("c"), given.pop("uc")
    loras = given.pop("lora", None) or []
    given["loras"] = [(one.get("model"), one.get("weight", 1)) for one in loras]
    given.pop("v2", None), given.pop("profile", None)
    if float(given.get("strength", 1)) == 1:
        given.pop("strength", None)
    return Settings.of(given)


def _civitai(texts: Texts, size: Size) -> Settings | None:
    """Reads what Civitai's generator writes beside a graph."""
    given = _json(texts.get("UserComment")) or {}
    extra = given.get("extraMetadata")
    extra = _json(extra) if isinstance(extra, str) else extra
    if not isinstance(extra, dict) or "prompt" not in extra:
        return None
    extra = dict(extra)
    for name in ("resources", "workflowId", "transformations"):
        extra.pop(name, None)
    return Settings.of(extra)


def _comfyui(texts: Texts, size: Size) -> Settings | None:
    """Reads the graph that ComfyUI ran."""
    for name in ("prompt", "UserComment", "Comment"):
        graph = _json(texts.get(name))
        graph = graph.get("prompt", graph) if graph else None
        if isinstance(graph, str):
            graph = _json(graph)
        if isinstance(graph, dict) and (found := comfyui.read(graph, size)):
            return Settings.of(found)
    return None


def _webui(texts: Texts, size: Size) -> str | None:
    """Returns webui's own text."""
    for name in ("parameters", "UserComment", "comment", "Comment", "Description", "XPComment"):
        text = texts.get(name, "")
        sure = name == "parameters" or _SURE.search(text)
        if text.strip() and sure and _json(text) is None:
            return text
    return None


def _plain_json(texts: Texts, size: Size) -> Settings | None:
    """Reads a JSON object, or texts (Easy Diffusion), with the names that most programs use."""
    for name in ("parameters", "UserComment", "comment", "Comment"):
        given = _json(texts.get(name))
        if given and Settings.tells(given):
            return Settings.of(given)
    return Settings.of(Settings.known(texts)) if Settings.tells(texts) else None


_READERS: tuple[Callable[[Texts, Size], Any], ...] = (
    *(_swarmui, _fooocus, _novelai, _invokeai, _old_invokeai, _draw_things, _civitai),
    *(_webui, _comfyui, _plain_json),
)
"""The programs' own forms before those that several programs write."""
