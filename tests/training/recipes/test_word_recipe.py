"""The recipe of textual inversion: captions, what is trained, caches, stops and devices."""

import dataclasses
import math
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
from support.data_sets import picture
from support.effort import first
from support.tiny import SMALLEST_UNET, SMALLEST_VAE, build_stable_diffusion
from support.training_runs import RUN, steps_logged, train_on_devices, wait_for

import diffusax
from diffusax.checkpoints.embeddings import read_embeddings, write_embedding
from diffusax.runtime.devices.mesh import make_mesh
from diffusax.training import (
    CacheConfig,
    CacheDataConfig,
    DenoiserValidationConfig,
    EMAConfig,
    TextualInversionConfig,
    TextualInversionDataConfig,
    cache_latents,
    read_config,
    textual_inversion,
)
from diffusax.training.data.examples import TEMPLATES
from diffusax.training.loop.program import abstract_arguments
from diffusax.training.optimizers import make_optimizer
from diffusax.training.step.step import initial_state

WORD = {"placeholder_token": "<toy>", "initializer_token": "toy"}
PAIRS = [f"{name}={value}" for name, value in WORD.items()]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A checkpoint of Stable Diffusion that is traced in a moment."""
    folder = tmp_path_factory.mktemp("smallest") / "model"
    build_stable_diffusion(folder, unet=SMALLEST_UNET, vae=SMALLEST_VAE)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Four pictures without captions."""
    path = tmp_path_factory.mktemp("toys")
    for i in range(4):
        picture(i).save(path / f"{i}.png")
    return path


def make(checkpoint, path, data=None, **options):
    """data: options of this group."""
    data = TextualInversionDataConfig(str(path), **{"resolution": 32, **(data or {})})
    given = {**WORD, "compute_dtype": "float32", **options}
    return textual_inversion(TextualInversionConfig(model=str(checkpoint), data=data, **given))


def keys(n: int) -> jax.Array:
    return jax.vmap(jax.random.key)(jnp.arange(n))


def stacked(recipe, rows) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    elements = [recipe.example(recipe.source[i], rng) for i in rows]
    return {name: np.stack([e[name] for e in elements]) for name in elements[0]}


@pytest.mark.parametrize("kind", list(TEMPLATES))
def test_captions_are_drawn_from_those_for_the_property(checkpoint, folder, kind):
    recipe = make(checkpoint, folder, learnable_property=kind, num_vectors=2)
    rng = np.random.default_rng(0)
    rows = [recipe.example(recipe.source[i % 4], rng)["input_ids"] for i in range(300)]
    known = {
        recipe.base.tokenize(text.format("<toy>"))["input_ids"].tobytes(): text
        for text in TEMPLATES[kind]
    }
    found = {known[row.tobytes()] for row in rows}
    assert found == set(TEMPLATES[kind])
    assert all({49408, 49409} <= set(row) for row in rows)


def test_captions_of_the_data_set_name_the_word(checkpoint, tmp_path):
    for i, text in enumerate(("my <TOY> outside", "a thing")):
        picture(i).save(tmp_path / f"{i}.png")
        (tmp_path / f"{i}.txt").write_text(text)
    recipe = make(checkpoint, tmp_path, {"caption_column": "text"}, placeholder_token="<Toy>")
    rng = np.random.default_rng(0)
    ids = recipe.example(recipe.source[0], rng)["input_ids"]
    np.testing.assert_array_equal(ids, recipe.base.tokenize("my <toy> outside")["input_ids"])
    with pytest.raises(ValueError, match="the caption 'a thing' does not name '<Toy>'"):
        recipe.example(recipe.source[1], rng)


@pytest.mark.parametrize("kind", first(["smallest", "xl"]))
def test_only_the_words_rows_have_gradients_and_moments(tiny_checkpoints, checkpoint, folder, kind):
    model = checkpoint if kind == "smallest" else tiny_checkpoints.pipeline(kind)[0]
    recipe = make(model, folder, num_vectors=3)
    config = dataclasses.replace(recipe.config, ema=EMAConfig("constant"), batch_size=2)
    mesh = make_mesh("data=1", devices=jax.local_devices()[:1])
    state, frozen, batch = abstract_arguments(recipe, config, mesh)
    widths = {"text_encoder": 32} | ({"text_encoder_2": 24} if kind == "xl" else {})
    expected = {name: {"embedding": (3, width)} for name, width in widths.items()}
    assert jax.tree.map(lambda x: x.shape, state.params) == expected
    optimizer = make_optimizer(config.optimizer, 1)
    assert jax.tree.structure(state.opt_state) == jax.tree.structure(
        initial_state(recipe.trained(), optimizer, 0).opt_state
    )
    sizes = {name: 3 * width for name, width in widths.items()}
    leaves = jax.tree.leaves((state.params, state.opt_state, state.ema))
    assert sum(x.size for x in leaves if x.size > 1) == 4 * sum(sizes.values())

    def loss(trained, frozen, batch):
        return recipe.loss(trained, frozen, batch, keys(2)).mean()

    # No gradient of a table is computed, nor a table with the rows in it.
    program = jax.make_jaxpr(jax.grad(loss))(state.params, frozen, batch)
    tables = {(49408, width) for width in widths.values()}
    assert tables <= {x.shape for x in jax.tree.leaves(frozen)}
    assert not tables & set(computed(program.jaxpr))


