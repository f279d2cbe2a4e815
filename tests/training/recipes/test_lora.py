"""LoRA in training: which layers, how they begin, what is kept, written, drawn and continued."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file
from support.effort import few
from support.training_runs import keys, prepared

import diffusax
from diffusax.lora.files import WEIGHT_NAME
from diffusax.lora.trained import KOHYA_NAME, TrainedLora, write_result
from diffusax.models.adapters.low_rank import kernel_shapes
from diffusax.models.parameter_tree import ordered_leaves
from diffusax.models.quantized import Quantized
from diffusax.training import (
    CacheConfig,
    CacheDataConfig,
    CaptionedDataConfig,
    DenoiserValidationConfig,
    EditDataConfig,
    InstructPix2PixConfig,
    LoRAConfig,
    TextToImageConfig,
    cache_latents,
    instruct_pix2pix,
    read_config,
    text_to_image,
)
from diffusax.training.data.batches import Batches


def recipe_of(checkpoint, pictures, lora: LoRAConfig, **options):
    config = TextToImageConfig(
        model=str(checkpoint),
        data=prepared(pictures),
        compute_dtype="float32",
        caption_dropout=0.0,
        lora=lora,
        **options,
    )
    return text_to_image(config)


def changed(params, seed: int = 1):
    """Parameters that are no longer the first ones."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda x: np.asarray(x) + 0.1 * rng.standard_normal(x.shape).astype(np.float32), params
    )


def test_only_adapters_are_trained_and_the_networks_are_frozen(checkpoint, pictures):
    recipe = recipe_of(checkpoint, pictures, LoRAConfig(rank=3), train_text_encoder=True)
    trained, frozen = recipe.trained(), recipe.frozen()
    assert recipe.lora.alphas["unet.mid_block.attentions.0.transformer_blocks.0.attn1.to_q"] == 3
    assert set(trained) == {"unet", "text_encoder"}
    assert set(frozen) == {"unet", "vae", "text_encoder", "empty"}
    unet = kernel_shapes(recipe.base.networks["unet"])
    ends = ("to_q", "to_k", "to_v", "to_out.0")
    assert set(trained["unet"]) == {path for path in unet if path.endswith(ends)}
    assert all(".self_attn." in path for path in trained["text_encoder"])
    jax.tree.map(
        lambda x, shape: np.testing.assert_equal((x.shape, x.dtype), (shape.shape, shape.dtype)),
        trained,
        recipe.shapes(),
    )
    for path, layer in trained["unet"].items():
        c, d = unet[path]
        assert {k: x.shape for k, x in layer.items()} == {"down": (c, 3), "up": (3, d)}
        assert not layer["up"].any()


