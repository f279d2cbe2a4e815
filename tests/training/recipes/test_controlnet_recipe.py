"""The recipe controlnet: what it starts from, what it learns, and that diffusers opens it."""

import dataclasses
import json

import diffusers
import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from support.data_sets import picture, png

import diffusax
from diffusax.checkpoints.tree import params_to_tensors
from diffusax.cli.console import main
from diffusax.pipelines.tasks.steering import control_text_to_image
from diffusax.training import (
    CacheConfig,
    CacheDataConfig,
    CaptionedDataConfig,
    ControlDataConfig,
    ControlNetConfig,
    ControlNetValidationConfig,
    LoRAConfig,
    TextToImageConfig,
    cache_latents,
    controlnet,
    text_to_image,
)

# The tiny checkpoint has four pixels per latent, where diffusers' ControlNets have eight.
WIDTHS = (8, 12, 16)


@pytest.fixture(scope="module")
def start(tmp_path_factory, checkpoint):
    """A ControlNet of diffusers that begins as a copy of the checkpoint's UNet."""
    folder = tmp_path_factory.mktemp("start")
    unet = diffusers.UNet2DConditionModel.from_pretrained(checkpoint, subfolder="unet")
    net = diffusers.ControlNetModel.from_unet(unet, conditioning_embedding_out_channels=WIDTHS)
    # Closed convolutions would hide the picture from the first gradients.
    for module in (*net.controlnet_down_blocks, net.controlnet_mid_block):
        torch.nn.init.normal_(module.weight, std=0.1)
    # What a picture does to the loss stands far above rounding.
    torch.nn.init.normal_(net.controlnet_cond_embedding.conv_out.weight, std=10.0)
    net.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def steered(tmp_path_factory):
    """Random pictures beside their negatives, which steer."""
    folder = tmp_path_factory.mktemp("steered")
    rows = []
    for i in range(16):
        pixels = np.asarray(picture(i))
        rows.append(
            {
                "image": {"bytes": png(Image.fromarray(pixels)), "path": None},
                "conditioning_image": {"bytes": png(Image.fromarray(255 - pixels)), "path": None},
                "text": f"number {i}",
            }
        )
    pq.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet")
    return folder


def test_from_unet_is_that_of_diffusers(checkpoint):
    unet = diffusers.UNet2DConditionModel.from_pretrained(checkpoint, subfolder="unet")
    expected = diffusers.ControlNetModel.from_unet(unet)
    ours = diffusax.ControlNetModel.from_unet(
        diffusax.UNet2DConditionModel.from_pretrained(checkpoint, subfolder="unet")
    )
    for name in ("block_out_channels", "attention_head_dim", "cross_attention_dim"):
        assert tuple(np.ravel(ours.config.__dict__[name])) == tuple(np.ravel(expected.config[name]))
    theirs, tensors = expected.state_dict(), params_to_tensors(ours.params)
    assert set(tensors) == set(theirs)
    for name, value in theirs.items():
        tensor = np.asarray(tensors[name])
        assert tensor.shape == value.shape
        drawn = "cond_embedding" in name and "conv_out" not in name and name.endswith("weight")
        if drawn:
            assert tensor.std() > 0.01
        elif "cond_embedding" not in name:
            np.testing.assert_array_equal(tensor, value.numpy(), err_msg=name)
    assert not np.asarray(tensors["controlnet_cond_embedding.conv_out.weight"]).any()


@pytest.fixture(scope="module")
def run(tmp_path_factory, checkpoint, start, steered):
    """A run of the command line."""
    output = tmp_path_factory.mktemp("run")
    photo = output / "photo.png"
    picture(99, (48, 40)).save(photo)
    options = ["--model", str(checkpoint), "--controlnet", str(start), "--data.path", str(steered)]
    options += ["--output", str(output), "--steps", "4", "--batch-size", "4", "--log-every", "1"]
    options += ["--optimizer.learning-rate", "1e-2", "--compute-dtype", "float32"]
    options += ["--data.resolution", "32", "--gradient-checkpointing", "blocks"]
    options += ["--validation.every", "4", "--validation.prompts", "a dog", "a cat"]
    options += ["--validation.images", str(photo), "--validation.steps", "2"]
    main(["train", "controlnet", *options])
    return output


