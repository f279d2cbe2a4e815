import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.tiny import randomize

from diffusax.boundary.config import config_from_dict
from diffusax.checkpoints import save_network
from diffusax.models import CLIPTextConfig
from diffusax.networks import load_network

TINY = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "projection_dim": 16,
    "bos_token_id": 98,
    "eos_token_id": 99,
}
# The end of the text, then pads: of the eos token in the first row, of another in the second.
IDS = np.array([[98, 5, 7, 99, 99, 99], [98, 1, 2, 7, 99, 0]], np.int32)
MODELS = (transformers.CLIPTextModel, transformers.CLIPTextModelWithProjection)


def save(folder, model_class, **config):
    model = randomize(model_class(transformers.CLIPTextConfig(**{**TINY, **config})))
    model.save_pretrained(folder)
    return model


def assert_close(actual, expected):
    expected = expected.numpy()
    assert np.abs(np.asarray(actual) - expected).max() <= 1e-5 * np.abs(expected).max()


@torch.no_grad()
@pytest.mark.parametrize(
    "config",
    [
        {"hidden_act": "quick_gelu"},
        {"hidden_act": "gelu", "layer_norm_eps": 1e-2},
        # The highest id is at another place than the first eos token, before and after 4.32.
        {"eos_token_id": 2},
        {"eos_token_id": 7},
    ],
)
@pytest.mark.parametrize("model_class", MODELS)
def test_every_output_equals_transformers(tmp_path, model_class, config):
    model = save(tmp_path, model_class, **config)
    network = load_network(tmp_path)
    assert network.class_name == model_class.__name__
    expected = model(torch.tensor(IDS), output_hidden_states=True)
    actual = jax.jit(network.apply)(network.params, IDS)
    assert_close(actual.last_hidden_state, expected.last_hidden_state)
    for ours, theirs in zip(actual.hidden_states, expected.hidden_states, strict=True):
        assert_close(ours, theirs)
    if model_class is transformers.CLIPTextModel:
        assert_close(actual.pooler_output, expected.pooler_output)
        assert actual.text_embeds is None
    else:
        assert_close(actual.text_embeds, expected.text_embeds)


@torch.no_grad()
def test_clip_skip_leaves_out_the_last_layers(tmp_path):
    model = save(tmp_path, transformers.CLIPTextModel)
    network = load_network(tmp_path)
    expected = model(torch.tensor(IDS), output_hidden_states=True)

    def encode(clip_skip):
        return network.apply(network.params, IDS, method="encode", clip_skip=clip_skip)

    assert_close(encode(None), expected.last_hidden_state)
    for n in (0, 1, 2, 3):
        assert_close(encode(n), model.final_layer_norm(expected.hidden_states[-1 - n]))
    for n in (-1, 4):
        with pytest.raises(ValueError, match=f"clip_skip must be from 0 to 3 .got {n}."):
            encode(n)


def test_more_tokens_than_positions_is_an_error(tmp_path):
    save(tmp_path, transformers.CLIPTextModel, max_position_embeddings=5)
    network = load_network(tmp_path)
    output = jax.eval_shape(network.apply, network.params, IDS[:, :5])
    assert output.last_hidden_state.shape == (2, 5, 32)
    with pytest.raises(ValueError, match="input_ids has 6 tokens for max_position_embeddings=5"):
        network.apply(network.params, IDS)


def test_network_runs_in_the_dtype_of_its_parameters(tmp_path):
    save(tmp_path, transformers.CLIPTextModel)
    half, single = (load_network(tmp_path, dtype=dtype) for dtype in ("bfloat16", "float32"))
    actual = half.apply(half.params, IDS, method="encode")
    expected = single.apply(single.params, IDS, method="encode")
    assert actual.dtype == jnp.bfloat16
    # bfloat16 has eight bits; three layers add up a few of its roundings.
    error = np.abs(np.asarray(actual, np.float32) - expected).max()
    assert 1e-4 < error / np.abs(expected).max() < 0.05


@pytest.mark.parametrize("prefix", ["text_model.", ""])
def test_names_of_transformers_4_and_5_are_read(tmp_path, prefix):
    save(tmp_path, transformers.CLIPTextModel)
    expected = load_network(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {name.removeprefix("text_model."): x for name, x in load_file(file).items()}
    # A buffer that transformers before 4.31 saved.
    tensors["embeddings.position_ids"] = torch.arange(77)[None]
    save_file({prefix + name: x for name, x in tensors.items()}, file)
    jax.tree.map(np.testing.assert_array_equal, load_network(tmp_path).params, expected.params)


@pytest.mark.parametrize("model_class", MODELS)
def test_saved_encoder_opens_in_transformers(tmp_path, model_class):
    model = save(tmp_path / "in", model_class, eos_token_id=7, layer_norm_eps=1e-2)
    save_network(load_network(tmp_path / "in"), tmp_path / "out")
    # The names of transformers 4, which 5 reads too.
    names = load_file(tmp_path / "out" / "model.safetensors").keys()
    assert {name.split(".")[0] for name in names} <= {"text_model", "text_projection"}
    again, report = model_class.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    for key, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[key], value), key
    for field in dataclasses.fields(CLIPTextConfig):
        assert getattr(again.config, field.name) == getattr(model.config, field.name), field.name


def test_options_of_training_and_of_old_files_are_left_aside(tmp_path):
    save(tmp_path, transformers.CLIPTextModel)
    path = tmp_path / "config.json"
    data = json.loads(path.read_text()) | {
        "_name_or_path": "openai/clip-vit-large-patch14",
        "attention_dropout": 0.1,
        "dropout": 0.1,
        "torch_dtype": "float16",
        "transformers_version": "4.22.0.dev0",
    }
    before = load_network(tmp_path).config
    path.write_text(json.dumps(data))
    assert load_network(tmp_path).config == before


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"hidden_act": "relu"}, "hidden_act='relu'"),
        ({"eos_token_id": [2, 99]}, "eos_token_id"),
        ({"eos_token_id": None}, "eos_token_id"),
        ({"hidden_size": 30, "num_attention_heads": 4}, "must be divisible"),
        ({"model_type": "siglip_text_model"}, "model_type"),
        ({"rope_theta": 1e4}, "has no option 'rope_theta'"),
    ],
)
def test_config_that_is_not_supported_is_an_error(config, message):
    with pytest.raises(ValueError, match=message):
        config_from_dict(CLIPTextConfig, config)


@pytest.mark.parametrize("token", [-1, 100, 2**40])
def test_a_token_that_the_embedding_does_not_have_is_an_error(tmp_path, token):
    save(tmp_path, transformers.CLIPTextModel)
    network = load_network(tmp_path)
    with pytest.raises(ValueError, match=f"token {token}, .*vocab_size is 100"):
        network.apply(network.params, np.array([[98, token, 99]]))
