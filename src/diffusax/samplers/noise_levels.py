"""Computes noise schedules on the host: betas, timesteps and sigmas.

Cumulative products and sigmas are rounded to float32, in which diffusers keeps them: near t=0 the
rounding of 1 - alpha is larger than the tolerance of our comparison. All that follows is float64.
"""

import contextlib
import contextvars
import functools
import importlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np


class Betas(NamedTuple):
    """The options of a noise schedule under diffusers' names.

    rescale_zero_snr: whether the last timestep has no signal. floor: whether that timestep has a
    little all the same.
    """

    num_train_timesteps: int
    beta_start: float
    beta_end: float
    beta_schedule: str
    trained_betas: tuple[float, ...] | None = None
    rescale_zero_snr: bool = False
    floor: bool = False


@functools.lru_cache(maxsize=64)
def betas_of(options: Betas) -> np.ndarray:
    """Returns the variance of the noise that each training timestep adds, float32, read-only.

    Raises:
        ValueError: trained_betas are fewer than the timesteps.
    """
    n, beta_start, beta_end, beta_schedule, trained_betas, rescale_zero_snr, _ = options
    if trained_betas is not None:
        if len(trained_betas) < n:
            raise ValueError(
                f"trained_betas must have a number for each of num_train_timesteps={n} (got "
                f"{len(trained_betas)})"
            )
        betas = np.asarray(trained_betas, np.float32)
    elif beta_schedule == "linear":
        betas = _linspace(beta_start, beta_end, n)
    elif beta_schedule == "scaled_linear":
        betas = _linspace(beta_start**0.5, beta_end**0.5, n) ** 2
    elif beta_schedule == "sigmoid":
        ramp = _linspace(-6.0, 6.0, n)
        betas = _special().expit(ramp) * np.float32(beta_end - beta_start) + np.float32(beta_start)
    else:
        betas = _from_alpha_bar(n, _ALPHA_BARS[beta_schedule])
    if rescale_zero_snr:
        betas = _rescale_zero_snr(betas)
    betas.flags.writeable = False
    return betas


@functools.lru_cache(maxsize=64)
def alphas_cumprod(options: Betas) -> np.ndarray:
    """Returns the product of 1 - beta up to each training timestep (Ho et al. 2020, section 2).

    The array is float32 and read-only.
    """
    alphas = _cumprod(np.float32(1) - betas_of(options))
    if options.floor:
        # An infinite first sigma would be of no use to methods on sigma.
        alphas[-1] = 2.0**-24
    alphas.flags.writeable = False
    return alphas


