"""Networks under diffusers' and transformers' names, to be loaded alone: `X.from_pretrained`."""

from pathlib import Path
from typing import Any, ClassVar

from diffusax.checkpoints.networks import check_safe, load_network, save_network
from diffusax.missing import NETWORK, hinting
from diffusax.models import MODELS
from diffusax.models.clip_vision import tower
from diffusax.models.control_from_unet import controlnet_from_unet
from diffusax.models.network import Model


@hinting({"from_single_file": NETWORK["from_single_file"]})
class AutoModel:
    """Loads any network that a config.json names. The networks are in `diffusax.models`."""

    class_names: ClassVar[tuple[str, ...]] = ()
    tower: ClassVar[bool] = False
    """Whether it is a part of a CLIPModel, and can be loaded from one."""

    @classmethod
    def from_pretrained(
        cls,
        path_or_repo: str | Path,
        *,
        subfolder: str | None = None,
        torch_dtype: Any = None,
        dtype: Any = "float32",
        variant: str | None = None,
        device: Any = None,
        use_safetensors: bool | None = None,
        low_cpu_mem_usage: bool | None = None,
        **hub: Any,
    ) -> Model:
        """Loads a network from a folder or Hub repository.

        Args:
            path_or_repo: a folder or a Hub repository id.
            subfolder: the folder inside it, such as "unet" for a pipeline's checkpoint.
            torch_dtype: diffusers' name for `dtype`; may be one of PyTorch's dtypes.
            dtype: the dtype of parameters and computation, a name or a JAX dtype; "auto" keeps the
                file's.
            variant: a variant such as "fp16", if the checkpoint has one.
            device: a device or sharding to put the parameters on.
            use_safetensors: accepted for diffusers' sake; only safetensors are read.
            low_cpu_mem_usage: accepted for diffusers' sake; memory is always used sparingly.
            **hub: revision, token, local_files_only, cache_dir.

        Raises:
            ValueError: the network cannot be found or read, or is of another class; says which and
                why.
        """
        wanted = dtype if torch_dtype is None else torch_dtype
        model = load_network(
            path_or_repo,
            subfolder=subfolder,
            dtype=None if wanted == "auto" else wanted,
            variant=variant,
            device=device,
            **hub,
        )
        if model.class_name == "CLIPModel" and cls.tower:
            return tower(model, MODELS[cls.class_names[0]])
        if cls.class_names and model.class_name not in cls.class_names:
            raise ValueError(
                f"{path_or_repo} holds a {model.class_name}, not a {' or '.join(cls.class_names)}"
            )
        return model


class AutoencoderKL(AutoModel):
    """The autoencoder of Stable Diffusion and SDXL."""

    class_names = ("AutoencoderKL",)


class AsymmetricAutoencoderKL(AutoModel):
    """An autoencoder for inpainting, whose decoder sees what the mask keeps."""

    class_names = ("AsymmetricAutoencoderKL",)


class AutoencoderTiny(AutoModel):
    """The tiny autoencoder TAESD."""

    class_names = ("AutoencoderTiny",)


class ControlNetModel(AutoModel):
    """A ControlNet."""

    class_names = ("ControlNetModel",)

    @staticmethod
    def from_unet(unet: Model) -> Model:
        """Makes a ControlNet to be trained: a copy of a UNet's encoder that changes nothing yet.

        unet: the UNet, such as `pipe.unet`.
        """
        return controlnet_from_unet(unet)


class CLIPModel(AutoModel):
    """CLIP's text encoder and vision network, with their projections."""

    class_names = ("CLIPModel",)


class CLIPTextModel(AutoModel):
    """CLIP's text encoder."""

    class_names = ("CLIPTextModel", "CLIPTextModelWithProjection")
    tower = True


class CLIPTextModelWithProjection(AutoModel):
    """CLIP's text encoder with its projection."""

    class_names = ("CLIPTextModelWithProjection",)
    tower = True


class CLIPVisionModel(AutoModel):
    """CLIP's vision network."""

    class_names = ("CLIPVisionModel", "CLIPVisionModelWithProjection")
    tower = True


class CLIPVisionModelWithProjection(AutoModel):
    """CLIP's vision network with its projection."""

    class_names = ("CLIPVisionModelWithProjection",)
    tower = True


class T2IAdapter(AutoModel):
    """A T2I-Adapter; several are a `MultiAdapter`."""

    class_names = ("T2IAdapter",)


class UNet2DConditionModel(AutoModel):
    """The UNet of Stable Diffusion and SDXL."""

    class_names = ("UNet2DConditionModel",)


def _save_pretrained(
    self: Model,
    save_directory: str | Path,
    *,
    safe_serialization: bool = True,
    variant: str | None = None,
) -> None:
    """Writes a folder that diffusers or transformers opens.

    Raises:
        ValueError: safe_serialization is False, but diffusax writes only safetensors.
    """
    check_safe(safe_serialization)
    save_network(self, save_directory, variant=variant)


# Networks do not import this package; importing it gives their models save_pretrained.
setattr(Model, "save_pretrained", _save_pretrained)  # noqa: B010

__all__ = [
    "AsymmetricAutoencoderKL",
    "AutoModel",
    "AutoencoderKL",
    "AutoencoderTiny",
    "CLIPModel",
    "CLIPTextModel",
    "CLIPTextModelWithProjection",
    "CLIPVisionModel",
    "CLIPVisionModelWithProjection",
    "ControlNetModel",
    "T2IAdapter",
    "UNet2DConditionModel",
]