def computed(jaxpr):
    """The shapes of all arrays that a program computes."""
    for equation in jaxpr.eqns:
        yield from (variable.aval.shape for variable in equation.outvars)
        for value in equation.params.values():
            for part in value if isinstance(value, tuple | list) else [value]:
                inner = getattr(part, "jaxpr", part)
                if hasattr(inner, "eqns"):
                    yield from computed(inner)


def test_shapes_are_known_without_the_parameters(checkpoint, folder):
    recipe = make(checkpoint, folder, compute_dtype="bfloat16")
    frozen, trained = recipe.frozen(), recipe.trained()
    kinds = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype.name), tree)  # noqa: E731
    assert kinds(recipe.frozen_shapes()) == kinds(frozen)
    assert (
        kinds(recipe.shapes())
        == kinds(trained)
        == {"text_encoder": {"embedding": ((1, 32), "float32")}}
    )
    pipe = diffusax.DiffusionPipeline.from_pretrained(checkpoint)
    table = pipe.params["text_encoder"]["text_model"]["embeddings"]["token_embedding"]["embedding"]
    (toy,) = pipe.tokenizer.ids_of("toy")
    np.testing.assert_array_equal(trained["text_encoder"]["embedding"][0], table[toy])


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        (["placeholder_token=''"], "--placeholder-token must be given"),
        (["initializer_token=''"], "--initializer-token must be given"),
        (["placeholder_token=photo"], "'photo' cannot be added, as tokenizer has 'photo' already"),
        (["placeholder_token=' <toy>'"], "no spaces around it and none in a row .got ' <toy>'"),
        (["initializer_token=red dog"], "has 2 tokens for num_vectors=1; use a text of at least"),
        (["num_vectors=76"], "num_vectors=76 is more than the 75 tokens that a text has"),
        (["from_scratch=true"], "from_scratch cannot be given: textual inversion trains the emb"),
        (["train_text_encoder=true"], "train_text_encoder cannot be given"),
        (["lora.rank=4"], "lora.rank cannot be given"),
        (["lora.path=x"], "lora.path cannot be given"),
        (
            ["text_encoder_learning_rate=1e-5"],
            "^text_encoder_learning_rate cannot be given: textual inversion trains the embeddings",
        ),
        (["learnable_property=face"], "learnable_property must be one of object, style"),
    ],
)
def test_mistakes_show_before_the_training(checkpoint, folder, pairs, message):
    given = [f"model={checkpoint}", f"data.path={folder}", *PAIRS, *pairs]
    with pytest.raises(ValueError, match=message):
        textual_inversion(read_config(TextualInversionConfig, None, given))


def test_the_optimizer_is_that_of_diffusers_script_also_in_a_file():
    given = ["optimizer.weight_decay=0.01"]
    options = read_config(TextualInversionConfig, None, given).optimizer
    assert (options.name, options.learning_rate, options.schedule) == ("adamw", 1e-4, "constant")
    assert (options.beta1, options.beta2, options.epsilon) == (0.9, 0.999, 1e-8)
    assert options.max_grad_norm == math.inf


def test_a_file_for_both_encoders_keeps_its_word_and_its_bytes(tmp_path):
    rng = np.random.default_rng(0)
    vectors = {
        name: rng.standard_normal((2, width), np.float32)
        for name, width in (("text_encoder", 5), ("text_encoder_2", 3))
    }
    path = tmp_path / "learned_embeds.safetensors"
    write_embedding(path, "<toy>", vectors)
    before = path.read_bytes()
    write_embedding(path, "<toy>", vectors)
    assert path.read_bytes() == before
    assert set(load_file(path)) == {"clip_l", "clip_g"}
    for given, word in ((None, "<toy>"), ("<cat>", "<cat>")):
        (found,) = read_embeddings(tmp_path, given)
        assert found.token == word
        for name, array in vectors.items():
            np.testing.assert_array_equal(found.vectors[name], array)


