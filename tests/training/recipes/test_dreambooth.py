"""The DreamBooth recipe: its pairs, its class's pictures, its results."""

import dataclasses
import json
import logging
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.numpy import load_file
from support.data_sets import picture
from support.many_devices import run_on_devices
from support.runs import RUNS
from support.training_runs import RUN, finish_both, start_both, train_on_devices

import diffusax
from diffusax.cli.console import main
from diffusax.cli.train import plain, read_recipe
from diffusax.lora.files import WEIGHT_NAME
from diffusax.training import (
    CacheConfig,
    CacheDataConfig,
    ControlNetConfig,
    DenoiserValidationConfig,
    DreamBoothConfig,
    DreamBoothDataConfig,
    EMAConfig,
    LoRAConfig,
    cache_latents,
    dreambooth,
    read_config,
    train,
)
from diffusax.training.data.batches import Batches
from diffusax.training.data.pairs import Repeated
from diffusax.training.loop.program import optimizer_of
from diffusax.training.recipes.class_images import ClassImages

INSTANCE, CLASS = "a photo of sks dog", "a photo of dog"


@pytest.fixture(scope="module")
def subject(tmp_path_factory):
    """Three pictures of a subject, without captions."""
    folder = tmp_path_factory.mktemp("subject")
    for i in range(3):
        picture(i).save(folder / f"{i}.png")
    return folder


@pytest.fixture(scope="module")
def dogs(tmp_path_factory):
    """Five pictures of its class."""
    folder = tmp_path_factory.mktemp("dogs")
    for i in range(5):
        picture(10 + i).save(folder / f"{i}.png")
    return folder


def options(checkpoint, subject, **changes) -> DreamBoothConfig:
    data = {"resolution": 32, "center_crop": True, **changes.pop("data", {})}
    given = {"instance_data": str(subject), "instance_prompt": INSTANCE, **changes}
    return DreamBoothConfig(
        model=str(checkpoint),
        compute_dtype="float32",
        data=DreamBoothDataConfig(**data),
        **given,
    )


def keys(n: int) -> jax.Array:
    return jax.vmap(jax.random.key)(jnp.arange(n))


