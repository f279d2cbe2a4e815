"""CLIP's text encoder (Radford et al. 2021), as Stable Diffusion conditions on it."""

import dataclasses
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from msgspec import Meta

from diffusax.config import Channels, Epsilon, Heads, Layers, check_types
from diffusax.models.attention import attention
from diffusax.models.layers import Embedding, LayerNorm, Linear, gelu
from diffusax.runtime.mesh import Rules

Tokens = Annotated[int, Meta(ge=1, le=10**7)]


@dataclasses.dataclass(frozen=True)
class CLIPTextConfig:
    """The options of transformers' CLIPTextConfig that change the result.

    An `eos_token_id` of 2, as in checkpoints from before transformers 4.32, makes the pooled output
    that of the highest token id; any other value that of the first such token.
    """

    class_name: ClassVar[str] = "CLIPTextModel"
    fixed: ClassVar[dict[str, Any]] = {"model_type": ("clip_text_model", "clip")}
    ignored: ClassVar[frozenset[str]] = frozenset(
        [
            "architectures",
            "attention_dropout",
            "dropout",
            "bos_token_id",
            "pad_token_id",
            "dtype",
            "torch_dtype",
            "initializer_factor",
            "initializer_range",
            "transformers_version",
            "use_cache",
            "return_dict",
            "output_attentions",
            "output_hidden_states",
            "gradient_checkpointing",
            "chunk_size_feed_forward",
            "is_encoder_decoder",
            "is_decoder",
            "add_cross_attention",
            "tie_word_embeddings",
            "id2label",
            "label2id",
            "problem_type",
            "torchscript",
            "use_bfloat16",
            "pruned_heads",
        ]
    )

    vocab_size: Tokens = 49408
    hidden_size: Channels = 512
    intermediate_size: Channels = 2048
    projection_dim: Channels = 512
    num_hidden_layers: Layers = 12
    num_attention_heads: Heads = 8
    max_position_embeddings: Annotated[int, Meta(ge=1, le=65536)] = 77
    hidden_act: Literal["quick_gelu", "gelu"] = "quick_gelu"
    layer_norm_eps: Epsilon = 1e-5
    eos_token_id: Annotated[int, Meta(ge=0, le=10**7)] = 49407

    def __post_init__(self) -> None:
        check_types(self)
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size={self.hidden_size} must be divisible by num_attention_heads="
                f"{self.num_attention_heads}"
            )


class CLIPTextOutput(NamedTuple):
    """What the encoder gives; what a caller does not use is never computed in a compiled program.

    last_hidden_state: b t d, after the final norm. hidden_states: one b t d per layer, the
    embeddings first, before the final norm. pooler_output: b d. text_embeds: b p or None.
    """

    last_hidden_state: jax.Array
    hidden_states: tuple[jax.Array, ...]
    pooler_output: jax.Array
    text_embeds: jax.Array | None


class CLIPTextEmbeddings(nnx.Module):
    """Token and position embeddings. input_ids: b t -> b t d."""

    def __init__(self, config: CLIPTextConfig, *, rngs: nnx.Rngs):
        d = config.hidden_size
        self.token_embedding = Embedding(config.vocab_size, d, rngs=rngs)
        self.position_embedding = Embedding(config.max_position_embeddings, d, rngs=rngs)

    def __call__(self, input_ids: jax.Array) -> jax.Array:
        positions = jnp.arange(input_ids.shape[-1])
        return self.token_embedding(input_ids) + self.position_embedding(positions)


