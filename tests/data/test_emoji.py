"""The model inside the package."""

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image
from support.effort import first

import diffusax
from diffusax.checkpoints.hub import EMBEDDED
from diffusax.cli import main
from diffusax.infotext.text import read

FOLDER = EMBEDDED["emoji"]
COLORS = {"red": (214, 40, 40), "green": (60, 160, 70), "blue": (50, 100, 210), "white": (255,) * 3}


@pytest.fixture(scope="module")
def pipe():
    return diffusax.DiffusionPipeline.from_pretrained("emoji")


def test_is_small_half_precision_and_says_what_it_is_made_of():
    files = [file for file in FOLDER.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) < 16e6
    for name in ("unet", "vae", "text_encoder"):
        assert str(diffusax.load_network(FOLDER / name).dtype) == "torch.float16"
    card = (FOLDER / "README.md").read_text("utf-8")
    for words in ("Noto Color Emoji", "Apache-2.0", "OFL", "Unicode"):
        assert words in card


@pytest.mark.parametrize("guidance", first([1.0, 3.0]))
def test_pytorch_diffusers_draws_the_same_picture(pipe, guidance):
    theirs = diffusers.DiffusionPipeline.from_pretrained(FOLDER, dtype=torch.float32)
    theirs.set_progress_bar_config(disable=True)
    prompts = ["a red apple on a blue background", "cat face"]
    config = pipe.unet.config
    shape = (2, config.in_channels, config.sample_size, config.sample_size)
    latents = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    options = {"num_inference_steps": 8, "guidance_scale": guidance, "output_type": "np"}
    expected = theirs(prompts, latents=latents, **options).images
    ours = pipe(prompts, latents=latents.numpy(), **options).images
    assert ours.shape == (2, 64, 64, 3)
    np.testing.assert_allclose(ours, expected, atol=1e-3)


def test_pytorch_diffusers_opens_it_and_draws_without_arguments():
    """Transformers takes a text encoder's dtype from its config; diffusers takes float32."""
    theirs = diffusers.StableDiffusionPipeline.from_pretrained(FOLDER)
    theirs.set_progress_bar_config(disable=True)
    image = theirs("a red apple", num_inference_steps=2, output_type="np").images[0]
    assert image.shape == (64, 64, 3)
    assert np.isfinite(image).all()


@pytest.mark.slow
def test_backgrounds_have_the_colour_that_the_prompt_names(pipe):
    prompts = [f"a rocket on a {color} background" for color in COLORS]
    images = pipe(prompts, num_inference_steps=12, guidance_scale=3.0, seed=0, output_type="np")
    for image, color in zip(images.images, COLORS):
        border = np.median(np.concatenate([image[0], image[-1]]), axis=0) * 255
        nearest = min(COLORS, key=lambda name: np.abs(np.subtract(COLORS[name], border)).sum())
        assert nearest == color


def test_prompts_decide_the_picture(pipe):
    images = pipe(["red apple", "blue heart"], num_inference_steps=12, seed=0, output_type="np")
    apple, heart = (image[24:40, 24:40].mean((0, 1)) for image in images.images)
    assert apple[0] - apple[2] > 0.3
    assert heart[2] - heart[0] > 0.3


@pytest.mark.slow
def test_parts_never_seen_together_are_put_together(pipe):
    """Held out of its training, see examples/emoji_styles."""
    prompts = ["a red coconut", "a green dodo", "a blue skull", "a green pizza"]
    images = pipe(prompts, num_inference_steps=12, guidance_scale=2.0, seed=0, output_type="np")
    for prompt, image in zip(prompts, images.images):
        drawn = image[(image.min(2) < 0.8) & (image.max(2) - image.min(2) > 0.2)]
        red, green, blue = np.median(drawn, axis=0)
        found = {
            "red": red - max(green, blue),
            "green": green - max(red, blue),
            "blue": blue - max(red, green),
        }
        assert max(found, key=found.get) == prompt.split()[1], (prompt, found)


