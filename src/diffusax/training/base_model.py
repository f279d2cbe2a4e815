"""The checkpoint that a denoiser's training starts from."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from diffusax.checkpoints import load_network, read_model_index, resolve
from diffusax.checkpoints.networks import read_network
from diffusax.files import load_json
from diffusax.models.control_from_unet import controlnet_of
from diffusax.models.network import Model, Network, Params
from diffusax.models.widening import widen_network, widen_params
from diffusax.pipelines import DiffusionPipeline
from diffusax.pipelines.components import Components
from diffusax.pipelines.families import Family
from diffusax.pipelines.loading import class_for
from diffusax.samplers import Scheduler, scheduler_from_config
from diffusax.text.tokenizer import CLIPTokenizer
from diffusax.training.converting import check_channels
from diffusax.training.data.examples import caption_ids
from diffusax.training.denoising import ids_name


@dataclasses.dataclass(frozen=True)
class BaseModel:
    """A checkpoint in diffusers' layout without its parameters, which `load` reads."""

    folder: Path
    family: Family
    networks: dict[str, Network]
    """By the names in the checkpoint; the UNet as it is trained."""
    tokenizers: dict[str, CLIPTokenizer]
    scheduler: Scheduler
    options: dict[str, Any]
    """Those in model_index.json that the family reads."""

    @classmethod
    def open(
        cls, path_or_repo: str, *, prediction_type: str | None = None, edits: bool = False
    ) -> "BaseModel":
        """The checkpoint in a folder or of a Hub repository.

        Args:
            path_or_repo: which.
            prediction_type: instead of the scheduler's own.
            edits: whether the UNet is to take the latents of another picture besides, as
                InstructPix2Pix's does; one that does not is widened.

        Raises:
            ValueError: it cannot be had or read, or is of another kind; says why.
        """
        folder = resolve(path_or_repo)
        family = class_for(DiffusionPipeline, folder, DiffusionPipeline).family
        _, listed, stored = read_model_index(folder)
        tokenizers, encoders = zip(*family.text)
        names = ("unet", "vae", *encoders)
        missing = [n for n in (*names, *tokenizers, "scheduler") if n not in listed]
        if missing:
            raise ValueError(f"{folder / 'model_index.json'} has no {' and no '.join(missing)}")
        networks = {name: read_network(folder / name) for name in names}
        unet, latents = networks["unet"], networks["vae"].config.latent_channels
        check_channels(path_or_repo, unet.config.in_channels, latents, edits=edits)
        if edits:
            networks["unet"] = widen_network(unet, 2 * latents)
        options = dict(family.options)
        return cls(
            folder,
            family,
            networks,
            {name: CLIPTokenizer.from_folder(folder / name) for name in tokenizers},
            _scheduler(folder, listed["scheduler"][1], prediction_type),
            {**options, **{k: v for k, v in stored.items() if k in options}},
        )

    def with_controlnet(self, path_or_repo: str) -> "BaseModel":
        """With a ControlNet among the networks: that of a folder or repository, or, of an empty
        name, one like the UNet's encoder.

        Raises:
            ValueError: it cannot be had or read, or does not suit the checkpoint; says why.
        """
        network = controlnet_of(self.networks["unet"])
        if path_or_repo:
            network = read_network(resolve(path_or_repo))
            if network.class_name != "ControlNetModel":
                raise ValueError(f"{path_or_repo} holds a {network.class_name}, no ControlNetModel")
        if network.config.downsampling != self.factor:
            raise ValueError(
                f"the ControlNet has {network.config.downsampling} pixels per latent, the "
                f"autoencoder of {self.folder} {self.factor}"
            )
        return dataclasses.replace(self, networks={**self.networks, "controlnet": network})

    def load(self, name: str, dtype: Any = "float32", *, device: Any = None) -> Model:
        """A network with its parameters, on a device or spread over a mesh."""
        stored = load_network(self.folder / name, dtype=dtype, device=device)
        network = self.networks[name]
        if stored.network == network:
            return stored
        return Model(network, widen_params(stored.params, network.config.in_channels))

    def tokenize(self, caption: str) -> dict[str, np.ndarray]:
        """A caption's ids for each text encoder, t int32, by their names in a batch."""
        return {ids_name(k): caption_ids(v, caption) for k, v in self.tokenizers.items()}

    def components(self, params: dict[str, Params], **options: Any) -> Components:
        """What the tasks of `diffusax.pipelines` draw with.

        options: in the place of those in model_index.json.
        """
        return Components(
            self.family,
            self.networks,
            params,
            dict(self.tokenizers),
            self.scheduler,
            {**self.options, **options},
        )

    @property
    def text_encoders(self) -> Sequence[str]:
        """The names of the text encoders."""
        return [encoder for _, encoder in self.family.text]

    @property
    def micro_conditioned(self) -> bool:
        """Whether the UNet is told the sizes of pictures."""
        return self.family.added is not None

    @property
    def factor(self) -> int:
        """Pixels per latent, in each direction."""
        return self.networks["vae"].config.downsampling

    @property
    def default_size(self) -> int:
        """The side in pixels that the UNet was trained at."""
        size = self.networks["unet"].config.sample_size or 64
        return (size if isinstance(size, int) else max(size)) * self.factor


def _scheduler(folder: Path, class_name: str, prediction_type: str | None) -> Scheduler:
    config: dict[str, Any] = load_json(folder / "scheduler" / "scheduler_config.json")
    changed = {} if prediction_type is None else {"prediction_type": prediction_type}
    scheduler = scheduler_from_config({"_class_name": class_name, **config}, **changed)
    if not hasattr(scheduler, "alphas_cumprod"):
        raise ValueError(
            f"{folder} has the scheduler {class_name}, which has no alphas_cumprod to add noise "
            "with; training needs a checkpoint with discrete timesteps"
        )
    return scheduler
