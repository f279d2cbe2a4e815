"""diffusers' Flax schedulers: the samples of PyTorch's, the state in the caller's hands."""

import inspect

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers.schedulers.deprecated import KarrasVeScheduler

from diffusax.interop import flax

LEVELS = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
SHAPE = (2, 3, 4, 5)
# The options of PyTorch's class that do what Flax's did.
CASES = {
    "ddim": ("DDIMScheduler", {"clip_sample": False, "steps_offset": 1}, {}),
    "ddim, clipped": ("DDIMScheduler", {"set_alpha_to_one": False}, {}),
    "ddim, v": ("DDIMScheduler", {"prediction_type": "v_prediction"}, {}),
    "pndm": ("PNDMScheduler", {"skip_prk_steps": True, "steps_offset": 1}, {}),
    "pndm, runge-kutta": ("PNDMScheduler", {}, {}),
    "dpm": ("DPMSolverMultistepScheduler", {}, {"final_sigmas_type": "sigma_min"}),
    "dpm, third order": (
        "DPMSolverMultistepScheduler",
        {"solver_order": 3, "algorithm_type": "dpmsolver", "timestep_spacing": "trailing"},
        {"final_sigmas_type": "sigma_min"},
    ),
    "euler": ("EulerDiscreteScheduler", {}, {}),
    "euler, leading": (
        "EulerDiscreteScheduler",
        {"timestep_spacing": "leading"},
        {"steps_offset": 1},
    ),
    "lms": ("LMSDiscreteScheduler", {}, {}),
}


def predictions(n, seed=0):
    return np.random.default_rng(seed).standard_normal((n, *SHAPE)).astype(np.float32)


def pair(case):
    name, options, extra = CASES[case]
    reference = getattr(diffusers, name)(**LEVELS, **options, **extra)
    return reference, getattr(flax, f"Flax{name}")(**LEVELS, **options)


def reference_run(scheduler, steps, begin, outputs):
    scheduler.set_timesteps(steps)
    scheduler.set_begin_index(begin) if hasattr(scheduler, "set_begin_index") else None
    sample, samples = torch.tensor(outputs[-1]), []
    for i, t in enumerate(scheduler.timesteps[begin:]):
        scaled = scheduler.scale_model_input(sample, t)
        sample = scheduler.step(torch.tensor(outputs[i]) + 0.1 * scaled, t, sample).prev_sample
        samples.append(sample.numpy())
    return np.stack(samples)


def our_run(scheduler, steps, begin, outputs):
    state = scheduler.set_timesteps(scheduler.create_state(), steps, shape=SHAPE)
    sample, samples = jnp.asarray(outputs[-1]), []
    for i, t in enumerate(np.asarray(state.timesteps)[begin:]):
        scaled = scheduler.scale_model_input(state, sample, t)
        output = scheduler.step(state, outputs[i] + 0.1 * scaled, t, sample)
        sample, state = output.prev_sample, output.state
        samples.append(sample)
    return np.stack(samples)


@pytest.mark.parametrize("begin", [0, 3])
@pytest.mark.parametrize("case", CASES)
def test_steps_are_those_of_pytorch(case, begin):
    reference, ours = pair(case)
    outputs = predictions(32)
    expected = reference_run(reference, 9, begin, outputs)
    actual = our_run(ours, 9, begin, outputs)
    assert actual.shape == expected.shape
    np.testing.assert_allclose(actual, expected, rtol=2e-4, atol=2e-4 * np.abs(expected).max())


def test_ddpm_steps_are_those_of_pytorch_but_for_the_noise(monkeypatch):
    noise = torch.tensor(predictions(1, seed=5)[0])
    target = "diffusers.schedulers.scheduling_ddpm.randn_tensor"
    monkeypatch.setattr(target, lambda *args, **kwargs: noise)
    monkeypatch.setattr(jax.random, "normal", lambda *args, **kwargs: jnp.asarray(noise.numpy()))
    reference = diffusers.DDPMScheduler(**LEVELS)
    expected = reference_run(reference, 9, 0, predictions(10))
    actual = our_run(flax.FlaxDDPMScheduler(**LEVELS), 9, 0, predictions(10))
    np.testing.assert_allclose(actual, expected, atol=2e-4)


def test_ddpm_draws_by_its_key_and_needs_no_run():
    scheduler = flax.FlaxDDPMScheduler()
    state, output = scheduler.create_state(), jnp.zeros(SHAPE)
    first = scheduler.step(state, output, 500, output, jax.random.key(1), return_dict=False)[0]
    again = scheduler.step(state, output, 500, output, jax.random.key(1)).prev_sample
    other = scheduler.step(state, output, 500, output, jax.random.key(2)).prev_sample
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - other).max() > 1e-3
    deviation = np.sqrt(1 - np.linspace(0.0001, 0.02, 1000, dtype=np.float32)[500])
    assert 0.01 < np.std(first) < deviation


