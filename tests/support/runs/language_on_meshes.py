"""Language models and vision networks over four devices and over one.

XLA_FLAGS=--xla_force_host_platform_device_count=4 python language_on_meshes.py
"""

import jax
import numpy as np

from diffusax.models import (
    Qwen2_5_VisionTransformerPretrainedModel,
    Qwen2_5_VLTextConfig,
    Qwen2_5_VLTextModel,
    Qwen2_5_VLVisionConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3VLVisionConfig,
    Qwen3VLVisionModel,
    T5Config,
    T5EncoderModel,
)
from diffusax.networks import initialize
from diffusax.runtime.devices import mesh as meshes
from support.many_devices import split_small_arrays

LENGTHS = np.array([13, 5, 1, 8], np.int32)
IDS = np.random.default_rng(0).integers(0, 64, (4, 13)).astype(np.int32)
QWEN3 = Qwen3Config(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
)
QWEN25 = Qwen2_5_VLTextConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    rope_scaling={"mrope_section": (1, 2, 1)},
)
T5 = T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
VISION = Qwen3VLVisionConfig(
    depth=2,
    hidden_size=32,
    intermediate_size=48,
    num_heads=4,
    patch_size=4,
    out_hidden_size=32,
    num_position_embeddings=16,
    deepstack_visual_indexes=(0,),
)
WINDOWS = Qwen2_5_VLVisionConfig(
    depth=2,
    hidden_size=32,
    intermediate_size=48,
    num_heads=4,
    patch_size=4,
    out_hidden_size=32,
    window_size=16,
    fullatt_block_indexes=(1,),
)
PATCHES = np.random.default_rng(0).normal(size=(4, 24, 96)).astype(np.float32)
GRIDS = np.array([(4, 6), (6, 4), (2, 12), (4, 6)], np.int32)
CASES = (
    (Qwen3ForCausalLM, QWEN3, "hidden_states", (IDS, LENGTHS)),
    (Qwen2_5_VLTextModel, QWEN25, "hidden_states", (IDS, LENGTHS)),
    (Qwen2_5_VisionTransformerPretrainedModel, WINDOWS, "__call__", (PATCHES, GRIDS)),
    (T5EncoderModel, T5, "hidden_states", (IDS, LENGTHS)),
    (Qwen3VLVisionModel, VISION, "__call__", (PATCHES, GRIDS)),
)

for module_class, config, method, inputs in CASES:
    model = initialize(module_class, config)

    @jax.jit
    def states(params, inputs, model=model, method=method):
        return jax.tree.leaves(model.apply(params, *inputs, method=method))

    expected = states(model.params, inputs)
    for shape in ("tensor=4", "data=2,tensor=2", "fsdp=4", "fsdp=2,tensor=2"):
        mesh = meshes.make_mesh(shape)
        with split_small_arrays():
            places = meshes.tree_sharding(mesh, model.params, model.network.tensor_rules)
        params = jax.device_put(model.params, places)
        assert not all(leaf.is_fully_replicated for leaf in jax.tree.leaves(params))
        batch = jax.device_put(inputs, meshes.batch_sharding(mesh))
        with jax.set_mesh(mesh):
            found = states(params, batch)
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5)
        print(shape)
