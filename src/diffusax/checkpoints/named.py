"""Networks under diffusers' and transformers' names, to be loaded alone: `X.from_pretrained`."""

from pathlib import Path
from typing import Any

from diffusax.checkpoints.auto_model import AutoModel, FromSingleFile
from diffusax.checkpoints.hub import resolve
from diffusax.checkpoints.keywords import take_keywords
from diffusax.checkpoints.module_methods import NamedParameters
from diffusax.checkpoints.networks import check_safe, save_network
from diffusax.checkpoints.publishing import Publishing, publishing_keywords
from diffusax.images.image_processor import CLIPImageProcessor
from diffusax.models import MODELS
from diffusax.models.network import Model
from diffusax.models.unet.derived import controlnet_from_unet
from diffusax.text.language_tokenizer import Qwen2Tokenizer, T5Tokenizer
from diffusax.text.tokenizer import CLIPTokenizer


class AutoencoderKL(FromSingleFile):
    """The autoencoder of Stable Diffusion, SDXL, FLUX.1 and Z-Image."""

    class_names = ("AutoencoderKL",)
    component = "vae"


class AutoencoderKLFlux2(FromSingleFile):
    """The autoencoder of FLUX.2."""

    class_names = ("AutoencoderKLFlux2",)
    component = "vae"


class AsymmetricAutoencoderKL(AutoModel):
    """An autoencoder for inpainting, whose decoder sees what the mask keeps."""

    class_names = ("AsymmetricAutoencoderKL",)


class AutoencoderTiny(AutoModel):
    """The tiny autoencoder TAESD."""

    class_names = ("AutoencoderTiny",)


class ControlNetModel(FromSingleFile):
    """A ControlNet."""

    class_names = ("ControlNetModel",)
    component = "controlnet"

    @staticmethod
    def from_unet(unet: Model) -> Model:
        """Makes a ControlNet to be trained: a copy of a UNet's encoder that changes nothing yet.

        unet: the UNet, such as `pipe.unet`.
        """
        return controlnet_from_unet(unet)


class CLIPModel(AutoModel):
    """CLIP's text encoder and vision network, with their projections."""

    class_names = ("CLIPModel",)


class CLIPTextModel(FromSingleFile):
    """CLIP's text encoder."""

    class_names = ("CLIPTextModel", "CLIPTextModelWithProjection")
    component = "text_encoder"
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


class FluxControlNetModel(AutoModel):
    """A ControlNet for FLUX.1."""

    class_names = ("FluxControlNetModel",)


class Flux2Transformer2DModel(FromSingleFile):
    """The transformer of FLUX.2."""

    class_names = ("Flux2Transformer2DModel",)
    component = "transformer"


class FluxTransformer2DModel(FromSingleFile):
    """The transformer of FLUX.1."""

    class_names = ("FluxTransformer2DModel",)
    component = "transformer"


class Qwen3Model(FromSingleFile):
    """The language model of Z-Image and FLUX.2 klein, with or without its head."""

    class_names = ("Qwen3Model", "Qwen3ForCausalLM")
    component = "text_encoder"


class Qwen3ForCausalLM(FromSingleFile):
    """The language model of Z-Image and FLUX.2 klein, with its head."""

    class_names = ("Qwen3ForCausalLM",)
    component = "text_encoder"


class T5EncoderModel(FromSingleFile):
    """T5's encoder, which FLUX.1 and Stable Diffusion 3 condition on."""

    class_names = ("T5EncoderModel",)
    component = "text_encoder_2"


class T2IAdapter(AutoModel):
    """A T2I-Adapter; several are a `MultiAdapter`."""

    class_names = ("T2IAdapter",)


class UNet2DConditionModel(FromSingleFile):
    """The UNet of Stable Diffusion and SDXL."""

    class_names = ("UNet2DConditionModel",)
    component = "unet"


class UNet2DModel(AutoModel):
    """The UNet of `DDPMPipeline` and `DDIMPipeline`, which draws from noise alone."""

    class_names = ("UNet2DModel",)


class ZImageTransformer2DModel(FromSingleFile):
    """The transformer of Z-Image."""

    class_names = ("ZImageTransformer2DModel",)
    component = "transformer"


