"""Caches of edits whose rows differ: in images to look at, in sizes, in texts that read these."""

import json

import jax
import numpy as np
import pytest
from support.data_sets import picture
from support.qwen_edits import PLUS, make_areas_smaller
from support.tiny_transformers import klein_pipeline, qwen_image21_pipeline, qwen_image_pipeline

from diffusax.training import (
    CacheConfig,
    CacheDataConfig,
    EditDataConfig,
    InstructPix2PixConfig,
    cache_latents,
    instruct_pix2pix,
    train,
)
from diffusax.training.step.draws import Dropped
from diffusax.training.step.encoding import original_names

SMALL, WIDE = ("24x24", "40x24"), ("64x64", "96x64")
FAMILIES = {
    "klein": (lambda folder: klein_pipeline(folder, layers=28), ("32x32", "48x32")),
    "qwen-image-edit-plus": (lambda folder: qwen_image_pipeline(folder, PLUS), SMALL),
    "qwen-image21": (qwen_image21_pipeline, WIDE),
}
LARGER = ("96x96", "128x32")
OWN = {"reference_size": "own", "reference_resolution": 64, "reference_shapes": 2}


@pytest.fixture(autouse=True)
def small_areas(monkeypatch):
    make_areas_smaller(monkeypatch.setattr)


def write_edits(folder, sizes, counts):
    """An edit for each number of images to look at, in the sizes by turns."""
    folder.mkdir()
    lines = []
    for i, count in enumerate(counts):
        width, height = map(int, sizes[i // 2 % 2].split("x"))
        names = [f"{i}_{k}.png" for k in range(1 + count)]
        for k, name in enumerate(names):
            picture(9 * i + k, (width, height)).save(folder / name)
        controls = {f"control_path_{k}": name for k, name in enumerate(names[1:])}
        lines.append({"image_path": names[0], "caption": f"edit {i}", **controls})
    (folder / "all.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(folder)


def config_of(tmp_path, data, **options):
    options = {"batch_size": 2, "compute_dtype": "float32", **options}
    return InstructPix2PixConfig(model=str(tmp_path / "model"), data=data, **options)


def losses_of(recipe) -> dict[tuple[str, int, bool], float]:
    """The loss of each row by what is left out of it: nothing, its caption, its images."""
    trained, frozen, found = recipe.trained(), recipe.frozen(), {}
    shapes = jax.tree.map(lambda x: (np.shape(x), str(np.asarray(x).dtype)), frozen)
    wanted = jax.tree.map(lambda x: (x.shape, str(x.dtype)), recipe.frozen_shapes())
    assert shapes == wanted

    @jax.jit
    def loss(batch, draws, dropped):
        own = draws._replace(dropped=Dropped(dropped, np.zeros(1, bool)))
        return recipe.denoising.with_draws(trained, frozen, batch, own)

    for i in range(len(recipe.source)):
        example = recipe.example(recipe.source[i], np.random.default_rng(0))
        bucket = recipe.source.buckets.name(recipe.source.buckets.of_row[i])
        for step in (None, 0):
            kept, name = recipe.choose(example, bucket, step)
            assert name == (bucket if step is None else f"{bucket.partition('+')[0]}+0")
            assert bool(original_names(kept)) == (not name.endswith("+0"))
            batch = {name: values[None] for name, values in kept.items()}
            draws = recipe.denoising.draw(batch, jax.random.key(1)[None])
            for dropped in (False, True):
                value = loss(batch, draws, np.array([dropped]))[0]
                found[f"{bucket} as {name}", dropped] = float(value)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "sized"), [*((name, {}) for name in FAMILIES), ("qwen-image21", OWN)]
)
def test_a_cache_has_the_losses_of_images_whatever_is_left_out(tmp_path, family, sized):
    make, sizes = FAMILIES[family]
    sizes = LARGER if sized else sizes
    make(tmp_path / "model")
    path, folder = write_edits(tmp_path / "data", sizes, (0, 1, 2)), str(tmp_path / "cache")
    options = {"buckets": sizes, "references_optional": True, "random_flip": False}
    options |= {"reference_dropout": 1.0, **sized}
    given, model = CacheDataConfig(path, **options), str(tmp_path / "model")
    assert cache_latents(CacheConfig("edit", model, folder, text_embeddings=True, data=given)) == 3
    images, cached = (
        instruct_pix2pix(config_of(tmp_path, data))
        for data in (EditDataConfig(path, **options), EditDataConfig(folder, reference_dropout=1.0))
    )
    first, second = sizes
    names = [f"{first}+0", f"{first}+1", f"{second}+2"]
    if sized:
        names = [f"{first}+0", f"{first}+64x64", f"{second}+128x32+128x32"]
    assert [cached.source.buckets.name(i) for i in cached.source.buckets.of_row] == names
    assert cached.frozen().keys() <= {"transformer", "empty", "statistics"}
    expected, found = losses_of(images), losses_of(cached)
    assert expected.keys() == found.keys()
    # The caption, the images, and both, change what is predicted.
    assert len({*expected.values()}) == 10
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, err_msg=str(name))


