"""The methods of pipelines for IP-Adapters (Ye et al. 2023), under diffusers' names."""

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import jax
import jax.numpy as jnp

from diffusax.boundary.tensors import as_tensors, wants_tensors
from diffusax.checkpoints.ip_adapter import IPAdapter, find_ip_adapter, read_ip_adapter
from diffusax.checkpoints.keywords import take_keywords
from diffusax.images.image_processor import CLIPImageProcessor
from diffusax.models.adapters.image_prompts import cross_attentions
from diffusax.models.network import Network
from diffusax.networks import Model, load_network
from diffusax.pipelines.components.components import Components
from diffusax.pipelines.plan.arguments import Call, as_list
from diffusax.pipelines.tasks.image_prompts import call_features, encode_images
from diffusax.runtime.switches import in_mesh

log = logging.getLogger(__name__)

_CLIP_SIZE = 224
_HUB = ("revision", "token", "cache_dir", "local_files_only")


class IPAdapterMethods:
    """Loads IP-Adapters, with which images are prompts: `pipe(..., ip_adapter_image=image)`."""

    parts: Components
    _tensors: Literal["pt", "jax"] | None

    def load_ip_adapter(
        self,
        pretrained_model_name_or_path_or_dict: Any,
        subfolder: str | list[str] | None = None,
        weight_name: str | list[str] | None = None,
        image_encoder_folder: str | None = "image_encoder",
        **options: Any,
    ) -> None:
        """Loads an IP-Adapter, or several with lists, instead of those that were loaded before.

        Other images, scales and masks compile nothing. Pipelines that were made by `from_pipe`
        share the IP-Adapters.

        Args:
            pretrained_model_name_or_path_or_dict: a safetensors file; a folder or a Hub repository
                such as "h94/IP-Adapter"; or a dictionary of arrays or tensors.
            subfolder: the folder of the file in the folder or repository, such as "models".
            weight_name: the name of the file, such as "ip-adapter_sd15.safetensors".
            image_encoder_folder: the folder of the image encoder, beside the file or, where the
                name has a slash, in the folder or repository. It is read where the pipeline has
                no image_encoder yet. None for a pipeline that is given embeddings of images.
            **options: revision, token, cache_dir, local_files_only and force_download, and
                diffusers' others, which change nothing here.

        Raises:
            ValueError: a file cannot be found or read, or is for another UNet; names it. Nothing is
                changed then.
            TypeError: an option is unknown.
        """
        own, more = take_keywords("load_ip_adapter", options, _HUB, strict=True)
        hub = {**own, **more}
        sources = _sources(pretrained_model_name_or_path_or_dict, subfolder, weight_name)
        unet = self._adaptable_unet()
        adapters, encoder = [], None
        for source, folder, name in sources:
            if isinstance(source, Mapping):
                adapters.append(read_ip_adapter(source, unet, self.parts.dtype))
                continue
            path = find_ip_adapter(source, folder, name, **hub)
            adapters.append(read_ip_adapter(path, unet, self.parts.dtype))
            wanted = image_encoder_folder is not None and "image_encoder" not in self.parts.models
            if wanted and encoder is None:
                encoder = self._read_encoder(source, folder, str(image_encoder_folder), hub)
        self._register(adapters, encoder)

    def set_ip_adapter_scale(self, scale: Any) -> None:
        """Sets how much the images of IP-Adapters count in later calls; 1 after loading.

        Args:
            scale: a number; a dictionary by block, such as {"down": {"block_2": [0.0, 1.0]},
                "up": {"block_0": [0.0, 1.0, 0.0]}}, in which what is left out is zero; or a list
                with one of these for each IP-Adapter, where an entry may be a list of numbers, one
                for each image that has a mask.

        Raises:
            ValueError: no IP-Adapter is loaded, there are not as many entries as IP-Adapters, or
                one is not valid.
        """
        self.parts.ip_adapters.set_scales(scale, self._adaptable_unet())

    def unload_ip_adapter(self) -> None:
        """Removes the IP-Adapters, the image encoder and the feature extractor."""
        self.parts.ip_adapters.set(())
        self._set_components(image_encoder=None, feature_extractor=None)

    def encode_image(
        self,
        image: Any,
        device: Any = None,
        num_images_per_prompt: int = 1,
        output_hidden_states: bool | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the features of images and those of the negative branch, as diffusers does.

        Args:
            image: one image or a list of n.
            device: changes nothing.
            num_images_per_prompt: how often each is repeated.
            output_hidden_states: whether to return the last but one hidden states, n s e, and those
                of blank pixels; by default the embeddings, n e, and zeros.

        Raises:
            ValueError: the pipeline has no image encoder, or what is given is no image.
        """
        with in_mesh(self.parts.local_mesh):
            found = encode_images(self.parts, image, hidden=bool(output_hidden_states))
        images, blank = (jnp.repeat(x[0], num_images_per_prompt, axis=0) for x in found)
        wanted = wants_tensors(self._tensors, image)
        return as_tensors((images, blank)) if wanted else (images, blank)

    def prepare_ip_adapter_image_embeds(
        self,
        ip_adapter_image: Any,
        ip_adapter_image_embeds: Any = None,
        device: Any = None,
        num_images_per_prompt: int = 1,
        do_classifier_free_guidance: bool = True,
    ) -> list[jax.Array]:
        """Returns the features of a call's images, one array for each IP-Adapter.

        A call takes them as ip_adapter_image_embeds. With guidance they begin with those of the
        negative branch, so that an array is (2 num_images_per_prompt) n e, or with the hidden
        states ... n s e.

        Args:
            ip_adapter_image: see the call.
            ip_adapter_image_embeds: such arrays, which are only repeated.
            device: changes nothing.
            num_images_per_prompt: how often they are repeated.
            do_classifier_free_guidance: whether there is a negative branch.

        Raises:
            ValueError: no IP-Adapter is loaded, or the images do not fit.
        """
        branches = 1 + bool(do_classifier_free_guidance)
        given = {"ip_adapter_image_embeds": ip_adapter_image_embeds}
        if ip_adapter_image_embeds is None:
            given = {"ip_adapter_image": ip_adapter_image}
        with in_mesh(self.parts.local_mesh):
            found = call_features(self.parts, Call(**given), branches)
        copies = (num_images_per_prompt,)
        embeds = [
            jnp.concatenate(
                [jnp.tile(x, (*copies, *(1,) * (x.ndim - 1))) for x in pair[::-1][-branches:]]
            )
            for pair in found
        ]
        wanted = wants_tensors(self._tensors, *as_list(ip_adapter_image_embeds))
        return as_tensors(embeds) if wanted else embeds

    def _adaptable_unet(self) -> Network:
        """Returns the UNet that IP-Adapters change.

        Raises:
            ValueError: this pipeline's takes none.
        """
        name = self.parts.denoiser.components[0]
        network = self.parts.networks[name]
        image_prompts = "image_encoder" in getattr(self, "component_names", ())
        if not image_prompts or not isinstance(network, Network) or not cross_attentions(network):
            raise ValueError(f"{type(self).__name__} takes no IP-Adapters with this {name}")
        return network

    def _read_encoder(
        self, source: Any, subfolder: str | None, folder: str, hub: Mapping[str, Any]
    ) -> Model | None:
        """Reads the image encoder of a file, folder or repository; None where a file has none."""
        options: dict[str, Any] = {"dtype": self.parts.dtype}
        file = Path(source).expanduser()
        if os.path.isfile(file):
            if not (file.parent / folder).is_dir():
                log.warning(
                    "there is no image encoder in %s; assign one to image_encoder, or give calls "
                    "ip_adapter_image_embeds",
                    file.parent / folder,
                )
                return None
            return load_network(file.parent / folder, **options)
        inside = folder if "/" in folder else PurePosixPath(subfolder or "", folder).as_posix()
        return load_network(source, subfolder=inside, **options, **hub)

    def _register(self, adapters: Sequence[IPAdapter], encoder: Model | None) -> None:
        if encoder is not None:
            if encoder.class_name != "CLIPVisionModelWithProjection":
                raise ValueError(
                    "the image encoder must be a CLIPVisionModelWithProjection (got "
                    f"{encoder.class_name})"
                )
            self._set_components(image_encoder=encoder)
        if "feature_extractor" not in self.parts.tokenizers:
            model = self.parts.models.get("image_encoder")
            size = _CLIP_SIZE if model is None else model.config.image_size
            self._set_components(feature_extractor=CLIPImageProcessor.of_size(size))
        self.parts.ip_adapters.set(adapters)

    def _set_components(self, **components: Any) -> None:
        for name, value in components.items():
            setattr(self, name, value)


def _sources(source: Any, subfolder: Any, weight_name: Any) -> list[tuple[Any, Any, Any]]:
    """Returns the source, subfolder and file name of each IP-Adapter.

    Raises:
        ValueError: the lists do not have the same length.
    """
    lists = [as_list(value) for value in (source, subfolder, weight_name)]
    count = max(map(len, lists))
    if not all(len(values) in (1, count) for values in lists):
        raise ValueError(
            "pretrained_model_name_or_path_or_dict, subfolder and weight_name must be single or "
            f"lists of one length (got {', '.join(str(len(values)) for values in lists)})"
        )
    return list(zip(*(values * count if len(values) == 1 else values for values in lists)))
