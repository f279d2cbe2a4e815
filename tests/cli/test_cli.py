"""The command line, in this process where its end is not what is tested."""

import contextlib
import io
import os
import re
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest
from PIL import Image, ImageDraw
from safetensors.numpy import save_file
from support.compiled_programs import forget_executables
from support.tiny import build_stable_diffusion

import diffusax
from diffusax.cli import console, main
from diffusax.cli.cache_latents import CacheLatents
from diffusax.cli.console import COMMANDS
from diffusax.cli.edit import Edit, fit
from diffusax.cli.evaluate import command as evaluate
from diffusax.cli.generate import Generate
from diffusax.cli.generate_many import GenerateMany
from diffusax.cli.train import TextToImage
from diffusax.images.conversion import resize
from diffusax.images.masks import blur
from diffusax.images.sheets import labelled_grid
from diffusax.runtime.programs.program import PROGRAMS


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli") / "tiny"
    build_stable_diffusion(folder, unet={"sample_size": 8})
    return folder


@pytest.fixture(scope="module")
def photo(tmp_path_factory):
    """A picture, and a mask of its size."""
    folder = tmp_path_factory.mktemp("photo")
    pixels = np.random.default_rng(0).integers(0, 256, (70, 55, 3), dtype=np.uint8)
    Image.fromarray(pixels).resize((75, 50)).save(folder / "in.png")
    mask = Image.new("L", (75, 50))
    ImageDraw.Draw(mask).rectangle((20, 10, 50, 35), fill=255)
    mask.save(folder / "mask.png")
    return folder / "in.png", folder / "mask.png"


def draw(tmp_path, command, *args):
    """Runs a drawing command; the picture and its settings."""
    output = tmp_path / "drawn.png"
    main([command, *map(str, args), "--seed", "3", "--output", str(output)])
    image = Image.open(output)
    return np.asarray(image), image.text["parameters"].splitlines()[-1]


def failure(capsys, args):
    """Exit code and message of a command that fails."""
    with pytest.raises(SystemExit) as stop:
        main([str(arg) for arg in args])
    shown = capsys.readouterr()
    assert shown.out == ""
    return stop.value.code, shown.err


def test_generate_writes_the_picture_that_python_draws_and_its_settings(model, tmp_path, capsys):
    output = tmp_path / "new" / "cat.png"
    main(
        ["generate", "a cat", "--model", str(model), "--steps", "2", "--guidance", "5"]
        + ["--seed", "3", "--sampler", "euler_a", "--negative-prompt", "dog"]
        + ["--output", str(output)]
    )
    image = Image.open(output)
    assert image.text["parameters"].splitlines() == [
        "a cat",
        "Negative prompt: dog",
        "Steps: 2, Sampler: Euler a, Schedule type: Automatic, CFG scale: 5, Seed: 3, Size: 32x32, "
        "Model: tiny, Prompt weighting: False, Long prompt: False, RNG: jax, "
        f"Version: diffusax {diffusax.__version__}",
    ]
    assert f"{output} (1 image, seed 3)" in capsys.readouterr().out
    pipe = diffusax.DiffusionPipeline.from_pretrained(model)
    pipe.scheduler = diffusax.EulerAncestralDiscreteScheduler.from_config(pipe.scheduler.config)
    expected = pipe(
        "a cat", negative_prompt="dog", num_inference_steps=2, guidance_scale=5, seed=3
    ).images[0]
    np.testing.assert_array_equal(np.asarray(image), np.asarray(expected))


def test_what_is_not_given_is_the_pipelines_own(model, tmp_path):
    image, settings = draw(tmp_path, "generate", "a", "--model", model)
    expected = diffusax.DiffusionPipeline.from_pretrained(model)("a", seed=3).images[0]
    np.testing.assert_array_equal(image, expected)
    assert "Steps: 50, Sampler: PLMS, Schedule type: Automatic, CFG scale: 7.5" in settings


@pytest.mark.slow
def test_distilled_models_keep_their_few_steps(tiny_checkpoints, tmp_path):
    folder, _ = tiny_checkpoints.pipeline("lcm")
    image, settings = draw(tmp_path, "generate", "a", "--model", folder)
    expected = diffusax.LatentConsistencyModelPipeline.from_pretrained(folder)("a", seed=3)
    np.testing.assert_array_equal(image, expected.images[0])
    assert "Steps: 4, Sampler: LCM, Schedule type: Automatic, CFG scale: 8.5" in settings


@pytest.mark.filterwarnings("default:the model was trained")
def test_options_reach_the_call(model, tmp_path, capsys):
    args = ["--noise", "torch", "--clip-skip", 1, "--prompt-weighting", "--long-prompt"]
    size = ["--height", 8, "--width", 32, "--steps", 2, "--vae-tiling", "--dtype", "bfloat16"]
    args += ["--weights", "int8"]
    image, settings = draw(tmp_path, "generate", "(a:1.9) b", "--model", model, *args, *size)
    assert "trained on images of 32x32, and those of 32x8 may be poor" in capsys.readouterr().err
    pipe = diffusax.DiffusionPipeline.from_pretrained(model, dtype="bfloat16", weights="int8")
    options = {"noise": "torch", "clip_skip": 1, "prompt_weighting": True, "long_prompt": True}
    options |= {"height": 8, "width": 32, "num_inference_steps": 2}
    np.testing.assert_array_equal(image, pipe("(a:1.9) b", seed=3, **options).images[0])
    assert (
        "Size: 32x8, Model: tiny, Clip skip: 2, RNG: CPU, Dtype: bfloat16, Weights: int8, "
        in settings
    )


