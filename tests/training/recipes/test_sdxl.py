"""Training SDXL: its examples, both text encoders, caches, devices, and the result in PyTorch."""

import dataclasses

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from support.data_sets import picture
from support.effort import first
from support.training_runs import train_on_devices, weights

import diffusax
from diffusax.training import (
    CacheConfig,
    CacheDataConfig,
    CaptionedDataConfig,
    EditDataConfig,
    InstructPix2PixConfig,
    TextToImageConfig,
    cache_latents,
    instruct_pix2pix,
    text_to_image,
)

SIZE = {"resolution": 32, "center_crop": True}
RECIPES = {
    "text-to-image": (TextToImageConfig, CaptionedDataConfig, text_to_image),
    "instruct-pix2pix": (InstructPix2PixConfig, EditDataConfig, instruct_pix2pix),
}


@pytest.fixture(scope="module")
def xl(tiny_checkpoints):
    return tiny_checkpoints.pipeline("xl")[0]


def make_recipe(name, checkpoint, path, data=None, **options):
    """data: options of this group."""
    config, data_config, recipe = RECIPES[name]
    data = data_config(str(path), **data or {})
    return recipe(config(model=str(checkpoint), data=data, compute_dtype="float32", **options))


def keys(n: int) -> jax.Array:
    return jax.vmap(jax.random.key)(jnp.arange(n))


def stacked(recipe, rows) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    elements = [recipe.example(recipe.source[i], rng) for i in rows]
    return {name: np.stack([e[name] for e in elements]) for name in elements[0]}


def test_an_example_has_tokens_for_both_encoders_and_sizes(xl, pictures):
    recipe = make_recipe("text-to-image", xl, pictures, SIZE)
    batch = stacked(recipe, [0, 5])
    assert set(batch) == {"pixel_values", "input_ids", "input_ids_2", "time_ids"}
    # The pictures are 40 wide and 32 high.
    assert batch["time_ids"].tolist() == [[32, 40, 0, 4, 32, 32]] * 2
    reference = diffusers.StableDiffusionXLPipeline.from_pretrained(xl)
    options = {"padding": "max_length", "max_length": 77}
    for name, tokenizer in (
        ("input_ids", reference.tokenizer),
        ("input_ids_2", reference.tokenizer_2),
    ):
        expected = tokenizer(["number 0", "number 5"], **options).input_ids
        np.testing.assert_array_equal(batch[name], expected)


@pytest.mark.slow
def test_both_text_encoders_are_trained_and_saved(xl, pictures, tmp_path):
    recipe = make_recipe("text-to-image", xl, pictures, SIZE, train_text_encoder=True)
    trained, frozen = recipe.trained(), recipe.frozen()
    assert set(trained) == set(recipe.shapes()) == {"unet", "text_encoder", "text_encoder_2"}
    assert set(frozen) == {"vae", "empty"}
    batch = stacked(recipe, [0, 1])

    @jax.jit
    def gradient(encoders, batch):
        loss = recipe.loss({**encoders, "unet": trained["unet"]}, frozen, batch, keys(2))
        return loss.mean()

    encoders = {name: params for name, params in trained.items() if name != "unet"}
    slopes = jax.grad(gradient)(encoders, batch)
    changed = dict(trained)
    for name in encoders:
        sizes = [float(jnp.abs(x).max()) for x in jax.tree.leaves(slopes[name])]
        # The last layer of the first encoder stands behind the hidden states that are used.
        assert np.mean(np.array(sizes) > 1e-8) > 0.5
        changed[name] = jax.tree.map(lambda x: x * 1.01, trained[name])
    recipe.save(changed, tmp_path)
    before, after = (diffusers.StableDiffusionXLPipeline.from_pretrained(f) for f in (xl, tmp_path))
    assert after.config.force_zeros_for_empty_prompt
    for name in encoders:
        tensors = getattr(after, name).state_dict()
        for key, tensor in getattr(before, name).state_dict().items():
            np.testing.assert_allclose(tensors[key], tensor * 1.01, rtol=1e-6, err_msg=key)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "family", "embedded"),
    first(
        [
            ("instruct-pix2pix", "xl", True),
            ("instruct-pix2pix", "sd", False),
            pytest.param("text-to-image", "xl", True, marks=pytest.mark.slow),
            pytest.param("text-to-image", "xl", False, marks=pytest.mark.slow),
        ]
    ),
)
def test_cached_rows_give_the_same_losses(
    tiny_checkpoints, pictures, edits, tmp_path, name, family, embedded
):
    folder, _ = tiny_checkpoints.pipeline(family)
    data = edits if name == "instruct-pix2pix" else pictures
    cache = CacheConfig(
        recipe=name,
        model=str(folder),
        data=CacheDataConfig(str(data), **SIZE),
        output=str(tmp_path / "cache"),
        text_embeddings=embedded,
        batch_size=6,
    )
    assert cache_latents(cache) == {"instruct-pix2pix": 16, "text-to-image": 30}[name]
    plain = make_recipe(name, folder, data, {**SIZE, "random_flip": False})
    cached = make_recipe(name, folder, cache.output)
    trained = plain.trained()
    kernel = trained["unet"]["conv_in"]["kernel"]
    random = np.random.default_rng(0).standard_normal(kernel.shape, np.float32)
    trained["unet"]["conv_in"]["kernel"] = kernel + 0.1 * random
    results = []
    for recipe in (plain, cached):
        batch = stacked(recipe, [15, 0, 8, 3])
        frozen = recipe.frozen()
        assert ("vae" in frozen) is (recipe is plain)
        assert ("text_encoder" in frozen) is (recipe is plain or not embedded)
        loss = dataclasses.replace(recipe.denoising, conditioning_dropout=0.0, caption_dropout=0.0)
        draws = loss.draw(batch, keys(4))
        halves = np.array([True, False, True, False]), np.array([True, True, False, False])
        draws = draws._replace(dropped=draws.dropped._replace(text=halves[0], image=halves[1]))
        results.append(jax.jit(loss.with_draws)(trained, frozen, batch, draws))
    np.testing.assert_allclose(*results, rtol=1e-5)