def test_the_first_numbers_are_those_of_pefts_distributions(checkpoint, pictures):
    def drawn(**options):
        lora = LoRAConfig(rank=8, targets=("all",), **options)
        return recipe_of(checkpoint, pictures, lora).trained()["unet"]

    gaussian, kaiming = drawn(), drawn(init="kaiming", dora=True)
    sizes = np.concatenate([layer["down"].ravel() for layer in gaussian.values()])
    assert abs(sizes.std() * 8 - 1) < 0.01
    for layer in kaiming.values():
        fan_in = np.prod(layer["down"].shape[:-1])
        largest = np.abs(layer["down"]).max() * fan_in**0.5
        assert 0.9 < largest <= 1 + 1e-6
    params = diffusax.DiffusionPipeline.from_pretrained(checkpoint).unet.params
    lengths = np.linalg.norm(np.asarray(params["conv_in"]["kernel"]).reshape(-1, 32), axis=0)
    np.testing.assert_allclose(kaiming["conv_in"]["magnitude"], lengths, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("dora", [False, True])
def test_adapters_at_the_start_change_nothing(checkpoint, pictures, dora):
    lora = LoRAConfig(rank=2, targets=("all",), dora=dora)
    recipe = recipe_of(checkpoint, pictures, lora, train_text_encoder=True)
    plain = recipe_of(checkpoint, pictures, LoRAConfig(), train_text_encoder=True)
    batch = next(Batches(recipe.source, recipe.example, batch_size=2, seed=0))
    results = [jax.jit(r.loss)(r.trained(), r.frozen(), batch, keys(2)) for r in (recipe, plain)]
    np.testing.assert_allclose(*results, rtol=1e-5)


@pytest.mark.slow
def test_with_cached_latents_and_embeddings_the_denoiser_is_alone(checkpoint, pictures, tmp_path):
    data = CacheDataConfig(str(pictures), resolution=32, center_crop=True)
    cache = {"output": str(tmp_path), "text_embeddings": True}
    cache_latents(CacheConfig(model=str(checkpoint), data=data, **cache))
    lora = LoRAConfig(rank=2, targets=("to_q", "conv1"))
    plain = recipe_of(checkpoint, pictures, lora)
    config = dataclasses.replace(plain.config, data=CaptionedDataConfig(str(tmp_path)))
    cached = text_to_image(config)
    assert set(cached.frozen()) == {"unet", "empty"}
    trained, results = changed(plain.trained()), []
    for recipe in (plain, cached):
        rng = np.random.default_rng(0)
        elements = [recipe.example(recipe.source[i], rng) for i in (3, 0)]
        batch = {name: np.stack([e[name] for e in elements]) for name in elements[0]}
        results.append(jax.jit(recipe.loss)(trained, recipe.frozen(), batch, keys(2)))
    np.testing.assert_allclose(*results, rtol=1e-5)


@pytest.mark.slow
def test_dropout_depends_on_the_key_of_an_example_alone(checkpoint, pictures):
    def losses(batch, own, dropout):
        recipe = recipe_of(checkpoint, pictures, LoRAConfig(rank=2, dropout=dropout))
        trained = changed(recipe.trained())
        return np.asarray(jax.jit(recipe.loss)(trained, recipe.frozen(), batch, own))

    recipe = recipe_of(checkpoint, pictures, LoRAConfig(rank=2))
    batch = next(Batches(recipe.source, recipe.example, batch_size=4, seed=0))
    whole, dropped = (losses(batch, keys(4), dropout) for dropout in (0.0, 0.5))
    assert np.abs(whole - dropped).min() > 1e-6
    half = {name: x[2:] for name, x in batch.items()}
    np.testing.assert_allclose(losses(half, keys(4)[2:], 0.5), dropped[2:], rtol=1e-5)


@pytest.mark.parametrize("dora", few([True, False], True))
def test_a_result_says_ranks_and_alphas_and_is_trained_further(
    checkpoint, pictures, tmp_path, dora
):
    lora = LoRAConfig(
        rank=2, alpha=3, targets=("conv1", "to_q", "q_proj"), dora=dora, format="both"
    )
    recipe = recipe_of(checkpoint, pictures, lora, train_text_encoder=True)
    trained = changed(recipe.trained())
    recipe.save(trained, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([WEIGHT_NAME, KOHYA_NAME])
    with safe_open(tmp_path / WEIGHT_NAME, framework="numpy") as file:
        options = json.loads(file.metadata()["lora_adapter_metadata"])
    assert options["unet.r"] == 2
    assert options["unet.lora_alpha"] == options["text_encoder.lora_alpha"] == 3
    assert options["unet.use_dora"] is dora
    for name in (WEIGHT_NAME, KOHYA_NAME):
        further = recipe_of(
            checkpoint,
            pictures,
            LoRAConfig(path=str(tmp_path / name), dropout=0.1),
            train_text_encoder=True,
        )
        assert further.lora.plans == recipe.lora.plans
        jax.tree.map(np.testing.assert_array_equal, further.trained(), trained)
        assert further.lora.dropout == 0.1
    alone = f"{tmp_path / WEIGHT_NAME} has layers of text_encoder; give train_text_encoder"
    with pytest.raises(ValueError, match=alone):
        recipe_of(checkpoint, pictures, LoRAConfig(path=str(tmp_path / WEIGHT_NAME)))


@pytest.mark.parametrize(
    "components", [("unet", "text_encoder"), ("text_encoder", "text_encoder_2"), ("unet",)]
)
def test_what_a_file_has_layers_of_is_trained_further(
    tiny_checkpoints, pictures, tmp_path, components
):
    checkpoint, _ = tiny_checkpoints.pipeline("xl")
    lora = LoRAConfig(rank=2, targets=("to_q", "q_proj"))
    whole = recipe_of(checkpoint, pictures, lora, train_text_encoder=True)
    plans = {name: whole.lora.plans[name] for name in components}
    trained = {name: part for name, part in whole.trained().items() if name in components}
    write_result(TrainedLora(plans), trained, tmp_path, kind="diffusers", encoders=2, networks={})
    given = LoRAConfig(path=str(tmp_path))
    encoders = len(components) > 1
    recipe = recipe_of(checkpoint, pictures, given, train_text_encoder=encoders)
    assert recipe.lora.plans == plans
    jax.tree.map(np.testing.assert_array_equal, recipe.trained(), trained)
    batch = next(Batches(recipe.source, recipe.example, batch_size=2, seed=0))
    losses = jax.eval_shape(recipe.loss, recipe.shapes(), recipe.frozen_shapes(), batch, keys(2))
    assert losses.shape == (2,)
    recipe.save(trained, tmp_path / "again")
    (file,) = (tmp_path / "again").iterdir()
    with safe_open(file, framework="numpy") as tensors:
        assert {key.split(".")[0] for key in tensors.keys()} == set(components)  # noqa: SIM118
    message = "layers of text_encoder.*; give train_text" if encoders else "no layers of text enc"
    with pytest.raises(ValueError, match=message):
        recipe_of(checkpoint, pictures, given, train_text_encoder=not encoders)


def test_what_is_no_product_is_not_trained_further(checkpoint, pictures, tmp_path):
    tensors = {
        f"unet.mid_block.attentions.0.proj_in.hada_{name}": np.ones(shape, np.float32)
        for name, shape in {
            "w1_a": (64, 2),
            "w1_b": (2, 64),
            "w2_a": (64, 2),
            "w2_b": (2, 64),
        }.items()
    }
    save_file(tensors, tmp_path / "loha.safetensors")
    with pytest.raises(ValueError, match="is no product of low rank beside a kernel; only such"):
        recipe_of(checkpoint, pictures, LoRAConfig(path=str(tmp_path / "loha.safetensors")))


def test_a_product_that_changes_embeddings_is_not_trained_further(checkpoint, pictures, tmp_path):
    table = np.asarray(
        diffusax.CLIPTextModel.from_pretrained(checkpoint, subfolder="text_encoder").params[
            "text_model"
        ]["embeddings"]["token_embedding"]["embedding"]
    )
    key = "text_encoder.text_model.embeddings.token_embedding"
    tensors = {
        f"{key}.lora_down.weight": np.ones((2, table.shape[1]), np.float32),
        f"{key}.lora_up.weight": np.ones((len(table), 2), np.float32),
    }
    layer = "unet.mid_block.attentions.0.proj_in"
    tensors |= {
        f"{layer}.lora_down.weight": np.ones((2, 64, 1, 1), np.float32),
        f"{layer}.lora_up.weight": np.ones((64, 2, 1, 1), np.float32),
    }
    save_file(tensors, tmp_path / "table.safetensors")
    given = LoRAConfig(path=str(tmp_path / "table.safetensors"))
    with pytest.raises(ValueError, match=r"token_embedding has .*, which is no product of low"):
        recipe_of(checkpoint, pictures, given, train_text_encoder=True)


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        (["lora.rank=4", "lora.targets=[to_kk]"], "lora.targets has 'to_kk', the end of no layer"),
        (
            ["lora.rank=4", "lora.targets=[to_q]", "train_text_encoder=true"],
            "lora.targets has no layer of text_encoder; add some such as",
        ),
        (["lora.alpha=4"], "lora.alpha does nothing without lora.rank or lora.path"),
        (["lora.rank=4", "lora.path=x"], "lora.rank cannot be given with lora.path"),
        (["lora.rank=4", "from_scratch=true"], "from_scratch cannot be given with lora.rank"),
        (["text_encoder_learning_rate=1e-5"], "does nothing without train_text_encoder"),
        (
            [
                "text_encoder_learning_rate=1e-5",
                "train_text_encoder=true",
                "optimizer.learning_rate=0",
            ],
            "optimizer.learning_rate must be above 0 with text_encoder_learning_rate",
        ),
    ],
)
def test_options_that_do_not_go_together(checkpoint, pictures, pairs, message):
    given = [f"model={checkpoint}", f"data.path={pictures}", "data.resolution=32"]
    with pytest.raises(ValueError, match=message):
        text_to_image(read_config(TextToImageConfig, None, [*given, *pairs]))


