"""Variance-preserving methods, which work on alpha-bar: DDPM, DDIM, PNDM, LCM and TCD."""

from typing import NamedTuple, Protocol

import numpy as np

from diffusax.samplers.rows import M1, M2, M3, M4, M5, NOISE, RAW, P, Row, X, epsilon_from, x0_from
from diffusax.samplers.terms import Terms

SIGMA_DATA = 0.5
"""The deviation of the data that consistency models assume (Luo et al. 2023, appendix C)."""


class Limits(NamedTuple):
    """How a method bounds the predicted sample."""

    clip: float = np.inf
    threshold: tuple[float, float] = (0.0, 0.0)


class Process(Protocol):
    """The noise levels of training, and what the network predicts."""

    @property
    def alphas_cumprod(self) -> np.ndarray: ...
    @property
    def final_alpha(self) -> float: ...
    @property
    def prediction_type(self) -> str: ...


def _prediction(process: Process, level: tuple[float, float], limits: Limits) -> Terms:
    """Returns the coefficients of the predicted sample.

    They are infinite where no signal is left to tell the sample from the noise.
    """
    signal, noise = level
    if signal == 0 and process.prediction_type == "epsilon" and limits != Limits():
        # diffusers clips the infinities, which leaves their sign.
        signal = 1e-30
    return x0_from(process.prediction_type, signal, noise)


def _alphas(process: Process) -> np.ndarray:
    """Returns alpha-bar for each training timestep, float64."""
    return process.alphas_cumprod.astype(np.float64)


def alpha_level(alpha: float) -> tuple[float, float]:
    """Returns the (signal, noise) of latents at alpha-bar `alpha`."""
    return np.sqrt(alpha), np.sqrt(1 - alpha)


def alpha_after(process: Process, t: int) -> float:
    """Returns alpha-bar at the timestep that a step leads to; below 0 it is that after the run."""
    return float(process.alphas_cumprod[t]) if t >= 0 else process.final_alpha


def ddpm(
    process: Process, timesteps: np.ndarray, *, variance_type: str | None, limits: Limits
) -> list[Row]:
    """Computes the rows of DDPM with strides (Ho et al. 2020, equations 6 and 7)."""
    a = _alphas(process)
    rows = []
    for i, t in enumerate(timesteps):
        last = i == len(timesteps) - 1
        alpha, alpha_prev = a[t], 1.0 if last else a[timesteps[i + 1]]
        ratio = alpha / alpha_prev
        beta = 1 - ratio
        x = np.sqrt(alpha_prev) * beta / (1 - alpha) * P
        x = x + np.sqrt(ratio) * (1 - alpha_prev) / (1 - alpha) * X
        if t > 0:
            variance = max((1 - alpha_prev) / (1 - alpha) * beta, 1e-20)
            x = x + np.sqrt(beta if variance_type == "fixed_large" else variance) * NOISE
        level = alpha_level(alpha)
        rows.append(Row(t, x, level, _prediction(process, level, limits), (), 1.0, *limits))
    return rows


def ddim(
    process: Process,
    timesteps: np.ndarray,
    *,
    stride: int,
    eta: float,
    limits: Limits,
    clipped: bool = False,
) -> list[Row]:
    """Computes the rows of DDIM (Song et al. 2021, equation 12).

    The direction keeps the unclipped noise, as in diffusers, unless `clipped`: then it is the noise
    that the bounded prediction leaves in the sample.
    """
    a, kind = _alphas(process), process.prediction_type
    rows = []
    for t in timesteps:
        alpha = a[t]
        alpha_prev = alpha_after(process, t - stride)
        variance = (1 - alpha_prev) / (1 - alpha) * (1 - alpha / alpha_prev)
        sigma = eta * np.sqrt(max(variance, 0.0))
        # At eta=1 rounding can make this slightly negative.
        direction = np.sqrt(max(1 - alpha_prev - sigma**2, 0.0))
        level = alpha_level(alpha)
        signal, noise = level
        epsilon = (X - signal * P) / noise if clipped else epsilon_from(kind, *level)
        x = np.sqrt(alpha_prev) * P + direction * epsilon + sigma * NOISE
        rows.append(Row(t, x, level, _prediction(process, level, limits), (), 1.0, *limits))
    return rows


def ddim_inverse(
    process: Process, timesteps: np.ndarray, *, stride: int, limits: Limits
) -> list[Row]:
    """Computes the rows of DDIM from less noise to more (Song et al. 2021, section 4.3).

    Each x is at the level of its timestep less the stride, and the network is told the timestep
    (scheduling_ddim_inverse.py, step).
    """
    kind = process.prediction_type
    rows = []
    for t in timesteps:
        level = alpha_level(alpha_after(process, t - stride))
        signal, noise = alpha_level(alpha_after(process, t))
        x = signal * P + noise * epsilon_from(kind, *level)
        rows.append(Row(t, x, level, _prediction(process, level, limits), (), 1.0, *limits))
    return rows


