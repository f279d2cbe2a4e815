"""What a network's prediction says of the sample and of its noise, against diffusers."""

import diffusers
import jax
import numpy as np
import pytest
import torch

import diffusax

OPTIONS = {"beta_schedule": "scaled_linear", "clip_sample": False}
TIMES = np.array([3, 400, 981])


@pytest.mark.parametrize("prediction_type", ["epsilon", "v_prediction", "sample"])
def test_the_sample_is_diffusers_and_the_noise_is_what_is_left(prediction_type):
    rng = np.random.default_rng(0)
    x, raw = rng.standard_normal((2, 3, 4, 5, 6)).astype(np.float32)
    options = {**OPTIONS, "prediction_type": prediction_type}
    scheduler = diffusax.DDIMScheduler(**options)
    reference = diffusers.DDIMScheduler(**options)
    reference.set_timesteps(1000)
    wanted = [
        reference.step(torch.tensor(raw[i]), t, torch.tensor(x[i])).pred_original_sample
        for i, t in enumerate(TIMES)
    ]
    x0 = jax.jit(scheduler.get_predicted_original_sample)(raw, TIMES, x)
    np.testing.assert_allclose(x0, torch.stack(wanted), rtol=1e-4, atol=1e-5)
    noise = jax.jit(scheduler.get_predicted_noise)(raw, TIMES, x)
    np.testing.assert_allclose(scheduler.add_noise(x0, noise, TIMES), x, rtol=1e-4, atol=1e-5)

    one = scheduler.get_predicted_original_sample(raw[1:2], 400, x[1:2])
    np.testing.assert_allclose(one, x0[1:2], rtol=1e-6)
    tensors = scheduler.get_predicted_noise(torch.tensor(raw), torch.tensor(TIMES), torch.tensor(x))
    assert isinstance(tensors, torch.Tensor)
    np.testing.assert_allclose(tensors, noise, rtol=1e-6)


@pytest.mark.parametrize("name", ["get_predicted_original_sample", "get_predicted_noise"])
def test_a_prediction_has_the_samples_layout(name):
    x = np.zeros((1, 16, 16, 4), np.float32)
    with pytest.raises(ValueError, match=r"model_output must have the shape of sample, \(1, 16"):
        getattr(diffusax.DDIMScheduler(), name)(x.transpose(0, 3, 1, 2), 3, x)


def test_a_prediction_of_flow_matching_is_for_another_process():
    scheduler = diffusax.UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True
    )
    x = np.zeros((1, 2), np.float32)
    with pytest.raises(ValueError, match="prediction_type='flow_prediction' is not supported"):
        scheduler.get_predicted_noise(x, 3, x)
