"""What networks of videos are shown of a clip's first frame, and of its last (Team Wan 2025).

Either the frames' latents, beside a mask, are further input channels, in a video that is grey
elsewhere, and CLIP's view of the frames may be read, too; or the first frame stands in the noise's
place, at time zero. Upstream: diffusers pipelines/wan/pipeline_wan_i2v.py.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from diffusax.models.autoencoders.latents import from_bytes
from diffusax.models.network import Network, Params
from diffusax.pipelines.families.wan import known_frames
from diffusax.pipelines.plan.plan import Conditions
from diffusax.training.data.examples import GIVEN, SEEN, SEEN_PIXELS

IMAGE_ENCODER = "image_encoder"
"""The name of the network that sees images, CLIP's."""


@dataclasses.dataclass(frozen=True)
class GivenFrames:
    """Which frames a network is shown, and how."""

    in_channels: bool
    """Whether they are input channels; otherwise the first frame is at time zero."""
    last: bool = False
    """Whether the last frame is shown, too."""
    seen: bool = False
    """Whether CLIP sees them."""
    share: float = 1.0
    """The share of examples that are shown any, where the first frame is at time zero."""

    @property
    def numbers(self) -> Sequence[int]:
        """The numbers of the frames."""
        return (0, -1) if self.last else (0,)

    def entries(
        self, networks: Mapping[str, Network], params: Params, vae: str, batch: Mapping[str, Any]
    ) -> dict[str, jax.Array]:
        """Returns what is shown of a batch's clips, by its names in a cache.

        Args:
            networks: the networks by name.
            params: their parameters.
            vae: the name of the autoencoder.
            batch: `pixel_values`, b f H W 3 uint8, and what CLIP sees, b n h w 3.

        Returns:
            The latents of a video that has nothing but these frames, b f h w z float32, its mode
            and unscaled; and with CLIP its hidden states, b (n i) d.
        """
        found: dict[str, jax.Array] = {}
        if self.in_channels:
            pixels = from_bytes(batch["pixel_values"])
            kept = self._marks(pixels.shape[1])[:, None, None, None]
            mean, _ = networks[vae].apply(params[vae], pixels * kept, method="encode")
            found[GIVEN] = mean.astype(jnp.float32)
        if self.seen:
            images = batch[SEEN_PIXELS]
            rows = images.reshape(-1, *images.shape[2:])
            states = networks[IMAGE_ENCODER].apply(params[IMAGE_ENCODER], rows).hidden_states[-2]
            found[SEEN] = states.reshape(len(images), -1, states.shape[-1])
        return found

    def channels(self, latents: jax.Array, step: int) -> jax.Array:
        """Returns the input channels, b f h w (step + c).

        Args:
            latents: those of the frames, scaled, b f h w c.
            step: the frames per frame of latents.
        """
        known = known_frames(self._marks((latents.shape[1] - 1) * step + 1), step)
        shape = (*latents.shape[:-1], step)
        mask = jnp.broadcast_to(jnp.asarray(known)[:, None, None], shape)
        return jnp.concatenate([mask.astype(latents.dtype), latents], axis=-1)

    def from_first(
        self,
        conditions: Conditions,
        clean: jax.Array,
        noisy: jax.Array,
        timesteps: jax.Array,
        shown: jax.Array,
    ) -> tuple[Conditions, jax.Array]:
        """Returns the conditions with the first frame, and what errors count for, b f 1 1.

        What is predicted of a frame that is shown counts for nothing, as a pipeline does not read
        it; the others count for more.

        Args:
            conditions: the others.
            clean: the latents, b f h w c.
            noisy: the same with noise.
            timesteps: those of the noise, b.
            shown: which examples are shown the frame, b bool.
        """
        frames = clean.shape[1]
        rows = shown[:, None, None, None, None]
        first = jnp.where(rows, clean[:, :1], noisy[:, :1])
        added = {"first_frame": first, "first_time": jnp.where(shown, 0, timesteps)}
        rest = np.arange(frames) > 0
        counted = jnp.where(shown[:, None], rest * np.float32(frames / max(frames - 1, 1)), 1.0)
        found = conditions._replace(added={**(conditions.added or {}), **added})
        return found, counted[:, :, None, None]

    def _marks(self, frames: int) -> np.ndarray:
        """Returns 1 for frames that are shown and 0 for others, F float32."""
        marks = np.zeros(frames, np.float32)
        marks[list(self.numbers)] = 1
        return marks
