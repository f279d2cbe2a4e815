"""What the sampler asks for a prediction: a UNet with its conditions, ControlNets beside it."""

import dataclasses
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from diffusax.models.controlnet import scale_residuals
from diffusax.models.network import Network, Params


class Conditions(NamedTuple):
    """What the network is told besides the latents and the timestep.

    Leaves have the axes b k, images and branches of guidance; b 1 where the branches agree. The
    branches stand inside, so that a batch split over devices needs no messages.
    """

    context: Any
    """b k s d, what cross-attention looks at."""
    channels: Any = None
    """b k h w c, beside the latents in the network's input: masks, masked or edited pictures."""
    added: dict[str, Any] | None = None
    """What a family's network asks for: text_embeds, time_ids, timestep_cond; b k d."""
    control: tuple[Any, ...] = ()
    """b 1 H W 3 in [0, 1], one for each ControlNet."""


class Denoiser(Protocol):
    """A hashable description of what makes predictions; it holds no arrays."""

    def prepare(self, params: Params, conditions: Conditions, k: int) -> Conditions:
        """What does not depend on the row, computed once, with k branches in one batch."""

    def __call__(
        self, params: Params, x: Any, timestep: Any, conditions: Conditions, control: Any = None
    ) -> jax.Array:
        """The prediction for each branch."""


@dataclasses.dataclass(frozen=True)
class UNetDenoiser:
    """A UNet and its ControlNets, if any."""

    unet: Network
    controlnets: tuple[Network, ...] = ()

    def prepare(self, params: Params, conditions: Conditions, k: int) -> Conditions:
        """What does not depend on the row, computed once: branches in one batch, hints embedded."""
        hints = tuple(
            net.apply(params[name], picture[:, 0], method="embed_condition")[:, None]
            for net, name, picture in zip(self.controlnets, self.control_names, conditions.control)
        )
        return jax.tree.map(lambda y: spread(y, k), conditions._replace(control=hints))

    def __call__(
        self,
        params: Params,
        x: jax.Array,
        timestep: jax.Array,
        conditions: Conditions,
        control: jax.Array | None = None,
    ) -> jax.Array:
        """The prediction for each branch, b h w c.

        Args:
            params: by component: unet, controlnet, controlnet_1 and so on.
            x: b h w c, the scaled latents; b counts images times branches.
            timestep: b.
            conditions: from `prepare`.
            control: m k r, or (b/k) m k r: the weight of each residual, see `Knobs`.
        """
        added = dict(conditions.added or {})
        options: dict[str, Any] = {"timestep_cond": added.pop("timestep_cond", None)}
        options["added_cond"] = added or None
        residuals = self._residuals(params, x, timestep, conditions, control, options)
        if conditions.channels is not None:
            x = jnp.concatenate([x, conditions.channels.astype(x.dtype)], axis=-1)
        return self.unet.apply(
            params["unet"], x, timestep, conditions.context, **options, **residuals
        )

    @property
    def control_names(self) -> tuple[str, ...]:
        """The components' names, as diffusers saves several: controlnet, controlnet_1."""
        return control_names(len(self.controlnets))

    def _residuals(
        self,
        params: Params,
        x: jax.Array,
        timestep: jax.Array,
        conditions: Conditions,
        control: jax.Array | None,
        options: dict[str, Any],
    ) -> dict[str, Any]:
        total: list[jax.Array] = []
        for m, (net, name) in enumerate(zip(self.controlnets, self.control_names)):
            residuals = net.apply(
                params[name],
                x,
                timestep,
                conditions.context,
                cond_embedding=conditions.control[m],
                **options,
            )
            weights = _per_branch(control, m, x.shape[0])
            down, mid = scale_residuals(net.config, residuals, weights)
            scaled = [*down, mid]
            total = [a + b for a, b in zip(total, scaled, strict=True)] if total else scaled
        if not total:
            return {}
        return {
            "down_block_additional_residuals": total[:-1],
            "mid_block_additional_residual": total[-1],
        }


def control_names(count: int) -> tuple[str, ...]:
    """The names of `count` ControlNets among a pipeline's components."""
    return tuple("controlnet" if i == 0 else f"controlnet_{i}" for i in range(count))


def spread(y: jax.Array, k: int) -> jax.Array:
    """b (k or 1) ... -> (b k) ..., each image's branches together."""
    return jnp.broadcast_to(y, (y.shape[0], k, *y.shape[2:])).reshape(-1, *y.shape[2:])


def _per_branch(control: Any, net: int, rows: int) -> jax.Array:
    """The weights of one ControlNet's residuals, r (b k)."""
    weights = control[..., net, :, :]
    k, r = weights.shape[-2:]
    return jnp.broadcast_to(weights, (rows // k, k, r)).reshape(rows, r).T
