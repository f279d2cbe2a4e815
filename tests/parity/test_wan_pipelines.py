"""Wan's pipelines against diffusers, live, on tiny checkpoints with random weights."""

import diffusers
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support.lora_files import pair
from support.pairs import picture
from support.tiny_transformers import (
    wan_image_components,
    wan_pipeline,
    wan_transformer,
    wan_vace_transformer,
)

import diffusax
from diffusax.runtime.programs.compilations import count_compilations
from diffusax.serving.catalogue.entries import describe_model
from diffusax.training.recipes.base_model import BaseModel
from diffusax.utils import export_to_gif, load_video

SIZE = {"height": 16, "width": 32, "num_frames": 5}
CALL = {**SIZE, "num_inference_steps": 3, "max_sequence_length": 24}
PROMPT, NEGATIVE = "a photo of a cat &amp; the red   sofa", "the quick brown foxes"


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wan")
    theirs = wan_pipeline(folder)
    ours = diffusax.DiffusionPipeline.from_pretrained(folder)
    ours.set_progress_bar_config(disable=True)
    return theirs, ours


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(
    "call",
    [
        {},
        {"guidance_scale": 1.0, "num_frames": 1},
        {"prompt": [PROMPT, NEGATIVE], "num_videos_per_prompt": 2, "num_frames": 3},
    ],
)
def test_every_frame_is_that_of_diffusers(both, call):
    theirs, ours = both
    assert isinstance(ours, diffusax.WanPipeline)
    given = {"prompt": PROMPT, "negative_prompt": NEGATIVE, **CALL, **call}
    if isinstance(given["prompt"], list):
        given["negative_prompt"] = [NEGATIVE] * 2
    expected = theirs(**given, generator=generator()).frames
    found = ours(**given, generator=generator())
    assert found.frames.shape == expected.shape
    assert found[0] is found.frames
    np.testing.assert_allclose(found.frames, expected, atol=1e-4)
    assert expected.std() > 0.05


def test_two_transformers_share_the_steps(tmp_path):
    theirs = wan_pipeline(tmp_path, transformer_2=wan_transformer(7), boundary_ratio=0.8)
    ours = diffusax.WanPipeline.from_pretrained(tmp_path)
    ours.set_progress_bar_config(disable=True)
    given = {"prompt": PROMPT, "negative_prompt": NEGATIVE, **CALL, "num_inference_steps": 4}
    given |= {"guidance_scale": 4.0, "guidance_scale_2": 2.0}
    times = ours.scheduler.schedule(4).timesteps
    assert times[0] >= 800 > times[-1]
    expected = theirs(**given, generator=generator()).frames
    found = ours(**given, generator=generator()).frames
    np.testing.assert_allclose(found, expected, atol=1e-4)
    for change in ({"guidance_scale_2": None}, {"guidance_scale": 5.0}):
        other = ours(**{**given, **change}, generator=generator()).frames
        np.testing.assert_allclose(
            other, theirs(**{**given, **change}, generator=generator()).frames, atol=1e-4
        )
        assert np.abs(other - found).max() > 1e-3
    ours.save_pretrained(tmp_path / "again")
    again = diffusers.WanPipeline.from_pretrained(tmp_path / "again")
    again.set_progress_bar_config(disable=True)
    drawn = again(**given, generator=generator()).frames
    np.testing.assert_allclose(drawn, expected, atol=1e-5)


def test_nothing_compiles_for_other_prompts_steps_and_scales(both):
    _, ours = both
    given = {"prompt": PROMPT, "negative_prompt": NEGATIVE, **CALL}
    ours(**given, seed=0)
    with count_compilations() as compiled:
        ours(
            **given | {"prompt": NEGATIVE, "num_inference_steps": 5, "guidance_scale": 3.0}, seed=1
        )
    assert compiled == []


