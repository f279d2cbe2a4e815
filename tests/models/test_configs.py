"""Configs from files: every value is one that the network supports, or an error that names it."""

import json
import math

import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import TEXT, UNET, VAE

from diffusax import models
from diffusax.config import config_from_dict, config_to_dict
from diffusax.models.rngs import ShapeRngs

UNET_CONFIG = models.UNet2DConditionConfig
VAE_CONFIG = models.AutoencoderKLConfig
TINY_CONFIG = models.AutoencoderTinyConfig
TEXT_CONFIG = models.CLIPTextConfig
CONTROL_CONFIG = models.ControlNetConfig


def nested(depth):
    value = 1
    for _ in range(depth):
        value = [value]
    return value


BAD = [
    (UNET_CONFIG, "attention_head_dim", 0),
    (UNET_CONFIG, "attention_head_dim", -6),
    (UNET_CONFIG, "attention_head_dim", 999),
    (UNET_CONFIG, "attention_head_dim", [8, 8]),
    (UNET_CONFIG, "layers_per_block", 10**9),
    (UNET_CONFIG, "layers_per_block", 64),
    (UNET_CONFIG, "layers_per_block", [2, 2, 2, "2"]),
    (UNET_CONFIG, "layers_per_block", nested(10_000)),
    (UNET_CONFIG, "transformer_layers_per_block", 10**9),
    (UNET_CONFIG, "transformer_layers_per_block", 60),
    (UNET_CONFIG, "transformer_layers_per_block", [[1, 1], [1, 1], [1, 1], [1, 1]]),
    (UNET_CONFIG, "reverse_transformer_layers_per_block", [1]),
    (UNET_CONFIG, "sample_size", 10**9),
    (UNET_CONFIG, "sample_size", [64, 64, 64]),
    (UNET_CONFIG, "sample_size", "64"),
    (UNET_CONFIG, "block_out_channels", []),
    (UNET_CONFIG, "block_out_channels", [320, 640, 1280, 1281]),
    (UNET_CONFIG, "block_out_channels", [320, 640, 1280]),
    (UNET_CONFIG, "block_out_channels", 320),
    (UNET_CONFIG, "block_out_channels", {"0": 320}),
    (UNET_CONFIG, "block_out_channels", [320] * 1000),
    (UNET_CONFIG, "down_block_types", ["DownBlock2D"] * 3 + ["KDownBlock2D"]),
    (UNET_CONFIG, "down_block_types", "DownBlock2D"),
    (UNET_CONFIG, "up_block_types", ["UpBlock2D"]),
    (UNET_CONFIG, "norm_num_groups", 0),
    (UNET_CONFIG, "norm_num_groups", 7),
    (UNET_CONFIG, "norm_num_groups", None),
    (UNET_CONFIG, "norm_eps", math.nan),
    (UNET_CONFIG, "norm_eps", -1e-5),
    (UNET_CONFIG, "mid_block_scale_factor", 0),
    (UNET_CONFIG, "mid_block_scale_factor", math.inf),
    (UNET_CONFIG, "in_channels", 4.5),
    (UNET_CONFIG, "in_channels", True),
    (UNET_CONFIG, "flip_sin_to_cos", 1),
    (UNET_CONFIG, "freq_shift", "0"),
    (UNET_CONFIG, "conv_in_kernel", 4),
    (UNET_CONFIG, "num_class_embeds", 10**12),
    (UNET_CONFIG, "class_embed_type", "projection"),
    (UNET_CONFIG, "addition_embed_type", "text_time"),
    (UNET_CONFIG, "addition_embed_type", "text"),
    (UNET_CONFIG, "downsample_padding", 2),
    (UNET_CONFIG, "cross_attention_dim", nested(3)),
    (UNET_CONFIG, "dropout", 0.5),
    (UNET_CONFIG, "dropout", nested(10_000)),
    (UNET_CONFIG, "made_up", nested(10_000)),
    (CONTROL_CONFIG, "conditioning_embedding_out_channels", None),
    (CONTROL_CONFIG, "conditioning_channels", 0),
    (CONTROL_CONFIG, "global_pool_conditions", "yes"),
    (VAE_CONFIG, "scaling_factor", math.nan),
    (VAE_CONFIG, "scaling_factor", 0.0),
    (VAE_CONFIG, "scaling_factor", [0.18215]),
    (VAE_CONFIG, "scaling_factor", 10**400),
    (VAE_CONFIG, "shift_factor", math.inf),
    (VAE_CONFIG, "latents_mean", [0.0]),
    (VAE_CONFIG, "latents_std", [1.0, 1.0, 1.0, 0.0]),
    (VAE_CONFIG, "down_block_types", ["AttnDownEncoderBlock2D"]),
    (VAE_CONFIG, "norm_num_groups", 3),
    (VAE_CONFIG, "layers_per_block", 10**9),
    (TINY_CONFIG, "num_encoder_blocks", [1, 3, 3]),
    (TINY_CONFIG, "num_decoder_blocks", [3, 3, 3, 10**9]),
    (TINY_CONFIG, "encoder_block_out_channels", [64, 64, 64, 32]),
    (TINY_CONFIG, "upsampling_scaling_factor", 0),
    (TINY_CONFIG, "latent_magnitude", 0),
    (TEXT_CONFIG, "num_attention_heads", 0),
    (TEXT_CONFIG, "num_attention_heads", -6),
    (TEXT_CONFIG, "num_attention_heads", 7),
    (TEXT_CONFIG, "num_hidden_layers", 10**9),
    (TEXT_CONFIG, "vocab_size", 10**12),
    (TEXT_CONFIG, "hidden_act", "silu"),
    (TEXT_CONFIG, "hidden_act", ["gelu"]),
    (TEXT_CONFIG, "eos_token_id", [2]),
    (TEXT_CONFIG, "eos_token_id", -1),
]


