"""Computes features of images and texts, batch by batch, over all devices of this process."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from diffusax.boundary.files import load_json
from diffusax.checkpoints import resolve
from diffusax.evaluation.inception import SIDE, InceptionConfig, InceptionV3
from diffusax.evaluation.weights import load_encoder, load_file, state_of
from diffusax.images.image_processor import FILES, CLIPImageProcessor
from diffusax.images.reading import load_image
from diffusax.models.network import Network
from diffusax.networks import Model
from diffusax.pipelines.families.placement import put
from diffusax.runtime.devices.mesh import make_mesh, replicated
from diffusax.runtime.switches import in_mesh
from diffusax.text.tokenizer import CLIPTokenizer


def local_mesh() -> Mesh | None:
    """Returns the devices of this process as a mesh; None for a single one."""
    devices = jax.local_devices()
    return make_mesh(devices=devices) if len(devices) > 1 else None


@dataclasses.dataclass(frozen=True)
class CLIP:
    """A CLIP checkpoint, which computes features of images and texts, b p float32 of length one.

    model: a CLIPModel. batch_size: the size over all devices of the mesh.
    """

    model: Model
    tokenizer: CLIPTokenizer
    processor: CLIPImageProcessor
    batch_size: int = 32
    mesh: Mesh | None = None

    @classmethod
    def from_pretrained(
        cls,
        path_or_repo: str | Path,
        *,
        processor: str | Path | None = None,
        dtype: Any = "float32",
        batch_size: int = 32,
        mesh: Mesh | None = None,
        **hub: Any,
    ) -> "CLIP":
        """Loads a checkpoint from a folder or Hub repository, such as
        openai/clip-vit-large-patch14.

        Args:
            path_or_repo: a folder with config.json, weights, the tokenizer's files and perhaps
                preprocessor_config.json, as transformers' CLIPModel and CLIPProcessor write them.
            processor: a folder or repository with the tokenizer's files, where the checkpoint has
                none.
            dtype: the dtype of the parameters and the computation.
            batch_size: the size over all devices.
            mesh: the mesh; by default all devices of this process.
            **hub: revision, token, local_files_only, cache_dir.

        Raises:
            ValueError: the checkpoint cannot be found or read, or is not a whole CLIP.
        """
        folder = resolve(path_or_repo, **hub)
        mesh = local_mesh() if mesh is None else mesh
        model = load_encoder(path_or_repo, folder, dtype=dtype, mesh=mesh, **hub)
        if model.class_name != "CLIPModel":
            raise ValueError(
                f"{path_or_repo} holds a {model.class_name}; CLIP's metrics need a CLIPModel with "
                "both towers, such as openai/clip-vit-large-patch14"
            )
        if processor is not None and not any((folder / name).is_file() for name in _TOKENIZERS):
            folder = resolve(processor, weights=False, **hub)
        size = model.config.vision_config.image_size
        images = CLIPImageProcessor.from_folder(folder, size)
        return cls(model, clip_tokenizer(folder, model.config), images, batch_size, mesh)

    @property
    def logit_scale(self) -> float:
        """The factor of cosines that training has learned."""
        return float(np.exp(np.asarray(self.model.params["logit_scale"], np.float32)))

    def images(self, images: Iterable[Any]) -> np.ndarray:
        """Returns the features of images, PIL images or paths, b p."""

        def run(pixels: Any) -> jax.Array:
            return self.model.run(pixels, method="get_image_features")

        return _unit(self._features(run, images, self.processor.pixels))

    def texts(self, texts: Iterable[str]) -> np.ndarray:
        """Returns the features of texts, b p. Texts longer than the model's window are cut off."""

        def run(input_ids: Any) -> jax.Array:
            return self.model.run(input_ids, method="get_text_features")

        return _unit(self._features(run, texts, lambda text: self.tokenizer.windows([text])[0]))

    def _features(
        self, run: Callable[[Any], jax.Array], items: Iterable[Any], prepare: Callable[[Any], Any]
    ) -> np.ndarray:
        return batched_features(run, items, prepare, self.batch_size, self.mesh)


