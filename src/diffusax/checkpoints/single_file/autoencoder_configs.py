"""The configs of the autoencoders of FLUX.2, Qwen-Image and Wan, as far as shapes say them."""

from typing import Any

from diffusax.checkpoints.single_file.contents import Part
from diffusax.models.autoencoders.qwen_image import AutoencoderKLQwenImageConfig
from diffusax.models.autoencoders.qwen_image21 import AutoencoderKLQwenImage21Config

Config = dict[str, Any]

OF_FRAMES = ("AutoencoderKLQwenImage", "AutoencoderKLQwenImage21", "AutoencoderKLWan")
_WIDTHS = [128, 256, 512, 512]
_LATENTS = {
    "AutoencoderKLQwenImage": (len(AutoencoderKLQwenImageConfig().latents_mean),),
    "AutoencoderKLQwenImage21": (len(AutoencoderKLQwenImage21Config().latents_mean),),
    "AutoencoderKLWan": (16, 48),
}
"""The numbers of channels of latents whose statistics are known."""
# Those of Wan 2.1 are the defaults (wan/modules/vae2_2.py, Wan2_2_VAE).
WAN22: Config = {
    "is_residual": True,
    "patch_size": 2,
    "scale_factor_spatial": 16,
    "latents_mean": [
        *(-0.2289, -0.0052, -0.1323, -0.2339, -0.2799, 0.0174, 0.1838, 0.1557),
        *(-0.1382, 0.0542, 0.2813, 0.0891, 0.1570, -0.0098, 0.0375, -0.1825),
        *(-0.2246, -0.1207, -0.0698, 0.5109, 0.2665, -0.2108, -0.2158, 0.2502),
        *(-0.2055, -0.0322, 0.1109, 0.1567, -0.0729, 0.0899, -0.2799, -0.1230),
        *(-0.0313, -0.1649, 0.0117, 0.0723, -0.2839, -0.2083, -0.0520, 0.3748),
        *(0.0152, 0.1957, 0.1433, -0.2944, 0.3573, -0.0548, -0.1681, -0.0667),
    ],
    "latents_std": [
        *(0.4765, 1.0364, 0.4514, 1.1677, 0.5313, 0.4990, 0.4818, 0.5013),
        *(0.8158, 1.0344, 0.5894, 1.0901, 0.6885, 0.6165, 0.8454, 0.4978),
        *(0.5759, 0.3523, 0.7135, 0.6804, 0.5833, 1.4146, 0.8986, 0.5659),
        *(0.7069, 0.5338, 0.4889, 0.4917, 0.4069, 0.4999, 0.6866, 0.4093),
        *(0.5709, 0.6065, 0.6415, 0.4944, 0.5726, 1.2042, 0.5458, 1.6887),
        *(0.3971, 1.0600, 0.3943, 0.5537, 0.5444, 0.4089, 0.7468, 0.7744),
    ],
}


def flux2_autoencoder(part: Part) -> Config:
    """Returns the config of FLUX.2's autoencoder, of which there is one with a smaller decoder."""
    levels = range(4)
    kind = "block.0.conv2" if part.layout == "original" else "resnets.0.conv2"
    start = "decoder.up" if part.layout == "original" else "decoder.up_blocks"
    shapes = [part.shape(f"{start}.{i}.{kind}.weight") for i in levels]
    widths = [shape[0] for shape in shapes if shape]
    # diffusers counts the decoder's levels from the smallest maps on.
    widths = widths if part.layout == "original" else widths[::-1]
    decoder = {} if widths == _WIDTHS else {"decoder_block_out_channels": widths}
    return {
        "_class_name": "AutoencoderKLFlux2",
        "block_out_channels": _WIDTHS,
        "latent_channels": 32,
        "batch_norm_eps": 1e-4,
        **decoder,
    }


def autoencoder_of_frames(part: Part) -> Config:
    """Returns the config of an autoencoder of Qwen-Image's or of Wan's.

    Raises:
        ValueError: it has other latents than any that the package knows the statistics of.
    """
    original = part.layout == "original"
    paths = ("post_quant_conv", "encoder.conv_in", "decoder.conv_out")
    paths = ("conv2", "encoder.conv1", "decoder.head.2") if original else paths
    latents, first, last = (part.shape(f"{path}.weight") for path in paths)
    width = part.shape(f"decoder.{'head.0' if original else 'norm_out'}.gamma")
    if latents is not None and latents[0] == len(WAN22["latents_mean"]):
        part = part.read_as("AutoencoderKLWan")
    known = _LATENTS[part.class_name]
    if not latents or not first or not last or not width or latents[0] not in known:
        raise ValueError(
            f"{part.path}: the autoencoder is like Qwen-Image's and Wan's, but has other latents; "
            "pass config= with the folder of its config.json"
        )
    found: Config = {"_class_name": part.class_name, "base_dim": first[0], "z_dim": latents[0]}
    if part.class_name == "AutoencoderKLQwenImage":
        return {**found, "input_channels": last[0]}
    found |= {"decoder_base_dim": width[0], "in_channels": first[1], "out_channels": last[0]}
    if part.class_name == "AutoencoderKLQwenImage21":
        return found
    if width[0] == first[0]:
        del found["decoder_base_dim"]
    return {**found, **WAN22} if latents[0] == len(WAN22["latents_mean"]) else found
