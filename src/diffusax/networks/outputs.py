"""The results of networks: dataclasses that are also read by position and by key."""

from collections.abc import Sequence
from typing import Any, Self

import flax.struct
import jax.numpy as jnp

from diffusax.boundary.tensors import Output, alike, as_array
from diffusax.runtime.random.noise import draw_like
from diffusax.runtime.switches import under_own_switches


@flax.struct.dataclass
class UNet2DConditionOutput(Output):
    """The result of a UNet. sample: b c h w, the prediction.

    kept: what hooks have kept by the names of points; None without hooks.
    """

    sample: Any
    kept: Any = None


@flax.struct.dataclass
class UNet2DOutput(Output):
    """The result of a UNet without a context. sample: b c h w, the prediction.

    kept: what hooks have kept by the names of points; None without hooks.
    """

    sample: Any
    kept: Any = None


@flax.struct.dataclass
class Transformer2DModelOutput(Output):
    """The result of a transformer. sample: the prediction, for Z-Image a list of c 1 h w.

    kept: what hooks have kept by the names of points; None without hooks.
    """

    sample: Any
    kept: Any = None


@flax.struct.dataclass
class ControlNetOutput(Output):
    """The result of a ControlNet: a residual b c h w for each skip connection, and the middle's."""

    down_block_res_samples: tuple[Any, ...]
    mid_block_res_sample: Any


@flax.struct.dataclass
class FluxControlNetOutput(Output):
    """The result of FLUX.1's ControlNet: residuals b t c for blocks of either kind."""

    controlnet_block_samples: Any
    controlnet_single_block_samples: Any


@flax.struct.dataclass
class AutoencoderKLOutput(Output):
    """The result of `vae.encode`. latent_dist: the distribution of the latents."""

    latent_dist: "DiagonalGaussianDistribution"


@flax.struct.dataclass
class AutoencoderTinyOutput(Output):
    """The result of the tiny autoencoder's `encode`. latents: b z h w."""

    latents: Any


@flax.struct.dataclass
class DecoderOutput(Output):
    """The result of `vae.decode`. sample: b 3 H W, about [-1, 1]."""

    sample: Any


@flax.struct.dataclass
class BaseModelOutputWithPooling(Output):
    """The result of an encoder without a projection.

    last_hidden_state: b t d. pooler_output: b d. hidden_states: the embeddings and each layer's
    output, b t d, where they were asked for. Qwen2.5-VL's vision network gives n c and n/m² d, for
    the patches of all images in a row and squares of m m patches.
    """

    last_hidden_state: Any
    pooler_output: Any
    hidden_states: Any = None


@flax.struct.dataclass
class BaseModelOutput(Output):
    """The result of a language model without a head.

    last_hidden_state: b t c. hidden_states: the embeddings and each layer's output, b t c, the last
    one after the final norm, where they were asked for.
    """

    last_hidden_state: Any
    hidden_states: Any = None


@flax.struct.dataclass
class BaseModelOutputWithDeepstackFeatures(Output):
    """The result of Qwen3-VL's vision network, for the patches of all images in a row.

    last_hidden_state: n c. pooler_output: n/m² d, for squares of m m patches. deepstack_features:
    n/m² d each, for the language model's first layers.
    """

    last_hidden_state: Any
    pooler_output: Any
    deepstack_features: Any


@flax.struct.dataclass
class CausalLMOutput(Output):
    """The result of a language model. logits: b t n; hidden_states as without a head."""

    logits: Any
    hidden_states: Any = None


@flax.struct.dataclass
class CLIPTextModelOutput(Output):
    """The result of a text encoder with a projection. text_embeds: b p; the rest as without one."""

    text_embeds: Any
    last_hidden_state: Any
    hidden_states: Any = None


@flax.struct.dataclass
class CLIPVisionModelOutput(Output):
    """The result of an image encoder with a projection. image_embeds: b p; the rest as without."""

    image_embeds: Any
    last_hidden_state: Any
    hidden_states: Any = None


@flax.struct.dataclass
class CLIPOutput(Output):
    """The result of both towers.

    logits_per_image: images texts, the scaled cosines. logits_per_text: their transpose.
    text_embeds and image_embeds: b p, of length one.
    """

    logits_per_image: Any
    logits_per_text: Any
    text_embeds: Any
    image_embeds: Any


@flax.struct.dataclass
class DiagonalGaussianDistribution:
    """A normal distribution of latents, each number by itself.

    mean, logvar: arrays of one shape, or PyTorch's tensors, and then all results are tensors.
    deterministic: whether it has no variance.
    """

    mean: Any
    logvar: Any
    deterministic: bool = flax.struct.field(pytree_node=False, default=False)

    @property
    @under_own_switches
    def std(self) -> Any:
        """The standard deviation, zero where `deterministic` is set."""
        mean, logvar = self._moments()
        return self._given(jnp.zeros_like(mean) if self.deterministic else jnp.exp(0.5 * logvar))

    @property
    @under_own_switches
    def var(self) -> Any:
        """The variance, zero where `deterministic` is set."""
        mean, logvar = self._moments()
        return self._given(jnp.zeros_like(mean) if self.deterministic else jnp.exp(logvar))

    @under_own_switches
    def sample(self, generator: Any = None) -> Any:
        """Samples the distribution.

        Args:
            generator: a seed or a torch.Generator, or a list of one for each image, for PyTorch's
                numbers; or a JAX random key. None takes PyTorch's next numbers where the encoded
                images were tensors, and else numbers of a seed from the system.

        Raises:
            ValueError: generator is none of these, or a list of another length.
        """
        mean, _ = self._moments()
        noise = as_array(draw_like(self.mean, generator))
        return self._given(mean + as_array(self.std) * noise.astype(mean.dtype))

    def mode(self) -> Any:
        """Returns the most likely latents, the mean."""
        return self.mean

    @under_own_switches
    def kl(self, other: Self | None = None) -> Any:
        """Returns the Kullback-Leibler divergence from `other`, by default the unit normal: b."""
        if self.deterministic:
            return self._given(jnp.zeros(1, jnp.float32))
        own, ownvar = self._moments()
        mean, logvar = (0.0, 0.0) if other is None else other._moments()
        var = jnp.exp(jnp.asarray(logvar))
        terms = jnp.square(own - mean) / var + jnp.exp(ownvar) / var - 1 - ownvar + logvar
        return self._given(0.5 * terms.sum((1, 2, 3)))

    @under_own_switches
    def nll(self, sample: Any, dims: Sequence[int] = (1, 2, 3)) -> Any:
        """Returns the negative log-likelihood of a sample, summed over `dims`."""
        if self.deterministic:
            return self._given(jnp.zeros(1, jnp.float32))
        mean, logvar = self._moments()
        squares = jnp.square(as_array(sample) - mean) / jnp.exp(logvar)
        return self._given(0.5 * (jnp.log(2 * jnp.pi) + logvar + squares).sum(tuple(dims)))

    def _moments(self) -> tuple[Any, Any]:
        return as_array(self.mean), as_array(self.logvar)

    def _given(self, x: Any) -> Any:
        return alike(x, self.mean)
