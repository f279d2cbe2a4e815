"""The configs of encoders: CLIP and its towers, other vision transformers, Qwen3, T5."""

import dataclasses
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta

from diffusax.boundary.config import (
    Channels,
    Epsilon,
    Heads,
    Keyed,
    Layers,
    Pixels,
    Shift,
    check_types,
    config_from_dict,
)

Tokens = Annotated[int, Meta(ge=1, le=10**7)]
Activation = Literal["quick_gelu", "gelu"]

IGNORED = frozenset(
    """
    add_cross_attention architectures attention_dropout bad_words_ids begin_suppress_tokens
    bos_token_id chunk_size_feed_forward cross_attention_hidden_size decoder_start_token_id
    diversity_penalty do_sample dropout dtype early_stopping encoder_no_repeat_ngram_size
    exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id
    gradient_checkpointing id2label initializer_factor initializer_range is_decoder
    is_encoder_decoder label2id length_penalty max_length min_length no_repeat_ngram_size
    num_beam_groups num_beams num_return_sequences output_attentions output_hidden_states
    output_scores pad_token_id prefix problem_type pruned_heads remove_invalid_values
    repetition_penalty return_dict return_dict_in_generate sep_token_id suppress_tokens
    task_specific_params temperature tf_legacy_loss tie_encoder_decoder tie_word_embeddings
    tokenizer_class top_k top_p torch_dtype torchscript transformers_version typical_p
    use_bfloat16 use_cache
    """.split()  # noqa: SIM905
)
"""Options of training, and those that transformers 4 wrote for any model that might write text."""


@dataclasses.dataclass(frozen=True)
class CLIPTextConfig(Keyed):
    """The options of transformers' CLIPTextConfig that change the result.

    The pooled output is that of the first token with `eos_token_id`. If that is 2, as in
    checkpoints from before transformers 4.32, it is that of the highest token id.
    """

    class_name: ClassVar[str] = "CLIPTextModel"
    fixed: ClassVar[dict[str, Any]] = {"model_type": ("clip_text_model", "clip")}
    ignored: ClassVar[frozenset[str]] = IGNORED

    vocab_size: Tokens = 49408
    hidden_size: Channels = 512
    intermediate_size: Channels = 2048
    projection_dim: Channels = 512
    num_hidden_layers: Layers = 12
    num_attention_heads: Heads = 8
    max_position_embeddings: Annotated[int, Meta(ge=1, le=65536)] = 77
    hidden_act: Activation = "quick_gelu"
    layer_norm_eps: Epsilon = 1e-5
    eos_token_id: Annotated[int, Meta(ge=0, le=10**7)] = 49407

    def __post_init__(self) -> None:
        check_types(self)
        _check_heads(self)


@dataclasses.dataclass(frozen=True)
class VisionConfig(Keyed):
    """The options that vision transformers have in common."""

    class_name: ClassVar[str]
    fixed: ClassVar[dict[str, Any]]
    ignored: ClassVar[frozenset[str]] = IGNORED

    hidden_size: Channels = 768
    num_hidden_layers: Layers = 12
    num_attention_heads: Heads = 12
    num_channels: Annotated[int, Meta(ge=1, le=64)] = 3
    image_size: Pixels = 224
    patch_size: Pixels = 16
    hidden_act: Activation = "gelu"
    layer_norm_eps: Epsilon = 1e-6

    def __post_init__(self) -> None:
        check_types(self)
        _check_heads(self)
        if self.image_size < self.patch_size:
            raise ValueError(
                f"image_size={self.image_size} must be at least patch_size={self.patch_size}"
            )


