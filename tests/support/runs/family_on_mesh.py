"""A transformer, with an adapter of every layer and without, over four devices and over one.

XLA_FLAGS=--xla_force_host_platform_device_count=4 python family_on_mesh.py NAME FOLDER
"""

import sys

import jax
import numpy as np

import diffusax
from diffusax.models.adapters.low_rank import kernel_shapes
from support.many_devices import split_small_arrays
from support.pairs import picture
from support.qwen_edits import images, make_areas_smaller
from support.tiny_flux3 import FLUX3_CALL
from support.tiny_transformers import KLEIN_CALL

NAME, FOLDER = sys.argv[1:]
make_areas_smaller()
OWN = {
    "z-image": {"negative_prompt": "a hat", "guidance_scale": 2.0},
    "flux": {"negative_prompt": "a hat", "true_cfg_scale": 2.0, "max_sequence_length": 32},
    "krea2": {"negative_prompt": "a hat", "guidance_scale": 2.0},
    "qwen-image": {"negative_prompt": "a hat", "true_cfg_scale": 2.0},
    "qwen-image-edit": {
        "negative_prompt": "a hat",
        "true_cfg_scale": 2.0,
        "image": images(2),
    },
    "qwen-image21": {
        "negative_prompt": "a hat",
        "true_cfg_scale": 2.0,
        "height": 32,
        "width": 64,
        "image": picture(1),
        "output_resolution": 64,
    },
    "wan": {"height": 16, "width": 32, "num_frames": 5, "max_sequence_length": 24},
    "klein": {**KLEIN_CALL, "image": picture(1)},
    "klein-3": {**FLUX3_CALL, "image": picture(1)},
}
CALL = {
    "prompt": ["a red apple", "a house on a hill", "a ship", "two dogs"],
    "seed": 0,
    "num_inference_steps": 2,
    "height": 24,
    "width": 40,
    "output_type": "np",
    **OWN[NAME],
}
QWEN = (
    "transformer_blocks.0.attn.to_q",
    "transformer_blocks.0.attn.to_add_out",
    "transformer_blocks.0.txt_mlp.net.2",
    "transformer_blocks.0.img_mod.1",
)
SPLIT = {
    "z-image": ("layers.0.attention.to_q", "layers.0.feed_forward.w2"),
    "flux": (
        "transformer_blocks.0.attn.to_q",
        "transformer_blocks.0.attn.to_add_out",
        "transformer_blocks.0.ff_context.net.2",
        "transformer_blocks.0.norm1.linear",
        "single_transformer_blocks.0.norm.linear",
        "single_transformer_blocks.0.proj_out",
    ),
    "krea2": (
        "transformer_blocks.0.attn.to_q",
        "transformer_blocks.0.attn.to_k",
        "transformer_blocks.0.ff.down",
        "text_fusion.refiner_blocks.0.attn.to_gate",
        "time_mod_proj",
    ),
    "qwen-image": QWEN,
    "qwen-image-edit": QWEN,
    "qwen-image21": (
        "transformer_blocks.0.attn.to_q",
        "transformer_blocks.0.attn.to_out.0",
        "transformer_blocks.0.img_mlp.proj",
        "transformer_blocks.0.img_mlp.out",
    ),
    "wan": ("blocks.0.attn1.to_q", "blocks.0.attn2.to_k", "blocks.0.ffn.net.2"),
    "klein": (
        "transformer_blocks.0.attn.to_q",
        "transformer_blocks.0.ff.linear_in",
        "single_transformer_blocks.0.attn.to_out",
    ),
    "klein-3": (
        "mode_blocks.image_cond.0.attn.to_q",
        "txt_mode_blocks.0.ff.linear_in",
        "single_transformer_blocks.0.attn.to_out.0",
        "single_stream_modulations.txt.linear",
    ),
}
"""Layers of which no device has the whole."""


def draw(**where):
    """A pipeline, and the images of its prompts with adapters and without."""
    pipe = diffusax.DiffusionPipeline.from_pretrained(FOLDER, **where)
    pipe.set_progress_bar_config(disable=True)
    rng = np.random.default_rng(0)
    layers = {
        path: tuple(
            rng.standard_normal(size).astype(np.float32) / 4
            for size in ((*shape[:-1], 2), (2, shape[-1]))
        )
        for path, shape in kernel_shapes(pipe.transformer.network).items()
    }
    pipe.add_adapter("style", {"transformer": layers})
    return pipe, [pipe(**CALL, adapters=weights)[0] for weights in ({"style": 1.0}, {})]


def layer_of(params, path):
    """The parameters of a layer."""
    for part in path.split("."):
        params = params[part]
    return params


_, expected = draw(device=jax.devices()[0])
assert np.abs(expected[0] - expected[1]).max() > 0.02
with split_small_arrays():
    for mesh in ("data=2,tensor=2", "data=2,fsdp=2"):
        pipe, found = draw(mesh=mesh)
        for path in SPLIT[NAME]:
            kernel = layer_of(pipe.params["transformer"], path)["kernel"]
            assert len(kernel.sharding.device_set) == len(jax.devices()), path
            assert not kernel.sharding.is_fully_replicated, path
        for ours, theirs in zip(found, expected, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-4)
        print(mesh)
