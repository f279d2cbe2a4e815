"""Samplers made of functions: the same runs as diffusax's classes, which are tested elsewhere."""

import functools
import math
import operator

import jax.numpy as jnp
import numpy as np
import pytest
from support.effort import first
from support.hooks import defined

import diffusax
from diffusax.samplers import Row, scheduler_from_function, scheduler_from_name
from diffusax.samplers.rows import M1, M2, NOISE, RAW, P, X

(dpm_2m,) = defined("dpm_2m")


def euler(steps):
    """Euler's step along the predicted noise, for any levels."""
    rows = []
    for i, ((signal, noise), (signal_after, noise_after)) in enumerate(
        zip(steps.levels, steps.levels[1:])
    ):
        epsilon = (X - signal * P) / noise
        rows.append(steps.row(i, signal_after * P + noise_after * epsilon))
    return rows


def heun(steps):
    """Heun's steps in sigma, all but the last."""
    rows, levels = [], steps.levels
    for i in range(len(steps)):
        sigma, after = levels[i, 1], levels[i + 1, 1]
        d = (X - P) / sigma
        rows.append(steps.row(i, X + (after - sigma) * d, [X, d]))
        if after > 0:
            rows.append(steps.row(i + 1, M1 + (after - sigma) * ((X - P) / after + M2) / 2))
    return rows


def simulate(schedule):
    """What the rows make of numbers, with a network that is a function of time."""
    rng = np.random.default_rng(0)
    table, noises = schedule.table(), rng.standard_normal((len(schedule), 5))
    state = np.zeros((6, 5))
    state[0] = schedule.init_noise_sigma * rng.standard_normal(5)
    for i in range(len(schedule)):
        x = table.in_scale[i] * state[0]
        raw = np.tanh(x) + 1e-3 * table.timestep[i]
        p = table.prediction[i] @ [state[0], raw]
        p = p.clip(-table.clip[i], table.clip[i])
        state = table.update[i] @ [*state, raw, p, noises[i]]
    return state[0]


def same_runs(ours, expected, **run):
    found, reference = ours.schedule(**run), expected.schedule(**run)
    np.testing.assert_array_equal(found.timesteps, reference.timesteps)
    np.testing.assert_allclose(found.levels, reference.levels)
    np.testing.assert_allclose(simulate(found), simulate(reference), rtol=1e-4, atol=1e-4)
    return found


EULERS = {
    "euler": {},
    "euler_karras": {},
    "ddim": {"clip_sample": False},
    "flow_euler": {"shift": 3.0},
    "edm_euler": {},
}


@pytest.mark.parametrize("prediction", first(["epsilon", "v_prediction"]))
@pytest.mark.parametrize("name", EULERS)
def test_one_function_is_euler_at_the_levels_of_any_sampler(name, prediction):
    kind = {} if name == "flow_euler" else {"prediction_type": prediction}
    like = scheduler_from_name(name).with_options(**EULERS[name], **kind)
    ours = scheduler_from_function(euler, like=like)
    assert ours.process == like.process
    same_runs(ours, like, steps=7)
    same_runs(ours, like, steps=7, begin=3)
    same_runs(ours, like, steps=7, end=5)


@pytest.mark.parametrize("begin", [0, 4])
def test_the_pages_solver_is_dpm_solver_2m(begin):
    like = scheduler_from_name("dpm++2m")
    same_runs(scheduler_from_function(dpm_2m, like=like), like, steps=9, begin=begin)


@pytest.mark.parametrize("name", EULERS)
def test_a_function_is_stepped_by_hand_like_its_model(name):
    like = scheduler_from_name(name).with_options(**EULERS[name])
    x, noise = np.random.default_rng(1).standard_normal((2, 2, 4, 3)).astype(np.float32)
    ends = []
    for scheduler in (like, scheduler_from_function(euler, like=like)):
        untimed = scheduler.timesteps
        scheduler.set_timesteps(4)
        y = x * scheduler.init_noise_sigma
        for t in scheduler.timesteps:
            raw = np.tanh(scheduler.scale_model_input(y, t)) + 1e-3 * t
            y = scheduler.step(raw, t, y).prev_sample
        noisy = scheduler.add_noise(x, noise, scheduler.timesteps[2:3])
        ends.append((untimed, scheduler.timesteps, y, noisy))
    for ours, expected in zip(*ends, strict=True):
        assert ours.dtype == expected.dtype
        np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-5)


