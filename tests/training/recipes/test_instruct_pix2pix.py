"""The InstructPix2Pix recipe: its examples, the widened UNet, validation, runs and results."""

import json
import subprocess
import sys

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from PIL import Image
from support.data_sets import edit_row, picture, png, write_parquet
from support.tiny import build_stable_diffusion
from support.tiny_transformers import klein_pipeline
from support.training_runs import steps_logged, wait_for

import diffusax
from diffusax.cli.train import command as train_command
from diffusax.training import (
    EditDataConfig,
    InstructPix2PixConfig,
    InstructPix2PixValidationConfig,
    instruct_pix2pix,
    train,
)
from diffusax.training.data.batches import Batches

SIZE = {"resolution": 32, "center_crop": True}
UNFLIPPED = {**SIZE, "random_flip": False}
PROMPTS = ("make it snowy", "as a drawing")


@pytest.fixture(scope="module")
def photo(tmp_path_factory):
    path = tmp_path_factory.mktemp("photo") / "photo.png"
    picture(99, (48, 40)).save(path)
    return path


def make_recipe(checkpoint, path, data=SIZE, validation=None, **options):
    """data, validation: options of these groups."""
    config = InstructPix2PixConfig(
        model=str(checkpoint),
        data=EditDataConfig(str(path), **data),
        validation=InstructPix2PixValidationConfig(**validation or {}),
        compute_dtype="float32",
        **options,
    )
    return instruct_pix2pix(config)


@pytest.fixture(scope="module")
def recipe(checkpoint, edits, photo):
    return make_recipe(
        checkpoint,
        edits,
        validation={"every": 2, "prompts": PROMPTS, "images": (str(photo),), "steps": 2},
    )


def test_an_example_has_both_pictures_cut_alike(checkpoint, edits):
    mirrored = 0
    recipe = make_recipe(checkpoint, edits, {"resolution": 32})
    batch = next(Batches(recipe.source, recipe.example, batch_size=16, seed=0))
    assert set(batch) == {"pixel_values", "original_pixel_values", "input_ids"}
    assert batch["pixel_values"].shape == (16, 32, 32, 3)
    np.testing.assert_array_equal(batch["pixel_values"], 255 - batch["original_pixel_values"])
    for i in range(16):
        whole = np.asarray(picture(i))
        windows = [whole[:, j : j + 32] for j in range(9)]
        flipped = {w[:, ::-1].tobytes() for w in windows}
        mirrored += sum(p.tobytes() in flipped for p in batch["original_pixel_values"])
    assert 2 < mirrored < 14


def test_one_of_several_edits_is_drawn_each_time(checkpoint, tmp_path):
    rows = [edit_row(i) for i in range(3)]
    for i, row in enumerate(rows):
        row["edit_prompt"] = ["first", "second", "third"]
        row["edited_image"] = [{"bytes": png(picture(10 * i + j)), "path": None} for j in range(3)]
    rows[2]["edit_prompt"] = ["first"]
    recipe = make_recipe(checkpoint, write_parquet(tmp_path, rows), UNFLIPPED)
    rng = np.random.default_rng(0)
    pairs = set()
    for _ in range(30):
        example = recipe.example(recipe.source[1], rng)
        pairs.add((example["input_ids"].tobytes(), example["pixel_values"].tobytes()))
        assert np.array_equal(example["original_pixel_values"], np.asarray(picture(1))[:, 4:36])
    assert len(pairs) == 3
    with pytest.raises(ValueError, match="1 instructions for 3 edited images"):
        recipe.example(recipe.source[2], rng)