@dataclasses.dataclass(frozen=True)
class CLIPVisionConfig(VisionConfig):
    """The options of transformers' CLIPVisionConfig that change the result."""

    class_name: ClassVar[str] = "CLIPVisionModel"
    fixed: ClassVar[dict[str, Any]] = {"model_type": ("clip_vision_model", "clip")}
    ignored: ClassVar[frozenset[str]] = IGNORED | {"eos_token_id"}

    intermediate_size: Channels = 3072
    projection_dim: Channels = 512
    patch_size: Pixels = 32
    hidden_act: Activation = "quick_gelu"
    layer_norm_eps: Epsilon = 1e-5

    @property
    def patches(self) -> int:
        """The number of patches of an image; pixels left over at its right and bottom do not
        count.
        """
        return (self.image_size // self.patch_size) ** 2


@dataclasses.dataclass(frozen=True)
class CLIPConfig(Keyed):
    """The options of transformers' CLIPConfig that change the result."""

    class_name: ClassVar[str] = "CLIPModel"
    fixed: ClassVar[dict[str, Any]] = {"model_type": "clip"}
    ignored: ClassVar[frozenset[str]] = IGNORED

    text_config: CLIPTextConfig = dataclasses.field(default_factory=CLIPTextConfig)
    vision_config: CLIPVisionConfig = dataclasses.field(default_factory=CLIPVisionConfig)
    projection_dim: Channels = 512
    logit_scale_init_value: Shift = 2.6592

    def __post_init__(self) -> None:
        for name, kind in _TOWERS.items():
            value = getattr(self, name)
            if not isinstance(value, kind):
                value = config_from_dict(kind, {} if value is None else value, source=name)
            object.__setattr__(self, name, value)
        check_types(self)

    @staticmethod
    def upgrade(data: dict[str, Any]) -> dict[str, Any]:
        """Returns what a file of transformers 4 says in the form of newer ones.

        If it has text_config_dict or vision_config_dict, these and the defaults replace text_config
        and vision_config (transformers' configuration_clip.py, CLIPConfig).
        """
        data = dict(data)
        for name in _TOWERS:
            old = data.pop(f"{name}_dict", None)
            if old is not None:
                data[name] = old
        return data


_TOWERS: dict[str, Any] = {"text_config": CLIPTextConfig, "vision_config": CLIPVisionConfig}


_OF_VIT = IGNORED | {
    "attention_probs_dropout_prob",
    "drop_path_rate",
    "encoder_stride",
    "hidden_dropout_prob",
    "pooler_act",
    "pooler_output_size",
}


@dataclasses.dataclass(frozen=True)
class ViTConfig(VisionConfig):
    """The options of transformers' ViTConfig that change the result."""

    class_name: ClassVar[str] = "ViTModel"
    fixed: ClassVar[dict[str, Any]] = {"model_type": "vit"}
    ignored: ClassVar[frozenset[str]] = _OF_VIT

    intermediate_size: Channels = 3072
    layer_norm_eps: Epsilon = 1e-12
    qkv_bias: bool = True


@dataclasses.dataclass(frozen=True)
class Dinov2Config(VisionConfig):
    """The options of transformers' Dinov2Config that change the result.

    image_size: the size of the images whose patches have the stored positions; those of other
    images are interpolated.
    """

    class_name: ClassVar[str] = "Dinov2Model"
    fixed: ClassVar[dict[str, Any]] = {"model_type": "dinov2"}
    ignored: ClassVar[frozenset[str]] = _OF_VIT | {
        *("apply_layernorm", "out_features", "out_indices", "reshape_hidden_states"),
        "stage_names",
    }

    mlp_ratio: Annotated[int, Meta(ge=1, le=64)] = 4
    patch_size: Pixels = 14
    qkv_bias: bool = True
    layerscale_value: Shift = 1.0
    use_swiglu_ffn: bool = False
    use_mask_token: bool = True

    @property
    def intermediate_size(self) -> int:
        """The width of the layers' MLPs; of gated ones two thirds, rounded up to eights."""
        width = self.hidden_size * self.mlp_ratio
        return (int(width * 2 / 3) + 7) // 8 * 8 if self.use_swiglu_ffn else width


def _check_heads(config: CLIPTextConfig | VisionConfig) -> None:
    if config.hidden_size % config.num_attention_heads:
        raise ValueError(
            f"hidden_size={config.hidden_size} must be divisible by num_attention_heads="
            f"{config.num_attention_heads}"
        )


HeadSize = Annotated[int, Meta(ge=2, le=1024)]
Theta = Annotated[float, Meta(ge=1, le=1e12)]


@dataclasses.dataclass(frozen=True)
class DecoderConfig(Keyed):
    """The options that Qwen's language models have in common.

    num_key_value_heads: those that serve num_attention_heads heads of queries. rope_theta: the
    longest wavelength of rotary positions over 2 pi. tie_last_hidden_states: whether the last of
    all hidden states is after the final norm.
    """

    class_name: ClassVar[str]
    fixed: ClassVar[dict[str, Any]]
    ignored: ClassVar[frozenset[str]] = IGNORED - {"tie_word_embeddings"} | {
        "eos_token_id",
        "sliding_window",
        "max_window_layers",
    }
    qk_norm: ClassVar[bool] = True
    """Whether queries and keys are normalised."""

    vocab_size: Tokens = 151936
    hidden_size: Channels = 4096
    intermediate_size: Channels = 22016
    num_hidden_layers: Layers = 32
    num_attention_heads: Heads = 32
    num_key_value_heads: Heads = 32
    max_position_embeddings: Annotated[int, Meta(ge=1, le=10**8)] = 32768
    rms_norm_eps: Epsilon = 1e-6
    rope_theta: Theta = 10000.0
    tie_word_embeddings: bool = False
    tie_last_hidden_states: bool = True

    def __post_init__(self) -> None:
        check_types(self)
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} must be divisible by "
                f"num_key_value_heads={self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even, for rotary positions")

    @staticmethod
    def upgrade(data: dict[str, Any]) -> dict[str, Any]:
        """Returns the options in transformers 4's words, without those that say nothing.

        transformers 5 keeps those of rotary positions in rope_parameters, and lists the kind of
        attention of each layer.
        """
        data = dict(data)
        rope = data.get("rope_parameters")
        if isinstance(rope, dict) and rope.get("rope_type", "default") == "default":
            del data["rope_parameters"]
            if "rope_theta" in rope:
                data["rope_theta"] = rope["rope_theta"]
        layers = data.get("layer_types")
        if isinstance(layers, list) and all(kind == "full_attention" for kind in layers):
            del data["layer_types"]
        for name in (
            *("rope_scaling", "rope_parameters", "layer_types", "num_key_value_heads"),
            "tie_last_hidden_states",
        ):
            if name in data and data[name] is None:
                del data[name]
        if "num_key_value_heads" not in data and "num_attention_heads" in data:
            data["num_key_value_heads"] = data["num_attention_heads"]
        return data


