"""The language models of Qwen3-VL and Qwen2.5-VL against transformers, live, all weights random."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.effort import first
from support.tiny import randomize
from support.tiny_language import (
    QWEN2_5_VL,
    QWEN2_5_VL_TEXT,
    QWEN3_VL,
    QWEN3_VL_TEXT,
    SEEING,
    build,
    config_of,
)

import diffusax
from diffusax.boundary.config import config_from_dict, config_to_dict
from diffusax.checkpoints import save_network
from diffusax.interop.torch.models import to_model
from diffusax.models import (
    Network,
    Qwen2_5_VLConfig,
    Qwen2_5_VLModel,
    Qwen2_5_VLTextConfig,
    Qwen3VLConfig,
    Qwen3VLModel,
    Qwen3VLTextConfig,
)
from diffusax.models.encoders.hidden_states import ImageTokens
from diffusax.models.encoders.qwen2_5_vl_configs import RotarySectionsConfig
from diffusax.models.encoders.qwen3_vl_configs import RotaryAxesConfig
from diffusax.networks import load_network

KINDS = ("Qwen3VLForConditionalGeneration", "Qwen3VLModel", "Qwen3VLTextModel")
OLDER = tuple(kind.replace("Qwen3VL", "Qwen2_5_VL") for kind in KINDS)
RNG = np.random.default_rng(0)
IDS = RNG.integers(10, 101, (3, 13)).astype(np.int32)
LENGTHS = np.array([13, 6, 2], np.int32)
RIGHT = np.arange(13) < LENGTHS[:, None]
LEFT = RIGHT[:, ::-1].copy()
# Between a template's beginning and its end, as Krea 2 pads.
MIDDLE = (np.arange(13) < LENGTHS[:, None] - 1) | (np.arange(13) == 12)
MASKS = {"right": RIGHT, "left": LEFT, "middle": MIDDLE}
REAL = np.maximum(np.cumsum(MIDDLE, 1) - 1, 0).astype(np.int32)
"""Positions that count real tokens only."""


def save(folder, kind=KINDS[0], **changes):
    model = build(kind, **changes)
    model.save_pretrained(folder)
    return model


def language(model):
    """transformers' language model of a whole."""
    return getattr(model, "model", model).language_model


def assert_close(actual, expected, where=..., tolerance=1e-5):
    expected = expected.float().numpy()[where]
    actual = np.asarray(actual, np.float32)[where]
    assert actual.shape == expected.shape
    assert expected.std() > 0
    assert np.abs(actual - expected).max() <= tolerance * np.abs(expected).max()


@torch.no_grad()
@pytest.mark.parametrize("kind", [*KINDS, *OLDER])
@pytest.mark.parametrize("side", MASKS)
def test_every_state_equals_transformers_wherever_pads_are(tmp_path, kind, side):
    theirs, mask = save(tmp_path, kind), MASKS[side]
    ours = getattr(diffusax, kind).from_pretrained(tmp_path)
    assert type(ours) is getattr(diffusax, kind)
    # Pads on the right have transformers' states, too, which FLUX.3 reads.
    where = ... if side == "right" else mask
    positions = REAL if side == "middle" else None
    given = {"attention_mask": torch.tensor(mask), "output_hidden_states": True}
    if positions is not None:
        given["position_ids"] = torch.tensor(positions)[None].expand(3, -1, -1)
    expected = theirs(torch.tensor(IDS), **given)
    actual = ours(torch.tensor(IDS), mask, positions, output_hidden_states=True)
    assert actual.keys() == ("logits" if "For" in kind else "last_hidden_state", "hidden_states")
    assert_close(actual[0], expected[0], where)
    for a, b in zip(actual.hidden_states, expected.hidden_states, strict=True):
        assert_close(a, b, where)


@torch.no_grad()
def test_pads_with_positions_of_their_own_are_read_as_flux_3_does(tmp_path):
    theirs = save(tmp_path)
    model = load_network(tmp_path)
    positions = np.where(RIGHT, np.arange(13), 1).astype(np.int32)
    expected = theirs(
        torch.tensor(IDS),
        attention_mask=torch.tensor(RIGHT),
        position_ids=torch.tensor(positions),
        output_hidden_states=True,
    ).hidden_states
    options = {"method": "hidden_states", "layers": (4, 2), "position_ids": positions}
    found = model.apply(model.params, IDS, LENGTHS, **options)
    for ours, layer in zip(found, (4, 2), strict=True):
        assert_close(ours, expected[layer])


