"""Noise levels of flow matching, where x = (1 - sigma) x0 + sigma eps, on the host.

The functions keep the precision of the sigmas that they are given: diffusers computes its own in
float64 and the caller's in float32.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np


def shifted(sigmas: np.ndarray, shift: float) -> np.ndarray:
    """Shifts sigmas towards more noise, as larger images need (Esser et al. 2024, equation 23)."""
    return shift * sigmas / (1 + (shift - 1) * sigmas)


def time_shifted(sigmas: np.ndarray, mu: float, kind: str) -> np.ndarray:
    """Shifts sigmas like the Flux models: by e^mu (kind "exponential") or by mu ("linear")."""
    shift = math.exp(mu) if kind == "exponential" else mu
    return shift / (shift + (1 / sigmas - 1))


def dynamic_mu(options: Mapping[str, Any], image_seq_len: int) -> float:
    """Returns `mu` for an image of so many tokens, on the line that a config's options define.

    Upstream: `calculate_shift` of diffusers' Flux pipelines, with its defaults.

    Raises:
        ValueError: the options do not define a line.
    """
    low = options.get("base_image_seq_len", 256)
    high = options.get("max_image_seq_len", 4096)
    base, top = options.get("base_shift", 0.5), options.get("max_shift", 1.15)
    if base is None or top is None or low == high:
        raise ValueError(
            "dynamic_mu needs base_shift and max_shift at two different lengths (got "
            f"base_shift={base}, max_shift={top}, base_image_seq_len={low}, "
            f"max_image_seq_len={high})"
        )
    slope = (top - base) / (high - low)
    mu: float = image_seq_len * slope + (base - slope * low)
    return mu


def stretched(sigmas: np.ndarray, terminal: float) -> np.ndarray:
    """Scales sigmas that start at 1 so that the last one is `terminal` (HaCohen et al. 2024)."""
    signal = 1 - sigmas
    return 1 - signal / (signal[-1] / (1 - terminal))


def ends(total: int, shift: float) -> tuple[float, float]:
    """Returns the highest and lowest shifted sigma of `total` training timesteps, in float32."""
    sigmas = np.array([total, 1], np.float32) / total
    high, low = shifted(sigmas, shift).tolist()
    return high, low
