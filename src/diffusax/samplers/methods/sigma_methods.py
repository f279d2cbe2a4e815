"""Variance-exploding methods, which work on sigma: Euler, Heun, LMS, DPM2 and the ancestral ones.

`d` is k-diffusion's derivative (x - denoised) / sigma (Karras et al. 2022, equation 3).
"""

import itertools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from diffusax.samplers.noise_levels import sigmas_to_timesteps
from diffusax.samplers.rows import M1, M2, M3, NOISE, P, Row, X, epsilon_from, x0_from
from diffusax.samplers.terms import Terms

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(4)


def denoised(prediction_type: str, sigma: float) -> Terms:
    """Returns the predicted sample as coefficients of X and RAW."""
    return x0_from(prediction_type, 1.0, sigma)


def derivative(prediction_type: str, sigma: float) -> Terms:
    """Returns the derivative d of x in sigma, the predicted noise, as coefficients of X and RAW."""
    return epsilon_from(prediction_type, 1.0, sigma)


def in_scale(sigma: float) -> float:
    """Returns the factor that brings x at noise level sigma to unit variance for the network."""
    return 1 / np.sqrt(sigma**2 + 1)


def euler(
    timesteps: np.ndarray,
    sigmas: np.ndarray,
    x0: Callable[[float, float], Terms],
    epsilon: Callable[[float, float], Terms],
    in_scale: Callable[[float], float] = in_scale,
) -> list[Row]:
    """Computes Euler steps, algorithm 2 of Karras et al. 2022 without churn.

    x0, epsilon: functions of (signal, sigma) that return the predicted sample and the predicted
    noise as coefficients of X and RAW.
    """
    return [
        Row(
            t,
            X + (target - sigma) * epsilon(1.0, sigma),
            (1.0, sigma),
            x0(1.0, sigma),
            in_scale=in_scale(sigma),
        )
        for t, sigma, target in zip(timesteps, sigmas, sigmas[1:])
    ]


def ancestral_split(sigma: float, target: float) -> tuple[float, float]:
    """Splits a step from sigma to target into the level to step down to and the noise to add."""
    up = np.sqrt(target**2 * (sigma**2 - target**2) / sigma**2)
    return np.sqrt(target**2 - up**2), up


def euler_ancestral(timesteps: np.ndarray, sigmas: np.ndarray, prediction_type: str) -> list[Row]:
    """Computes ancestral sampling with Euler steps (k-diffusion, sample_euler_ancestral)."""
    rows = []
    for i, (t, sigma) in enumerate(zip(timesteps, sigmas)):
        down, up = ancestral_split(sigma, sigmas[i + 1])
        x = X + (down - sigma) * derivative(prediction_type, sigma) + up * NOISE
        prediction = denoised(prediction_type, sigma)
        rows.append(Row(t, x, (1.0, sigma), prediction, in_scale=in_scale(sigma)))
    return rows


def lms(
    timesteps: np.ndarray, sigmas: np.ndarray, prediction_type: str, *, order: int = 4
) -> list[Row]:
    """Computes linear multistep, Adams-Bashforth on uneven sigmas (k-diffusion, sample_lms)."""
    rows = []
    for i, (t, sigma) in enumerate(zip(timesteps, sigmas)):
        d = derivative(prediction_type, sigma)
        weights = [_lagrange_integral(sigmas, i, k, min(i + 1, order)) for k in range(order)]
        x = X + sum(w * m for w, m in zip(weights, (P, M1, M2, M3)))
        rows.append(Row(t, x, (1.0, sigma), d, (P, M1, M2), in_scale(sigma)))
    return rows


def _lagrange_integral(sigmas: np.ndarray, i: int, k: int, order: int) -> float:
    """Integrates, over the step, the Lagrange polynomial that is one at sigma[i - k]."""
    if k >= order:
        return 0.0
    low, high = sigmas[i], sigmas[i + 1]
    tau = (high - low) / 2 * _NODES + (high + low) / 2
    values = np.ones_like(tau)
    for j in range(order):
        if j != k:
            values *= (tau - sigmas[i - j]) / (sigmas[i - k] - sigmas[i - j])
    return float((high - low) / 2 * (_WEIGHTS * values).sum())


def heun(
    timesteps: np.ndarray, sigmas: np.ndarray, prediction_type: str, *, clip: float
) -> list[Row]:
    """Computes second-order steps, algorithm 2 of Karras et al. 2022; the last step is Euler's.

    Slots: m1 the x before the step, m2 its derivative d.
    """
    rows = []
    for i, (t, sigma) in enumerate(zip(timesteps, sigmas)):
        target = sigmas[i + 1]
        dt = target - sigma
        d = _limited_derivative(prediction_type, sigma, clip)
        prediction = denoised(prediction_type, sigma)
        rows.append(Row(t, X + dt * d, (1.0, sigma), prediction, (X, d), in_scale(sigma), clip))
        if target > 0:
            d = (M2 + _limited_derivative(prediction_type, target, clip)) / 2
            prediction = denoised(prediction_type, target)
            level, scale = (1.0, target), in_scale(target)
            rows.append(Row(timesteps[i + 1], M1 + dt * d, level, prediction, (), scale, clip))
    return rows


def _limited_derivative(prediction_type: str, sigma: float, clip: float) -> Terms:
    """Returns the derivative d at a predicted sample that may be clipped.

    Where it is not, the coefficients are those of X and RAW: x less the predicted sample would lose
    the digits that a large sigma leaves none of in float32.
    """
    return derivative(prediction_type, sigma) if np.isinf(clip) else (X - P) / sigma


