"""The checkpoint of videos that a training starts from (Wan, Team Wan 2025)."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image

from diffusax.checkpoints import read_call_defaults, read_model_index, resolve
from diffusax.checkpoints.networks import read_network
from diffusax.images.image_processor import CLIPImageProcessor
from diffusax.models.autoencoders.wan import CHUNK
from diffusax.pipelines import DiffusionPipeline
from diffusax.pipelines.components.loading import class_for
from diffusax.pipelines.families import Family
from diffusax.pipelines.families.wan import LOW_NOISE, SIZE
from diffusax.training.data.examples import SEEN_PIXELS
from diffusax.training.recipes.base_model import BaseModel, scheduler_of
from diffusax.training.step.given_frames import IMAGE_ENCODER, GivenFrames

Expert = Literal["high_noise", "low_noise"]
"""One of two transformers: that of the noisier steps, or of the others."""


@dataclasses.dataclass(frozen=True)
class VideoModel(BaseModel):
    """The networks, tokenizers and scheduler of a checkpoint of videos; see `BaseModel`."""

    expert: Expert | None = None
    """Which of two transformers is trained; None where there is one."""

    @classmethod
    def open_videos(
        cls, path_or_repo: str, expert: Expert | None = None, *, trained: bool = True
    ) -> "VideoModel":
        """Opens the checkpoint in a folder or of a Hub repository.

        Args:
            path_or_repo: a folder in diffusers' layout, or a Hub repository id.
            expert: which of two transformers is trained.
            trained: whether one is; what is encoded is the same for both.

        Raises:
            ValueError: it cannot be found or read, is of another kind, or the expert is missing or
                there is none; says why.
        """
        folder = resolve(path_or_repo)
        family = class_for(DiffusionPipeline, folder).family
        if not family.draws_videos:
            raise ValueError(
                f"{path_or_repo} is {family.name}, of images; use `diffusax train text-to-image`"
            )
        _, listed, stored = read_model_index(folder)
        _check_listed(family, folder, listed)
        names = family.names("denoiser", "autoencoder", "text_encoder", "image_encoder")
        networks = {
            name: read_network(folder / name, family.changes(name))
            for name in names
            if name in listed
        }
        options = dict(family.options)
        kinds = {c.name: c.kind for c in family.components if c.name in listed}
        roles = ("tokenizer", "image_processor")
        base = cls(
            folder,
            family,
            networks,
            {n: kinds[n].from_folder(folder / n) for n in family.names(*roles) if n in listed},
            scheduler_of(family, folder, listed),
            {**options, **{k: v for k, v in stored.items() if k in options}},
            read_call_defaults(folder),
            expert,
        )
        base._check(path_or_repo, trained)
        return base

    @property
    def denoiser(self) -> str:
        """The name of the transformer that is trained."""
        return LOW_NOISE if self.expert == "low_noise" else super().denoiser

    @property
    def others(self) -> tuple[str, ...]:
        """The names of transformers that are not trained."""
        names = self.family.names("denoiser")
        return tuple(name for name in names if name in self.networks and name != self.denoiser)

    @property
    def within(self) -> tuple[float, float] | None:
        """The least and the highest noise level of what is trained; None for all."""
        if self.expert is None:
            return None
        ratio = float(self.options["boundary_ratio"])
        return (0.0, ratio) if self.expert == "low_noise" else (ratio, 1.0)

    @property
    def given(self) -> GivenFrames | None:
        """What the transformer is shown of clips in input channels; None where it has none."""
        config = self.networks[self.denoiser].config
        if config.in_channels == self._latents.channels:
            return None
        return GivenFrames(True, bool(config.pos_embed_seq_len), config.image_dim is not None)

    def seen_frames(self, pixels: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        """Returns what CLIP reads of the frames that are shown, n h w 3, by its name in a batch.

        pixels: the clip's frames, H W 3 uint8 each. Nothing where CLIP sees none.
        """
        given = self.given
        if given is None or not given.seen:
            return {}
        size = self.networks[IMAGE_ENCODER].config.image_size
        process = self.tokenizers.get("image_processor") or CLIPImageProcessor.of_size(size)
        images = [Image.fromarray(pixels[number]) for number in given.numbers]
        return {SEEN_PIXELS: np.stack([process.pixels(image) for image in images])}

    @property
    def times_of_tokens(self) -> bool:
        """Whether tokens have times of their own, so that a first frame can be at time zero."""
        return bool(self.options.get("expand_timesteps"))

    @property
    def fps(self) -> float:
        """The frames per second of the model's videos."""
        assert self.family.frame_rate is not None
        return float(self.family.frame_rate(self.options))

    @property
    def step(self) -> int:
        """The number that the frames after the first are a multiple of, to be encoded."""
        return max(CHUNK, self._latents.frames)

    @property
    def default_size(self) -> int:
        """The side of a square with the pixels of diffusers' default size, 480x832, or less."""
        return math.isqrt(math.prod(SIZE)) // self.multiple * self.multiple

    @property
    def _latents(self) -> Any:
        return self.family.latents(self.networks[self.autoencoder].config)

    def _check(self, name: str, trained: bool) -> None:
        """Raises ValueError where the transformer cannot be trained, or the expert cannot be."""
        two = LOW_NOISE in self.networks
        if two and self.expert is None and trained:
            raise ValueError(
                f"{name} has two transformers, of which one is trained at a time; give expert="
                "high_noise, for the beginning of videos, or low_noise, for their details"
            )
        if not two and self.expert is not None:
            raise ValueError(
                f"expert={self.expert} cannot be for {name}, which has one; leave it out"
            )
        if two and self.options.get("boundary_ratio") is None:
            raise ValueError(f"{name} has two transformers, and no boundary_ratio between them")
        network, latents = self.networks[self.denoiser], self._latents
        if hasattr(network.config, "vace_layers"):
            raise ValueError(
                f"{name} is of VACE, which is shown videos and masks besides a text, and cannot be "
                "trained here; train the checkpoint of text to video that it was made from"
            )
        own = network.config.in_channels
        fitting = latents.channels, 2 * latents.channels + latents.frames
        if own not in fitting:
            raise ValueError(
                f"clips need a transformer with {fitting[0]} or {fitting[1]} input channels; that "
                f"of {name} has {own}"
            )
        sees = self.given is not None and self.given.seen
        if sees and IMAGE_ENCODER not in self.networks:
            raise ValueError(f"{name} has no {IMAGE_ENCODER}, which its transformer needs")


def given_of(base: BaseModel) -> GivenFrames | None:
    """Returns what a checkpoint's transformer is shown of clips in input channels."""
    return base.given if isinstance(base, VideoModel) else None


def _check_listed(family: Family, folder: Path, listed: Mapping[str, Any]) -> None:
    """Raises ValueError where model_index.json lacks a component that a training needs."""
    text: Sequence[str] = family.names("tokenizer", "text_encoder")
    missing = [
        c.name
        for c in family.components
        if c.name not in listed and c.make is None and (not c.optional or c.name in text)
    ]
    if missing:
        raise ValueError(f"{folder / 'model_index.json'} has no {' and no '.join(missing)}")