def test_two_rows_in_a_step():
    like = scheduler_from_name("heun")
    ours = scheduler_from_function(heun, like=like, order=2)
    same_runs(ours, like, steps=6)
    same_runs(ours, like, steps=6, begin=4)
    with pytest.raises(ValueError, match="begin must be a multiple of 2"):
        ours.schedule(6, begin=3)


def test_custom_levels_and_mu_are_those_of_like():
    sigmas = [9.0, 4.0, 1.0, 0.0]
    same_runs(
        scheduler_from_function(euler, like=scheduler_from_name("euler")),
        scheduler_from_name("euler"),
        sigmas=sigmas,
    )
    like = diffusax.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    ours = scheduler_from_function(euler, like=like)
    same_runs(ours, like, steps=4, mu=0.7)
    assert ours.dynamic_mu(1024) == like.dynamic_mu(1024)
    with pytest.raises(ValueError, match="mu must be given to a euler"):
        ours.schedule(4)


def test_pndm_lends_the_levels_of_ddim():
    like = diffusax.PNDMScheduler(skip_prk_steps=True, steps_offset=1)
    ours = scheduler_from_function(euler, like=like)
    assert list(ours.schedule(5).timesteps) == [801, 601, 401, 201, 1]


def test_noise_and_a_number_of_ones_own():
    def ancestral(steps, strength):
        rows = euler(steps)[:-1]
        rows = [steps.row(i, row.x + strength * NOISE) for i, row in enumerate(rows)]
        return [*rows, euler(steps)[-1]]

    half = functools.partial(ancestral, strength=0.5)
    ours = scheduler_from_function(half, like=scheduler_from_name("ddim"))
    assert list(ours.schedule(3).draws_noise) == [True, True, False]
    assert ours.class_name == "ancestral"
    assert ours.schedule(3) is ours.schedule(3)


LINEAR = {
    "numpy's": lambda: np.add(np.multiply(2, X), np.negative(np.divide(P, np.float32(4)))),
    "a sum of a list": lambda: np.sum([2 * X, -0.25 * P]),
    "Python's sum": lambda: sum([2 * X, P * -0.25]),
    "weights of NumPy": lambda: sum(w * m for w, m in zip(np.array([2, -0.25]), (X, P))),
    "a weight of JAX": lambda: jnp.float32(2) * X - P * jnp.float32(0.25),
    "arrays of coefficients": lambda: 2 * X.coefficients - 0.25 * P,
    "a product of arrays": lambda: np.array([2, -0.25]) @ np.array([X, P], object),
    "in place": lambda: operator.iadd(2 * X, -P / 4),
    "from zeros": lambda: np.zeros_like(P) + (X - P / 8) * 2,
}


@pytest.mark.parametrize("name", LINEAR)
def test_sums_of_terms_are_what_they_say(name):
    row = Row(5, LINEAR[name](), (1.0, 0.5))
    np.testing.assert_allclose(row.x, [2, 0, 0, 0, 0, 0, 0, -0.25, 0])
    assert repr(X) == "1 X"
    assert repr(P) == "1 P"