@pytest.mark.slow
def test_diffusers_opens_the_result_and_draws_the_same(run, checkpoint, start):
    reference = diffusers.StableDiffusionControlNetPipeline.from_pretrained(
        checkpoint,
        controlnet=diffusers.ControlNetModel.from_pretrained(run / "model"),
        safety_checker=None,
    )
    reference.set_progress_bar_config(disable=True)
    drawn = []
    for folder in (run / "model", start):
        net = diffusax.ControlNetModel.from_pretrained(folder)
        pipe = diffusax.StableDiffusionControlNetPipeline.from_pretrained(
            checkpoint, controlnet=net
        )
        drawn.append(draw(pipe))
    np.testing.assert_allclose(drawn[0], draw(reference), atol=1e-4)
    assert np.abs(drawn[0] - drawn[1]).max() > 1e-3


def draw(pipe):
    return pipe(
        "a dog",
        image=picture(5, (32, 32)),
        num_inference_steps=3,
        generator=torch.Generator().manual_seed(0),
        output_type="np",
    ).images


@pytest.mark.slow
def test_the_network_that_is_steered_stays_as_it_is(run):
    assert {file.name for file in (run / "model").iterdir()} >= {"config.json", "README.md"}
    assert not (run / "model" / "unet").exists()
    steps = [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == 4
    assert np.isfinite(steps).all()
    assert (run / "validation").is_dir()


def test_a_controlnet_for_other_latents_is_refused(checkpoint, steered):
    # diffusers' own widths, for a checkpoint with as many pixels per latent.
    with pytest.raises(ValueError, match="the ControlNet has 8 pixels per latent"):
        make(checkpoint, steered)


def test_a_picture_is_cut_as_the_one_that_it_steers(checkpoint, start, steered):
    recipe = make(checkpoint, steered, controlnet=str(start))
    rng = np.random.default_rng(0)
    for i in range(4):
        example = recipe.example(recipe.source[i], rng)
        total = example["pixel_values"].astype(int) + example["conditioning_pixel_values"]
        # The negatives of resized pictures, but for rounding.
        assert np.abs(total - 255).max() <= 1


def test_what_cannot_be_is_refused(checkpoint, start, steered):
    with pytest.raises(ValueError, match="from_scratch cannot be given: a ControlNet is trained"):
        make(checkpoint, steered, controlnet=str(start), from_scratch=True)
    with pytest.raises(ValueError, match=r"^text_encoder_learning_rate cannot be given: a Contro"):
        make(checkpoint, steered, controlnet=str(start), text_encoder_learning_rate=1e-5)
    with pytest.raises(ValueError, match="holds a UNet2DConditionModel, no ControlNetModel"):
        make(checkpoint, steered, controlnet=str(checkpoint / "unet"))
    with pytest.raises(ValueError, match=r"controlnet must be given with lora\.rank"):
        make(checkpoint, steered, lora=LoRAConfig(rank=2))
    lora = LoRAConfig(rank=2, format="both")
    with pytest.raises(ValueError, match="kohya's files have no layers of a ControlNet"):
        make(checkpoint, steered, controlnet=str(start), lora=lora)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_frozen_controlnet_may_be_in_eight_bits(checkpoint, start, steered, dtype):
    lora = LoRAConfig(rank=2, targets=("all",))
    recipe = make(checkpoint, steered, controlnet=str(start), lora=lora, weights="int8")
    config = dataclasses.replace(recipe.config, compute_dtype=dtype)
    recipe = controlnet(config)
    frozen, shapes = recipe.frozen(), recipe.frozen_shapes()
    assert jax.tree.structure(frozen) == jax.tree.structure(shapes)
    kernel = frozen["controlnet"]["down_blocks"]["0"]["resnets"]["0"]["conv1"]["kernel"]
    assert (kernel.values.dtype, kernel.dtype) == (np.int8, np.dtype(dtype))


def test_adapters_of_a_controlnet_are_loaded_beside_it(checkpoint, start, steered, tmp_path):
    validation = ControlNetValidationConfig(
        every=1, prompts=("a dog",), images=(str(tmp_path / "photo.png"),), steps=3
    )
    picture(5, (32, 32)).save(tmp_path / "photo.png")
    options = {"controlnet": str(start), "validation": validation}
    lora = LoRAConfig(rank=2, targets=("all",))
    recipe = make(checkpoint, steered, lora=lora, **options)
    trained, frozen = recipe.trained(), recipe.frozen()
    assert set(trained) == {"controlnet"} <= set(frozen)
    rng = np.random.default_rng(0)
    trained = jax.tree.map(lambda x: 0.3 * rng.standard_normal(x.shape).astype("f"), trained)
    image = picture(5, (32, 32))
    drawn = recipe.draw(trained, frozen, control_text_to_image, image=[image])
    recipe.save(trained, tmp_path / "model")
    net = diffusax.ControlNetModel.from_pretrained(start, dtype="float32")
    pipe = diffusax.AutoPipelineForText2Image.from_pretrained(checkpoint, controlnet=net)
    call = {"num_inference_steps": 3, "guidance_scale": 7.5, "seed": 0}
    plain = pipe("a dog", image=image, **call).images[0]
    pipe.load_lora_weights(tmp_path / "model")
    expected = pipe("a dog", image=image, **call).images[0]
    difference = lambda a, b: np.abs(np.asarray(a, int) - np.asarray(b, int)).max()  # noqa: E731
    assert difference(drawn[0], expected) <= 1
    assert difference(expected, plain) > 5


@pytest.mark.slow
def test_a_closed_copy_changes_nothing_at_first(checkpoint, start, steered):
    recipe = make(checkpoint, steered, controlnet=str(start))
    frozen, trained = recipe.frozen(), recipe.trained()
    assert "unet" in frozen
    names = ("controlnet_down_blocks", "controlnet_mid_block")
    closed = {n: jax.tree.map(np.zeros_like, trained["controlnet"][n]) for n in names}
    rows = [recipe.example(recipe.source[i], np.random.default_rng(i)) for i in range(4)]
    batch = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    keys = jax.random.split(jax.random.key(0), 4)
    loss = jax.jit(recipe.loss)
    other = {**batch, "conditioning_pixel_values": 255 - batch["conditioning_pixel_values"]}
    nothing = {"controlnet": {**trained["controlnet"], **closed}}
    np.testing.assert_array_equal(
        loss(nothing, frozen, batch, keys), loss(nothing, frozen, other, keys)
    )
    difference = loss(trained, frozen, batch, keys) - loss(trained, frozen, other, keys)
    assert np.abs(difference).min() > 1e-5


@pytest.mark.slow
def test_a_cache_gives_the_same_losses_without_the_autoencoder(
    checkpoint, start, steered, tmp_path
):
    size = {"resolution": 32, "center_crop": True}
    cache_latents(
        CacheConfig(
            recipe="controlnet",
            model=str(checkpoint),
            data=CacheDataConfig(str(steered), **size),
            output=str(tmp_path),
            text_embeddings=True,
        )
    )
    options = {"controlnet": str(start), "caption_dropout": 0.0}
    plain = make(checkpoint, steered, ControlDataConfig(str(steered), **size), **options)
    cached = make(checkpoint, tmp_path, ControlDataConfig(str(tmp_path)), **options)
    assert set(cached.frozen()) == {"unet", "empty"}
    results, keys = [], jax.random.split(jax.random.key(0), 4)
    for recipe in (plain, cached):
        rows = [recipe.example(recipe.source[i], np.random.default_rng(i)) for i in range(4)]
        batch = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
        assert ("pixel_values" in batch) is (recipe is plain)
        results.append(jax.jit(recipe.loss)(recipe.trained(), recipe.frozen(), batch, keys))
    np.testing.assert_allclose(*results, rtol=1e-5)
    with pytest.raises(ValueError, match="was not written for text-to-image; write it again"):
        text_to_image(
            TextToImageConfig(model=str(checkpoint), data=CaptionedDataConfig(str(tmp_path)))
        )


def make(checkpoint, path, data=None, **options):
    return controlnet(
        ControlNetConfig(
            model=str(checkpoint),
            data=data or ControlDataConfig(str(path), resolution=32),
            compute_dtype="float32",
            **options,
        )
    )
