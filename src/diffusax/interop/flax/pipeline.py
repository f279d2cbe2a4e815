"""The base of diffusers' Flax pipelines: components, loading, saving, and conversion to PIL."""

import inspect
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from PIL import Image

from diffusax.checkpoints import read_model_index, write_model_index
from diffusax.images.conversion import to_pil
from diffusax.interop.flax import schedulers
from diffusax.interop.flax.models import (
    LOADING,
    FlaxAutoencoderKL,
    FlaxControlNetModel,
    FlaxModelMixin,
    FlaxUNet2DConditionModel,
)
from diffusax.interop.flax.signatures import REQUIRED, Constructed
from diffusax.interop.flax.text import (
    FlaxCLIPTextModel,
    FlaxCLIPTextModelWithProjection,
    PromptTokenizer,
)
from diffusax.interop.flax.weights import fetch
from diffusax.text.tokenizer import CLIPTokenizer

MODELS: dict[str, Any] = {
    "AutoencoderKL": FlaxAutoencoderKL,
    "CLIPTextModel": FlaxCLIPTextModel,
    "CLIPTextModelWithProjection": FlaxCLIPTextModelWithProjection,
    "ControlNetModel": FlaxControlNetModel,
    "UNet2DConditionModel": FlaxUNet2DConditionModel,
}
_UNUSED = ("safety_checker", "feature_extractor")

logger = logging.getLogger(__name__)


class FlaxDiffusionPipeline(Constructed):
    """A pipeline of components without parameters, which every call takes as an argument.

    Attributes:
        dtype: the dtype of the computation, or None.
        vae_scale_factor: the pixels per latent, in each direction.
    """

    vae: Any
    unet: Any
    text_encoder: Any
    tokenizer: Any
    scheduler: Any
    dtype: Any

    def _configure(self, given: Mapping[str, Any]) -> None:
        """Sets the components, without parameters; safety_checker must be None."""
        components = {**given}
        self.dtype = components.pop("dtype")
        # The autoencoder comes first in what is saved.
        self.register_modules(vae=components.pop("vae"), **components)

    def register_modules(self, **modules: Any) -> None:
        """Sets the components as attributes.

        Raises:
            ValueError: a safety checker is among them, which diffusax does not have.
        """
        if modules.get("safety_checker") is not None:
            raise ValueError("diffusax has no safety checker; pass safety_checker=None")
        self._names = tuple(modules)
        for name, module in modules.items():
            setattr(self, name, module)
        self.vae_scale_factor = self.vae.network.config.downsampling

    @property
    def components(self) -> dict[str, Any]:
        """The components by name, for another pipeline: `X(**pipeline.components)`."""
        return {name: getattr(self, name) for name in self._names}

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | Path, **kwargs: Any
    ) -> tuple[Any, dict[str, Any]]:
        """Loads the pipeline of a checkpoint, and its parameters by component.

        params["scheduler"] is the scheduler's state, in float32. FlaxDiffusionPipeline itself loads
        the class that the checkpoint names.

        Args:
            pretrained_model_name_or_path: a folder or a Hub repository, diffusers' or Flax's.
            **kwargs: dtype, of the computation; from_pt, to read PyTorch's safetensors even if
                there are Flax's weights; revision, token, local_files_only, cache_dir; and
                components to use instead of the checkpoint's, whose parameters the caller adds.
                split_head_dim and use_memory_efficient_attention change nothing.

        Raises:
            ValueError: it cannot be found or read, or an argument is unknown; says which.
        """
        hub = {name: kwargs.pop(name) for name in LOADING & kwargs.keys()}
        from_pt, dtype = kwargs.pop("from_pt", False), kwargs.pop("dtype", None)
        for name in ("split_head_dim", "use_memory_efficient_attention"):
            kwargs.pop(name, None)
        folder = fetch(pretrained_model_name_or_path, from_pt=from_pt, **hub)
        named, listed, _ = read_model_index(folder)
        made: Any = cls if cls is not FlaxDiffusionPipeline else _class_named(named, folder)
        wanted = [n for n in inspect.signature(made).parameters if n != "dtype"]
        if unknown := kwargs.keys() - set(wanted):
            raise ValueError(
                f"{made.__name__}.from_pretrained takes no {', '.join(sorted(unknown))}; it takes "
                f"{', '.join(wanted)}"
            )
        if "safety_checker" in listed and "safety_checker" not in kwargs:
            logger.warning("diffusax has no safety checker; images are returned as they are")
        parts: dict[str, Any] = {}
        params: dict[str, Any] = {}
        for name in wanted:
            if name in kwargs or name in _UNUSED:
                parts[name] = kwargs.get(name)
            elif name not in listed:
                raise ValueError(f"{folder / 'model_index.json'} has no {name}; give {name}=")
            else:
                parts[name], params[name] = _load(folder / name, listed[name][1], from_pt, dtype)
        if "scheduler" in kwargs:
            params["scheduler"] = kwargs["scheduler"].create_state()
        params = {name: value for name, value in params.items() if value is not None}
        return made(**parts, dtype=dtype), params

    def save_pretrained(self, save_directory: str | Path, params: Mapping[str, Any]) -> None:
        """Writes a checkpoint with safetensors, which diffusers for PyTorch opens, too.

        params: the parameters by component, of one device.
        """
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        index: dict[str, Any] = {}
        for name, part in self.components.items():
            if part is None:
                index[name] = None
                continue
            if isinstance(part, FlaxModelMixin):
                part.save_pretrained(folder / name, params[name])
                class_name = part.network.class_name
            else:
                part.save_pretrained(folder / name)
                class_name = type(part).__name__.removeprefix("Flax")
            library = "transformers" if name.startswith("t") else "diffusers"
            class_name = "CLIPTokenizer" if name.startswith("tokenizer") else class_name
            index[name] = (library, class_name)
        write_model_index(folder, type(self).__name__.removeprefix("Flax"), index)

    @staticmethod
    def numpy_to_pil(images: Any) -> list[Image.Image]:
        """Converts images n h w 3 (or one, h w 3) in [0, 1] to PIL images."""
        images = np.asarray(images)
        return to_pil(images[None] if images.ndim == 3 else images)

    def set_progress_bar_config(self, **kwargs: Any) -> None:
        """Changes nothing: there is no progress bar, since a call is one compiled program."""