def test_a_folder_names_its_pictures_in_metadata(checkpoint, tmp_path):
    for i in range(4):
        picture(i).save(tmp_path / f"{i}.png")
    line = '{"input_image_file_name": "0.png", "edit_prompt": ["a", "b", "c"], '
    line += '"edited_image_file_names": ["1.png", "2.png", "3.png"]}\n'
    (tmp_path / "metadata.jsonl").write_text(line)
    recipe = make_recipe(checkpoint, tmp_path, UNFLIPPED)
    rng = np.random.default_rng(0)
    seen = {recipe.example(recipe.source[0], rng)["pixel_values"].tobytes() for _ in range(30)}
    assert seen == {np.asarray(picture(i))[:, 4:36].tobytes() for i in (1, 2, 3)}
    assert recipe.source.name(0) == str(tmp_path / "0.png")

    (tmp_path / "metadata.jsonl").write_text(line.replace("1.png", "../1.png"))
    with pytest.raises(ValueError, match="leads out of the data set's folder"):
        make_recipe(checkpoint, tmp_path)
    named = line.replace("edited_image_file_names", "edited_image")
    named = named.replace('"1.png"', '{"path": "/1.png"}')
    (tmp_path / "metadata.jsonl").write_text(named)
    with pytest.raises(ValueError, match="must name its images by edited_image_file_name"):
        make_recipe(checkpoint, tmp_path)
    (tmp_path / "metadata.jsonl").unlink()
    with pytest.raises(
        ValueError,
        match=r"nothing of 'edited_image'; name each by edited_image_file_name",
    ):
        make_recipe(checkpoint, tmp_path)


def test_lines_of_musubi_tuner_are_the_same_examples(checkpoint, edits, tmp_path):
    lines = []
    for i in range(16):
        row = edit_row(i)
        for name, column in (("a", "edited_image"), ("b", "input_image")):
            (tmp_path / f"{i}{name}.png").write_bytes(row[column]["bytes"])
        lines.append({"image_path": f"{i}a.png", "control_path_0": f"{i}b.png"})
        lines[-1]["caption"] = row["edit_prompt"]
    write = (tmp_path / "all.jsonl").write_text
    write("".join(json.dumps(line) + "\n" for line in lines))
    of_lines, of_table = (
        next(Batches(recipe.source, recipe.example, batch_size=8, seed=0))
        for recipe in (make_recipe(checkpoint, path) for path in (tmp_path, edits))
    )
    assert of_lines.keys() == of_table.keys()
    for name, array in of_table.items():
        np.testing.assert_array_equal(of_lines[name], array)
    lines[5]["control_path_1"] = "0b.png"
    write("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(
        ValueError, match=r"5a.png has 2 images .*, and this model looks at 1; train"
    ):
        make_recipe(checkpoint, tmp_path)


