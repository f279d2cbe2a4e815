"""Adapters of the other recipes and kinds, trained to random numbers, in PyTorch and in ours."""

import json
import warnings

import diffusers
import jax
import numpy as np
import peft
import pytest
import torch
from peft.utils import set_peft_model_state_dict
from safetensors import safe_open
from safetensors.torch import load_file
from support.data_sets import edit_row, picture, row, write_parquet
from support.effort import first
from support.lora_files import write_kohya, write_peft
from support.tiny import randomize
from support.training_runs import prepared

import diffusax
from diffusax.checkpoints.original.unet import unet_names
from diffusax.lora.files import WEIGHT_NAME
from diffusax.lora.trained import KOHYA_NAME
from diffusax.models.adapters.low_rank import AdaptedNetwork
from diffusax.pipelines.tasks import tasks
from diffusax.training import (
    ControlDataConfig,
    ControlNetConfig,
    EditDataConfig,
    InstructPix2PixConfig,
    InstructPix2PixValidationConfig,
    LoRAConfig,
    TextToImageConfig,
    controlnet,
    instruct_pix2pix,
    text_to_image,
)

STEPS = 3


def changed(params):
    """Parameters that are no longer the first ones: DoRA's lengths are still near the kernels'."""
    rng = np.random.default_rng(1)
    return jax.tree.map(
        lambda x: (np.asarray(x) + 0.1 * rng.standard_normal(x.shape)).astype(np.float32), params
    )


def opened(folder):
    """PyTorch's pipeline and ours."""
    theirs = diffusers.DiffusionPipeline.from_pretrained(folder)
    ours = diffusax.DiffusionPipeline.from_pretrained(folder, dtype="float32")
    for pipe in (theirs, ours):
        pipe.set_progress_bar_config(disable=True)
    return theirs, ours


def draw(pipe, prompt, **options):
    generator = torch.Generator().manual_seed(0)
    call = {"num_inference_steps": STEPS, "output_type": "np", **options}
    return pipe(prompt, generator=generator, **call).images[0]


