"""Transformers with their tokens split over eight devices, and on one.

XLA_FLAGS=--xla_force_host_platform_device_count=8 python split_tokens.py FOLDER [name=value ...]
"""

import ast
import sys

import jax
import numpy as np

import diffusax
from diffusax.pipelines.pipeline import ahead
from diffusax.runtime.devices.mesh import make_mesh
from diffusax.runtime.programs.program import lower
from diffusax.runtime.switches import in_mesh
from support.many_devices import split_small_arrays
from support.qwen_edits import make_areas_smaller

make_areas_smaller()

CALL = {
    "prompt": "a red apple",
    "seed": 0,
    "num_inference_steps": 2,
    "guidance_scale": 2.0,
    "height": 32,
    "width": 64,
    "output_type": "np",
    **{name: ast.literal_eval(value) for name, value in (arg.split("=") for arg in sys.argv[2:])},
}


def operations(pipe, mesh, name):
    """What each device computes in a program of a call."""
    call = ahead.example_call(pipe, 1, (32, 64), {**CALL, "output_type": "latent"})
    with in_mesh(mesh):
        requests = ahead.requests(pipe.parts, pipe.task, call)
        request = next(r for r in requests if r.program.name == name)
        compiled = lower(request).compile()
    return compiled.cost_analysis()["flops"]


alone = diffusax.DiffusionPipeline.from_pretrained(sys.argv[1], device=jax.devices()[0])
alone.set_progress_bar_config(disable=True)
(expected,) = alone(**CALL, return_dict=False)
# Only the autoencoders of videos share maps.
programs = ("denoise", "decode") if alone.family.draws_videos else ("denoise",)
whole = {name: operations(alone, None, name) for name in programs}
with split_small_arrays():
    for shape, most in (("data=1,context=8", 0.3), ("data=2,context=2,tensor=2", 0.6)):
        pipe = diffusax.DiffusionPipeline.from_pretrained(sys.argv[1], mesh=shape)
        pipe.set_progress_bar_config(disable=True)
        assert pipe.mesh.shape["context"] == make_mesh(shape).shape["context"] > 1
        for name in programs:
            share = operations(pipe, pipe.mesh, name) / whole[name]
            assert share < most, (shape, name, share)
        (found,) = pipe(**CALL, return_dict=False)
        np.testing.assert_allclose(found, expected, atol=1e-5)
        print(shape)
