"""The results of the Flax classes: dataclasses that are also read by position and by key."""

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from diffusax.boundary.tensors import Output
from diffusax.networks.outputs import DiagonalGaussianDistribution
from diffusax.runtime.random.noise import as_key


@dataclasses.dataclass
class FlaxStableDiffusionPipelineOutput(Output):
    """The result of a Stable Diffusion pipeline.

    images: (devices, n, h, w, 3) or (n, h, w, 3) in [0, 1]. nsfw_content_detected: False.
    """

    images: Any
    nsfw_content_detected: Any = False


@dataclasses.dataclass
class FlaxStableDiffusionXLPipelineOutput(Output):
    """The result of a Stable Diffusion XL pipeline.

    images: (devices, n, h, w, 3) or (n, h, w, 3) in [0, 1], or latents (..., n, c, h, w).
    """

    images: Any


@flax.struct.dataclass
class FlaxUNet2DConditionOutput(Output):
    """The result of a UNet. sample: b c h w, the prediction."""

    sample: Any


@flax.struct.dataclass
class FlaxControlNetOutput(Output):
    """The result of a ControlNet: scaled residuals, each b h w c as the Flax UNet takes them."""

    down_block_res_samples: Any
    mid_block_res_sample: Any


@flax.struct.dataclass
class FlaxDecoderOutput(Output):
    """The result of the autoencoder's `decode`. sample: b 3 H W, about [-1, 1]."""

    sample: Any


@flax.struct.dataclass
class FlaxAutoencoderKLOutput(Output):
    """The result of the autoencoder's `encode`. latent_dist: the distribution of the latents."""

    latent_dist: Any


@flax.struct.dataclass
class FlaxCLIPTextOutput(Output):
    """The result of a text encoder, with the fields of transformers' FlaxCLIPTextModel.

    text_embeds: b p, only of the model with a projection, which returns no pooler_output.
    """

    text_embeds: Any = None
    last_hidden_state: Any = None
    pooler_output: Any = None
    hidden_states: Any = None


@flax.struct.dataclass
class FlaxSchedulerOutput(Output):
    """The result of a step. prev_sample: the sample after it. state: the scheduler's after it."""

    prev_sample: Any
    state: Any


@flax.struct.dataclass
class FlaxKarrasVeOutput(Output):
    """The result of a KarrasVe step.

    prev_sample, derivative: arrays of the sample's shape. state: the scheduler's state.
    """

    prev_sample: Any
    derivative: Any
    state: Any


@flax.struct.dataclass
class FlaxSdeVeOutput(Output):
    """The result of a ScoreSdeVe step.

    prev_sample: the sample after the step. prev_sample_mean: the same before noise is added. state:
    the scheduler's state.
    """

    state: Any
    prev_sample: Any
    prev_sample_mean: Any = None


@flax.struct.dataclass
class FlaxDiagonalGaussianDistribution(DiagonalGaussianDistribution):
    """A normal distribution of latents, b h w z."""

    def sample(self, key: jax.Array) -> jax.Array:  # type: ignore[override]
        """Samples latents with the key, b h w z."""
        return self.mean + self.std * jax.random.normal(as_key(key), self.mean.shape, jnp.float32)

    def nll(self, sample: jax.Array, axis: Any = (1, 2, 3)) -> jax.Array:
        """Returns the negative log-likelihood of a sample, summed over `axis`."""
        return super().nll(sample, axis)