def clip_tokenizer(folder: Path, config: Any) -> CLIPTokenizer:
    """Reads the tokenizer in a CLIP's folder. config: the CLIP's, a CLIPConfig.

    Raises:
        ValueError: there is none, or it does not fit the network.
    """
    tokenizer = CLIPTokenizer.from_folder(folder)
    tokenizer.check_fits(config.text_config.vocab_size, config.text_config.max_position_embeddings)
    return tokenizer


_TOKENIZERS = ("tokenizer.json", "vocab.json")
_IMAGENET = {"image_mean": (0.485, 0.456, 0.406), "image_std": (0.229, 0.224, 0.225)}


@dataclasses.dataclass(frozen=True)
class DINO:
    """A DINO or DINOv2 checkpoint, which computes features of images, b d float32 of length one.

    They are the class tokens after the final norm. model: a Dinov2Model or a ViTModel. batch_size:
    the size over all devices of the mesh.
    """

    model: Model
    processor: CLIPImageProcessor
    batch_size: int = 32
    mesh: Mesh | None = None

    @classmethod
    def from_pretrained(
        cls,
        path_or_repo: str | Path = "facebook/dinov2-base",
        *,
        dtype: Any = "float32",
        batch_size: int = 32,
        mesh: Mesh | None = None,
        **hub: Any,
    ) -> "DINO":
        """Loads a checkpoint from a folder or Hub repository, such as facebook/dino-vits16.

        Images are cut out of the middle after their shorter side was resized, bicubically, to 256
        pixels for each 224 that are cut out: as DINO's eval_knn.py does, MagicBrush's image_eval.py
        with DINO, and DINOv2's own preprocessor_config.json.

        Args:
            path_or_repo: a folder with config.json, weights and perhaps preprocessor_config.json,
                as transformers' Dinov2Model or ViTModel is saved.
            dtype: the dtype of the parameters and the computation.
            batch_size: the size over all devices.
            mesh: the mesh; by default all devices of this process.
            **hub: revision, token, local_files_only, cache_dir.

        Raises:
            ValueError: the checkpoint cannot be found or read, or is of another network.
        """
        folder = resolve(path_or_repo, **hub)
        mesh = local_mesh() if mesh is None else mesh
        model = load_encoder(path_or_repo, folder, dtype=dtype, mesh=mesh, **hub)
        if model.class_name not in ("Dinov2Model", "ViTModel"):
            raise ValueError(
                f"{path_or_repo} holds a {model.class_name}; DINO's similarity needs a Dinov2Model "
                "or a ViTModel, such as facebook/dinov2-base"
            )
        return cls(model, dino_processor(folder, model.config.image_size), batch_size, mesh)

    def images(self, images: Iterable[Any]) -> np.ndarray:
        """Returns the features of images, PIL images or paths, b d."""

        def run(pixels: Any) -> jax.Array:
            return self.model.run(pixels).last_hidden_state[:, 0]

        pixels = self.processor.pixels
        return _unit(batched_features(run, images, pixels, self.batch_size, self.mesh))


def dino_processor(folder: Path, image_size: int) -> CLIPImageProcessor:
    """Returns how images are prepared for a DINO in a folder, see `DINO.from_pretrained`.

    image_size: the side in pixels that is cut out where preprocessor_config.json does not say so,
    as those of ViTs do not.

    Raises:
        ValueError: an option in the file is not valid; names the file and the option.
    """
    file = folder / FILES[0]
    data = load_json(file) if file.is_file() else {}
    if data.get("crop_size") is not None:
        return CLIPImageProcessor.from_dict({**_IMAGENET, **data}, source=str(file))
    size, crop = round(image_size * 256 / 224), image_size
    return CLIPImageProcessor.from_dict({**_IMAGENET, "size": size, "crop_size": crop})