def test_outputs_and_callbacks_have_the_forms_of_diffusers(both):
    theirs, ours = both
    given = {"prompt": PROMPT, **CALL, "guidance_scale": 1.0}
    frames = ours(**given, seed=0).frames
    videos = ours(**given, seed=0, output_type="pil").frames
    assert [len(video) for video in videos] == [5]
    np.testing.assert_allclose(np.asarray(videos[0][3]) / 255, frames[0, 3], atol=1 / 255)
    tensor = ours(**given, seed=0, output_type="pt").frames
    assert tensor.shape == (1, 5, 3, 16, 32)
    np.testing.assert_array_equal(tensor.permute(0, 1, 3, 4, 2), frames)
    seen = {}

    def called(pipe, step, timestep, tensors):
        seen.setdefault(type(pipe).__module__.split(".")[0], []).append(
            np.asarray(tensors["latents"])
        )
        return {"latents": 0.9 * tensors["latents"]}

    latents = [
        np.asarray(
            pipe(
                **given,
                generator=generator(),
                output_type="latent",
                callback_on_step_end=called,
            ).frames
        )
        for pipe in (theirs, ours)
    ]
    np.testing.assert_allclose(latents[1], latents[0], atol=1e-4)
    for one, other in zip(seen["diffusax"], seen["diffusers"], strict=True):
        assert one.shape == other.shape == (1, 4, 3, 8, 16)
        np.testing.assert_allclose(one, other, atol=1e-4)
    again = ours(**given, latents=latents[1], seed=0, output_type="latent").frames
    assert again.shape == latents[1].shape


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_frames": 4}, "num_frames must be one more than a multiple of 2 .*use 3 or 5"),
        ({"height": 18}, "height must be divisible by 4"),
        ({"guidance_scale_2": 3.0}, "guidance_scale_2 is for checkpoints with two"),
        ({"latents": np.zeros((1, 4, 2, 8, 16))}, r"videos, channels, frames, height, width"),
    ],
)
def test_arguments_that_cannot_be_are_errors(both, change, message):
    _, ours = both
    with pytest.raises(ValueError, match=message):
        ours(PROMPT, **{**CALL, **change})


def test_a_call_as_a_function_and_in_a_running_batch(both):
    _, ours = both
    given = {"prompt": PROMPT, "negative_prompt": NEGATIVE, **CALL, "seed": 0}
    expected = ours(**given).frames
    found = ours.generate_fn(ours.params, ours.prepare_inputs(**given))
    np.testing.assert_allclose(found, expected, atol=1e-5)
    with diffusax.RunningBatch(ours, lanes=4) as batch:
        other = batch.submit(**{**given, "seed": 1, "num_inference_steps": 5})
        same = batch.submit(**given).result().frames
        np.testing.assert_allclose(same, expected, atol=1e-5)
        assert np.abs(other.result().frames - expected).max() > 1e-2


def test_loras_are_those_of_diffusers(both, tmp_path):
    theirs, ours = both
    layers = dict(theirs.transformer.named_modules())
    ends = "attn1.to_q", "attn1.to_k", "attn1.to_v", "attn2.to_v"
    names = [name for name in layers if name.endswith(ends)]
    names += ["blocks.0.ffn.net.0.proj", "blocks.1.attn2.to_out.0", "condition_embedder.time_proj"]
    random = torch.Generator().manual_seed(3)
    tensors = {
        f"transformer.{name}.lora_{part}.weight": x
        for name in names
        for part, x in zip("AB", pair(layers[name].weight, 4, random))
    }
    save_file(tensors, tmp_path / "lora.safetensors")
    given = {"prompt": PROMPT, "negative_prompt": NEGATIVE, **CALL}
    plain = ours(**given, generator=generator()).frames
    for pipe in both:
        pipe.load_lora_weights(str(tmp_path / "lora.safetensors"), adapter_name="own")
    expected = theirs(**given, generator=generator()).frames
    found = ours(**given, generator=generator()).frames
    for pipe in both:
        pipe.unload_lora_weights()
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert np.abs(expected - plain).max() > 1e-2


IMAGE_TO_VIDEO = {
    "first": lambda: wan_image_components(),
    "first and last": lambda: wan_image_components(places=10),
    "two transformers": lambda: {
        "transformer": wan_transformer(4, in_channels=10),
        "transformer_2": wan_transformer(7, in_channels=10),
        "boundary_ratio": 0.8,
    },
    "times of tokens": lambda: {"expand_timesteps": True},
}


@pytest.mark.parametrize("kind", IMAGE_TO_VIDEO)
def test_videos_from_images_are_those_of_diffusers(tmp_path, kind):
    theirs = wan_pipeline(tmp_path, "WanImageToVideoPipeline", **IMAGE_TO_VIDEO[kind]())
    ours = diffusax.DiffusionPipeline.from_pretrained(tmp_path)
    assert isinstance(ours, diffusax.WanImageToVideoPipeline)
    ours.set_progress_bar_config(disable=True)
    image, last = (picture(seed, 48, 24) for seed in (0, 1))
    given = {"prompt": PROMPT, "negative_prompt": NEGATIVE, **CALL, "image": image}
    # diffusers takes all but the last 512 tokens of what is attended to for an image's.
    given["max_sequence_length"] = 512
    if kind == "first and last":
        given["last_image"] = last
    expected = theirs(**given, generator=generator()).frames
    found = ours(**given, generator=generator()).frames
    np.testing.assert_allclose(found, expected, atol=1e-4)
    other = ours(**{**given, "image": last}, generator=generator()).frames
    assert np.abs(other - found).max() > 1e-2
    with count_compilations() as compiled:
        ours(**{**given, "image": last, "num_inference_steps": 5}, generator=generator())
    assert compiled == []


