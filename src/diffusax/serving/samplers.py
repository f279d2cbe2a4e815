"""The names of samplers and schedule types in stable-diffusion-webui, and those of diffusax."""

import dataclasses

from diffusax.samplers import SAMPLER_NAMES, SCHEDULERS
from diffusax.serving.errors import NotFound, Refused

_KARRAS = "_karras"


@dataclasses.dataclass(frozen=True)
class WebuiSampler:
    """A sampler as stable-diffusion-webui lists it."""

    name: str
    aliases: tuple[str, ...]
    """Other names that its API takes."""
    own: str
    """The name of the sampler here, without a schedule type."""
    karras: bool = False
    """Whether Karras' noise levels are the sampler's default there (Automatic). Two samplers whose
    default there is "Exponential" have Karras' here."""

    @property
    def schedules(self) -> tuple[str, ...]:
        """The names of the schedule types that it has."""
        takes_karras = self.own + _KARRAS in SAMPLER_NAMES
        return tuple(name for name in SCHEDULES if takes_karras or name != "karras")


SCHEDULES = {"automatic": "Automatic", "uniform": "Uniform", "karras": "Karras"}
"""The labels of the schedule types by their names."""
_UNIFORM = ("uniform", "normal", "simple", "ddim")
"""The schedule types whose levels are those of evenly spaced timesteps."""

WEBUI_SAMPLERS = (
    WebuiSampler("DPM++ 2M", ("k_dpmpp_2m",), "dpm++2m", karras=True),
    WebuiSampler("DPM++ SDE", ("k_dpmpp_sde",), "dpm++_sde", karras=True),
    WebuiSampler("DPM++ 2M SDE", ("k_dpmpp_2m_sde",), "dpm++2m_sde", karras=True),
    WebuiSampler("DPM++ 3M SDE", ("k_dpmpp_3m_sde",), "dpm++3m_sde", karras=True),
    WebuiSampler("Euler a", ("k_euler_a", "k_euler_ancestral"), "euler_a"),
    WebuiSampler("Euler", ("k_euler",), "euler"),
    WebuiSampler("LMS", ("k_lms",), "lms"),
    WebuiSampler("Heun", ("k_heun",), "heun"),
    WebuiSampler("DPM2", ("k_dpm_2",), "kdpm2", karras=True),
    WebuiSampler("DPM2 a", ("k_dpm_2_a", "k_dpm_2_ancestral"), "kdpm2_a", karras=True),
    WebuiSampler("DDIM", ("ddim",), "ddim"),
    WebuiSampler("PLMS", ("plms",), "pndm"),
    WebuiSampler("UniPC", ("unipc",), "unipc"),
    WebuiSampler("LCM", ("k_lcm",), "lcm"),
    # These have no names there.
    WebuiSampler("DPM++ 2S", (), "dpm++2s"),
    WebuiSampler("DPM++ 3M", (), "dpm++3m"),
    WebuiSampler("DPM", (), "dpm"),
    WebuiSampler("DDPM", (), "ddpm"),
    WebuiSampler("DEIS", (), "deis"),
    WebuiSampler("TCD", (), "tcd"),
    WebuiSampler("EDM Euler", (), "edm_euler"),
    WebuiSampler("EDM DPM++ 2M", (), "edm_dpm++2m"),
    WebuiSampler("Flow Euler", (), "flow_euler"),
    WebuiSampler("Flow Heun", (), "flow_heun"),
    WebuiSampler("Flow LCM", (), "flow_lcm"),
)
"""The samplers, the most usual ones first (sd_samplers_kdiffusion.py, sd_samplers_timesteps.py)."""
_BY_NAME = {
    name.lower(): sampler
    for sampler in WEBUI_SAMPLERS
    for name in (sampler.own, *sampler.aliases, sampler.name)
}
_BY_OWN = {sampler.own: sampler for sampler in WEBUI_SAMPLERS}


def from_webui(sampler: str, schedule: str | None = None) -> str:
    """Returns the name of a sampler for its name in stable-diffusion-webui.

    Args:
        sampler: its name there, in letters of any size, or here; older versions' names, such as
            "DPM++ 2M Karras", too.
        schedule: the name or label of the schedule type; None and "Automatic" take the sampler's
            default there.

    Raises:
        NotFound: there is no such sampler.
        Refused: it has no such schedule type.
    """
    if sampler in SAMPLER_NAMES or sampler in SCHEDULERS:
        return sampler
    wanted = (schedule or "automatic").lower()
    name = sampler.lower()
    if name.endswith(" karras"):
        name, wanted = name.removesuffix(" karras"), "karras"
    found = _BY_NAME.get(name)
    if found is None:
        names = ", ".join(one.name for one in WEBUI_SAMPLERS)
        raise NotFound(f"sampler must be one of {names} (got {sampler!r})", param="sampler")
    if wanted == "automatic":
        return found.own + (_KARRAS if found.karras else "")
    if wanted in _UNIFORM:
        return found.own
    if wanted not in found.schedules:
        labels = " or ".join(SCHEDULES[one] for one in found.schedules)
        raise Refused(
            f"schedule type must be {labels} for {found.name} (got {schedule or 'Karras'!r})",
            param="scheduler",
        )
    return found.own + _KARRAS


def to_webui(name: str) -> tuple[str, str | None]:
    """Returns the name and the schedule type's label in stable-diffusion-webui for a sampler.

    A name that it has none for, such as that of a class, is returned as it is, with None.
    """
    plain = name.removesuffix(_KARRAS)
    found = _BY_OWN.get(plain)
    if found is None:
        return name, None
    if plain != name:
        return found.name, "Karras"
    return found.name, "Uniform" if found.karras else "Automatic"
