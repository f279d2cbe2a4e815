"""Configs from files: every value is one that the network supports, or an error that names it."""

import json
import math

import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from support.effort import examples
from support.tiny import TEXT, UNET, VAE

from diffusax.boundary.config import config_from_dict, config_to_dict
from diffusax.models import (
    MODELS,
    AsymmetricAutoencoderKLConfig,
    AutoencoderKLConfig,
    AutoencoderTinyConfig,
    CLIPTextConfig,
    ControlNetConfig,
    UNet2DConditionConfig,
)
from diffusax.models.layers.rngs import ShapeRngs


def nested(depth):
    value = 1
    for _ in range(depth):
        value = [value]
    return value


BAD = [
    (UNet2DConditionConfig, "attention_head_dim", 0),
    (UNet2DConditionConfig, "attention_head_dim", -6),
    (UNet2DConditionConfig, "attention_head_dim", 999),
    (UNet2DConditionConfig, "attention_head_dim", [8, 8]),
    (UNet2DConditionConfig, "layers_per_block", 10**9),
    (UNet2DConditionConfig, "layers_per_block", 64),
    (UNet2DConditionConfig, "layers_per_block", [2, 2, 2, "2"]),
    (UNet2DConditionConfig, "layers_per_block", nested(10_000)),
    (UNet2DConditionConfig, "transformer_layers_per_block", 10**9),
    (UNet2DConditionConfig, "transformer_layers_per_block", 60),
    (UNet2DConditionConfig, "transformer_layers_per_block", [[1, 1], [1, 1], [1, 1], [1, 1]]),
    (UNet2DConditionConfig, "reverse_transformer_layers_per_block", [1]),
    (UNet2DConditionConfig, "sample_size", 10**9),
    (UNet2DConditionConfig, "sample_size", [64, 64, 64]),
    (UNet2DConditionConfig, "sample_size", "64"),
    (UNet2DConditionConfig, "block_out_channels", []),
    (UNet2DConditionConfig, "block_out_channels", [320, 640, 1280, 1281]),
    (UNet2DConditionConfig, "block_out_channels", [320, 640, 1280]),
    (UNet2DConditionConfig, "block_out_channels", 320),
    (UNet2DConditionConfig, "block_out_channels", {"0": 320}),
    (UNet2DConditionConfig, "block_out_channels", [320] * 1000),
    (UNet2DConditionConfig, "down_block_types", ["DownBlock2D"] * 3 + ["KDownBlock2D"]),
    (UNet2DConditionConfig, "down_block_types", "DownBlock2D"),
    (UNet2DConditionConfig, "up_block_types", ["UpBlock2D"]),
    (UNet2DConditionConfig, "norm_num_groups", 0),
    (UNet2DConditionConfig, "norm_num_groups", 7),
    (UNet2DConditionConfig, "norm_num_groups", None),
    (UNet2DConditionConfig, "norm_eps", math.nan),
    (UNet2DConditionConfig, "norm_eps", -1e-5),
    (UNet2DConditionConfig, "mid_block_scale_factor", 0),
    (UNet2DConditionConfig, "mid_block_scale_factor", math.inf),
    (UNet2DConditionConfig, "in_channels", 4.5),
    (UNet2DConditionConfig, "in_channels", True),
    (UNet2DConditionConfig, "flip_sin_to_cos", 1),
    (UNet2DConditionConfig, "freq_shift", "0"),
    (UNet2DConditionConfig, "conv_in_kernel", 4),
    (UNet2DConditionConfig, "num_class_embeds", 10**12),
    (UNet2DConditionConfig, "class_embed_type", "projection"),
    (UNet2DConditionConfig, "addition_embed_type", "text_time"),
    (UNet2DConditionConfig, "addition_embed_type", "text"),
    (UNet2DConditionConfig, "downsample_padding", 2),
    (UNet2DConditionConfig, "cross_attention_dim", nested(3)),
    (UNet2DConditionConfig, "dropout", 0.5),
    (UNet2DConditionConfig, "dropout", nested(10_000)),
    (UNet2DConditionConfig, "made_up", nested(10_000)),
    (ControlNetConfig, "conditioning_embedding_out_channels", None),
    (ControlNetConfig, "conditioning_channels", 0),
    (ControlNetConfig, "global_pool_conditions", "yes"),
    (AutoencoderKLConfig, "scaling_factor", math.nan),
    (AutoencoderKLConfig, "scaling_factor", 0.0),
    (AutoencoderKLConfig, "scaling_factor", [0.18215]),
    (AutoencoderKLConfig, "scaling_factor", 10**400),
    (AutoencoderKLConfig, "shift_factor", math.inf),
    (AutoencoderKLConfig, "latents_mean", [0.0]),
    (AutoencoderKLConfig, "latents_std", [1.0, 1.0, 1.0, 0.0]),
    (AutoencoderKLConfig, "down_block_types", ["AttnDownEncoderBlock2D"]),
    (AutoencoderKLConfig, "norm_num_groups", 3),
    (AutoencoderKLConfig, "layers_per_block", 10**9),
    (AutoencoderTinyConfig, "num_encoder_blocks", [1, 3, 3]),
    (AutoencoderTinyConfig, "num_decoder_blocks", [3, 3, 3, 10**9]),
    (AutoencoderTinyConfig, "encoder_block_out_channels", [64, 64, 64, 32]),
    (AutoencoderTinyConfig, "upsampling_scaling_factor", 0),
    (AutoencoderTinyConfig, "latent_magnitude", 0),
    (AsymmetricAutoencoderKLConfig, "up_block_types", ["UpBlock2D"]),
    (AsymmetricAutoencoderKLConfig, "down_block_out_channels", [64, 64]),
    (AsymmetricAutoencoderKLConfig, "up_block_out_channels", [48]),
    (AsymmetricAutoencoderKLConfig, "layers_per_up_block", 10**9),
    (AsymmetricAutoencoderKLConfig, "scaling_factor", math.nan),
    (AsymmetricAutoencoderKLConfig, "norm_num_groups", 0),
    (AsymmetricAutoencoderKLConfig, "block_out_channel", [64]),
    (CLIPTextConfig, "num_attention_heads", 0),
    (CLIPTextConfig, "num_attention_heads", -6),
    (CLIPTextConfig, "num_attention_heads", 7),
    (CLIPTextConfig, "num_hidden_layers", 10**9),
    (CLIPTextConfig, "vocab_size", 10**12),
    (CLIPTextConfig, "hidden_act", "silu"),
    (CLIPTextConfig, "hidden_act", ["gelu"]),
    (CLIPTextConfig, "eos_token_id", [2]),
    (CLIPTextConfig, "eos_token_id", -1),
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
        CLIPTextConfig(hidden_act="silu")


@pytest.mark.parametrize("data", [[], None, "config", 3])
def test_a_file_that_holds_no_object_is_an_error(data):
    with pytest.raises(ValueError, match="JSON object"):
        config_from_dict(UNet2DConditionConfig, data)


def test_whole_numbers_stand_for_floats_and_lists_for_tuples():
    config = UNet2DConditionConfig(mid_block_scale_factor=1, block_out_channels=[32, 64, 64, 64])
    assert isinstance(config.mid_block_scale_factor, float)
    assert config.block_out_channels == (32, 64, 64, 64)
    assert hash(config) == hash(UNet2DConditionConfig(block_out_channels=(32, 64, 64, 64)))


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
    config = config_from_dict(UNet2DConditionConfig, data)
    assert config.transformer_layers_per_block == (0, 2, 10)


NETWORKS = {
    "UNet2DConditionModel": UNET["sd1"],
    "ControlNetModel": {
        k: v for k, v in UNET["sd1"].items() if k not in ("up_block_types", "sample_size")
    },
    "AutoencoderKL": {**VAE, "latents_mean": (0.0,) * 4},
    "AsymmetricAutoencoderKL": {
        "down_block_types": ("DownEncoderBlock2D",) * 2,
        "down_block_out_channels": (32, 64),
        "up_block_types": ("UpDecoderBlock2D",) * 2,
        "up_block_out_channels": (32, 96),
    },
    "AutoencoderTiny": {},
    "CLIPTextModelWithProjection": TEXT,
    "CLIPVisionModel": {"num_attention_heads": 4},
    "CLIPModel": {"text_config": TEXT, "vision_config": {"num_hidden_layers": 1}},
    "Qwen2_5_VLModel": {"text_config": {"num_hidden_layers": 2}, "vision_config": {"depth": 2}},
    "Qwen3Model": {"num_hidden_layers": 2},
    "Qwen3VLModel": {"text_config": {"num_hidden_layers": 2}, "vision_config": {"depth": 25}},
    "Qwen3VLTextModel": {"num_hidden_layers": 2, "rope_scaling": {"mrope_section": (2, 1, 1)}},
    "T5EncoderModel": {"num_layers": 2, "feed_forward_proj": "gated-gelu"},
    "UMT5EncoderModel": {"num_layers": 2},
    "WanTransformer3DModel": {"num_layers": 2, "image_dim": 8, "added_kv_proj_dim": 8},
    "WanVACETransformer3DModel": {"num_layers": 36, "image_dim": 8, "added_kv_proj_dim": 8},
    "AutoencoderKLFlux2": {"decoder_block_out_channels": (96, 192, 384, 384)},
    "AutoencoderKLQwenImage": {"dim_mult": (1, 2), "temperal_downsample": (True,)},
    "AutoencoderKLWan": {
        "is_residual": True,
        "patch_size": 2,
        "in_channels": 12,
        "out_channels": 12,
    },
    "QwenImageTransformer2DModel": {"num_layers": 2, "zero_cond_t": True},
    "Krea2Transformer2DModel": {"num_layers": 2, "axes_dims_rope": (16, 56, 56)},
    "Flux2Transformer2DModel": {"num_layers": 2, "num_single_layers": 2},
    "Flux3Transformer2DModel": {"num_layers": 2, "num_single_layers": 2},
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
    cls = MODELS[name].config_class
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


@settings(max_examples=examples(60, 500), deadline=20_000)
@given(mutated())
def test_a_changed_config_gives_a_network_or_a_clear_error(case):
    name, data = case
    module_class = MODELS[name]
    config = config_or_message(module_class.config_class, data)
    if isinstance(config, str):
        assert config.startswith("config.json: ")
    else:
        hash(config)
        nnx.split(module_class(config, rngs=ShapeRngs()))
        assert config_from_dict(module_class.config_class, config_to_dict(config)) == config