def stacked(recipe, count: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    elements = [recipe.example(recipe.source[i], rng) for i in range(count)]
    return {name: np.stack([e[name] for e in elements]) for name in elements[0]}


def test_an_example_is_a_picture_of_the_subject_with_one_of_its_class(
    checkpoint, subject, dogs, caplog
):
    caplog.set_level("INFO", "diffusax.training")
    recipe = dreambooth(
        options(checkpoint, subject, class_prompt=CLASS, class_data=str(dogs), class_images=5)
    )
    assert len(recipe.source) == 5
    assert f"data: 3 rows of {subject}; columns image" in caplog.messages
    assert f"data: 5 rows of {dogs}, the class; columns image" in caplog.messages
    batch = stacked(recipe, 5)
    assert batch["pixel_values"].shape == (5, 2, 32, 32, 3)
    assert recipe.prompts == {"instance": INSTANCE, "class": CLASS}
    assert set(batch) == {"pixel_values", "prior"}
    np.testing.assert_array_equal(batch["prior"], [[False, True]] * 5)
    for i in range(5):
        for side, number in ((0, i % 3), (1, 10 + i)):
            cut = np.asarray(picture(number).crop((4, 0, 36, 32)))
            np.testing.assert_array_equal(batch["pixel_values"][i, side], cut)


def test_without_a_class_prompt_an_example_is_a_picture(checkpoint, subject, tmp_path):
    recipe = dreambooth(options(checkpoint, subject, output=str(tmp_path)))
    assert stacked(recipe, 3)["pixel_values"].shape == (3, 32, 32, 3)
    assert not list(tmp_path.iterdir())


def test_a_step_is_compiled_without_drawing_the_class(checkpoint, subject, tmp_path):
    config = options(checkpoint, subject, class_prompt=CLASS, output=str(tmp_path))
    recipe = dreambooth(config, generate=False)
    assert stacked(recipe, 1)["pixel_values"].shape == (1, 2, 32, 32, 3)
    assert not list(tmp_path.iterdir())


def test_captions_of_a_column_take_the_place_of_the_instance_prompt(checkpoint, tmp_path):
    for i in range(2):
        picture(i).save(tmp_path / f"{i}.png")
        (tmp_path / f"{i}.txt").write_text(f"sks dog, view {i}")
    recipe = dreambooth(options(checkpoint, tmp_path, data={"caption_column": "text"}))
    expected = [recipe.base.tokenize(f"sks dog, view {i}")["input_ids"] for i in range(2)]
    np.testing.assert_array_equal(stacked(recipe, 2)["input_ids"], expected)


def test_a_picture_without_a_caption_has_the_instance_prompt(checkpoint, tmp_path):
    captions = ["view 0", "", None, " ", ["", None], [], "view 6"]
    rows = [{"file_name": f"{i}.png", "text": text} for i, text in enumerate(captions)]
    # One whose column is missing.
    rows.append({"file_name": "7.png"})
    for row in rows:
        picture(0).save(tmp_path / row["file_name"])
    (tmp_path / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    recipe = dreambooth(options(checkpoint, tmp_path, data={"caption_column": "text"}))
    texts = ["view 0", *[INSTANCE] * 5, "view 6", INSTANCE]
    expected = [recipe.base.tokenize(text)["input_ids"] for text in texts]
    np.testing.assert_array_equal(stacked(recipe, 8)["input_ids"], expected)


def test_a_few_pictures_are_decoded_once(checkpoint, tmp_path):
    for i in range(3):
        picture(i).save(tmp_path / f"{i}.png")
    recipe = dreambooth(options(checkpoint, tmp_path))
    batches = Batches(recipe.source, recipe.example, batch_size=6, seed=0)
    before = next(batches)
    for file in tmp_path.iterdir():
        file.unlink()
    for _ in range(3):
        np.testing.assert_array_equal(
            np.unique(next(batches)["pixel_values"], axis=0),
            np.unique(before["pixel_values"], axis=0),
        )


def test_fewer_pictures_than_processes_are_repeated_also_in_workers(checkpoint, subject):
    source = Repeated(dreambooth(options(checkpoint, subject)).source, processes=8)
    assert len(source) == 9
    # A worker is a process of its own, which knows of no others.
    assert len(pickle.loads(pickle.dumps(source))) == 9
    take = {"batch_size": 1, "seed": 0, "process_count": 8}
    found = [
        next(Batches(source, lambda row, rng: {"x": np.zeros(1)}, process_index=i, **take))
        for i in range(8)
    ]
    assert all(batch["x"].shape == (1, 1) for batch in found)


def test_missing_class_pictures_are_drawn_and_those_there_stay(checkpoint, tmp_path):
    plan = ClassImages(str(checkpoint), CLASS, 32, steps=2, batch_size=2)
    whole, part = tmp_path / "whole", tmp_path / "part"
    plan.ensure(whole, 5)
    names = [f"class-{i:05}.png" for i in range(5)]
    assert sorted(f.name for f in whole.glob("*.png")) == names
    drawn = [(whole / name).read_bytes() for name in names]
    assert len(set(drawn)) == 5
    # A run that was stopped after the third, and that goes on.
    part.mkdir()
    for name in names[:3]:
        shutil.copy(whole / name, part)
    kept = (part / names[2]).stat().st_mtime_ns
    plan.ensure(part, 5)
    assert (part / names[2]).stat().st_mtime_ns == kept
    assert [(part / name).read_bytes() for name in names] == drawn
    # Pictures of one's own count.
    (part / names[4]).unlink()
    picture(0).save(part / "own.png")
    plan.ensure(part, 5)
    assert not (part / names[4]).exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"instance_data": ""}, "--instance-data must be given"),
        ({"instance_prompt": ""}, "have no captions; give instance_prompt"),
        ({"class_data": "dogs"}, "class_data='dogs' is not used .* give class_prompt"),
        ({"data": {"streaming": True}}, "leave it out of DreamBooth"),
    ],
)
def test_options_that_do_not_go_together(checkpoint, subject, changes, message):
    with pytest.raises(ValueError, match=message):
        dreambooth(options(checkpoint, subject, **changes))


