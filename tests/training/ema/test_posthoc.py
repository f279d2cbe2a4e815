"""Averages made after a run, against those that would have been kept during it."""

import numpy as np
import pytest
from support.effort import first

from diffusax.training.ema.posthoc import LateAverage, PowerFunction, Stored, power_gamma, solve

STEPS = 1000


@pytest.fixture(scope="module")
def trajectory() -> np.ndarray:
    """Parameters after each update, from the first: a drift, a walk and noise."""
    rng = np.random.default_rng(0)
    drift = np.log1p(np.arange(1, STEPS + 1))[:, None] * rng.standard_normal(64)
    walk = np.cumsum(rng.standard_normal((STEPS, 64)), axis=0) / 30
    return drift + walk + rng.standard_normal((STEPS, 64))


def average(trajectory: np.ndarray, length: float, updates: int) -> np.ndarray:
    """A power-function average, update by update as in training."""
    result = np.zeros(trajectory.shape[1])
    for t in range(1, updates + 1):
        decay = (1 - 1 / t) ** (power_gamma(length) + 1)
        result = decay * result + (1 - decay) * trajectory[t - 1]
    return result


def stored(every: int, updates: int = STEPS) -> list[Stored]:
    steps = range(every, updates + 1, every)
    return [Stored(length, step) for step in steps for length in (0.05, 0.1)]


def made(trajectory: np.ndarray, every: int, wanted, updates: int = STEPS):
    """The average made of those stored, and its error."""
    snapshots = stored(every, updates)
    weights, error = solve(snapshots, wanted, updates)
    kept = np.stack([average(trajectory, s.length, s.updates) for s in snapshots])
    return weights @ kept, error


def relative(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


def dot(a: Stored, b: Stored) -> float:
    """The product of two profiles in continuous time (Karras et al. 2024, appendix C)."""
    (gamma_a, t_a), (gamma_b, t_b) = ((power_gamma(s.length), s.updates) for s in (a, b))
    ratio = t_a / t_b
    exponent = gamma_b if t_a < t_b else -gamma_a
    top = (gamma_a + 1) * (gamma_b + 1) * ratio**exponent
    return top / ((gamma_a + gamma_b + 1) * max(t_a, t_b))


@pytest.mark.parametrize(("length", "gamma"), [(0.05, 16.97), (0.1, 6.94)])
def test_gamma_is_the_published_one(length, gamma):
    assert power_gamma(length) == pytest.approx(gamma, abs=5e-3)


@pytest.mark.parametrize("updates", [STEPS, 20_000])
@pytest.mark.parametrize("length", [0.05, 0.17, 0.28])
def test_the_length_is_the_deviation_as_a_share_of_the_run(length, updates):
    edges = np.arange(updates + 1.0)
    masses = PowerFunction(length).masses(edges, updates)
    time = edges[1:] - 0.5
    mean = masses @ time
    assert masses.sum() == pytest.approx(1)
    assert np.sqrt(masses @ (time - mean) ** 2) / updates == pytest.approx(length, rel=1e-3)


@pytest.mark.parametrize("length", [0.05, 0.1])
@pytest.mark.parametrize("updates", [500, STEPS])
def test_what_was_stored_comes_back_as_it_was(trajectory, length, updates):
    found, error = made(trajectory, 100, PowerFunction(length), updates)
    assert error < 1e-9
    assert relative(found, average(trajectory, length, updates)) < 1e-9


@pytest.mark.parametrize("length", first([0.03, 0.07, 0.15, 0.25]))
def test_any_length_is_nearly_what_training_would_have_kept(trajectory, length):
    wanted = average(trajectory, length, STEPS)
    errors = [made(trajectory, every, PowerFunction(length))[1] for every in (200, 100, 50)]
    assert errors[0] > 1.5 * errors[1] > 2 * errors[2]
    assert errors[2] < 0.07
    found, _ = made(trajectory, 50, PowerFunction(length))
    assert relative(found, wanted) < 5e-3


def test_lengths_near_those_stored_need_few_snapshots():
    assert solve(stored(100), PowerFunction(0.08), STEPS).error < 0.01


def test_the_error_is_that_of_the_noise(trajectory):
    """On parameters that are independent from step to step, as the error is defined."""
    noise = np.random.default_rng(1).standard_normal((STEPS, 20_000))
    wanted = PowerFunction(0.02)
    exact = wanted.masses(np.arange(STEPS + 1.0), STEPS) @ noise
    found, error = made(noise, 100, wanted)
    assert error > 0.1
    assert relative(found, exact) == pytest.approx(error, rel=0.05)


@pytest.mark.slow
def test_late_averages_from_a_step_that_was_stored(trajectory):
    uniform, error = made(trajectory, 50, LateAverage(900))
    assert error < 0.02
    assert relative(uniform, trajectory[900:].mean(axis=0)) < 2e-3
    decaying, error = made(trajectory, 50, LateAverage(900, 0.97))
    weights = 0.97 ** np.arange(99, -1, -1)
    assert error < 0.03
    assert relative(decaying, weights @ trajectory[900:] / weights.sum()) < 4e-3
    assert made(trajectory, 100, LateAverage(950))[1] > 0.1


def test_long_runs_are_looked_at_in_pieces():
    updates = 1_000_000
    snapshots = [Stored(s.length, s.updates * 1000) for s in stored(100)]
    short, long = (
        solve(snapshots_, wanted, t)
        for snapshots_, wanted, t in (
            (stored(100), PowerFunction(0.07), STEPS),
            (snapshots, PowerFunction(0.07), updates),
        )
    )
    np.testing.assert_allclose(long.weights, short.weights, atol=0.02)
    assert long.error == pytest.approx(short.error, rel=0.1)
    assert solve(snapshots, LateAverage(900_000), updates).error < 0.06
    assert solve(snapshots, LateAverage(900_000, 0.99997), updates).error < 0.1


def test_profiles_have_the_products_of_continuous_time():
    snapshots, edges = stored(250), np.arange(STEPS + 1.0)
    profiles = [PowerFunction(s.length).masses(edges, s.updates) for s in snapshots]
    ours = np.array(profiles) @ np.array(profiles).T
    theirs = [[dot(a, b) for b in snapshots] for a in snapshots]
    np.testing.assert_allclose(ours, theirs, rtol=0.02, atol=1e-6)


def test_one_stored_average_is_all_there_is(trajectory):
    assert solve([Stored(0.05, STEPS)], PowerFunction(0.1), STEPS).weights == pytest.approx([1.0])
