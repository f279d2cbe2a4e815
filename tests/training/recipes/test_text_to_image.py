"""The text-to-image recipe: what its loss draws, drops, caches and recomputes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.data_sets import picture, row, write_parquet
from support.effort import first
from support.training_runs import keys, prepared

import diffusax
from diffusax.runtime.devices.mesh import make_mesh
from diffusax.training import (
    AutoencoderConfig,
    CacheConfig,
    CacheDataConfig,
    CaptionedDataConfig,
    DenoiserValidationConfig,
    TextToImageConfig,
    UnconditionalConfig,
    autoencoder,
    cache_latents,
    read_config,
    text_to_image,
    unconditional,
)
from diffusax.training.data.batches import Batches
from diffusax.training.loop.checkpoints import Checkpoints
from diffusax.training.loop.loop import _Run
from diffusax.training.loop.signals import TrainingStop
from diffusax.training.options import from_values
from diffusax.training.recipes.cached import is_cache


@pytest.fixture(scope="module")
def recipe(checkpoint, pictures):
    config = TextToImageConfig(
        model=str(checkpoint),
        data=prepared(pictures),
        compute_dtype="float32",
        caption_dropout=0.0,
    )
    return text_to_image(config)


@pytest.fixture(scope="module")
def batch(recipe):
    return next(Batches(recipe.source, recipe.example, batch_size=4, seed=0))


@functools.cache
def parameters(recipe) -> tuple:
    """What is trained and what is not, loaded once."""
    return recipe.trained(), recipe.frozen()


def losses(recipe, batch, **changes) -> np.ndarray:
    loss = dataclasses.replace(recipe.denoising, **changes)
    return np.asarray(jax.jit(loss)(*parameters(recipe), batch, keys()))


def test_an_example_has_pixels_and_tokens(recipe, batch):
    assert batch["pixel_values"].shape == (4, 32, 32, 3)
    assert batch["pixel_values"].dtype == np.uint8
    assert batch["input_ids"].shape == (4, 77)
    trained, frozen = parameters(recipe)
    assert set(trained) == {"unet"}
    assert set(frozen) == {"vae", "text_encoder", "empty"}
    jax.tree.map(
        lambda x, shape: np.testing.assert_equal(x.shape, shape.shape), trained, recipe.shapes()
    )
    jax.tree.map(lambda x: np.testing.assert_equal(x.dtype, np.float32), recipe.shapes())


@pytest.mark.slow
def test_gradient_checkpointing_changes_memory_and_not_gradients(recipe, batch):
    trained, frozen = parameters(recipe)

    def gradient(level: str):
        loss = dataclasses.replace(recipe.denoising, gradient_checkpointing=level)
        mean = lambda params: loss(params, frozen, batch, keys()).mean()  # noqa: E731
        return jax.grad(mean)

    programs = {}
    for level in ("none", "blocks", "full"):
        jaxpr = str(jax.make_jaxpr(gradient(level))(trained))
        programs[level] = jaxpr.count("remat") + jaxpr.count("checkpoint[")
    assert programs["none"] == 0 < programs["blocks"] < programs["full"]

    expected = jax.jit(gradient("none"))(trained)
    result = jax.jit(gradient("full"))(trained)
    for a, b in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_dropped_captions_are_the_empty_one(recipe, batch):
    ids = parameters(recipe)[1]["empty"]["input_ids"]
    empty = {**batch, "input_ids": np.broadcast_to(ids, (4, 77))}
    kept = losses(recipe, batch)
    dropped = losses(recipe, batch, caption_dropout=1.0)
    assert np.abs(kept - dropped).min() > 1e-6
    np.testing.assert_allclose(dropped, losses(recipe, empty), rtol=1e-6)


@pytest.mark.slow
def test_the_share_of_dropped_captions_and_the_timesteps_are_drawn_evenly(recipe):
    loss = dataclasses.replace(recipe.denoising, caption_dropout=0.25)
    many = {"moments": jnp.zeros((4000, 2, 2, 8))}
    draws = loss.draw(many, keys(4000))
    assert 0.22 < draws.dropped.text.mean() < 0.28
    assert draws.timesteps.min() < 5
    assert draws.timesteps.max() == 999 or draws.timesteps.max() > 990
    assert abs(draws.timesteps.mean() - 499.5) < 15
    biased = dataclasses.replace(loss, timestep_probabilities=np.eye(1000)[700]).draw(many, keys(9))
    assert set(np.asarray(biased.timesteps)) == {700}
    assert abs(draws.noise.std() - 1) < 0.01
    assert abs(np.corrcoef(draws.noise.ravel(), draws.latent_noise.ravel())[0, 1]) < 0.01


def test_offset_noise_has_a_mean_of_its_own_per_picture_and_channel(recipe):
    many = {"moments": jnp.zeros((500, 16, 16, 8))}
    means = {}
    for offset in (0.0, 0.5):
        loss = dataclasses.replace(recipe.denoising, noise_offset=offset)
        means[offset] = np.asarray(loss.draw(many, keys(500)).noise.mean((1, 2)))
    assert abs(means[0.0].std() - 1 / 16) < 0.01
    assert abs(means[0.5].std() - 0.5) < 0.05


@pytest.mark.slow
def test_bfloat16_computation_is_close_and_gradients_are_float32(recipe, batch):
    half = losses(recipe, batch, compute_dtype=jnp.bfloat16)
    np.testing.assert_allclose(half, losses(recipe, batch), rtol=0.1)
    loss = dataclasses.replace(recipe.denoising, compute_dtype=jnp.bfloat16)
    trained, frozen = parameters(recipe)
    gradient = jax.eval_shape(jax.grad(lambda p: loss(p, frozen, batch, keys()).mean()), trained)
    assert {x.dtype for x in jax.tree.leaves(gradient)} == {jnp.dtype("float32")}


@pytest.mark.slow
@pytest.mark.parametrize("embedded", [pytest.param(False, marks=pytest.mark.slow), True])
def test_cached_latents_give_the_same_losses(recipe, checkpoint, pictures, tmp_path, embedded):
    cache = CacheConfig(
        model=str(checkpoint),
        data=prepared(pictures, CacheDataConfig),
        output=str(tmp_path / "cache"),
        text_embeddings=embedded,
        batch_size=8,
    )
    assert cache_latents(cache) == 30
    config = TextToImageConfig(
        model=str(checkpoint),
        data=CaptionedDataConfig(cache.output),
        compute_dtype="float32",
        caption_dropout=0.0,
    )
    cached = text_to_image(config)
    _, frozen = parameters(cached)
    assert "vae" not in frozen
    assert ("text_encoder" in frozen) is not embedded
    rows = [29, 0, 8, 13]
    rng = np.random.default_rng(0)
    for dropout in (0.0, 1.0):
        results = []
        for r in (recipe, cached):
            elements = [r.example(r.source[i], rng) for i in rows]
            stacked = {k: np.stack([e[k] for e in elements]) for k in elements[0]}
            results.append(losses(r, stacked, caption_dropout=dropout))
        np.testing.assert_allclose(*results, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "embedded", "message"),
    first(
        [
            ("vae", False, "latents in .* are of another autoencoder"),
            ("text_encoder", True, "text embeddings in .* are of another text encoder"),
            ("text_encoder", False, None),
        ]
    ),
)
def test_a_cache_of_another_network_is_refused(
    checkpoint, pictures, tmp_path, name, embedded, message
):
    cache = CacheConfig(
        model=str(checkpoint),
        data=prepared(pictures, CacheDataConfig),
        output=str(tmp_path),
        text_embeddings=embedded,
    )
    cache_latents(cache)
    pipe = diffusax.DiffusionPipeline.from_pretrained(checkpoint)
    pipe.params[name] = jax.tree.map(lambda x: x * 1.1, pipe.params[name])
    pipe.save_pretrained(tmp_path / "other")
    config = TextToImageConfig(
        model=str(tmp_path / "other"), data=CaptionedDataConfig(str(tmp_path))
    )
    if message is None:
        text_to_image(config)
        return
    with pytest.raises(ValueError, match=message):
        text_to_image(config)


@pytest.mark.slow
def test_a_cache_leaves_out_a_broken_row_and_is_not_made_of_many(checkpoint, tmp_path, caplog):
    rows = [row(i) for i in range(250)]
    for i, broken in enumerate((7, 70, 170)):
        rows[broken]["image"]["bytes"] = b"not a picture"
        folder = write_parquet(tmp_path / f"data-{i}", rows)
        cache = CacheConfig(
            model=str(checkpoint),
            data=prepared(folder, CacheDataConfig),
            output=str(tmp_path / "cache"),
            batch_size=50,
        )
        if i < 2:
            assert cache_latents(cache) == 249 - i
            assert any(f"row {broken}" in message for message in caplog.messages)
        else:
            with pytest.raises(ValueError, match=r"3 of \d+ rows are broken, more than 1%"):
                cache_latents(cache)
            assert not is_cache(str(tmp_path / "cache"))


def test_from_scratch_draws_what_is_trained_and_keeps_the_rest(checkpoint, pictures):
    options = {"model": str(checkpoint), "data": prepared(pictures), "from_scratch": True}
    fresh = text_to_image(TextToImageConfig(**options))
    pipe = diffusax.DiffusionPipeline.from_pretrained(checkpoint)
    pairs = zip(jax.tree.leaves(fresh.trained()["unet"]), jax.tree.leaves(pipe.params["unet"]))
    assert all(not np.array_equal(a, b) for a, b in pairs)
    assert not fresh.trained()["unet"]["conv_out"]["kernel"].any()
    other = text_to_image(TextToImageConfig(**options, seed=1))
    kernel = lambda r: r.trained()["unet"]["conv_in"]["kernel"]  # noqa: E731
    assert not np.array_equal(kernel(fresh), kernel(other))


def test_another_prediction_type_is_trained_and_saved(checkpoint, pictures, tmp_path):
    recipe = text_to_image(
        TextToImageConfig(
            model=str(checkpoint), data=prepared(pictures), prediction_type="v_prediction"
        )
    )
    assert recipe.denoising.prediction_type == "v_prediction"
    recipe.save(recipe.trained(), tmp_path)
    saved = diffusax.DiffusionPipeline.from_pretrained(tmp_path)
    assert saved.scheduler.prediction_type == "v_prediction"


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        (
            ["data.resolution=30"],
            "data.resolution must be divisible by 4, the pixels per latent .* use 28",
        ),
        (["validation.every=5"], "every=5 has nothing to show; give validation.prompts"),
        (["validation.prompts=[a]"], "never shown; give validation.every"),
        (["data.path="], r"data\.path must be a text \(got None\)"),
        (["data.path=''"], "--data.path must be given"),
        (["model=''"], "--model must be given"),
        (["data.path=nopics"], "no file or folder 'nopics' here"),
    ],
)
def test_options_that_do_not_go_together_show_before_the_training(
    checkpoint, pictures, pairs, message
):
    given = [f"model={checkpoint}", f"data.path={pictures}"]
    with pytest.raises(ValueError, match=message):
        text_to_image(read_config(TextToImageConfig, None, [*given, *pairs]))


@pytest.mark.parametrize(
    ("make", "kind", "model"),
    [
        (text_to_image, TextToImageConfig, {}),
        (autoencoder, AutoencoderConfig, {}),
        # Without a model it is a new network.
        (unconditional, UnconditionalConfig, {"model": ""}),
    ],
)
def test_a_runs_own_pictures_are_no_data(checkpoint, tmp_path, make, kind, model):
    (tmp_path / "run" / "validation").mkdir(parents=True)
    for name in ("0.png", "1.png", "run/validation/0000100.png"):
        picture(0).save(tmp_path / name)
    options = {"model": str(checkpoint), "output": str(tmp_path / "run"), **model}
    data = {"path": str(tmp_path), "resolution": 32}
    assert len(make(from_values(kind, {**options, "data": data})).source) == 2


def test_the_default_size_is_the_models_own(checkpoint, pictures):
    recipe = text_to_image(
        TextToImageConfig(model=str(checkpoint), data=CaptionedDataConfig(str(pictures)))
    )
    rng = np.random.default_rng(0)
    unet, vae = (recipe.base.networks[name].config for name in ("unet", "vae"))
    side = unet.sample_size * vae.downsampling
    assert recipe.example(recipe.source[0], rng)["pixel_values"].shape == (side, side, 3)


def test_checkpoints_of_other_kinds_are_refused(tiny_checkpoints, pictures):
    for kind, message in (("xl-refiner", "has no text_encoder"), ("sd-inpaint", "has 9")):
        folder, _ = tiny_checkpoints.pipeline(kind)
        with pytest.raises(ValueError, match=message):
            text_to_image(
                TextToImageConfig(model=str(folder), data=CaptionedDataConfig(str(pictures)))
            )


def test_options_of_pictures_are_refused_with_a_cache(checkpoint, pictures, tmp_path):
    cache = CacheConfig(
        model=str(checkpoint),
        data=prepared(pictures, CacheDataConfig),
        output=str(tmp_path),
        batch_size=16,
    )
    cache_latents(cache)
    data = CaptionedDataConfig(str(tmp_path), resolution=32, random_flip=True)
    message = r"data.resolution and data.random_flip can do nothing"
    with pytest.raises(ValueError, match=message):
        text_to_image(TextToImageConfig(model=str(checkpoint), data=data))
    with pytest.raises(ValueError, match=r"--data.path must be given"):
        cache_latents(CacheConfig(model=str(checkpoint)))


@pytest.mark.slow
def test_a_run_holds_its_parameters_once_and_moves_nothing_unasked(checkpoint, pictures, tmp_path):
    config = TextToImageConfig(
        model=str(checkpoint),
        data=prepared(pictures),
        output=str(tmp_path),
        steps=3,
        batch_size=4,
        log_every=100,
        validation=DenoiserValidationConfig(every=3, prompts=("a dog",), steps=2),
        compute_dtype="float32",
        report_to=(),
    )
    recipe = text_to_image(config)
    before = {id(x) for x in jax.live_arrays()}
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=1)
    run = _Run(recipe, config, make_mesh(), TrainingStop(), checkpoints, None)
    run.advance()
    ours = jax.tree.leaves((run.state, run.frozen))
    known = {id(x) for x in ours} | before
    others = sum(x.nbytes for x in jax.live_arrays() if id(x) not in known)
    assert others < 0.05 * sum(x.nbytes for x in ours)
    with jax.transfer_guard("disallow"):
        run.advance()
    seen = []
    recipe.validate = lambda trained, frozen: seen.append((trained, frozen)) or []
    run.reports.images = lambda *args: None
    run.validate()
    assert seen[0][0] is run.state.params
    run.close()