def test_class_pictures_of_another_prompt_are_refused(checkpoint, subject, tmp_path):
    (tmp_path / "class.json").write_text('{"prompt": "a cat"}')
    with pytest.raises(ValueError, match=r"were generated with .*prompt='a cat'"):
        ClassImages(str(checkpoint), CLASS, 32, steps=1).ensure(tmp_path, 1)


@pytest.mark.parametrize("parts", [("", "class"), ("class", ""), ("", "")])
def test_a_folder_does_not_hold_the_other(checkpoint, tmp_path, parts):
    for i in range(2):
        (tmp_path / "class").mkdir(exist_ok=True)
        picture(i).save(tmp_path / "class" / f"{i}.png")
    folders = [str(tmp_path / part) for part in parts]
    given = {"class_prompt": CLASS, "class_data": folders[1], "class_images": 2}
    with pytest.raises(ValueError, match=r"hold each other, .* use two folders side by side"):
        dreambooth(options(checkpoint, folders[0], **given))


def test_the_data_has_two_names_of_which_one_is_given(checkpoint, subject, tmp_path, capsys):
    for name in ("instance_data", "data.path"):
        config = read_config(DreamBoothConfig, None, [f"{name}=a"])
        assert config.data_path == "a"
        assert read_recipe("dreambooth", [f"--{name.replace('_', '-')}", "a"]).data_path == "a"
    # What is given on the command line takes the place of what a file has under the same name.
    (tmp_path / "own.yaml").write_text("instance_data: a")
    args = ["--config", str(tmp_path / "own.yaml"), "--instance-data", "b"]
    assert read_recipe("dreambooth", args).data_path == "b"
    for args in (["--data.path", "b"], ["--set", "data.path=b"]):
        with pytest.raises(SystemExit):
            read_recipe("dreambooth", ["--instance-data", "a", *args])
        message = " ".join(capsys.readouterr().err.replace("│", "").split())
        assert "instance_data='a' and data.path='b' are two names of one option" in message
    recipe = dreambooth(options(checkpoint, subject))
    assert recipe.config.data.path == str(subject)


def test_what_is_no_folder_of_pictures_or_masks_is_said(checkpoint, subject):
    with pytest.raises(ValueError, match=r"0.png' is an image; give the folder that holds"):
        dreambooth(options(checkpoint, subject / "0.png"))
    for data in ({"mask_column": "mask"}, {"mask_column": "mask", "bucket_step": 8}):
        with pytest.raises(ValueError, match="name each by mask_file_name in a metadata"):
            dreambooth(options(checkpoint, subject, data=data))


BOTH = (DreamBoothConfig, ControlNetConfig)


@pytest.mark.parametrize(
    ("args", "rate", "kinds"),
    [
        ((), 5e-6, BOTH),
        (("--optimizer.warmup-steps", "0", "--optimizer.weight-decay", "0"), 5e-6, BOTH),
        (("--optimizer.learning-rate", "0.5"), 0.5, BOTH),
        (("--lora.rank", "4"), 1e-4, BOTH),
        (("--lora.path", "of_sks", "--optimizer.learning-rate", "1e-5"), 1e-5, BOTH),
        # A ControlNet is trained alone.
        (("--train-text-encoder", "--text-encoder-learning-rate", "1e-6"), 5e-6, BOTH[:1]),
    ],
)
def test_whole_networks_learn_more_slowly_by_default_than_loras(args, rate, kinds):
    for kind in kinds:
        name = "dreambooth" if kind is DreamBoothConfig else "controlnet"
        config = plain(read_recipe(name, list(args)), kind)
        optimizer = optimizer_of(config)
        params = {"unet": {"kernel": jnp.zeros(3)}}
        updates, _ = optimizer.update(
            jax.tree.map(jnp.ones_like, params), optimizer.init(params), params
        )
        # Adam's first update is the gradient's sign times the rate.
        np.testing.assert_allclose(updates["unet"]["kernel"], -rate, rtol=1e-4)


