"""The recipe of videos: runs that go on, their results in PyTorch, caches, validation, refusals."""

import dataclasses
import json
import signal
import subprocess
import sys
import time

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.numpy import load_file
from support.effort import few
from support.many_devices import run_on_devices
from support.runs import RUNS
from support.tiny_transformers import wan_pipeline, wan_vace_transformer
from support.video_training import options, pipeline, write_clips

import diffusax
from diffusax.cli.train import read_recipe
from diffusax.models.parameter_tree import ordered_leaves
from diffusax.models.quantized import Quantized
from diffusax.pipelines.tasks import tasks
from diffusax.training import (
    CacheConfig,
    CacheDataConfig,
    EMAConfig,
    LoRAConfig,
    OptimizerConfig,
    TextToVideoConfig,
    VideoValidationConfig,
    cache_latents,
    text_to_image,
    text_to_video,
    train,
)
from diffusax.training.data.examples import GIVEN, SEEN

KIND = "text-to-video"
LORA = "pytorch_lora_weights.safetensors"
CALL = {
    "height": 16,
    "width": 32,
    "num_frames": 5,
    "num_inference_steps": 3,
    "guidance_scale": 3.0,
    "max_sequence_length": 512,
}
SHOWN = {"every": 2, "prompts": ("a cat", "a dog"), "steps": 2, "height": 16, "width": 32}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Makes a tiny checkpoint of each kind once."""
    made = {}

    def model(kind):
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind)
            made[kind] = pipeline(folder, kind), folder
        return made[kind]

    return model


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    return write_clips(tmp_path_factory.mktemp("clips"))


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """Clips and an image."""
    folder = write_clips(tmp_path_factory.mktemp("mixed"), 4)
    Image.new("RGB", (40, 24), (9, 99, 199)).save(folder / "4.png")
    (folder / "4.txt").write_text("an image")
    return folder


def run(model, clips, output, steps, **changes):
    own = {"lora": LoRAConfig(rank=2, alpha=3.0), "optimizer": OptimizerConfig(learning_rate=0.1)}
    data = {"frame_extraction": "random", "random_flip": True}
    given = {"output": str(output), "steps": steps, "data": data, **own, **changes}
    config = options(model, clips, **given)
    train(text_to_video(config), config)
    return output / "model"


def drawn_like(shapes):
    """Random parameters of adapters."""
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: np.float32(rng.normal(size=x.shape, scale=0.3)), shapes)


def drawn(pipe, **changes):
    """What PyTorch's pipeline, or ours, draws for a prompt."""
    pipe.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(0)
    return np.asarray(pipe(prompt="a cat", generator=generator, **{**CALL, **changes}).frames)


def test_a_run_goes_on_in_the_same_bits(models, clips, tmp_path):
    _, model = models(KIND)
    ema = EMAConfig(rule="constant", decay=0.5)
    whole = run(model, clips, tmp_path / "whole", 4, ema=ema)
    run(model, clips, tmp_path / "part", 2, ema=ema)
    (tmp_path / "part" / "model").rename(tmp_path / "before")
    parted = run(model, clips, tmp_path / "part", 4, ema=ema)
    for name in ("model", "model_ema"):
        first, second = (load_file(f.parent / name / LORA) for f in (whole, parted))
        assert first.keys() == second.keys()
        for key, value in first.items():
            np.testing.assert_array_equal(value, second[key])
    before = load_file(tmp_path / "before" / LORA)
    assert any((value != first[key]).any() for key, value in before.items())
    card = (whole / "README.md").read_text("utf-8")
    assert "pipeline_tag: text-to-video" in card
    assert 'export_to_video(pipe("a prompt").frames[0], "video.mp4", fps=20)' in card


