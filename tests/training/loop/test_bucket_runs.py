"""Runs on images of several sizes: compilations, bits, processes, caches, validation."""

import json
import signal
import subprocess
import sys

import diffusers
import jax
import numpy as np
import pytest
from PIL import Image
from support.data_sets import edit_row, picture, png, row, write_parquet
from support.effort import first
from support.runs.toy_run import BucketedToy, Toy
from support.training_runs import (
    TOY,
    finish,
    finish_both,
    results,
    start,
    start_both,
    steps_logged,
    train_in_two_processes,
    wait_for,
)

from diffusax.runtime.devices.mesh import make_mesh
from diffusax.training import (
    CacheConfig,
    CacheDataConfig,
    CaptionedDataConfig,
    ControlDataConfig,
    ControlNetConfig,
    DreamBoothConfig,
    DreamBoothDataConfig,
    EditDataConfig,
    InstructPix2PixConfig,
    TextToImageConfig,
    TrainConfig,
    cache_latents,
    controlnet,
    dreambooth,
    instruct_pix2pix,
    read_config,
    text_to_image,
    train,
)
from diffusax.training.data.batches import Batches
from diffusax.training.data.buckets import SIZE
from diffusax.training.loop import loop
from diffusax.training.loop.program import abstract_arguments, compile_in_background
from diffusax.training.loop.signals import Interrupted, Preempted

SHAPES = [(40, 32), (32, 40), (60, 24), (36, 36)]
BUCKETS = ("32x32", "40x24", "24x40")


@pytest.fixture(scope="module")
def shaped(tmp_path_factory):
    """Twenty pictures of four shapes with captions, in Parquet."""
    rows = [row(i, size=SHAPES[i % 4]) for i in range(20)]
    return write_parquet(tmp_path_factory.mktemp("shaped"), rows)


def toy_config(folder, **options) -> TrainConfig:
    return TrainConfig(
        **{"output": str(folder), "steps": 24, "batch_size": 8, "log_every": 1, "report_to": ()},
        **options,
    )


def test_each_size_is_compiled_once_the_largest_first(tmp_path, monkeypatch, capsys):
    compiled = []
    compile_in_background = loop.compile_in_background

    def counting(lowered, tick):
        compiled.append(lowered.args_info[0][2]["x"].shape[1:3])
        return compile_in_background(lowered, tick)

    monkeypatch.setattr(loop, "compile_in_background", counting)
    train(BucketedToy(), toy_config(tmp_path, peak_tflops=1.0))
    assert compiled[0] == (2, 2)
    assert sorted(compiled) == [(1, 2), (2, 2), (3, 1)]
    said = capsys.readouterr().err
    assert all(f"compiling {size}" in said for size in ("2x2", "2x1", "1x3"))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 24
    assert all(line["tflops"] > 0 for line in lines)


def test_stopped_while_a_later_size_compiles_it_goes_on_to_the_same_bits(tmp_path, monkeypatch):
    whole = train(BucketedToy(), toy_config(tmp_path / "whole"))
    sizes = []

    def stopped(lowered, tick):
        sizes.append(lowered)
        if len(sizes) == 3:
            raise Interrupted(signal.SIGTERM)
        return compile_in_background(lowered, tick)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "compile_in_background", stopped)
        with pytest.raises(Preempted, match="saved at step"):
            train(BucketedToy(), toy_config(tmp_path / "stopped"))
    again = train(BucketedToy(), toy_config(tmp_path / "stopped"))
    kernels = (np.asarray(state.params["w"]["kernel"]) for state in (whole, again))
    np.testing.assert_array_equal(*kernels)


def test_one_size_trains_to_the_same_bits_as_no_buckets(tmp_path):
    class Plain(Toy):
        """Examples of one size, without buckets."""

        def example(self, row, rng):
            return BucketedToy.example(self, {**row, SIZE: (2, 1)}, rng)

        def loss(self, trained, frozen, batch, keys):
            return Toy.loss(self, trained, frozen, {"x": batch["x"].mean((1, 2))}, keys)

    kernels = []
    for name, recipe in (("plain", Plain()), ("one", BucketedToy(((2, 1),)))):
        state = train(recipe, toy_config(tmp_path / name))
        kernels.append(np.asarray(state.params["w"]["kernel"]))
    np.testing.assert_array_equal(*kernels)


