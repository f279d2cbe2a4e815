"""The names of samplers and schedule types in stable-diffusion-webui, and those of diffusax."""

import dataclasses

from diffusax.samplers import SAMPLER_CLASSES, SAMPLER_NAMES, SCHEDULERS, SPACED_NAMES


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
    default: str = ""
    """The schedule type that is the sampler's default there (Automatic); "" for Uniform."""
    scheduled: bool = True
    """Whether the sampler reads a schedule type there (sd_samplers_timesteps.py reads none)."""

    @property
    def schedules(self) -> tuple[str, ...]:
        """The names of the schedule types that it has."""
        return tuple(name for name in SCHEDULES if name in _PLAIN or f"{self.own}_{name}" in _KNOWN)


SCHEDULES = {
    "automatic": "Automatic",
    "uniform": "Uniform",
    "karras": "Karras",
    "exponential": "Exponential",
    "sgm_uniform": "SGM Uniform",
    "align_your_steps": "Align Your Steps",
    "beta": "Beta",
}
"""The labels of the schedule types by their names."""
_PLAIN = ("automatic", "uniform")
"""Those that every sampler has."""
_ENDS = {f"_{name}": label for name, label in SCHEDULES.items() if name not in _PLAIN}
_XL = "_align_your_steps_xl"
"""How names of samplers end at the steps that were aligned for SDXL, which webui does not name."""
_ENDS[_XL] = SCHEDULES["align_your_steps"]
_KNOWN = frozenset((*SAMPLER_NAMES, *SPACED_NAMES))
_UNIFORM = ("uniform", "normal", "simple", "ddim")
"""The schedule types whose levels are those of evenly spaced timesteps."""
_SAME = {"sgmuniform": "sgm uniform", "polyexponential": "exponential"}
"""Further names of schedule types; the polynomial's exponent is 1 there."""
_MISSING = (
    *("kl optimal", "turbo", "align your steps gits", "align your steps 11"),
    "align your steps 32",
)
"""Schedule types of webui and its forks that are not here. Unknown names are Automatic there."""

WEBUI_SAMPLERS = (
    WebuiSampler("DPM++ 2M", ("k_dpmpp_2m",), "dpm++2m", "karras"),
    WebuiSampler("DPM++ SDE", ("k_dpmpp_sde",), "dpm++_sde", "karras"),
    WebuiSampler("DPM++ 2M SDE", ("k_dpmpp_2m_sde",), "dpm++2m_sde", "exponential"),
    WebuiSampler("DPM++ 3M SDE", ("k_dpmpp_3m_sde",), "dpm++3m_sde", "exponential"),
    WebuiSampler("Euler a", ("k_euler_a", "k_euler_ancestral"), "euler_a"),
    WebuiSampler("Euler", ("k_euler",), "euler"),
    WebuiSampler("LMS", ("k_lms",), "lms"),
    WebuiSampler("Heun", ("k_heun",), "heun"),
    WebuiSampler("DPM2", ("k_dpm_2",), "kdpm2", "karras"),
    WebuiSampler("DPM2 a", ("k_dpm_2_a", "k_dpm_2_ancestral"), "kdpm2_a", "karras"),
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
_SUFFIXES = tuple(
    sorted(
        (*(name.replace("_", " ") for name in SCHEDULES), *_UNIFORM, *_SAME, *_MISSING),
        key=len,
        reverse=True,
    )
)


NAMES = frozenset(_BY_OWN)
"""The samplers here without schedule types."""


def sampler_titles() -> dict[str, str]:
    """Returns what stable-diffusion-webui's users call the samplers, the most usual ones first."""
    found: dict[str, str] = {}
    for one in WEBUI_SAMPLERS:
        plain, own = {one.own: one.name}, f"{one.own}_karras"
        karras = {own: f"{one.name} {SCHEDULES['karras']}"} if own in SAMPLER_NAMES else {}
        found |= {**karras, **plain} if one.default == "karras" else {**plain, **karras}
    return found


def from_webui(sampler: str, schedule: str | None = None, *, xl: bool = False) -> str:
    """Returns the name of a sampler for its name in stable-diffusion-webui.

    Args:
        sampler: its name there, in letters of any size, or here; older versions' names, such as
            "DPM++ 2M Karras", too.
        schedule: the name or label of the schedule type; None and "Automatic" take the sampler's
            default there. One that the sampler has no use for is ignored, as there.
        xl: whether the model is of SDXL, for which other steps were aligned.

    Raises:
        UnknownSampler: there is no such sampler.
        UnknownSchedule: the schedule type is not here, and would change what the sampler does.
    """
    name, unused = resolve(sampler, schedule)
    if unused is not None and unused in _MISSING:
        found = _found(sampler)[0]
        if found.scheduled:
            labels = ", ".join(SCHEDULES[one] for one in found.schedules)
            raise UnknownSchedule(
                f"schedule type must be one of {labels} for {found.name} "
                f"(got {schedule or sampler!r})"
            )
    return f"{name}_xl" if xl and f"{name}_xl".endswith(_XL) else name


def resolve(sampler: str, schedule: str | None = None) -> tuple[str, str | None]:
    """Returns a sampler's name as `from_webui` does, and the schedule type that it does not have.

    The latter is in small letters; None where it has it, or none is asked for.

    Raises:
        UnknownSampler: there is no such sampler.
    """
    if sampler in _KNOWN or sampler in SCHEDULERS:
        return sampler, None
    found, suffix = _found(sampler)
    wanted = suffix or (schedule or "automatic").lower().replace("_", " ").strip()
    wanted = _SAME.get(wanted, wanted)
    if wanted in _UNIFORM:
        return found.own, None
    named = f"{found.own}_{wanted.replace(' ', '_')}"
    if named in _KNOWN:
        return named, None
    own = f"{found.own}_{found.default}" if found.default else found.own
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
    plain, label = split(name)
    found = _BY_OWN.get(plain)
    if found is None:
        return name, None
    return found.name, label or ("Uniform" if found.default else "Automatic")


def split(name: str) -> tuple[str, str | None]:
    """Returns a sampler's name without its schedule type, and the latter's label, if it has one."""
    if name in _BY_OWN:
        return name, None
    ends = (end for end in _ENDS if name.endswith(end) and name in _KNOWN)
    end = next(ends, None)
    return (name, None) if end is None else (name.removesuffix(end), _ENDS[end])