def given_deep(mask, deep):
    """What transformers' Qwen3-VL adds after its first layers, as arguments."""
    if not deep:
        return {}
    embeds = [torch.tensor(own) for own in deep]
    return {"visual_pos_masks": torch.tensor(mask), "deepstack_visual_embeds": embeds}


@torch.no_grad()
@pytest.mark.parametrize("kind", [*KINDS[::2], *OLDER[::2]])
def test_positions_of_three_axes_and_images_equal_transformers(tmp_path, kind):
    theirs = save(tmp_path, kind)
    model = load_network(tmp_path)
    positions = RNG.integers(0, 40, (3, *IDS.shape)).astype(np.int32)
    inside = theirs if kind.endswith("TextModel") else language(theirs)
    for attention in (RIGHT, LEFT):
        mask = attention & (RNG.random(IDS.shape) < 0.4)
        count = 4 if kind in KINDS else 1
        width = inside.config.hidden_size
        embeds, *deep = RNG.normal(size=(count, mask.sum(), width)).astype(np.float32)
        inputs = inside.embed_tokens(torch.tensor(IDS))
        inputs[torch.tensor(mask)] = torch.tensor(embeds)
        expected = inside(
            inputs_embeds=inputs,
            attention_mask=torch.tensor(attention),
            position_ids=torch.tensor(positions),
            **given_deep(mask, deep),
            output_hidden_states=True,
        ).hidden_states
        given = {"attention_mask": attention, "position_ids": positions}
        images = ImageTokens(mask, embeds, tuple(deep))
        found = model.run(IDS, **given, images=images).hidden_states
        for a, b in zip(found, expected, strict=True):
            assert_close(a, b, attention)
        without = images._replace(deepstack=()) if deep else None
        assert np.abs(model.run(IDS, **given, images=without)[0] - found[-1]).max() > 0.1


@pytest.mark.parametrize("kind", KINDS[:1])
def test_chosen_layers_are_those_of_all_and_the_rest_is_not_computed(tmp_path, kind):
    save(tmp_path, kind)
    model = load_network(tmp_path)

    def states(layers, **given):
        return model.apply(model.params, IDS, method="hidden_states", layers=layers, **given)

    for given in ({"key_lengths": LENGTHS}, {"attention_mask": LEFT}):
        everything = states(None, **given)
        assert len(everything) == 6
        for layers in ((-2,), (0, 4, 1), (2, 2), (-1,)):
            jax.tree.map(
                np.testing.assert_array_equal,
                states(layers, **given),
                tuple(everything[i] for i in layers),
            )
    texts = [str(jax.make_jaxpr(lambda i=i: states((i,)))()) for i in range(6)]
    counts = np.array([text.count("dot_general") for text in texts])
    assert counts[0] == 0
    assert (np.diff(counts) > 0).all()
    with pytest.raises(ValueError, match="layers must be from -6 to 5"):
        states((6,))
    with pytest.raises(ValueError, match="attention_mask must be left out where key_lengths"):
        states((1,), key_lengths=LENGTHS, attention_mask=LEFT)


@torch.no_grad()
@pytest.mark.parametrize("kind", [KINDS[0], OLDER[0]])
@pytest.mark.parametrize("tied", [True, False])
def test_the_last_state_is_before_the_final_norm_or_after_it(tmp_path, tied, kind):
    theirs = build(kind, tie_last_hidden_states=tied)
    theirs.save_pretrained(tmp_path)
    model = load_network(tmp_path)
    expected = theirs(torch.tensor(IDS), output_hidden_states=True).hidden_states[-1]
    assert_close(model(IDS, output_hidden_states=True).hidden_states[-1], expected)
    by_choice = []
    for final_norm in (None, tied, not tied):
        given = {"layers": (-1,), "final_norm": final_norm}
        by_choice.append(model.apply(model.params, IDS, method="hidden_states", **given)[0])
    assert_close(by_choice[0], expected)
    np.testing.assert_array_equal(by_choice[0], by_choice[1])
    norm = language(theirs).norm
    before, after = by_choice[1:][:: -1 if tied else 1]
    assert_close(after, norm(torch.tensor(np.array(before))))
    assert np.abs(np.array(before) - np.array(after)).max() > 0.1
    # What goes through the head is normed in any case.
    assert_close(model(IDS).logits, theirs(torch.tensor(IDS)).logits)


@torch.no_grad()
@pytest.mark.parametrize("kind", first([*KINDS, *OLDER], 4))
def test_an_object_of_transformers_is_taken_over(kind):
    theirs = build(kind)
    model = to_model("text_encoder", theirs)
    assert isinstance(model.network, Network)
    assert_close(model(IDS)[0], theirs(torch.tensor(IDS))[0])


