"""What the sampler asks for a prediction: a UNet with its conditions, ControlNets beside it."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from diffusax.models.controlnet import scale_residuals
from diffusax.models.network import Network, Params
from diffusax.pipelines.plan import Conditions


@dataclasses.dataclass(frozen=True)
class UNetDenoiser:
    """A UNet and its ControlNets, if any: a hashable description that holds no arrays."""

    unet: Network
    controlnets: tuple[Network, ...] = ()

    def embed(self, params: Params, pictures: tuple[Any, ...]) -> tuple[jax.Array, ...]:
        """What the ControlNets make of their pictures, once for a run. b 1 H W 3 -> b 1 h w c."""
        names = control_names(len(self.controlnets))
        return tuple(
            net.apply(params[name], picture[:, 0], method="embed_condition")[:, None]
            for net, name, picture in zip(self.controlnets, names, pictures, strict=True)
        )

    def __call__(
        self,
        params: Params,
        x: jax.Array,
        timestep: jax.Array,
        conditions: Conditions,
        control: jax.Array | None = None,
        freeu: jax.Array | None = None,
        *,
        gradient_checkpointing: str = "none",
    ) -> jax.Array:
        """The prediction for each branch, b h w c.

        Args:
            params: by component: unet, controlnet, controlnet_1 and so on.
            x: b h w c, the scaled latents; b counts images times branches.
            timestep: b.
            conditions: without the axis of the branches, which are in the batch.
            control: m k r, or (b/k) m k r: the weight of each residual, see `StepInputs`.
            freeu: 4, or (b/k) 4: FreeU's numbers.
            gradient_checkpointing: see `UNet2DConditionModel`.
        """
        added = dict(conditions.added or {})
        options: dict[str, Any] = {"timestep_cond": added.pop("timestep_cond", None)}
        options["added_cond"] = added or None
        options["gradient_checkpointing"] = gradient_checkpointing
        more = self._residuals(params, x, timestep, conditions, control, options)
        if freeu is not None:
            more["freeu"] = _per_branch(freeu, x.shape[0])
        if conditions.channels is not None:
            x = jnp.concatenate([x, conditions.channels.astype(x.dtype)], axis=-1)
        return self.unet.apply(params["unet"], x, timestep, conditions.context, **options, **more)

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
        names = control_names(len(self.controlnets))
        for m, (net, name, hint) in enumerate(zip(self.controlnets, names, conditions.control)):
            residuals = net.apply(
                params[name], x, timestep, conditions.context, cond_embedding=hint, **options
            )
            assert control is not None
            weights = control[..., m, :, :]
            k, r = weights.shape[-2:]
            weights = jnp.broadcast_to(weights, (x.shape[0] // k, k, r)).reshape(-1, r).T
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
    """The names of `count` ControlNets among the components, as diffusers saves several."""
    return tuple("controlnet" if i == 0 else f"controlnet_{i}" for i in range(count))


def _per_branch(numbers: jax.Array, b: int) -> jax.Array:
    """One row of numbers for all, or one per image for each of its branches, b in all."""
    return numbers if numbers.ndim == 1 else spread(numbers[:, None], b // numbers.shape[0])


def spread(y: jax.Array, k: int) -> jax.Array:
    """b (k or 1) ... -> (b k) ..., each image's branches together."""
    return jnp.broadcast_to(y, (y.shape[0], k, *y.shape[2:])).reshape(-1, *y.shape[2:])