def pndm_timesteps(
    ascending: np.ndarray, stride: int, *, skip_prk_steps: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the timesteps of the Runge-Kutta phase and of the multistep phase."""
    if skip_prk_steps:
        # The second evaluation repeats a timestep to start the history (scheduling_pndm.py).
        plms = np.concatenate([ascending[:-1], ascending[-2:-1], ascending[-1:]])[::-1]
        return np.array([], int), plms.astype(int)
    pairs = ascending[-4:].repeat(2) + np.tile([0, stride // 2], min(len(ascending), 4))
    return pairs[:-1].repeat(2)[1:-1][::-1].astype(int), ascending[:-3][::-1].astype(int)


def pndm(
    process: Process, prk: np.ndarray, plms: np.ndarray, *, stride: int, begin: int
) -> list[Row]:
    """Computes the rows of PNDM from `begin` on (Liu et al. 2022, equations 9 to 13).

    Pseudo Runge-Kutta steps come first, then pseudo linear multistep ones. As in diffusers, a run
    that begins late still opens with the phase that a whole run opens with, on the timesteps that
    are left.

    Slots: m1, m2, m3 the earlier predictions; m4 the x at the start of a Runge-Kutta step (or of
    the first multistep step); m5 the Runge-Kutta sum so far.
    """
    rows = []
    for i, t in enumerate(np.concatenate([prk, plms])[begin:].astype(int)):
        level = alpha_level(alpha_after(process, t))
        if i < len(prk):
            x, memory = _prk_row(process, i, t, prk[i // 4 * 4], stride)
        else:
            x, memory = _plms_row(process, i - len(prk), t, stride, warm=len(prk) > 0)
        rows.append(Row(t, x, level, memory=memory))
    return rows


def _prk_row(
    process: Process, i: int, t: int, start: int, stride: int
) -> tuple[Terms, tuple[Terms, ...]]:
    """Returns the coefficients of x and of the memory slots in the Runge-Kutta phase."""
    x0 = X if i % 4 == 0 else M4
    output = [RAW, RAW, RAW, M5 + RAW / 6][i % 4]
    x = _transfer(process, x0, output, start, t if i % 2 else t - stride // 2)
    if i % 4 == 0:
        return x, (RAW, M1, M2, X, RAW / 6)
    return x, (M1, M2, M3, M4, M5 + RAW / 3)


_ADAMS_BASHFORTH: dict[int, Terms] = {
    1: RAW,
    2: 3 / 2 * RAW - 1 / 2 * M1,
    3: 23 / 12 * RAW - 16 / 12 * M1 + 5 / 12 * M2,
    4: 55 / 24 * RAW - 59 / 24 * M1 + 37 / 24 * M2 - 9 / 24 * M3,
}


def _plms_row(
    process: Process, i: int, t: int, stride: int, *, warm: bool
) -> tuple[Terms, tuple[Terms, ...]]:
    """Returns the same for the multistep phase. warm: whether Runge-Kutta steps came before."""
    if i == 1 and not warm:
        return _transfer(process, M4, (RAW + M1) / 2, t + stride, t), ()
    order = 4 if warm else min(4, max(i, 1))
    x = _transfer(process, X, _ADAMS_BASHFORTH[order], t, t - stride)
    return x, (RAW, M1, M2, X if i == 0 else M4)


def _transfer(process: Process, x: Terms, output: Terms, t: int, target: int) -> Terms:
    """Returns the coefficients of x at `target`, from those at t (Liu et al. 2022, equation 11)."""
    alpha, alpha_prev = (alpha_after(process, at) for at in (t, target))
    if process.prediction_type == "v_prediction":
        output = np.sqrt(alpha) * output + np.sqrt(1 - alpha) * x
    denominator = alpha * np.sqrt(1 - alpha_prev) + np.sqrt(alpha * (1 - alpha) * alpha_prev)
    return np.sqrt(alpha_prev / alpha) * x - (alpha_prev - alpha) / denominator * output


def lcm(
    process: Process, timesteps: np.ndarray, *, timestep_scaling: float, limits: Limits
) -> list[Row]:
    """Computes the rows of latent consistency models (Luo et al. 2023, algorithm 3)."""
    a = _alphas(process)
    rows = []
    for i, t in enumerate(timesteps):
        scaled = t * timestep_scaling
        c_skip = SIGMA_DATA**2 / (scaled**2 + SIGMA_DATA**2)
        c_out = scaled / np.sqrt(scaled**2 + SIGMA_DATA**2)
        x = c_out * P + c_skip * X
        if i < len(timesteps) - 1:
            signal, noise = alpha_level(a[timesteps[i + 1]])
            x = signal * x + noise * NOISE
        level = alpha_level(a[t])
        rows.append(Row(t, x, level, _prediction(process, level, limits), (), 1.0, *limits))
    return rows


def tcd(process: Process, timesteps: np.ndarray, *, eta: float) -> list[Row]:
    """Computes trajectory consistency (Zheng et al. 2024, algorithm 4); eta is its gamma."""
    a, kind = _alphas(process), process.prediction_type
    rows = []
    for i, t in enumerate(timesteps):
        last = i == len(timesteps) - 1
        previous = 0 if last else timesteps[i + 1]
        between = int(np.floor((1 - eta) * previous))
        alpha_prev, alpha_s = a[previous], a[between]
        level = alpha_level(a[t])
        x = np.sqrt(alpha_s) * P + np.sqrt(1 - alpha_s) * epsilon_from(kind, *level)
        if eta > 0 and not last:
            ratio = alpha_prev / alpha_s
            x = np.sqrt(ratio) * x + np.sqrt(1 - ratio) * NOISE
        rows.append(Row(t, x, level, _prediction(process, level, Limits())))
    return rows