@pytest.mark.slow
def test_a_cache_without_the_texts_alone_leaves_out_no_images(tmp_path):
    make, sizes = FAMILIES["qwen-image-edit-plus"]
    make(tmp_path / "model")
    path, folder = write_edits(tmp_path / "data", sizes, (1, 1)), str(tmp_path / "cache")
    data = CacheDataConfig(path, resolution=24)
    options = {"model": str(tmp_path / "model"), "output": folder, "data": data}
    cache_latents(CacheConfig("edit", text_embeddings=True, **options))
    with pytest.raises(ValueError, match=r"needs the texts of .* without their images, too; write"):
        instruct_pix2pix(config_of(tmp_path, EditDataConfig(folder, reference_dropout=0.1)))


@pytest.mark.slow
def test_embeddings_may_be_half_as_long(tmp_path):
    make, sizes = FAMILIES["qwen-image-edit-plus"]
    make(tmp_path / "model")
    path, losses = write_edits(tmp_path / "data", sizes, (1,)), []
    options = {"recipe": "edit", "model": str(tmp_path / "model"), "text_embeddings": True}
    options["data"] = CacheDataConfig(path, resolution=24, random_flip=False)
    for dtype in ("float32", "bfloat16"):
        folder = str(tmp_path / dtype)
        cache_latents(CacheConfig(**options, output=folder, text_dtype=dtype))
        recipe = instruct_pix2pix(config_of(tmp_path, EditDataConfig(folder)))
        assert recipe.source.dtypes["encoder_hidden_states"] == dtype
        assert recipe.source.dtypes["moments"] == "float32"
        batch = {name: values[None] for name, values in recipe.source[0].items()}
        frozen = recipe.frozen()
        assert frozen["empty"]["encoder_hidden_states"].dtype == np.float32
        loss = jax.jit(recipe.loss)(recipe.trained(), frozen, batch, jax.random.key(1)[None])
        losses.append(float(loss[0]))
    assert 0 < abs(losses[1] - losses[0]) < 1e-2 * losses[0]


@pytest.mark.slow
def test_masks_weigh_the_edited_image_alone(tmp_path):
    make, _ = FAMILIES["klein"]
    make(tmp_path / "model")
    path, folder = write_edits(tmp_path / "data", ("32x32", "32x32"), (1, 2)), str(tmp_path / "c")
    for i in range(2):
        picture(70 + i, (32, 32)).save(tmp_path / "data" / f"{i}_mask.png")
    file = tmp_path / "data" / "all.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    lines = [{**line, "mask": f"{i}_mask.png"} for i, line in enumerate(lines)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = {"resolution": 32, "random_flip": False, "mask_column": "mask"}
    given, model = CacheDataConfig(path, **options), str(tmp_path / "model")
    cache_latents(CacheConfig("edit", model, folder, text_embeddings=True, data=given))
    found = []
    for data in (EditDataConfig(path, **options), EditDataConfig(folder)):
        recipe = instruct_pix2pix(config_of(tmp_path, data))
        trained, frozen = recipe.trained(), recipe.frozen()
        example = recipe.example(recipe.source[0], np.random.default_rng(0))
        batch = {name: values[None] for name, values in example.items()}
        weights = batch["loss_weights"]
        np.testing.assert_allclose(weights.mean(), 1, rtol=1e-5)
        loss = jax.jit(recipe.loss)
        key = jax.random.key(1)[None]
        # A place at a time: each error counts for its own weight.
        places = np.eye(weights.size, dtype=np.float32).reshape(-1, *weights.shape)
        each = [loss(trained, frozen, {**batch, "loss_weights": one}, key)[0] for one in places]
        whole = loss(trained, frozen, batch, key)[0]
        np.testing.assert_allclose(whole, np.dot(weights.ravel(), np.array(each)), rtol=1e-5)
        plain = loss(trained, frozen, {**batch, "loss_weights": np.ones_like(weights)}, key)[0]
        assert abs(whole - plain) > 1e-4
        found.append(whole)
    np.testing.assert_allclose(*found, rtol=1e-5)


@pytest.mark.slow
def test_a_run_that_leaves_out_images_is_killed_twice_and_ends_in_the_same_bits(tmp_path):
    make, _ = FAMILIES["klein"]
    make(tmp_path / "model")
    path = write_edits(tmp_path / "data", ("32x32", "32x32"), (1, 2, 0, 1, 2, 2, 1, 0))
    given = CacheDataConfig(path, resolution=32, references_optional=True)
    model, folder = str(tmp_path / "model"), str(tmp_path / "cache")
    cache_latents(CacheConfig("edit", model, folder, text_embeddings=True, data=given))
    data = EditDataConfig(folder, reference_dropout=0.5)

    def run(output, steps):
        config = config_of(
            tmp_path,
            data,
            output=str(tmp_path / output),
            steps=steps,
            checkpoint_every=2,
            conditioning_dropout=0.3,
        )
        recipe, taken = instruct_pix2pix(config), []
        choose = recipe.choose

        def noted(examples, size, step):
            kept, name = choose(examples, size, step)
            taken.append((step, size, name))
            return kept, name

        recipe.choose = noted
        return jax.tree.leaves(train(recipe, config).params), [t for t in taken if t[0] is not None]

    whole, taken = run("whole", 7)
    part = [run("part", steps) for steps in (2, 5, 7)]
    assert all(np.array_equal(a, b) for a, b in zip(whole, part[-1][0], strict=True))
    assert [one for _, own in part for one in own] == taken
    assert {size != name for _, size, name in taken} == {True, False}
