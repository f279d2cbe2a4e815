"""T2I-Adapters in pipelines: loaded, saved, replaced, compiled once, in running batches."""

import json
import shutil

import diffusers
import numpy as np
import pytest
from support.pairs import PROMPTS, picture
from support.tiny import (
    SMALLEST_UNET,
    SMALLEST_VAE,
    build_stable_diffusion,
    build_stable_diffusion_xl,
    randomize,
)

import diffusax
from diffusax.pipelines.pipeline import ahead
from diffusax.runtime.programs.compilations import count_compilations
from diffusax.runtime.programs.program import key, recorded_requests

SD, XL = "StableDiffusionAdapterPipeline", "StableDiffusionXLAdapterPipeline"
CALL = {"prompt": "a cat", "num_inference_steps": 3, "output_type": "np", "seed": 0}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Checkpoints whose network has one level, and two adapters for it."""
    root = tmp_path_factory.mktemp("t2i")
    build_stable_diffusion(root / "sd", unet=SMALLEST_UNET, vae=SMALLEST_VAE)
    build_stable_diffusion_xl(root / "xl", unet=SMALLEST_UNET, vae=SMALLEST_VAE)
    for seed, name in enumerate(("first", "second")):
        config = {"channels": [8], "num_res_blocks": 1, "downscale_factor": 1}
        randomize(diffusers.T2IAdapter(**config), seed).save_pretrained(root / name)
    return root


@pytest.fixture(scope="module")
def nets(folders):
    return [diffusax.T2IAdapter.from_pretrained(folders / n) for n in ("first", "second")]


def quiet(pipe):
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture(scope="module")
def pipe(folders, nets):
    both = diffusax.StableDiffusionAdapterPipeline.from_pretrained(folders / "sd", adapter=nets)
    return quiet(both)


SMALL = {"width": 8, "height": 8}
IMAGE = {"image": [picture(1), picture(2)], **SMALL, "adapter_conditioning_scale": [0.7, 0.4]}


def draw(pipe, **call):
    return pipe(**{**CALL, **IMAGE, **call}).images


@pytest.mark.slow
def test_a_saved_pipeline_is_read_by_diffusers_and_back(pipe, tmp_path):
    folder = tmp_path / "saved"
    pipe.save_pretrained(folder)
    index = json.loads((folder / "model_index.json").read_text())
    assert index["adapter"] == ["diffusers", "MultiAdapter"]
    assert "adapter_1" not in index
    assert (folder / "adapter_1/config.json").is_file()
    theirs = diffusers.StableDiffusionAdapterPipeline.from_pretrained(folder)
    assert isinstance(theirs.adapter, diffusers.MultiAdapter)
    ours = quiet(diffusax.DiffusionPipeline.from_pretrained(folder))
    assert type(ours).__name__ == SD
    assert isinstance(ours.adapter, diffusax.MultiAdapter)
    np.testing.assert_array_equal(draw(ours), draw(pipe))
    again = tmp_path / "again"
    theirs.save_pretrained(again)
    np.testing.assert_array_equal(draw(quiet(type(ours).from_pretrained(again))), draw(pipe))
    live = quiet(diffusax.DiffusionPipeline.from_torch(theirs))
    np.testing.assert_array_equal(draw(live), draw(pipe))
    shutil.rmtree(again / "adapter")
    with pytest.raises(ValueError, match="again/adapter is no folder here"):
        diffusax.DiffusionPipeline.from_pretrained(again)


def test_an_adapter_is_replaced_and_taken_to_other_pipelines(pipe, nets, folders):
    first, _ = nets
    one = quiet(diffusax.StableDiffusionAdapterPipeline.from_pipe(pipe, adapter=first))
    assert one.adapter.network == first.network
    alone = draw(one, image=picture(1), adapter_conditioning_scale=0.7)
    silent = draw(pipe, adapter_conditioning_scale=[0.7, 0.0])
    np.testing.assert_allclose(alone, silent, atol=1e-6)
    one.adapter = [first, first]
    doubled = draw(one, image=[picture(1)] * 2, adapter_conditioning_scale=None)
    one.adapter = first
    whole = draw(one, image=picture(1), adapter_conditioning_scale=1.0)
    np.testing.assert_allclose(doubled, whole, atol=1e-6)
    plain = diffusax.AutoPipelineForText2Image.from_pipe(one)
    assert type(plain) is diffusax.StableDiffusionPipeline
    assert set(plain.params) == {"vae", "text_encoder", "unet"}
    auto = diffusax.AutoPipelineForText2Image.from_pretrained(folders / "sd")
    assert type(auto) is diffusax.StableDiffusionPipeline


def test_other_pictures_scales_and_factors_compile_nothing(folders, nets):
    pipe = diffusax.StableDiffusionXLAdapterPipeline.from_pretrained(folders / "xl", adapter=nets)
    quiet(pipe)
    before = draw(pipe, negative_prompt="b")
    changes = (
        {"adapter_conditioning_scale": 0.2},
        {"adapter_conditioning_scale": [0.0, -1.5]},
        {"adapter_conditioning_factor": 0.5},
        {"adapter_conditioning_factor": 0.0},
        {"image": [picture(3), picture(4)]},
    )
    for change in changes:
        with count_compilations() as compiled:
            images = draw(pipe, negative_prompt="b", **change)
        assert compiled == [], change
        assert np.abs(images - before).max() > 1e-4, change
    pipe.adapter = nets[::-1]
    with count_compilations() as compiled:
        draw(pipe, negative_prompt="b")
    assert compiled == []


def test_the_programs_of_a_call_are_known_ahead_and_are_one_function(pipe):
    given = {**IMAGE, "num_inference_steps": 3, "prompt": "a cat"}
    with recorded_requests() as made:
        expected = draw(pipe)
    found = ahead.requests(pipe.parts, pipe.task, ahead.example_call(pipe, 1, (8, 8), given))
    assert {key(request) for request in found} == {key(request) for request in made}
    assert "embed_control" in {request.program.name for request in found}
    images = pipe.generate_fn(pipe.params, pipe.prepare_inputs(**given, seed=0))
    np.testing.assert_allclose(images, expected, atol=2e-5)


@pytest.mark.slow
def test_images_of_other_scales_join_one_running_batch(pipe):
    calls = [
        {"prompt": text, "adapter_conditioning_scale": scale, "guidance_scale": guidance, "seed": i}
        for i, (text, scale, guidance) in enumerate(
            [("a cat", [0.7, 0.4], 7.5), ("a dog", [0.0, 1.0], 1.0), ("an owl", 0.3, 3.0)]
        )
    ]
    expected = [draw(pipe, **call) for call in calls]
    with diffusax.RunningBatch(pipe) as batch:
        batch.warm(**{**CALL, **IMAGE})
        with count_compilations() as compiled:
            futures = [batch.submit(**{**CALL, **IMAGE, **call}) for call in calls]
            results = [future.result(120).images for future in futures]
        assert compiled == []
    for actual, wanted in zip(results, expected, strict=True):
        np.testing.assert_allclose(actual, wanted, atol=1e-4)


def test_each_prompt_keeps_its_own_picture(pipe, nets):
    """diffusers repeats the list of pictures as a whole."""
    one = quiet(diffusax.StableDiffusionAdapterPipeline.from_pipe(pipe, adapter=nets[0]))
    call = {"prompt": PROMPTS, "adapter_conditioning_scale": 1.0, "latents": None}
    call["latents"] = np.random.default_rng(0).normal(size=(4, 4, 8, 8)).astype(np.float32)
    together = draw(one, **call, image=[picture(1), picture(2)], num_images_per_prompt=2)
    single = {**call, "latents": call["latents"][2:3], "prompt": PROMPTS[1]}
    np.testing.assert_allclose(together[2:3], draw(one, **single, image=picture(2)), atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image": None}, "image must be given"),
        ({"image": picture(1)}, r"one entry for each of 2 T2I-Adapters \(got Image\)"),
        ({"image": [picture(1)] * 3}, r"each of 2 T2I-Adapters \(got 3 entries\)"),
        ({"image": [[picture(1)] * 2] * 2}, "2 entries for 1 prompts; give one for all"),
        ({"adapter_conditioning_scale": [1.0] * 3}, "adapter_conditioning_scale has 3 entries"),
        ({"adapter_conditioning_scale": "much"}, "adapter_conditioning_scale must be"),
    ],
)
def test_arguments_that_do_not_fit_are_named(pipe, change, message):
    with pytest.raises(ValueError, match=message):
        draw(pipe, **change)


def test_sizes_are_multiples_of_what_the_adapter_reads(folders, tmp_path):
    config = {"channels": [8], "num_res_blocks": 1, "downscale_factor": 3}
    randomize(diffusers.T2IAdapter(**config)).save_pretrained(tmp_path)
    adapter = diffusax.T2IAdapter.from_pretrained(tmp_path)
    pipe = diffusax.StableDiffusionAdapterPipeline.from_pretrained(folders / "sd", adapter=adapter)
    with pytest.raises(ValueError, match=r"height must be divisible by 3 .*\(got 8\); use 6 or 9"):
        pipe("a cat", image=picture(1), height=8)
    with pytest.raises(ValueError, match="is the T2I-Adapter made for this UNet"):
        pipe("a cat", image=picture(1), height=6, width=6)


def test_only_t2i_adapters_that_fit_each_other_are_taken(folders, nets, tmp_path):
    make = diffusax.StableDiffusionAdapterPipeline.from_pretrained
    with pytest.raises(ValueError, match=r"model_index\.json has no adapter; give adapter="):
        make(folders / "sd")
    with pytest.raises(ValueError, match="adapter is an empty list"):
        make(folders / "sd", adapter=[])
    unet = diffusax.UNet2DConditionModel.from_pretrained(folders / "sd/unet")
    with pytest.raises(ValueError, match=r"must be a T2IAdapter, .*\(got a UNet2DConditionModel\)"):
        make(folders / "sd", adapter=unet)
    randomize(diffusers.T2IAdapter(channels=[4], downscale_factor=1)).save_pretrained(tmp_path)
    other = diffusax.T2IAdapter.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="equal downscale_factor and channels"):
        make(folders / "sd", adapter=[nets[0], other])
