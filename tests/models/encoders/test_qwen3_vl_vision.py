"""The vision networks of Qwen3-VL and Qwen2.5-VL against transformers, live, all weights random."""

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from support.effort import first
from support.tiny import randomize
from support.tiny_language import SEEING, build
from support.tiny_vision_language import write_processor

import diffusax
from diffusax.boundary.config import config_from_dict
from diffusax.checkpoints import save_network
from diffusax.checkpoints.tree import to_flax, to_torch
from diffusax.models import (
    Network,
    Qwen2_5_VisionTransformerPretrainedModel,
    Qwen2_5_VLVisionConfig,
    Qwen3VLVisionConfig,
    Qwen3VLVisionModel,
)
from diffusax.models.encoders.qwen2_5_vl_vision import find_windows
from diffusax.models.encoders.qwen3_vl_vision import encode_each
from diffusax.networks import load_network
from diffusax.runtime.programs.compilations import count_compilations

GRIDS = np.array([[1, 6, 4], [1, 2, 10], [2, 4, 6], [1, 2, 2]])
"""Two of as many patches, one of several frames, and the smallest."""
RNG = np.random.default_rng(0)
PATCHES = RNG.normal(size=(GRIDS.prod(axis=1).sum(), 3 * 2 * 4 * 4)).astype(np.float32)


TOWERS = {
    "Qwen2_5_VL": "Qwen2_5_VisionTransformerPretrainedModel",
    "Qwen3VL": "Qwen3VLVisionModel",
}
FAMILIES = ["Qwen3VL", "Qwen2_5_VL"]


def build_vision(family, **changes):
    module = transformers.models.qwen3_vl if family == "Qwen3VL" else transformers.models.qwen2_5_vl
    options = {**SEEING[family]["vision_config"], **changes}
    config = getattr(module, f"{family}VisionConfig")(**options)
    return randomize(getattr(module, TOWERS[family])(config))


def assert_close(actual, expected, tolerance=1e-5):
    expected = expected.float().numpy()
    assert actual.shape == expected.shape
    assert expected.std() > 0
    error = np.abs(np.asarray(actual, np.float32) - expected).max()
    assert error <= tolerance * np.abs(expected).max()


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "changes"),
    first(
        [
            ("Qwen3VL", {}),
            ("Qwen2_5_VL", {}),
            ("Qwen3VL", {"deepstack_visual_indexes": [1], "spatial_merge_size": 1}),
            ("Qwen3VL", {"temporal_patch_size": 1, "num_position_embeddings": 9}),
            ("Qwen2_5_VL", {"spatial_merge_size": 1, "fullatt_block_indexes": [0]}),
            ("Qwen2_5_VL", {"temporal_patch_size": 1, "window_size": 112}),
            ("Qwen2_5_VL", {"window_size": 8, "fullatt_block_indexes": []}),
        ],
        2,
    ),
)
def test_images_of_several_sizes_equal_transformers(tmp_path, family, changes):
    theirs = build_vision(family, **changes)
    theirs.save_pretrained(tmp_path)
    ours = getattr(diffusax, TOWERS[family]).from_pretrained(tmp_path)
    # In windows of 6x6 patches, some of which are cut off at the right, at the bottom, or both.
    grids = np.concatenate([GRIDS, [[1, 10, 14], [1, 14, 10], [2, 2, 26], [1, 12, 12]]])
    x = np.random.default_rng(1).normal(size=(grids.prod(axis=1).sum(), ours.config.patch_values))
    x = torch.tensor(x.astype(np.float32))
    expected = theirs(x, grid_thw=torch.tensor(grids))
    actual = ours(x, grids)
    assert isinstance(actual[0], torch.Tensor)
    assert actual.keys() == tuple(k for k, v in expected.items() if v is not None)
    assert_close(actual.last_hidden_state, expected.last_hidden_state)
    assert_close(actual.pooler_output, expected.pooler_output)
    if family == "Qwen3VL":
        for a, b in zip(actual.deepstack_features, expected.deepstack_features, strict=True):
            assert_close(a, b)