@torch.no_grad()
@pytest.mark.parametrize("kind", [KINDS[1], OLDER[1]])
def test_bfloat16_is_as_near_to_float32_as_pytorch_is(tmp_path, kind):
    errors = []
    theirs = build(kind)
    for seed in range(3):
        randomize(theirs.float(), seed).save_pretrained(tmp_path)
        given = {"attention_mask": torch.tensor(LEFT)}
        exact = theirs(torch.tensor(IDS), **given).last_hidden_state
        half = theirs.to(torch.bfloat16)(torch.tensor(IDS), **given).last_hidden_state
        model = load_network(tmp_path, dtype="bfloat16")
        actual = model(IDS, LEFT).last_hidden_state
        assert actual.dtype == jnp.bfloat16
        found = np.asarray(actual, np.float32), half.float().numpy()
        errors.append([np.linalg.norm((x - exact.numpy())[LEFT]) for x in found])
    ours, reference = np.linalg.norm(errors, axis=0)
    # One error is a random walk of some hundred roundings; three differ by a few percent.
    assert 0 < ours <= 1.1 * reference


def test_files_with_the_names_of_the_hub_and_without_a_head_are_read(tmp_path):
    save(tmp_path, tie_word_embeddings=True)
    expected = load_network(tmp_path).run(IDS).last_hidden_state
    config, file = tmp_path / "config.json", tmp_path / "model.safetensors"
    data, tensors = json.loads(config.read_text()), load_file(file)
    assert {name.split(".")[1] for name in tensors} == {"language_model", "visual"}
    plain = {name.removeprefix("model."): x for name, x in tensors.items()}
    head = {"lm_head.weight": tensors["model.language_model.embed_tokens.weight"].clone()}
    for kind in KINDS[:2]:
        config.write_text(json.dumps({**data, "architectures": [kind]}))
        for named in (tensors, plain, tensors | head):
            save_file(named, file)
            model = load_network(tmp_path)
            assert model.class_name == kind
            np.testing.assert_array_equal(model.run(IDS).last_hidden_state, expected)


@torch.no_grad()
@pytest.mark.parametrize("tied", [False, True])
def test_files_of_transformers_4_are_read(tmp_path, tied):
    theirs = save(tmp_path, OLDER[0], tie_word_embeddings=tied)
    config, file = tmp_path / "config.json", tmp_path / "model.safetensors"
    data, tensors = json.loads(config.read_text()), load_file(file)
    # transformers still writes the names of its versions before 4.52.
    assert {name.split(".")[0] for name in tensors} - {"lm_head"} == {"model", "visual"}
    new = {k.replace("model.", "language_model."): x for k, x in tensors.items()}
    whole = {k if k.startswith("lm_head") else f"model.{k}": x for k, x in new.items()}
    assert {*whole} - {"lm_head.weight"} <= {*theirs.state_dict()}
    expected = theirs(torch.tensor(IDS))[0]
    for kind in OLDER[:2]:
        config.write_text(json.dumps({**data, "architectures": [kind]}))
        for named in (tensors, new, whole):
            save_file(named, file)
            for changes in ({}, {"vision_config": None}):
                model = getattr(diffusax, kind).from_pretrained(tmp_path, **changes)
                assert (model.config.vision_config is None) == bool(changes)
                if kind == OLDER[0]:
                    assert_close(model(IDS).logits, expected)
                assert not changes or "visual" not in model.params.get("model", model.params)