def write_mixed(folder, fewest: int, rows: int = 12):
    """Edits of as many images to look at as this, or one or two more."""
    folder.mkdir()
    lines = []
    for i in range(rows):
        names = [f"{i}_{k}.png" for k in range(1 + fewest + i % 3)]
        for k, name in enumerate(names):
            picture(4 * i + k, (32, 32)).save(folder / name)
        controls = {f"control_path_{k}": name for k, name in enumerate(names[1:])}
        lines.append({"image_path": names[0], "caption": f"edit {i}", **controls})
    (folder / "all.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def mixed_config(tmp_path, data, **options):
    return InstructPix2PixConfig(
        model=str(tmp_path / "model"),
        data=data,
        batch_size=2,
        compute_dtype="float32",
        checkpoint_every=3,
        **options,
    )


@pytest.mark.slow
@pytest.mark.parametrize("fewest", [0, 1])
def test_rows_with_some_images_or_none_are_trained_and_go_on_to_the_same_bits(tmp_path, fewest):
    klein_pipeline(tmp_path / "model", layers=28)
    path = str(write_mixed(tmp_path / "data", fewest))
    data = EditDataConfig(path, resolution=32, references_optional=not fewest)

    def run(output, steps):
        config = mixed_config(tmp_path, data, output=str(tmp_path / output), steps=steps)
        return jax.tree.leaves(train(instruct_pix2pix(config), config).params)

    whole = run("whole", 6)
    run("part", 3)
    part = run("part", 6)
    assert len(whole) > 40
    assert all(np.array_equal(a, b) for a, b in zip(whole, part, strict=True))


def test_a_denoiser_that_reads_the_image_beside_its_own_needs_one(checkpoint, edits):
    with pytest.raises(ValueError, match="references_optional cannot be for Stable Diffusion"):
        make_recipe(checkpoint, edits, {**SIZE, "references_optional": True})


def test_from_scratch_draws_the_widened_unet_and_the_text_encoder(recipe, checkpoint, edits):
    fresh = make_recipe(checkpoint, edits, from_scratch=True, train_text_encoder=True)
    drawn, stored = fresh.trained(), recipe.trained()["unet"]
    assert set(drawn) == {"unet", "text_encoder"}
    for a, b in zip(jax.tree.leaves(drawn["unet"]), jax.tree.leaves(stored), strict=True):
        assert a.shape == b.shape
        assert not np.array_equal(a, b)
    assert drawn["unet"]["conv_in"]["kernel"].any(axis=(0, 1, 3)).all()
    assert not drawn["unet"]["conv_out"]["kernel"].any()


def test_a_text_to_image_unet_is_widened_and_an_editing_one_goes_on(
    recipe, checkpoint, edits, tmp_path
):
    kernel = recipe.trained()["unet"]["conv_in"]["kernel"]
    original = diffusax.DiffusionPipeline.from_pretrained(checkpoint).params["unet"]["conv_in"]
    np.testing.assert_array_equal(kernel[:, :, :4], original["kernel"])
    assert kernel.shape[2] == 8
    assert not kernel[:, :, 4:].any()
    shapes = jax.tree.map(lambda x: x.shape, recipe.shapes())
    assert jax.tree.map(lambda x: x.shape, recipe.trained()) == shapes

    wide = build_stable_diffusion(
        tmp_path / "wide",
        unet={"in_channels": 8},
        pipeline_class=diffusers.StableDiffusionInstructPix2PixPipeline,
    )
    kernel = make_recipe(tmp_path / "wide", edits).trained()["unet"]["conv_in"]["kernel"]
    expected = wide.unet.conv_in.weight.detach().permute(2, 3, 1, 0)
    np.testing.assert_array_equal(kernel, expected)


def test_dropped_conditions_are_the_empty_text_and_no_picture(recipe):
    batch = next(Batches(recipe.source, recipe.example, batch_size=4, seed=0))
    trained, frozen = recipe.trained(), recipe.frozen()
    kernel = trained["unet"]["conv_in"]["kernel"]
    random = np.random.default_rng(0).standard_normal(kernel.shape, np.float32)
    trained["unet"]["conv_in"]["kernel"] = kernel + 0.1 * random
    keys = jax.vmap(jax.random.key)(jnp.arange(4))
    draws = recipe.denoising.draw(batch, keys)
    loss = jax.jit(recipe.denoising.with_draws)

    def losses(batch, text, image):
        dropped = draws.dropped._replace(text=np.array(text), image=np.array(image))
        return np.asarray(loss(trained, frozen, batch, draws._replace(dropped=dropped)))

    none, masks = [False] * 4, ([False, True, True, False], [False, False, True, True])
    empty = {**batch, "input_ids": np.broadcast_to(frozen["empty"]["input_ids"], (4, 77))}
    whole, dropped = losses(batch, none, none), losses(batch, *masks)
    assert whole[0] == dropped[0]
    assert (np.abs(whole - dropped)[1:] > 1e-6).all()
    np.testing.assert_allclose(losses(empty, none, none)[1], dropped[1], rtol=1e-6)
    grey = {**batch, "original_pixel_values": np.zeros((4, 32, 32, 3), np.uint8)}
    same = losses(grey, *masks)
    np.testing.assert_allclose(same[2:], dropped[2:], rtol=1e-6)
    assert abs(same[1] - dropped[1]) > 1e-6


@pytest.mark.slow
def test_validation_shows_each_picture_before_and_after(recipe, photo):
    images = recipe.validate(recipe.trained(), recipe.frozen())
    pixels = [np.asarray(image)[:32] for image in images]
    assert [p.shape[:2] for p in pixels] == [(32, 64)] * 2
    # Beneath stands the instruction.
    assert all((np.asarray(image)[32:] < 128).any() for image in images)
    before = pixels[0][:, :32]
    np.testing.assert_array_equal(before, pixels[1][:, :32])
    whole = Image.open(photo).resize((38, 32), Image.Resampling.LANCZOS)
    np.testing.assert_array_equal(before, np.asarray(whole)[:, 3:35])
    assert not np.array_equal(*pixels)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"validation": {"images": ("a", "b")}}, "validation.images must be one or as many as"),
        ({"validation": {"prompts": ("a",)}}, r"must be one or as many as .* \(got 0 for 1\)"),
        ({"conditioning_dropout": 0.4}, "conditioning_dropout must be a number from 0 up to 0.33"),
        (
            {"data": {"edited_image_column": "after"}},
            "has no column 'after'; it has edit_prompt, edited_",
        ),
    ],
)
def test_options_that_do_not_go_together_show_before_the_training(
    checkpoint, edits, options, message
):
    with pytest.raises(ValueError, match=message):
        make_recipe(checkpoint, edits, **options)


