"""Says errors in the words of A1111's fields."""

import re

_NAMES = {
    "num_inference_steps": "steps",
    "guidance_scale": "cfg_scale",
    "image_guidance_scale": "image_cfg_scale",
    "strength": "denoising_strength",
    "num_images": "batch_size",
    "sampler": "sampler_name",
    "mask_image": "mask",
    "padding_mask_crop": "inpaint_full_res_padding",
    "clip_skip": "CLIP_stop_at_last_layers",
    "model": "sd_model_checkpoint",
    "adapters": "prompt",
    "controls": "alwayson_scripts",
}
"""A1111's fields by those of `Drawing`."""
_ANYWHERE = re.compile(rf"\b({'|'.join(name for name in _NAMES if '_' in name)})\b")
_AT_THE_BEGINNING = re.compile(rf"({'|'.join(_NAMES)})(?= (?:must|names|has|needs|leaves)\b)")


def in_webui_words(sentence: str) -> str:
    """Returns an error's sentence with the names of the fields that A1111's clients send.

    Fields whose names are words of the language are renamed where a sentence begins with them.
    """
    if first := _AT_THE_BEGINNING.match(sentence):
        sentence = _NAMES[first[1]] + sentence[first.end() :]
    return _ANYWHERE.sub(lambda name: _NAMES[name[1]], sentence)