def test_pytorch_draws_with_the_adapters(models, clips, tmp_path):
    theirs, model = models(KIND)
    recipe = text_to_video(options(model, clips, lora=LoRAConfig(rank=2, alpha=3.0)))
    recipe.save(drawn_like(recipe.shapes()), tmp_path)
    plain = drawn(theirs)
    theirs.load_lora_weights(tmp_path)
    expected = drawn(theirs)
    theirs.unload_lora_weights()
    assert np.abs(expected - plain).max() > 0.01
    ours = diffusax.DiffusionPipeline.from_pretrained(model)
    ours.load_lora_weights(tmp_path)
    np.testing.assert_allclose(drawn(ours), expected, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("expert", ["high_noise", "low_noise"])
def test_adapters_of_either_expert_are_loaded_in_pytorch(models, clips, tmp_path, expert):
    theirs, model = models(expert)
    validation = VideoValidationConfig(**SHOWN, format="gif")
    whole = run(model, clips, tmp_path, 2, expert=expert, validation=validation)
    second = expert == "low_noise"
    theirs.load_lora_weights(whole, load_into_transformer_2=second)
    adapted = theirs.transformer_2 if second else theirs.transformer
    other = theirs.transformer if second else theirs.transformer_2
    assert hasattr(adapted, "peft_config")
    assert not hasattr(other, "peft_config")
    noise = np.random.default_rng(0).standard_normal((1, 4, 3, 8, 16), np.float32)
    expected = drawn(theirs, latents=torch.tensor(noise))
    theirs.unload_lora_weights()
    # What the validation draws has the adapters in the same transformer.
    changes = {"expert": expert, "validation": validation}
    lora = LoRAConfig(path=str(whole))
    config = options(model, clips, lora=lora, **changes)
    recipe = text_to_video(config)
    call = {**CALL, "prompt": ["a cat"], "latents": noise, "output_type": "np"}
    found = recipe.draw(recipe.trained(), recipe.frozen(), tasks.text_to_image, **call)
    np.testing.assert_allclose(found, expected, atol=1e-4)
    ours = diffusax.DiffusionPipeline.from_pretrained(model)
    ours.load_lora_weights(whole, load_into_transformer_2=second)
    np.testing.assert_allclose(drawn(ours, latents=noise), expected, atol=1e-4)


@pytest.mark.parametrize("kind", ["comfyui", "kohya"])
def test_adapters_have_the_names_of_the_original_code_for_comfyui(models, clips, tmp_path, kind):
    theirs, model = models("low_noise")
    # musubi-tuner's files have all layers of a block, without which diffusers reads none.
    targets = (*("to_q", "to_k", "to_v", "to_out.0"), "ffn.net.0.proj", "ffn.net.2")
    lora = LoRAConfig(rank=2, alpha=3.0, targets=targets)
    plain = options(model, clips, expert="low_noise", lora=lora)
    trained = drawn_like(text_to_video(plain).shapes())
    files = {}
    for form in ("diffusers", kind):
        config = dataclasses.replace(plain, lora=dataclasses.replace(lora, format=form))
        text_to_video(config).save(trained, tmp_path / form)
        (files[form],) = (tmp_path / form).glob("*.safetensors")
    keys = load_file(files[kind])
    start = {"comfyui": "diffusion_model.blocks.0.self_attn.q.", "kohya": "lora_unet_blocks_0_"}
    assert any(key.startswith(start[kind]) for key in keys)
    frames = []
    for file in files.values():
        theirs.load_lora_weights(str(file), load_into_transformer_2=True)
        frames.append(drawn(theirs))
        theirs.unload_lora_weights()
    np.testing.assert_allclose(frames[1], frames[0], atol=1e-5)
    assert np.abs(frames[0] - drawn(theirs)).max() > 0.01
    further = options(model, clips, expert="low_noise", lora=LoRAConfig(path=str(files[kind])))
    recipe = text_to_video(further)
    again, plans = recipe.trained()["transformer_2"], recipe.lora.plans["transformer_2"]
    for path, own in trained["transformer_2"].items():
        product = own["down"] @ own["up"] * 1.5
        found = again[path]["down"] @ again[path]["up"] * plans[path].scale
        np.testing.assert_allclose(found, product, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("expert", ["high_noise", "low_noise"])
def test_an_expert_is_trained_at_its_noise_levels_alone(models, clips, expert):
    _, model = models(expert)
    recipe = text_to_video(options(model, clips, expert=expert, lora=LoRAConfig(rank=2)))
    batch = {"pixel_values": np.zeros((1, 5, 16, 32, 3), np.uint8)}
    keys = jax.vmap(jax.random.key)(jnp.arange(2000))
    times = np.asarray(recipe.denoising.draw(batch, keys).timesteps)
    # boundary_ratio is 0.7.
    assert (times.min() >= 0.7) == (expert == "high_noise")
    assert (times.max() <= 0.7) == (expert == "low_noise")
    assert np.ptp(times) > 0.25
    assert set(recipe.shapes()) == {"transformer" if expert == "high_noise" else "transformer_2"}
    # The other transformer is not in memory.
    assert set(recipe.frozen_shapes()) == {*recipe.shapes(), "vae", "text_encoder", "empty"}


@pytest.mark.parametrize("kind", few([KIND, "image-to-video"], "image-to-video"))
def test_a_cache_has_the_losses_of_the_clips(models, mixed, tmp_path, kind):
    _, model = models(kind)
    data = CacheDataConfig(str(mixed), num_frames=(5,), fps=20.0, buckets=("32x16",))
    data = dataclasses.replace(data, num_frames=(1, 5), center_crop=True)
    given = {"recipe": "text-to-video", "model": str(model), "output": str(tmp_path / "cache")}
    assert cache_latents(CacheConfig(**given, data=data, text_embeddings=True, batch_size=2)) == 5
    changes = {"lora": LoRAConfig(rank=2), "caption_dropout": 0.5}
    own = {"num_frames": (1, 5), "center_crop": True}
    plain = text_to_video(options(model, mixed, data=own, **changes))
    config = options(model, mixed, **changes)
    cached = dataclasses.replace(config, data=type(config.data)(str(tmp_path / "cache")))
    cached = text_to_video(cached)
    assert cached.source.buckets.frames == (1, 5)
    assert [own["moments"][0] for own in cached.source.shapes_by_size] == [1, 3]
    assert (GIVEN in cached.source.shapes, SEEN in cached.source.shapes) == (kind != KIND,) * 2
    # Rows of a cache are sorted by size: the image is the first.
    pairs = [(0, 4), (2, 1)]
    keys = jax.vmap(jax.random.key)(jnp.arange(1))
    frozen = plain.frozen(), cached.frozen()
    assert "text_encoder" not in frozen[1]
    assert "vae" not in frozen[1]
    for ours, theirs in pairs:
        losses = []
        for recipe, index, own in zip((cached, plain), (ours, theirs), (frozen[1], frozen[0])):
            example = recipe.example(recipe.source[index], np.random.default_rng(0))
            batch = {name: np.asarray(x)[None] for name, x in example.items()}
            losses.append(jax.jit(recipe.loss)(recipe.trained(), own, batch, keys))
        np.testing.assert_allclose(*losses, rtol=1e-5)


@pytest.mark.parametrize(
    ("kind", "suffix"), [("text-to-video", "mp4"), ("image-to-video", "gif"), ("tokens", "webp")]
)
def test_videos_of_the_validation_are_files(models, clips, tmp_path, kind, suffix):
    _, model = models(kind)
    images = {}
    if kind != KIND:
        Image.new("RGB", (40, 24), (200, 40, 90)).save(tmp_path / "first.png")
        images = {"images": (str(tmp_path / "first.png"),)}
    validation = VideoValidationConfig(**SHOWN, **images, format=suffix)
    recipe = text_to_video(options(model, clips, lora=LoRAConfig(rank=2), validation=validation))
    clip = recipe.validate(recipe.trained(), recipe.frozen())
    file = tmp_path / f"clip.{suffix}"
    clip.write(file)
    frames, fps = diffusax.utils.load_video(file, return_fps=True)
    assert (len(frames), clip.suffix) == (5, f".{suffix}")
    assert abs(fps - 20) < 1e-6
    # Two videos of 32 pixels stand beside each other, with their prompts beneath.
    assert frames[0].width >= 64
    assert frames[0].height > 16
    if kind != KIND:
        shown = np.asarray(frames[0].crop((0, 0, 32, 16)), int)
        later = np.asarray(frames[4].crop((0, 0, 32, 16)), int)
        assert np.abs(shown - later).mean() > 1


@pytest.mark.slow
def test_whole_networks_are_saved_and_opened_in_pytorch(models, clips, tmp_path):
    _, model = models("low_noise")
    found = run(
        model,
        clips,
        tmp_path,
        1,
        expert="low_noise",
        lora=LoRAConfig(),
        optimizer=OptimizerConfig(learning_rate=1e-3),
    )
    theirs = diffusers.WanPipeline.from_pretrained(found)
    before = diffusers.WanPipeline.from_pretrained(model)
    assert theirs.config.boundary_ratio == 0.7
    changed = {
        name: any(
            not torch.equal(*pair)
            for pair in zip(getattr(theirs, name).parameters(), getattr(before, name).parameters())
        )
        for name in ("transformer", "transformer_2")
    }
    assert changed == {"transformer": False, "transformer_2": True}
    assert drawn(theirs).shape == (1, 5, 16, 32, 3)


@pytest.mark.slow
def test_adapters_are_trained_over_kernels_of_eight_bits(models, clips):
    _, model = models("image-to-video")
    changes = {"lora": LoRAConfig(rank=2), "weights": "int8", "gradient_checkpointing": "blocks"}
    recipe = text_to_video(options(model, clips, **changes))
    frozen, rng = recipe.frozen(), np.random.default_rng(0)
    eight = [x for _, x in ordered_leaves(frozen["transformer"]) if isinstance(x, Quantized)]
    assert len(eight) > 10
    structure = jax.tree.structure(recipe.trained())
    leaves = [rng.normal(size=x.shape, scale=0.1) for _, x in ordered_leaves(recipe.trained())]
    trained = jax.tree.unflatten(structure, map(jnp.float32, leaves))
    example = recipe.example(recipe.source[0], np.random.default_rng(0))
    batch = {name: x[None] for name, x in example.items()}
    keys = jax.vmap(jax.random.key)(jnp.arange(1))

    def loss(trained, frozen):
        return recipe.loss(trained, frozen, batch, keys).mean()

    dense = jax.tree.map(np.asarray, frozen, is_leaf=lambda x: isinstance(x, Quantized))
    found, expected = (jax.jit(jax.value_and_grad(loss))(trained, own) for own in (frozen, dense))
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-4)
    for ours, theirs in zip(*map(jax.tree.leaves, (found[1], expected[1])), strict=True):
        assert np.abs(ours - theirs).max() < 1e-3 * max(np.abs(theirs).max(), 1e-3)


@pytest.mark.slow
def test_a_network_learns_with_flow_matching_the_clip_that_its_sampler_draws(models, tmp_path):
    _, model = models("tokens")
    clip = write_clips(tmp_path / "clip", 1, size=(32, 16))
    config = options(
        model,
        clip,
        output=str(tmp_path / "out"),
        steps=120,
        batch_size=8,
        caption_dropout=0.0,
        optimizer=OptimizerConfig(learning_rate=3e-3),
        first_frame=0.5,
    )
    recipe = text_to_video(config)
    train(recipe, config)
    pixels = recipe.example(recipe.source[0], np.random.default_rng(0))["pixel_values"]
    call = {"height": 16, "width": 32, "num_frames": 5, "num_inference_steps": 10, "seed": 0}
    call |= {"guidance_scale": 1.0, "output_type": "latent", "prompt": "clip 0"}

    def error(folder):
        pipe = diffusax.WanPipeline.from_pretrained(folder)
        pipe.set_progress_bar_config(disable=True)
        kept = pipe.vae.run(pixels[None] / np.float32(127.5) - 1, method="encode")[0]
        mean, std = (np.array(getattr(pipe.vae.config, f"latents_{x}")) for x in ("mean", "std"))
        expected = np.moveaxis((np.asarray(kept) - mean) / std, -1, 1)
        return np.abs(np.asarray(pipe(**call).frames) - expected).mean()

    before, after = map(error, (model, tmp_path / "out" / "model"))
    assert after < 0.5 * before


CLIPS = ("recipe=text-to-video", "data.num_frames=[5]", "data.fps=20", "log_every=1")


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["data=2,fsdp=2", "data=2,tensor=2"])
def test_a_run_on_several_devices_has_the_losses_of_one(models, clips, tmp_path, mesh):
    _, model = models("text-to-video")
    own = [*CLIPS, "batch_size=4", "lora.rank=2", "steps=3"]
    found = []
    for output, devices, spread in ((tmp_path / "one", 1, "data=1"), (tmp_path / "many", 4, mesh)):
        command = (RUNS / "devices_run.py", model, clips, output, *own, f"mesh={spread}")
        run_on_devices(*command, devices=devices)
        lines = (output / "metrics.jsonl").read_text().splitlines()
        found.append([json.loads(line)["loss"] for line in lines])
    np.testing.assert_allclose(found[1], found[0], rtol=1e-4)


