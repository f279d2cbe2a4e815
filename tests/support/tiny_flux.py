"""A tiny FLUX.1 of several blocks, with parameters and inputs, without PyTorch."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from diffusax.models.network import Network, initialize_params
from diffusax.models.transformers.configs import FluxTransformer2DConfig
from diffusax.models.transformers.flux import FluxTransformer2DModel, image_rotation

CONFIG = FluxTransformer2DConfig(
    in_channels=16,
    num_layers=2,
    num_single_layers=5,
    attention_head_dim=16,
    num_attention_heads=2,
    joint_attention_dim=32,
    pooled_projection_dim=32,
    axes_dims_rope=(4, 4, 8),
)
NETWORK = Network(FluxTransformer2DModel, CONFIG)


def draw_params() -> Any:
    return initialize_params(NETWORK.shapes, seed=1)


def draw_inputs() -> tuple[Any, ...]:
    """Tokens of an image, times, tokens of a text, its pooled output, and rotations."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape, np.float32))

    rotation = image_rotation(CONFIG.axes_dims_rope, 5, (4, 4))
    return normal(2, 16, 16), jnp.array([0.5, 0.3]), normal(2, 5, 32), normal(2, 32), rotation