@pytest.mark.parametrize("merge", [1, 2])
@pytest.mark.parametrize("side", first([3, 1, 4]))
def test_every_patch_has_a_slot_of_its_own_in_a_window(merge, side):
    for rows, columns in [(1, 13), (13, 1), (3, 4), (2, 6), (5, 7), (9, 9), (4, 8)]:
        grid = jnp.array([[rows, columns], [columns, rows]]) * merge
        count = rows * columns * merge**2
        found = find_windows(grid, count, side, merge)
        size = (side * merge) ** 2
        assert found.patches.shape[2] == size
        for slots, patches, lengths in zip(*found):
            assert len(set(slots.tolist())) == count
            np.testing.assert_array_equal(patches.reshape(-1)[slots], np.arange(count))
            taken, counts = np.unique(slots // size, return_counts=True)
            np.testing.assert_array_equal(lengths[taken], counts)
            assert (slots % size < lengths[slots // size]).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_images_of_as_many_patches_share_a_program(tmp_path, family):
    build_vision(family).save_pretrained(tmp_path)
    model = load_network(tmp_path)
    x = PATCHES[None, :24]
    wide, tall = (model.run(x, np.array([grid], np.int32)) for grid in ((2, 12), (12, 2)))
    assert np.abs(wide.pooler_output - tall.pooler_output).max() > 0.1
    with count_compilations() as compiled:
        model.run(x, np.array([[4, 6]], np.int32))
    assert not compiled


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_a_whole_model_reads_images_with_texts(tmp_path, family):
    theirs = build(f"{family}ForConditionalGeneration")
    theirs.save_pretrained(tmp_path)
    ours = getattr(diffusax, f"{family}ForConditionalGeneration").from_pretrained(tmp_path)
    grids, patches = GRIDS[[0, 3, 1]], np.concatenate([PATCHES[:24], PATCHES[-4:], PATCHES[24:44]])
    rows = [[11, 12, 5, *[7] * 6, 6, 13, 5, 7, 6, 14], [15, 16, 5, *[7] * 5, 6, 17]]
    longest = max(map(len, rows))
    ids = np.array([[0] * (longest - len(row)) + row for row in rows])
    mask = np.array([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    types = (ids == 7).astype(np.int32)
    given = {"pixel_values": patches, "image_grid_thw": grids, "mm_token_type_ids": types}
    expected = theirs(
        torch.tensor(ids),
        torch.tensor(mask),
        **{name: torch.tensor(value) for name, value in given.items()},
        output_hidden_states=True,
    )
    actual = ours(ids, mask, **given, output_hidden_states=True)
    where = mask == 1
    assert_close(np.array(actual.logits)[where], expected.logits[where])
    for a, b in zip(actual.hidden_states, expected.hidden_states, strict=True):
        assert_close(np.array(a)[where], b[where])
    with pytest.raises(ValueError, match="mm_token_type_ids must be given with pixel_values"):
        ours(ids, mask, pixel_values=patches, image_grid_thw=grids)
    with pytest.raises(ValueError, match=r"a token for each part of an image, 12 \(got 6\)"):
        ours(ids[:1, :10], **{**given, "mm_token_type_ids": types[:1, :10]})
    with pytest.raises(ValueError, match=r"pixel_values must have 48 rows.*got shape .47, 96"):
        ours(ids, mask, **{**given, "pixel_values": patches[1:]})
    with pytest.raises(ValueError, match="image_grid_thw must be integers"):
        ours(ids, mask, **{**given, "image_grid_thw": None})
    alone = getattr(diffusax, f"{family}Model").from_pretrained(tmp_path, vision_config=None)
    with pytest.raises(ValueError, match="was loaded to read texts alone"):
        alone(ids, mask, **given)


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_one_program_reads_texts_with_images_as_pipelines_do(tmp_path, family):
    theirs_of = write_processor(tmp_path / "processor", f"{family}Processor")
    ours_of = getattr(diffusax, f"{family}Processor").from_pretrained(tmp_path / "processor")
    ids = {"vocab_size": len(theirs_of.tokenizer), "image_token_id": ours_of.image_token_id}
    theirs = build(f"{family}ForConditionalGeneration", **ids)
    theirs.save_pretrained(tmp_path)
    values = [RNG.integers(0, 256, (side, 20, 3), np.uint8) for side in (43, 9, 20)]
    images = [Image.fromarray(x) for x in values]
    place = "<|vision_start|><|image_pad|><|vision_end|>"
    texts = [f"a photo of {place} and {place} on the sofa", f"{place}the cat", "a red sofa"]
    options = {"padding": True, "padding_side": "left", "return_tensors": "pt"}
    given = theirs_of(images=images, text=texts, **options)
    norm = theirs.model.language_model.norm
    norm.register_forward_hook(lambda module, args, output: args[0])
    expected = theirs(**given, output_hidden_states=True).hidden_states[-1]
    model = load_network(tmp_path)

    @jax.jit
    def encode(params, given):
        run = partial(model.apply, params, method="encode_images")
        options = {"attention_mask": given.mask, "position_ids": given.positions}
        options["images"] = encode_each(run, given.patches, given.grids).tokens(given.images)
        options |= {"layers": (-1,), "final_norm": False, "method": "hidden_states"}
        return model.apply(params, given.ids, **options)[0]

    for side in ("left", "right"):
        read = ours_of.read(texts, [images[:2], images[2:], []], padding_side=side)
        found = np.array(encode(model.params, read))[read.mask]
        # Rows of real tokens are the same, wherever pads are.
        assert_close(found, expected[given["attention_mask"] == 1])
    other = [Image.fromarray(255 - x) for x in values]
    read = ours_of.read(texts, [other[:2], other[2:], []])
    with count_compilations() as compiled:
        assert np.abs(np.array(encode(model.params, read))[read.mask] - found).max() > 0.1
    assert not compiled


@pytest.mark.parametrize("family", FAMILIES)
def test_without_a_vision_config_texts_alone_are_read(tmp_path, family):
    build(f"{family}Model").save_pretrained(tmp_path)
    whole = load_network(tmp_path)
    for alone in (
        load_network(tmp_path, changes={"vision_config": None}),
        getattr(diffusax, f"{family}Model").from_pretrained(tmp_path, vision_config=None),
    ):
        assert {*alone.params} == {*whole.params} - {"visual"} == {"language_model"}
        ids = np.arange(10, 20)[None]
        np.testing.assert_array_equal(alone(ids)[0], whole(ids)[0])


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_is_as_near_to_float32_as_pytorch_is(tmp_path, family):
    errors = []
    theirs = build_vision(family)
    grid = torch.tensor(GRIDS)
    for seed in range(3):
        randomize(theirs.float(), seed).save_pretrained(tmp_path)
        exact = theirs(torch.tensor(PATCHES), grid_thw=grid).pooler_output
        half = theirs.to(torch.bfloat16)(torch.tensor(PATCHES), grid_thw=grid).pooler_output
        model = load_network(tmp_path, dtype="bfloat16")
        actual = model(PATCHES, GRIDS).pooler_output
        assert actual.dtype == jnp.bfloat16
        found = np.asarray(actual, np.float32), half.float().numpy()
        errors.append([np.linalg.norm(x - exact.numpy()) for x in found])
    ours, reference = np.linalg.norm(errors, axis=0)
    # One error is a random walk of some hundred roundings; three differ by a few percent.
    assert 0 < ours <= 1.1 * reference


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("part", ["Model", "ForConditionalGeneration"])
def test_saved_whole_it_opens_in_transformers(tmp_path, part, family):
    theirs = build(family + part)
    theirs.save_pretrained(tmp_path / "in")
    model = load_network(tmp_path / "in")
    save_network(model, tmp_path / "out")
    again, report = type(theirs).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not report["unexpected_keys"]
    assert not report["missing_keys"]
    for name, value in theirs.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
    assert load_network(tmp_path / "out").config == model.config
    for key, value in SEEING[family]["vision_config"].items():
        assert getattr(again.config.vision_config, key) == value, key


@pytest.mark.parametrize("shape", [(5, 7), (5, 7, 3), (5, 7, 3, 2), (5, 7, 2, 3, 4)])
def test_kernels_of_any_number_of_axes_are_transposed_and_back(shape):
    path = (jax.tree_util.DictKey("kernel"),)
    tensor = RNG.normal(size=shape)
    kernel = to_flax(tensor, path)
    assert kernel.shape == (*shape[2:], shape[1], shape[0])
    np.testing.assert_array_equal(
        kernel[(*[-1] * len(shape[2:]), 2, 3)], tensor[3, 2][(..., *[-1] * len(shape[2:]))]
    )
    np.testing.assert_array_equal(to_torch(kernel, path), tensor)


def test_the_config_of_the_hub_is_read():
    # As in Qwen/Qwen3-VL-8B-Instruct.
    text = """{"deepstack_visual_indexes": [8, 16, 24], "depth": 27, "hidden_act":
        "gelu_pytorch_tanh", "hidden_size": 1152, "in_channels": 3, "initializer_range": 0.02,
        "intermediate_size": 4304, "model_type": "qwen3_vl", "num_heads": 16,
        "num_position_embeddings": 2304, "out_hidden_size": 4096, "patch_size": 16,
        "spatial_merge_size": 2, "temporal_patch_size": 2}"""
    config = config_from_dict(Qwen3VLVisionConfig, json.loads(text))
    assert config == Qwen3VLVisionConfig(out_hidden_size=4096)
    network = Network(Qwen3VLVisionModel, config)
    half = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), network.shapes)
    x = jax.ShapeDtypeStruct((2, 1024, 1536), jnp.float32)
    found = jax.eval_shape(network.apply, half, x, jax.ShapeDtypeStruct((2, 2), jnp.int32))
    assert found.pooler_output.shape == (2, 256, 4096)
    assert [own.dtype for own in found.deepstack_features] == [jnp.bfloat16] * 3


def test_the_config_of_the_hub_of_qwen_2_5_is_read():
    # As in Qwen/Qwen2.5-VL-7B-Instruct.
    text = """{"depth": 32, "hidden_act": "silu", "hidden_size": 1280, "intermediate_size": 3420,
        "num_heads": 16, "in_chans": 3, "out_hidden_size": 3584, "patch_size": 14,
        "spatial_merge_size": 2, "spatial_patch_size": 14, "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31], "tokens_per_second": 2,
        "temporal_patch_size": 2}"""
    config = config_from_dict(Qwen2_5_VLVisionConfig, json.loads(text))
    assert config == Qwen2_5_VLVisionConfig(hidden_size=1280, tokens_per_second=2)
    network = Network(Qwen2_5_VisionTransformerPretrainedModel, config)
    with torch.device("meta"):
        theirs = transformers.models.qwen2_5_vl.Qwen2_5_VLVisionConfig(**json.loads(text))
        module = transformers.models.qwen2_5_vl.Qwen2_5_VisionTransformerPretrainedModel(theirs)
    count = sum(np.prod(leaf.shape) for leaf in jax.tree.leaves(network.shapes))
    assert count == sum(parameter.numel() for parameter in module.parameters())
    half = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), network.shapes)
    x = jax.ShapeDtypeStruct((2, 784, 1176), jnp.float32)
    found = jax.eval_shape(network.apply, half, x, jax.ShapeDtypeStruct((2, 2), jnp.int32))
    assert (found.pooler_output.shape, found.pooler_output.dtype) == ((2, 196, 3584), jnp.bfloat16)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ({"hidden_size": 40, "num_heads": 4}, "divisible by four times num_heads=4"),
        ({"window_size": 27}, "window_size=27 must be at least .*, 28"),
        ({"rope_parameters": {"rope_theta": 1e6}}, "rope_parameters="),
    ],
)
def test_a_config_of_qwen_2_5_that_is_not_supported_is_an_error(changes, message):
    with pytest.raises(ValueError, match=message):
        config_from_dict(Qwen2_5_VLVisionConfig, changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ({"hidden_size": 40, "num_heads": 4}, "divisible by four times num_heads=4"),
        ({"num_position_embeddings": 24}, "num_position_embeddings=24 must be a square"),
        ({"deepstack_visual_indexes": [2, 0]}, "must be in their order"),
        ({"deepstack_visual_indexes": [3], "depth": 3}, "must be less than depth=3"),
        ({"rope_parameters": {"rope_theta": 1e6}}, "rope_parameters="),
    ],
)
def test_a_config_that_is_not_supported_is_an_error(changes, message):
    with pytest.raises(ValueError, match=message):
        config_from_dict(Qwen3VLVisionConfig, changes)