@pytest.mark.parametrize("prior", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_prompts_are_embedded_once_with_the_losses_of_encoders_in_the_step(
    checkpoint, subject, dogs, tmp_path, prior
):
    given = {"class_prompt": CLASS, "class_data": str(dogs), "class_images": 5} if prior else {}
    # Captions of the pictures' own are encoded in each step.
    for file in subject.iterdir():
        shutil.copy(file, tmp_path)
        (tmp_path / file.name).with_suffix(".txt").write_text(f"sks, {INSTANCE}")
    plain = dreambooth(options(checkpoint, tmp_path, data={"caption_column": "text"}, **given))
    once = dreambooth(options(checkpoint, subject, data={"trigger": "sks"}, **given))
    assert "text_encoder" in plain.frozen()
    found = once.frozen()
    assert set(found) == {"vae", "empty", "instance", *(["class"] if prior else [])}
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype.name), once.frozen_shapes())
    assert shapes == jax.tree.map(lambda x: (x.shape, x.dtype.name), found)
    losses = [
        jax.jit(r.loss)(r.trained(), r.frozen(), stacked(r, 3), keys(3)) for r in (plain, once)
    ]
    np.testing.assert_allclose(*losses, rtol=2e-6)


@pytest.mark.parametrize(
    "changes", [{"train_text_encoder": True}, {"data": {"shuffle_tags": True}}]
)
def test_prompts_that_change_are_encoded_in_the_step(checkpoint, subject, changes):
    recipe = dreambooth(options(checkpoint, subject, **changes))
    assert "text_encoder" in recipe.frozen() or changes == {"train_text_encoder": True}
    assert "input_ids" in stacked(recipe, 1)


