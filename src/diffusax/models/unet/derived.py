"""Adds input channels to trained UNets."""

import dataclasses

import jax
import jax.numpy as jnp

from diffusax.models.network import Network, Params, initialize_params
from diffusax.models.unet.controlnet import ControlNetConfig, ControlNetModel


def widen_network(network: Network, in_channels: int) -> Network:
    """Returns the UNet with another number of input channels."""
    config = dataclasses.replace(network.config, in_channels=in_channels)
    return dataclasses.replace(network, config=config)


def widen_params(params: Params, in_channels: int) -> Params:
    """Returns the UNet's parameters with more input channels, whose weights are zero.

    Brooks et al. 2023, section 3.2.

    Raises:
        ValueError: the UNet already has more channels.
    """
    kernel = params["conv_in"]["kernel"]
    missing = in_channels - kernel.shape[2]
    if missing < 0:
        raise ValueError(
            f"in_channels must be {kernel.shape[2]} or more, what the UNet has (got {in_channels})"
        )
    conv_in = {**params["conv_in"], "kernel": _pad_inputs(kernel, missing)}
    return {**params, "conv_in": conv_in}


def _pad_inputs(kernel: jax.Array, count: int) -> jax.Array:
    """Appends zeros: h w c d -> h w (c + count) d."""
    return jnp.pad(kernel, ((0, 0), (0, 0), (0, count), (0, 0)))


def controlnet_of(unet: Network) -> Network:
    """Returns the ControlNet for a UNet, with diffusers' number of control-image pixels per latent.

    Upstream: `ControlNetModel.from_unet` of diffusers models/controlnets/controlnet.py.
    """
    shared = {field.name for field in dataclasses.fields(ControlNetConfig)}
    names = shared & {field.name for field in dataclasses.fields(unet.config)}
    config = ControlNetConfig(**{name: getattr(unet.config, name) for name in names})
    return Network(ControlNetModel, config)


def controlnet_params(network: Network, unet: Params, *, seed: int = 0) -> Params:
    """Returns a ControlNet's first parameters: the UNet's, and convolutions that output zero.

    seed: the seed of the control image's convolutions, which are random.
    """
    drawn = initialize_params(network.shapes, seed=seed, zero=("conv_out",))
    closed = ("controlnet_down_blocks", "controlnet_mid_block")
    zeros = {name: jax.tree.map(jnp.zeros_like, drawn[name]) for name in closed}
    copied = {name: unet[name] for name in drawn if name in unet}
    return {**drawn, **zeros, **copied}
