"""Scores of images that were trained on what people prefer: PickScore, HPSv2 and aesthetics.

Each is a CLIP that was trained further, or a few layers on one.
"""

import dataclasses
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from PIL import Image, ImageOps

from diffusax.checkpoints import resolve
from diffusax.checkpoints.networks import placing, read_network
from diffusax.checkpoints.single_file.names import of_open_clip
from diffusax.checkpoints.tensors import read_places
from diffusax.evaluation.features import CLIP, clip_tokenizer, local_mesh
from diffusax.evaluation.metrics import text_image_similarity
from diffusax.evaluation.weights import load_file, state_of, weight_file
from diffusax.images.image_processor import CLIPImageProcessor
from diffusax.images.reading import load_image

PICKSCORE = "yuvalkirstain/PickScore_v1"
HPS = "xswu/HPSv2"
HPS_FILE = "HPS_v2.1_compressed.pt"
AESTHETIC = "trl-lib/ddpo-aesthetic-predictor"
AESTHETIC_FILE = "aesthetic-model.pth"
CLIP_H = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
"""The CLIP that PickScore and HPSv2 were trained from."""
CLIP_L = "openai/clip-vit-large-patch14"
"""The CLIP whose features of images the predictor of aesthetics reads."""
_LAYER = re.compile(r"(?:.*\.)?(\d+)\.(weight|bias)")


@dataclasses.dataclass(frozen=True)
class PickScore:
    """How much people prefer an image for a prompt (Kirstain et al. 2023, "Pick-a-Pic").

    clip: the CLIP that was trained on the choices of users between two images.
    """

    clip: CLIP

    @classmethod
    def from_pretrained(
        cls, path_or_repo: str | Path = PICKSCORE, *, processor: str | Path = CLIP_H, **options: Any
    ) -> "PickScore":
        """Loads a checkpoint of transformers' CLIPModel from a folder or Hub repository.

        Args:
            path_or_repo: the checkpoint.
            processor: the folder or repository of the tokenizer, where the checkpoint has none.
            **options: dtype, batch_size, mesh and those of the Hub, as of `CLIP.from_pretrained`.

        Raises:
            ValueError: the checkpoint cannot be found or read, or is not a whole CLIP.
        """
        return cls(CLIP.from_pretrained(path_or_repo, processor=processor, **options))

    def score(self, images: Iterable[Any], texts: Iterable[str]) -> np.ndarray:
        """Returns logit_scale cos(E(image), T(text)), about 16 to 26, as the model's card does.

        images: PIL images or paths. texts: the prompt of each -> b float32.
        """
        cosines = text_image_similarity(self.clip.images(images), self.clip.texts(texts))
        return self.clip.logit_scale * np.asarray(cosines)


@dataclasses.dataclass(frozen=True)
class HPSv2:
    """How much people prefer an image for a prompt (Wu et al. 2023, "Human Preference Score v2").

    clip: OpenCLIP's ViT-H/14, trained on people's rankings.
    """

    clip: CLIP

    @classmethod
    def from_pretrained(
        cls,
        path_or_repo: str | Path = HPS,
        *,
        weight_name: str = HPS_FILE,
        processor: str | Path = CLIP_H,
        dtype: Any = "float32",
        batch_size: int = 32,
        mesh: Mesh | None = None,
        **hub: Any,
    ) -> "HPSv2":
        """Loads a state of OpenCLIP, by default that of HPSv2.1.

        Args:
            path_or_repo: the file, or a folder or Hub repository with it.
            weight_name: the file's name there; HPS_v2_compressed.pt is version 2.0.
            processor: the folder or repository of a CLIP of the same architecture in transformers'
                format, of which the config and the tokenizer are read.
            dtype: the dtype of the parameters and the computation.
            batch_size: the size over all devices.
            mesh: the mesh; by default all devices of this process.
            **hub: revision, token, local_files_only, cache_dir.

        Raises:
            ValueError: a file cannot be found or read, or the two do not fit together.
        """
        file = weight_file(path_or_repo, weight_name, **hub)
        beside = {name: value for name, value in hub.items() if name != "revision"}
        folder = resolve(processor, weights=False, **beside)
        network = read_network(folder)
        if network.class_name != "CLIPModel":
            raise ValueError(f"{processor} must be a CLIPModel (it is a {network.class_name})")
        mesh = local_mesh() if mesh is None else mesh
        entries = of_open_clip(state_of(file), network.config)
        entries = {k: entry for k, entry in entries.items() if not k.endswith("attn_mask")}
        model = load_file(network, entries, file, dtype=dtype, device=placing(network, mesh))
        size = network.config.vision_config.image_size
        tokenizer = clip_tokenizer(folder, network.config)
        return cls(CLIP(model, tokenizer, Padded.of_size(size), batch_size, mesh))

    def score(self, images: Iterable[Any], texts: Iterable[str]) -> np.ndarray:
        """Returns cos(E(image), T(text)), about 0.2 to 0.35, as `hpsv2.score` does.

        images: PIL images or paths. texts: the prompt of each -> b float32.
        """
        return np.asarray(text_image_similarity(self.clip.images(images), self.clip.texts(texts)))