def test_a_checkpoint_that_edits_is_needed_for_adapters_that_edit(checkpoint, edits):
    data = EditDataConfig(str(edits), resolution=32)
    config = InstructPix2PixConfig(model=str(checkpoint), data=data, lora=LoRAConfig(rank=2))
    with pytest.raises(ValueError, match="is no InstructPix2Pix checkpoint, so that"):
        instruct_pix2pix(config)


@pytest.mark.slow
@pytest.mark.parametrize("dora", [False, True])
def test_pictures_are_drawn_as_a_pipeline_with_the_result_draws_them(
    checkpoint, pictures, tmp_path, dora
):
    lora = LoRAConfig(rank=2, targets=("to_q", "conv1", "q_proj"), dora=dora)
    validation = DenoiserValidationConfig(every=1, prompts=("a dog", "a cat"), steps=3)
    recipe = recipe_of(checkpoint, pictures, lora, train_text_encoder=True, validation=validation)
    trained = changed(recipe.trained())
    before = recipe.draw(
        recipe.trained(), recipe.frozen(), diffusax.pipelines.tasks.tasks.text_to_image
    )
    drawn = recipe.draw(trained, recipe.frozen(), diffusax.pipelines.tasks.tasks.text_to_image)
    recipe.save(trained, tmp_path)
    pipe = diffusax.DiffusionPipeline.from_pretrained(checkpoint, dtype="float32")
    pipe.load_lora_weights(tmp_path)
    options = {"height": 32, "width": 32, "num_inference_steps": 3, "seed": 0}
    expected = pipe(["a dog", "a cat"], guidance_scale=7.5, **options).images
    for a, b, c in zip(drawn, expected, before, strict=True):
        assert np.abs(np.asarray(a, int) - np.asarray(b, int)).max() <= 1
        assert np.abs(np.asarray(a, int) - np.asarray(c, int)).max() > 5