def assert_drawn_alike(folder, file, prompt, **options):
    """That both draw the same with a LoRA's file, which changes the picture."""
    theirs, ours = opened(folder)
    plain = draw(theirs, prompt, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs.load_lora_weights(file.parent, weight_name=file.name)
    ours.load_lora_weights(file)
    expected = draw(theirs, prompt, **options)
    assert np.abs(plain - expected).max() > 0.02
    np.testing.assert_allclose(draw(ours, prompt, **options), expected, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sd-instruct", "xl-instruct"])
def test_adapters_that_edit_are_the_same_in_pytorch(tiny_checkpoints, tmp_path, kind):
    folder, _ = tiny_checkpoints.pipeline(kind)
    rows = [edit_row(i) for i in range(4)]
    picture(9, (64, 64)).save(tmp_path / "photo.png")
    config = InstructPix2PixConfig(
        model=str(folder),
        data=EditDataConfig(str(write_parquet(tmp_path / "edits", rows)), resolution=64),
        compute_dtype="float32",
        train_text_encoder=True,
        lora=LoRAConfig(rank=2, targets=("to_q", "to_v", "conv_in", "q_proj", "out_proj")),
        validation=InstructPix2PixValidationConfig(
            every=1, prompts=("as a drawing",), images=(str(tmp_path / "photo.png"),), steps=STEPS
        ),
    )
    recipe = instruct_pix2pix(config)
    trained = changed(recipe.trained())
    recipe.save(trained, tmp_path / "model")
    photo = picture(9, (64, 64))
    assert_drawn_alike(
        folder, tmp_path / "model" / WEIGHT_NAME, "as a drawing", image=photo, guidance_scale=7.5
    )
    image = {"image": [photo], "image_guidance_scale": 1.5}
    (drawn,) = recipe.draw(trained, recipe.frozen(), tasks.instruct, **image)
    _, ours = opened(folder)
    ours.load_lora_weights(tmp_path / "model")
    call = {"num_inference_steps": STEPS, "guidance_scale": 7.5, "seed": 0, "output_type": "pil"}
    (expected,) = ours(["as a drawing"], **image, **call).images
    assert np.abs(np.asarray(drawn, int) - np.asarray(expected, int)).max() <= 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sd", "xl"])
def test_lengths_of_text_encoders_and_convolutions(tiny_checkpoints, tmp_path, kind):
    folder, _ = tiny_checkpoints.pipeline(kind)
    pictures = write_parquet(tmp_path / "pictures", [row(i) for i in range(4)])
    targets = ("to_q", "to_v", "conv1", "q_proj", "out_proj", "fc1")
    config = TextToImageConfig(
        model=str(folder),
        data=prepared(pictures),
        compute_dtype="float32",
        train_text_encoder=True,
        lora=LoRAConfig(rank=2, alpha=3, targets=targets, dora=True, format="both"),
    )
    recipe = text_to_image(config)
    recipe.save(changed(recipe.trained()), tmp_path / "model")
    assert_drawn_alike(folder, tmp_path / "model" / WEIGHT_NAME, "a dog", height=64, width=64)
    # diffusers drops the lengths of kohya's files.
    pictures = []
    for name in (WEIGHT_NAME, KOHYA_NAME):
        _, ours = opened(folder)
        ours.load_lora_weights(tmp_path / "model" / name)
        pictures.append(draw(ours, "a dog", height=64, width=64))
    np.testing.assert_allclose(*pictures, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["peft", "kohya"])
@pytest.mark.parametrize("kind", ["sd", "xl"])
def test_what_other_programs_began_is_trained_further(tiny_checkpoints, tmp_path, kind, form):
    """Layers of several ranks and alphas; SDXL's file of kohya has the original code's names."""
    folder, pipe = tiny_checkpoints.pipeline(kind)
    encoders = [name for name in ("text_encoder", "text_encoder_2") if hasattr(pipe, name)]
    networks = {name: getattr(pipe, name) for name in ("unet", *encoders)}
    ends = {
        **dict.fromkeys(encoders, (".q_proj", ".out_proj", ".fc1")),
        "unet": (".to_q", ".0.conv"),
    }
    file = tmp_path / "theirs.safetensors"
    if form == "peft":
        write_peft(file, networks, ends)
    else:
        names = unet_names(diffusax.UNet2DConditionModel.from_pretrained(folder / "unet").config)
        rename = {path: name for name, path in names.items()}
        write_kohya(file, networks, ends, rename if kind == "xl" else None)
    data = prepared(write_parquet(tmp_path / "pictures", [row(0)]))
    config = TextToImageConfig(
        model=str(folder), data=data, train_text_encoder=True, lora=LoRAConfig(path=str(file))
    )
    recipe = text_to_image(config)
    trained = recipe.trained()
    ranks = {layer["down"].shape[-1] for layer in trained["unet"].values()}
    assert ranks == ({4, 6} if form == "peft" else {4})
    recipe.save(trained, tmp_path / "same")
    assert_drawn_alike(folder, tmp_path / "same" / WEIGHT_NAME, "a dog", height=64, width=64)
    pictures = []
    for given in (file, tmp_path / "same" / WEIGHT_NAME):
        _, ours = opened(folder)
        ours.load_lora_weights(given)
        pictures.append(draw(ours, "a dog", height=64, width=64))
    np.testing.assert_allclose(*pictures, atol=1e-5)


@pytest.mark.parametrize("dora", first([False, True]))
def test_peft_puts_adapters_of_a_controlnet_into_it(checkpoint, tmp_path, dora):
    unet = diffusers.UNet2DConditionModel.from_pretrained(checkpoint, subfolder="unet")
    net = diffusers.ControlNetModel.from_unet(unet, conditioning_embedding_out_channels=(8, 12, 16))
    randomize(net).save_pretrained(tmp_path / "controlnet")
    (tmp_path / "rows").mkdir()
    rows = [{**row(0), "conditioning_image": row(1)["image"]}]
    config = ControlNetConfig(
        model=str(checkpoint),
        controlnet=str(tmp_path / "controlnet"),
        data=prepared(write_parquet(tmp_path / "rows", rows), ControlDataConfig),
        compute_dtype="float32",
        lora=LoRAConfig(rank=2, alpha=3, targets=("all",), dora=dora),
    )
    recipe = controlnet(config)
    trained = changed(recipe.trained())
    recipe.save(trained, tmp_path / "model")

    rng = np.random.default_rng(0)
    shapes = {"sample": (1, 4, 8, 8), "text": (1, 7, 32), "picture": (1, 3, 32, 32)}
    given = {k: torch.tensor(rng.standard_normal(shape, np.float32)) for k, shape in shapes.items()}
    inputs = (given["sample"], 3, given["text"], given["picture"])
    with torch.no_grad():
        *_, plain = net(*inputs, return_dict=False)
        # As the guide says.
        file = tmp_path / "model" / WEIGHT_NAME
        with safe_open(file, "pt") as opened_file:
            options = json.loads(opened_file.metadata()["lora_adapter_metadata"])
        names = {key.removeprefix("controlnet."): value for key, value in options.items()}
        net.add_adapter(peft.LoraConfig(**names))
        tensors = {key.removeprefix("controlnet."): x for key, x in load_file(file).items()}
        result = set_peft_model_state_dict(net, tensors)
        assert not result.unexpected_keys
        down, mid = net(*inputs, return_dict=False)
    assert (mid - plain).abs().max() > 0.05

    network = recipe.lora.adapted(recipe.base.networks, trained, np.float32)["controlnet"]
    assert isinstance(network, AdaptedNetwork)
    nhwc = lambda x: np.moveaxis(x.numpy(), 1, -1)  # noqa: E731
    params = recipe.frozen()["controlnet"]
    arguments = (np.array([3]), given["text"].numpy(), nhwc(given["picture"]), 1.0)
    run = jax.jit(lambda params, x: network.apply(params, x, *arguments, method="scaled_residuals"))
    ours = run(params, nhwc(given["sample"]))
    for a, b in zip(jax.tree.leaves(ours), [*down, mid], strict=True):
        np.testing.assert_allclose(a, nhwc(b), atol=5e-5 * float(b.abs().max()))
