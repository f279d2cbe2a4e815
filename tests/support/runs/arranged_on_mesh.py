"""What users do with a pipeline whose kernels are in the order of a mesh's devices.

XLA_FLAGS=--xla_force_host_platform_device_count=4 python arranged_on_mesh.py FOLDER OUTPUT
"""

import sys
from pathlib import Path

import jax
import numpy as np
from safetensors.numpy import load_file

import diffusax
from diffusax.models.arranged import Arranged
from diffusax.models.parameter_tree import ordered_leaves
from diffusax.models.quantized import Quantized
from support.adapted import random_adapter
from support.tiny_transformers import KLEIN_CALL

FOLDER, OUTPUT = map(Path, sys.argv[1:])
CALL = {"prompt": "a ship", "seed": 0, "num_inference_steps": 2, "output_type": "np", **KLEIN_CALL}
MESH = "data=1,fsdp=2,tensor=2"


def load(**where):
    pipe = diffusax.DiffusionPipeline.from_pretrained(FOLDER, **where)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def leaves(pipe) -> list:
    return [leaf for _, leaf in ordered_leaves(pipe.params["transformer"])]


def check_same(pipe, other, tolerance: float = 0.0) -> None:
    for own, theirs in zip(leaves(pipe), leaves(other), strict=True):
        np.testing.assert_allclose(np.asarray(own), np.asarray(theirs), atol=tolerance)


def draw(pipe) -> np.ndarray:
    return np.asarray(pipe(**CALL)[0])


def add_style(pipe) -> None:
    network = pipe.transformer.network
    pipe.add_adapter("style", random_adapter(network, "transformer", 2).components)


alone, pipe = load(device=jax.devices()[0]), load(mesh=MESH)
expected = draw(alone)
whole = [leaf for leaf in leaves(pipe) if isinstance(leaf, Arranged)]
assert {leaf.axis for leaf in whole} == {-1, -2}
assert not any(isinstance(leaf, Arranged) for leaf in leaves(alone))
check_same(pipe, alone)
np.testing.assert_allclose(draw(pipe), expected, atol=1e-4)
print("loaded")

pipe.save_pretrained(OUTPUT)
name = "transformer/diffusion_pytorch_model.safetensors"
saved, first = load_file(OUTPUT / name), load_file(FOLDER / name)
assert saved.keys() == first.keys()
for key, value in first.items():
    np.testing.assert_array_equal(saved[key], value, err_msg=key)
print("saved")

again = type(pipe)(**{**pipe.components, "scheduler": pipe.scheduler}, is_distilled=False)
np.testing.assert_allclose(draw(again), expected, atol=1e-4)
pipe.params = alone.params
assert sum(isinstance(leaf, Arranged) for leaf in leaves(pipe)) == len(whole)
np.testing.assert_allclose(draw(pipe), expected, atol=1e-4)
for mesh, count in (("fsdp=4", 0), (MESH, len(whole))):
    pipe.spread_over(mesh)
    assert sum(isinstance(leaf, Arranged) for leaf in leaves(pipe)) == count
    np.testing.assert_allclose(draw(pipe), expected, atol=1e-4)
print("moved")

for parameter in (
    "single_transformer_blocks.0.attn.to_qkv_mlp_proj.weight",
    "single_transformer_blocks.0.attn.to_out.weight",
):
    both = [p.transformer.get_parameter(parameter) for p in (pipe, alone)]
    new = both[0].numpy() * 1.5
    for own in both:
        own.copy_(new)
        np.testing.assert_array_equal(own.numpy(), new)
np.testing.assert_allclose(draw(pipe), draw(alone), atol=1e-4)
print("written")

before = draw(alone)
for own in (pipe, alone):
    add_style(own)
    own.fuse_lora(components="transformer", adapter_names=["style"])
check_same(pipe, alone, 1e-5)
np.testing.assert_allclose(draw(pipe), draw(alone), atol=1e-4)
assert np.abs(draw(alone) - before).max() > 0.01
for own in (pipe, alone):
    own.unfuse_lora()
    own.delete_adapters("style")
check_same(pipe, alone)
print("fused")

weights = "int8_convrot"
both = load(mesh=MESH, weights=weights), load(device=jax.devices()[0], weights=weights)
inner = [leaf.values for leaf in leaves(both[0]) if isinstance(leaf, Arranged)]
assert any(isinstance(leaf, Quantized) for leaf in inner)
check_same(*both)
np.testing.assert_allclose(draw(both[0]), draw(both[1]), atol=1e-4)
pipe = load(mesh=MESH)
pipe.transformer.quantize(weights)
# Rotations are summed in another order, so that some numbers round otherwise.
check_same(pipe, both[1], 2e-3)
print("quantised")
