"""Makes ControlNets that begin as copies of a UNet's encoder (Zhang et al. 2023, section 3.1)."""

import dataclasses

import jax
import jax.numpy as jnp

from diffusax.models.controlnet import ControlNetConfig, ControlNetModel
from diffusax.models.network import Model, Network, Params, initialize_params


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


def controlnet_from_unet(unet: Model, *, seed: int = 0) -> Model:
    """Makes a ControlNet model from a UNet; it changes nothing until it is trained."""
    network = controlnet_of(unet.network)
    return Model(network, controlnet_params(network, unet.params, seed=seed))
