"""The checkpoint that a denoiser's training starts from, and the examples that it reads."""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from diffusax.checkpoints import read_call_defaults, read_model_index, resolve
from diffusax.checkpoints.files import CallDefaults
from diffusax.checkpoints.networks import read_network
from diffusax.models.encoders.token_table import EncoderWithWords
from diffusax.models.network import Network, Params
from diffusax.models.transformers.references import BLIND
from diffusax.models.unet.derived import controlnet_of, widen_network, widen_params
from diffusax.networks import Model, load_network
from diffusax.pipelines import DiffusionPipeline
from diffusax.pipelines.components.adapters import resolve_adapters
from diffusax.pipelines.components.components import Components
from diffusax.pipelines.components.loading import (
    class_for,
    component_weights,
    left_out,
    load_scheduler,
)
from diffusax.pipelines.components.references import learned_layout, with_layout
from diffusax.pipelines.families import Family
from diffusax.pipelines.families.denoiser import Denoiser
from diffusax.pipelines.plan.arguments import Call
from diffusax.pipelines.plan.plan import HiddenLayers
from diffusax.pipelines.run.images import decode_result
from diffusax.pipelines.run.sample import run_plan
from diffusax.pipelines.tasks.tasks import Task
from diffusax.samplers import Scheduler
from diffusax.training.data.buckets import Size
from diffusax.training.data.examples import (
    LENGTHS,
    clean_caption,
    ids_name,
)
from diffusax.training.recipes.editors import check_channels, instruct_class
from diffusax.training.step.seen_images import SeenImages, seen_images