@pytest.mark.parametrize("kind", first(["edits", "text", "control"]))
def test_one_size_makes_the_examples_of_no_buckets(checkpoint, tmp_path, kind):
    make, config, data = {
        "text": (text_to_image, TextToImageConfig, CaptionedDataConfig),
        "edits": (instruct_pix2pix, InstructPix2PixConfig, EditDataConfig),
        "control": (controlnet, ControlNetConfig, ControlDataConfig),
    }[kind]
    rows = [{**row(i), **edit_row(i), "conditioning_image": png(picture(i + 50))} for i in range(6)]
    write_parquet(tmp_path, rows)
    start, results = {}, []
    if kind == "control":
        unet = diffusers.UNet2DConditionModel.from_pretrained(checkpoint, subfolder="unet")
        # The tiny checkpoint has four pixels per latent.
        net = diffusers.ControlNetModel.from_unet(
            unet, conditioning_embedding_out_channels=(8, 12, 16)
        )
        net.save_pretrained(tmp_path / "controlnet")
        start["controlnet"] = str(tmp_path / "controlnet")
    for options in ({"resolution": 32}, {"buckets": ("32x32",)}):
        given = data(str(tmp_path), random_flip=True, **options)
        recipe = make(config(model=str(checkpoint), data=given, **start))
        run = Batches(recipe.source, recipe.example, batch_size=4, seed=0)
        results.append([next(run) for _ in range(3)])
    for a, b in zip(*results, strict=True):
        assert a.keys() == b.keys()
        for name, value in a.items():
            np.testing.assert_array_equal(value, b[name], err_msg=name)


def test_each_image_is_cut_to_its_size_and_a_topology_is_asked_for_the_largest(checkpoint, shaped):
    config = TextToImageConfig(
        model=str(checkpoint),
        batch_size=8,
        data=CaptionedDataConfig(str(shaped), buckets=("20x16", *BUCKETS)),
    )
    recipe = text_to_image(config)
    rng = np.random.default_rng(0)
    shapes = [recipe.example(recipe.source[i], rng)["pixel_values"].shape for i in range(4)]
    assert shapes == [(16, 20, 3), (32, 32, 3), (24, 40, 3), (32, 32, 3)]
    mesh = make_mesh("data=1", devices=jax.local_devices()[:1])
    _, _, batch = abstract_arguments(recipe, config, mesh)
    assert batch["pixel_values"].shape == (8, 32, 32, 3)


@pytest.mark.parametrize("prior", ["", "a thing"])
def test_pairs_of_dreambooth_have_the_size_of_the_subjects_picture(checkpoint, shaped, prior):
    data = DreamBoothDataConfig(str(shaped), buckets=("24x40", "40x24"))
    config = DreamBoothConfig(
        model=str(checkpoint), data=data, instance_prompt="sks thing", class_prompt=prior
    )
    recipe = dreambooth(config, generate=False)
    run = Batches(recipe.source, recipe.example, batch_size=4, seed=0)
    shapes = {next(run)["pixel_values"].shape for _ in range(8)}
    pair = (2,) if prior else ()
    assert shapes == {(4, *pair, 24, 40, 3), (4, *pair, 40, 24, 3)}


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        (["validation.height=30"], r"validation.height must be divisible by 4.*use 28 or 32"),
        (["data.buckets=[30x32]"], r"data.buckets must have sides divisible by 4.*use 28x32"),
    ],
)
def test_sizes_that_cannot_be_are_one_sentence(checkpoint, shaped, pairs, message):
    given = [f"model={checkpoint}", f"data.path={shaped}"]
    with pytest.raises(ValueError, match=message):
        text_to_image(read_config(TextToImageConfig, None, [*given, *pairs]))


@pytest.mark.slow
def test_killed_in_the_middle_of_an_epoch_it_goes_on_to_the_same_bits(tmp_path):
    options = ("bucketed=true", "steps=40")
    finish(start(tmp_path / "whole", *options))
    run = tmp_path / "killed"
    for until in (7, 19):
        killed = start(run, *options)
        wait_for(killed, lambda until=until: max(steps_logged(run), default=0) >= until)
        killed.kill()
        killed.wait()
    finish(start(run, *options))
    assert steps_logged(run) == list(range(1, 41))
    expected = results(tmp_path / "whole")
    for name, array in results(run).items():
        np.testing.assert_array_equal(array, expected[name])


@pytest.mark.slow
def test_two_processes_train_on_the_batches_of_one(tmp_path):
    train_in_two_processes(tmp_path / "two", "bucketed=true")
    done = subprocess.run([sys.executable, str(TOY), str(tmp_path / "one"), "bucketed=true"])
    assert done.returncode == 0
    losses = {}
    for run in ("one", "two"):
        lines = (tmp_path / run / "metrics.jsonl").read_text().splitlines()
        losses[run] = [json.loads(line)["loss"] for line in lines]
    assert len(losses["one"]) == 24
    np.testing.assert_allclose(losses["two"], losses["one"], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "embedded"), [("sd", False), ("xl", False), ("xl", True)])
