import jax
import numpy as np
import pytest
import torch
import transformers
from tiny import randomize

from diffusax.checkpoints import load_network, save_network
from diffusax.config import config_from_dict
from diffusax.models import CLIPTextConfig

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
IDS = np.array([[98, 5, 7, 99, 99, 99], [98, 1, 2, 3, 99, 0]], np.int32)


def save(folder, model_class, **config):
    model = randomize(model_class(transformers.CLIPTextConfig(**{**TINY, **config})))
    model.save_pretrained(folder)
    return model


def assert_close(actual, expected):
    expected = expected.numpy()
    assert np.abs(np.asarray(actual) - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize(
    "config",
    [
        {"hidden_act": "quick_gelu"},
        {"hidden_act": "gelu"},
        # The highest id is at another place than the first eos token would be.
        {"eos_token_id": 2},
    ],
)
@pytest.mark.parametrize(
    "model_class", [transformers.CLIPTextModel, transformers.CLIPTextModelWithProjection]
)
def test_every_output_equals_transformers(tmp_path, model_class, config):
    model = save(tmp_path, model_class, **config)
    network = load_network(tmp_path)
    assert network.class_name == model_class.__name__
    with torch.no_grad():
        expected = model(torch.tensor(IDS), output_hidden_states=True)
    actual = jax.jit(network.apply)(network.params, IDS)
    assert_close(actual.last_hidden_state, expected.last_hidden_state)
    for ours, theirs in zip(actual.hidden_states, expected.hidden_states, strict=True):
        assert_close(ours, theirs)
    if model_class is transformers.CLIPTextModel:
        assert_close(actual.pooler_output, expected.pooler_output)
    else:
        assert_close(actual.text_embeds, expected.text_embeds)


def test_clip_skip_leaves_out_the_last_layers(tmp_path):
    model = save(tmp_path, transformers.CLIPTextModel)
    network = load_network(tmp_path)
    with torch.no_grad():
        hidden = model(torch.tensor(IDS), output_hidden_states=True).hidden_states
        expected = model.final_layer_norm(hidden[-2])
    actual = network.apply(network.params, IDS, method="encode", clip_skip=1)
    assert_close(actual, expected)


def test_saved_encoder_opens_in_transformers(tmp_path):
    model = save(tmp_path / "in", transformers.CLIPTextModel)
    save_network(load_network(tmp_path / "in"), tmp_path / "out")
    again = transformers.CLIPTextModel.from_pretrained(tmp_path / "out")
    for key, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[key], value), key


def test_unsupported_activation_is_an_error():
    with pytest.raises(ValueError, match="hidden_act"):
        config_from_dict(CLIPTextConfig, {"hidden_act": "relu"})
