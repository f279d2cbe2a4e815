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
from diffusax.training.converting import check_channels
from diffusax.training.data.examples import clean_caption
from diffusax.training.denoising import LENGTHS, ids_name


@dataclasses.dataclass(frozen=True)
class BaseModel:
    """A checkpoint in diffusers' layout without its parameters, which `load` reads."""

    folder: Path
    family: Family
    networks: dict[str, Network]
    """By the names in the checkpoint; the denoiser as it is trained."""
    tokenizers: dict[str, Any]
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
            edits: whether the denoiser is to take the latents of another picture besides, as
                InstructPix2Pix's does; one that does not is widened.

        Raises:
            ValueError: it cannot be had or read, or is of another kind; says why.
        """
        folder = resolve(path_or_repo)
        family = class_for(DiffusionPipeline, folder).family
        _, listed, stored = read_model_index(folder)
        names = family.names("denoiser", "autoencoder", "text_encoder")
        tokenizers = [c for c in family.components if c.role == "tokenizer"]
        missing = [c.name for c in family.components if c.name not in listed]
        if missing:
            raise ValueError(f"{folder / 'model_index.json'} has no {' and no '.join(missing)}")
        networks = {name: read_network(folder / name) for name in names}
        (denoiser,), (vae,) = family.names("denoiser"), family.names("autoencoder")
        network, latents = networks[denoiser], family.latents(networks[vae].config).channels
        check_channels(path_or_repo, network.config.in_channels, latents, edits=edits)
        if edits:
            networks[denoiser] = widen_network(network, 2 * latents)
        options = dict(family.options)
        return cls(
            folder,
            family,
            networks,
            {c.name: c.kind.from_folder(folder / c.name) for c in tokenizers},
            _scheduler(folder, family.scheduler_name, listed, prediction_type),
            {**options, **{k: v for k, v in stored.items() if k in options}},
        )

    def with_controlnet(self, path_or_repo: str) -> "BaseModel":
        """With a ControlNet among the networks: that of a folder or repository, or, of an empty
        name, one like the denoiser's encoder.

        Raises:
            ValueError: it cannot be had or read, or does not suit the checkpoint; says why.
        """
        network = controlnet_of(self.networks[self.denoiser])
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
        """A caption's tokens by their names in a batch: ids for each text encoder, t int32."""
        names = [encoder.tokenizer for encoder in self.family.text_encoders]
        tokenizers = [self.tokenizers[name] for name in names]
        tokens = self.family.tokenize_caption(tokenizers, clean_caption(caption))
        found = dict(zip(map(ids_name, names), tokens.ids))
        return found if tokens.lengths is None else {**found, LENGTHS: tokens.lengths}

    def components(self, params: dict[str, Params], **options: Any) -> Components:
        """What the tasks of `diffusax.pipelines` draw with.

        options: in the place of those in model_index.json.
        """
        return Components.of(
            self.family,
            self.networks,
            params,
            tokenizers=dict(self.tokenizers),
            scheduler=self.scheduler,
            options={**self.options, **options},
        )

    @property
    def denoiser(self) -> str:
        """The name of the network that predicts."""
        return self.family.names("denoiser")[0]

    @property
    def autoencoder(self) -> str:
        """The name of the autoencoder."""
        return self.family.names("autoencoder")[0]

    @property
    def text_encoders(self) -> Sequence[str]:
        """The names of the text encoders."""
        return self.family.names("text_encoder")

    @property
    def micro_conditioned(self) -> bool:
        """Whether the denoiser is told the sizes of images."""
        return self.family.micro_conditioned

    @property
    def factor(self) -> int:
        """Pixels per latent, in each direction."""
        return self.family.latents(self.networks[self.autoencoder].config).factor

    @property
    def default_size(self) -> int:
        """The side in pixels that the denoiser was trained at."""
        denoiser = self.family.denoiser({self.denoiser: self.networks[self.denoiser]})
        return max(denoiser.sample_size) * self.factor


def _scheduler(
    folder: Path, name: str, listed: dict[str, tuple[str, str]], prediction_type: str | None
) -> Scheduler:
    class_name = listed[name][1]
    config: dict[str, Any] = load_json(folder / name / "scheduler_config.json")
    changed = {} if prediction_type is None else {"prediction_type": prediction_type}
    scheduler = scheduler_from_config({"_class_name": class_name, **config}, **changed)
    try:
        scheduler.forward_process  # noqa: B018
    except ValueError:
        raise ValueError(
            f"{folder} has the scheduler {class_name}, whose networks diffusax cannot train; "
            "training needs discrete noise levels or flow matching"
        ) from None
    return scheduler
