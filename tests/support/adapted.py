"""Tiny networks of every kind that takes adapters, with inputs, and what each layer's adapter does.

python adapted.py OUT.json NETWORK: whether every layer counts on two devices (tensor=2), and how
far the results are from one device's, with adapters and with those in training (DoRA).
"""

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from diffusax import models
from diffusax.boundary.config import config_from_dict
from diffusax.lora import Lora
from diffusax.lora.stacks import WeightGroups, stack
from diffusax.models.adapters.low_rank import Adapters, kernel_shapes
from diffusax.models.adapters.trained import TrainedAdapters, column_lengths
from diffusax.models.network import Network, initialize_params
from diffusax.runtime.devices import mesh as meshes
from support.many_devices import split_small_arrays

CONTEXT, ROWS = 56, 3
SD1 = {
    "block_out_channels": (32, 64),
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "layers_per_block": 1,
    "attention_head_dim": 4,
    "norm_num_groups": 8,
    "cross_attention_dim": CONTEXT,
    "sample_size": 16,
    "class_embed_type": "projection",
    "projection_class_embeddings_input_dim": 12,
}
XL = {
    **{k: v for k, v in SD1.items() if k != "class_embed_type"},
    "block_out_channels": (16, 32),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    "attention_head_dim": (2, 4),
    "transformer_layers_per_block": (1, 2),
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 8,
    "projection_class_embeddings_input_dim": 16 + 6 * 8,
    "time_cond_proj_dim": 16,
}
SMALLEST = {
    "block_out_channels": (8,),
    "down_block_types": ("CrossAttnDownBlock2D",),
    "up_block_types": ("CrossAttnUpBlock2D",),
    "mid_block_type": None,
    "layers_per_block": 1,
    "attention_head_dim": 2,
    "norm_num_groups": 4,
    "cross_attention_dim": CONTEXT,
}
TEXT = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "projection_dim": 16,
    "vocab_size": 100,
    "bos_token_id": 98,
    "eos_token_id": 99,
}
ENCODER = ("sample_size", "up_block_types", "time_cond_proj_dim")
CONTROL = {k: v for k, v in XL.items() if k not in ENCODER}
CONTROL |= {"conditioning_embedding_out_channels": (4, 8, 16)}
CONFIGS = {
    "unet": ("UNet2DConditionModel", XL),
    "unet_sd1": ("UNet2DConditionModel", SD1),
    "unet_smallest": ("UNet2DConditionModel", SMALLEST),
    "controlnet": ("ControlNetModel", CONTROL),
    "text_encoder": ("CLIPTextModel", TEXT),
    "text_encoder_2": ("CLIPTextModelWithProjection", {**TEXT, "hidden_act": "gelu"}),
}


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def network_of(name):
    class_name, config = CONFIGS[name]
    kind = getattr(models, class_name)
    return Network(kind, config_from_dict(kind.config_class, config))


def inputs_of(name):
    """Arrays by argument, channels last."""
    if name.startswith("text"):
        ids = np.random.default_rng(0).integers(0, 90, (ROWS, 7))
        ids[:, -1] = 99
        return {"input_ids": ids.astype(np.int32)}
    given = {
        "sample": normal(ROWS, 8, 8, 4),
        "timestep": np.float32([10, 300, 900]),
        "encoder_hidden_states": normal(ROWS, 7, CONTEXT, seed=1),
    }
    if name == "unet_sd1":
        return {**given, "class_labels": normal(ROWS, 12, seed=2)}
    if name == "unet_smallest":
        return given
    sizes = 100 * np.abs(normal(ROWS, 6, seed=4))
    given["added_cond"] = {"text_embeds": normal(ROWS, 16, seed=3), "time_ids": sizes}
    if name == "controlnet":
        return {**given, "cond": np.abs(normal(ROWS, 32, 32, 3, seed=5))}
    return {**given, "timestep_cond": normal(ROWS, 16, seed=6)}