@pytest.mark.parametrize("strength", [1.0, 0.5])
def test_videos_from_videos_are_those_of_diffusers(both, tmp_path, strength):
    parts = {k: v for k, v in both[0].components.items() if k != "transformer_2"}
    theirs = diffusers.WanVideoToVideoPipeline(**parts)
    theirs.set_progress_bar_config(disable=True)
    ours = diffusax.WanVideoToVideoPipeline.from_pipe(both[1])
    video = [picture(seed, 48, 24) for seed in range(5)]
    size = {"height": 16, "width": 32, "num_inference_steps": 5, "max_sequence_length": 24}
    given = {"prompt": PROMPT, "negative_prompt": NEGATIVE, "strength": strength, **size}
    expected = theirs(video=video, **given, generator=generator()).frames
    found = ours(video=video, **given, generator=generator()).frames
    np.testing.assert_allclose(found, expected, atol=1e-4)
    # As an array, and several.
    array = np.stack([np.asarray(frame.resize((32, 16))) for frame in video]) / 255
    same = ours(video=array, **given, seed=0).frames
    several = {**given, "prompt": [PROMPT] * 2, "negative_prompt": [NEGATIVE] * 2}
    two = ours(video=np.stack([array, array[::-1]]), **several, seed=[0, 1]).frames
    np.testing.assert_allclose(two[:1], same, atol=1e-5)
    assert np.abs(two[1] - two[0]).max() > 1e-2
    with pytest.raises(ValueError, match=r"number of frames of video must be .*got 4"):
        ours(video=video[:4], **given)
    export_to_gif(video, tmp_path / "clip.gif", fps=20)
    frames, fps = load_video(tmp_path / "clip.gif", return_fps=True)
    assert ([frame.size for frame in frames], fps) == ([(48, 24)] * 5, 20)


CONTROL = {
    "nothing": {},
    "video": {"video": True},
    "mask": {"video": True, "mask": True, "conditioning_scale": [0.6, 1.4]},
    "images": {"reference_images": [(48, 24), (18, 20)], "conditioning_scale": 0.5},
    "all": {"video": True, "mask": True, "reference_images": [(15, 40)]},
}


@pytest.fixture(scope="module")
def vace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vace")
    theirs = wan_pipeline(folder, "WanVACEPipeline", transformer=wan_vace_transformer())
    ours = diffusax.DiffusionPipeline.from_pretrained(folder)
    ours.set_progress_bar_config(disable=True)
    return theirs, ours


def shown(video=False, mask=False, reference_images=(), **rest):
    """Arguments of a call of VACE: frames, masks with soft edges, images of these sizes."""
    frames = [picture(seed, 32, 16) for seed in range(5)]
    given = dict(rest)
    if video:
        given["video"] = frames
    if mask:
        given["mask"] = [frame.convert("L") for frame in reversed(frames)]
    if reference_images:
        sizes = enumerate(reference_images)
        given["reference_images"] = [picture(10 + i, *size) for i, size in sizes]
    return given


@pytest.mark.parametrize("kind", CONTROL)
def test_controlled_videos_are_those_of_diffusers(vace, kind):
    theirs, ours = vace
    assert isinstance(ours, diffusax.WanVACEPipeline)
    given = {"prompt": PROMPT, "negative_prompt": NEGATIVE, **CALL, **shown(**CONTROL[kind])}
    expected = theirs(**given, generator=generator()).frames
    found = ours(**given, generator=generator()).frames
    assert found.shape == expected.shape == (1, 5, 16, 32, 3)
    np.testing.assert_allclose(found, expected, atol=1e-4)
    changed = {**given, "conditioning_scale": [1.1, 0.2]}
    with count_compilations() as compiled:
        other = ours(**changed, generator=generator()).frames
    assert compiled == []
    assert np.abs(other - found).max() > 1e-2
    latents = [
        np.asarray(pipe(**given, generator=generator(), output_type="latent").frames)
        for pipe in vace
    ]
    np.testing.assert_allclose(latents[1], latents[0], atol=2e-4)