def spaced_timesteps(n: int, total: int, spacing: str, offset: int) -> np.ndarray:
    """Returns n of `total` training timesteps, descending, not rounded (Lin et al. 2024, table
    2).
    """
    if spacing == "linspace":
        return np.linspace(0, total - 1, n)[::-1]
    if spacing == "leading":
        return (np.arange(n) * (total // n))[::-1].astype(np.float64) + offset
    return np.arange(total, 0, -total / n).round() - 1


def interior_timesteps(n: int, total: int, last: int, spacing: str, offset: int) -> np.ndarray:
    """Returns rounded `spaced_timesteps` for solvers that count the end at t=0 as a step too."""
    if spacing == "linspace":
        return np.linspace(0, last - 1, n + 1).round()[::-1][:-1]
    if spacing == "leading":
        return (np.arange(n + 1) * (last // (n + 1)))[::-1][:-1].astype(np.float64) + offset
    return np.arange(last, 0, -total / n).round() - 1


def all_sigmas(alphas: np.ndarray) -> np.ndarray:
    """Returns sqrt((1 - alpha) / alpha) of all training timesteps, ascending (Song et al. 2021)."""
    a = alphas.astype(np.float32)
    return np.sqrt((1 - a) / a).astype(np.float64)


def log_sigmas(every: np.ndarray) -> np.ndarray:
    """Returns the logarithms of the sigmas of all training timesteps.

    diffusers keeps them and their differences in float32, and cuts the timesteps that it gets from
    them to integers: the rounding decides which.
    """
    return np.log(every.astype(np.float32))


def sigmas_to_timesteps(sigmas: np.ndarray, every: np.ndarray) -> np.ndarray:
    """Returns the fractional training timesteps of `sigmas`, interpolated in log sigma.

    every: the sigmas of all training timesteps, ascending, but for the floor of the last one.
    """
    log = np.log(np.maximum(sigmas, 1e-10))
    log_every = log_sigmas(every)
    below = np.less_equal.outer(log_every, log)
    last_below = len(every) - 1 - below[::-1].argmax(0)
    low = np.where(below.any(0), last_below, 0).clip(0, max(len(every) - 2, 0))
    high = np.minimum(low + 1, len(every) - 1)
    width = np.float64(log_every[low] - log_every[high])
    w = np.clip((log_every[low] - log) / width, 0, 1)
    return (1 - w) * low + w * high


def karras_sigmas(n: int, low: float, high: float, *, rho: float = 7.0) -> np.ndarray:
    """Returns n sigmas from `high` down to `low` (Karras et al. 2022, equation 5).

    Raises:
        ValueError: rho is so small that the powers have no numbers.
    """
    ramp = np.linspace(0, 1, n)
    try:
        first, last = high ** (1 / rho), low ** (1 / rho)
    except OverflowError:
        raise ValueError(f"rho must be larger for sigma_max={high:g} (got {rho:g})") from None
    return (first + ramp * (last - first)) ** rho


def exponential_sigmas(n: int, low: float, high: float) -> np.ndarray:
    """Returns n sigmas from `high` down to `low`, evenly spaced in log sigma."""
    return np.exp(np.linspace(math.log(high), math.log(low), n))


def beta_sigmas(n: int, low: float, high: float, *, alpha: float = 0.6) -> np.ndarray:
    """Returns quantiles of the symmetric beta distribution (Lee et al. 2024, "Beta Sampling
    ...").
    """
    quantiles = _special().betaincinv(alpha, alpha, 1 - np.linspace(0, 1, n))
    return low + quantiles * (high - low)


_UNROUNDED: contextvars.ContextVar[bool] = contextvars.ContextVar("unrounded", default=False)


@contextlib.contextmanager
def unrounded() -> Iterator[None]:
    """Computes levels without rounding them to float32 within the context, for derivatives."""
    token = _UNROUNDED.set(True)
    try:
        yield
    finally:
        _UNROUNDED.reset(token)


def in_float32(values: np.ndarray) -> np.ndarray:
    """Returns values in float32, in which diffusers computes on, but for within `unrounded`."""
    return values if _UNROUNDED.get() else values.astype(np.float32)


def rounded(values: np.ndarray) -> np.ndarray:
    """Rounds to float32, in which diffusers keeps a run's sigmas; returns float64."""
    return in_float32(values).astype(np.float64)


def _linspace(start: float, stop: float, n: int) -> np.ndarray:
    """Computes torch.linspace in float32: from both ends to the middle, in fused multiply-adds."""
    first, last = np.float32(start), np.float32(stop)
    step = np.float64((last - first) / np.float32(max(n - 1, 1)))
    i = np.arange(n)
    if n == 1:
        return np.array([first], np.float32)
    up, down = np.float64(first) + step * i, np.float64(last) - step * (n - 1 - i)
    return np.where(i < n // 2, up, down).astype(np.float32)


def _squared_cosine(t: float) -> float:
    """Computes alpha-bar at time t of Nichol and Dhariwal 2021, section 3.2."""
    return math.cos((t + 0.008) / 1.008 * math.pi / 2) ** 2


def _exponential(t: float) -> float:
    return math.exp(-12.0 * t)


def _laplace(t: float) -> float:
    """Computes alpha-bar at time t of Hang et al. 2024, "Improved Noise Schedule for ..."."""
    log_snr = -0.5 * math.copysign(1, 0.5 - t) * math.log(1 - 2 * abs(0.5 - t) + 1e-6)
    return math.sqrt(math.exp(log_snr) / (1 + math.exp(log_snr)))


_ALPHA_BARS = {"squaredcos_cap_v2": _squared_cosine, "exp": _exponential, "laplace": _laplace}


def _from_alpha_bar(n: int, alpha_bar: Callable[[float], float]) -> np.ndarray:
    """Returns n betas whose products follow `alpha_bar` of the time in [0, 1], capped at 0.999."""
    bars = [alpha_bar(i / n) for i in range(n + 1)]
    return np.array([min(1 - b / a, 0.999) for a, b in itertools.pairwise(bars)], np.float32)


def _rescale_zero_snr(betas: np.ndarray) -> np.ndarray:
    """Rescales betas so that the last timestep has no signal (Lin et al. 2024, algorithm 1)."""
    root = np.sqrt(_cumprod(np.float32(1) - betas))
    first, last = root[0], root[-1]
    root = (root - last) * (first / (first - last))
    bar = root**2
    return np.float32(1) - np.concatenate([bar[:1], bar[1:] / bar[:-1]])


def _cumprod(alphas: np.ndarray) -> np.ndarray:
    """Computes torch.cumprod, which accumulates in float64 on the CPU."""
    return np.cumprod(alphas.astype(np.float64)).astype(np.float32)


def _special() -> Any:
    """Imports scipy.special, which takes a tenth of the package's import and serves two options."""
    return importlib.import_module("scipy.special")


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
