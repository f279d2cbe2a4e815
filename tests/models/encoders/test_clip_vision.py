import dataclasses
import json

import jax
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.tiny import randomize

import diffusax
from diffusax.boundary.config import config_from_dict
from diffusax.checkpoints import save_network
from diffusax.models import CLIPConfig, CLIPTextConfig, CLIPVisionConfig
from diffusax.networks import load_network

VISION = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "projection_dim": 16,
    "image_size": 30,
    "patch_size": 8,
}
TEXT = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "projection_dim": 12,
    "bos_token_id": 98,
    "eos_token_id": 99,
}
IDS = np.array([[98, 5, 7, 99, 99, 99], [98, 1, 2, 7, 99, 0]], np.int32)
MODELS = (transformers.CLIPVisionModel, transformers.CLIPVisionModelWithProjection)


def save(folder, model_class, **config):
    model = randomize(model_class(transformers.CLIPVisionConfig(**{**VISION, **config})))
    model.save_pretrained(folder)
    return model


def save_whole(folder, **text):
    config = transformers.CLIPConfig(
        text_config={**TEXT, **text}, vision_config=VISION, projection_dim=20
    )
    model = randomize(transformers.CLIPModel(config))
    model.logit_scale.data = torch.tensor(1.3)
    model.save_pretrained(folder)
    return model


def pixels(size=30, channels=3):
    return np.random.default_rng(0).standard_normal((2, size, size, channels), np.float32)


def channels_first(array):
    return torch.tensor(array.transpose(0, 3, 1, 2))


def assert_close(actual, expected):
    expected = expected.numpy()
    assert actual.shape == expected.shape
    assert np.abs(np.asarray(actual) - expected).max() <= 1e-5 * np.abs(expected).max()


@torch.no_grad()
@pytest.mark.parametrize(
    "config",
    [
        {"hidden_act": "quick_gelu"},
        {"hidden_act": "gelu", "layer_norm_eps": 1e-2, "image_size": 32},
        # Pixels at the edges that make no whole patch, and one patch in all.
        {"image_size": 23, "patch_size": 5, "num_channels": 1},
        {"image_size": 13, "patch_size": 7},
    ],
)
@pytest.mark.parametrize("model_class", MODELS)
def test_every_output_equals_transformers(tmp_path, model_class, config):
    model = save(tmp_path, model_class, **config)
    network = load_network(tmp_path)
    assert network.class_name == model_class.__name__
    x = pixels(model.config.image_size, model.config.num_channels)
    expected = model(channels_first(x), output_hidden_states=True)
    actual = jax.jit(network.apply)(network.params, x)
    assert_close(actual.last_hidden_state, expected.last_hidden_state)
    for ours, theirs in zip(actual.hidden_states, expected.hidden_states, strict=True):
        assert_close(ours, theirs)
    if model_class is transformers.CLIPVisionModel:
        assert_close(actual.pooler_output, expected.pooler_output)
        assert actual.image_embeds is None
    else:
        assert_close(actual.image_embeds, expected.image_embeds)


@pytest.mark.slow
@torch.no_grad()
def test_both_towers_equal_transformers(tmp_path):
    model = save_whole(tmp_path)
    network = load_network(tmp_path)
    x = pixels()
    inputs = {"input_ids": torch.tensor(IDS), "pixel_values": channels_first(x)}
    images, texts = (
        find(inputs[name]).pooler_output
        for find, name in (
            (model.get_image_features, "pixel_values"),
            (model.get_text_features, "input_ids"),
        )
    )
    assert_close(network.run(x, method="get_image_features"), images)
    assert_close(network.run(IDS, method="get_text_features"), texts)
    assert_close(network.run(IDS, x).logits_per_image, model(**inputs).logits_per_image)

    vision = diffusax.CLIPVisionModelWithProjection.from_pretrained(tmp_path)
    assert vision.class_name == "CLIPVisionModelWithProjection"
    assert_close(vision.run(x).image_embeds, images)
    text = diffusax.CLIPTextModelWithProjection.from_pretrained(tmp_path)
    assert_close(text.run(IDS).text_embeds, texts)
    assert diffusax.CLIPTextModel.from_pretrained(tmp_path).run(IDS).text_embeds is None
    with pytest.raises(ValueError, match="holds a CLIPModel, not a ControlNetModel"):
        diffusax.ControlNetModel.from_pretrained(tmp_path)