def test_a_run_may_be_one_compiled_loop():
    scheduler = flax.FlaxDPMSolverMultistepScheduler(**LEVELS)
    outputs = jnp.asarray(predictions(9))

    @jax.jit
    def loop(state, sample):
        state = scheduler.set_timesteps(state, num_inference_steps=8, shape=sample.shape)

        def body(i, carry):
            sample, state = carry
            t = jnp.array(state.timesteps, dtype=jnp.int32)[i]
            scaled = scheduler.scale_model_input(state, sample, t)
            output = outputs[i] + 0.1 * scaled
            return scheduler.step(state, output, t, sample).to_tuple()

        return jax.lax.fori_loop(0, 8, body, (sample, state))[0]

    drawn = loop(scheduler.create_state(), outputs[-1])
    expected = our_run(scheduler, 8, 0, predictions(9))[-1]
    np.testing.assert_allclose(drawn, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["DDIM", "DDPM", "PNDM"])
def test_noise_and_velocity_are_those_of_pytorch(name):
    reference = getattr(diffusers, f"{name}Scheduler")(**LEVELS)
    ours = getattr(flax, f"Flax{name}Scheduler")(**LEVELS)
    x, eps = predictions(2)
    t = np.array([17, 940])
    state = ours.create_state()
    tensors = (torch.tensor(x), torch.tensor(eps), torch.tensor(t))
    expected = reference.add_noise(*tensors)
    np.testing.assert_allclose(ours.add_noise(state, x, eps, t), expected, atol=1e-5)
    if name.startswith("DD"):
        expected = reference.get_velocity(*tensors)
        np.testing.assert_allclose(ours.get_velocity(state, x, eps, t), expected, atol=1e-5)


def test_sigma_samplers_add_noise_by_timestep():
    ours = flax.FlaxEulerDiscreteScheduler(**LEVELS)
    reference = diffusers.EulerDiscreteScheduler(**LEVELS)
    reference.set_timesteps(5)
    state = ours.set_timesteps(ours.create_state(), 5)
    x, eps = predictions(2)
    t = reference.timesteps[[1, 3]]
    expected = reference.add_noise(torch.tensor(x), torch.tensor(eps), t)
    actual = ours.add_noise(state, x, eps, t.numpy())
    np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(state.init_noise_sigma, reference.init_noise_sigma, rtol=1e-5)
    np.testing.assert_allclose(state.sigmas, reference.sigmas, rtol=1e-4)


def test_the_common_state_holds_the_noise_levels():
    reference, ours = pair("ddim")
    common = ours.create_state().common
    np.testing.assert_allclose(common.alphas_cumprod, reference.alphas_cumprod, rtol=1e-6)
    np.testing.assert_allclose(common.betas, reference.betas, rtol=1e-3)
    assert len(ours) == 1000
    assert ours.has_state


def test_options_go_from_one_to_another_and_to_disk(tmp_path):
    diffusers.PNDMScheduler(**LEVELS, skip_prk_steps=True).save_pretrained(tmp_path / "scheduler")
    options = {"subfolder": "scheduler", "prediction_type": "v_prediction"}
    scheduler, state = flax.FlaxDPMSolverMultistepScheduler.from_pretrained(tmp_path, **options)
    assert state.num_inference_steps is None
    assert scheduler.config.beta_end == 0.012
    assert scheduler.config["prediction_type"] == "v_prediction"
    scheduler.save_pretrained(tmp_path / "saved")
    again, _ = flax.FlaxDPMSolverMultistepScheduler.from_pretrained(tmp_path / "saved")
    assert dict(again.config) == dict(scheduler.config)
    saved = diffusers.DPMSolverMultistepScheduler.from_pretrained(tmp_path / "saved")
    assert saved.config.final_sigmas_type == "sigma_min"
    flax.FlaxKarrasVeScheduler(s_churn=3).save_pretrained(tmp_path / "karras")
    karras, _ = flax.FlaxKarrasVeScheduler.from_pretrained(tmp_path / "karras")
    assert karras.config.s_churn == 3
    other = flax.FlaxDDIMScheduler.from_config(scheduler.config, clip_sample=False)
    assert (other.config.beta_schedule, other.config.clip_sample) == ("scaled_linear", False)