class CLIPAttention(nnx.Module):
    """Causal multi-head self-attention. x: b t d -> b t d."""

    def __init__(self, config: CLIPTextConfig, *, rngs: nnx.Rngs):
        d = config.hidden_size
        self.heads = config.num_attention_heads
        self.q_proj = Linear(d, d, rngs=rngs)
        self.k_proj = Linear(d, d, rngs=rngs)
        self.v_proj = Linear(d, d, rngs=rngs)
        self.out_proj = Linear(d, d, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        q, k, v = (
            proj(x).reshape(*x.shape[:2], self.heads, -1)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.out_proj(attention(q, k, v, causal=True).reshape(x.shape))


class CLIPMLP(nnx.Module):
    """Two linear layers. x: b t d -> b t d."""

    def __init__(self, config: CLIPTextConfig, *, rngs: nnx.Rngs):
        self.activation = config.hidden_act
        self.fc1 = Linear(config.hidden_size, config.intermediate_size, rngs=rngs)
        self.fc2 = Linear(config.intermediate_size, config.hidden_size, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.fc2(_ACTIVATIONS[self.activation](self.fc1(x)))


class CLIPEncoderLayer(nnx.Module):
    """Attention and MLP, each after a layer norm. x: b t d -> b t d."""

    def __init__(self, config: CLIPTextConfig, *, rngs: nnx.Rngs):
        d, eps = config.hidden_size, config.layer_norm_eps
        self.layer_norm1 = LayerNorm(d, eps=eps, rngs=rngs)
        self.self_attn = CLIPAttention(config, rngs=rngs)
        self.layer_norm2 = LayerNorm(d, eps=eps, rngs=rngs)
        self.mlp = CLIPMLP(config, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.self_attn(self.layer_norm1(x))
        return x + self.mlp(self.layer_norm2(x))


class CLIPEncoder(nnx.Module):
    """The layers. x: b t d -> every layer's input and the last one's output."""

    def __init__(self, config: CLIPTextConfig, *, rngs: nnx.Rngs):
        count = config.num_hidden_layers
        self.layers = nnx.List([CLIPEncoderLayer(config, rngs=rngs) for _ in range(count)])

    def __call__(self, x: jax.Array) -> tuple[jax.Array, ...]:
        hidden_states = [x]
        for layer in self.layers:
            hidden_states.append(layer(hidden_states[-1]))
        return tuple(hidden_states)


class CLIPTextTransformer(nnx.Module):
    """Embeddings, layers and the final norm, under the checkpoint's prefix `text_model`."""

    def __init__(self, config: CLIPTextConfig, *, rngs: nnx.Rngs):
        self.embeddings = CLIPTextEmbeddings(config, rngs=rngs)
        self.encoder = CLIPEncoder(config, rngs=rngs)
        self.final_layer_norm = LayerNorm(config.hidden_size, eps=config.layer_norm_eps, rngs=rngs)


class CLIPTextModel(nnx.Module):
    """The text encoder of SD 1.x (ViT-L/14) and SD 2.x (OpenCLIP ViT-H/14).

    Upstream: transformers models/clip/modeling_clip.py.
    """

    config_class = CLIPTextConfig
    tensor_rules: Rules = (
        (r"[qkv]_proj\.(kernel|bias)", -1),
        (r"out_proj\.kernel", -2),
        (r"fc1\.(kernel|bias)", -1),
        (r"fc2\.kernel", -2),
    )
    # transformers 5 writes this class's tensors without the prefix that all older files have.
    key_prefix = "text_model."
    ignored_keys = ("embeddings.position_ids",)

    def __init__(self, config: CLIPTextConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.text_model = CLIPTextTransformer(config, rngs=rngs)

    def __call__(self, input_ids: jax.Array) -> CLIPTextOutput:
        """input_ids: b t.

        Raises:
            ValueError: more tokens than the model has positions, or, in a NumPy array, an id that
                the embedding does not have.
        """
        if isinstance(input_ids, np.ndarray):
            check_token_ids(self.config, input_ids)
        limit = self.config.max_position_embeddings
        # An index past the end of a table is no error in JAX.
        if input_ids.shape[-1] > limit:
            raise ValueError(
                f"input_ids has {input_ids.shape[-1]} tokens for max_position_embeddings={limit}; "
                f"cut the text into windows of at most {limit}"
            )
        hidden_states = self.text_model.encoder(self.text_model.embeddings(input_ids))
        last = self.text_model.final_layer_norm(hidden_states[-1])
        eos = self.config.eos_token_id
        position = (input_ids if eos == 2 else input_ids == eos).argmax(-1)
        pooled = last[jnp.arange(last.shape[0]), position]
        return CLIPTextOutput(last, hidden_states, pooled, self._project(pooled))

    def _project(self, pooled: jax.Array) -> jax.Array | None:
        return None

    def encode(self, input_ids: jax.Array, *, clip_skip: int | None = None) -> jax.Array:
        """What Stable Diffusion 1.x and 2.x condition on. input_ids: b t -> b t d.

        clip_skip=n leaves out the last n layers and still applies the final norm (diffusers'
        pipeline_stable_diffusion.py, encode_prompt).

        Raises:
            ValueError: clip_skip is negative or more than the model has layers.
        """
        layers = self.config.num_hidden_layers
        if clip_skip is not None and not 0 <= clip_skip <= layers:
            raise ValueError(f"clip_skip must be from 0 to {layers} (got {clip_skip})")
        output = self(input_ids)
        if not clip_skip:
            return output.last_hidden_state
        return self.text_model.final_layer_norm(output.hidden_states[-1 - clip_skip])


class CLIPTextModelWithProjection(CLIPTextModel):
    """The text encoder with CLIP's projection to the joint space, as SDXL's second one."""

    def __init__(self, config: CLIPTextConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        self.text_projection = Linear(
            config.hidden_size, config.projection_dim, bias=False, rngs=rngs
        )

    def _project(self, pooled: jax.Array) -> jax.Array:
        return self.text_projection(pooled)


def check_token_ids(config: CLIPTextConfig, input_ids: np.ndarray) -> None:
    """Raises a ValueError where an id is not in the embedding: on a device it would be clamped."""
    for token in (input_ids.min(initial=0), input_ids.max(initial=0)):
        if not 0 <= token < config.vocab_size:
            raise ValueError(
                f"input_ids has the token {token}, but the text encoder's vocab_size is "
                f"{config.vocab_size}; use the tokenizer that belongs to it"
            )


def _quick_gelu(x: jax.Array) -> jax.Array:
    return x * nnx.sigmoid(1.702 * x)


_ACTIVATIONS = {"quick_gelu": _quick_gelu, "gelu": gelu}
