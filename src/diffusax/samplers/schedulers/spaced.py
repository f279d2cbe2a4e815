"""Samplers at noise levels that diffusers' classes have no option for, and k-diffusion's users do.

The levels are those of stable-diffusion-webui (modules/sd_schedulers.py), which are ComfyUI's too
but for the beta distribution's: from the highest of the training to the lowest, and then zero.
"""

import functools
import math
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from diffusax.samplers import noise_levels
from diffusax.samplers.schedulers.discrete import DiscreteScheduler
from diffusax.samplers.schedulers.sigma_schedulers import KDPM2DiscreteScheduler, SigmaScheduler
from diffusax.samplers.schedulers.snr_schedulers import SNRScheduler

Levels = Callable[[int, np.ndarray], np.ndarray]
"""Returns n descending sigmas, without the zero, from all those of the training, ascending."""

_STEPS = (14.615, 6.475, 3.861, 2.697, 1.886, 1.396, 0.963, 0.652, 0.399, 0.152, 0.029)
_XL_STEPS = (14.615, 6.315, 3.771, 2.181, 1.342, 0.862, 0.555, 0.380, 0.234, 0.113, 0.029)
"""The sigmas of ten steps, and the one after them, for Stable Diffusion 1.5 and SDXL (Sabour et al.
2024, "Align Your Steps: Optimizing Sampling Schedules in Diffusion Models")."""


def _karras(n: int, every: np.ndarray) -> np.ndarray:
    return noise_levels.karras_sigmas(n, every[0], every[-1])


def _exponential(n: int, every: np.ndarray) -> np.ndarray:
    return noise_levels.exponential_sigmas(n, every[0], every[-1])


def _beta(n: int, every: np.ndarray) -> np.ndarray:
    return noise_levels.beta_sigmas(n, every[0], every[-1])


def _sgm_uniform(n: int, every: np.ndarray) -> np.ndarray:
    """Returns the sigmas of n + 1 even timesteps without the last, interpolated in log sigma."""
    total = len(every)
    timesteps = np.linspace(total - 1, 0, n + 1)[:-1]
    return np.exp(np.interp(timesteps, np.arange(total), np.log(every)))


def _aligned(listed: tuple[float, ...], n: int, every: np.ndarray) -> np.ndarray:
    """Returns the listed sigmas, interpolated in log sigma where there are more or fewer steps."""
    places = np.linspace(0, 1, len(listed))
    return np.exp(np.interp(np.linspace(0, 1, n), places, [math.log(one) for one in listed]))


SPACINGS: dict[str, Levels] = {
    "karras": _karras,
    "exponential": _exponential,
    "beta": _beta,
    "sgm_uniform": _sgm_uniform,
    "align_your_steps": functools.partial(_aligned, _STEPS),
    "align_your_steps_xl": functools.partial(_aligned, _XL_STEPS),
}
"""The levels by the names that stand behind a sampler's."""


class _Spaced(DiscreteScheduler, sampler=False):
    """What the classes of `spaced` have before those of diffusers."""

    def save_config(
        self, save_directory: str | Path, push_to_hub: bool = False, **hub: Any
    ) -> None:
        """Refuses, as no option of diffusers stands for the levels.

        Raises:
            ValueError: always; says what can be saved.
        """
        raise ValueError(
            f"the noise levels of this {self.class_name} cannot be saved, as diffusers has no "
            "option for them; assign a sampler without them, and name this one in calls"
        )


def spaced(cls: type[Any], spacing: str) -> type[Any] | None:
    """Makes a sampler's class at other noise levels; None for samplers that have their own.

    Args:
        cls: one of SCHEDULERS.
        spacing: one of SPACINGS.
    """
    if not issubclass(cls, SigmaScheduler | SNRScheduler):
        return None
    levels = SPACINGS[spacing]
    if issubclass(cls, KDPM2DiscreteScheduler):
        # k-diffusion's programs leave the last level before zero out for these.
        members: dict[str, Any] = {
            "levels": staticmethod(lambda n, every: levels(n + 1, every)[:-1])
        }
    else:
        members = {"levels": staticmethod(levels)}
    members |= {"__module__": __name__, "__doc__": cls.__doc__, "spacing": spacing}
    made: type[Any] = types.new_class(
        cls.__name__, (_Spaced, cls), {"sampler": False}, lambda own: own.update(members)
    )
    return made


def spaced_options(cls: type[Any]) -> dict[str, Any]:
    """Returns the options that a class of `spaced` needs, of which none may space the levels."""
    names = ("use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas", "use_lu_lambdas")
    off = {name: False for name in names if name in cls.__dataclass_fields__}
    return {**off, "timestep_spacing": "linspace"}
