"""CLIP's vision network (Radford et al. 2021), and the model of both towers."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.nn.initializers import constant, normal

from diffusax.models.encoders.clip import TENSOR_RULES, CLIPEncoder, CLIPTextTransformer
from diffusax.models.encoders.configs import CLIPConfig, CLIPTextConfig, CLIPVisionConfig
from diffusax.models.layers.layers import Conv2d, Embedding, LayerNorm, Linear
from diffusax.models.layers.rngs import shaped
from diffusax.models.network import Network


class CLIPVisionOutput(NamedTuple):
    """The encoder's outputs; a compiled program does not compute those that nobody uses.

    last_hidden_state: b 1+n d, the class token and n patches, without a final norm. hidden_states:
    one b 1+n d per layer, the embeddings after the first norm before them. pooler_output: b d.
    image_embeds: b p or None.
    """

    last_hidden_state: jax.Array
    hidden_states: tuple[jax.Array, ...]
    pooler_output: jax.Array
    image_embeds: jax.Array | None


class CLIPModelOutput(NamedTuple):
    """What CLIP says of images and texts.

    logits_per_image: b n, the scaled cosines of each image and each text. text_embeds: n p, and
    image_embeds: b p, of length one. All are float32.
    """

    logits_per_image: jax.Array
    text_embeds: jax.Array
    image_embeds: jax.Array


class CLIPVisionEmbeddings(nnx.Module):
    """A class token and the patches, with their positions. pixel_values: b h w c -> b 1+n d."""

    def __init__(self, config: CLIPVisionConfig, *, rngs: nnx.Rngs):
        d, patch = config.hidden_size, config.patch_size
        token = shaped(normal(0.02))(rngs.params(), (d,), jnp.float32)
        self.class_embedding = nnx.Param(token)
        self.patch_embedding = Conv2d(
            config.num_channels, d, patch, stride=patch, padding=0, bias=False, rngs=rngs
        )
        self.position_embedding = Embedding(config.patches + 1, d, rngs=rngs)

    def __call__(self, pixel_values: jax.Array) -> jax.Array:
        patches = self.patch_embedding(pixel_values)
        b, d = patches.shape[0], patches.shape[-1]
        token = jnp.broadcast_to(self.class_embedding[...], (b, 1, d))
        x = jnp.concatenate([token, patches.reshape(b, -1, d)], axis=1)
        return x + self.position_embedding(jnp.arange(x.shape[1]))


class CLIPVisionTransformer(nnx.Module):
    """Embeddings, layers and norms, under the checkpoint's prefix `vision_model`.

    pixel_values: b h w c -> every layer's input and the last one's output, b 1+n d, and the class
    token's after the final norm, b d.
    """

    def __init__(self, config: CLIPVisionConfig, *, rngs: nnx.Rngs):
        d, eps = config.hidden_size, config.layer_norm_eps
        self.config = config
        self.embeddings = CLIPVisionEmbeddings(config, rngs=rngs)
        # This is the checkpoint's spelling.
        self.pre_layrnorm = LayerNorm(d, eps=eps, rngs=rngs)
        self.encoder = CLIPEncoder(config, causal=False, rngs=rngs)
        self.post_layernorm = LayerNorm(d, eps=eps, rngs=rngs)

    def __call__(self, pixel_values: jax.Array) -> tuple[tuple[jax.Array, ...], jax.Array]:
        expected = self.config.image_size, self.config.image_size, self.config.num_channels
        if pixel_values.shape[1:] != expected:
            raise ValueError(
                f"pixel_values must have shape (images, {', '.join(map(str, expected))}) for this "
                f"network (got {pixel_values.shape})"
            )
        hidden_states = self.encoder(self.pre_layrnorm(self.embeddings(pixel_values)))
        return hidden_states, self.post_layernorm(hidden_states[-1][:, 0])


class CLIPVisionModel(nnx.Module):
    """The vision network without a projection. Upstream: transformers' modeling_clip.py."""

    config_class = CLIPVisionConfig
    tensor_rules = TENSOR_RULES
    # transformers 5 writes this class's tensors without the prefix that all older files have.
    key_prefix = "vision_model."
    ignored_keys = ("embeddings.position_ids",)

    def __init__(self, config: CLIPVisionConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.vision_model = CLIPVisionTransformer(config, rngs=rngs)

    def __call__(self, pixel_values: jax.Array) -> CLIPVisionOutput:
        """Encodes images. pixel_values: b h w c, normalised as by the checkpoint's image processor.

        Raises:
            ValueError: the images do not have the network's size.
        """
        hidden_states, pooled = self.vision_model(pixel_values)
        return CLIPVisionOutput(hidden_states[-1], hidden_states, pooled, self._project(pooled))

    def _project(self, pooled: jax.Array) -> jax.Array | None:
        return None


class CLIPVisionModelWithProjection(CLIPVisionModel):
    """The vision network with CLIP's projection to the joint space."""

    def __init__(self, config: CLIPVisionConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        self.visual_projection = Linear(
            config.hidden_size, config.projection_dim, bias=False, rngs=rngs
        )

    def _project(self, pooled: jax.Array) -> jax.Array:
        return self.visual_projection(pooled)


class CLIPModel(nnx.Module):
    """Both towers, with their projections to the joint space."""

    config_class = CLIPConfig
    tensor_rules = TENSOR_RULES
    ignored_keys = ("embeddings.position_ids",)

    def __init__(self, config: CLIPConfig, *, rngs: nnx.Rngs):
        self.config = config
        text, vision, joint = config.text_config, config.vision_config, config.projection_dim
        scale = shaped(constant(config.logit_scale_init_value))
        self.text_model = CLIPTextTransformer(text, rngs=rngs)
        self.vision_model = CLIPVisionTransformer(vision, rngs=rngs)
        self.visual_projection = Linear(vision.hidden_size, joint, bias=False, rngs=rngs)
        self.text_projection = Linear(text.hidden_size, joint, bias=False, rngs=rngs)
        self.logit_scale = nnx.Param(scale(rngs.params(), (), jnp.float32))

    def __call__(self, input_ids: jax.Array, pixel_values: jax.Array) -> CLIPModelOutput:
        """Compares images and texts.

        input_ids: n t. pixel_values: b h w c, normalised as by the image processor.

        Raises:
            ValueError: there are too many tokens, or the images do not have the network's size.
        """
        images = self.get_image_features(pixel_values).astype(jnp.float32)
        texts = self.get_text_features(input_ids).astype(jnp.float32)
        images, texts = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (images, texts))
        logits = jnp.exp(self.logit_scale[...]) * (images @ texts.T)
        return CLIPModelOutput(logits, texts, images)

    def get_image_features(self, pixel_values: jax.Array) -> jax.Array:
        """Returns the features of images. pixel_values: b h w c, normalised -> b p."""
        return self.visual_projection(self.vision_model(pixel_values)[1])

    def get_text_features(self, input_ids: jax.Array) -> jax.Array:
        """Returns the features of texts. input_ids: b t -> b p."""
        return self.text_projection(self.text_model(input_ids)[-1])


def tower(network: Network, module_class: Any) -> Network:
    """Returns one tower of a CLIPModel, with or without its projection."""
    config = network.config
    own = (
        config.text_config if module_class.config_class is CLIPTextConfig else config.vision_config
    )
    own = dataclasses.replace(own, projection_dim=config.projection_dim)
    return Network(module_class, own)
