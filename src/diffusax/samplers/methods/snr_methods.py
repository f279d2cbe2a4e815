"""Exponential integrators in log-SNR: DPM-Solver, DPM-Solver++, their SDE forms, and UniPC.

alpha, sigma and lambda are those of Lu et al. 2022: x_t = alpha x_0 + sigma noise with
alpha^2 + sigma^2 = 1, and lambda = log(alpha / sigma). The same formulas serve flow matching, where
alpha + sigma = 1.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from diffusax.samplers.methods.alpha_methods import Limits
from diffusax.samplers.rows import M1, M2, M3, M4, NOISE, P, Row, X
from diffusax.samplers.terms import Terms

Predicted = Callable[[float, float], Terms]
"""A function of (signal, noise) of x that returns a prediction as coefficients of X and RAW."""


class Level(NamedTuple):
    """A noise level; in_scale is the factor that brings x to the scale the network takes."""

    alpha: float
    sigma: float
    lam: float
    in_scale: float = 1.0


class Solver(Protocol):
    """What all solvers have: their predictions, and the limits of the predicted sample."""

    @property
    def x0(self) -> Predicted: ...
    @property
    def epsilon(self) -> Predicted: ...
    @property
    def limits(self) -> Limits: ...


class DPM(NamedTuple):
    """The options of a DPM solver under diffusers' names, and its predictions.

    to_zero: whether the last sigma is zero.
    """

    x0: Predicted
    epsilon: Predicted
    order: int
    algorithm_type: str = "dpmsolver++"
    solver_type: str = "midpoint"
    lower_order_final: bool = True
    euler_at_final: bool = False
    to_zero: bool = True
    limits: Limits = Limits()


class UniPC(NamedTuple):
    """The options of a UniPC solver under diffusers' names, and its predictions."""

    x0: Predicted
    epsilon: Predicted
    order: int
    predict_x0: bool = True
    solver_type: str = "bh2"
    lower_order_final: bool = True
    disable_corrector: tuple[int, ...] = ()
    limits: Limits = Limits()


def levels(sigmas: np.ndarray) -> list[Level]:
    """Returns the levels of ratios sigma / alpha; the last may be zero, with lambda infinite."""
    result = []
    for ratio in sigmas:
        alpha = 1 / np.sqrt(ratio**2 + 1)
        result.append(Level(alpha, ratio * alpha, -np.log(ratio) if ratio > 0 else np.inf))
    return result


def flow_levels(sigmas: np.ndarray) -> list[Level]:
    """Returns the levels of flow matching's sigmas; the last may be zero, with lambda infinite."""
    return [Level(1 - sigma, sigma, np.log(1 - sigma) - np.log(sigma)) for sigma in sigmas]


class DEIS(NamedTuple):
    """The options of a DEIS solver under diffusers' names, and its predictions."""

    x0: Predicted
    epsilon: Predicted
    order: int
    lower_order_final: bool = True
    limits: Limits = Limits()


def integrand(solver: Solver, level: Level, *, of_x0: bool) -> tuple[Terms, Terms, Limits]:
    """Returns what is integrated: coefficients of p, those of X and P, and the limits of p.

    Only a sample has limits: where the noise is integrated it follows from the limited sample.
    """
    x0 = solver.x0(level.alpha, level.sigma)
    if of_x0:
        return x0, P, solver.limits
    if solver.limits == Limits():
        return solver.epsilon(level.alpha, level.sigma), P, solver.limits
    return x0, (X - level.alpha * P) / level.sigma, solver.limits


def row_at(
    t: float,
    x: Terms,
    level: Level,
    prediction: Terms,
    memory: tuple[Terms, ...],
    limits: Limits,
) -> Row:
    return Row(t, x, (level.alpha, level.sigma), prediction, memory, level.in_scale, *limits)


def dpm_multistep(
    solver: DPM, timesteps: np.ndarray, ls: Sequence[Level], *, begin: int
) -> list[Row]:
    """Computes DPM-Solver++ 2M and 3M (Lu et al. 2022, algorithm 2).

    Slots: m1, m2 earlier predictions.
    """
    n = len(timesteps)
    of_x0 = solver.algorithm_type.endswith("++")
    rows = []
    for i, t in enumerate(timesteps):
        short = solver.lower_order_final and n < 15
        order = min(solver.order, max(i - begin, 0) + 1)
        if i == n - 1 and (solver.euler_at_final or short or solver.to_zero):
            order = 1
        elif i == n - 2 and short:
            order = min(order, 2)
        prediction, output, limits = integrand(solver, ls[i], of_x0=of_x0)
        points = [ls[i - k] for k in range(order)]
        x = _update(solver, X, [output, M1, M2][:order], points, ls[i + 1])
        rows.append(row_at(t, x, ls[i], prediction, (output, M1), limits))
    return rows