def _save_pretrained(
    self: Model,
    save_directory: str | Path,
    is_main_process: bool = True,
    save_function: Any = None,
    safe_serialization: bool = True,
    variant: str | None = None,
    max_shard_size: int | str | None = None,
    push_to_hub: bool = False,
    **hub: Any,
) -> None:
    """Writes a folder that diffusers or transformers opens.

    Args:
        save_directory: the folder.
        is_main_process: whether this process writes.
        save_function: must be None; files are always safetensors.
        safe_serialization: must be True.
        variant: a variant such as "fp16", for the names of the files.
        max_shard_size: the size above which the file is split, in bytes or as "5GB".
        push_to_hub: whether to upload the files, too.
        **hub: options of `push_to_hub`, and repo_id, by default the folder's name.

    Raises:
        ValueError: safe_serialization is False, but diffusax writes only safetensors.
    """
    check_safe(safe_serialization and save_function is None)
    if not is_main_process:
        return
    save_network(self, save_directory, variant=variant, max_shard_size=max_shard_size)
    options = publishing_keywords(f"{self.class_name}.save_pretrained", hub)
    if push_to_hub:
        name = options.pop("repo_id", Path(save_directory).name)
        Publishing.push_to_hub(self, name, variant=variant, **options)  # type: ignore[arg-type]


class _Loading:
    """A loading method of the class here that has the name of a module's class."""

    def __init__(self, class_name: str, method: str):
        self.class_name, self.method = class_name, method

    def __get__(self, instance: Any, owner: type) -> Any:
        found = globals().get(self.class_name) if owner.__name__ == self.class_name else None
        if found is None:
            raise AttributeError(f"{owner.__name__!r} has no attribute {self.method!r}")
        return getattr(found, self.method)


def _processor_from_pretrained(
    cls: Any, path_or_repo: str | Path, *, subfolder: str | None = None, **hub: Any
) -> Any:
    """Loads a tokenizer or a processor of images from a folder or Hub repository.

    Args:
        path_or_repo: a folder or a Hub repository id.
        subfolder: the folder inside it, such as "tokenizer" for a pipeline's checkpoint.
        **hub: revision, token, local_files_only, cache_dir and force_download. Unknown ones are
            logged and left out.

    Raises:
        ValueError: it cannot be found or read; says why.
    """
    names = ("revision", "token", "local_files_only", "cache_dir")
    own, more = take_keywords(f"{cls.__name__}.from_pretrained", hub, names)
    options: dict[str, Any] = {"subfolder": subfolder, "weights": False}
    return cls.from_folder(resolve(path_or_repo, **options, **own, **more))


# These classes do not import this package; importing it gives them the methods.
setattr(Model, "save_pretrained", _save_pretrained)  # noqa: B010
setattr(Model, "push_to_hub", Publishing.push_to_hub)  # noqa: B010
for _name, _method in vars(NamedParameters).items():
    if not _name.startswith("__"):
        setattr(Model, _name, _method)
for _name, _module in MODELS.items():
    # `diffusers.models` has the classes that load, where diffusax.models has the modules.
    for _method_name in ("from_pretrained", "from_config", "load_config", "from_single_file"):
        setattr(_module, _method_name, _Loading(_name, _method_name))
for _cls in (CLIPTokenizer, Qwen2Tokenizer, T5Tokenizer, CLIPImageProcessor):
    setattr(_cls, "from_pretrained", classmethod(_processor_from_pretrained))  # noqa: B010

__all__ = [
    "AsymmetricAutoencoderKL",
    "AutoModel",
    "AutoencoderKL",
    "AutoencoderKLFlux2",
    "AutoencoderTiny",
    "CLIPImageProcessor",
    "CLIPModel",
    "CLIPTextModel",
    "CLIPTextModelWithProjection",
    "CLIPTokenizer",
    "CLIPVisionModel",
    "CLIPVisionModelWithProjection",
    "ControlNetModel",
    "Flux2Transformer2DModel",
    "FluxControlNetModel",
    "FluxTransformer2DModel",
    "Qwen2Tokenizer",
    "Qwen3ForCausalLM",
    "Qwen3Model",
    "T2IAdapter",
    "T5EncoderModel",
    "T5Tokenizer",
    "UNet2DConditionModel",
    "UNet2DModel",
    "ZImageTransformer2DModel",
]
