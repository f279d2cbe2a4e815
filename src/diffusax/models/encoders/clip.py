"""CLIP's text encoder (Radford et al. 2021), as Stable Diffusion conditions on it."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from diffusax.models.encoders.configs import CLIPTextConfig, CLIPVisionConfig, Dinov2Config
from diffusax.models.layers.inputs import check_ids, check_token_ids
from diffusax.models.layers.layers import Embedding, LayerNorm, Linear
from diffusax.models.ops.activations import gelu, quick_gelu
from diffusax.models.ops.attention import attention
from diffusax.models.streaming import streamed
from diffusax.runtime.devices.mesh import Rule, Rules

TowerConfig = CLIPTextConfig | CLIPVisionConfig

TENSOR_RULES: Rules = (
    Rule(r"[qkv]_proj\.(kernel|bias)", -1, "heads"),
    Rule(r"out_proj\.kernel", -2, "heads"),
    (r"fc1\.(kernel|bias)", -1),
    (r"fc2\.kernel", -2),
)
"""The rules of both towers."""
ADAPTER_GROUPS = (r".*\.self_attn\.(q|k|v|out)_proj", r".*\.encoder\.layers\..*")
"""The products of attention; all layers of the transformer."""
ACTIVATIONS = {"quick_gelu": quick_gelu, "gelu": gelu}
"""The activations of MLPs by their names in configs."""


class CLIPTextOutput(NamedTuple):
    """The encoder's outputs; a compiled program does not compute those that nobody uses.

    last_hidden_state: b t d, after the final norm. hidden_states: one b t d per layer, the
    embeddings first, before the final norm. pooler_output: b d. text_embeds: b p or None.
    """

    last_hidden_state: jax.Array
    hidden_states: tuple[jax.Array, ...]
    pooler_output: jax.Array
    text_embeds: jax.Array | None


class CLIPTextEmbeddings(nnx.Module):
    """Embeddings of tokens and positions. input_ids: b t -> b t d."""

    def __init__(self, config: CLIPTextConfig, *, rngs: nnx.Rngs):
        d = config.hidden_size
        self.token_embedding = Embedding(config.vocab_size, d, rngs=rngs)
        self.position_embedding = Embedding(config.max_position_embeddings, d, rngs=rngs)

    def __call__(self, input_ids: jax.Array) -> jax.Array:
        positions = jnp.arange(input_ids.shape[-1])
        return self.token_embedding(input_ids) + self.position_embedding(positions)


class CLIPAttention(nnx.Module):
    """Multi-head self-attention, causal in the text encoder. x: b t d -> b t d."""

    def __init__(self, config: TowerConfig, *, causal: bool, rngs: nnx.Rngs):
        d = config.hidden_size
        self.heads, self.causal = config.num_attention_heads, causal
        self.q_proj = Linear(d, d, rngs=rngs)
        self.k_proj = Linear(d, d, rngs=rngs)
        self.v_proj = Linear(d, d, rngs=rngs)
        self.out_proj = Linear(d, d, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        q, k, v = (
            proj(x).reshape(*x.shape[:2], self.heads, -1)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.out_proj(attention(q, k, v, causal=self.causal).reshape(x.shape))


class CLIPMLP(nnx.Module):
    """Two linear layers. x: b t d -> b t d."""

    def __init__(self, config: TowerConfig | Dinov2Config, *, rngs: nnx.Rngs):
        self.activation = config.hidden_act
        self.fc1 = Linear(config.hidden_size, config.intermediate_size, rngs=rngs)
        self.fc2 = Linear(config.intermediate_size, config.hidden_size, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.fc2(ACTIVATIONS[self.activation](self.fc1(x)))


class CLIPEncoderLayer(nnx.Module):
    """Attention and MLP, each after a layer norm. x: b t d -> b t d."""

    def __init__(self, config: TowerConfig, *, causal: bool, rngs: nnx.Rngs):
        d, eps = config.hidden_size, config.layer_norm_eps
        self.layer_norm1 = LayerNorm(d, eps=eps, rngs=rngs)
        self.self_attn = CLIPAttention(config, causal=causal, rngs=rngs)
        self.layer_norm2 = LayerNorm(d, eps=eps, rngs=rngs)
        self.mlp = CLIPMLP(config, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.self_attn(self.layer_norm1(x))
        return x + self.mlp(self.layer_norm2(x))


class CLIPEncoder(nnx.Module):
    """The stack of layers. x: b t d -> every layer's input and the last one's output."""

    def __init__(self, config: TowerConfig, *, causal: bool, rngs: nnx.Rngs):
        count = config.num_hidden_layers
        self.layers = nnx.List(
            [CLIPEncoderLayer(config, causal=causal, rngs=rngs) for _ in range(count)]
        )

    def __call__(self, x: jax.Array) -> tuple[jax.Array, ...]:
        hidden_states = [x]
        for layer in self.layers:
            hidden_states.append(streamed(layer)(hidden_states[-1]))
        return tuple(hidden_states)


class CLIPTextTransformer(nnx.Module):
    """Embeddings, layers and the final norm, under the checkpoint's prefix `text_model`.

    input_ids: b t -> every layer's input and the last one's output, b t d; that after the final
    norm, b t d; and of this the end of the text, b d.
    """

    def __init__(self, config: CLIPTextConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.embeddings = CLIPTextEmbeddings(config, rngs=rngs)
        self.encoder = CLIPEncoder(config, causal=True, rngs=rngs)
        self.final_layer_norm = LayerNorm(config.hidden_size, eps=config.layer_norm_eps, rngs=rngs)

    def __call__(self, input_ids: jax.Array) -> tuple[tuple[jax.Array, ...], jax.Array, jax.Array]:
        check_ids("input_ids", input_ids)
        if isinstance(input_ids, np.ndarray):
            check_token_ids(self.config, input_ids)
        limit = self.config.max_position_embeddings
        # In JAX an index past the end of a table is not an error.
        if input_ids.shape[-1] > limit:
            raise ValueError(
                f"input_ids has {input_ids.shape[-1]} tokens for max_position_embeddings={limit}; "
                f"cut the text into windows of at most {limit}"
            )
        hidden_states = self.encoder(self.embeddings(input_ids))
        last = self.final_layer_norm(hidden_states[-1])
        eos = self.config.eos_token_id
        position = (input_ids if eos == 2 else input_ids == eos).argmax(-1)
        return hidden_states, last, last[jnp.arange(last.shape[0]), position]


class CLIPTextModel(nnx.Module):
    """The text encoder of SD 1.x (ViT-L/14) and SD 2.x (OpenCLIP ViT-H/14).

    Upstream: transformers models/clip/modeling_clip.py.
    """

    config_class = CLIPTextConfig
    tensor_rules = TENSOR_RULES
    adapter_groups = ADAPTER_GROUPS
    # transformers 5 writes this class's tensors without the prefix that all older files have.
    key_prefix = "text_model."
    ignored_keys = ("embeddings.position_ids",)

    def __init__(self, config: CLIPTextConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.text_model = CLIPTextTransformer(config, rngs=rngs)

    def __call__(self, input_ids: jax.Array) -> CLIPTextOutput:
        """Encodes tokens. input_ids: b t.

        Raises:
            ValueError: input_ids are not integers, have another shape or more tokens than the model
                has positions, or, in a NumPy array, an id that the embedding does not have.
        """
        hidden_states, last, pooled = self.text_model(input_ids)
        return CLIPTextOutput(last, hidden_states, pooled, self._project(pooled))

    def _project(self, pooled: jax.Array) -> jax.Array | None:
        return None

    def encode(self, input_ids: jax.Array, *, clip_skip: int | None = None) -> jax.Array:
        """Returns what Stable Diffusion 1.x and 2.x condition on. input_ids: b t -> b t d.

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
    """The text encoder with CLIP's projection to the joint space, like SDXL's second one."""

    def __init__(self, config: CLIPTextConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        self.text_projection = Linear(
            config.hidden_size, config.projection_dim, bias=False, rngs=rngs
        )

    def _project(self, pooled: jax.Array) -> jax.Array:
        return self.text_projection(pooled)
