"""Loops of PyTorch pipelines as one program, against the pipelines themselves."""

import diffusers
import numpy as np
import pytest
import torch
from support.effort import first
from support.torch_families import REGISTRY
from support.torch_families.check import arrays

import diffusax.torch
from diffusax.interop.torch.fused import FusedLoop

FUSED = (
    "StableDiffusionXLPipeline",
    "StableDiffusionInstructPix2PixPipeline",
    "PixArtSigmaPipeline",
    "StableDiffusion3Pipeline",
    "FluxPipeline",
)
SLOW = (
    "StableDiffusionPipeline",
    "StableDiffusionControlNetPipeline",
    "StableDiffusionImg2ImgPipeline",
    "HunyuanDiTPipeline",
    "SanaPipeline",
    "QwenImagePipeline",
)
# Their samplers draw noise, which is padded to a power of two of steps.
NOISY = ("HunyuanDiTPipeline",)


def draw(pipe, inputs, steps=4, seed=0):
    torch.manual_seed(seed)
    generator = torch.Generator("cpu").manual_seed(seed)
    drawn = arrays(pipe(**{**inputs, "num_inference_steps": steps}, generator=generator))[0]
    return drawn, generator.get_state()


def loop_of(pipe) -> FusedLoop:
    return type(pipe)._fused_loop


def check_fused(name, caplog):
    plain, inputs = REGISTRY[name]()
    expected = [draw(plain, inputs, steps, seed) for steps, seed in ((4, 0), (7, 1))]
    pipe, _ = REGISTRY[name]()
    cls = type(pipe)
    assert diffusax.torch.compile(pipe, fuse_loop=True) is pipe
    assert isinstance(pipe, cls)
    for (picture, state), (steps, seed) in zip(expected, ((4, 0), (7, 1))):
        found, after = draw(pipe, inputs, steps, seed)
        np.testing.assert_allclose(found, picture, atol=1e-3)
        assert torch.equal(after, state)
    assert "step by step" not in caplog.text
    (program,) = loop_of(pipe).programs.values()
    assert program.compiled_shapes == (2 if name in NOISY else 1)
    diffusax.torch.restore(pipe)
    assert type(pipe) is cls
    return pipe, inputs


@pytest.mark.parametrize("name", first(FUSED))
def test_fused_loops_draw_what_pytorch_does(name, caplog):
    check_fused(name, caplog)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_more_fused_loops_draw_what_pytorch_does(name, caplog):
    check_fused(name, caplog)


@pytest.fixture(scope="module")
def fused():
    """A fused SD, and its call in PyTorch."""
    pipe, inputs = REGISTRY["StableDiffusionPipeline"]()
    plain, _ = REGISTRY["StableDiffusionPipeline"]()
    return diffusax.torch.compile(pipe, fuse_loop=True), plain, inputs


@pytest.mark.slow
def test_knobs_compile_nothing(fused, caplog):
    pipe, plain, inputs = fused
    scheduler = pipe.scheduler.config
    changes = (
        {"guidance_scale": 3.0},
        {"guidance_scale": 9.5, "prompt": "a fox in the snow"},
        {"guidance_scale": 9.5, "negative_prompt": "blue"},
    )
    samplers = (
        diffusers.DDIMScheduler,
        diffusers.DPMSolverMultistepScheduler,
        diffusers.EulerAncestralDiscreteScheduler,
        diffusers.EulerDiscreteScheduler,
    )
    for sampler in samplers:
        pipe.scheduler = sampler.from_config(scheduler)
        plain.scheduler = sampler.from_config(scheduler)
        for change in changes:
            found, state = draw(pipe, {**inputs, **change})
            expected, expected_state = draw(plain, {**inputs, **change})
            np.testing.assert_allclose(found, expected, atol=1e-4)
            # The last step of an ancestral sampler draws what it multiplies by zero.
            assert torch.equal(state, expected_state) or "Ancestral" in sampler.__name__
    assert "step by step" not in caplog.text
    # Timesteps are whole numbers or not; samplers that draw noise are given some.
    assert sorted(p.compiled_shapes for p in loop_of(pipe).programs.values()) == [1, 2]


