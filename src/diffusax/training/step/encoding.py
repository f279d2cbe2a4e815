"""Encodes what a batch holds of texts and images, by the names of its entries."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from diffusax.models.autoencoders.latents import from_bytes, with_opacity
from diffusax.models.network import Network, Params
from diffusax.pipelines.families import Family
from diffusax.pipelines.plan.plan import HiddenLayers, Prompt, Tokens
from diffusax.training.data.buckets import Size
from diffusax.training.data.examples import (
    BEFORE,
    LATENTS,
    LENGTHS,
    MOST_ORIGINALS,
    PIXELS,
    ids_name,
    numbered_names,
)
from diffusax.training.step.seen_images import SeenImages


def original_names(batch: Mapping[str, Any]) -> list[str]:
    """Returns the names in a batch of the images before the edit, in order."""
    kind = LATENTS if LATENTS in batch else PIXELS
    return [name for name in numbered_names(kind, MOST_ORIGINALS) if name in batch]


def before_names(batch: Mapping[str, Any]) -> list[str]:
    """Returns the names in a batch of embeddings of what stands before images, in order."""
    return [name for name in numbered_names(BEFORE, MOST_ORIGINALS) if name in batch]


def reference_sizes(batch: Mapping[str, Any]) -> tuple[Size, ...]:
    """Returns the heights and widths of a batch's images before the edit; none of cached ones."""
    if LATENTS in batch:
        return ()
    return tuple(np.shape(batch[name])[1:3] for name in original_names(batch))


def encode_pixels(vae: Network, params: Params, pixels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Encodes images b H W 3 uint8 to mean and log variance of their latents, b h w z float32.

    They are opaque to an autoencoder of images with an opacity.
    """
    x = with_opacity(from_bytes(pixels), vae.config.in_channels)
    mean, logvar = vae.apply(params, x, method="encode")
    return mean.astype(jnp.float32), logvar.astype(jnp.float32)


def encode_captions(
    family: Family,
    networks: Mapping[str, Network],
    params: Params,
    ids: Mapping[str, jax.Array],
    layers: HiddenLayers | None = None,
    seen: SeenImages | None = None,
) -> Prompt:
    """Encodes tokens b t, which have their names in a batch, to embeddings.

    layers: the hidden states that the checkpoint asks for; None for the family's own. seen: where
    the texts speak of images, if they do.
    """
    if seen is not None:
        return seen.encode(networks, params, ids, layers)
    encoders = family.text_encoders
    tokens = tuple(ids[ids_name(e.tokenizer)] for e in encoders)
    return family.encode(
        tuple(networks[encoder.name] for encoder in encoders),
        tuple(params[encoder.name] for encoder in encoders),
        Tokens(tokens, lengths=ids.get(LENGTHS), layers=layers),
    )


def embedding_entries(family: Family, prompt: Prompt) -> dict[str, jax.Array]:
    """Returns embeddings by their names in a batch, with their lengths where the family has it."""
    found = dict(zip(family.embedding_columns, prompt))
    found |= dict(zip(numbered_names(BEFORE, len(prompt.before)), prompt.before))
    return found if prompt.lengths is None else {**found, LENGTHS: prompt.lengths}
