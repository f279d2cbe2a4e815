"""Draws with diffusers 0.35.2's Flax classes; run by flax_parity.py in an environment of theirs.

    python flax_old.py FOLDER VOCABULARY [exact]

Builds tiny checkpoints in FOLDER and writes FOLDER/pictures.npz. With "exact" the transformers'
GELU and the epsilon of their first norm are PyTorch's: Flax's classes had others.
"""

import functools
import sys
from pathlib import Path

import diffusers
import jax
import numpy as np
from diffusers.models import attention_flax
from flax import linen as nn
from flax_programs import LEVELS, draw
from transformers import (
    CLIPTextConfig,
    CLIPTokenizer,
    FlaxCLIPTextModel,
    FlaxCLIPTextModelWithProjection,
)

BLOCKS = {
    "block_out_channels": (32, 64),
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "layers_per_block": 1,
    "attention_head_dim": 4,
    "sample_size": 8,
}
UNET = {
    **BLOCKS,
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "cross_attention_dim": 32,
}
UNET_XL = {
    **UNET,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    "attention_head_dim": (2, 4),
    "transformer_layers_per_block": (1, 2),
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 8,
    "cross_attention_dim": 56,
    "projection_class_embeddings_input_dim": 64,
}
VAE = {
    "block_out_channels": (8, 16, 16, 32),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "norm_num_groups": 8,
    "sample_size": 64,
}
TEXT = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "projection_dim": 16,
}


def randomized(tree, seed):
    """The tree with all leaves random: kernels of unit gain, norms around one, biases around 0."""
    rng = np.random.default_rng(seed)

    def value(path, leaf):
        kind, drawn = path[-1].key, rng.standard_normal(leaf.shape, np.float32)
        if kind == "kernel":
            return drawn / np.prod(leaf.shape[:-1]) ** 0.5
        return {"scale": 1 + 0.2 * drawn, "bias": 0.2 * drawn, "embedding": 0.3 * drawn}[kind]

    return jax.tree_util.tree_map_with_path(value, tree)


def model(name, seed, **options):
    """A network of diffusers and its parameters."""
    made = getattr(diffusers, name)(**options)
    return made, randomized(made.init_weights(jax.random.PRNGKey(0)), seed)


def text_model(cls, seed, vocabulary, **options):
    """A text encoder of transformers and its parameters."""
    config = CLIPTextConfig(vocab_size=vocabulary, **{**TEXT, **options})
    made = cls(config)
    return made, randomized(made.params, seed)


def build(root, vocabulary):
    """The checkpoints of all programs."""
    tokenizer = CLIPTokenizer.from_pretrained(vocabulary)
    parts = {
        "vae": model("FlaxAutoencoderKL", 1, **VAE),
        "text_encoder": text_model(FlaxCLIPTextModel, 2, len(tokenizer)),
    }
    scheduler = diffusers.FlaxDDIMScheduler(**LEVELS, clip_sample=False)
    for folder, class_name, channels in (
        ("sd", "FlaxStableDiffusionPipeline", 4),
        ("inpaint", "FlaxStableDiffusionInpaintPipeline", 9),
    ):
        parts["unet"] = model("FlaxUNet2DConditionModel", 3, **UNET, in_channels=channels)
        save(root / folder, class_name, parts, tokenizer=tokenizer, scheduler=scheduler)
    controlnet, params = model(
        "FlaxControlNetModel",
        4,
        **BLOCKS,
        cross_attention_dim=32,
        conditioning_embedding_out_channels=(4, 8, 8, 16),
    )
    controlnet.save_pretrained(root / "controlnet", params)
    parts["unet"] = model("FlaxUNet2DConditionModel", 5, **UNET_XL)
    parts["text_encoder_2"] = text_model(
        FlaxCLIPTextModelWithProjection, 6, len(tokenizer), hidden_size=24, hidden_act="gelu"
    )
    save(
        root / "xl",
        "FlaxStableDiffusionXLPipeline",
        parts,
        tokenizer=tokenizer,
        tokenizer_2=tokenizer,
        scheduler=diffusers.FlaxEulerDiscreteScheduler(**LEVELS, timestep_spacing="leading"),
    )


def save(folder, class_name, parts, **others):
    """A pipeline's checkpoint."""
    modules = {name: part for name, (part, _) in parts.items()}
    if "XL" not in class_name:
        others |= {"safety_checker": None, "feature_extractor": None}
    pipeline = getattr(diffusers, class_name)(**modules, **others)
    pipeline.save_pretrained(folder, {name: params for name, (_, params) in parts.items()})


def use_pytorch_details():
    """PyTorch's GELU and epsilon in the transformers."""
    details = type("details", (), dict(vars(nn)))
    details.gelu = staticmethod(functools.partial(nn.gelu, approximate=False))

    def group_norm(num_groups, epsilon):
        return nn.GroupNorm(num_groups=num_groups, epsilon=1e-6)

    details.GroupNorm = staticmethod(group_norm)
    attention_flax.nn = details


if __name__ == "__main__":
    root, vocabulary = Path(sys.argv[1]), sys.argv[2]
    if not (root / "sd").exists():
        build(root, vocabulary)
    exact = sys.argv[3:] == ["exact"]
    if exact:
        use_pytorch_details()
    name = "exact.npz" if exact else "pictures.npz"
    np.savez(root / name, **{k: np.asarray(v) for k, v in draw(diffusers, root).items()})
