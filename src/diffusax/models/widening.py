"""UNets that take more channels than they were trained with."""

import dataclasses

import jax
import jax.numpy as jnp

from diffusax.models.network import Model, Network, Params


def widen_network(network: Network, in_channels: int) -> Network:
    """The UNet with another number of input channels."""
    config = dataclasses.replace(network.config, in_channels=in_channels)
    return dataclasses.replace(network, config=config)


def widen_params(params: Params, in_channels: int) -> Params:
    """The UNet's parameters for more input channels, which change nothing: their weights are zero.

    Brooks et al. 2023, section 3.2.

    Raises:
        ValueError: it has more channels already.
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
    """The UNet with more input channels, whose weights are zero; see `widen_params`."""
    return Model(widen_network(model.network, in_channels), widen_params(model.params, in_channels))


def _pad_inputs(kernel: jax.Array, count: int) -> jax.Array:
    """h w c d -> h w (c + count) d, zeros at the end."""
    return jnp.pad(kernel, ((0, 0), (0, 0), (0, count), (0, 0)))
