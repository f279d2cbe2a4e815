"""Methods of flow matching: Euler, with and without fresh noise, and Heun.

The network predicts the velocity eps - x0 of x = (1 - sigma) x0 + sigma eps.
"""

import numpy as np

from diffusax.samplers.rows import M1, M2, NOISE, RAW, P, Row, X, x0_from
from diffusax.samplers.terms import Terms


def euler(timesteps: np.ndarray, sigmas: np.ndarray) -> list[Row]:
    """Computes Euler steps along the predicted velocity (Esser et al. 2024)."""
    return [
        _row(t, X + (target - sigma) * RAW, sigma)
        for t, sigma, target in zip(timesteps, sigmas, sigmas[1:])
    ]


def euler_stochastic(timesteps: np.ndarray, sigmas: np.ndarray) -> list[Row]:
    """Computes steps that each go to the predicted sample and add fresh noise."""
    return [
        _row(t, (1 - target) * P + target * NOISE, sigma)
        for t, sigma, target in zip(timesteps, sigmas, sigmas[1:])
    ]


def heun(timesteps: np.ndarray, sigmas: np.ndarray) -> list[Row]:
    """Computes Heun's second-order steps, the last one Euler's.

    Slots: m1 the x before the step, m2 its velocity.

    timesteps: n, one for each step.
    """
    rows = []
    for i, (t, sigma) in enumerate(zip(timesteps, sigmas)):
        target = sigmas[i + 1]
        dt = target - sigma
        rows.append(_row(t, X + dt * RAW, sigma, (X, RAW)))
        if i + 1 < len(timesteps):
            rows.append(_row(timesteps[i + 1], M1 + dt * (M2 + RAW) / 2, target))
    return rows


def _row(t: float, x: Terms, sigma: float, memory: tuple[Terms, ...] = ()) -> Row:
    level = (1 - sigma, sigma)
    return Row(t, x, level, x0_from("flow_prediction", *level), memory)