def test_a_step_before_a_run_is_an_error():
    scheduler = flax.FlaxPNDMScheduler()
    with pytest.raises(ValueError, match="call set_timesteps"):
        scheduler.step(scheduler.create_state(), jnp.zeros(SHAPE), 3, jnp.zeros(SHAPE))
    with pytest.raises(ValueError, match="eta must be 0"):
        flax.FlaxDDIMScheduler().step(None, None, 0, None, eta=0.5)
    with pytest.raises(ValueError, match="order must be 4"):
        flax.FlaxLMSDiscreteScheduler().step(None, None, 0, None, order=3)


def test_karras_ve_reaches_the_sample_that_is_predicted():
    """With the exact score of one point, the sampler ends there."""
    scheduler = flax.FlaxKarrasVeScheduler()
    state = scheduler.set_timesteps(scheduler.create_state(), 12)
    target = jnp.asarray(predictions(1)[0])
    key, sample = jax.random.key(0), 100 * jax.random.normal(jax.random.key(1), SHAPE)
    for t in np.asarray(state.timesteps):
        sigma = float(state.schedule[t])
        below = float(state.schedule[t - 1]) if t else 0.0
        key, once = jax.random.split(key)
        sample, sigma = scheduler.add_noise_to_input(state, sample, sigma, once)
        step = scheduler.step(state, (target - sample) / sigma, sigma, below, sample)
        result = step.prev_sample
        if below:
            output = (target - result) / below
            result = scheduler.step_correct(
                state, output, sigma, below, sample, result, step.derivative
            ).prev_sample
        sample = result
    np.testing.assert_allclose(sample, target, atol=1e-3)


def test_karras_ve_is_that_of_pytorch_but_for_the_noise():
    reference, ours = KarrasVeScheduler(), flax.FlaxKarrasVeScheduler()
    reference.set_timesteps(12)
    state = ours.set_timesteps(ours.create_state(), 12)
    np.testing.assert_allclose(state.schedule, reference.schedule, rtol=1e-4)
    first, second, x = predictions(3)
    tensors = [torch.tensor(array) for array in (first, second, x)]
    expected = reference.step(tensors[0], 3.0, 2.0, tensors[2])
    actual = ours.step(state, first, 3.0, 2.0, x)
    np.testing.assert_allclose(actual.prev_sample, expected.prev_sample, atol=1e-5)
    given = (expected.prev_sample, expected.derivative)
    corrected = reference.step_correct(tensors[1], 3.0, 2.0, tensors[2], *given)
    ours_corrected = ours.step_correct(
        state, second, 3.0, 2.0, x, actual.prev_sample, actual.derivative
    )
    np.testing.assert_allclose(ours_corrected[0], corrected.prev_sample, atol=1e-5)


def test_score_sde_ve_is_that_of_pytorch_but_for_the_noise(monkeypatch):
    noise = torch.tensor(predictions(1, seed=5)[0])
    target = "diffusers.schedulers.scheduling_sde_ve.randn_tensor"
    monkeypatch.setattr(target, lambda *args, **kwargs: noise)
    monkeypatch.setattr(jax.random, "normal", lambda *args, **kwargs: jnp.asarray(noise.numpy()))
    reference, ours = diffusers.ScoreSdeVeScheduler(), flax.FlaxScoreSdeVeScheduler()
    reference.set_timesteps(8)
    reference.set_sigmas(8)
    state = ours.set_sigmas(ours.set_timesteps(ours.create_state(), 8), 8)
    np.testing.assert_allclose(state.discrete_sigmas, reference.discrete_sigmas, rtol=1e-4)
    score, x = predictions(2)
    t = float(reference.timesteps[3])
    expected = reference.step_pred(torch.tensor(score), torch.tensor(t), torch.tensor(x))
    key = jax.random.key(0)
    actual = ours.step_pred(state, score, t, x, key)
    np.testing.assert_allclose(actual.prev_sample, expected.prev_sample, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(
        actual.prev_sample_mean, expected.prev_sample_mean, rtol=1e-3, atol=1e-3
    )
    assert len(ours) == 2000


def test_constructors_from_tables_are_as_if_written_out():
    cls = flax.FlaxLMSDiscreteScheduler
    expected = (
        "num_train_timesteps: int = 1000, beta_start: float = 0.0001, beta_end: float = 0.02, "
        "beta_schedule: str = 'linear', trained_betas: Any = None, prediction_type: str = "
        "'epsilon', dtype: Any = <class 'jax.numpy.float32'>)"
    )
    own, bound = str(inspect.signature(cls.__init__)), str(inspect.signature(cls))
    assert own.replace("typing.", "") == f"(self, {expected}"
    assert bound.replace("typing.", "") == f"({expected}"
    assert cls(500, beta_end=0.03).config.beta_end == 0.03
    with pytest.raises(TypeError, match=r"FlaxLMSDiscreteScheduler.__init__\(\) got an unexpected"):
        cls(eta=1)
