"""The checkpoint that a text-to-image training starts from."""

import dataclasses
from pathlib import Path
from typing import Any

from diffusax.checkpoints import load_network, read_model_index, resolve
from diffusax.checkpoints.networks import read_network
from diffusax.files import load_json
from diffusax.models.network import Model, Network
from diffusax.pipelines import DiffusionPipeline
from diffusax.pipelines.families import STABLE_DIFFUSION, Family
from diffusax.pipelines.loading import class_for
from diffusax.samplers import Scheduler, scheduler_from_config
from diffusax.text.tokenizer import CLIPTokenizer


@dataclasses.dataclass(frozen=True)
class BaseModel:
    """A checkpoint in diffusers' layout without its parameters, which `load` reads."""

    folder: Path
    family: Family
    networks: dict[str, Network]
    tokenizer: CLIPTokenizer
    scheduler: Scheduler

    @classmethod
    def open(cls, path_or_repo: str, *, prediction_type: str | None = None) -> "BaseModel":
        """The checkpoint in a folder or of a Hub repository.

        prediction_type: instead of the scheduler's own.

        Raises:
            ValueError: it cannot be had or read, or is of another family; says why.
        """
        folder = resolve(path_or_repo)
        family = class_for(DiffusionPipeline, folder, DiffusionPipeline).family
        if family is not STABLE_DIFFUSION:
            raise ValueError(
                f"text to image trains Stable Diffusion 1.x and 2.x; {path_or_repo} is "
                f"{family.name}"
            )
        _, listed, _ = read_model_index(folder)
        missing = [n for n in ("vae", "unet", "text_encoder", "tokenizer") if n not in listed]
        if missing:
            raise ValueError(f"{folder / 'model_index.json'} has no {' and no '.join(missing)}")
        networks = {name: read_network(folder / name) for name in ("unet", "vae", "text_encoder")}
        channels, latents = (
            networks["unet"].config.in_channels,
            networks["vae"].config.latent_channels,
        )
        if channels != latents:
            raise ValueError(
                f"text to image needs a UNet with {latents} input channels; that of {path_or_repo} "
                f"has {channels}"
            )
        config: dict[str, Any] = load_json(folder / "scheduler" / "scheduler_config.json")
        changed = {} if prediction_type is None else {"prediction_type": prediction_type}
        return cls(
            folder,
            family,
            networks,
            CLIPTokenizer.from_folder(folder / "tokenizer"),
            scheduler_from_config({"_class_name": listed["scheduler"][1], **config}, **changed),
        )

    def load(self, name: str, dtype: Any = "float32", *, device: Any = None) -> Model:
        """A network with its parameters, on a device or spread over a mesh."""
        return load_network(self.folder / name, dtype=dtype, device=device)

    @property
    def factor(self) -> int:
        """Pixels per latent, in each direction."""
        return self.networks["vae"].config.downsampling

    @property
    def default_size(self) -> int:
        """The side in pixels that the UNet was trained at."""
        size = self.networks["unet"].config.sample_size or 64
        return (size if isinstance(size, int) else max(size)) * self.factor