@dataclasses.dataclass(frozen=True)
class BaseModel:
    """The networks, tokenizers and scheduler of a checkpoint; `load` reads the parameters."""

    folder: Path
    family: Family
    networks: dict[str, Network]
    """The networks by their names in the checkpoint; the denoiser has the config it is trained
    with."""
    tokenizers: dict[str, Any]
    scheduler: Scheduler
    options: dict[str, Any]
    """The options in model_index.json that the family reads."""
    defaults: CallDefaults = dataclasses.field(default_factory=dict)
    """The arguments of calls that suit the checkpoint, see `of_texts`."""

    @classmethod
    def open(
        cls,
        path_or_repo: str,
        *,
        prediction_type: str | None = None,
        edits: bool = False,
        references_layout: str | None = None,
    ) -> "BaseModel":
        """Opens the checkpoint in a folder or of a Hub repository.

        Args:
            path_or_repo: a folder in diffusers' layout, or a Hub repository id.
            prediction_type: the prediction type, instead of the scheduler's own.
            edits: whether the denoiser takes the latents of another image as further input
                channels, as InstructPix2Pix's does; a denoiser that does not is widened, unless
                its family looks at images.
            references_layout: with edits, the layout by which a network of text to image learns to
                look at images; by default its own, or "blind".

        Raises:
            ValueError: it cannot be found or read, or is of another kind; says why.
        """
        folder = resolve(path_or_repo)
        family = class_for(DiffusionPipeline, folder).family
        if not family.text_encoders:
            raise ValueError(
                f"{path_or_repo} is {family.name}, which reads no texts; use "
                "`diffusax train unconditional`"
            )
        if family.draws_videos:
            raise ValueError(
                f"{path_or_repo} is {family.name}, of videos; use `diffusax train text-to-video`"
            )
        _, listed, stored = read_model_index(folder)
        names = family.names("denoiser", "autoencoder", "text_encoder")
        tokenizers = [c for c in family.components if c.role == "tokenizer"]
        missing = [c.name for c in family.components if c.name not in listed and c.make is None]
        if missing:
            raise ValueError(f"{folder / 'model_index.json'} has no {' and no '.join(missing)}")
        networks = {name: read_network(folder / name, family.changes(name)) for name in names}
        (denoiser,), (vae,) = family.names("denoiser"), family.names("autoencoder")
        latents = family.latents(networks[vae].config).channels
        network = family.denoiser({denoiser: networks[denoiser]})
        if network.targets(np.zeros(1), 1) is not None:
            raise ValueError(
                f"{path_or_repo} is {family.name}, distilled so that its denoiser reads where a "
                "step leads to, which no loss here is for; train the checkpoint that is not "
                "distilled, whose LoRAs fit both"
            )
        channels = network.in_channels
        wanted = family.edits.channels(latents) if edits else latents
        widens = wanted > latents
        if widens and instruct_class(family) is None:
            raise ValueError(
                f"{path_or_repo} is {family.name}, which cannot be trained to edit images; start "
                "from Stable Diffusion, FLUX.1 Kontext, FLUX.2 klein, FLUX.3 klein, Krea 2 or "
                "Z-Image"
            )
        check_channels(path_or_repo, channels, latents, edits=widens)
        if widens:
            networks[denoiser] = widen_network(networks[denoiser], wanted)
        if hasattr(networks[denoiser].config, "references_layout") and edits:
            layout = references_layout or learned_layout(networks[denoiser]) or BLIND
            networks[denoiser] = with_layout(networks[denoiser], layout)
        elif references_layout not in (None, own := network.references_layout):
            raise ValueError(
                f"references_layout={references_layout!r} cannot be for {family.name}, "
                f"{'which looks at no images' if own is None else f'whose layout is {own!r}'}; "
                "leave it out"
            )
        options = dict(family.options)
        changes = {} if prediction_type is None else {"prediction_type": prediction_type}
        return cls(
            folder,
            family,
            networks,
            {c.name: c.kind.from_folder(folder / c.name) for c in tokenizers},
            scheduler_of(family, folder, listed, **changes),
            {**options, **{k: v for k, v in stored.items() if k in options}},
            read_call_defaults(folder),
        )

    def with_controlnet(self, path_or_repo: str) -> "BaseModel":
        """Returns the checkpoint with a ControlNet among its networks.

        path_or_repo: a folder or repository with a ControlNet; an empty string makes a ControlNet
        with the config of the denoiser's encoder.

        Raises:
            ValueError: it cannot be found or read, or does not suit the checkpoint; says why.
        """
        if self.networks[self.denoiser].class_name != "UNet2DConditionModel":
            raise ValueError(
                f"{self.folder} is {self.family.name}, for which diffusax trains no ControlNets; "
                "start from Stable Diffusion"
            )
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

    def load(
        self, name: str, dtype: Any = "float32", *, device: Any = None, weights: Any = None
    ) -> Model:
        """Loads a network with its parameters, on a device or split over a mesh.

        weights: what the kernels of large networks are stored as, see `component_weights`.
        """
        options: dict[str, Any] = {"changes": self.family.changes(name), "device": device}
        options["weights"] = component_weights(weights, name, self.family.role(name))
        stored = load_network(self.folder / name, dtype=dtype, **options)
        network = self.networks[name]
        if stored.network.shapes == network.shapes:
            return stored.of_network(network)
        if isinstance(network, EncoderWithWords):
            return Model(network, network.with_initial_rows(stored.params))
        return Model(network, widen_params(stored.params, network.config.in_channels))

    def trained(self, name: str, params: Params) -> Model:
        """Returns the model of a network that was trained, to be saved."""
        model = Model(self.networks[name], params)
        model.left_out = left_out(self.folder / name, self.family.changes(name))
        return model

    def tokenize(self, caption: str) -> dict[str, np.ndarray]:
        """Returns a caption's tokens by their names in a batch: ids per text encoder, t int32."""
        names = [encoder.tokenizer for encoder in self.family.text_encoders]
        tokenizers = self.text_tokenizers
        length = self.defaults.get("max_sequence_length")
        own = {} if length is None else {"length": length}
        tokens = self.family.tokenize_caption(tokenizers, clean_caption(caption), **own)
        found = dict(zip(map(ids_name, names), tokens.ids))
        return found if tokens.lengths is None else {**found, LENGTHS: tokens.lengths}

    @property
    def text_tokenizers(self) -> list[Any]:
        """The tokenizers of the text encoders, in order."""
        return [self.tokenizers[encoder.tokenizer] for encoder in self.family.text_encoders]

    def seen_images(self, sizes: Sequence[Size]) -> SeenImages | None:
        """Returns where texts speak of images; None in a family whose text encoder reads none.

        sizes: their heights and widths in pixels.
        """
        return seen_images(self.family, tuple(self.text_tokenizers), tuple(sizes))

    def components(self, params: dict[str, Params], **options: Any) -> Components:
        """Returns the components for the tasks of `diffusax.pipelines`, with these parameters.

        options: replacements for those in model_index.json.
        """
        return Components.of(
            self.family,
            self.networks,
            params,
            tokenizers=dict(self.tokenizers),
            scheduler=self.scheduler,
            options={**self.options, **options},
        )

    def shift_of(self, size: Size) -> float:
        """Returns how far the scheduler moves the noise levels of images of a height and width.

        It is that of a call with the default number of steps, where they count, too.

        Raises:
            ValueError: the scheduler moves those of all images alike.
        """
        schedule = self.family.schedule_options
        options = {} if schedule is None else schedule(self.components({}), Call(), size)
        if (mu := options.get("mu")) is None:
            raise ValueError(
                f"shift_by_size cannot be for {self.folder}, whose scheduler moves the noise "
                "levels of all images alike; leave it out, or give timestep_shift"
            )
        linear = self.scheduler.config.get("time_shift_type") == "linear"
        return float(mu) if linear else math.exp(mu)

    @property
    def hidden_layers(self) -> HiddenLayers | None:
        """The hidden states that are a text's embeddings; see `Family.hidden_layers`."""
        if isinstance(own := self.defaults.get("text_encoder_out_layers"), list):
            return HiddenLayers(tuple(own))
        return self.family.hidden_layers(self)

    @property
    def of_texts(self) -> dict[str, Any]:
        """The arguments of a call by which it reads texts as the training does."""
        names = "max_sequence_length", "text_encoder_out_layers"
        return {name: self.defaults[name] for name in names if name in self.defaults}

    @property
    def denoiser(self) -> str:
        """The name of the denoiser's network."""
        return self.family.names("denoiser")[0]

    @property
    def autoencoder(self) -> str:
        """The name of the autoencoder."""
        return self.family.names("autoencoder")[0]

    @property
    def text_encoders(self) -> Sequence[str]:
        """The names of the text encoders."""
        return self.family.names("text_encoder")

    @functools.cached_property
    def factor(self) -> int:
        """The pixels per latent, in each direction."""
        return self.family.latents(self.networks[self.autoencoder].config).factor

    @property
    def multiple(self) -> int:
        """The pixels of which the sides of images are multiples: those of a latent or token."""
        return self.family.latents(self.networks[self.autoencoder].config).multiple

    @property
    def default_size(self) -> int:
        """The side in pixels that the denoiser was trained at."""
        return max(self._denoiser.sample_size) * self.factor

    @property
    def references_layout(self) -> str | None:
        """The layout by which the denoiser looks at images; see `Denoiser.references_layout`."""
        return self._denoiser.references_layout

    @property
    def _denoiser(self) -> Denoiser:
        return self.family.denoiser({self.denoiser: self.networks[self.denoiser]})