def test_other_unets_are_refused(tiny_checkpoints, edits):
    folder, _ = tiny_checkpoints.pipeline("sd-inpaint")
    with pytest.raises(ValueError, match=r"needs a denoiser with 4 or 8 input channels; .* has 9"):
        make_recipe(folder, edits)


def start(checkpoint, edits, photo, output) -> subprocess.Popen:
    """A run of eight steps from the command line."""
    args = ["--model", checkpoint, "--data.path", edits, "--output", output]
    args += ["--data.resolution", 32]
    args += ["--steps", 8, "--batch-size", 4, "--optimizer.learning-rate", 1e-3, "--log-every", 1]
    args += ["--checkpoint-every", 3, "--ema.rule", "ramp", "--compute-dtype", "float32"]
    args += ["--validation.every", 4, "--validation.prompts", *PROMPTS]
    args += ["--validation.images", photo, "--validation.steps", 2]
    return subprocess.Popen(
        [sys.executable, "-m", "diffusax", "train", "instruct-pix2pix", *map(str, args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen) -> None:
    text, _ = process.communicate(timeout=240)
    assert process.returncode == 0, text[-3000:]


@pytest.fixture(scope="module")
def run(tmp_path_factory, checkpoint, edits, photo):
    output = tmp_path_factory.mktemp("run")
    finish(start(checkpoint, edits, photo, output))
    return output


def load(output, name):
    pipe = diffusers.DiffusionPipeline.from_pretrained(output / name, safety_checker=None)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.mark.slow
@pytest.mark.parametrize("name", ["model", "model_ema"])
def test_pytorch_diffusers_opens_the_result_and_edits_the_same(run, photo, name):
    reference = load(run, name)
    assert type(reference) is diffusers.StableDiffusionInstructPix2PixPipeline
    assert reference.unet.conv_in.weight[:, 4:].abs().min() > 0
    ours = diffusax.DiffusionPipeline.from_pretrained(run / name)
    pictures = []
    for pipe in (reference, ours):
        generator = torch.Generator().manual_seed(0)
        result = pipe(
            "make it snowy",
            image=Image.open(photo),
            num_inference_steps=4,
            generator=generator,
            output_type="np",
        )
        pictures.append(result.images[0])
    assert pictures[0].std() > 0.03
    np.testing.assert_allclose(pictures[1], pictures[0], atol=1e-4)
    card = (run / name / "README.md").read_text()
    assert "pipeline_tag: image-to-image" in card
    assert 'pipe("make it snowy", image="photo.png")' in card


@pytest.mark.slow
def test_validation_sheets_stand_beside_the_logs(run):
    for step in (4, 8):
        sheet = Image.open(run / "validation" / f"validation-{step:07}.png")
        # Two pairs side by side with a gap of four pixels.
        assert sheet.width == 2 * 64 + 4
        assert sheet.height > 32


@pytest.mark.slow
def test_a_killed_run_ends_in_the_same_bits(run, checkpoint, edits, photo, tmp_path):
    killed = start(checkpoint, edits, photo, tmp_path)
    wait_for(killed, lambda: max(steps_logged(tmp_path), default=0) >= 5)
    killed.kill()
    killed.communicate()
    assert max(steps_logged(tmp_path)) < 8
    finish(start(checkpoint, edits, photo, tmp_path))
    assert steps_logged(tmp_path) == list(range(1, 9))
    for name in ("model", "model_ema"):
        file = f"{name}/unet/diffusion_pytorch_model.safetensors"
        assert (tmp_path / file).read_bytes() == (run / file).read_bytes()


def test_the_recipe_is_also_called_edit():
    given = ["--model", "x", "--data.path", "y", "--output", "z"]
    assert train_command(["edit", *given]) == train_command(["instruct-pix2pix", *given])
