"""Networks built for their shapes only."""

import jax
import pytest
from flax import nnx
from support.effort import first
from support.tiny import TEXT, UNET, VAE

from diffusax.models import MODELS
from diffusax.models.layers.rngs import ShapeRngs

CONFIGS = {
    "AutoencoderKL": VAE,
    "CLIPTextModelWithProjection": TEXT,
    "UNet2DConditionModel": {**UNET["sd1"], "num_class_embeds": 3, "time_cond_proj_dim": 8},
}


@pytest.mark.parametrize("name", first(MODELS, 4))
def test_shape_rngs_gives_the_graph_and_the_shapes_of_eval_shape(name):
    module_class = MODELS[name]
    config = module_class.config_class(**CONFIGS.get(name, {}))
    fast = nnx.split(module_class(config, rngs=ShapeRngs()))
    slow = nnx.split(nnx.eval_shape(lambda: module_class(config, rngs=nnx.Rngs(0))))
    assert fast[0] == slow[0]
    fast, slow = nnx.to_pure_dict(fast[1]), nnx.to_pure_dict(slow[1])
    same = jax.tree.map(lambda a, b: (a.shape, a.dtype) == (b.shape, b.dtype), fast, slow)
    assert all(jax.tree.leaves(same))
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(fast))
