"""The embeddings of texts that a run does not change, computed once in the place of each step."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from diffusax.models.network import Params, cast_params, cast_shapes
from diffusax.runtime.devices.lowering import lowering_for, lowering_platforms
from diffusax.runtime.devices.mesh import in_mesh, to_host
from diffusax.training.recipes.base_model import BaseModel
from diffusax.training.step.denoising import embedding_entries, encode_captions


def embed_texts(
    base: BaseModel,
    texts: Mapping[str, str],
    dtype: Any,
    *,
    encoded_in: Any = "float32",
    mesh: Mesh | None = None,
) -> Params:
    """Encodes texts with a checkpoint's text encoders, which are read, and freed afterwards.

    Args:
        base: the checkpoint.
        texts: the texts by name.
        dtype: the dtype of the embeddings.
        encoded_in: the dtype that the encoders compute in.
        mesh: the devices to split the encoders over.

    Returns:
        For each text the embeddings' entries in a batch without the axis b, on the host.
    """
    params = {name: base.load(name, encoded_in, device=mesh).params for name in base.text_encoders}
    with in_mesh(mesh), lowering_for(lowering_platforms(mesh)):
        found = jax.jit(functools.partial(_embed, base, dtype))(params, _tokens(base, texts))
    return to_host(found)


def embedding_shapes(
    base: BaseModel, texts: Mapping[str, str], dtype: Any, *, encoded_in: Any = "float32"
) -> Params:
    """Returns the shapes of the result of `embed_texts`; no parameters are read."""
    shapes = {
        name: cast_shapes(base.networks[name].shapes, encoded_in) for name in base.text_encoders
    }
    return jax.eval_shape(functools.partial(_embed, base, dtype), shapes, _tokens(base, texts))


def _embed(base: BaseModel, dtype: Any, params: Params, tokens: Params) -> Params:
    def one(ids: Params) -> Params:
        batch = {name: x[None] for name, x in ids.items()}
        encoded = encode_captions(base.family, base.networks, params, batch)
        return {name: x[0] for name, x in embedding_entries(base.family, encoded).items()}

    return cast_params({name: one(ids) for name, ids in tokens.items()}, dtype)


def _tokens(base: BaseModel, texts: Mapping[str, str]) -> Params:
    return {name: base.tokenize(text) for name, text in texts.items()}