def test_a_cache_in_buckets_gives_the_same_losses(
    tiny_checkpoints, shaped, tmp_path, family, embedded
):
    folder, _ = tiny_checkpoints.pipeline(family)
    data = CacheDataConfig(str(shaped), buckets=BUCKETS, center_crop=True)
    output = str(tmp_path / "cache")
    config = CacheConfig(
        model=str(folder), data=data, output=output, batch_size=4, text_embeddings=embedded
    )
    assert cache_latents(config) == 20
    recipes = [
        text_to_image(
            TextToImageConfig(
                model=str(folder), data=given, compute_dtype="float32", caption_dropout=0.0
            )
        )
        for given in (
            CaptionedDataConfig(str(shaped), buckets=BUCKETS, center_crop=True),
            CaptionedDataConfig(output),
        )
    ]
    plain, cached = recipes
    assert cached.source.buckets.counts.tolist() == [15, 5]
    assert {plain.source.buckets.name(b) for b in plain.source.buckets.of_row} == {
        cached.source.buckets.name(b) for b in cached.source.buckets.of_row
    }
    rng = np.random.default_rng(0)
    elements = [[r.example(r.source[i], rng) for i in range(20)] for r in recipes]
    # A cache has the rows of each size after those of the last.
    order = np.argsort(plain.source.buckets.of_row, kind="stable").tolist()
    keys = jax.vmap(jax.random.key)(np.arange(2))
    for rows in ([2, 6], [0, 7]):
        chosen = [elements[0][i] for i in rows]
        theirs = [elements[1][order.index(i)] for i in rows]
        assert ("input_ids" in theirs[0]) is not embedded
        losses = [
            jax.jit(r.denoising)(
                r.trained(),
                r.frozen(),
                {k: np.stack([e[k] for e in batch]) for k in batch[0]},
                keys,
            )
            for r, batch in zip(recipes, (chosen, theirs), strict=True)
        ]
        np.testing.assert_allclose(*losses, rtol=1e-5)
    run = Batches(cached.source, cached.example, batch_size=4, seed=0)
    seen = {next(run)["moments"].shape[1:3] for _ in range(10)}
    assert seen == {(8, 8), (6, 10)}


@pytest.mark.slow
def test_two_processes_cache_sizes_of_which_one_has_only_broken_rows(tiny_checkpoints, tmp_path):
    folder, _ = tiny_checkpoints.pipeline("sd")
    # The second and the fourth row are wide: of them the first process has the broken one.
    rows = [row(i, size=SHAPES[2 if i in (1, 3) else 3]) for i in range(100)]
    broken = rows[1]["image"]
    rows[1]["image"] = {**broken, "bytes": broken["bytes"][: len(broken["bytes"]) // 2]}
    data = write_parquet(tmp_path / "data", rows)
    options = [
        *("--model", str(folder), "--data.path", str(data), "--output", str(tmp_path / "cache")),
        *("--data.buckets", "32x32", "40x24", "--batch-size", "50", "--distributed"),
    ]
    finish_both(start_both(["-m", "diffusax", "cache-latents", *options]))
    config = TextToImageConfig(model=str(folder), data=CaptionedDataConfig(str(tmp_path / "cache")))
    cached = text_to_image(config).source
    assert dict(zip(cached.buckets.sizes, cached.buckets.counts, strict=True)) == {
        (32, 32): 98,
        (24, 40): 1,
    }
    assert sorted({cached[i]["moments"].shape for i in range(99)}) == [(6, 10, 8), (8, 8, 8)]


@pytest.mark.slow
def test_a_model_trains_on_several_sizes_and_draws_at_another(checkpoint, shaped, tmp_path):
    options = [
        *(f"model={checkpoint}", f"data.path={shaped}", f"output={tmp_path}", "steps=4"),
        *("batch_size=4", "log_every=1", "report_to=[]", "compute_dtype=float32"),
        *("data.buckets=[32x32,40x24]", "validation.every=4", "validation.steps=1"),
        *("validation.prompts=[a dog]", "validation.height=32", "validation.width=64"),
    ]
    config = read_config(TextToImageConfig, None, options)
    train(text_to_image(config), config)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert all(np.isfinite(line["loss"]) for line in lines)
    sheet = Image.open(tmp_path / "validation" / "validation-0000004.png")
    assert sheet.width == 64
    assert 32 < sheet.height < 64
