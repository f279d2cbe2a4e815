"""The denoiser of Stable Diffusion's families: a UNet with its conditions and ControlNets."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from diffusax.checkpoints.files import numbered
from diffusax.models.adapters.image_prompts import ImagePrompts
from diffusax.models.adapters.low_rank import adapter_options
from diffusax.models.layers.embeddings import guidance_scale_embedding
from diffusax.models.network import Network, Params
from diffusax.models.unet.context_keys import project_context
from diffusax.models.unet.controlnet import scale_residuals
from diffusax.models.unet.t2i_adapter import weigh_maps
from diffusax.pipelines.families.denoiser import Denoiser, DenoiserInputs, beside
from diffusax.pipelines.plan.plan import Conditions, StepInputs

CALLBACK_TENSORS = {
    "prompt_embeds": "context",
    "add_text_embeds": "pooled",
    "add_time_ids": "time_ids",
}
"""The conditions that callbacks may read and change, by diffusers' names."""
_embed_scales = jax.jit(guidance_scale_embedding, static_argnums=1)


@dataclasses.dataclass(frozen=True)
class UNetDenoiser(Denoiser):
    """A UNet with its ControlNets and T2I-Adapters. It is hashable and holds no arrays."""

    t2i_adapters: tuple[Network, ...] = ()

    component = "unet"

    @classmethod
    def of(cls, networks: Mapping[str, Network]) -> Self:
        """Returns the denoiser of a checkpoint's networks, which are given by name."""
        steering = (beside(networks, name) for name in ("controlnet", "adapter"))
        return cls(networks[cls.component], *steering)

    @functools.cached_property
    def components(self) -> tuple[str, ...]:
        """The names of the components whose parameters it reads."""
        return (self.component, *self.control_names, *self._adapter_names)

    @functools.cached_property
    def sample_size(self) -> tuple[int, int]:
        """The rows and columns of latents that the UNet was trained at."""
        size = self.network.config.sample_size or 64
        return size if isinstance(size, tuple) else (size, size)

    @functools.cached_property
    def context_dim(self) -> int:
        """The width of the context that cross-attention reads."""
        dim = self.network.config.cross_attention_dim
        return int(dim[0] if isinstance(dim, tuple) else dim)

    @functools.cached_property
    def embeds_guidance(self) -> bool:
        """Whether the guidance scale is an input, as of a UNet distilled from a guided one."""
        return getattr(self.network.config, "time_cond_proj_dim", None) is not None

    @functools.cached_property
    def _adapter_names(self) -> tuple[str, ...]:
        return numbered("adapter", len(self.t2i_adapters))

    def embed(
        self, params: Params, images: tuple[Any, ...], weights: Any = None
    ) -> tuple[Any, ...]:
        """Embeds the images of ControlNets and computes the maps of T2I-Adapters, once per run.

        Args:
            params: the parameters by component.
            images: b 1 H W c in [0, 1] for each ControlNet, then for each T2I-Adapter.
            weights: the weights of a low-rank adapters, b a.
        """
        hints: list[Any] = [
            net.apply(
                params[name],
                image[:, 0],
                method="embed_condition",
                **adapter_options(params, name, weights),
            )[:, None]
            for net, name, image in zip(self.controlnets, self.control_names, images)
        ]
        steering = images[len(self.controlnets) :]
        for net, name, image in zip(self.t2i_adapters, self._adapter_names, steering, strict=True):
            maps = net.apply(params[name], image[:, 0])
            hints.append(tuple(x[:, None] for x in maps))
        return tuple(hints)

    def prepare(self, params: Params, conditions: Conditions, inputs: StepInputs) -> Conditions:
        """Returns the conditions with all keys and values of the context and of image prompts."""
        networks = {"unet": self.network, **dict(zip(self.control_names, self.controlnets))}
        keys = {
            name: project_context(
                net,
                params[name],
                conditions.context,
                adapter_options(params, name, inputs.adapters).get("adapters"),
            )
            for name, net in networks.items()
        }
        found = {name: own for name, own in keys.items() if own}
        images = conditions.images
        if images:
            images = ImagePrompts(params["ip_adapters"], images).projected()
        return conditions._replace(keys=found, images=images)

    def predict(self, params: Params, given: DenoiserInputs, options: dict[str, Any]) -> jax.Array:
        """Predicts for each branch, b h w c; see `Denoiser`.

        Of the inputs it reads control: b m r; freeu: b 4; adapters: b a.
        """
        x, timestep, conditions, inputs = given
        added = dict(conditions.added or {})
        options["timestep_cond"] = added.pop("timestep_cond", None)
        if conditions.pooled is not None:
            added["text_embeds"] = conditions.pooled
        options["added_cond"] = added or None
        more = self._residuals(params, given, options)
        more |= self._maps(conditions, inputs)
        more |= adapter_options(params, "unet", inputs.adapters)
        more |= _keys(conditions, "unet")
        if conditions.images:
            more["image_prompts"] = ImagePrompts(params["ip_adapters"], conditions.images)
        if inputs.freeu is not None:
            more["freeu"] = inputs.freeu
        if conditions.channels is not None:
            x = jnp.concatenate([x, conditions.channels.astype(x.dtype)], axis=-1)
        return self.network.apply(
            params["unet"], x, timestep, conditions.context, **options, **more
        )

    def _residuals(
        self, params: Params, given: DenoiserInputs, options: dict[str, Any]
    ) -> dict[str, Any]:
        x, timestep, conditions, inputs = given
        total: list[jax.Array] = []
        nets = zip(self.controlnets, self.control_names, conditions.control)
        for m, (net, name, hint) in enumerate(nets):
            own = {**options, **adapter_options(params, name, inputs.adapters)}
            own |= _keys(conditions, name)
            residuals = net.apply(
                params[name], x, timestep, conditions.context, cond_embedding=hint, **own
            )
            assert inputs.control is not None
            down, mid = scale_residuals(net.config, residuals, inputs.control[:, m].T)
            scaled = [*down, mid]
            total = [a + b for a, b in zip(total, scaled, strict=True)] if total else scaled
        if not total:
            return {}
        return {
            "down_block_additional_residuals": total[:-1],
            "mid_block_additional_residual": total[-1],
        }

    def _maps(self, conditions: Conditions, inputs: StepInputs) -> dict[str, Any]:
        """Returns the weighted sum of the T2I-Adapters' maps as an argument of the UNet."""
        maps = conditions.control[len(self.controlnets) :]
        if not maps:
            return {}
        assert inputs.control is not None
        scales = inputs.control[:, len(self.controlnets) :, 0]
        return {"down_intrablock_additional_residuals": weigh_maps(maps, scales)}


def _keys(conditions: Conditions, name: str) -> dict[str, Any]:
    """Returns the argument of `Network.apply` for keys and values that `prepare` has computed."""
    found = (conditions.keys or {}).get(name)
    return {} if found is None else {"context_keys": found}


def timestep_condition(denoiser: UNetDenoiser, scales: np.ndarray) -> dict[str, Any]:
    """Embeds the guidance scales, b, for a distilled UNet: timestep_cond, b 1 d.

    Source: Meng et al. 2023, "On Distillation of Guided Diffusion Models".
    """
    dim = denoiser.network.config.time_cond_proj_dim
    return {"timestep_cond": _embed_scales(np.asarray(scales, np.float32) - 1, dim)[:, None]}