def of_components(*names: str) -> dict[str, Any]:
    """Returns the arguments of a pipeline's constructor."""
    return {**dict.fromkeys(names, REQUIRED), "dtype": jnp.float32}


def _load(folder: Path, class_name: str, from_pt: bool, dtype: Any) -> tuple[Any, Any]:
    """Returns a component, and its parameters or state, if it has any."""
    class_name = class_name.removeprefix("Flax")
    if folder.name.startswith("tokenizer"):
        return PromptTokenizer(CLIPTokenizer.from_folder(folder)), None
    if folder.name == "scheduler":
        found = getattr(schedulers, f"Flax{class_name}", None)
        if found is None:
            raise ValueError(
                f"{folder} asks for {class_name}, which diffusers never had for Flax; give "
                "scheduler=, such as FlaxDPMSolverMultistepScheduler.from_pretrained(...)[0]"
            )
        return found.from_pretrained(folder)
    if class_name not in MODELS:
        raise ValueError(f"{folder} asks for {class_name}; diffusax has {', '.join(MODELS)}")
    options = {"_do_init": False} if folder.name.startswith("text") else {}
    return MODELS[class_name].from_pretrained(folder, dtype, from_pt=from_pt, **options)


def _class_named(name: str, folder: Path) -> Any:
    families = FlaxDiffusionPipeline.__subclasses__()
    classes = {c.__name__: c for family in families for c in family.__subclasses__()}
    found = classes.get(f"Flax{name.removeprefix('Flax')}")
    if found is None:
        raise ValueError(
            f"{folder / 'model_index.json'} asks for {name or 'no pipeline'}; there is "
            f"{', '.join(classes)}"
        )
    return found
