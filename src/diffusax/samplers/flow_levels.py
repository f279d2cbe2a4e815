"""Noise levels of flow matching, where x = (1 - sigma) x0 + sigma eps, on the host.

The functions keep the precision of the sigmas that they are given: diffusers computes its own in
float64 and the caller's in float32.
"""

import math

import numpy as np


def shifted(sigmas: np.ndarray, shift: float) -> np.ndarray:
    """Shifts sigmas towards more noise, as larger images need (Esser et al. 2024, equation 23)."""
    return shift * sigmas / (1 + (shift - 1) * sigmas)


def time_shifted(sigmas: np.ndarray, mu: float, kind: str) -> np.ndarray:
    """Shifts sigmas like the Flux models: by e^mu (kind "exponential") or by mu ("linear")."""
    shift = math.exp(mu) if kind == "exponential" else mu
    return shift / (shift + (1 / sigmas - 1))


def stretched(sigmas: np.ndarray, terminal: float) -> np.ndarray:
    """Scales sigmas that start at 1 so that the last one is `terminal` (HaCohen et al. 2024)."""
    signal = 1 - sigmas
    return 1 - signal / (signal[-1] / (1 - terminal))


def ends(total: int, shift: float) -> tuple[float, float]:
    """Returns the highest and lowest shifted sigma of `total` training timesteps, in float32."""
    sigmas = np.array([total, 1], np.float32) / total
    high, low = shifted(sigmas, shift).tolist()
    return high, low
