"""Vision transformers as features of images: ViT (Dosovitskiy et al. 2021), which DINO trains too
(Caron et al. 2021), and DINOv2 (Oquab et al. 2023).

Upstream: transformers' modeling_vit.py and modeling_dinov2.py, with the names in their files.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.nn.initializers import normal, ones, zeros

from diffusax.models.encoders.clip import ACTIVATIONS, CLIPMLP
from diffusax.models.encoders.configs import Dinov2Config, ViTConfig
from diffusax.models.layers.layers import Conv2d, LayerNorm, Linear
from diffusax.models.layers.rngs import shaped
from diffusax.models.ops.activations import gated_silu
from diffusax.models.ops.attention import attention
from diffusax.models.streaming import streamed
from diffusax.runtime.devices.mesh import Rule, Rules

Config = ViTConfig | Dinov2Config

TENSOR_RULES: Rules = (
    Rule(r"attention\.(query|key|value)\.(kernel|bias)", -1, "heads"),
    Rule(r"attention\.output\.dense\.kernel", -2, "heads"),
    (r"intermediate\.dense\.(kernel|bias)", -1),
    (r"layer\.\d+\.output\.dense\.kernel", -2),
    (r"fc1\.(kernel|bias)", -1),
    (r"fc2\.kernel", -2),
)
_BICUBIC = -0.75
"""The parameter of PyTorch's bicubic kernel (Keys 1981)."""


class ViTOutput(NamedTuple):
    """The network's outputs; a compiled program does not compute those that nobody uses.

    last_hidden_state: b 1+n d, the class token and n patches after the final norm. hidden_states:
    one b 1+n d per layer, the embeddings before them, none after the final norm.
    """

    last_hidden_state: jax.Array
    hidden_states: tuple[jax.Array, ...]


class ViTPatchEmbeddings(nnx.Module):
    """Patches. pixel_values: b h w c -> b h' w' d."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        patch = config.patch_size
        self.projection = Conv2d(
            config.num_channels, config.hidden_size, patch, stride=patch, padding=0, rngs=rngs
        )

    def __call__(self, pixel_values: jax.Array) -> jax.Array:
        return self.projection(pixel_values)


class ViTEmbeddings(nnx.Module):
    """A class token and the patches, with their positions. pixel_values: b h w c -> b 1+n d."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        d, side = config.hidden_size, config.image_size // config.patch_size

        def drawn(*shape: int) -> nnx.Param:
            return nnx.Param(shaped(normal(0.02))(rngs.params(), shape, jnp.float32))

        self.side = side
        self.cls_token = drawn(1, 1, d)
        self.patch_embeddings = ViTPatchEmbeddings(config, rngs=rngs)
        self.position_embeddings = drawn(1, side**2 + 1, d)
        if getattr(config, "use_mask_token", False):
            # Training hides patches behind it, and files have it.
            self.mask_token = nnx.Param(shaped(zeros)(rngs.params(), (1, d), jnp.float32))

    def __call__(self, pixel_values: jax.Array) -> jax.Array:
        patches = self.patch_embeddings(pixel_values)
        b, h, w, d = patches.shape
        token = jnp.broadcast_to(self.cls_token[...], (b, 1, d))
        x = jnp.concatenate([token, patches.reshape(b, h * w, d)], axis=1)
        return x + self._positions(h, w)

    def _positions(self, h: int, w: int) -> jax.Array:
        """Returns the positions of the class token and of h w patches, 1 1+n d.

        Those of other numbers of patches are interpolated in float32, as upstream's
        `interpolate_pos_encoding` does.
        """
        stored = self.position_embeddings[...]
        if h == w == self.side:
            return stored
        grid = stored[0, 1:].astype(jnp.float32).reshape(self.side, self.side, -1)
        rows, columns = bicubic(self.side, h), bicubic(self.side, w)
        grid = jnp.einsum("hp,wq,pqd->hwd", rows, columns, grid, precision="highest")
        return jnp.concatenate([stored[:, :1], grid.reshape(1, h * w, -1)], 1).astype(stored.dtype)