class Padded(CLIPImageProcessor, frozen=True):
    """Shows a CLIP the whole image, with black beside it, as HPSv2 does.

    Its longer side is resized (hpsv2/src/open_clip/transform.py, ResizeMaxSize), here with Pillow's
    bicubic filter, which smooths.
    """

    def pixels(self, image: Any) -> np.ndarray:
        """Returns the pixels of one image, given as a path or a PIL image: h w 3, float32."""
        image, side = load_image(image), self.crop_size.width or 0
        scale = side / max(image.size)
        width, height = (max(1, round(length * scale)) for length in image.size)
        image = image.resize((width, height), Image.Resampling(self.resample))
        left, top = (side - width) // 2, (side - height) // 2
        return super().pixels(
            ImageOps.expand(image, (left, top, side - width - left, side - height - top))
        )


@dataclasses.dataclass(frozen=True)
class Aesthetic:
    """How beautiful people find an image, whatever it shows, from about 1 to 10.

    Schuhmann 2022, improved-aesthetic-predictor: linear layers on a CLIP's features of the image,
    trained on the ratings of SAC, LAION-logos and AVA.

    clip: the CLIP. layers: the kernels d d' and biases d' of the layers, the last one of width 1.
    """

    clip: CLIP
    layers: tuple[tuple[np.ndarray, np.ndarray], ...]

    @classmethod
    def from_pretrained(
        cls,
        path_or_repo: str | Path = AESTHETIC,
        *,
        weight_name: str = AESTHETIC_FILE,
        clip: CLIP | str | Path = CLIP_L,
        revision: str | None = None,
        **options: Any,
    ) -> "Aesthetic":
        """Loads the layers, and the CLIP unless one is given.

        Args:
            path_or_repo: the file, such as sac+logos+ava1-l14-linearMSE.pth, or a folder or Hub
                repository with it.
            weight_name: the file's name there.
            clip: the CLIP, or the folder or repository to load it from.
            revision: that of the layers' repository.
            **options: dtype, batch_size and mesh of the CLIP, and those of the Hub.

        Raises:
            ValueError: a file cannot be found or read, or the layers do not fit each other and the
                CLIP.
        """
        names = ("token", "local_files_only", "cache_dir")
        hub = {name: options[name] for name in names if name in options}
        file = weight_file(path_or_repo, weight_name, revision=revision, **hub)
        if not isinstance(clip, CLIP):
            clip = CLIP.from_pretrained(clip, **options)
        layers = linear_layers(file)
        widths = [kernel.shape for kernel, _ in layers]
        ends = [clip.model.config.projection_dim, *(d for _, d in widths)]
        if [c for c, _ in widths] != ends[:-1] or ends[-1] != 1:
            raise ValueError(
                f"{file} has layers of {widths}, which must lead from the {ends[0]} features of "
                "the CLIP to one score"
            )
        return cls(clip, layers)

    def score(self, images: Iterable[Any]) -> np.ndarray:
        """Returns the scores of images, PIL images or paths -> b float32."""
        x = self.clip.images(images)
        with jax.default_matmul_precision("highest"):
            # Dropout lies between the layers, and no activation.
            for kernel, bias in self.layers:
                x = np.asarray(jnp.asarray(x) @ kernel + bias)
        return x[:, 0]


def linear_layers(file: Path) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
    """Reads the kernels c d and biases d of linear layers in a row, in the order of their numbers.

    Raises:
        ValueError: the file has other tensors, or a layer lacks one of the two.
    """
    tensors = read_places(state_of(file))
    parts: dict[int, dict[str, np.ndarray]] = {}
    for name, tensor in tensors.items():
        found = _LAYER.fullmatch(name)
        if found is None or tensor.ndim != {"weight": 2, "bias": 1}[found[2]]:
            raise ValueError(f"{file} must hold linear layers in a row (it has {name})")
        parts.setdefault(int(found[1]), {})[found[2]] = tensor.astype(np.float32)
    for number, own in parts.items():
        if len(own) != 2 or own["weight"].shape[:1] != own["bias"].shape:
            raise ValueError(f"{file} has no weight and bias of one width for layer {number}")
    if not parts:
        raise ValueError(f"{file} holds no layers")
    return tuple((parts[n]["weight"].T, parts[n]["bias"]) for n in sorted(parts))