@pytest.mark.slow
def test_what_cannot_be_one_program_runs_step_by_step(fused, caplog):
    pipe, plain, inputs = fused
    for one in (pipe, plain):
        one.scheduler = diffusers.DDIMScheduler.from_config(pipe.scheduler.config)
    seen = []

    def callback(pipe, step, timestep, tensors):
        seen.append(step)
        return {}

    watched = {**inputs, "callback_on_step_end": callback}
    np.testing.assert_allclose(draw(pipe, watched)[0], draw(plain, inputs)[0], atol=1e-4)
    assert seen == [0, 1, 2, 3]
    np.testing.assert_allclose(draw(pipe, inputs, 1)[0], draw(plain, inputs, 1)[0], atol=1e-4)
    assert "runs step by step: it has fewer than two steps" in caplog.text

    class Other(diffusers.DDIMScheduler):
        """A scheduler that diffusax does not have."""

    pipe.scheduler = Other.from_config(plain.scheduler.config)
    np.testing.assert_allclose(draw(pipe, inputs)[0], draw(plain, inputs)[0], atol=1e-4)
    assert "runs step by step: scheduler 'Other' is not supported" in caplog.text


@pytest.mark.slow
def test_a_network_that_looks_at_values_runs_step_by_step(caplog):
    plain, inputs = REGISTRY["Lumina2Pipeline"]()
    expected = draw(plain, inputs)[0]
    pipe, _ = REGISTRY["Lumina2Pipeline"]()
    diffusax.torch.compile(pipe, fuse_loop=True)
    np.testing.assert_allclose(draw(pipe, inputs)[0], expected, atol=1e-3)
    assert "runs step by step: NotTraceable: transformer.forward" in caplog.text


@pytest.mark.slow
def test_latents_that_change_between_steps(caplog):
    parts = REGISTRY["StableDiffusionPipeline"]()[0].components
    pipe = diffusers.StableDiffusionInpaintPipeline(**parts, requires_safety_checker=False)
    inputs = REGISTRY["StableDiffusionInpaintPipeline"].arguments()
    expected = draw(pipe, inputs)[0]
    diffusax.torch.compile(pipe, fuse_loop=True)
    np.testing.assert_allclose(draw(pipe, inputs)[0], expected, atol=1e-4)
    assert "runs step by step: the latents are changed between its steps" in caplog.text


class Noisy(diffusers.UNet2DConditionModel):
    """A UNet with random numbers of its own."""

    def forward(self, sample, *args, **kwargs):
        """Predicts, and adds a little noise."""
        found = super().forward(sample, *args, **kwargs)[0]
        return (found + 1e-3 * torch.randn_like(found),)


def test_networks_that_draw_random_numbers(caplog):
    pipe, inputs = REGISTRY["StableDiffusionPipeline"]()
    noisy = Noisy.from_config(pipe.unet.config)
    noisy.load_state_dict(pipe.unet.state_dict())
    pipe.unet = noisy.eval()
    diffusax.torch.compile(pipe, fuse_loop=True)
    assert np.isfinite(draw(pipe, inputs)[0]).all()
    assert "random numbers are drawn in the loop" in caplog.text


def test_a_run_that_ends_early(caplog):
    pipe, inputs = REGISTRY["StableDiffusionXLPipeline"]()
    inputs |= {"denoising_end": 0.5, "output_type": "latent"}
    expected = draw(pipe, inputs, 6)[0]
    diffusax.torch.compile(pipe, fuse_loop=True)
    np.testing.assert_allclose(draw(pipe, inputs, 6)[0], expected, atol=1e-3)
    assert "step by step" not in caplog.text


def test_a_module_has_no_loop():
    with pytest.raises(ValueError, match="fuse_loop is for pipelines"):
        diffusax.torch.compile(torch.nn.Linear(2, 2), fuse_loop=True)