def kdpm2(
    timesteps: np.ndarray,
    sigmas: np.ndarray,
    middles: np.ndarray,
    prediction_type: str,
    every: np.ndarray,
) -> list[Row]:
    """Computes DPM-Solver-2 with a midpoint in log sigma (k-diffusion, sample_dpm_2).

    middles: n, the midpoint of each step. Slot m1: the x before the step.
    """
    rows = []
    for i, (t, sigma, middle) in enumerate(zip(timesteps, sigmas, middles)):
        target = sigmas[i + 1]
        first = X + (middle - sigma) * derivative(prediction_type, sigma)
        prediction = denoised(prediction_type, sigma)
        rows.append(Row(t, first, (1.0, sigma), prediction, (X,), in_scale(sigma)))
        if target > 0:
            x = M1 + (target - sigma) * derivative(prediction_type, middle)
            rows.append(_midpoint_row(x, middle, target, prediction_type, every))
    return rows


def kdpm2_ancestral(
    timesteps: np.ndarray,
    sigmas: np.ndarray,
    split: "AncestralSplit",
    prediction_type: str,
    every: np.ndarray,
) -> list[Row]:
    """Computes DPM-Solver-2 with ancestral noise (k-diffusion, sample_dpm_2_ancestral).

    Slot m1: the x before the step.
    """
    rows = []
    for i, (t, sigma, up, down, middle) in enumerate(zip(timesteps, sigmas, *split)):
        target = sigmas[i + 1]
        first = X + (middle - sigma) * derivative(prediction_type, sigma)
        prediction = denoised(prediction_type, sigma)
        rows.append(Row(t, first, (1.0, sigma), prediction, (X,), in_scale(sigma)))
        if target > 0:
            x = M1 + (down - sigma) * derivative(prediction_type, middle) + up * NOISE
            rows.append(_midpoint_row(x, middle, target, prediction_type, every))
    return rows


class AncestralSplit(NamedTuple):
    """What the steps of `kdpm2_ancestral` add as noise, step down to, and their midpoints: n each.

    float32, as diffusers computes them: of squares that almost cancel, float32 leaves few digits.
    """

    up: np.ndarray
    down: np.ndarray
    middle: np.ndarray


def ancestral_splits(sigmas: np.ndarray) -> AncestralSplit:
    """Splits each step of a run; sigmas: n+1, descending to zero.

    Upstream: scheduling_k_dpm_2_ancestral_discrete.py, set_timesteps.
    """
    sigma, target = sigmas[:-1].astype(np.float32), sigmas[1:].astype(np.float32)
    up = np.sqrt(target**2 * (sigma**2 - target**2) / sigma**2)
    down = np.sqrt(target**2 - up**2)
    return AncestralSplit(up, down, np.append(log_midpoints(sigma, down)[:-1], np.float32(0)))


def log_midpoints(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Returns the geometric means in float32, as diffusers computes them with torch.lerp: n."""
    start, end = _log(first), _log(second)
    return _exp(end - (end - start) * np.float32(0.5))


def dpm_sde(
    timesteps: np.ndarray, sigmas: np.ndarray, prediction_type: str, every: np.ndarray
) -> list[Row]:
    """Computes stochastic DPM-Solver++ with midpoints in log sigma (k-diffusion, sample_dpmpp_sde).

    The noise comes from a Brownian motion, so that of a step contains that of its first half.
    Slots: m1 the x before the step, m2 the noise of the first half.
    """
    rows = []
    for i, (t, sigma) in enumerate(zip(timesteps, sigmas)):
        target = sigmas[i + 1]
        prediction, scale = denoised(prediction_type, sigma), in_scale(sigma)
        if target == 0:
            rows.append(Row(t, P, (1.0, sigma), prediction, (X, NOISE), scale))
            break
        middle = np.sqrt(sigma * target)
        down, up = ancestral_split(sigma, middle)
        x = down / sigma * X + (1 - down / sigma) * P + up * NOISE
        rows.append(Row(t, x, (1.0, sigma), prediction, (X, NOISE), scale))
        down, up = ancestral_split(sigma, target)
        first = np.sqrt((sigma - middle) / (sigma - target))
        noise = first * M2 + np.sqrt(1 - first**2) * NOISE
        x = down / sigma * M1 + (1 - down / sigma) * P + up * noise
        rows.append(_midpoint_row(x, middle, target, prediction_type, every))
    return rows


def brownian_steps(sigmas: np.ndarray) -> tuple[tuple[float, float] | None, ...]:
    """Returns the sigmas between which the noise of each row of `dpm_sde` is taken, to the bit.

    diffusers takes logarithms and back in float32 (scheduling_dpmsolver_sde.py, step), and 1e-6
    more or less of a motion is 1e-3 of noise.
    """
    times = -_log(sigmas[sigmas > 0])
    steps: list[tuple[float, float] | None] = []
    for time, following in itertools.pairwise(times):
        middle = time + (following - time) * np.float32(0.5)
        start, half, end = (float(_exp(-t)) for t in (time, middle, following))
        steps += [(start, half), (half, end)]
    return (*steps, *[None] * int(sigmas[-1] == 0))


def _log(x: np.ndarray) -> np.ndarray:
    """Computes the logarithm in float32, correctly rounded; PyTorch's differs once in a hundred."""
    return np.log(x.astype(np.float64)).astype(np.float32)


def _exp(x: np.ndarray) -> np.ndarray:
    return np.exp(x.astype(np.float64)).astype(np.float32)


def _midpoint_row(
    x: Terms, middle: float, target: float, prediction_type: str, every: np.ndarray
) -> Row:
    """Returns the row at `middle`; diffusers' add_noise takes its x to be at `target` already."""
    t = float(sigmas_to_timesteps(np.array(middle), every))
    prediction = denoised(prediction_type, middle)
    return Row(t, x, (1.0, target), prediction, in_scale=in_scale(middle))