class ViTSelfAttention(nnx.Module):
    """Multi-head self-attention without its last product. x: b t d -> b t d."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        d, bias = config.hidden_size, config.qkv_bias
        self.query = Linear(d, d, bias=bias, rngs=rngs)
        self.key = Linear(d, d, bias=bias, rngs=rngs)
        self.value = Linear(d, d, bias=bias, rngs=rngs)

    def __call__(self, x: jax.Array, heads: int) -> jax.Array:
        q, k, v = (
            project(x).reshape(*x.shape[:2], heads, -1)
            for project in (self.query, self.key, self.value)
        )
        return attention(q, k, v).reshape(x.shape)


class ViTDense(nnx.Module):
    """A linear layer by the name of `dense`. x: ... c -> ... d."""

    def __init__(self, c: int, d: int, *, rngs: nnx.Rngs):
        self.dense = Linear(c, d, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dense(x)


class ViTAttention(nnx.Module):
    """Multi-head self-attention. x: b t d -> b t d."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        d = config.hidden_size
        self.heads = config.num_attention_heads
        self.attention = ViTSelfAttention(config, rngs=rngs)
        self.output = ViTDense(d, d, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.output(self.attention(x, self.heads))


class ViTLayer(nnx.Module):
    """Attention and MLP, each after a layer norm. x: b t d -> b t d."""

    def __init__(self, config: ViTConfig, *, rngs: nnx.Rngs):
        d, eps = config.hidden_size, config.layer_norm_eps
        self.activation = config.hidden_act
        self.layernorm_before = LayerNorm(d, eps=eps, rngs=rngs)
        self.attention = ViTAttention(config, rngs=rngs)
        self.layernorm_after = LayerNorm(d, eps=eps, rngs=rngs)
        self.intermediate = ViTDense(d, config.intermediate_size, rngs=rngs)
        self.output = ViTDense(config.intermediate_size, d, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.layernorm_before(x))
        h = ACTIVATIONS[self.activation](self.intermediate(self.layernorm_after(x)))
        return x + self.output(h)


class Dinov2LayerScale(nnx.Module):
    """A factor for each channel (Touvron et al. 2021). x: b t d -> b t d."""

    def __init__(self, d: int, *, rngs: nnx.Rngs):
        self.lambda1 = nnx.Param(shaped(ones)(rngs.params(), (d,), jnp.float32))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x * self.lambda1[...]


class Dinov2SwiGLUFFN(nnx.Module):
    """A gated MLP (Shazeer 2020), the gate's kernel before the other one. x: b t d -> b t d."""

    def __init__(self, config: Dinov2Config, *, rngs: nnx.Rngs):
        d, width = config.hidden_size, config.intermediate_size
        self.weights_in = Linear(d, 2 * width, rngs=rngs)
        self.weights_out = Linear(width, d, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        gate, h = jnp.split(self.weights_in(x), 2, axis=-1)
        return self.weights_out(gated_silu(gate, h))


class Dinov2Layer(nnx.Module):
    """Attention and MLP after layer norms, and scaled. x: b t d -> b t d."""

    def __init__(self, config: Dinov2Config, *, rngs: nnx.Rngs):
        d, eps = config.hidden_size, config.layer_norm_eps
        mlp: Any = Dinov2SwiGLUFFN if config.use_swiglu_ffn else CLIPMLP
        self.norm1 = LayerNorm(d, eps=eps, rngs=rngs)
        self.attention = ViTAttention(config, rngs=rngs)
        self.layer_scale1 = Dinov2LayerScale(d, rngs=rngs)
        self.norm2 = LayerNorm(d, eps=eps, rngs=rngs)
        self.mlp = mlp(config, rngs=rngs)
        self.layer_scale2 = Dinov2LayerScale(d, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.layer_scale1(self.attention(self.norm1(x)))
        return x + self.layer_scale2(self.mlp(self.norm2(x)))


class ViTEncoder(nnx.Module):
    """The stack of layers. x: b t d -> every layer's input and the last one's output."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        kind: Any = ViTLayer if isinstance(config, ViTConfig) else Dinov2Layer
        self.layer = nnx.List([kind(config, rngs=rngs) for _ in range(config.num_hidden_layers)])

    def __call__(self, x: jax.Array) -> tuple[jax.Array, ...]:
        hidden_states = [x]
        for layer in self.layer:
            hidden_states.append(streamed(layer)(hidden_states[-1]))
        return tuple(hidden_states)


class ViTModel(nnx.Module):
    """The vision transformer without the pooler, which DINO's checkpoints do not have."""

    config_class: Any = ViTConfig
    tensor_rules = TENSOR_RULES
    ignored_parts: tuple[str, ...] = ("pooler.",)

    def __init__(self, config: Any, *, rngs: nnx.Rngs):
        self.config = config
        self.embeddings = ViTEmbeddings(config, rngs=rngs)
        self.encoder = ViTEncoder(config, rngs=rngs)
        self.layernorm = LayerNorm(config.hidden_size, eps=config.layer_norm_eps, rngs=rngs)

    def __call__(self, pixel_values: jax.Array) -> ViTOutput:
        """Encodes images. pixel_values: b h w c, normalised as by the checkpoint's image processor.

        Images of another size than the config's have positions that are interpolated.

        Raises:
            ValueError: the images have other channels, or are smaller than a patch.
        """
        channels, patch = self.config.num_channels, self.config.patch_size
        *_, h, w, c = pixel_values.shape
        if pixel_values.ndim != 4 or c != channels or min(h, w) < patch:
            raise ValueError(
                f"pixel_values must have shape (images, height, width, {channels}) and at least "
                f"{patch}x{patch} pixels for this network (got {pixel_values.shape})"
            )
        hidden_states = self.encoder(self.embeddings(pixel_values))
        return ViTOutput(self.layernorm(hidden_states[-1]), hidden_states)


class Dinov2Model(ViTModel):
    """DINOv2's vision transformer."""

    config_class = Dinov2Config
    ignored_parts = ()


def bicubic(old: int, new: int) -> np.ndarray:
    """Returns the weights of `old` numbers in a row in each of `new` ones, new old float32.

    They are those of torch's `interpolate(mode="bicubic", align_corners=False)` to a given size,
    which repeats the numbers at the ends and does not smooth.
    """
    place = (np.arange(new) + 0.5) * (old / new) - 0.5
    first = np.floor(place).astype(int)
    weights = np.zeros((new, old), np.float32)
    for tap in range(-1, 3):
        near = np.clip(first + tap, 0, old - 1)
        np.add.at(weights, (np.arange(new), near), _keys(np.abs(place - first - tap)))
    return weights


def _keys(x: np.ndarray) -> np.ndarray:
    """Returns the cubic convolution kernel at distances from 0 to 2 (Keys 1981, equation 4)."""
    a = _BICUBIC
    inner = ((a + 2) * x - (a + 3)) * x * x + 1
    outer = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return np.where(x <= 1, inner, outer)