@dataclasses.dataclass(frozen=True)
class Inception:
    """FID's Inception v3, which computes features of images, b 2048 float32.

    batch_size: the size over all devices of the mesh.
    """

    model: Model
    batch_size: int = 32
    mesh: Mesh | None = None

    @classmethod
    def from_file(
        cls, file: Path, *, batch_size: int = 32, mesh: Mesh | None = None
    ) -> "Inception":
        """Loads the network with the weights of a file in pytorch-fid's layout.

        Args:
            file: pt_inception-2015-12-05-6726825d.pth, or safetensors with its tensors.
            batch_size: the size over all devices.
            mesh: the mesh; by default all devices of this process.

        Raises:
            ValueError: the file cannot be read, or has other tensors.
        """
        network = Network(InceptionV3, InceptionConfig())
        mesh = local_mesh() if mesh is None else mesh
        device = None if mesh is None else replicated(mesh)
        try:
            model = load_file(network, state_of(file), file, dtype=np.float32, device=device)
        except ValueError as error:
            reason = str(error).replace("does not fit its config.json", "is not FID's Inception v3")
            raise ValueError(reason) from None
        return cls(model, batch_size, mesh)

    def images(self, images: Iterable[Any]) -> np.ndarray:
        """Returns the features of images, PIL images or paths of any size, b 2048."""

        def run(pixels: Any) -> jax.Array:
            return self.model.run(pixels).features

        return batched_features(run, images, inception_pixels, self.batch_size, self.mesh)


def batched_features(
    run: Callable[[Any], jax.Array],
    items: Iterable[Any],
    prepare: Callable[[Any], Any],
    batch_size: int,
    mesh: Mesh | None,
) -> np.ndarray:
    """Calls `run` on batches of the prepared items, and returns the results, n d float32.

    Every batch has `batch_size` rows, the last one repeated, so that one program serves all.
    Products of float32 are not rounded, as TPUs and newer GPUs would by default.

    Raises:
        ValueError: there are no items.
    """
    parts = []
    for batch in batched(items, batch_size):
        rows = np.stack([prepare(item) for item in batch])
        filled = np.concatenate([rows, np.repeat(rows[-1:], batch_size - len(rows), axis=0)])
        with in_mesh(mesh), jax.default_matmul_precision("highest"):
            features = run(put(mesh, filled))
        parts.append(np.asarray(features, np.float32)[: len(rows)])
    if not parts:
        raise ValueError("there is nothing to take the features of")
    return np.concatenate(parts)


def batched(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    """Yields the items in lists of `size`, the last one with the rest."""
    rest = iter(items)
    while batch := list(itertools.islice(rest, size)):
        yield batch


def inception_pixels(image: Any) -> np.ndarray:
    """Returns an image in [0, 1] at 299x299, 299 299 3, resized linearly like pytorch-fid.

    That is torch's `interpolate(mode="bilinear", align_corners=False)`. It does not smooth what it
    makes smaller, unlike Pillow's filters, with which the published statistics were not made.
    """
    pixels = np.asarray(load_image(image)).astype(np.float32) / 255
    for axis in (0, 1):
        low, high, share = _neighbours(pixels.shape[axis])
        share = share.reshape((-1, 1, 1) if axis == 0 else (1, -1, 1))
        pixels = pixels.take(low, axis) * (1 - share) + pixels.take(high, axis) * share
    return pixels


def _neighbours(size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns, for each new pixel, the two old ones around it, and the share of the second."""
    position = (np.arange(SIDE, dtype=np.float32) + np.float32(0.5)) * np.float32(size / SIDE)
    position = np.maximum(position - np.float32(0.5), 0)
    low = np.minimum(position.astype(int), size - 1)
    return low, np.minimum(low + 1, size - 1), (position - low).astype(np.float32)


def _unit(features: np.ndarray) -> np.ndarray:
    return features / np.linalg.norm(features, axis=-1, keepdims=True)
