"""Converts a network's raw prediction to the clean sample and the noise in x.

Everywhere x = signal x0 + noise eps. The variance-preserving form has signal sqrt(alpha-bar) and
noise sqrt(1 - alpha-bar), the variance-exploding form signal 1 and noise sigma, flow matching
signal 1 - sigma and noise sigma.
"""

import numpy as np

from diffusax.samplers.rows import RAW, X
from diffusax.samplers.terms import Terms


def x0_from(kind: str, signal: float, noise: float) -> Terms:
    """Returns the predicted sample as coefficients of X and RAW (Salimans and Ho 2022, section 4).

    kind: "epsilon" (RAW is the noise), "v_prediction" (RAW is the velocity of x scaled to unit
    variance), "flow_prediction" (RAW is the noise less the sample, where signal and noise sum to
    one) or "sample" (RAW is the sample).
    """
    if kind == "epsilon":
        return (X - noise * RAW) / signal
    if kind == "v_prediction":
        scale = np.hypot(signal, noise)
        return signal / scale**2 * X - noise / scale * RAW
    if kind == "flow_prediction":
        return X - noise * RAW
    return RAW


def epsilon_from(kind: str, signal: float, noise: float) -> Terms:
    """Returns the predicted noise as coefficients of X and RAW; kind: see `x0_from`."""
    if kind == "epsilon":
        return RAW
    if kind == "v_prediction":
        scale = np.hypot(signal, noise)
        return noise / scale**2 * X + signal / scale * RAW
    if kind == "flow_prediction":
        return X + signal * RAW
    return (X - signal * RAW) / noise