def test_a_cache_for_another_recipe_is_refused(checkpoint, edits, pictures, tmp_path):
    for name, data in (("instruct-pix2pix", edits), ("text-to-image", pictures)):
        options = {"model": str(checkpoint), "recipe": name}
        given = CacheDataConfig(str(data), **SIZE)
        cache_latents(CacheConfig(output=str(tmp_path / name), data=given, **options))
        other = "text-to-image" if name == "instruct-pix2pix" else "instruct-pix2pix"
        with pytest.raises(ValueError, match=f"write it again with cache-latents --recipe {other}"):
            make_recipe(other, checkpoint, tmp_path / name)
    with pytest.raises(ValueError, match="caption_column is nothing that recipe=instruct-pix2pix"):
        cache_latents(
            CacheConfig(
                model=str(checkpoint),
                data=CacheDataConfig(str(edits), caption_column="caption"),
                recipe="instruct-pix2pix",
            )
        )


@pytest.mark.slow
def test_eight_devices_train_to_edit_as_one_does_and_diffusers_edits_the_same(xl, edits, tmp_path):
    pairs = ["recipe=instruct-pix2pix", "steps=2", "ema.rule=none"]
    expected = train_on_devices(tmp_path / "one", xl, edits, 1, *pairs)
    result = train_on_devices(tmp_path / "eight", xl, edits, 8, *pairs, "mesh=data=4,fsdp=2")
    assert len(expected) == 2
    np.testing.assert_allclose(result, expected, rtol=1e-4)
    theirs = weights(tmp_path / "one", "model")
    for key, value in weights(tmp_path / "eight", "model").items():
        # Adam divides by the gradient's size, so that rounding errors of tiny gradients count.
        np.testing.assert_allclose(value, theirs[key], atol=4e-3, err_msg=key)

    reference = diffusers.DiffusionPipeline.from_pretrained(tmp_path / "one" / "model")
    assert type(reference) is diffusers.StableDiffusionXLInstructPix2PixPipeline
    assert not reference.config.force_zeros_for_empty_prompt
    assert reference.unet.conv_in.weight[:, 4:].abs().min() > 0
    reference.set_progress_bar_config(disable=True)
    ours = diffusax.DiffusionPipeline.from_pretrained(tmp_path / "one" / "model")
    drawn = [
        pipe(
            "make it snowy",
            image=picture(3, (64, 64)),
            height=64,
            width=64,
            num_inference_steps=4,
            generator=torch.Generator().manual_seed(0),
            output_type="np",
        ).images[0]
        for pipe in (reference, ours)
    ]
    assert drawn[0].std() > 0.03
    np.testing.assert_allclose(drawn[1], drawn[0], atol=1e-4)