def test_a_cache_of_steps(model, tmp_path, capsys):
    given = ["generate", "a", "--model", model, "--steps", 6, "--step-cache"]
    image, settings = draw(tmp_path, *given, "deep=3")
    pipe = diffusax.DiffusionPipeline.from_pretrained(model)
    plain = pipe("a", seed=3, num_inference_steps=6).images[0]
    pipe.unet.enable_cache(diffusax.DeepCacheConfig(3))
    expected = pipe("a", seed=3, num_inference_steps=6).images[0]
    np.testing.assert_array_equal(image, expected)
    assert np.any(image != np.asarray(plain))
    assert "Step cache: deep=3" in settings
    capsys.readouterr()
    for wrong, said in (
        ("deep", "must be one of first-block=NUMBER, taylorseer=NUMBER, deep=NUMBER (got 'deep')"),
        ("first-block=0.1", "config must be a DeepCacheConfig for a UNet2DConditionModel"),
        ("deep=0.5", "cache_interval must be a whole number"),
    ):
        code, shown = failure(capsys, [*given, wrong])
        assert (code, said in shown) == (2, True)


def test_embeddings_are_words_of_prompts(model, tmp_path, capsys):
    words = tmp_path / "words"
    words.mkdir()
    common = ["--model", model, "--steps", 2]
    code, shown = failure(capsys, ["generate", "a", *common, "--embeddings", words])
    assert (code, "has no .safetensors files" in shown) == (2, True)
    vectors = np.random.default_rng(0).standard_normal((3, 32)).astype(np.float32)
    save_file({"emb_params": vectors[:2]}, words / "style.x.safetensors")
    save_file({"<toy>": vectors[2]}, tmp_path / "learned_embeds.safetensors")
    args = ["--embeddings", words, "--embeddings", tmp_path / "learned_embeds.safetensors"]
    image, _ = draw(tmp_path, "generate", "a <toy> in style.x", *common, *args)
    pipe = diffusax.DiffusionPipeline.from_pretrained(model)
    pipe.load_textual_inversion([{"<toy>": vectors[2]}, {"style.x": vectors[:2]}])
    expected = pipe("a <toy> in style.x", num_inference_steps=2, seed=3).images[0]
    np.testing.assert_array_equal(image, expected)
    options = GenerateMany(prompts=tmp_path / "x.txt", out=tmp_path, embeddings=(words,))
    assert options.source()["embeddings"] == [str(words)]
    assert "embeddings" not in GenerateMany(prompts=tmp_path, out=tmp_path).source()


@pytest.mark.slow
def test_several_pictures_make_a_contact_sheet(model, tmp_path, capsys):
    output = tmp_path / "sheet.png"
    main(
        ["generate", "a", "--model", str(model), "--steps", "1", "--num-images", "3"]
        + ["--height", "32", "--width", "40", "--output", str(output.with_suffix(""))]
    )
    names = sorted(p.name for p in tmp_path.iterdir())
    assert names == ["sheet-0.png", "sheet-1.png", "sheet-2.png", "sheet.png"]
    assert Image.open(output).size == (2 * 40 + 4, 2 * 32 + 4)
    assert Image.open(tmp_path / "sheet-2.png").size == (40, 32)
    assert re.search(r"sheet.png \(3 images, seed \d+\)", capsys.readouterr().out)


def standard_input(monkeypatch, data):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