@pytest.mark.slow
@pytest.mark.parametrize("kind", first(["sd", "xl"]))
def test_cached_latents_give_the_same_losses(tiny_checkpoints, folder, tmp_path, kind):
    model, _ = tiny_checkpoints.pipeline(kind)
    data = CacheDataConfig(str(folder), resolution=32, center_crop=True)
    for name, embedded in (("cache", False), ("embedded", True)):
        output = str(tmp_path / name)
        cache_latents(
            CacheConfig(model=str(model), data=data, output=output, text_embeddings=embedded)
        )
    with pytest.raises(ValueError, match="holds text embeddings, which cannot name the word"):
        make(model, tmp_path / "embedded", {"resolution": None})
    plain = make(model, folder, {"center_crop": True, "random_flip": False})
    cached = make(model, tmp_path / "cache", {"resolution": None})
    losses = []
    for recipe in (plain, cached):
        batch = stacked(recipe, [3, 0, 1])
        frozen = recipe.frozen()
        assert ("vae" in frozen) is (recipe is plain)
        tokens = recipe.base.tokenize("a photo of <toy>")
        batch |= {name: np.stack([ids] * 3) for name, ids in tokens.items()}
        losses.append(jax.jit(recipe.loss)(recipe.trained(), frozen, batch, keys(3)))
    np.testing.assert_allclose(*losses, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", first(["sd", "xl"]))
def test_validation_draws_what_the_pipeline_draws_with_the_word(
    tiny_checkpoints, folder, tmp_path, kind
):
    model, _ = tiny_checkpoints.pipeline(kind)
    prompts = ("a <toy> here", "a dog")
    recipe = make(
        model,
        folder,
        {"resolution": 64},
        num_vectors=2,
        validation=DenoiserValidationConfig(every=1, prompts=prompts, steps=2),
    )
    trained = jax.tree.map(lambda x: 1.5 * x[::-1], recipe.trained())
    recipe.captioned = lambda images: images
    drawn = recipe.validate(trained, recipe.frozen())
    recipe.save(trained, tmp_path)
    pipe = diffusax.DiffusionPipeline.from_pretrained(model)
    pipe.load_textual_inversion(tmp_path)
    call = {"num_inference_steps": 2, "guidance_scale": 7.5, "seed": 0, "height": 64, "width": 64}
    for image, expected in zip(drawn, pipe(list(prompts), **call).images, strict=True):
        difference = np.abs(np.asarray(image, int) - np.asarray(expected, int))
        assert difference.max() <= 1


def results(output: Path) -> list[bytes]:
    names = ("model", "model_ema")
    return [(output / name / "learned_embeds.safetensors").read_bytes() for name in names]


@pytest.mark.slow
def test_a_run_that_is_killed_twice_ends_in_the_same_bits(tmp_path, checkpoint, folder):
    pairs = ["recipe=textual-inversion", *PAIRS, "num_vectors=2", "steps=60", "ema.start=3"]
    train_on_devices(tmp_path / "whole", checkpoint, folder, 1, *pairs)
    output = tmp_path / "killed"
    for steps in (5, 25):
        process = start(checkpoint, folder, output, pairs)
        wait_for(process, lambda n=steps: max(steps_logged(output), default=0) >= n)
        process.kill()
        process.wait()
        assert steps <= max(steps_logged(output)) < 60
    train_on_devices(output, checkpoint, folder, 1, *pairs)
    assert results(output) == results(tmp_path / "whole")
    assert results(output)[0] != results(output)[1]


def start(checkpoint, folder, output, pairs) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, str(RUN), str(checkpoint), str(folder), str(output), *pairs],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.slow
def test_eight_devices_train_as_one_does(tmp_path, checkpoint, folder):
    pairs = ["recipe=textual-inversion", *PAIRS, "validation.prompts=[a <toy>]"]
    pairs += ["validation.every=4", "validation.steps=1"]
    expected = train_on_devices(tmp_path / "one", checkpoint, folder, 1, *pairs)
    mesh = "mesh=data=2,fsdp=2,tensor=2"
    result = train_on_devices(
        tmp_path / "eight", checkpoint, folder, 8, *pairs, mesh, "accumulate=2"
    )
    np.testing.assert_allclose(result, expected, rtol=1e-4)
    for name in ("model", "model_ema"):
        rows = [
            load_file(tmp_path / run / name / "learned_embeds.safetensors")["<toy>"]
            for run in ("one", "eight")
        ]
        np.testing.assert_allclose(*rows, atol=1e-4)