def test_controlled_videos_come_by_all_ways(vace, both):
    _, ours = vace
    given = {"prompt": PROMPT, "negative_prompt": NEGATIVE, **CALL, **shown(**CONTROL["all"])}
    expected = ours(**given, seed=0).frames
    # The video tells the number of frames; nested lists and arrays are taken as well.
    del given["num_frames"]
    other = {**given, "video": np.stack([np.asarray(x) for x in given["video"]]) / 255}
    other["reference_images"] = [given["reference_images"]]
    np.testing.assert_allclose(ours(**other, seed=0).frames, expected, atol=1e-5)
    two = ours(**{**given, "prompt": [PROMPT] * 2, "negative_prompt": [NEGATIVE] * 2}, seed=[0, 1])
    np.testing.assert_allclose(two.frames[:1], expected, atol=1e-5)
    found = ours.generate_fn(ours.params, ours.prepare_inputs(**given, seed=0))
    np.testing.assert_allclose(found, expected, atol=1e-5)
    with diffusax.RunningBatch(ours, lanes=4) as batch:
        jobs = batch.submit(**given, seed=0), batch.submit(**given, seed=1)
        np.testing.assert_allclose(jobs[0].result().frames, expected, atol=1e-5)
        np.testing.assert_allclose(jobs[1].result().frames, two.frames[1:], atol=1e-5)
    for change, message in (
        ({"num_frames": 3}, "num_frames must be that of video, 5"),
        ({"video": None}, "mask must be with a video"),
        ({"mask": given["mask"][:3]}, "must have the 5 frames of video .got 3"),
        ({"conditioning_scale": [1.0, 2.0, 3.0]}, "conditioning_scale has 3 entries for 2 layers"),
        ({"video": given["video"][:4], "mask": None}, "number of frames of video must be one more"),
    ):
        with pytest.raises(ValueError, match=message):
            ours(**{**given, **change})
    with pytest.raises(ValueError, match="needs a WanVACETransformer3DModel"):
        diffusax.WanVACEPipeline.from_pipe(both[1])(**given)


def test_videos_are_encoded_and_decoded_in_tiles_as_by_diffusers(tmp_path):
    parts = wan_pipeline(tmp_path, transformer=wan_transformer(rope_max_seq_len=128)).components
    theirs = diffusers.WanVideoToVideoPipeline(
        **{name: part for name, part in parts.items() if name != "transformer_2"}
    )
    theirs.set_progress_bar_config(disable=True)
    ours = diffusax.WanVideoToVideoPipeline.from_pretrained(tmp_path)
    ours.set_progress_bar_config(disable=True)
    # Of 144 latents a side at most 128 are one tile.
    given = {"prompt": PROMPT, "negative_prompt": NEGATIVE, "height": 16, "width": 288}
    given |= {"video": [picture(seed, 288, 16) for seed in range(3)], "max_sequence_length": 24}
    given |= {"num_inference_steps": 4, "strength": 0.3, "output_type": "np"}
    whole = ours(**given, generator=generator()).frames
    for pipe in (theirs, ours):
        pipe.vae.enable_tiling()
    expected = theirs(**given, generator=generator()).frames
    found = ours(**given, generator=generator()).frames
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert np.abs(found - whole).max() > 1e-3


def test_what_is_for_images_refuses_videos(both, tmp_path):
    theirs, ours = both
    theirs.save_pretrained(tmp_path)
    # One class has no num_frames among its arguments.
    of_videos = diffusax.WanVideoToVideoPipeline.from_pipe(ours)
    of_videos.save_pretrained(tmp_path / "video to video")
    for folder in (tmp_path, tmp_path / "video to video"):
        entry = describe_model(folder, "wan", "Wan").entry
        assert (entry.kind, entry.num_frames, entry.fps) == ("text-to-video", 81, 16)
    with pytest.raises(ValueError, match="is Wan, of videos"):
        BaseModel.open(str(tmp_path))


def test_a_transformer_for_both_is_opened_for_images(tmp_path):
    wan_pipeline(tmp_path, expand_timesteps=True)
    texts = diffusax.WanPipeline.from_pretrained(tmp_path)
    given = {"image": picture(0, 32, 16), "prompt": PROMPT, **CALL, "guidance_scale": 1.0}
    found = [
        pipe(**given, seed=0).frames
        for pipe in (
            diffusax.WanImageToVideoPipeline.from_pretrained(tmp_path),
            diffusax.WanImageToVideoPipeline.from_pipe(texts),
        )
    ]
    np.testing.assert_array_equal(*found)
    wan_pipeline(tmp_path / "images", "WanImageToVideoPipeline", **wan_image_components())
    with pytest.raises(ValueError, match=r"WanPipeline is for Wan; .* Wan image to video"):
        diffusax.WanPipeline.from_pretrained(tmp_path / "images")