@dataclasses.dataclass(frozen=True)
class Qwen3Config(DecoderConfig):
    """The options of transformers' Qwen3Config that change the result, see `DecoderConfig`."""

    class_name: ClassVar[str] = "Qwen3ForCausalLM"
    fixed: ClassVar[dict[str, Any]] = {
        "model_type": "qwen3",
        "hidden_act": "silu",
        "use_sliding_window": False,
    }

    head_dim: HeadSize = 128
    attention_bias: bool = False

    @property
    def output_bias(self) -> bool:
        """Whether the last product of attention has a bias."""
        return self.attention_bias


@dataclasses.dataclass(frozen=True)
class T5Config(Keyed):
    """The options of transformers' T5Config that change what its encoder returns.

    relative_attention_num_buckets: the number of biases for distances between tokens, which all
    distances from relative_attention_max_distance on share.
    """

    class_name: ClassVar[str] = "T5EncoderModel"
    fixed: ClassVar[dict[str, Any]] = {"model_type": "t5"}
    layers_share_biases: ClassVar[bool] = True
    """Whether all layers use the first one's biases for distances."""
    ignored: ClassVar[frozenset[str]] = IGNORED | {
        "classifier_dropout",
        "dense_act_fn",
        "dropout_rate",
        "eos_token_id",
        "is_gated_act",
        "n_positions",
        "num_decoder_layers",
        "output_past",
        "scale_decoder_outputs",
    }

    vocab_size: Tokens = 32128
    d_model: Channels = 512
    d_kv: Annotated[int, Meta(ge=1, le=1024)] = 64
    d_ff: Channels = 2048
    num_layers: Layers = 6
    num_heads: Heads = 8
    relative_attention_num_buckets: Annotated[int, Meta(ge=4, le=65536)] = 32
    relative_attention_max_distance: Annotated[int, Meta(ge=2, le=10**6)] = 128
    layer_norm_epsilon: Epsilon = 1e-6
    feed_forward_proj: Literal["relu", "gated-gelu"] = "relu"

    def __post_init__(self) -> None:
        check_types(self)
        exact = self.relative_attention_num_buckets // 4
        if self.relative_attention_max_distance <= exact:
            raise ValueError(
                "relative_attention_max_distance must be more than a quarter of "
                f"relative_attention_num_buckets={self.relative_attention_num_buckets} "
                f"(got {self.relative_attention_max_distance})"
            )


@dataclasses.dataclass(frozen=True)
class UMT5Config(T5Config):
    """The options of transformers' UMT5Config that change what its encoder returns."""

    class_name: ClassVar[str] = "UMT5EncoderModel"
    fixed: ClassVar[dict[str, Any]] = {"model_type": "umt5"}
    layers_share_biases: ClassVar[bool] = False

    vocab_size: Tokens = 250112
    d_ff: Channels = 1024
    num_layers: Layers = 8
    num_heads: Heads = 6
    feed_forward_proj: Literal["relu", "gated-gelu"] = "gated-gelu"