@pytest.mark.parametrize("layout", [4, 5])
def test_configs_of_the_hub_and_of_transformers_5_are_read(layout):
    rope = dict(QWEN3_VL_TEXT["rope_parameters"])
    theta = rope.pop("rope_theta")
    text = {k: v for k, v in QWEN3_VL_TEXT.items() if k != "rope_parameters"}
    # As in Qwen/Qwen3-VL-4B-Instruct.
    text |= {"attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1}
    text |= {"eos_token_id": 2, "hidden_act": "silu", "model_type": "qwen3_vl_text"}
    text |= {"rope_scaling": rope, "rope_theta": theta, "tie_word_embeddings": True}
    text |= {"dtype": "bfloat16", "initializer_range": 0.02, "use_cache": True}
    hub = {**QWEN3_VL, "text_config": text, "model_type": "qwen3_vl", "tie_word_embeddings": True}
    hub |= {"architectures": [KINDS[0]], "transformers_version": "4.57.0.dev0"}
    given = hub if layout == 4 else json.loads(config_of(KINDS[0]).to_json_string())
    config = config_from_dict(Qwen3VLConfig, given)
    assert config.tie_word_embeddings == (layout == 4)
    assert config.text_config.rope_theta == 1e4
    assert config.text_config.rope_scaling.mrope_section == (3, 3, 2)
    assert (config.image_token_id, config.vocab_size, config.num_hidden_layers) == (7, 101, 5)
    assert (config.hidden_size, config.max_position_embeddings) == (24, 128000)
    assert config_from_dict(Qwen3VLConfig, config_to_dict(config)) == config
    empty = Qwen3VLConfig().text_config
    published = transformers.Qwen3VLTextConfig()
    assert empty.rope_theta == published.rope_parameters["rope_theta"]
    assert empty.rope_scaling.mrope_section == (24, 20, 20)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_type='yarn' is not supported"),
        ({"rope_scaling": {"mrope_interleaved": False}}, "mrope_interleaved=False"),
        ({"rope_scaling": {"mrope_section": [3, 2]}}, "mrope_section"),
        ({"model_type": "qwen2_5_vl_text"}, "model_type='qwen2_5_vl_text'"),
        ({"sliding_window": 4}, "no option 'sliding_window'"),
    ],
)
def test_a_config_that_is_not_supported_is_an_error(changes, message):
    with pytest.raises(ValueError, match=message):
        config_from_dict(Qwen3VLTextConfig, changes)
    with pytest.raises(ValueError, match=f"text_config: .*{message}"):
        config_from_dict(Qwen3VLConfig, {"text_config": changes})


# As in Qwen/Qwen-Image's text_encoder/config.json.
FLAT = {
    "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
    "hidden_size": 48, "initializer_range": 0.02, "intermediate_size": 40,
    "max_position_embeddings": 128000, "max_window_layers": 28, "num_attention_heads": 6,
    "num_hidden_layers": 3, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
    "rope_scaling": {"mrope_section": [1, 2, 1], "rope_type": "default", "type": "default"},
    "rope_theta": 1e4, "sliding_window": 32768, "use_cache": True, "use_sliding_window": False,
    "vocab_size": 101,
}  # fmt: skip
TEXT = {
    **FLAT, "image_token_id": None, "layer_types": ["full_attention"] * 3, "sliding_window": None,
    "model_type": "qwen2_5_vl_text", "torch_dtype": "float32", "video_token_id": None,
    "vision_end_token_id": 6, "vision_start_token_id": 5, "vision_token_id": 9,
}  # fmt: skip
WHOLE = {
    **{k: v for k, v in QWEN2_5_VL.items() if k.endswith("_id")},
    "architectures": [OLDER[0]], "model_type": "qwen2_5_vl", "torch_dtype": "bfloat16",
    "transformers_version": "4.53.1", "vision_token_id": 9, "tie_word_embeddings": False,
    "vision_config": {
        "depth": 32, "fullatt_block_indexes": [7, 15, 23, 31], "hidden_act": "silu",
        "hidden_size": 1280, "in_channels": 3, "in_chans": 3, "initializer_range": 0.02,
        "intermediate_size": 3420, "model_type": "qwen2_5_vl", "num_heads": 16,
        "out_hidden_size": 3584, "patch_size": 14, "spatial_merge_size": 2,
        "spatial_patch_size": 14, "temporal_patch_size": 2, "tokens_per_second": 2,
        "torch_dtype": "float32", "window_size": 112,
    },
}  # fmt: skip
MROPE = {"rope_scaling": {"type": "mrope", "mrope_section": [1, 2, 1]}}
TIED = {"tie_word_embeddings": True}


