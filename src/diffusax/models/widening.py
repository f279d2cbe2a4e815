"""Adds input channels to trained UNets."""

import dataclasses

import jax
import jax.numpy as jnp

from diffusax.models.network import Model, Network, Params


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


def widen_input(model: Model, in_channels: int) -> Model:
    """Returns the UNet with more input channels, whose weights are zero; see `widen_params`."""
    return Model(widen_network(model.network, in_channels), widen_params(model.params, in_channels))


def _pad_inputs(kernel: jax.Array, count: int) -> jax.Array:
    """Appends zeros: h w c d -> h w (c + count) d."""
    return jnp.pad(kernel, ((0, 0), (0, 0), (0, count), (0, 0)))
