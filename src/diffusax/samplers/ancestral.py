"""Methods in the variance-preserving form, on alpha-bar: DDPM, DDIM, PNDM, LCM, TCD."""

from typing import Any

import numpy as np

from diffusax.samplers.rows import M1, M2, M3, M4, M5, NOISE, RAW, P, Row, X


def x0_from(prediction_type: str, alpha: float) -> np.ndarray:
    """The predicted sample as a form in X and RAW, at alpha-bar `alpha` (Salimans and Ho 2022)."""
    if prediction_type == "epsilon":
        return (X - np.sqrt(1 - alpha) * RAW) / np.sqrt(alpha)
    if prediction_type == "v_prediction":
        return np.sqrt(alpha) * X - np.sqrt(1 - alpha) * RAW
    return RAW


def epsilon_from(prediction_type: str, alpha: float) -> np.ndarray:
    """The predicted noise as a form in X and RAW."""
    if prediction_type == "epsilon":
        return RAW
    if prediction_type == "v_prediction":
        return np.sqrt(alpha) * RAW + np.sqrt(1 - alpha) * X
    return (X - np.sqrt(alpha) * RAW) / np.sqrt(1 - alpha)


def _clip(s: Any) -> float:
    return s.clip_sample_range if s.clip_sample else np.inf


def ddpm(s: Any, timesteps: np.ndarray) -> list[Row]:
    """Ho et al. 2020, equations 6 and 7, with strides."""
    a = s.alphas_cumprod
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
            x = x + _ddpm_deviation(s.variance_type, variance, beta) * NOISE
        rows.append(Row(t, x, x0_from(s.prediction_type, alpha), clip=_clip(s)))
    return rows


def _ddpm_deviation(variance_type: str, variance: float, beta: float) -> float:
    if variance_type in ("fixed_small", "fixed_small_log"):
        return np.sqrt(variance)
    if variance_type == "fixed_large":
        return np.sqrt(beta)
    # diffusers takes the root of log(beta), a NaN: no one can have relied on it.
    raise ValueError(
        f"variance_type={variance_type!r} is not supported; use 'fixed_small', 'fixed_small_log' "
        "or 'fixed_large'"
    )


def ddim(s: Any, timesteps: np.ndarray, eta: float) -> list[Row]:
    """Song et al. 2021, equation 12. The direction keeps the unclipped noise, as diffusers does."""
    a, stride = s.alphas_cumprod, s.num_train_timesteps // len(timesteps)
    rows = []
    for t in timesteps:
        alpha = a[t]
        alpha_prev = a[t - stride] if t >= stride else s.final_alpha
        sigma = eta * np.sqrt((1 - alpha_prev) / (1 - alpha) * (1 - alpha / alpha_prev))
        direction = np.sqrt(1 - alpha_prev - sigma**2)
        x = np.sqrt(alpha_prev) * P + direction * epsilon_from(s.prediction_type, alpha)
        prediction = x0_from(s.prediction_type, alpha)
        rows.append(Row(t, x + sigma * NOISE, prediction, clip=_clip(s)))
    return rows


