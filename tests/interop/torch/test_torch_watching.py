"""Calls of a fused pipeline after the first: what is recorded again, and what is not."""

import diffusers
import numpy as np
import pytest
import torch
from diffusers.pipelines.stable_diffusion import pipeline_stable_diffusion
from support.torch_families import REGISTRY
from support.torch_families.check import arrays

import diffusax.torch
from diffusax.interop.torch import fused

SAMPLERS = (
    diffusers.DDIMScheduler,
    diffusers.EulerAncestralDiscreteScheduler,
    diffusers.DPMSolverMultistepScheduler,
)


class Moody(diffusers.StableDiffusionPipeline):
    """Its guidance depends on what is no argument of the call."""

    mood = 1.0
    buffer = None

    @property
    def guidance_scale(self):
        """The call's, times the mood."""
        return self._guidance_scale * self.mood

    def check_inputs(self, *args, **kwargs):
        """Forgets the last call."""
        self.buffer = None
        return super().check_inputs(*args, **kwargs)


def draw(pipe, inputs, seed=0):
    generator = torch.Generator("cpu").manual_seed(seed)
    drawn = arrays(pipe(**inputs, generator=generator))[0]
    return drawn, generator.get_state()


@pytest.fixture(scope="module")
def both():
    """A fused SD and the same in PyTorch, and the arguments of a call."""
    pipes = []
    for _ in range(2):
        parts = REGISTRY["StableDiffusionPipeline"]()[0].components
        pipes.append(Moody(**parts, requires_safety_checker=False))
        pipes[-1].set_progress_bar_config(disable=True)
    inputs = {**REGISTRY["StableDiffusionPipeline"].arguments(), "num_inference_steps": 4}
    return diffusax.torch.compile(pipes[0], fuse_loop=True), pipes[1], inputs


@pytest.fixture
def check(both, monkeypatch, caplog):
    """Compares a call with PyTorch; gives how many loops were recorded."""
    pipe, plain, inputs = both

    def compare(seed=0, sampler=None, tolerance=1e-4, **changes):
        recorded.clear()
        for one in both[:2]:
            config = plain.scheduler.config
            one.scheduler = (sampler or diffusers.DDIMScheduler).from_config(config)
        found, state = draw(pipe, {**inputs, **changes}, seed)
        expected, expected_state = draw(plain, {**inputs, **changes}, seed)
        np.testing.assert_allclose(found, expected, atol=tolerance)
        # The last step of an ancestral sampler draws what it multiplies by zero.
        if sampler is not diffusers.EulerAncestralDiscreteScheduler:
            assert torch.equal(state, expected_state)
        return len(recorded)

    class Counted(fused.Recording):
        """A recording that is counted."""

        def __init__(self):
            recorded.append(self)
            super().__init__()

    recorded = []
    monkeypatch.setattr(fused, "Recording", Counted)
    return compare


@pytest.mark.slow
def test_a_loop_is_recorded_once(check, caplog):
    check()
    assert check() == 0
    assert check(seed=5) == 0
    for sampler in SAMPLERS:
        check(sampler=sampler, seed=1)
        assert check(sampler=sampler, prompt="a fox in the snow", seed=1) == 0
        assert check(sampler=sampler, num_inference_steps=7, negative_prompt="blue") == 0
    assert check(guidance_scale=3.0) == 1
    assert check(guidance_scale=3.0, prompt="a fox", num_inference_steps=5, seed=2) == 0
    assert check(prompt="a fox") == 0
    assert check(guidance_rescale=0.5) == 1
    assert check(guidance_scale=1.0) == 1
    assert check(prompt=["a fox", "a bear"], negative_prompt=["red", ""]) == 1
    assert check(num_images_per_prompt=2) == 1
    assert check(output_type="latent") == 0
    assert "step by step" not in caplog.text


@pytest.mark.slow
def test_what_does_something_else_is_recorded_again(both, check):
    check()
    for mood in (0.5, 1.0):
        for pipe in both[:2]:
            pipe.mood = mood
        assert check() == 1
        assert check() == 0


def test_what_is_carried_between_steps_runs_step_by_step(both, check, monkeypatch, caplog):
    def smoothed(noise, text, guidance_rescale):
        pipe = both[0] if fused_now else both[1]
        before, pipe.buffer = pipe.buffer, noise
        return noise if before is None else 0.5 * (noise + before)

    fused_now = True
    monkeypatch.setattr(pipeline_stable_diffusion, "rescale_noise_cfg", smoothed)
    pipe, plain, inputs = both
    few = {**inputs, "num_inference_steps": 2, "guidance_rescale": 0.7}
    found = draw(pipe, few)[0]
    fused_now = False
    np.testing.assert_allclose(found, draw(plain, few)[0], atol=1e-4)
    assert "step by step: something is carried from one iteration to the next" in caplog.text


def test_loops_that_end_early_are_recorded_each_time(monkeypatch):
    pipe, inputs = REGISTRY["StableDiffusionXLPipeline"]()
    inputs |= {"denoising_end": 0.5, "output_type": "latent", "num_inference_steps": 6}
    expected = [draw(pipe, inputs, seed)[0] for seed in range(2)]
    diffusax.torch.compile(pipe, fuse_loop=True)
    for seed, latents in enumerate(expected):
        np.testing.assert_allclose(draw(pipe, inputs, seed)[0], latents, atol=1e-3)
    assert not type(pipe)._fused_loop.known