@pytest.mark.slow
def test_styles_differ_and_stay_on_other_backgrounds(pipe):
    styles = [
        f"a frog{where}, {style} style"
        for style in ("flat", "3d")
        for where in ("", " on a green background")
    ]
    images = pipe(
        styles, num_inference_steps=12, guidance_scale=2.0, seed=0, output_type="np"
    ).images
    flat, flat_on_green, round_, round_on_green = images[:, 22:42, 22:42]
    for one, other in ((flat, flat_on_green), (round_, round_on_green)):
        assert np.abs(one - other).mean() < 0.5 * np.abs(flat - round_).mean()


def test_generate_needs_no_model(tmp_path):
    output = tmp_path / "apple.png"
    main(["generate", "a red apple", "--steps", "2", "--seed", "0", "--output", str(output)])
    image = Image.open(output)
    assert image.size == (64, 64)
    assert "Model: emoji" in image.text["parameters"]


def test_the_models_own_guidance_is_the_command_lines_default(tmp_path, capsys):
    main(
        ["generate", "a red apple", "--steps", "1", "--seed", "0", "--output", f"{tmp_path}/a.png"]
    )
    assert "CFG scale: 2, " in Image.open(tmp_path / "a.png").text["parameters"]
    pipe = diffusax.DiffusionPipeline.from_pretrained("emoji")
    pipe.save_pretrained(tmp_path / "saved")
    again = diffusax.DiffusionPipeline.from_pretrained(tmp_path / "saved")
    assert again.call_defaults == pipe.call_defaults == {"guidance_scale": 2.0}


def again(fields):
    """The options of `diffusax generate` for the fields of an image's text."""
    names = {
        **{"num_inference_steps": "steps", "guidance_scale": "guidance", "padding_mask_crop": ""},
        **{"controls": "", "prompt": "", "number": "", "negative_prompt": "", "mask_blur": ""},
    }
    args = [fields["prompt"]]
    if fields.get("negative_prompt"):
        args += ["--negative-prompt", fields["negative_prompt"]]
    for name in ("prompt_weighting", "long_prompt"):
        args += [] if fields.pop(name, True) is False else [f"--{name.replace('_', '-')}"]
    for name, value in fields.items():
        option = names.get(name, name.replace("_", "-"))
        args += [f"--{option}", value] if option else []
    return args


@pytest.mark.parametrize(
    ("prompt", "args"),
    [
        ("a (red:1.8) [apple]", []),
        ("a (red:1.8) [apple]", ["--prompt-weighting", "--sampler", "dpm++2m_karras"]),
        ("a red apple " * 40, ["--long-prompt", "--sampler", "euler_a", "--num-images", 2]),
        ("りんご\nNegative prompt: red ", ["--negative-prompt", "a, b", "--clip-skip", 1]),
        ("a red apple", ["--noise", "torch", "--guidance", 3.3, "--sampler", "DDIMScheduler"]),
        pytest.param(
            *("a red apple", ["--width", 48, "--height", 56, "--image", "IMAGE"]),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_an_image_is_generated_again_from_its_own_text(tmp_path, prompt, args):
    photo = tmp_path / "photo.png"
    Image.effect_noise((56, 64), 80).convert("RGB").save(photo)
    args = [photo if arg == "IMAGE" else arg for arg in args]
    first, second = tmp_path / "first.png", tmp_path / "second.png"
    main(["generate", prompt, "--steps", "3", "--output", str(first), *map(str, args)])
    drawn = sorted(tmp_path.glob("first-*.png")) or [first]
    fields = read(Image.open(drawn[-1]).text["parameters"]).fields
    assert fields["prompt"] == prompt
    assert fields.get("number", 0) == len(drawn) - 1
    more = ["--image", photo] if photo in args else []
    more += ["--num-images", len(drawn)]
    options = [*again(dict(fields)), *more, "--output", second]
    main(["generate", *map(str, options)])
    made = sorted(tmp_path.glob("second-*.png")) or [second]
    np.testing.assert_array_equal(Image.open(made[-1]), Image.open(drawn[-1]))