@pytest.mark.parametrize(
    ("given", "tied"),
    [
        (WHOLE | FLAT | {"text_config": TEXT}, False),
        (WHOLE | {"text_config": TEXT | TIED}, True),
        (WHOLE | FLAT | {"num_hidden_layers": 9, "text_config": TEXT}, False),
        (WHOLE | FLAT | MROPE | TIED, True),
        (json.loads(config_of(OLDER[0]).to_json_string()), False),
    ],
)
def test_configs_of_qwen_2_5_are_read(given, tied):
    config, theirs = config_from_dict(Qwen2_5_VLConfig, given), transformers.Qwen2_5_VLConfig
    expected = theirs(**json.loads(json.dumps(given)))
    assert config.tie_word_embeddings == expected.tie_word_embeddings == tied
    text, rope = expected.text_config, expected.text_config.rope_parameters
    for name in QWEN2_5_VL_TEXT:
        if name != "rope_parameters":
            assert getattr(config.text_config, name) == getattr(text, name), name
    assert config.text_config.rope_theta == rope["rope_theta"] == 1e4
    assert [*config.text_config.rope_scaling.mrope_section] == rope["mrope_section"] == [1, 2, 1]
    for field in dataclasses.fields(config.vision_config):
        read, wanted = (getattr(x.vision_config, field.name) for x in (config, expected))
        assert read == (tuple(wanted) if isinstance(wanted, list) else wanted), field.name
    assert config_from_dict(Qwen2_5_VLConfig, config_to_dict(config)) == config
    again = theirs(**json.loads(json.dumps(config_to_dict(config))))
    assert again.text_config.rope_parameters["mrope_section"] == [1, 2, 1]
    default, published = Qwen2_5_VLTextConfig(), transformers.Qwen2_5_VLTextConfig()
    for name in (*QWEN2_5_VL_TEXT, "max_position_embeddings"):
        if name != "rope_parameters":
            assert getattr(default, name) == getattr(published, name), name
    assert default.rope_theta == published.rope_parameters["rope_theta"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_type='yarn' is not supported"),
        ({"rope_scaling": {"mrope_section": [16, 24, 23]}}, "must have 64 frequencies in all"),
        ({"num_attention_heads": 40}, "must be divisible by num_attention_heads=40"),
        ({"model_type": "qwen3_vl_text"}, "model_type='qwen3_vl_text'"),
        ({"use_sliding_window": True}, "use_sliding_window=True"),
        ({"layer_types": ["sliding_attention"]}, "layer_types"),
    ],
)
def test_a_config_of_qwen_2_5_that_is_not_supported_is_an_error(changes, message):
    with pytest.raises(ValueError, match=message):
        config_from_dict(Qwen2_5_VLTextConfig, changes)


def test_rows_and_columns_take_turns_with_frames_or_follow_them():
    sections = RotarySectionsConfig().axes(64)
    assert sections.tolist() == [0] * 16 + [1] * 24 + [2] * 24
    published = RotaryAxesConfig().axes(64)
    assert list(published[:6]) == [0, 1, 2, 0, 1, 2]
    assert list(published[57:]) == [0, 1, 2, 0, 0, 0, 0]
    assert [int((published == axis).sum()) for axis in range(3)] == [24, 20, 20]


@pytest.mark.parametrize("kind", [*first(KINDS, 2), *first(OLDER, 2)])
def test_saved_it_opens_in_transformers(tmp_path, kind):
    theirs = save(tmp_path / "in", kind)
    model = load_network(tmp_path / "in")
    save_network(model, tmp_path / "out", max_shard_size=10_000)
    again, report = type(theirs).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not report["unexpected_keys"]
    assert not report["missing_keys"]
    assert load_network(tmp_path / "out").config == model.config
    text = getattr(again.config, "text_config", again.config)
    wanted = SEEING[kind[: kind.index("VL") + 2]]["text_config"]
    for key, value in wanted.items():
        if key != "rope_parameters":
            assert getattr(text, key) == value, key
    for key, value in wanted["rope_parameters"].items():
        assert text.rope_parameters[key] == value, key
    for name, value in theirs.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        (np.zeros((3, 12), int), "position_ids must be integers 3 13 or 3 3 13"),
        (np.zeros((2, 3, 13), int), "position_ids must be integers"),
        (np.zeros((3, 13)), "position_ids must be integers .*float64"),
    ],
)
def test_positions_of_another_form_are_an_error(tmp_path, positions, message):
    save(tmp_path)
    with pytest.raises(ValueError, match=message):
        load_network(tmp_path)(IDS, None, positions)


def test_positions_of_qwen_3_have_no_axes(tmp_path):
    save(tmp_path, "Qwen3Model")
    with pytest.raises(ValueError, match="position_ids must be b t "):
        load_network(tmp_path)(IDS, None, np.zeros((3, 3, 13), int))


def test_full_size_models_have_as_many_parameters_as_published():
    # Qwen3-VL-4B-Instruct without its tower.
    text: dict = {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36}
    text |= {"num_attention_heads": 32, "num_key_value_heads": 8}
    network = Network(Qwen3VLModel, config_from_dict(Qwen3VLConfig, {"text_config": text}))
    assert sum(np.prod(leaf.shape) for leaf in jax.tree.leaves(network.shapes)) == 4_022_468_096
    # Qwen2.5-VL-7B-Instruct without its tower and its head.
    text = {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28}
    text |= {"num_attention_heads": 28, "num_key_value_heads": 4}
    network = Network(Qwen2_5_VLModel, config_from_dict(Qwen2_5_VLConfig, {"text_config": text}))
    assert sum(np.prod(leaf.shape) for leaf in jax.tree.leaves(network.shapes)) == 7_070_619_136
