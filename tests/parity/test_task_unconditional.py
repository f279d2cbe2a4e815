"""Pictures from noise alone against diffusers' DDPMPipeline and DDIMPipeline."""

import dataclasses
import shutil

import diffusers
import jax
import numpy as np
import pytest
import torch
from support.effort import few
from support.pairs import Pair
from support.tiny_unconditional import SCHEDULERS, build_unconditional

import diffusax
from diffusax.runtime.programs.compilations import count_compilations


def opened(name, folder):
    """The pipelines of diffusers and of ours of a class, quiet."""
    pair = Pair(*(getattr(lib, name).from_pretrained(folder) for lib in (diffusers, diffusax)))
    for pipe in (pair.reference, pair.ours):
        pipe.set_progress_bar_config(disable=True)
    return pair


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("unconditional")
    return {name: build_unconditional(root / name, name) for name in SCHEDULERS}


@pytest.fixture(scope="module")
def ddpm(folders):
    return opened("DDPMPipeline", folders["small"])


@pytest.fixture(scope="module")
def ddim(folders):
    return opened("DDIMPipeline", folders["small"])


DDPM = [
    ("small", {"batch_size": 2}),
    ("small", {"batch_size": 2, "seed": [3, 2**40 + 1]}),
    ("small", {"num_inference_steps": 12}),
    ("small", {"num_inference_steps": 1}),
    ("large", {"batch_size": 2}),
    ("sample", {"batch_size": 2}),
    ("v", {"batch_size": 2}),
]


@pytest.mark.parametrize(("kind", "call"), few(DDPM, *DDPM[:2]))
def test_ddpm_equals_diffusers(folders, ddpm, kind, call):
    pair = ddpm if kind == "small" else opened("DDPMPipeline", folders[kind])
    pair.check(**call)


DDIM = [
    ("small", {"batch_size": 2}),
    ("small", {"eta": 0.6, "use_clipped_model_output": True}),
    ("small", {"use_clipped_model_output": True}),
    ("small", {"eta": 1.0, "batch_size": 2, "seed": [1, 2]}),
    ("small", {"use_clipped_model_output": False, "num_inference_steps": 9}),
    ("large", {"eta": 0.3, "use_clipped_model_output": True}),
    ("sample", {"use_clipped_model_output": True}),
    ("v", {"use_clipped_model_output": True, "eta": 0.2}),
]


@pytest.mark.parametrize(("kind", "call"), few(DDIM, DDIM[1]))
def test_ddim_equals_diffusers(folders, ddim, kind, call):
    pair = ddim if kind == "small" else opened("DDIMPipeline", folders[kind])
    pair.check(**call)


def test_the_clipped_noise_is_another(ddim):
    call = {"num_inference_steps": 4, "output_type": "np", "seed": 0}
    plain = ddim.ours(**call).images
    clipped = ddim.ours(**call, use_clipped_model_output=True).images
    assert np.abs(plain - clipped).max() > 0.01


def test_files_beside_model_index(folders, ddpm, tmp_path):
    """As in google/ddpm-cifar10-32."""
    shutil.copytree(folders["small"], tmp_path, dirs_exist_ok=True)
    for part in ("unet", "scheduler"):
        for file in (tmp_path / part).iterdir():
            file.rename(tmp_path / file.name)
        (tmp_path / part).rmdir()
    pair = opened("DDPMPipeline", tmp_path)
    expected, actual = pair.draw()
    np.testing.assert_allclose(actual, expected, atol=1e-4)
    np.testing.assert_array_equal(actual, ddpm.draw()[1])
    unet = diffusax.UNet2DModel.from_pretrained(tmp_path)
    assert unet.config == pair.ours.unet.config
    assert type(diffusax.DiffusionPipeline.from_pretrained(tmp_path)) is diffusax.DDPMPipeline


def test_saved_loaded_and_opened_by_pytorch(ddim, tmp_path):
    ddim.ours.save_pretrained(tmp_path)
    pair = opened("DDIMPipeline", tmp_path)
    expected, actual = pair.draw(seed=5)
    np.testing.assert_array_equal(actual, ddim.draw(seed=5)[1])
    np.testing.assert_allclose(actual, expected, atol=1e-4)
    index = (tmp_path / "model_index.json").read_text()
    assert "safety_checker" not in index
    theirs = diffusers.DDIMPipeline.from_pretrained(tmp_path).unet.state_dict()
    ours = ddim.reference.unet.state_dict()
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in ours)