@pytest.mark.parametrize(("cls", "option", "value"), BAD)
def test_a_bad_value_is_an_error_that_names_file_and_option(cls, option, value):
    with pytest.raises(ValueError, match=rf"^unet/config.json: .*{option}") as caught:
        config_from_dict(cls, {option: value}, source="unet/config.json")
    message = str(caught.value)
    assert len(message) < 500
    assert "\n" not in message


@pytest.mark.parametrize(("cls", "option", "value"), BAD)
def test_a_config_built_in_python_passes_the_same_door(cls, option, value):
    if option in {field.name for field in cls.__dataclass_fields__.values()}:
        with pytest.raises(ValueError, match=option):
            cls(**{option: value})


def test_a_choice_names_the_others():
    with pytest.raises(ValueError, match="only 'quick_gelu' or 'gelu'"):
        TEXT_CONFIG(hidden_act="silu")


@pytest.mark.parametrize("data", [[], None, "config", 3])
def test_a_file_that_holds_no_object_is_an_error(data):
    with pytest.raises(ValueError, match="JSON object"):
        config_from_dict(UNET_CONFIG, data)


def test_whole_numbers_stand_for_floats_and_lists_for_tuples():
    config = UNET_CONFIG(mid_block_scale_factor=1, block_out_channels=[32, 64, 64, 64])
    assert isinstance(config.mid_block_scale_factor, float)
    assert config.block_out_channels == (32, 64, 64, 64)
    assert hash(config) == hash(UNET_CONFIG(block_out_channels=(32, 64, 64, 64)))


def test_options_that_published_sdxl_checkpoints_have_are_read():
    """Nulls of the base model's file, averaging's options in the inpainting model's."""
    averaging = {
        "decay": 0.9999,
        "inv_gamma": 1.0,
        "min_decay": 0.0,
        "optimization_step": 37000,
        "power": 0.6666666666666666,
        "update_after_step": 0,
        "use_ema_warmup": False,
    }
    data = {
        "_class_name": "UNet2DConditionModel",
        "_name_or_path": "some/where",
        **averaging,
        "attention_head_dim": [5, 10, 20],
        "block_out_channels": [320, 640, 1280],
        "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
        "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
        "transformer_layers_per_block": [0, 2, 10],
        "mid_block_only_cross_attention": None,
        "num_attention_heads": None,
        "num_class_embeds": None,
        "reverse_transformer_layers_per_block": None,
        "upcast_attention": None,
    }
    config = config_from_dict(UNET_CONFIG, data)
    assert config.transformer_layers_per_block == (0, 2, 10)


NETWORKS = {
    "UNet2DConditionModel": UNET["sd1"],
    "ControlNetModel": {
        k: v for k, v in UNET["sd1"].items() if k not in ("up_block_types", "sample_size")
    },
    "AutoencoderKL": {**VAE, "latents_mean": (0.0,) * 4},
    "AutoencoderTiny": {},
    "CLIPTextModelWithProjection": TEXT,
}
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-10, 200)
    | st.sampled_from([10**4, 65536, 10**9, 10**30, -(10**30), 2**63, 2**64])
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["DownBlock2D", "CrossAttnUpBlock2D", "gelu", "timestep", "text_time"])
)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)


@st.composite
def mutated(draw):
    """A network's class and its config.json after up to three changes."""
    name = draw(st.sampled_from(sorted(NETWORKS)))
    cls = models.MODELS[name].config_class
    data = json.loads(json.dumps(config_to_dict(cls(**NETWORKS[name]))))
    for _ in range(draw(st.integers(1, 3))):
        key = draw(st.sampled_from(sorted(data)))
        value = data[key]
        match draw(st.sampled_from(["replace", "entry", "longer", "shorter"])):
            case "entry" if isinstance(value, list) and value:
                value[draw(st.integers(0, len(value) - 1))] = draw(JSON)
            case "longer" if isinstance(value, list) and value:
                value.append(draw(st.sampled_from(value)))
            case "shorter" if isinstance(value, list) and value:
                value.pop()
            case _:
                data[key] = draw(JSON)
    return name, data


def config_or_message(cls, data):
    try:
        return config_from_dict(cls, data)
    except ValueError as error:
        return str(error)


@settings(max_examples=500, deadline=20_000, derandomize=True)
@given(mutated())
def test_a_changed_config_gives_a_network_or_a_clear_error(case):
    name, data = case
    module_class = models.MODELS[name]
    config = config_or_message(module_class.config_class, data)
    if isinstance(config, str):
        assert config.startswith("config.json: ")
    else:
        hash(config)
        nnx.split(module_class(config, rngs=ShapeRngs()))
        assert config_from_dict(module_class.config_class, config_to_dict(config)) == config