OTHERS = {
    "tanh": lambda: np.tanh(P),
    "clip": lambda: np.clip(P, -1, 1),
    "P.clip": lambda: P.clip(-1, 1),
    "where": lambda: np.where(P > 0, P, X),
    "where of numbers": lambda: np.where(True, P, X),
    "maximum": lambda: np.maximum(P, 0),
    "sqrt of a list": lambda: np.sqrt([P, X])[0],
    "tanh of an array": lambda: np.tanh(np.asarray(P)),
    "norm": lambda: P / np.linalg.norm(P),
    "a mean": lambda: X - np.mean(P),
    "jnp.tanh": lambda: jnp.tanh(P),
    "jnp.clip": lambda: jnp.clip(P, -1, 1),
    "jnp.where": lambda: jnp.where(True, P, X),
    "math": lambda: math.exp(P) * X,
    "float": lambda: float(P) * X,
    "float64": lambda: np.float64(P) * X,
    "an array of numbers": lambda: np.array(P, float),
    "abs": lambda: abs(P),
    "bool": lambda: P if P else X,
    "comparison": lambda: P * (P > 0),
    "equality": lambda: P * (P == X),
    "power": lambda: P**2,
    "root": lambda: P**0.5,
    "product": lambda: P * P,
    "ratio": lambda: P / X,
    "inverse": lambda: 1 / P,
    "numpy's inverse": lambda: np.divide(1, P),
    "numpy's product": lambda: np.multiply(P, X),
    "remainder": lambda: P % 1,
    "whole division": lambda: P // 1,
    "a constant": lambda: P + 1,
    "numpy's constant": lambda: np.add(P, 1.0),
    "matrix product": lambda: P @ X,
    "maximum method": lambda: P / P.max(),
    "index": lambda: P[0] * X,
    "an index set": lambda: operator.setitem(P, 0, 1),
    "length": lambda: X / len(P),
    "iteration": lambda: sum(P) * X,
    "rounding": lambda: round(P),
    "max": lambda: max(P, X),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_sum_of_terms_is_an_error_and_no_other_run(name):
    like = scheduler_from_name("ddim")
    ours = scheduler_from_function(lambda steps: [steps.row(0, OTHERS[name]())], like=like)
    with pytest.raises((ValueError, AttributeError), match=r"sums of X, M1|takes a function of te"):
        ours.schedule(1)


def test_terms_stay_as_they_are():
    total = X
    total += P
    assert (X.coefficients.sum(), total.coefficients.sum()) == (1, 2)


def test_what_a_file_and_another_sampler_get_of_it():
    like = diffusax.DDIMScheduler(beta_end=0.012, prediction_type="v_prediction", steps_offset=1)
    ours = scheduler_from_function(euler, like=like)
    assert ours.to_config() == like.to_config()
    assert ours.config["_function"].endswith("test_function_scheduler.euler")
    other = diffusax.UniPCMultistepScheduler.from_config(ours.config)
    assert other == diffusax.UniPCMultistepScheduler.from_config(like.config)
    assert ours == scheduler_from_function(euler, like=like)
    assert ours != scheduler_from_function(dpm_2m, like=like)
    assert ours.with_options(steps_offset=0).like.steps_offset == 0
    assert ours.steps_offset == 1
    np.testing.assert_array_equal(ours.alphas_cumprod, like.alphas_cumprod)


def test_what_is_no_run_is_told():
    like = scheduler_from_name("ddim")

    def make(rows, order=1):
        return scheduler_from_function(lambda steps: rows, like=like, order=order).schedule(2)

    row = Row(5, X, (1.0, 0.5))
    with pytest.raises(ValueError, match=r"<lambda> must return 2 rows .* \(got 3\)"):
        make([row] * 3)
    with pytest.raises(ValueError, match=r"must return Rows \(got tuple\)"):
        make([row, (5, X)])
    with pytest.raises(ValueError, match="at most 5 of memory"):
        make([row, Row(5, X, (1.0, 0.5), memory=(X,) * 6)])
    with pytest.raises(ValueError, match="sums of X, M1"):
        make([row, Row(5, 0.5, (1.0, 0.5))])
    with pytest.raises(ValueError, match="prediction of X and RAW alone"):
        make([row, Row(5, X, (1.0, 0.5), prediction=RAW + M1)])
    with pytest.raises(ValueError, match="function must be a hashable function"):
        scheduler_from_function([row], like=like)
    with pytest.raises(ValueError, match=r"like must be a scheduler, .* \(got str\)"):
        scheduler_from_function(euler, like="ddim")
    with pytest.raises(ValueError, match=r"order must be .* \(got 0\)"):
        scheduler_from_function(euler, like=like, order=0)
    with pytest.raises(ValueError, match="a config holds no function"):
        scheduler_from_function(euler, like=like).from_config({})