def pndm_timesteps(s: Any, ascending: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The evaluation times of the Runge-Kutta and of the multistep phase."""
    n = len(ascending)
    if s.skip_prk_steps:
        # The second evaluation repeats a timestep to start the history (scheduling_pndm.py).
        plms = np.concatenate([ascending[:-1], ascending[-2:-1], ascending[-1:]])[::-1]
        return np.array([], int), plms.astype(int)
    half = s.num_train_timesteps // n // 2
    pairs = ascending[-4:].repeat(2) + np.tile([0, half], min(n, 4))
    return pairs[:-1].repeat(2)[1:-1][::-1].astype(int), ascending[:-3][::-1].astype(int)


def pndm(s: Any, prk: np.ndarray, plms: np.ndarray, n: int) -> list[Row]:
    """Liu et al. 2022: pseudo Runge-Kutta steps, then pseudo linear multistep (equations 9 to 13).

    Slots: m1, m2, m3 the earlier predictions; m4 the x at the start of a Runge-Kutta step (or of
    the first multistep step); m5 the Runge-Kutta sum so far.
    """
    stride = s.num_train_timesteps // n
    rows = []
    for i, t in enumerate(prk):
        start = prk[i // 4 * 4]
        target = t if i % 2 else t - stride // 2
        x0 = X if i % 4 == 0 else M4
        form = [RAW, RAW, RAW, M5 + RAW / 6][i % 4]
        x = _transfer(s, x0, form, start, target)
        first = (RAW, M1, M2, X, RAW / 6)
        memory = first if i % 4 == 0 else (M1, M2, M3, M4, M5 + RAW / 3)
        rows.append(Row(t, x, memory=memory))
    weights = {
        1: [RAW],
        2: [1.5 * RAW, -0.5 * M1],
        3: [23 / 12 * RAW, -16 / 12 * M1, 5 / 12 * M2],
        4: [55 / 24 * RAW, -59 / 24 * M1, 37 / 24 * M2, -9 / 24 * M3],
    }
    for i, t in enumerate(plms):
        if len(prk) == 0 and i == 1:
            x = _transfer(s, M4, (RAW + M1) / 2, t + stride, t)
            rows.append(Row(t, x))
            continue
        order = min(4, i + 1 if i == 0 else i) if len(prk) == 0 else 4
        x = _transfer(s, X, np.sum(weights[order], 0), t, t - stride)
        rows.append(Row(t, x, memory=(RAW, M1, M2, X if i == 0 else M4)))
    return rows


def _transfer(s: Any, x: np.ndarray, output: np.ndarray, t: int, target: int) -> np.ndarray:
    """Liu et al. 2022, equation 11, from t to target."""
    a = s.alphas_cumprod
    alpha, alpha_prev = a[t], a[target] if target >= 0 else s.final_alpha
    if s.prediction_type == "v_prediction":
        output = np.sqrt(alpha) * output + np.sqrt(1 - alpha) * x
    denominator = alpha * np.sqrt(1 - alpha_prev) + np.sqrt(alpha * (1 - alpha) * alpha_prev)
    return np.sqrt(alpha_prev / alpha) * x - (alpha_prev - alpha) / denominator * output


def lcm(s: Any, timesteps: np.ndarray) -> list[Row]:
    """Latent consistency models (Luo et al. 2023, algorithm 3)."""
    a, data = s.alphas_cumprod, 0.5
    rows = []
    for i, t in enumerate(timesteps):
        scaled = t * s.timestep_scaling
        c_skip = data**2 / (scaled**2 + data**2)
        c_out = scaled / np.sqrt(scaled**2 + data**2)
        x = c_out * P + c_skip * X
        if i < len(timesteps) - 1:
            alpha_prev = a[timesteps[i + 1]]
            x = np.sqrt(alpha_prev) * x + np.sqrt(1 - alpha_prev) * NOISE
        rows.append(Row(t, x, x0_from(s.prediction_type, a[t]), clip=_clip(s)))
    return rows


def tcd(s: Any, timesteps: np.ndarray, eta: float) -> list[Row]:
    """Trajectory consistency (Zheng et al. 2024, algorithm 4), eta being its gamma."""
    a = s.alphas_cumprod
    rows = []
    for i, t in enumerate(timesteps):
        last = i == len(timesteps) - 1
        previous = 0 if last else timesteps[i + 1]
        between = int(np.floor((1 - eta) * previous))
        alpha, alpha_prev, alpha_s = a[t], a[previous], a[between]
        x0, eps = x0_from(s.prediction_type, alpha), epsilon_from(s.prediction_type, alpha)
        x = np.sqrt(alpha_s) * x0 + np.sqrt(1 - alpha_s) * eps
        if eta > 0 and not last:
            ratio = alpha_prev / alpha_s
            x = np.sqrt(ratio) * x + np.sqrt(1 - ratio) * NOISE
        rows.append(Row(t, x, x0))
    return rows
