"""SA-Solver: stochastic Adams methods in log-SNR (Xue et al. 2023)."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from diffusax.samplers.methods.alpha_methods import Limits
from diffusax.samplers.methods.snr_methods import (
    Level,
    Predicted,
    exponential_weights,
    integrand,
    row_at,
)
from diffusax.samplers.rows import M1, M2, M3, M4, M5, NOISE, Row, X
from diffusax.samplers.terms import Terms


class SA(NamedTuple):
    """The options of SA-Solver under diffusers' names, and its predictions.

    tau: how stochastic a step from this timestep is, from 0, an ODE's, to 1, an SDE's.
    """

    x0: Predicted
    epsilon: Predicted
    predictor_order: int
    corrector_order: int
    tau: Callable[[float], float]
    predict_x0: bool = True
    lower_order_final: bool = True
    limits: Limits = Limits()


def sa_solver(solver: SA, timesteps: np.ndarray, ls: Sequence[Level], *, begin: int) -> list[Row]:
    """Computes the rows of SA-Solver (Xue et al. 2023, algorithm 1).

    Each row corrects the x it was given with the prediction made there and the noise of the row
    before, then predicts the next. Slots: m1, m2, m3 earlier predictions; m4 the corrected x of the
    row before, m5 its noise.
    """
    n = len(timesteps)
    rows = []
    for i, t in enumerate(timesteps):
        x, known = X, max(i - begin, 0)
        prediction, output, limits = integrand(solver, ls[i], of_x0=solver.predict_x0)
        if known:
            left = n - i + 2 if solver.lower_order_final else n
            order = min(solver.corrector_order, left, known + 1)
            points, tau = [ls[i - k] for k in range(order)], solver.tau(timesteps[i - 1])
            weights = _adams_weights(solver, points, ls[i - 1], ls[i], tau)
            if order == 2 and solver.predict_x0:
                weights += _second_order_term(ls[i - 1], ls[i], tau, corrector=True)
            terms = zip(weights, (output, M1, M2, M3))
            x = _stochastic_step(solver, M4, M5, ls[i - 1], ls[i], tau) + _total(terms)
        order = min(solver.predictor_order, n - i if solver.lower_order_final else n, known + 1)
        points, tau = [ls[i - k] for k in range(order)], solver.tau(t)
        weights = _adams_weights(solver, points, ls[i], ls[i + 1], tau)
        if order == 2 and solver.predict_x0:
            term = _second_order_term(ls[i], ls[i + 1], tau, corrector=False)
            weights += term / (ls[i].lam - ls[i - 1].lam)
        terms = zip(weights, (output, M1, M2, M3))
        after = _stochastic_step(solver, x, NOISE, ls[i], ls[i + 1], tau) + _total(terms)
        rows.append(row_at(t, after, ls[i], prediction, (output, M1, M2, x, NOISE), limits))
    return rows


def _stochastic_step(
    solver: SA, x: Terms, noise: Terms, start: Level, end: Level, tau: float
) -> Terms:
    """Returns the part of a step that is of x and of noise (Xue et al. 2023, equation 13)."""
    h = end.lam - start.lam
    if solver.predict_x0:
        scale = np.exp(-(tau**2) * h) * end.sigma / start.sigma
        deviation = end.sigma * np.sqrt(-np.expm1(-2 * tau**2 * h))
    else:
        scale, deviation = end.alpha / start.alpha, tau * end.sigma * np.sqrt(np.expm1(2 * h))
    return scale * x + deviation * noise


def _adams_weights(
    solver: SA, points: Sequence[Level], start: Level, end: Level, tau: float
) -> np.ndarray:
    """Returns the weights of the predictions at the points, which a step integrates."""
    h, strength = end.lam - start.lam, 1 + tau**2
    rate = strength if solver.predict_x0 else -1.0
    scaled = [rate * (point.lam - start.lam) for point in points]
    integrals = np.array(exponential_weights(scaled, rate * h)) / rate
    if solver.predict_x0:
        return strength * end.alpha * np.exp(-rate * h) * integrals
    return -strength * end.sigma * np.exp(h) * integrals


def _second_order_term(start: Level, end: Level, tau: float, *, corrector: bool) -> np.ndarray:
    """Returns what diffusers adds to the two weights of second order, for runs of few steps."""
    h, strength = end.lam - start.lam, 1 + tau**2
    term = h**2 / 2 - (h * strength + np.expm1(-strength * h)) / strength**2
    term *= strength * end.alpha / (h if corrector else 1)
    return np.array([term, -term])


def _total(terms: Iterable[tuple[float, Terms]]) -> Terms:
    return sum((weight * output for weight, output in terms), 0 * X)
