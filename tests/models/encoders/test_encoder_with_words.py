"""A text encoder with rows of its own for some words."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffusax.models.encoders.clip import CLIPTextModel
from diffusax.models.encoders.configs import CLIPTextConfig
from diffusax.models.encoders.token_table import WORDS, EncoderWithWords
from diffusax.models.network import Network, initialize_params

CONFIG = CLIPTextConfig(
    vocab_size=50,
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    max_position_embeddings=8,
    eos_token_id=49,
)
NETWORK = Network(CLIPTextModel, CONFIG)


def with_rows(params, first, rows):
    """The parameters with the rows in the table, which grows where it must."""
    model = params["text_model"]
    table = model["embeddings"]["token_embedding"]["embedding"]
    size = max(len(table), first + len(rows))
    table = (
        jnp.zeros((size, 16)).at[: len(table)].set(table).at[first : first + len(rows)].set(rows)
    )
    embeddings = {**model["embeddings"], "token_embedding": {"embedding": table}}
    return {**params, "text_model": {**model, "embeddings": embeddings}}


@pytest.mark.parametrize("first", [50, 30], ids=["after the table", "inside it"])
def test_words_are_looked_up_in_their_rows(first):
    params = initialize_params(NETWORK.shapes)
    network = EncoderWithWords.of(NETWORK, first=first, initial=(7, 3))
    assert network.config.vocab_size == max(50, first + 2)
    given = network.with_initial_rows(params)
    table = params["text_model"]["embeddings"]["token_embedding"]["embedding"]
    np.testing.assert_array_equal(given[WORDS]["embedding"], table[np.array([7, 3])])
    assert jax.tree.map(jnp.shape, given) == jax.tree.map(lambda x: x.shape, network.shapes)

    rows = jax.random.normal(jax.random.key(0), (2, 16))
    ids = jnp.array([[48, 5, first, first + 1, first, 31 if first == 50 else 29, 49, 0]])
    given = {**given, WORDS: {"embedding": rows}}
    result = jax.jit(network.apply)(given, ids).last_hidden_state
    grown = Network(CLIPTextModel, network.config)
    expected = jax.jit(grown.apply)(with_rows(params, first, rows), ids).last_hidden_state
    np.testing.assert_allclose(result, expected, atol=1e-6)