def test_a_pipeline_from_torch_draws_the_same_bits(ddpm):
    pipe = diffusax.DiffusionPipeline.from_torch(ddpm.reference)
    assert type(pipe) is diffusax.DDPMPipeline
    assert pipe.parts.networks == ddpm.ours.parts.networks
    pipe.set_progress_bar_config(disable=True)
    call = {"num_inference_steps": 4, "output_type": "np", "generator": 7}
    np.testing.assert_array_equal(pipe(**call).images, ddpm.draw()[1])


def test_outputs_are_of_every_type_and_seeds_are_the_images_own(ddpm):
    call = {"num_inference_steps": 4, "seed": 3}
    two = ddpm.ours(**call, batch_size=2, output_type="np").images
    (one,) = ddpm.ours(**call, output_type="pt", return_dict=False)
    assert one.shape == (1, 3, 16, 16)
    np.testing.assert_allclose(one.permute(0, 2, 3, 1), two[:1], atol=1e-5)
    (picture,) = ddpm.ours(**call).images
    assert np.abs(np.asarray(picture) / 255 - two[0]).max() < 1 / 255
    latents = ddpm.ours(**call, output_type="latent").images
    np.testing.assert_allclose(np.clip(latents / 2 + 0.5, 0, 1), one, atol=1e-5)


def test_one_program_for_each_shape(ddim, ddpm):
    call = {"num_inference_steps": 4, "seed": 0, "batch_size": 2}
    first = ddim.ours(**call, output_type="np").images
    changes = (
        {"seed": 1},
        {"num_inference_steps": 7},
        {"eta": 0.5},
        {"use_clipped_model_output": True},
    )
    with count_compilations() as compiled:
        for change in changes:
            other = ddim.ours(**{**call, **change}, output_type="np").images
            assert np.abs(other - first).max() > 0.001
        ddpm.ours(**call)
    assert compiled == []


@pytest.mark.slow
def test_the_whole_call_is_a_pure_function(ddpm):
    call = {"num_inference_steps": 3, "seed": 4, "output_type": "np"}
    inputs = ddpm.ours.prepare_inputs(**call)
    images = jax.jit(ddpm.ours.generate_fn)(ddpm.ours.params, inputs)
    np.testing.assert_allclose(images, ddpm.ours(**call).images, atol=1e-5)


@pytest.mark.slow
def test_compiled_ahead_of_the_first_call(folders):
    pipe = diffusax.DDIMPipeline.from_pretrained(folders["small"])
    pipe.set_progress_bar_config(disable=True)
    pipe.compile(batch_sizes=[3])
    pipe(batch_size=3, num_inference_steps=2, seed=0)
    with count_compilations() as compiled:
        pipe(batch_size=3, num_inference_steps=3, seed=1)
    assert compiled == []


@pytest.mark.slow
def test_grey_pictures_and_pictures_that_are_not_square(tmp_path):
    build_unconditional(tmp_path, in_channels=1, out_channels=1, sample_size=(8, 16))
    pair = opened("DDPMPipeline", tmp_path)
    assert pair.check(batch_size=2).shape == (2, 8, 16, 1)
    (picture,) = pair.ours(num_inference_steps=2, seed=0).images
    assert (picture.mode, picture.size) == ("L", (16, 8))


def test_what_cannot_be_is_refused(ddpm, ddim):
    for call, message in (
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"seed": [1, 2], "batch_size": 3}, "seed has 2 entries for 3 images"),
        ({"num_inference_steps": 2000}, "num_train_timesteps=1000"),
    ):
        with pytest.raises(ValueError, match=message):
            ddpm.ours(**call)
    other = diffusax.DDIMPipeline(unet=ddim.ours.unet, scheduler=ddim.ours.scheduler)
    other.scheduler = diffusax.DDPMScheduler()
    with pytest.raises(ValueError, match="does not take custom use_clipped_model_output"):
        other(use_clipped_model_output=True, num_inference_steps=2)
    with pytest.raises(ValueError, match="has no autoencoder"):
        ddpm.ours.enable_vae_tiling()
    network = dataclasses.replace(
        ddpm.ours.unet.network,
        config=dataclasses.replace(ddpm.ours.unet.config, sample_size=None),
    )
    nowhere = diffusax.DDPMPipeline(
        unet=type(ddpm.ours.unet)(network, ddpm.ours.unet.params), scheduler=ddpm.ours.scheduler
    )
    with pytest.raises(ValueError, match="sample_size must be in the config of the unet"):
        nowhere(num_inference_steps=2)
