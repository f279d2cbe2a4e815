"""Texts that were encoded once are found again, and pin nothing in memory."""

import gc
import weakref

import jax
import numpy as np
import pytest
from support.adapted import random_adapter

import diffusax
from diffusax.batch.request import Request
from diffusax.models.adapters.low_rank import kernel_shapes
from diffusax.pipelines.tasks import text_cache
from diffusax.pipelines.tasks.text_cache import TextCache


@pytest.fixture
def pipe(tiny_checkpoints):
    return diffusax.StableDiffusionPipeline.from_pretrained(tiny_checkpoints.pipeline("sd")[0])


@pytest.fixture
def encode(pipe, monkeypatch):
    """Encodes a text, and returns the embeddings and how many texts were not in the cache."""
    texts, encoded = TextCache(), []
    own = text_cache.encode_texts

    def counted(*given, **options):
        encoded.append(None)
        return own(*given, **options)

    monkeypatch.setattr(text_cache, "encode_texts", counted)

    def call(**given):
        encoded.clear()
        given = {"num_inference_steps": 1, "guidance_scale": 1.0, **given}
        request = Request()
        request.take_call(pipe, None, ("a",), given, texts=texts)
        context = np.asarray(request.prepare().plan.conditions.context)
        return context, len(encoded)

    return call


def add_adapter(pipe, name, seed):
    network = pipe.parts.networks["text_encoder"]
    paths = [path for path in kernel_shapes(network) if "_proj" in path]
    pipe.add_adapter(name, random_adapter(network, "text_encoder", 4, paths, seed).components)


def test_parameters_that_were_replaced_are_freed(pipe, encode):
    first, count = encode()
    assert (count, encode()[1]) == (1, 0)
    before = weakref.ref(jax.tree.leaves(pipe.params["text_encoder"])[0])
    pipe.params = jax.tree.map(lambda x: x * 1.5, pipe.params)
    gc.collect()
    assert before() is None
    second, count = encode()
    assert count == 1
    assert np.abs(first - second).max() > 0.01


def test_stacks_of_adapters_that_were_deleted_are_freed(pipe, encode):
    found, leaves = [], []
    for i in range(4):
        add_adapter(pipe, f"a{i}", i)
        given = {"adapters": {f"a{i}": 1.0}}
        found.append(encode(**given)[0])
        assert encode(**given)[1] == 0
        stacks = pipe.parts.adapters.stacked(pipe.parts, dict(pipe.adapters))
        leaves += map(weakref.ref, jax.tree.leaves(stacks["text_encoder"]))
        del stacks
    pipe.delete_adapters([f"a{i}" for i in range(4)])
    gc.collect()
    assert [leaf for leaf in leaves if leaf() is not None] == []
    assert all(np.abs(one - found[0]).max() > 0.001 for one in found[1:])