@pytest.mark.slow
def test_a_killed_run_goes_on_in_the_same_bits(models, mixed, tmp_path):
    _, model = models("text-to-video")
    own = [*CLIPS, "batch_size=2", "lora.rank=2", "steps=8", "data.frame_extraction=random"]
    own.append("data.num_frames=[1,5]")

    def command(output):
        return [sys.executable, str(RUNS / "devices_run.py"), model, mixed, output, *own]

    subprocess.run(command(tmp_path / "whole"), check=True)
    killed = subprocess.Popen(command(tmp_path / "killed"))
    saved = tmp_path / "killed" / "checkpoints"
    limit = time.monotonic() + 120
    while not any(path.name.isdecimal() for path in saved.glob("*")):
        assert time.monotonic() < limit
        time.sleep(0.001)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    subprocess.run(command(tmp_path / "killed"), check=True)
    first, second = (load_file(tmp_path / name / "model" / LORA) for name in ("whole", "killed"))
    for key, value in first.items():
        np.testing.assert_array_equal(value, second[key])


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("low_noise", {}, "has two transformers, of which one is trained at a time; give expert="),
        (KIND, {"expert": "low_noise"}, "expert=low_noise cannot be for .*, which has one"),
        (KIND, {"first_frame": 0.5}, "first_frame=0.5 cannot be for .*, which is of text to video"),
        ("image-to-video", {"first_frame": 0.5}, "first_frame=0.5 .*, which is always given it"),
        (KIND, {"shift_by_size": True}, "shift_by_size cannot be for"),
        (KIND, {"snr_gamma": 5.0}, "snr_gamma cannot be given: videos are trained by flow match"),
        (KIND, {"train_text_encoder": True}, "train_text_encoder cannot be given: videos are"),
        (KIND, {"data": {"num_frames": (4,)}}, "data.num_frames must be one more than a multiple"),
        (KIND, {"data": {"buckets": ("30x16",)}}, "data.buckets must have sides divisible by 4"),
        (
            "image-to-video",
            {"validation": VideoValidationConfig(**SHOWN)},
            "validation.images must be given for .*, whose videos begin with an image",
        ),
        (
            "first-and-last",
            {"validation": VideoValidationConfig(**SHOWN)},
            "validation.every cannot be for .*, whose videos end with an image, too",
        ),
        (
            KIND,
            {"validation": VideoValidationConfig(**SHOWN, num_frames=4)},
            "validation.num_frames must be one more than a multiple of 4 .*; use 1 or 5",
        ),
    ],
)
def test_what_cannot_be_is_one_sentence(models, clips, kind, changes, message):
    _, model = models(kind)
    with pytest.raises(ValueError, match=message):
        text_to_video(options(model, clips, **changes))