def run(network, params, adapters, given):
    """All outputs of the network as leaves; the control image is embedded by its method."""
    given = dict(given)
    if "cond" in given:
        given["cond_embedding"] = network.apply(
            params, given.pop("cond"), method="embed_condition", adapters=adapters
        )
    return jax.tree.leaves(network.apply(params, **given, adapters=adapters))


def random_adapter(network, component, rank, paths=None, seed=0):
    rng = np.random.default_rng(seed)

    def pair(kernel):
        *size, c, d = kernel
        down = rng.standard_normal((*size, c, rank), np.float32) * (c * np.prod(size)) ** -0.5
        return down, rng.standard_normal((rank, d), np.float32) * rank**-0.5

    shapes = kernel_shapes(network)
    return Lora({component: {path: pair(shapes[path]) for path in paths or shapes}})


def alone(layers, number):
    """The layers' adapters, all but one of them without effect."""
    return {
        path: layer._replace(up=layer.up * (number == i))
        for i, (path, layer) in enumerate(layers.items())
    }


def effects(network, params, layers, weights, given):
    """How much each layer's adapter changes the outputs, by path; one compiled function."""

    @jax.jit
    def output(params, layers, number):
        adapters = Adapters(alone(layers, number), weights)
        leaves = run(network, params, adapters, given)
        return jnp.concatenate([leaf.reshape(-1).astype(jnp.float32) for leaf in leaves])

    plain = np.asarray(output(params, layers, -1))
    scale = np.abs(plain).max()
    found = {}
    for i, path in enumerate(layers):
        found[path] = float(np.abs(np.asarray(output(params, layers, i)) - plain).max() / scale)
    return found


def whole(name):
    """A network with parameters, adapters on every layer, and weights for each row."""
    network = network_of(name)
    params = initialize_params(network.shapes)
    adapter = random_adapter(network, name, 4)
    (layers,) = stack({"one": adapter}, {name: network}).values()
    rows = [{"one": 1.0}, {"one": 0.6}, {"one": -0.8}]
    return network, params, layers, WeightGroups({name: network}).table(["one"], rows)


def in_training(params, layers):
    """The same adapters as DoRA trains them, with columns of other lengths than W's."""
    pairs = {path: {"down": layer.down, "up": layer.up} for path, layer in layers.items()}
    for path, pair in pairs.items():
        lengths = column_lengths(kernel_of(params, path))
        pair["magnitude"] = lengths * (1 + 0.3 * normal(*lengths.shape))
    return TrainedAdapters(pairs, dict.fromkeys(pairs, 0.5))


def kernel_of(params, path):
    for part in path.split("."):
        params = params[part]
    return params["kernel"]


def split_axis(array):
    """The axis that two devices share, counted from the end; None where each has all."""
    spec = list(array.sharding.spec)
    return spec.index("tensor") - array.ndim if "tensor" in spec else None


def distance(some, others):
    """The largest difference of arrays, as a share of the largest number."""
    pairs = zip(some, others, strict=True)
    return max(float(np.abs(np.asarray(a) - b).max() / np.abs(b).max()) for a, b in pairs)


def main(out, name):
    network, params, layers, weights = whole(name)
    given = inputs_of(name)
    every = Adapters(layers, weights), in_training(params, layers)
    compiled = jax.jit(run, static_argnums=0)
    expected = [compiled(network, params, own, given) for own in every]
    mesh = meshes.make_mesh("tensor=2,data=1")
    with split_small_arrays():
        params, layers = (
            jax.device_put(tree, meshes.tree_sharding(mesh, tree, network.tensor_rules))
            for tree in (params, layers)
        )
    split = {
        path: [split_axis(leaf) for leaf in (kernel_of(params, path), layer.down, layer.up)]
        for path, layer in layers.items()
    }
    with jax.set_mesh(mesh):
        given = jax.device_put(given, meshes.replicated(mesh))
        actual = [compiled(network, params, own, given) for own in every]
        found = effects(network, params, layers, weights, given)
    differences = [distance(*both) for both in zip(actual, expected)]
    apart = distance(*expected)
    result = {"effects": found, "differences": differences, "apart": apart, "split": split}
    Path(out).write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
