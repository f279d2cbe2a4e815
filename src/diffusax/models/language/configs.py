"""The configs of language models."""

import dataclasses
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta

from diffusax.boundary.config import Channels, Epsilon, Heads, Keyed, Layers, check_types
from diffusax.models.clip_configs import IGNORED, Tokens

HeadSize = Annotated[int, Meta(ge=2, le=1024)]
Theta = Annotated[float, Meta(ge=1, le=1e12)]


@dataclasses.dataclass(frozen=True)
class Qwen3Config(Keyed):
    """The options of transformers' Qwen3Config that change the result.

    num_key_value_heads: those that serve num_attention_heads heads of queries. rope_theta: the
    longest wavelength of rotary positions over 2 pi.
    """

    class_name: ClassVar[str] = "Qwen3ForCausalLM"
    fixed: ClassVar[dict[str, Any]] = {
        "model_type": "qwen3",
        "hidden_act": "silu",
        "use_sliding_window": False,
    }
    ignored: ClassVar[frozenset[str]] = IGNORED - {"tie_word_embeddings"} | {
        "eos_token_id",
        "sliding_window",
        "max_window_layers",
    }

    vocab_size: Tokens = 151936
    hidden_size: Channels = 4096
    intermediate_size: Channels = 22016
    num_hidden_layers: Layers = 32
    num_attention_heads: Heads = 32
    num_key_value_heads: Heads = 32
    head_dim: HeadSize = 128
    max_position_embeddings: Annotated[int, Meta(ge=1, le=10**8)] = 32768
    rms_norm_eps: Epsilon = 1e-6
    rope_theta: Theta = 10000.0
    attention_bias: bool = False
    tie_word_embeddings: bool = False

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
        unset = ("rope_scaling", "rope_parameters", "layer_types", "num_key_value_heads")
        for name in unset:
            if name in data and data[name] is None:
                del data[name]
        if "num_key_value_heads" not in data and "num_attention_heads" in data:
            data["num_key_value_heads"] = data["num_attention_heads"]
        return data


@dataclasses.dataclass(frozen=True)
class T5Config(Keyed):
    """The options of transformers' T5Config that change what its encoder returns.

    relative_attention_num_buckets: the number of biases for distances between tokens, which all
    distances from relative_attention_max_distance on share.
    """

    class_name: ClassVar[str] = "T5EncoderModel"
    fixed: ClassVar[dict[str, Any]] = {"model_type": "t5"}
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
