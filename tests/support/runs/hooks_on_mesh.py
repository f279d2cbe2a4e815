"""Calls with hooks on meshes of four devices and on one, which must agree.

python hooks_on_mesh.py CHECKPOINT MESH ...
"""

import sys

import numpy as np
import pytest
from jax.tree_util import Partial

import diffusax

CALL = {"num_inference_steps": 2, "seed": 3, "guidance_scale": 3.0, "output_type": "np"}
WEIGHTS = np.ones(77, np.float32)
WEIGHTS[2] = 5


def reweigh(weights, probs, at):
    changed = probs * weights
    return changed / changed.sum(-1, keepdims=True), probs[:: at.branches].mean(1)


def draw(folder, prompts, **options):
    pipe = diffusax.StableDiffusionPipeline.from_pretrained(folder, **options)
    pipe.set_progress_bar_config(disable=True)
    hooks = {r".*attn2\.attention_probs": Partial(reweigh, WEIGHTS), "mid_block": keep}
    return pipe(prompts, hooks=hooks, **CALL)


def keep(x, at):
    return x, x


def main(folder, *meshes):
    prompts = ["a frog", "a boat", "two dogs", "a cat"]
    expected = draw(folder, prompts)
    for mesh in meshes:
        found = draw(folder, prompts, mesh=mesh)
        np.testing.assert_allclose(found.images, expected.images, atol=1e-5)
        assert [*found.kept] == [*expected.kept]
        for name, rows in expected.kept.items():
            np.testing.assert_allclose(found.kept[name], rows, atol=1e-4)
        with pytest.raises(ValueError, match="must be a multiple"):
            draw(folder, prompts[:3], mesh=mesh)
    print("equal")


if __name__ == "__main__":
    main(*sys.argv[1:])