def dpm_singlestep(
    solver: DPM, timesteps: np.ndarray, ls: Sequence[Level], *, begin: int
) -> list[Row]:
    """Computes DPM-Solver++ 2S and 3S (Lu et al. 2022, algorithm 1) as diffusers orders its steps.

    Slots: m1, m2 earlier predictions, m3 the x at the start of the group of evaluations.
    """
    of_x0 = solver.algorithm_type.endswith("++")
    rows = []
    for i, (t, order) in enumerate(zip(timesteps, _singlestep_orders(solver, len(timesteps)))):
        order = min(order, max(i - begin, 0) + 1)
        start = X if order == 1 else M3
        # The expansion is about the group's first evaluation.
        points = [ls[i - order + 1 + k] for k in range(order)]
        prediction, output, limits = integrand(solver, ls[i], of_x0=of_x0)
        outputs = [output, M1, M2][:order][::-1]
        x = _singlestep_update(solver, start, outputs, points, ls[i + 1])
        rows.append(row_at(t, x, ls[i], prediction, (output, M1, start), limits))
    return rows


def _singlestep_orders(solver: DPM, n: int) -> list[int]:
    order = solver.order
    whole = not solver.to_zero and not solver.lower_order_final and n % order == 0
    orders = [1 + i % order for i in range(n)]
    if not whole and order > 1:
        if order == 3 and n % 3 == 0 and n:
            orders[-3:] = [1, 2, 1]
        elif order == 2 and n % 2 == 0 and n:
            orders[-2:] = [1, 1]
    if solver.to_zero:
        orders[-1] = 1
    return orders


def _update(
    solver: DPM,
    x: Terms,
    outputs: Sequence[Terms],
    points: Sequence[Level],
    end: Level,
) -> Terms:
    """Returns the coefficients of one multistep update to `end`; outputs, points: latest first."""
    start = points[0]
    h = end.lam - start.lam
    d0 = outputs[0]
    if len(outputs) == 1:
        return _expand(solver, x, start, end, h, [d0])
    r0 = (points[0].lam - points[1].lam) / h
    d1_0 = (outputs[0] - outputs[1]) / r0
    if len(outputs) == 2:
        return _expand(solver, x, start, end, h, [d0, d1_0])
    r1 = (points[1].lam - points[2].lam) / h
    d1_1 = (outputs[1] - outputs[2]) / r1
    d1 = d1_0 + r0 / (r0 + r1) * (d1_0 - d1_1)
    return _expand(solver, x, start, end, h, [d0, d1, (d1_0 - d1_1) / (r0 + r1)], heun=True)


def _singlestep_update(
    solver: DPM, x: Terms, outputs: Sequence[Terms], points: Sequence[Level], end: Level
) -> Terms:
    """Returns the coefficients of one update over a group; outputs and points: earliest first."""
    start = points[0]
    h = end.lam - start.lam
    if len(outputs) == 1:
        return _expand(solver, x, start, end, h, [outputs[0]])
    slopes = [
        (output - outputs[0]) / ((point.lam - start.lam) / h)
        for output, point in zip(outputs[1:], points[1:])
    ]
    if len(outputs) == 2:
        return _expand(solver, x, start, end, h, [outputs[0], slopes[0]])
    if solver.solver_type == "midpoint":
        return _expand(solver, x, start, end, h, [outputs[0], slopes[1]], heun=True)
    r1, r0 = ((point.lam - start.lam) / h for point in points[1:])
    d1 = (r0 * slopes[0] - r1 * slopes[1]) / (r0 - r1)
    d2 = 2 * (slopes[1] - slopes[0]) / (r0 - r1)
    return _expand(solver, x, start, end, h, [outputs[0], d1, d2], heun=True)


def _expand(
    solver: DPM,
    x: Terms,
    start: Level,
    end: Level,
    h: float,
    derivatives: Sequence[Terms],
    *,
    heun: bool = False,
) -> Terms:
    """Computes the Taylor expansion of the exact solution (Lu et al. 2022, equation 3.4).

    `heun` takes the second coefficient exactly instead of as half the first (its midpoint form).
    """
    sde = solver.algorithm_type.startswith("sde")
    if solver.algorithm_type.endswith("++"):
        z = -2 * h if sde else -h
        scale, weight = end.sigma / start.sigma * (np.exp(-h) if sde else 1), -end.alpha
    else:
        z = h
        scale, weight = end.alpha / start.alpha, -end.sigma * (2 if sde else 1)
    result = scale * x + weight * np.expm1(z) * derivatives[0]
    if len(derivatives) > 1:
        exact = heun or solver.solver_type == "heun"
        second = np.expm1(z) / z - 1 if exact else 0.5 * np.expm1(z)
        result = result + weight * second * derivatives[1]
    if len(derivatives) > 2:
        third = (np.expm1(z) - z) / z**2
        # The sign of diffusers' 1/2 in the SDE form differs from the ODE's.
        result = result + weight * (third + 0.5 if sde else third - 0.5) * derivatives[2]
    if sde:
        variance = -np.expm1(-2 * h) if solver.algorithm_type.endswith("++") else np.expm1(2 * h)
        result = result + end.sigma * np.sqrt(variance) * NOISE
    return result