def test_no_file_is_overwritten_where_none_is_named(model, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    command = ["generate", "--model", str(model), "--steps", "1", "--seed", "3"]
    first = tmp_path / "out.png"
    first.write_bytes(b"mine")
    main([*command, "a"])
    assert capsys.readouterr().out == "out-1.png (1 image, seed 3)\n"
    standard_input(monkeypatch, b"a\nb")
    main([*command, "-"])
    assert capsys.readouterr().out == "out-2.png (2 images, seed 3)\n"
    names = ("out.png", "out-1.png", "out-2.png", "out-2-0.png", "out-2-1.png")
    assert {file.name for file in tmp_path.iterdir()} == set(names)
    assert first.read_bytes() == b"mine"
    main([*command, "a", "--output", "out.png"])
    assert capsys.readouterr().out == "out.png (1 image, seed 3; replaced)\n"
    assert first.read_bytes() == (tmp_path / "out-1.png").read_bytes()


def test_prompts_come_from_standard_input(model, tmp_path, monkeypatch):
    output = tmp_path / "all.png"
    command = ["generate", "--model", str(model), "--steps", "2", "--seed", "3"]
    standard_input(monkeypatch, " a cat\n\n  \r\nzwei Äpfel".encode())
    main([*command, "-", "--output", str(output)])
    texts = []
    for number, prompt in enumerate(("a cat", "zwei Äpfel")):
        main([*command, prompt, "--output", str(tmp_path / "one.png")])
        image = Image.open(tmp_path / f"all-{number}.png")
        texts.append(image.text["parameters"].splitlines()[0])
        np.testing.assert_array_equal(image, Image.open(tmp_path / "one.png"))
    assert texts == ["a cat", "zwei Äpfel"]


@pytest.mark.parametrize(
    ("data", "message"),
    [(b"\n \n", "standard input has no line with a prompt"), (b"\xff\xfe", "is not UTF-8 text")],
)
def test_standard_input_without_prompts_is_an_error(model, monkeypatch, capsys, data, message):
    for more in (["-"], ["--prompts", "-", "--out", "/nowhere/out"]):
        standard_input(monkeypatch, data)
        code, shown = failure(capsys, ["generate", *more, "--model", model])
        assert code == 2
        assert message in shown


def test_a_grid_is_drawn_over_two_options(model, tmp_path):
    output = tmp_path / "grid.png"
    command = ["generate", "a", "--model", str(model), "--seed", "3", "--output", str(output)]
    main([*command, "--grid", "sampler=euler,dpm++2m", "steps=1,2,3"])
    cells = [Image.open(tmp_path / f"grid-{i}.png") for i in range(6)]
    settings = [cell.text["parameters"].splitlines()[-1] for cell in cells]
    found = [re.match(r"Steps: (\d), Sampler: ([^,]+)", text).groups() for text in settings]
    assert found == [(n, s) for n in "123" for s in ("Euler", "DPM++ 2M")]
    expected = labelled_grid(
        [cells[:2], cells[2:4], cells[4:]],
        ["steps 1", "steps 2", "steps 3"],
        ["sampler euler", "sampler dpm++2m"],
    )
    np.testing.assert_array_equal(Image.open(output), expected)
    main([*command, "--sampler", "dpm++2m", "--steps", "3"])
    np.testing.assert_array_equal(Image.open(output), cells[5])


def test_a_grid_over_one_option_is_a_row(model, photo, tmp_path):
    output = tmp_path / "grid.png"
    args = ["generate", "a", "--model", model, "--steps", 2, "--image", photo[0]]
    args += ["--height", 32, "--width", 32, "--output", output]
    main([*map(str, args), "--grid", "seed=1,2"])
    cells = [Image.open(tmp_path / f"grid-{i}.png") for i in range(2)]
    np.testing.assert_array_equal(
        Image.open(output), labelled_grid([cells], [], ["seed 1", "seed 2"])
    )
    assert all(f"Seed: {i + 1}," in cell.text["parameters"] for i, cell in enumerate(cells))
    assert np.asarray(cells[0]).tolist() != np.asarray(cells[1]).tolist()


@pytest.mark.parametrize("size", [(), (48, 72)])
def test_generate_draws_over_a_picture(tiny_checkpoints, photo, tmp_path, size):
    folder, _ = tiny_checkpoints.pipeline("sd")
    args = ["a", "--model", folder, "--steps", 3, "--image", photo[0], "--strength", 0.7]
    args += ["--height", size[0], "--width", size[1]] if size else []
    image, settings = draw(tmp_path, "generate", *args)
    pipe = diffusax.StableDiffusionImg2ImgPipeline.from_pretrained(folder)
    picture = Image.open(photo[0])
    picture = resize(picture, *size, "crop") if size else picture
    expected = pipe("a", image=picture, strength=0.7, num_inference_steps=3, seed=3).images[0]
    np.testing.assert_array_equal(image, expected)
    assert "Denoising strength: 0.7, Prompt weighting: False" in settings


@pytest.mark.parametrize("kind", ["sd", "sd-inpaint"])
def test_generate_draws_under_a_mask(tiny_checkpoints, photo, tmp_path, kind):
    folder, _ = tiny_checkpoints.pipeline(kind)
    args = ["a", "--model", folder, "--steps", 2, "--image", photo[0], "--mask", photo[1]]
    image, settings = draw(tmp_path, "generate", *args, "--mask-blur", 2)
    pipe = diffusax.StableDiffusionInpaintPipeline.from_pretrained(folder)
    given = {"image": photo[0], "mask_image": blur(photo[1], 2), "num_inference_steps": 2}
    # The picture keeps its size, less what the autoencoder cannot draw.
    expected = pipe("a", height=48, width=72, seed=3, **given).images[0]
    np.testing.assert_array_equal(image, expected)
    assert "RNG: jax, Image: in.png, Mask: mask.png, Version" in settings
    size = ["--height", 48, "--width", 72]
    image, settings = draw(tmp_path, "generate", *args, "--mask-crop", 3, *size)
    given = {**given, "image": Image.open(photo[0]), "mask_image": Image.open(photo[1])}
    expected = pipe("a", padding_mask_crop=3, height=48, width=72, seed=3, **given).images[0]
    np.testing.assert_array_equal(image, expected)
    assert image.shape == (50, 75, 3)
    assert "Masked area padding: 3" in settings


@pytest.mark.slow
def test_generate_follows_controlnets(tiny_checkpoints, photo, tmp_path):
    folder, _ = tiny_checkpoints.pipeline("sd")
    nets = [tiny_checkpoints.controlnet("sd", seed=seed)[0] for seed in (0, 1)]
    models = [diffusax.ControlNetModel.from_pretrained(net) for net in nets]
    args = ["a", "--model", folder, "--steps", 2]
    one = ["--control", photo[1], "--controlnet", nets[0], "--control-scale", 0.5]
    two = ["--control", photo[0], "--controlnet", nets[1], "--control-scale", 0.9]
    options = {"num_inference_steps": 2, "seed": 3}
    scale = "controlnet_conditioning_scale"

    pipe = diffusax.AutoPipelineForText2Image.from_pretrained(folder, controlnet=models[0])
    expected = pipe("a", photo[1], **{scale: 0.5}, **options).images[0]
    image, settings = draw(tmp_path, "generate", *args, *one)
    np.testing.assert_array_equal(image, expected)
    assert f'ControlNet 0: "Model: {nets[0].name}, Weight: 0.5, ' in settings
    assert "Control: mask.png" in settings

    pipe = diffusax.AutoPipelineForText2Image.from_pretrained(folder, controlnet=models)
    expected = pipe("a", [photo[1], photo[0]], **{scale: [0.5, 0.9]}, **options).images[0]
    image, settings = draw(tmp_path, "generate", *args, *one, *two)
    np.testing.assert_array_equal(image, expected)
    assert "Control: mask.png in.png" in settings

    pipe = diffusax.AutoPipelineForImage2Image.from_pretrained(folder, controlnet=models[0])
    given = {"image": Image.open(photo[0]), "control_image": photo[1], "strength": 0.9}
    expected = pipe("a", **{scale: 0.5}, **given, **options).images[0]
    image, _ = draw(tmp_path, "generate", *args, *one, "--image", photo[0], "--strength", 0.9)
    np.testing.assert_array_equal(image, expected)

    pipe = diffusax.AutoPipelineForInpainting.from_pretrained(folder, controlnet=models[0])
    given = {"image": photo[0], "mask_image": photo[1], "control_image": photo[1]}
    given |= {"height": 48, "width": 72}
    expected = pipe("a", **{scale: 0.5}, **given, **options).images[0]
    image, _ = draw(tmp_path, "generate", *args, *one, "--image", photo[0], "--mask", photo[1])
    np.testing.assert_array_equal(image, expected)


@pytest.mark.filterwarnings("default:the model was trained")
@pytest.mark.parametrize(
    ("kind", "side"),
    [("sd-instruct", 64), pytest.param("xl-instruct", 128, marks=pytest.mark.slow)],
)
def test_edit_follows_the_instruction(tiny_checkpoints, photo, tmp_path, kind, side):
    folder, _ = tiny_checkpoints.pipeline(kind)
    args = [photo[0], "make it snowy", "--model", folder, "--steps", 2, "--resolution", side]
    scales = ["--guidance", 4, "--image-guidance", 1.2]
    image, settings = draw(tmp_path, "edit", *args, *scales)
    pipe = diffusax.DiffusionPipeline.from_pretrained(folder)
    picture = fit(Image.open(photo[0]), side)
    width, height = picture.size
    assert height == side
    options = {"guidance_scale": 4, "image_guidance_scale": 1.2, "num_inference_steps": 2}
    if kind == "xl-instruct":
        options |= {"height": height, "width": width}
    expected = pipe("make it snowy", image=picture, seed=3, **options).images[0]
    np.testing.assert_array_equal(image, expected)
    assert f"CFG scale: 4, Image CFG scale: 1.2, Seed: 3, Size: {width}x{height}" in settings
    assert "Image: in.png" in settings


def test_pictures_to_edit_are_cut_to_multiples_of_64():
    for size, side, expected in (
        ((75, 50), 64, (64, 64)),
        ((1024, 768), 512, (512, 384)),
        ((3000, 4000), 512, (384, 512)),
        ((1000, 990), 512, (512, 512)),
        ((4000, 1000), 512, (512, 128)),
    ):
        assert fit(Image.new("RGB", size), side).size == expected


def test_a_sweep_draws_a_grid_over_both_scales(tiny_checkpoints, photo, tmp_path):
    folder, _ = tiny_checkpoints.pipeline("sd-instruct")
    scales = ["--sweep-guidance", 2, 8, "--sweep-image-guidance", 1, 1.5, 2]
    args = [photo[0], "snow", "--model", folder, "--steps", 1, "--sweep", *scales]
    sheet, _ = draw(tmp_path, "edit", *args)
    files = sorted(tmp_path.glob("drawn-*.png"))
    assert len(files) == 6
    assert sheet.shape[0] > 2 * 64 + 4
    assert sheet.shape[1] > 3 * 64 + 2 * 4
    settings = [Image.open(file).text["parameters"].splitlines()[-1] for file in files]
    found = [re.findall(r"CFG scale: ([\d.]+)", text) for text in settings]
    assert found == [[g, i] for g in ("2", "8") for i in ("1", "1.5", "2")]
    last = Image.open(files[-1])
    np.testing.assert_array_equal(sheet[-last.height :, -last.width :], last)
    pipe = diffusax.DiffusionPipeline.from_pretrained(folder)
    options = {"guidance_scale": 8, "image_guidance_scale": 2, "num_inference_steps": 1, "seed": 3}
    expected = pipe("snow", image=fit(Image.open(photo[0]), 64), **options).images[0]
    np.testing.assert_array_equal(last, expected)


def test_info_lists_components_and_samplers(model, capsys):
    main(["info", str(model)])
    out = capsys.readouterr().out
    for part in ("UNet2DConditionModel", "M parameters", "float32", "PNDMScheduler", "dpm++2m"):
        assert part in out
    fitting, others = re.search(r"samplers: (.*)\n((?:  not .*\n?)*)", out).groups()
    for name in ("flow_euler", "flow_heun", "edm_euler", "edm_dpm++2m"):
        assert name in others
        assert name not in fitting


def test_a_sampler_for_other_networks_is_an_error(model, tmp_path, capsys):
    arguments = "--model", str(model), "--output", str(tmp_path / "x.png")
    with pytest.raises(SystemExit):
        main(["generate", "a cat", "--sampler", "flow_euler", *arguments])
    error = capsys.readouterr().err
    assert "sampler 'flow_euler' is for networks trained with flow matching" in error
    assert "Traceback" not in error


def test_info_without_a_model_tells_of_the_machine(capsys):
    main(["info"])
    shown = capsys.readouterr().out
    assert "devices: 1 cpu (cpu)" in shown
    assert f"compilation cache: {jax.config.jax_compilation_cache_dir}" in shown
    assert "dpm++2m" in shown


@pytest.mark.slow
def test_what_compile_writes_generate_uses(model, tmp_path, capsys):
    main(["compile", str(model), "--sizes", "32x40", "--output", str(tmp_path / "programs")])
    assert "(3 programs)" in capsys.readouterr().out
    forget_executables()
    try:
        size = ("--height", 32, "--width", 40, "--steps", 2)
        common = ("--model", model, *size, "--profile", tmp_path / "trace")
        loaded, _ = draw(
            tmp_path, "generate", "a cat", *common, "--compiled", tmp_path / "programs"
        )
        assert len(PROGRAMS["denoise"].executables) == 1
        assert list((tmp_path / "trace").rglob("*.xplane.pb"))
        forget_executables()
        again, _ = draw(tmp_path, "generate", "a cat", "--model", model, *size)
        np.testing.assert_allclose(loaded, again, atol=1)
    finally:
        forget_executables()


def test_compile_fills_the_cache(model, capsys):
    main(["compile", str(model), "--batch-sizes", "2", "--no-guidance"])
    try:
        assert "the compilation cache" in capsys.readouterr().out
        made = {name: len(program.executables) for name, program in PROGRAMS.items()}
        assert {made["encode_texts"], made["denoise"], made["decode"]} == {1}
    finally:
        forget_executables()


def test_export_writes_a_file_for_each_program(model, tmp_path, capsys):
    command = ["export", str(model), "--platforms", "cpu", "tpu", "--no-weights"]
    main([*command, "--output", str(tmp_path / "out")])
    names = {file.name for file in (tmp_path / "out").iterdir()}
    expected = {f"{name}.stablehlo" for name in ("encode_texts", "denoise", "decode")}
    assert names == {*expected, "programs.json"}
    shown = capsys.readouterr().out
    assert all(name in shown for name in names)


@pytest.mark.slow
def test_compile_for_a_topology_says_what_fits(model, capsys):
    pytest.importorskip("libtpu")
    main(["compile", str(model), "--topology", "v5e:2x2", "--mesh", "data=4", "--batch-sizes", "4"])
    shown = capsys.readouterr().out
    assert "4 of TPU v5 lite" in shown
    assert shown.count(" yes") == 4
    assert shown.splitlines()[-1].startswith("pipeline: all parameters")


def test_help_lists_all_commands(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    for name, text in COMMANDS.items():
        assert f"{name} {text}" in shown


HELPS = [
    *(
        "generate",
        "edit",
        "serve",
        "info",
        "compile",
        "export",
        "convert",
        "download",
        "cache-latents",
    ),
    *("train text-to-image", "train instruct-pix2pix", "train controlnet", "train autoencoder"),
    *("train dreambooth", "train textual-inversion", "train unconditional"),
    *("evaluate edits", "evaluate instruct-pix2pix", "evaluate text-to-image", "ema"),
    "generate --prompts",
]


def help_of(capsys, *args):
    with pytest.raises(SystemExit) as stop:
        main(list(args))
    shown = capsys.readouterr()
    assert (stop.value.code, shown.err) == (0, "")
    assert shown.out.isascii()
    return shown.out


@pytest.mark.parametrize("name", ["", "train", "evaluate", *HELPS])
@pytest.mark.parametrize("width", [60, 80])
def test_help_is_short_and_fits_the_terminal(capsys, monkeypatch, name, width):
    monkeypatch.setenv("COLUMNS", str(width))
    short = help_of(capsys, *name.split(), "--help")
    whole = help_of(capsys, *name.split(), "--help-all")
    for shown in (short, whole):
        assert shown.startswith(f"usage: diffusax {name.removesuffix(' --prompts')}".rstrip() + " ")
        assert max(map(len, shown.splitlines())) <= width
        assert not any(line != line.rstrip() for line in shown.splitlines())
        assert "(default: None)" not in shown
    assert len(short.splitlines()) <= (66 if width == 80 else 100)
    options = [set(re.findall(r"^  (--[\w.-]+)", shown, re.M)) for shown in (short, whole)]
    assert options[0] - {"--help-all"} <= options[1]


def test_every_option_that_the_short_help_names_is_there(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    named, shown = set(), ""
    for name in HELPS:
        shown += help_of(capsys, *name.split(), "--help")
    for kind in (Generate, GenerateMany, Edit, TextToImage, CacheLatents):
        named |= set(kind.essentials)
    for name in named:
        assert re.search(rf"^  --{name.replace('_', '-')}[ ,]", shown, re.M), name


def test_no_help_shows_what_a_recipe_always_refuses(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    shown = {
        name: set(re.findall(r"^  (--[\w.-]+)", help_of(capsys, "train", name, "--help-all"), re.M))
        for name in ("textual-inversion", "controlnet", "text-to-image")
    }
    options = {"--train-text-encoder", "--text-encoder-learning-rate", "--from-scratch"}
    assert options | {"--lora.rank", "--lora.path"} <= shown["text-to-image"]
    assert not options & (shown["textual-inversion"] | shown["controlnet"])
    assert not any(option.startswith("--lora.") for option in shown["textual-inversion"])
    assert "--lora.path" in shown["controlnet"]


def test_the_short_help_of_an_option_is_its_first_sentence(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    short = " ".join(help_of(capsys, "generate", "--help").split())
    assert "--seed INT Random seed, another one each time by default. --negative" in short
    assert "--model STR" in short
    assert "Show all " in short
    whole = help_of(capsys, "generate", "--help-all")
    assert "Image i of a seed is always the same." in " ".join(whole.split())
    assert "(default: 16)" in help_of(capsys, "train", "text-to-image", "--help")


def test_evaluate_takes_the_names_of_train_too():
    one = ["instruct-pix2pix", "m", "--data", "d", "--output", "o", "--original-image-column", "c"]
    other = ["instruct-pix2pix", "--output", "o", "--data.path=d", "--model", "m"]
    other += ["--data.original-image-column", "c"]
    assert evaluate(one) == evaluate(other)
    assert evaluate(["edits", *one[1:]]) == evaluate(["edits", *other[1:]])
    one = ["text-to-image", "--images", "d", "--clip", "c", "--output", "o", "--image-column", "i"]
    other = ["text-to-image", "--data.path", "d", "--clip", "c", "--output", "o"]
    other += ["--data.image-column", "i"]
    assert evaluate(one) == evaluate(other)


def test_version_is_printed(capsys):
    main(["--version"])
    assert capsys.readouterr().out == f"diffusax {diffusax.__version__}\n"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["generate", "a", "--model", "/nowhere"], "/nowhere is no folder here"),
        (["generate", "a", "--height", "33"], "height must be divisible"),
        (["generate", "a", "--sampler", "eulr"], "unknown sampler 'eulr'"),
        (["generate", "a", "--grid", "sampler=euler,eulr"], "unknown sampler 'eulr'"),
        (["generate", "a", "--variant", "fp8"], "variant='fp8'"),
        (["generate", "a", "--output", "x.jpg"], "must be a .png"),
        (["generate", "a", "--output", "x.png/"], "must be a file, not a folder (got x.png/)"),
        (["generate", "a", "--output", "{folder}"], "must be a file, not a folder"),
        (["generate", "a", "--image", "{folder}/no.png"], "No such file"),
        (["generate", "a", "--image", "/dev/zero"], "'/dev/zero': it is not a regular file"),
        (["generate", "a", "--image", "a\x1b[31m.png"], r"a\x1b[31m.png"),
        (["generate", "a", "--output", "a\x1b[31m.jpg"], r"a\x1b[31m.jpg"),
        (["edit", "{folder}/no.png", "a"], "No such file"),
        (["info", "{folder}"], "model_index.json"),
        (["compile", "emoji", "--mesh", "data=3"], "mesh data=3,fsdp=1,tensor=1 does not fit"),
        (["generate", "a", "--compiled", "{folder}"], "holds no programs.json"),
        (["export", "emoji", "--size", "x"], "--size must be height and width"),
        (["train", "text-to-image", "--set", "steps"], "--set takes name=value"),
        (["train", "text-to-image", "--config", "{folder}/no.yaml"], "no.yaml"),
        (["train", "text-to-image"], "--model must be given"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(model, tmp_path, capsys, args, message):
    args = [arg.format(folder=tmp_path) for arg in args]
    if args[0] == "generate" and "--model" not in args:
        args += ["--model", str(model)]
    code, shown = failure(capsys, args)
    assert code == 2
    assert message in shown
    assert shown.count("\n") == 1
    assert shown.startswith("diffusax: error: ")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "compile,export, convert,download,train,ema,cache-latents,evaluate"),
        (["draw"], "invalid choice: 'draw' (choose from 'generate', 'edit', 'serve', 'info'"),
        (["generate"], "Required options were not provided: PROMPT"),
        (["generate", "a", "--steps", "many"], "Error parsing --steps: invalid literal for int()"),
        (["generate", "a", "--steps", "0"], "steps must be a whole number from 1"),
        (["generate", "--stepz", "3", "a"], "Unrecognized options: --stepz"),
        (["generate", "a", "--guidance", "nan"], "guidance must be a number from"),
        (["generate", "a", "--guidance", "inf"], "guidance must be a number from"),
        (["generate", "a", "--seed", "-1"], "seed must be a whole number from 0 up to 4294967295"),
        (["generate", "a", "--seed", str(2**32)], "seed must be a whole number from 0"),
        (["generate", "a", "--dtype", "int3"], "invalid choice: 'int3' (choose from"),
        (["generate", "a", "--num-images", "0"], "num_images must be a whole number from 1"),
        (["generate", "a", "--strength", "1.1", "--image", "a"], "strength must be a number from"),
        (["generate", "a", "--strength", "0.5"], "--strength needs --image"),
        (["generate", "a", "--strength", "0"], "--strength needs --image"),
        (["generate", "a", "--mask", "a.png"], "--mask needs --image"),
        (["generate", "a", "--image", "a", "--mask-blur", "3"], "--mask-blur needs --mask"),
        (["generate", "a", "--control", "a.png"], "--control and --controlnet go together"),
        (["generate", "a", "--control-scale", "1"], "--control-scale needs --control"),
        (["generate", "a", "--reference", "a.png"], "--reference needs --image"),
        (["generate", "a", "--grid", "height=8,16"], "is one of sampler, steps, guidance, seed,"),
        (["generate", "a", "--grid", "steps"], "--grid takes OPTION=VALUE,VALUE,... where"),
        (["generate", "a", "--grid", "steps=1,x"], "steps must be a whole number from 1"),
        (["generate", "a", "--grid", "steps=1,0"], "steps must be a whole number from 1"),
        (["generate", "a", "--grid", "steps=1", "steps=2"], "two different options (got steps"),
        (["generate", "a", "--grid", "steps=1", "seed=2", "guidance=3"], "one or two options"),
        (["generate", "a", "--grid", "steps=1", "--steps", "3"], "leave --steps out"),
        (["generate", "a", "--grid", "strength=0.1"], "--strength needs --image"),
        (["generate", "a", "--grid", "steps=1", "--num-images", "2"], "--grid makes one image"),
        (["generate", "-", "--grid", "steps=1"], "--grid makes one image of one prompt"),
        (["edit", "a.png"], "Required options were not provided: PROMPT"),
        (["edit", "a.png", "b", "--sweep", "--guidance", "3"], "--sweep takes --sweep-guidance"),
        (["edit", "a.png", "b", "--sweep", "--num-images", "3"], "leave --num-images out"),
        (["compile", "a", "--sizes", "512"], "--sizes must be height and width"),
        (["compile", "a", "--topology", "b", "--output", "c"], "--output cannot be given with"),
        (["train"], "{text-to-image,text-to-video, instruct-pix2pix,controlnet,dreambooth,"),
        (["convert", "instruct-pix2pix", "a"], "Required options were not provided: OUT"),
        (["train", "inpainting"], "invalid choice: 'inpainting'"),
        (["train", "text-to-image", "--optimizer.learning-rate", "fast"], "Error parsing --optim"),
        (
            ["train", "text-to-image", "--optimizer.learning-rate", "nan"],
            "optimizer.learning_rate must be a number from 0",
        ),
        (["train", "text-to-image", "--config"], "argument --config: expected 1 argument"),
    ],
)
def test_what_cannot_be_read_is_said_plainly(capsys, args, message):
    code, shown = failure(capsys, args)
    assert code == 2
    assert message in " ".join(shown.split())
    assert shown.isascii()


def test_training_without_its_packages_names_the_extra(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "optax", None)
    for name in ("train", "cache-latents"):
        code, shown = failure(capsys, [name, "--help"])
        assert code == 2
        assert "pip install 'diffusax[train]'" in shown


def diffusax_process(*args, **options):
    command = [sys.executable, "-m", "diffusax", *map(str, args)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    # A shell's background jobs ignore SIGINT, and so would what they start.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return subprocess.Popen(command, text=True, **pipes, **options)
    finally:
        signal.signal(signal.SIGINT, before)


def test_python_dash_m_runs_the_command(model):
    process = diffusax_process("info", model)
    out, error = process.communicate(timeout=120)
    assert (process.returncode, error) == (0, "")
    assert "StableDiffusionPipeline" in out


@pytest.mark.parametrize(
    "args", [["generate", "a", "--stepz", "3"], ["edit", "--help"], ["info", "--help-all"]]
)
def test_options_are_checked_before_jax_is_imported(args):
    code = (
        "import sys; from diffusax.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "finally: print(sorted({'jax', 'flax', 'scipy', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True)
    assert done.returncode == (0 if any("help" in arg for arg in args) else 2)
    assert done.stdout.splitlines()[-1] == "[]"


def test_public_names_are_there_before_they_are_imported():
    code = (
        "import sys, diffusax\n"
        "assert 'jax' not in sys.modules\n"
        "assert {'DDIMScheduler', 'load_image'} <= set(dir(diffusax))\n"
        "assert not hasattr(diffusax, 'DDIMSchedule')\n"
        "assert diffusax.offline.Settings\n"
        "from diffusax import *\n"
        "assert StableDiffusionPipeline is diffusax.StableDiffusionPipeline\n"
        "assert diffusax.UNet2DConditionModel.__module__ == 'diffusax.networks.unet'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
def test_drawing_does_not_import_training(model, tmp_path):
    code = (
        "import sys; from diffusax.cli import main; main(sys.argv[1:]);"
        "print([m for m in sys.modules if m.split('.')[0] in ('grain', 'orbax')"
        " or m.startswith('diffusax.training')])"
    )
    args = ["generate", "a", "--model", model, "--steps", 1, "--output", tmp_path / "a.png"]
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, args)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


def test_ctrl_c_ends_with_one_line_and_130(model, tmp_path):
    args = ["a", "--model", model, "--steps", 900, "--num-images", 16]
    process = diffusax_process("generate", *args, "--output", tmp_path / "a.png")
    seen = ""
    # The bar moves: it draws.
    while not re.search(r"\b[1-9]\d*/90\d", seen):
        part = os.read(process.stderr.fileno(), 4096).decode()
        assert part, seen
        seen += part
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=120)
    assert process.returncode == 130
    assert error.endswith("diffusax: interrupted\n")
    assert "Traceback" not in error
    assert not (tmp_path / "a.png").exists()


@pytest.mark.slow
def test_a_closed_pipe_ends_silently(model):
    process = diffusax_process("info", model)
    process.stdout.close()
    error = process.stderr.read()
    assert (process.wait(timeout=120), error) == (141, "")


RESTARTS = """
import os, sys
from diffusax.cli.console import restart_with_large_pages
print(os.getpid(), sys.argv[1:], os.environ.get("GLIBC_TUNABLES"), flush=True)
restart_with_large_pages()
"""


@pytest.mark.skipif(not console.has_large_pages(), reason="needs glibc 2.35 and large pages")
@pytest.mark.parametrize(
    ("given", "restarted"),
    [
        (None, "glibc.malloc.hugetlb=1"),
        ("glibc.malloc.check=1", "glibc.malloc.check=1:glibc.malloc.hugetlb=1"),
        ("glibc.malloc.hugetlb=0", None),
    ],
)
def test_training_starts_again_once_with_large_pages(tmp_path, given, restarted):
    script = tmp_path / "script.py"
    script.write_text(RESTARTS)
    env = {k: v for k, v in os.environ.items() if k != "GLIBC_TUNABLES"}
    env |= {"GLIBC_TUNABLES": given} if given else {}
    command = [sys.executable, "-B", str(script), "a b", "--c"]
    out = subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout
    first, *again = out.splitlines()
    assert first.endswith(f"['a b', '--c'] {given}")
    assert again == ([first.replace(f"{given}", restarted)] if restarted else [])


@pytest.mark.parametrize(
    ("version", "choices", "has"),
    [
        (("glibc", "2.35"), "always [madvise] never", True),
        (("glibc", "2.4"), "always [madvise] never", False),
        (("glibc", "2.36"), "always madvise [never]", False),
        (("", ""), "always [madvise] never", False),
        (("glibc", "2.36"), None, False),
    ],
)
def test_what_has_large_pages(monkeypatch, tmp_path, version, choices, has):
    file = tmp_path / "enabled"
    if choices:
        file.write_text(choices)
    monkeypatch.setattr(console, "PAGES_OF_LINUX", file)
    monkeypatch.setattr(console.platform, "libc_ver", lambda: version)
    assert console.has_large_pages() == has


def test_only_training_as_a_command_starts_again(monkeypatch):
    calls = []
    monkeypatch.setattr(console, "restart_with_large_pages", lambda: calls.append(True))
    for args in (["train", "--help"], ["--version"]):
        monkeypatch.setattr(sys, "argv", ["diffusax", *args])
        with contextlib.suppress(SystemExit):
            console.main()
        assert len(calls) == 1
    with contextlib.suppress(SystemExit):
        console.main(["train", "--help"])
    assert len(calls) == 1