def test_saved_networks_open_in_transformers(tmp_path):
    for model in (
        save_whole(tmp_path / "CLIPModel"),
        save(tmp_path / MODELS[1].__name__, MODELS[1]),
    ):
        name = type(model).__name__
        network = load_network(tmp_path / name)
        save_network(network, tmp_path / "out" / name)
        again, report = type(model).from_pretrained(
            tmp_path / "out" / name, output_loading_info=True
        )
        assert not report["missing_keys"]
        assert not report["unexpected_keys"]
        for key, value in model.state_dict().items():
            assert torch.equal(again.state_dict()[key], value), key
        parts = (again.config, network.config)
        if name == "CLIPModel":
            assert again.config.projection_dim == 20
            parts = (again.config.vision_config, network.config.vision_config)
        for field in dataclasses.fields(CLIPVisionConfig):
            assert getattr(parts[0], field.name) == getattr(parts[1], field.name), field.name


def test_files_of_transformers_4_are_read(tmp_path):
    save_whole(tmp_path)
    expected = load_network(tmp_path)
    file = tmp_path / "model.safetensors"
    # Buffers that transformers before 4.31 saved.
    names = [f"{tower}.embeddings.position_ids" for tower in ("text_model", "vision_model")]
    save_file({**load_file(file), **{name: torch.arange(77)[None] for name in names}}, file)
    path = tmp_path / "config.json"
    data = json.loads(path.read_text())
    of_texts = {"bad_words_ids": None, "length_penalty": 1.0, "tf_legacy_loss": False, "top_k": 50}
    for tower in ("text_config", "vision_config"):
        data[tower] |= {**of_texts, "_name_or_path": "", "id2label": {"0": "LABEL_0"}}
    data["vision_config"]["eos_token_id"] = None
    data |= {"text_config_dict": None, "vision_config_dict": None, "torch_dtype": "float32"}
    path.write_text(json.dumps(data))
    again = load_network(tmp_path)
    assert again.config == expected.config
    jax.tree.map(np.testing.assert_array_equal, again.params, expected.params)


def test_old_dictionaries_and_the_defaults_count():
    """As openai/clip-vit-large-patch14 has them; in both of its towers' own, eos_token_id is 2."""
    text = {"hidden_size": 64, "num_attention_heads": 4}
    data = {"text_config": {**text, "eos_token_id": 2}, "text_config_dict": text}
    ours = config_from_dict(CLIPConfig, data)
    theirs = transformers.CLIPConfig(**data)
    assert ours.text_config.eos_token_id == theirs.text_config.eos_token_id == 49407
    assert ours.text_config == CLIPTextConfig(**text)
    assert ours.vision_config == CLIPVisionConfig()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"text_config": {"hidden_act": "relu"}}, "text_config: hidden_act='relu'"),
        ({"vision_config": {"rope": 1}}, "vision_config: CLIPVisionModel has no option 'rope'"),
        ({"vision_config": [1]}, "vision_config must hold a JSON object"),
        ({"vision_config": {"image_size": 8, "patch_size": 16}}, "must be at least patch_size=16"),
        ({"vision_config": {"hidden_size": 30}}, "must be divisible"),
        ({"model_type": "siglip"}, "model_type"),
    ],
)
def test_a_config_that_is_not_supported_is_an_error(config, message):
    with pytest.raises(ValueError, match=message):
        config_from_dict(CLIPConfig, config)


def test_a_picture_of_another_size_is_an_error(tmp_path):
    save(tmp_path, MODELS[1])
    network = load_network(tmp_path)
    with pytest.raises(ValueError, match=r"must have shape \(images, 30, 30, 3\).*2, 32, 32, 3"):
        network.run(pixels(32))