def test_adapters_are_trained_over_kernels_of_eight_bits(checkpoint, pictures):
    recipe = recipe_of(checkpoint, pictures, LoRAConfig(rank=2), weights="int8")
    frozen = recipe.frozen()
    eight = [leaf for _, leaf in ordered_leaves(frozen["unet"]) if isinstance(leaf, Quantized)]
    assert len(eight) > 50
    assert not any(isinstance(leaf, Quantized) for _, leaf in ordered_leaves(frozen["vae"]))
    shapes = recipe.frozen_shapes()
    assert jax.tree.structure(shapes) == jax.tree.structure(frozen)
    jax.tree.map(
        lambda x, shape: np.testing.assert_equal((x.shape, x.dtype), (shape.shape, shape.dtype)),
        frozen,
        shapes,
    )


@pytest.mark.slow
def test_their_gradients_are_those_of_the_kernels_multiplied_out(checkpoint, pictures):
    lora = LoRAConfig(rank=2, targets=("to_q", "conv1"), dora=True)
    recipe = recipe_of(checkpoint, pictures, lora, weights="int8")
    frozen, trained = recipe.frozen(), changed(recipe.trained())
    whole = jax.tree.map(np.asarray, frozen, is_leaf=lambda x: isinstance(x, Quantized))
    batch = next(Batches(recipe.source, recipe.example, batch_size=2, seed=0))

    def loss(trained, frozen):
        return recipe.loss(trained, frozen, batch, keys(2)).mean()

    found, expected = (jax.jit(jax.value_and_grad(loss))(trained, own) for own in (frozen, whole))
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-6), found, expected
    )
