"""Refuses calls that ask for what A1111's server has and this one lacks."""

from typing import Any

from diffusax.infotext import samplers
from diffusax.serving.requests.errors import NotFound, Refused
from diffusax.serving.web.a1111.fields import Shared

_NO_STYLES: tuple[Any, ...] = (None, [], "", "None", "none")
_ETA = {"euler_a": 1.0, "kdpm2_a": 1.0, "dpm++_sde": 1.0, "dpm++2m_sde": 1.0, "dpm++3m_sde": 1.0}
_ETA |= {"ddim": 0.0}
"""The samplers that read eta, with its default."""
_WITHOUT_ETA = {"euler_a": "euler", "kdpm2_a": "kdpm2", "dpm++2m_sde": "dpm++2m"}
"""What samplers are with an eta of 0."""
_CHURN = ("euler", "heun", "kdpm2")
_NOISE = ("kdpm2_a", "dpm++_sde", "dpm++2m_sde", "dpm++3m_sde")
"""The samplers that read s_churn, and those that read s_noise without it: sampler_extra_params of
A1111's sd_samplers_kdiffusion.py."""


def check_present(fields: Shared, width: int, height: int) -> None:
    """Raises Refused where a call asks for what is not here. width, height: of its images."""
    styles = fields.styles if isinstance(fields.styles, list) else [fields.styles]
    named = [style for style in styles if style not in _NO_STYLES]
    resized = (fields.seed_resize_from_w, fields.seed_resize_from_h)
    resizes = min(resized) > 0 and resized != (width, height)
    refiner = fields.refiner_checkpoint not in (None, "None", "none")
    last = fields.refiner_switch_at
    script = fields.script_name if fields.script_name not in ("None", "none") else None
    asked: dict[str, tuple[Any, Any, str]] = {
        "subseed_strength": (fields.subseed_strength, 0, "variation seeds"),
        "tiling": (fields.tiling, False, "images that tile"),
        "restore_faces": (fields.restore_faces, False, "restorers of faces"),
        "seed_resize_from_w": (resized[0] if resizes else -1, -1, "resizing of seeds"),
        "styles": (named, [], "styles; write their words into the prompt"),
        "script_name": (script or "", "", "scripts"),
        "refiner_checkpoint": (
            fields.refiner_checkpoint if refiner and (last is None or last < 1) else "",
            "",
            "refiners within a run",
        ),
        "s_min_uncond": (fields.s_min_uncond, 0, "steps without a negative prompt"),
        "infotext": (fields.infotext or "", "", "calls from texts; send their fields"),
        "firstpass_image": (getattr(fields, "firstpass_image", None), None, "given first passes"),
        "latent_mask": (getattr(fields, "latent_mask", None), None, "masks of latents"),
        "mask_round": (getattr(fields, "mask_round", True), True, "soft masks"),
        "initial_noise_multiplier": (
            1.0 if (m := getattr(fields, "initial_noise_multiplier", None)) is None else m,
            1.0,
            "multiples of the first noise",
        ),
    }
    for name, (value, off, what) in asked.items():
        if value != off:
            text = f"{name} must be {off!r} here (got {str(value)[:60]!r}), as there are no {what}"
            raise Refused(text, param=name, code="not_supported")


def from_webui(sampler: str, schedule: str | None = None) -> str:
    """Returns the name of a sampler here, see `diffusax.infotext.samplers.from_webui`.

    Raises:
        NotFound: there is no such sampler.
        Refused: it has no such schedule type.
    """
    try:
        return samplers.from_webui(sampler, schedule)
    except samplers.UnknownSampler as error:
        raise NotFound(str(error), param="sampler") from None
    except samplers.UnknownSchedule as error:
        raise Refused(str(error), param="scheduler") from None


def with_noise(fields: Shared, sampler: str) -> tuple[str, float]:
    """Returns the sampler and DDIM's eta for what a call says of the noise in its steps.

    Source: stable-diffusion-webui, modules/sd_samplers_common.py, Sampler.initialize.

    Args:
        fields: the call.
        sampler: the name of its sampler.

    Raises:
        Refused: the sampler would read a value, and cannot do so here.
    """
    plain = sampler.removesuffix("_karras")
    if plain in _CHURN and fields.s_churn:
        raise _fixed("s_churn", 0, fields.s_churn, sampler)
    if plain in _NOISE and fields.s_noise != 1:
        raise _fixed("s_noise", 1, fields.s_noise, sampler)
    usual = _ETA.get(plain)
    eta = usual if fields.eta is None else fields.eta
    if plain == "ddim" and eta is not None:
        if eta > 1:
            raise Refused(f"eta must be from 0 to 1 for DDIM (got {eta:g})", param="eta")
        return sampler, eta
    if eta == usual or usual is None:
        return sampler, 0.0
    if eta == 0 and plain in _WITHOUT_ETA:
        return _WITHOUT_ETA[plain] + sampler.removeprefix(plain), 0.0
    raise _fixed("eta", 1, eta, sampler)


def _fixed(name: str, value: float, got: Any, sampler: str) -> Refused:
    text = f"{name} must be {value} for the sampler {sampler!r} here (got {got:g})"
    return Refused(text, param=name, code="not_supported")
