"""Sinusoids against PyTorch's, at the largest values that networks are told."""

import jax
import numpy as np
import pytest
import torch
from diffusers.models.embeddings import get_timestep_embedding
from diffusers.pipelines.latent_consistency_models.pipeline_latent_consistency_text2img import (
    LatentConsistencyModelPipeline,
)
from transformers.models.qwen3.modeling_qwen3 import Qwen3Config, Qwen3RotaryEmbedding

from diffusax.models.encoders.qwen3 import rotary_table
from diffusax.models.layers.embeddings import guidance_scale_embedding, timestep_embedding

VALUES = np.array([0.5, 981.3, 999.0, 1000.0, 4096.0, 3500.0, 30_000.0, 100_000.0], np.float32)
"""Times, SDXL's sizes, and guidance of FLUX times 1000, up to 100."""


@pytest.mark.parametrize("dim", [32, 256, 320, 384])
def test_sinusoids_of_large_numbers_are_those_of_pytorch(dim):
    expected = get_timestep_embedding(torch.tensor(VALUES), dim, True, 0).numpy()
    found = jax.jit(lambda values: timestep_embedding(values, dim))(VALUES)
    # PyTorch's exponential rounds a few in a hundred to the second nearest number, others on each
    # kind of processor.
    assert (np.abs(found - expected) > 1e-6).mean() <= 0.05


def test_sinusoids_of_distilled_guidance_are_those_of_pytorch():
    scales = np.array([0.0, 1.5, 7.0], np.float32)
    embed = LatentConsistencyModelPipeline.get_guidance_scale_embedding
    expected = embed(None, torch.tensor(scales), 256).numpy()
    found = jax.jit(lambda values: guidance_scale_embedding(values, 256))(scales)
    assert (np.abs(found - expected) > 1e-6).mean() < 0.01


def test_rotary_angles_of_a_language_model_are_those_of_transformers():
    config = Qwen3Config(head_dim=128, rope_parameters={"rope_theta": 1e6, "rope_type": "default"})
    places = torch.arange(512)[None]
    cos, sin = Qwen3RotaryEmbedding(config)(torch.zeros(1), places)
    found = rotary_table(places.numpy()[..., None], 128, 1e6)
    for ours, theirs in zip(found, (cos, sin)):
        np.testing.assert_allclose(ours, theirs[..., :64], atol=2e-7)