def test_checkpoints_of_other_kinds_are_refused(models, clips, tmp_path, checkpoint):
    with pytest.raises(ValueError, match=r"of images; use `diffusax train text-to-image`"):
        text_to_video(options(checkpoint, clips))
    _, model = models(KIND)
    config = diffusax.training.TextToImageConfig(model=str(model))
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, path=str(clips)))
    with pytest.raises(ValueError, match=r"is Wan, of videos; use `diffusax train text-to-video`"):
        text_to_image(config)
    wan_pipeline(tmp_path, "WanVACEPipeline", transformer=wan_vace_transformer())
    with pytest.raises(ValueError, match="is of VACE, which is shown videos and masks besides"):
        text_to_video(options(tmp_path, clips))


def test_images_of_a_validation_are_for_checkpoints_that_read_some(models, clips, tmp_path):
    Image.new("RGB", (40, 24)).save(tmp_path / "first.png")
    validation = VideoValidationConfig(**SHOWN, images=(str(tmp_path / "first.png"),))
    _, model = models(KIND)
    with pytest.raises(ValueError, match=r"validation.images are nothing that .* reads, which is"):
        text_to_video(options(model, clips, validation=validation))


def test_the_command_reads_the_options():
    args = ["--model", "M", "--data.path", "P", "--data.num-frames", "41", "1", "--expert"]
    found = read_recipe("text-to-video", [*args, "high_noise", "--data.frame-extraction", "random"])
    assert isinstance(found, TextToVideoConfig)
    assert (found.data.num_frames, found.expert) == ((1, 41), "high_noise")
