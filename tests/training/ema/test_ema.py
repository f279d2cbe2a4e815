"""Averages of parameters against float64 NumPy and against diffusers' EMAModel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers.training_utils import EMAModel

from diffusax.training.ema.posthoc import power_gamma
from diffusax.training.ema.update import (
    EMAConfig,
    copy_as_average,
    maybe_update_ema,
    share_left,
    short_window,
    update_ema,
)

STEPS = 40


def walk(seed: int = 0) -> np.ndarray:
    """Parameters of each step, a random walk; the first is the start."""
    steps = np.random.default_rng(seed).standard_normal((STEPS + 1, 3, 5))
    return np.cumsum(steps, axis=0).astype(np.float32)


def run(config: EMAConfig, values: np.ndarray, *, images: int = 1, start: int = 0) -> np.ndarray:
    """The average after each step from `start` on, as in the training step."""
    update = jax.jit(
        lambda state, params, since: maybe_update_ema(
            config, state, params, steps_since_start=since, images_per_step=images
        )
    )
    state = copy_as_average({"w": jnp.asarray(values[start])})
    averages = []
    for step in range(start + 1, len(values)):
        state = update(state, {"w": jnp.asarray(values[step])}, step - start)
        averages.append(np.asarray(state.params["w"]))
    return np.stack(averages)


RULES = {
    "constant": (EMAConfig(rule="constant", decay=0.97), lambda n: 0.97),
    "ramp": (EMAConfig(rule="ramp", decay=0.75), lambda n: min(0.75, (1 + n) / (10 + n))),
    "ramp-floor": (
        EMAConfig(rule="ramp", min_decay=0.4),
        lambda n: max(0.4, (1 + n) / (10 + n)),
    ),
    "warmup": (
        EMAConfig(rule="warmup", inv_gamma=2.0, power=0.75, decay=0.9),
        lambda n: min(0.9, 1 - (1 + n / 2) ** -0.75),
    ),
    "half_life": (
        EMAConfig(rule="half_life", half_life_images=100),
        lambda n: 0.5 ** (8 / 100),
    ),
    "power": (
        EMAConfig(rule="power", lengths=(0.1, 0.2)),
        lambda n: (1 - 1 / n) ** (power_gamma(0.1) + 1),
    ),
}


@pytest.mark.parametrize("name", RULES)
def test_an_average_follows_its_rule(name):
    config, decay = RULES[name]
    values = walk()
    expected = values[0].astype(np.float64)
    averages = run(config, values, images=8)
    for n, average in enumerate(averages, 1):
        expected = decay(n) * expected + (1 - decay(n)) * values[n]
        np.testing.assert_allclose(average, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("after", [0, 5])
@pytest.mark.parametrize("warmup", [False, True])
def test_an_average_matches_diffusers(after, warmup):
    options = {"inv_gamma": 1.5, "power": 0.75} if warmup else {}
    parameter = torch.nn.Parameter(torch.tensor(walk()[0]))
    theirs = EMAModel(
        [parameter], decay=0.8, use_ema_warmup=warmup, update_after_step=after, **options
    )
    ours = EMAConfig(
        rule="warmup" if warmup else "ramp",
        decay=0.8,
        start=after + 1,
        **options,
    )
    values = walk()
    averages = run(ours, values, start=ours.start_step(STEPS))
    for step in range(1, STEPS + 1):
        parameter.data = torch.tensor(values[step])
        theirs.step([parameter])
        if step > after + 1:
            expected = theirs.shadow_params[0].numpy()
            np.testing.assert_allclose(averages[step - after - 2], expected, rtol=1e-5, atol=1e-5)


def test_starting_late_is_starting_anew_from_there():
    config = EMAConfig(rule="warmup", start=15)
    late = run(config, walk(), start=config.start_step(STEPS))
    anew = run(EMAConfig(rule="warmup"), walk()[15:])
    np.testing.assert_array_equal(late, anew)


def test_start_is_a_step_as_a_whole_number_and_a_fraction_of_the_run_with_a_point():
    assert EMAConfig(rule="constant", start=0.9).start_step(2000) == 1800
    assert EMAConfig(rule="constant", start=1.0).start_step(2000) == 2000
    assert EMAConfig(rule="constant", start=0.999).start_step(2000) == 1998
    assert EMAConfig(rule="constant", start=1).start_step(2000) == 1
    assert EMAConfig(rule="constant", start=700).start_step(2000) == 700
    assert EMAConfig(start=0.5).start_step(2000) is None


def test_every_k_steps_averages_only_those():
    config = EMAConfig(rule="constant", decay=0.9, every=4)
    values = walk()
    expected = run(EMAConfig(rule="constant", decay=0.9), values[::4])
    np.testing.assert_allclose(run(config, values)[3::4], expected, rtol=1e-6)
    np.testing.assert_array_equal(run(config, values)[4:7], run(config, values)[[3, 3, 3]])


def test_half_life_counts_the_images_between_updates():
    config = EMAConfig(rule="half_life", half_life_images=64, every=4)
    state = copy_as_average({"w": jnp.ones(1)})
    state = maybe_update_ema(
        config, state, {"w": jnp.zeros(1)}, steps_since_start=jnp.int32(4), images_per_step=16
    )
    np.testing.assert_allclose(state.params["w"], 0.5, rtol=1e-6)


def test_a_decay_near_one_keeps_its_digits():
    config = EMAConfig(rule="constant", decay=0.99999)
    state = update_ema(
        config, copy_as_average({"w": jnp.zeros(1)}), {"w": jnp.ones(1)}, images_per_update=1
    )
    np.testing.assert_allclose(state.params["w"], 1e-5, rtol=1e-6)


def test_the_rule_power_keeps_an_average_for_each_length():
    config = EMAConfig(rule="power", lengths=(0.05, 0.1, 0.28))
    values, state = walk(), copy_as_average({"w": jnp.asarray(walk()[0])}, config.averages)
    for value in values[1:]:
        state = update_ema(config, state, {"w": jnp.asarray(value)}, images_per_update=1)
    for length, average in zip(config.lengths, state.averages, strict=True):
        exponent = power_gamma(length) + 1
        weights = np.diff(np.linspace(0, 1, STEPS + 1) ** exponent)
        expected = np.einsum("k,k...->...", weights, values[1:].astype(np.float64))
        np.testing.assert_allclose(average["w"], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("updates", [1, 7, 40])
def test_what_is_left_of_the_weights_at_the_start(name, updates):
    config, decay = RULES[name]
    expected = np.prod([decay(n) for n in range(1, updates + 1)])
    assert share_left(config, updates, 8) == pytest.approx(expected, rel=1e-5, abs=1e-20)


def test_an_average_that_begins_too_late_for_its_decay_is_told():
    late = {"start": 0.965}
    message = short_window(EMAConfig(rule="constant", **late), 10_000, 32)
    assert "350 of 10000 steps left, and 97% of the average" in message
    assert "ema.start=0.965" in message
    assert "ema.decay=0.986 leaves 1%" in message
    images = short_window(EMAConfig(rule="half_life", half_life_images=1e4, **late), 10_000, 32)
    assert "46% of the average" in images
    assert "100%" in short_window(EMAConfig(rule="ramp", min_decay=0.9999, start=9999), 10_000, 32)
    for fits in (
        EMAConfig(rule="constant", decay=0.986, **late),
        EMAConfig(rule="constant", decay=0.994, **late),
        EMAConfig(rule="ramp", **late),
        EMAConfig(rule="warmup", **late),
        EMAConfig(rule="power", **late),
        EMAConfig(rule="constant"),
        EMAConfig(),
    ):
        assert short_window(fits, 100_000 if fits.start == 0 else 10_000, 32) is None
    assert short_window(EMAConfig(rule="constant", decay=0.9942, **late), 10_000, 32) is not None


@pytest.mark.parametrize(
    "options",
    [
        {"rule": "polyak"},
        {"decay": 1.5},
        {"min_decay": 0.9, "decay": 0.5},
        {"every": 0},
        {"start": -1},
        {"start": 700.0},
        {"half_life_images": 0},
        {"lengths": (0.3,)},
        {"lengths": ()},
        {"snapshot_dtype": "bfloat16"},
    ],
)
def test_options_that_cannot_be(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        EMAConfig(**options)
