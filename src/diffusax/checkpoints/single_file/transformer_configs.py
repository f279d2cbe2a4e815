"""The configs of the transformers in single files, as far as the shapes of their tensors say them.

The values are those of the Hub's repositories: Tongyi-MAI/Z-Image and Z-Image-Turbo.
"""

from collections.abc import Callable
from typing import Any

from diffusax.checkpoints.single_file.contents import Part

Config = dict[str, Any]

AUTOENCODER: Config = {
    "_class_name": "AutoencoderKL",
    "in_channels": 3,
    "out_channels": 3,
    "latent_channels": 16,
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "block_out_channels": [128, 256, 512, 512],
    "layers_per_block": 2,
    "sample_size": 1024,
    "scaling_factor": 0.3611,
    "shift_factor": 0.1159,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}
"""The autoencoder of FLUX.1 and Z-Image."""
_HEAD = 128


def transformer_config(part: Part) -> Config:
    """Returns the config of a transformer.

    Raises:
        ValueError: its tensors are not those of a model that the package has a config for.
    """
    config = _CONFIGS[part.class_name](part)
    if config is None:
        raise ValueError(
            f"{part.path}: the transformer is a {part.class_name} of other widths than any that "
            "the package has a config for; pass config= with the folder of its config.json"
        )
    return {"_class_name": part.class_name, **config}


def _z_image(part: Part) -> Config | None:
    original = part.layout == "original"
    embedder = part.shape("x_embedder.weight" if original else "all_x_embedder.2-1.weight")
    norm = "layers.0.attention." + ("q_norm" if original else "norm_q") + ".weight"
    caption = part.shape("cap_embedder.1.weight")
    if embedder is None or caption is None or part.shape(norm) != (_HEAD,):
        return None
    dim, channels = embedder
    heads = dim // _HEAD
    return {
        "in_channels": channels // 4,
        "dim": dim,
        "n_layers": _count(part, "layers."),
        "n_refiner_layers": _count(part, "noise_refiner."),
        "n_heads": heads,
        "n_kv_heads": heads,
        "cap_feat_dim": caption[1],
        "axes_dims": [32, 48, 48],
        "axes_lens": [1536, 512, 512],
    }


def _count(part: Part, start: str) -> int:
    """Returns the number of blocks whose tensors' names begin so."""
    return len({n[len(start) :].split(".")[0] for n in part.entries if n.startswith(start)})


_CONFIGS: dict[str, Callable[[Part], Config | None]] = {"ZImageTransformer2DModel": _z_image}