def unipc(solver: UniPC, timesteps: np.ndarray, ls: Sequence[Level], *, begin: int) -> list[Row]:
    """Computes the rows of UniPC (Zhao et al. 2023, algorithms 1 and 2).

    Each row corrects the x it was given with the prediction made there, then predicts the next.
    Slots: m1, m2, m3 earlier predictions; m4 the corrected x of the row before.
    """
    n, last_order = len(timesteps), 0
    rows = []
    for i, t in enumerate(timesteps):
        x = X
        prediction, output, limits = integrand(solver, ls[i], of_x0=solver.predict_x0)
        if i > begin and (i - 1) not in solver.disable_corrector:
            points = [ls[i - 1 - k] for k in range(last_order)]
            x = _uni_bh(solver, M4, [M1, M2, M3][:last_order], points, ls[i], target=output)
        order = min(solver.order, n - i) if solver.lower_order_final else solver.order
        last_order = order = min(order, max(i - begin, 0) + 1)
        points = [ls[i - k] for k in range(order)]
        following = _uni_bh(solver, x, [output, M1, M2][:order], points, ls[i + 1], target=None)
        rows.append(row_at(t, following, ls[i], prediction, (output, M1, M2, x), limits))
    return rows


def _uni_bh(
    solver: UniPC,
    x: Terms,
    outputs: Sequence[Terms],
    points: Sequence[Level],
    end: Level,
    *,
    target: Terms | None,
) -> Terms:
    """Computes UniP (target None) or UniC (target: the prediction at `end`), order len(outputs)."""
    start, order = points[0], len(outputs)
    h = end.lam - start.lam
    z = -h if solver.predict_x0 else h
    phi = np.expm1(z)
    b_h = z if solver.solver_type == "bh1" else phi
    ratios = [(point.lam - start.lam) / h for point in points[1:]]
    slopes = [(m - outputs[0]) / r for m, r in zip(outputs[1:], ratios)]
    if target is not None:
        slopes.append(target - outputs[0])
        ratios.append(1.0)

    if solver.predict_x0:
        scale, weight = end.sigma / start.sigma, end.alpha
    else:
        scale, weight = end.alpha / start.alpha, end.sigma
    result = scale * x - weight * phi * outputs[0]
    if not slopes:
        return result
    # diffusers takes 1/2 for the lowest order of each rather than solving for it.
    lowest = order == (2 if target is None else 1)
    rhos = [0.5] if lowest else _uni_weights(ratios, z, b_h)
    return result - weight * b_h * sum(rho * d for rho, d in zip(rhos, slopes))


def _uni_weights(ratios: Sequence[float], z: float, b_h: float) -> np.ndarray:
    """Solves R rho = b (Zhao et al. 2023, equation 5)."""
    size = len(ratios)
    matrix = np.array([[r**k for r in ratios] for k in range(size)])
    phi_k, factorial, b = np.expm1(z) / z - 1, 1.0, []
    for k in range(1, size + 1):
        b.append(phi_k * factorial / b_h)
        factorial *= k + 1
        phi_k = phi_k / z - 1 / factorial
    return np.linalg.solve(matrix, np.array(b))


def deis(solver: DEIS, timesteps: np.ndarray, ls: Sequence[Level], *, begin: int) -> list[Row]:
    """Computes DEIS in log rho (Zhang and Chen 2023, section 3.3).

    Slots: m1, m2 earlier predictions.
    """
    n = len(timesteps)
    rows = []
    for i, t in enumerate(timesteps):
        order = min(solver.order, max(i - begin, 0) + 1)
        if solver.lower_order_final and n < 15:
            order = min(order, n - i)
        prediction, output, limits = integrand(solver, ls[i], of_x0=False)
        points = [ls[i].lam - ls[i - k].lam for k in range(order)]
        weights = exponential_weights(points, ls[i].lam - ls[i + 1].lam)
        # Without limits, in X and RAW, because large terms cancel here and would not in float32.
        now = prediction if limits == Limits() else output
        slope = sum(w * m for w, m in zip(weights, (now, M1, M2)))
        x = ls[i + 1].alpha * (X + ls[i].sigma * slope) / ls[i].alpha
        rows.append(row_at(t, x, ls[i], prediction, (output, M1), limits))
    return rows


def exponential_weights(points: Sequence[float], h: float) -> list[float]:
    """Integrates e^u times each of the points' Lagrange polynomials from 0 to h."""
    growth = np.exp(h)
    integrals = np.array(
        [
            np.expm1(h),
            growth * (h - 1) + 1,
            growth * (h**2 - 2 * h + 2) - 2,
            growth * (h**3 - 3 * h**2 + 6 * h - 6) + 6,
        ]
    )
    weights = []
    for k, point in enumerate(points):
        others = [other for j, other in enumerate(points) if j != k]
        coefficients = np.polynomial.polynomial.polyfromroots(others)
        scale = np.prod([point - other for other in others])
        weights.append(coefficients @ integrals[: len(points)] / scale)
    return weights
