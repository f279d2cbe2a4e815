"""The names of samplers and schedule types in stable-diffusion-webui, and those of diffusax."""

import dataclasses

from diffusax.samplers import SAMPLER_CLASSES, SAMPLER_NAMES, SCHEDULERS

_KARRAS = "_karras"


class UnknownSampler(ValueError):
    """There is no sampler of this name."""


class UnknownSchedule(ValueError):
    """The sampler has no schedule type of this name."""


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
    scheduled: bool = True
    """Whether the sampler reads a schedule type there (sd_samplers_timesteps.py reads none)."""

    @property
    def schedules(self) -> tuple[str, ...]:
        """The names of the schedule types that it has."""
        takes_karras = self.own + _KARRAS in SAMPLER_NAMES
        return tuple(name for name in SCHEDULES if takes_karras or name != "karras")


SCHEDULES = {"automatic": "Automatic", "uniform": "Uniform", "karras": "Karras"}
"""The labels of the schedule types by their names."""
_UNIFORM = ("uniform", "normal", "simple", "ddim")
"""The schedule types whose levels are those of evenly spaced timesteps."""
_MISSING = (
    *("exponential", "polyexponential", "sgm uniform", "kl optimal", "align your steps", "beta"),
    *("turbo", "align your steps gits", "align your steps 11", "align your steps 32"),
)
"""Schedule types of webui and its forks that are not here. Unknown names are Automatic there."""

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
    WebuiSampler("DDIM", ("ddim",), "ddim", scheduled=False),
    WebuiSampler("PLMS", ("plms",), "pndm", scheduled=False),
    WebuiSampler("UniPC", ("unipc",), "unipc", scheduled=False),
    WebuiSampler("LCM", ("k_lcm",), "lcm"),
    # These have no names there.
    WebuiSampler("DPM++ 2S", (), "dpm++2s"),
    WebuiSampler("DPM++ 3M", (), "dpm++3m"),
    WebuiSampler("DPM", (), "dpm"),
    WebuiSampler("DDPM", (), "ddpm", scheduled=False),
    WebuiSampler("DEIS", (), "deis"),
    WebuiSampler("SA-Solver", (), "sa_solver"),
    WebuiSampler("TCD", (), "tcd", scheduled=False),
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
_BY_CLASS = {SAMPLER_CLASSES[sampler.own]: sampler for sampler in reversed(WEBUI_SAMPLERS)}
_SUFFIXES = tuple(sorted((*SCHEDULES, *_UNIFORM, *_MISSING), key=len, reverse=True))


def sampler_titles() -> dict[str, str]:
    """Returns what stable-diffusion-webui's users call the samplers, the most usual ones first."""
    found = {}
    for one in WEBUI_SAMPLERS:
        plain = {one.own: one.name}
        with_levels = {one.own + _KARRAS: f"{one.name} Karras"} if "karras" in one.schedules else {}
        found.update({**with_levels, **plain} if one.karras else {**plain, **with_levels})
    return found


def from_webui(sampler: str, schedule: str | None = None) -> str:
    """Returns the name of a sampler for its name in stable-diffusion-webui.

    Args:
        sampler: its name there, in letters of any size, or here; older versions' names, such as
            "DPM++ 2M Karras", too.
        schedule: the name or label of the schedule type; None and "Automatic" take the sampler's
            default there. One that the sampler has no use for is ignored, as there.

    Raises:
        UnknownSampler: there is no such sampler.
        UnknownSchedule: the schedule type is not here, and would change what the sampler does.
    """
    name, unused = resolve(sampler, schedule)
    if unused is not None and unused in _MISSING:
        found = _found(sampler)[0]
        if found.scheduled:
            labels = " or ".join(SCHEDULES[one] for one in found.schedules)
            raise UnknownSchedule(
                f"schedule type must be {labels} for {found.name} (got {schedule or sampler!r})"
            )
    return name


def resolve(sampler: str, schedule: str | None = None) -> tuple[str, str | None]:
    """Returns a sampler's name as `from_webui` does, and the schedule type that it does not have.

    The latter is in small letters; None where it has it, or none is asked for.

    Raises:
        UnknownSampler: there is no such sampler.
    """
    if sampler in SAMPLER_NAMES or sampler in SCHEDULERS:
        return sampler, None
    found, suffix = _found(sampler)
    wanted = suffix or (schedule or "automatic").lower().replace("_", " ").strip()
    if wanted in _UNIFORM:
        return found.own, None
    if wanted == "karras" and wanted in found.schedules:
        return found.own + _KARRAS, None
    own = found.own + (_KARRAS if found.karras else "")
    return own, None if wanted == "automatic" else wanted


def _found(name: str) -> tuple[WebuiSampler, str | None]:
    """Returns the sampler of a name, and the schedule type at its end."""
    lower = name.lower()
    if lower in _BY_NAME:
        return _BY_NAME[lower], None
    for suffix in _SUFFIXES:
        if lower.endswith(f" {suffix}") and lower.removesuffix(f" {suffix}") in _BY_NAME:
            return _BY_NAME[lower.removesuffix(f" {suffix}")], suffix
    names = ", ".join(one.name for one in WEBUI_SAMPLERS)
    raise UnknownSampler(f"sampler must be one of {names} (got {name!r})")


def to_webui(name: str) -> tuple[str, str | None]:
    """Returns the name and the schedule type's label in stable-diffusion-webui for a sampler.

    That of a class stands for the most usual sampler that it makes, with None; and a name that
    there is none for is returned as it is, with None.
    """
    if name in _BY_CLASS:
        return _BY_CLASS[name].name, None
    plain = name.removesuffix(_KARRAS)
    found = _BY_OWN.get(plain)
    if found is None:
        return name, None
    if plain != name:
        return found.name, "Karras"
    return found.name, "Uniform" if found.karras else "Automatic"