@pytest.mark.slow
def test_encoders_stay_where_pictures_are_drawn_during_the_run(checkpoint, subject):
    validation = DenoiserValidationConfig(every=1, prompts=(INSTANCE,), steps=1)
    recipe = dreambooth(options(checkpoint, subject, validation=validation))
    frozen = recipe.frozen()
    assert {"text_encoder", "instance"} <= set(frozen)
    assert len(recipe.validate(recipe.trained(), frozen)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("own", [False, True])
def test_caches_with_text_embeddings_have_the_losses_of_pictures(
    checkpoint, subject, dogs, tmp_path, own
):
    """own: whether the embeddings of the subject's captions are used, not the instance prompt."""
    captioned = tmp_path / "captioned"
    shutil.copytree(subject, captioned)
    for i, file in enumerate(sorted(captioned.glob("*.png"))):
        file.with_suffix(".txt").write_text(f"sks dog, view {i}")
    caches = []
    for folder in (captioned, dogs):
        data = CacheDataConfig(str(folder), resolution=32, center_crop=True)
        caches.append(str(tmp_path / f"cache-{folder.name}"))
        cache_latents(
            CacheConfig(model=str(checkpoint), data=data, output=caches[-1], text_embeddings=True)
        )
    given = {"class_prompt": CLASS, "class_images": 5}
    data = {"caption_column": "text"} if own else {}
    plain = dreambooth(options(checkpoint, captioned, class_data=str(dogs), data=data, **given))
    config = DreamBoothConfig(
        model=str(checkpoint),
        compute_dtype="float32",
        instance_data=caches[0],
        instance_prompt="" if own else INSTANCE,
        class_data=caches[1],
        **given,
    )
    cached = dreambooth(config)
    frozen = cached.frozen()
    assert set(frozen) == {"empty", "class", *([] if own else ["instance"])}
    alone = {"class_prompt": "", "class_data": ""}
    without = [dreambooth(dataclasses.replace(r.config, **alone)) for r in (plain, cached)]
    for recipes, count in (((plain, cached), 5), (without, 3)):
        losses = [
            jax.jit(r.loss)(r.trained(), r.frozen(), stacked(r, count), keys(count))
            for r in recipes
        ]
        np.testing.assert_allclose(*losses, rtol=1e-5)


@pytest.mark.slow
def test_cached_latents_give_the_same_losses(checkpoint, subject, dogs, tmp_path, caplog):
    caplog.set_level("INFO", "diffusax.training")
    found = {}
    for name, folder in (("subject", subject), ("dogs", dogs)):
        data = CacheDataConfig(str(folder), resolution=32, center_crop=True)
        found[name] = str(tmp_path / name)
        cache_latents(CacheConfig(model=str(checkpoint), data=data, output=found[name]))
    given = {"class_prompt": CLASS, "class_images": 5}
    plain = dreambooth(options(checkpoint, subject, class_data=str(dogs), **given))
    config = options(checkpoint, found["subject"], class_data=found["dogs"], **given)
    data = DreamBoothDataConfig()
    cached = dreambooth(DreamBoothConfig(**{**vars(config), "data": data}))
    assert "vae" not in cached.frozen()
    assert f"data: 3 rows of {found['subject']}, latents; columns input_ids, moments" in caplog.text
    losses = [
        jax.jit(r.loss)(r.trained(), r.frozen(), stacked(r, 5), keys(5)) for r in (plain, cached)
    ]
    np.testing.assert_allclose(*losses, rtol=1e-5)
    with pytest.raises(ValueError, match="must both hold latents, or both images"):
        dreambooth(DreamBoothConfig(**{**vars(config), "data": data, "class_data": str(dogs)}))


def command(checkpoint, subject, output, *args: str) -> list[str]:
    size = ("--data.resolution", "32", "--compute-dtype", "float32", "--class-steps", "2")
    prompts = ("--instance-prompt", INSTANCE, "--class-prompt", CLASS, "--class-images", "40")
    return [
        *(sys.executable, "-m", "diffusax", "train", "dreambooth", "--model", str(checkpoint)),
        *("--instance-data", str(subject), "--output", str(output), *prompts, *size),
        *("--steps", "12", "--batch-size", "2", "--checkpoint-every", "4", "--log-every", "1"),
        *args,
    ]


def run(args: list[str]) -> None:
    done = subprocess.run(args, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def kill_once(args: list[str], condition) -> None:
    process = subprocess.Popen(args, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    limit = time.monotonic() + 120
    while not condition():
        assert process.poll() is None
        assert time.monotonic() < limit
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()


def contents(folder: Path, pattern: str) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob(pattern)}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, checkpoint, subject):
    output = tmp_path_factory.mktemp("uninterrupted")
    run(command(checkpoint, subject, output))
    return output


@pytest.mark.slow
def test_killed_while_class_pictures_are_drawn_and_while_training(
    checkpoint, subject, uninterrupted, tmp_path
):
    args = command(checkpoint, subject, tmp_path)
    kill_once(args, lambda: len(list((tmp_path / "class").glob("class-*.png"))) > 9)
    assert len(list((tmp_path / "class").glob("class-*.png"))) < 40
    kill_once(args, lambda: (tmp_path / "checkpoints" / "4").is_dir())
    run(args)
    assert contents(tmp_path / "class", "*.png") == contents(uninterrupted / "class", "*.png")
    assert len(contents(tmp_path / "class", "*.png")) == 40
    results = [
        load_file(folder / "model" / "unet" / "diffusion_pytorch_model.safetensors")
        for folder in (tmp_path, uninterrupted)
    ]
    for name, array in results[0].items():
        np.testing.assert_array_equal(array, results[1][name])


@pytest.mark.slow
def test_the_result_draws_the_same_in_pytorch(checkpoint, uninterrupted):
    last = (uninterrupted / "metrics.jsonl").read_text().splitlines()[-1]
    assert json.loads(last)["lr"] == pytest.approx(5e-6)
    folder = uninterrupted / "model"
    theirs = diffusers.StableDiffusionPipeline.from_pretrained(folder, safety_checker=None)
    before = diffusers.StableDiffusionPipeline.from_pretrained(checkpoint, safety_checker=None)
    assert not torch.equal(theirs.unet.conv_in.weight, before.unet.conv_in.weight)
    theirs.set_progress_bar_config(disable=True)
    latents = torch.randn((1, 4, 16, 16), generator=torch.Generator().manual_seed(0))
    call = {"num_inference_steps": 3, "output_type": "np"}
    ours = diffusax.DiffusionPipeline.from_pretrained(folder)
    np.testing.assert_allclose(
        ours(INSTANCE, latents=latents.numpy(), **call).images,
        theirs(INSTANCE, latents=latents, **call).images,
        atol=1e-4,
    )
    assert f"instance_prompt: {INSTANCE}" in (folder / "README.md").read_text()


@pytest.mark.slow
def test_a_lora_draws_the_same_in_pytorch(checkpoint, subject, uninterrupted, tmp_path):
    lora = ("--lora.rank", "4", "--train-text-encoder", "--optimizer.learning-rate", "1e-2")
    args = command(checkpoint, subject, tmp_path, *lora)
    run([*args, "--class-data", str(uninterrupted / "class")])
    folder = tmp_path / "model"
    theirs = diffusers.StableDiffusionPipeline.from_pretrained(checkpoint, safety_checker=None)
    theirs.set_progress_bar_config(disable=True)
    latents = torch.randn((1, 4, 16, 16), generator=torch.Generator().manual_seed(0))
    call = {"num_inference_steps": 3, "output_type": "np"}
    before = theirs(INSTANCE, latents=latents, **call).images
    theirs.load_lora_weights(folder)
    expected = theirs(INSTANCE, latents=latents, **call).images
    assert np.abs(expected - before).max() > 1e-2
    ours = diffusax.DiffusionPipeline.from_pretrained(checkpoint)
    ours.load_lora_weights(folder)
    images = ours(INSTANCE, latents=latents.numpy(), **call).images
    np.testing.assert_allclose(images, expected, atol=1e-4)


def with_class(checkpoint, subject, output, **changes) -> DreamBoothConfig:
    """Options of a short run of a LoRA that draws two pictures of the class."""
    drawn = {"class_prompt": CLASS, "class_images": 2, "class_steps": 1}
    run = {"output": str(output), "batch_size": 1, "report_to": (), "lora": LoRAConfig(rank=2)}
    return options(checkpoint, subject, **drawn, **run, **changes)


@pytest.mark.slow
def test_a_finished_run_draws_no_pictures_of_the_class_again(checkpoint, subject, tmp_path, caplog):
    config = with_class(checkpoint, subject, tmp_path, steps=2, checkpoint_every=1)
    train(dreambooth(config), config)
    shutil.rmtree(tmp_path / "class")
    with caplog.at_level(logging.INFO, "diffusax.training"):
        assert train(dreambooth(config), config).step == 2
    assert "is finished at step 2, and stays as it is" in caplog.text
    assert not (tmp_path / "class").exists()
    # Where that step has to be done again, they are drawn.
    file = max((tmp_path / "checkpoints" / "2").rglob("*"), key=lambda f: f.stat().st_size)
    file.write_bytes(b"damaged")
    with pytest.raises(ValueError, match=r"images of the class are missing .* start the same"):
        train(dreambooth(config), config)
    assert train(dreambooth(config), config).step == 2
    assert len(list((tmp_path / "class").glob("*.png"))) == 2
    shutil.rmtree(tmp_path / "class")
    longer = dataclasses.replace(config, steps=3)
    assert train(dreambooth(longer), longer).step == 3


@pytest.mark.slow
def test_an_average_made_afterwards_needs_no_pictures_of_the_class(checkpoint, subject, tmp_path):
    average = EMAConfig(rule="power", snapshot_every=2)
    config = with_class(checkpoint, subject, tmp_path, steps=4, ema=average)
    train(dreambooth(config), config)
    assert f'\npipe("{INSTANCE}").images' in (tmp_path / "model" / "README.md").read_text()
    shutil.rmtree(tmp_path / "class")
    main(["ema", str(tmp_path), "--length", "0.08"])
    assert not (tmp_path / "class").exists()
    made, last = (load_file(tmp_path / name / WEIGHT_NAME) for name in ("model_ema_0.08", "model"))
    assert made.keys() == last.keys()
    assert any((made[key] != last[key]).any() for key in made)


@pytest.mark.slow
def test_devices_and_processes_train_alike(checkpoint, tmp_path):
    # Each process has an order of its own, so that there is one picture of each kind.
    for i, kind in enumerate(("subject", "class")):
        (tmp_path / kind).mkdir()
        picture(i).save(tmp_path / kind / "0.png")
    pairs = ["recipe=dreambooth", f"instance_prompt={INSTANCE}", f"class_prompt={CLASS}"]
    pairs += [f"class_data={tmp_path / 'class'}", "class_images=1", "data.center_crop=true"]
    pairs += ["batch_size=8"]
    subject = tmp_path / "subject"
    expected = train_on_devices(tmp_path / "one", checkpoint, subject, 1, *pairs)
    assert abs(expected[-1] - expected[0]) > 1e-3
    split = (*pairs, "mesh=data=2,fsdp=2,tensor=2", "accumulate=2")
    result = train_on_devices(tmp_path / "eight", checkpoint, subject, 8, *split)
    np.testing.assert_allclose(result, expected, rtol=1e-4)
    command = [str(RUN), str(checkpoint), str(subject), str(tmp_path / "two"), *pairs]
    finish_both(start_both([*command, "mesh=data=2", "distributed=true"]), timeout=600)
    lines = (tmp_path / "two" / "metrics.jsonl").read_text().splitlines()
    np.testing.assert_allclose([json.loads(line)["loss"] for line in lines], expected, rtol=1e-5)


@pytest.mark.slow
def test_class_pictures_are_drawn_on_the_mesh_of_the_run(checkpoint, subject, tmp_path):
    script = RUNS / "class_pictures_run.py"
    shares, drawn = [], []
    for mesh in ("data=4", "fsdp=4"):
        shares += run_on_devices(script, str(checkpoint), str(tmp_path / mesh), mesh)
        files = sorted((tmp_path / mesh).glob("*.png"))
        drawn.append([np.asarray(Image.open(file), int) for file in files])
    assert float(shares[0]) == 1
    assert float(shares[1]) < 0.6
    # Devices add in another order.
    assert np.abs(np.subtract(*drawn)).max() <= 1
    config = options(checkpoint, subject, class_prompt=CLASS, output=str(tmp_path), mesh="fsdp=2")
    with pytest.raises(ValueError, match="does not fit"):
        dreambooth(config)


@pytest.mark.slow
def test_processes_share_the_drawing_of_class_pictures(checkpoint, subject, tmp_path):
    pairs = ["recipe=dreambooth", f"instance_prompt={INSTANCE}", f"class_prompt={CLASS}"]
    pairs += ["class_images=6", "class_batch_size=2", "class_steps=2", "batch_size=2", "steps=1"]
    train_on_devices(tmp_path / "one", checkpoint, subject, 1, *pairs)
    command = [str(RUN), str(checkpoint), str(subject), str(tmp_path / "two"), *pairs]
    finish_both(start_both([*command, "mesh=data=2", "distributed=true"]), timeout=600)
    drawn = [contents(tmp_path / run / "class", "*.png") for run in ("one", "two")]
    assert len(drawn[0]) == 6
    assert drawn[0] == drawn[1]