def scheduler_of(
    family: Family, folder: Path, listed: Mapping[str, tuple[str, str]], **changes: Any
) -> Scheduler:
    """Returns a checkpoint's scheduler, or the one that its family has for those without."""
    name = family.scheduler_name
    if name in listed:
        return read_scheduler(folder, name, listed[name][1], **changes)
    make: Any = next(c.make for c in family.components if c.name == name)
    scheduler: Scheduler = make()
    return scheduler.with_options(**changes) if changes else scheduler


def read_scheduler(folder: Path, name: str, class_name: str, **changes: Any) -> Scheduler:
    """Reads a checkpoint's scheduler as `load_scheduler`, and checks it for the training.

    Raises:
        ValueError: it cannot be read, or diffusax cannot train the networks that it is for.
    """
    scheduler = load_scheduler(folder, name, class_name, **changes)
    try:
        scheduler.forward_process  # noqa: B018
    except ValueError:
        raise ValueError(
            f"{folder} has the scheduler {class_name}, whose networks diffusax cannot train; "
            "training needs discrete noise levels or flow matching"
        ) from None
    return scheduler


def draw_images(c: Components, task: Task, call: Call) -> list[Image.Image]:
    """Returns the images of a call, as a pipeline would; of videos a list of frames for each.

    Raises:
        ValueError: the call cannot be.
    """
    c, call = resolve_adapters(c, call)
    run = task(c, call)
    images: list[Image.Image] = decode_result(c, call, run, run_plan(c, run, bar=_NO_BAR))[0]
    return images


_NO_BAR = {"disable": True}
