"""The editing model inside the package."""

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw
from support.effort import first

import diffusax
from diffusax.checkpoints.hub import EMBEDDED
from diffusax.cli import main
from diffusax.cli.edit import command as edit_command

FOLDER = EMBEDDED["emoji-edit"]
COLORS = {"red": (214, 40, 40), "green": (60, 160, 70), "blue": (50, 100, 210), "white": (255,) * 3}


@pytest.fixture(scope="module")
def pipe():
    return diffusax.DiffusionPipeline.from_pretrained("emoji-edit")


@pytest.fixture(scope="module")
def emoji():
    """A red apple, on white and on gray."""
    drawer = diffusax.DiffusionPipeline.from_pretrained("emoji")
    prompts = ["a red apple", "a red apple on a gray background"]
    return drawer(prompts, num_inference_steps=12, seed=0).images


def edit(pipe, prompts, images, **options):
    options = {"num_inference_steps": 12, "seed": 0, "output_type": "np", **options}
    return pipe(list(prompts), image=images, **options).images


def border(image):
    """The median colour of the upper and the lower edge, in bytes."""
    return np.median(np.concatenate([image[0], image[-1]]), axis=0) * 255


def as_array(image):
    return np.asarray(image, np.float32) / 255


def nearer(image, wanted, other):
    return np.square(image - wanted).mean() < np.square(image - other).mean()


def test_is_small_half_precision_and_says_what_it_is_made_of(pipe):
    files = [file for file in FOLDER.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) < 12e6
    for name in ("unet", "vae", "text_encoder"):
        assert str(diffusax.load_network(FOLDER / name).dtype) == "torch.float16"
    assert type(pipe) is diffusax.StableDiffusionInstructPix2PixPipeline
    card = (FOLDER / "README.md").read_text("utf-8")
    for words in ("Noto", "Apache-2.0", "Twemoji", "CC-BY-4.0", "Fluent", "MIT", "Unicode"):
        assert words in card


@pytest.mark.parametrize(
    ("guidance", "image_guidance"), first([(2.0, 1.5), (3.0, 1.2), (1.0, 1.0)])
)
def test_pytorch_diffusers_edits_to_the_same_picture(pipe, emoji, guidance, image_guidance):
    theirs = diffusers.StableDiffusionInstructPix2PixPipeline.from_pretrained(
        FOLDER, dtype=torch.float32
    )
    theirs.set_progress_bar_config(disable=True)
    prompts = ["make the background blue", "make it night"]
    config = pipe.unet.config
    shape = (2, config.out_channels, config.sample_size, config.sample_size)
    latents = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    options = {"num_inference_steps": 8, "output_type": "np"}
    options |= {"guidance_scale": guidance, "image_guidance_scale": image_guidance}
    expected = theirs(prompts, image=emoji, latents=latents, **options).images
    ours = pipe(prompts, image=emoji, latents=latents.numpy(), **options).images
    assert ours.shape == (2, 64, 64, 3)
    np.testing.assert_allclose(ours, expected, atol=1e-4)


@pytest.mark.slow
def test_backgrounds_become_the_colour_that_the_instruction_names(pipe, emoji):
    prompts = [f"make the background {color}" for color in COLORS]
    images = edit(pipe, prompts, [emoji[1]] * len(COLORS))
    for image, color in zip(images, COLORS, strict=True):
        distances = {k: np.abs(np.subtract(v, border(image))).sum() for k, v in COLORS.items()}
        assert min(distances, key=distances.get) == color
        # The apple stays red.
        red, _, blue = image[24:40, 24:40].mean((0, 1))
        assert red - blue > 0.3


@pytest.mark.slow
def test_edits_of_light_have_the_known_result(pipe, emoji):
    before = as_array(emoji[0])
    gray = np.repeat(before @ np.float32([[0.299], [0.587], [0.114]]), 3, -1)
    expected = {
        "make it black and white": gray,
        "make it darker": before * 0.55,
        "make it night": before * np.float32([0.30, 0.35, 0.60]),
    }
    images = edit(pipe, expected, [emoji[0]] * len(expected))
    for image, wanted in zip(images, expected.values(), strict=True):
        assert nearer(image, wanted, before)


@pytest.mark.slow
def test_turns_mirrorings_and_sizes_have_the_known_result(pipe):
    drawer = diffusax.DiffusionPipeline.from_pretrained("emoji")
    flag = drawer(["a triangular flag"], num_inference_steps=12, seed=0).images[0]
    before = as_array(flag)
    small = np.ones_like(before)
    # 0.6 times the picture, in the middle.
    small[13:51, 13:51] = as_array(flag.resize((38, 38), Image.Resampling.BILINEAR))
    expected = {
        "turn it upside down": before[::-1, ::-1],
        "rotate it to the left": np.rot90(before),
        "rotate it to the right": np.rot90(before, -1),
        "mirror it": before[:, ::-1],
        "make it smaller": small,
    }
    images = edit(pipe, expected, [flag] * len(expected))
    for image, (prompt, wanted) in zip(images, expected.items(), strict=True):
        others = [before, *(other for name, other in expected.items() if name != prompt)]
        assert all(nearer(image, wanted, other) for other in others), prompt


@pytest.mark.slow
def test_a_border_has_the_colour_that_the_instruction_names(pipe, emoji):
    image = edit(pipe, ["add a blue border"], [emoji[0]])[0]
    assert np.abs(border(image) - COLORS["blue"]).max() < 50
    inside = image[8:12, 8:16].mean((0, 1))
    assert inside.min() > 0.7


def test_edit_on_the_command_line(tmp_path):
    picture, output = tmp_path / "ball.png", tmp_path / "edited.png"
    ball = Image.new("RGB", (64, 64), "white")
    ImageDraw.Draw(ball).ellipse((12, 12, 52, 52), fill=(250, 210, 40))
    ball.save(picture)
    arguments = ["edit", str(picture), "make the background black", "--model", "emoji-edit"]
    main([*arguments, "--steps", "12", "--seed", "0", "--output", str(output)])
    edited = Image.open(output)
    assert edited.size == (64, 64)
    assert "Model: emoji-edit" in edited.text["parameters"]
    assert border(as_array(edited)).max() < 90


def test_the_command_edits_with_it_where_no_model_is_named():
    assert edit_command(["photo.png", "make the background blue"]).model == "emoji-edit"
