"""UNets, ControlNets and T2I-Adapters, called as in diffusers."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from diffusax.boundary.tensors import alike
from diffusax.checkpoints.files import numbered, numbered_folders
from diffusax.checkpoints.networks import check_safe, save_network
from diffusax.models.table import MODELS
from diffusax.models.unet.controlnet import guess_scales
from diffusax.models.unet.derived import controlnet_of, controlnet_params
from diffusax.models.unet.t2i_adapter import check_alike
from diffusax.models.unet.unet_encoder import skip_widths
from diffusax.networks.arguments import (
    arrays,
    check_absent,
    check_rows,
    result,
    take_map,
    take_numbers,
)
from diffusax.networks.model import Model
from diffusax.networks.outputs import ControlNetOutput, UNet2DConditionOutput, UNet2DOutput
from diffusax.networks.pretrained import FromSingleFile

_MASK = "{} must be None: Stable Diffusion's networks attend to all tokens"
_ADDED = ("text_embeds", "time_ids")


class UNet2DConditionModel(FromSingleFile, Model):
    """The UNet of Stable Diffusion and SDXL."""

    module_class = MODELS["UNet2DConditionModel"]
    component = "unet"

    def __call__(
        self,
        sample: Any,
        timestep: Any,
        encoder_hidden_states: Any,
        class_labels: Any = None,
        timestep_cond: Any = None,
        attention_mask: Any = None,
        cross_attention_kwargs: Mapping[str, Any] | None = None,
        added_cond_kwargs: Mapping[str, Any] | None = None,
        down_block_additional_residuals: Sequence[Any] | None = None,
        mid_block_additional_residual: Any = None,
        down_intrablock_additional_residuals: Sequence[Any] | None = None,
        encoder_attention_mask: Any = None,
        return_dict: bool = True,
        *,
        hooks: Mapping[str, Any] | None = None,
    ) -> UNet2DConditionOutput:
        """Predicts the noise (or v, or the sample): `.sample`, b c h w.

        A pipeline's LoRAs and IP-Adapters are not in it: they belong to the pipeline's calls.

        Args:
            sample: the noisy latents, b c h w.
            timestep: one number or b.
            encoder_hidden_states: b s d, the outputs of text encoders.
            class_labels: b (or b c), where the network has a class embedding.
            timestep_cond: b c, the embedded guidance scale of distilled models.
            attention_mask: None.
            cross_attention_kwargs: None or {}.
            added_cond_kwargs: SDXL's {"text_embeds": b p, "time_ids": b 6}.
            down_block_additional_residuals: a ControlNet's residuals, each b c h w.
            mid_block_additional_residual: a ControlNet's residual for the middle, b c h w.
            down_intrablock_additional_residuals: a T2I-Adapter's maps, each b c h w.
            encoder_attention_mask: None.
            return_dict: whether to return a UNet2DConditionOutput instead of a tuple.
            hooks: functions that read or change what passes through layers, see `as_hooks`; what
                they keep is the result's `kept`.

        Raises:
            ValueError: an array has another shape, a condition is missing, or an argument is given
                that the network has no meaning for.
        """
        check_absent(attention_mask, _MASK.format("attention_mask"))
        check_absent(encoder_attention_mask, _MASK.format("encoder_attention_mask"))
        args, conditions = _inputs(
            self,
            sample,
            timestep,
            encoder_hidden_states,
            class_labels,
            timestep_cond,
            cross_attention_kwargs,
            added_cond_kwargs,
        )
        down, maps = down_block_additional_residuals, down_intrablock_additional_residuals
        more = arrays(
            {
                "down_block_additional_residuals": None if down is None else tuple(down),
                "mid_block_additional_residual": mid_block_additional_residual,
                "down_intrablock_additional_residuals": None if maps is None else tuple(maps),
            }
        )
        _check_residuals(self.config, more["down_block_additional_residuals"])
        y, kept = self.run_with_hooks(hooks, *args, channels_first=True, **conditions, **more)
        return result(UNet2DConditionOutput(y, kept), return_dict, sample, encoder_hidden_states)


class ControlNetModel(FromSingleFile, Model):
    """A ControlNet."""

    module_class = MODELS["ControlNetModel"]
    component = "controlnet"

    @classmethod
    def from_unet(cls, unet: Model) -> Self:
        """Makes a ControlNet to be trained: a copy of a UNet's encoder that changes nothing yet.

        unet: the UNet, such as `pipe.unet`.
        """
        network = controlnet_of(unet.network)
        return cls(network, controlnet_params(network, unet.params))

    def __call__(
        self,
        sample: Any,
        timestep: Any,
        encoder_hidden_states: Any,
        controlnet_cond: Any,
        conditioning_scale: float = 1.0,
        class_labels: Any = None,
        timestep_cond: Any = None,
        attention_mask: Any = None,
        added_cond_kwargs: Mapping[str, Any] | None = None,
        cross_attention_kwargs: Mapping[str, Any] | None = None,
        guess_mode: bool = False,
        return_dict: bool = True,
    ) -> ControlNetOutput:
        """Computes the UNet's `.down_block_res_samples` and `.mid_block_res_sample`, each b c h w.

        Args:
            sample: the noisy latents, b c h w.
            timestep: one number or b.
            encoder_hidden_states: b s d, the outputs of text encoders.
            controlnet_cond: the control images in [0, 1], b 3 H W or 1 3 H W.
            conditioning_scale: what the residuals are multiplied by.
            class_labels: b (or b c), where the network has a class embedding.
            timestep_cond: accepted, changes nothing: a ControlNet has no layer for it.
            attention_mask: None.
            added_cond_kwargs: SDXL's {"text_embeds": b p, "time_ids": b 6}.
            cross_attention_kwargs: None or {}.
            guess_mode: whether the residuals count the less, the larger their maps are.
            return_dict: whether to return a ControlNetOutput instead of a tuple.

        Raises:
            ValueError: an array has another shape, a condition is missing, or an argument is given
                that the network has no meaning for.
        """
        check_absent(attention_mask, _MASK.format("attention_mask"))
        args, conditions = _inputs(
            self,
            sample,
            timestep,
            encoder_hidden_states,
            class_labels,
            timestep_cond,
            cross_attention_kwargs,
            added_cond_kwargs,
        )
        cond = take_map("controlnet_cond", controlnet_cond, self.config.conditioning_channels)
        factor = self.config.downsampling
        expected = tuple(factor * side for side in args[0].shape[2:])
        if cond.shape[2:] != expected or cond.shape[0] not in (1, args[0].shape[0]):
            raise ValueError(
                f"controlnet_cond must have {factor} pixels for each latent in both directions, "
                f"and one image for all samples or for each (got shape {tuple(cond.shape)} for "
                f"sample of shape {tuple(args[0].shape)})"
            )
        count = len(skip_widths(self.config)) + 1
        guesses = guess_mode and not self.config.global_pool_conditions
        scales = guess_scales(count) if guesses else np.ones(count, np.float32)
        down, mid = self.run(
            *args,
            cond,
            np.float32(conditioning_scale) * scales,
            method="scaled_residuals",
            channels_first=True,
            **conditions,
        )
        return result(ControlNetOutput(down, mid), return_dict, sample, encoder_hidden_states)


def _inputs(
    model: Model,
    sample: Any,
    timestep: Any,
    encoder_hidden_states: Any,
    class_labels: Any,
    timestep_cond: Any,
    cross_attention_kwargs: Mapping[str, Any] | None,
    added_cond_kwargs: Mapping[str, Any] | None,
) -> tuple[tuple[Any, Any, Any], dict[str, Any]]:
    """Returns the network's positional arguments and conditions, as arrays that were checked.

    Raises:
        ValueError: see the calls.
    """
    if cross_attention_kwargs:
        raise ValueError(
            "cross_attention_kwargs must be None or {} here (got "
            f"{', '.join(cross_attention_kwargs)}); LoRAs and IP-Adapters belong to the pipeline's "
            "calls"
        )
    x = take_map("sample", sample, model.config.in_channels)
    count = x.shape[0]
    context, labels, guidance = arrays((encoder_hidden_states, class_labels, timestep_cond))
    for name, value in (
        ("encoder_hidden_states", context),
        ("class_labels", labels),
        ("timestep_cond", guidance),
    ):
        check_rows(name, value, count)
    conditions = {"class_labels": labels, "timestep_cond": guidance}
    if model.config.addition_embed_type:
        conditions["added_cond"] = _added(added_cond_kwargs, count)
    return (x, take_numbers("timestep", timestep, count), context), conditions


def _added(given: Mapping[str, Any] | None, count: int) -> dict[str, Any]:
    """Returns SDXL's additional conditions.

    Raises:
        ValueError: one is missing, or has another number of entries.
    """
    missing = [name for name in _ADDED if (given or {}).get(name) is None]
    if given is None or missing:
        raise ValueError(
            f"added_cond_kwargs must have {' and '.join(missing)} for this network, "
            '{"text_embeds": b p, "time_ids": b 6}'
        )
    added: dict[str, Any] = arrays({name: given[name] for name in _ADDED})
    for name, value in added.items():
        check_rows(f"added_cond_kwargs[{name!r}]", value, count)
    return added


def _check_residuals(config: Any, residuals: Sequence[Any] | None) -> None:
    """Raises ValueError unless there is a residual of the right width for each skip connection."""
    # A PyTorch module's config has its options alone.
    if residuals is None or not hasattr(type(config), "per_level"):
        return
    widths = skip_widths(config)
    if len(residuals) != len(widths):
        raise ValueError(
            f"down_block_additional_residuals must have {len(widths)} entries, one for each skip "
            f"connection (got {len(residuals)})"
        )
    for i, (residual, width) in enumerate(zip(residuals, widths, strict=True)):
        take_map(f"down_block_additional_residuals[{i}]", residual, width)


class T2IAdapter(Model):
    """A T2I-Adapter; several are a `MultiAdapter`."""

    module_class = MODELS["T2IAdapter"]

    def __call__(self, x: Any) -> list[Any]:
        """Returns the maps b c h w for the levels of a UNet, the largest first.

        x: images in [0, 1], b c H W.

        Raises:
            ValueError: x has another shape.
        """
        maps = self.run(take_map("x", x, self.config.in_channels), channels_first=True)
        return list(alike(maps, x))


class MultiAdapter:
    """Several T2I-Adapters, whose maps are multiplied by a call's scales and added up."""

    def __init__(self, adapters: Iterable[Model]):
        """Joins adapters.

        Args:
            adapters: two or more, as `T2IAdapter.from_pretrained` gives them.

        Raises:
            ValueError: there are fewer than two, one is no T2IAdapter, or their maps differ.
        """
        self.adapters = list(adapters)
        if len(self.adapters) < 2:
            raise ValueError(
                "adapters must be two T2IAdapters or more; a single one is itself the pipeline's "
                f"adapter (got {len(self.adapters)})"
            )
        for adapter in self.adapters:
            found = getattr(adapter, "class_name", type(adapter).__name__)
            if found != "T2IAdapter":
                raise ValueError(f"adapters must be T2IAdapters (got a {found})")
        check_alike([adapter.config for adapter in self.adapters])

    @property
    def num_adapter(self) -> int:
        """The number of adapters."""
        return len(self.adapters)

    @property
    def downscale_factor(self) -> int:
        """The pixels per entry of the largest map in each direction."""
        return int(self.adapters[0].config.downscale_factor)

    @property
    def total_downscale_factor(self) -> int:
        """The pixels per entry of the smallest map in each direction."""
        return int(self.adapters[0].config.total_downscale_factor)

    @classmethod
    def from_pretrained(cls, pretrained_model_path: str | Path, **options: Any) -> Self:
        """Loads the adapters in the folders path, path_1, path_2 and so on, as far as there are.

        Args:
            pretrained_model_path: the first folder.
            **options: the options of `T2IAdapter.from_pretrained`.

        Raises:
            ValueError: there are fewer than two folders, or one cannot be read; says which and why.
        """
        first = Path(pretrained_model_path)
        folders = numbered_folders(first)
        if len(folders) < 2:
            missing = first if not folders else first.with_name(numbered(first.name, 2)[1])
            raise ValueError(f"there is no folder {missing}; a MultiAdapter needs two or more")
        return cls(T2IAdapter.from_pretrained(folder, **options) for folder in folders)

    def save_pretrained(
        self,
        save_directory: str | Path,
        *,
        safe_serialization: bool = True,
        variant: str | None = None,
    ) -> None:
        """Writes the folders save_directory, save_directory_1 and so on, which diffusers opens.

        Raises:
            ValueError: safe_serialization is False, but diffusax writes only safetensors.
        """
        check_safe(safe_serialization)
        first = Path(save_directory)
        for name, adapter in zip(numbered(first.name, len(self.adapters)), self.adapters):
            save_network(adapter, first.with_name(name), variant=variant)

    def __repr__(self) -> str:
        return f"MultiAdapter({self.adapters})"


class UNet2DModel(Model):
    """The UNet of `DDPMPipeline` and `DDIMPipeline`, which draws from noise alone."""

    module_class = MODELS["UNet2DModel"]

    def __call__(
        self,
        sample: Any,
        timestep: Any,
        class_labels: Any = None,
        return_dict: bool = True,
        *,
        hooks: Mapping[str, Any] | None = None,
    ) -> UNet2DOutput:
        """Predicts the noise (or v, or the sample): `.sample`, b c h w.

        Args:
            sample: the noisy images, b c h w.
            timestep: one number or b.
            class_labels: b (or b t, for the type "identity"), where the network has classes.
            return_dict: whether to return a UNet2DOutput instead of a tuple.
            hooks: functions that read or change what passes through layers, see `as_hooks`; what
                they keep is the result's `kept`.

        Raises:
            ValueError: an array has another shape, or classes are missing or not for this network.
        """
        x, labels = take_map("sample", sample, self.config.in_channels), arrays(class_labels)
        check_rows("class_labels", labels, x.shape[0])
        times = take_numbers("timestep", timestep, x.shape[0])
        y, kept = self.run_with_hooks(hooks, x, times, channels_first=True, class_labels=labels)
        return result(UNet2DOutput(y, kept), return_dict, sample)
