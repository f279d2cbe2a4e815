"""The base of the recipes that train a denoiser: its checkpoint, loss, validation and result."""

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import jax
import numpy as np
from jax.sharding import Mesh
from PIL import Image

from diffusax.checkpoints.networks import read_network
from diffusax.images.sheets import captioned
from diffusax.lora.trained import (
    TrainedLora,
    params_of_file,
    plan_of_file,
    to_lora,
    write_result,
)
from diffusax.models.autoencoders.latents import latent_statistics
from diffusax.models.network import Network, Params, cast_params, initialize_params
from diffusax.pipelines import DiffusionPipeline
from diffusax.pipelines.components.loading import component_shapes
from diffusax.pipelines.families.policies import References
from diffusax.pipelines.plan.arguments import Call
from diffusax.pipelines.tasks import tasks
from diffusax.pipelines.tasks.tasks import Task
from diffusax.runtime.devices.lowering import lowering_for, lowering_platforms
from diffusax.runtime.devices.mesh import to_host
from diffusax.runtime.switches import in_mesh
from diffusax.training.config import DenoiserConfig
from diffusax.training.data.batches import Element
from diffusax.training.data.buckets import Size
from diffusax.training.data.examples import image_size
from diffusax.training.data.opening import open_images
from diffusax.training.data.sources import Source
from diffusax.training.options import require_options
from diffusax.training.recipes.base_model import BaseModel, draw_images
from diffusax.training.recipes.cached import is_cache, open_cache
from diffusax.training.recipes.row_examples import caption_example
from diffusax.training.step.denoising import STATISTICS, DenoisingLoss
from diffusax.training.step.encoding import embedding_entries, encode_captions
from diffusax.training.step.step import Batch

ZERO_AT_START = frozenset(["conv2", "proj_out", "conv_out"])
"""The ends of residual branches, which start as identities (Dhariwal and Nichol 2021's code)."""


class Denoiser:
    """A checkpoint's denoiser in training, with the configs read and the data set opened.

    Recipes derive from it. Its examples, validation images and result are those of text to image.
    """

    name: str
    config: DenoiserConfig
    pipeline_class: Any = DiffusionPipeline
    """The class of the result's pipeline; by default the checkpoint's own."""
    cached_as: ClassVar[str] = "text-to-image"
    """The recipe of `CacheConfig` whose caches it reads."""
    make_example: ClassVar[Callable[..., Element]] = staticmethod(caption_example)
    """Makes an example of a row of images; the arguments are those of `caption_example`."""

    def __init__(
        self,
        config: DenoiserConfig,
        columns: tuple[str, ...],
        *,
        edits: bool = False,
        references_layout: str | None = None,
        controlnet: str | None = None,
        compile_only: bool = False,
        **dropout: Any,
    ):
        """Opens the checkpoint and the data set, and makes the loss.

        Args:
            config: the options.
            columns: the columns that are read from the data set: first that of the images to learn,
                of edits the last.
            edits: see `BaseModel.open`.
            references_layout: see `BaseModel.open`.
            controlnet: the ControlNet that is trained instead of the denoiser; see
                `BaseModel.with_controlnet`.
            compile_only: whether the recipe is compiled and not trained, so that no weights are
                read: a cache is not compared with the checkpoint's networks.
            dropout: options of `DenoisingLoss`.
        """
        require_options(config, ("model", "data.path"))
        self.config, data = config, config.data
        self.base = base = self._open_model(edits=edits, references_layout=references_layout)
        self.references_layout = base.references_layout if edits else None
        """The layout by which it learns to look at images; None where it does not."""
        if controlnet is not None:
            self.base = base = base.with_controlnet(controlnet)
        self.size = image_size(data, base.default_size, base.multiple)
        self.source: Source
        self.cached, self.embedded = is_cache(data.path), False
        self.prompts: dict[str, str] = {}
        """Texts that are embedded once, by their names among the frozen parameters; a recipe with
        some sets `embedded`, too: its steps have embeddings instead of tokens."""
        if self.cached:
            check = not compile_only
            self.source = cache = open_cache(data, base, recipe=self.cached_as, check=check)
            self.embedded = base.family.embedding_columns[0] in cache.shapes
        else:
            self.source = self._open_data(columns, edits=edits)
        if self.embedded and config.train_text_encoder:
            raise ValueError(
                f"{data.path} holds text embeddings, so train_text_encoder has nothing to train; "
                "write it again without --text-embeddings"
            )
        self._check_validation()
        if config.shift_by_size:
            base.shift_of((self.size, self.size))
        encoders = base.text_encoders if config.train_text_encoder else ()
        self.components = (base.denoiser if controlnet is None else "controlnet", *encoders)
        self.lora = self._open_lora(edits) if config.lora.on else None
        self.denoising = DenoisingLoss.of(
            config,
            base.family,
            base.networks,
            base.scheduler,
            lora=self.lora,
            layers=base.hidden_layers,
            tokenizers=tuple(base.text_tokenizers),
            shift_of=base.shift_of if config.shift_by_size else None,
            **dropout,
        )

    def _open_model(self, **options: Any) -> BaseModel:
        """Opens the checkpoint. options: those of `BaseModel.open`."""
        config = self.config
        return BaseModel.open(config.model, prediction_type=config.prediction_type, **options)

    def _open_data(self, columns: tuple[str, ...], *, edits: bool) -> Source:
        """Opens the data set, which is no cache; see `open_images`."""
        return open_images(
            self.config.data,
            columns,
            image_column=columns[-1] if edits else columns[0],
            side=self.size,
            factor=self.base.multiple,
            leave_out=self.config.output,
            references=self.base.family.edits.most if edits else 1,
            policy=self._policy(),
        )

    def _policy(self) -> References | None:
        """Returns how images to look at are sized; see `open_images`."""
        return None

    @property
    def networks(self) -> Mapping[str, Network]:
        """The checkpoint's networks, by component."""
        return self.base.networks

    def shapes(self) -> Params:
        if self.lora is not None:
            return self.lora.shapes(self.networks)
        return {name: self.networks[name].shapes for name in self.components}

    def trained(self, mesh: Mesh | None = None) -> Params:
        if self.lora is not None:
            return self._first_adapters(self.lora, mesh)
        if not self.config.from_scratch:
            return {name: self.load(name, device=mesh) for name in self.components}
        return {
            name: initialize_params(
                self.networks[name].shapes,
                seed=self.config.seed + i,
                zero=ZERO_AT_START if name == self.base.denoiser else (),
            )
            for i, name in enumerate(self.components)
        }

    def frozen(self, mesh: Mesh | None = None) -> Params:
        """Returns the frozen networks in the dtype of the computation, and the texts' parameters.

        The statistics of latents are float32, where the autoencoder has some.
        """
        base, dtype, weights = self.base, self.config.compute_dtype, self.config.weights

        def load(name: str, encoded_in: str) -> Params:
            return self.load(name, encoded_in, device=mesh, weights=weights)

        def run(embed: Callable[..., Params], *arguments: Params) -> Params:
            with in_mesh(mesh), lowering_for(lowering_platforms(mesh)):
                return to_host(jax.jit(embed)(*arguments))

        # Text encoders that are used once have gone when the others come.
        texts = self._texts(load, run)
        frozen = {name: load(name, dtype) for name in self._frozen_names()}
        if latent_statistics(self.networks[base.autoencoder].shapes) is not None:
            frozen[STATISTICS] = latent_statistics(self.load(base.autoencoder))
        return {**frozen, **texts}

    def frozen_shapes(self) -> Params:
        networks, dtype, family = self.networks, self.config.compute_dtype, self.base.family

        def load(name: str, encoded_in: str) -> Params:
            role, weights = family.role(name), self.config.weights
            return component_shapes(networks[name], encoded_in, weights, name, role)

        frozen = {name: load(name, dtype) for name in self._frozen_names()}
        statistics = latent_statistics(networks[self.base.autoencoder].shapes)
        if statistics is not None:
            frozen[STATISTICS] = statistics
        texts = self._texts(load, jax.eval_shape)
        return {**frozen, **jax.eval_shape(lambda texts: texts, texts)}

    def load(
        self, name: str, dtype: Any = "float32", *, device: Any = None, weights: Any = None
    ) -> Params:
        """Loads the parameters of a network, on a device or split over a mesh.

        weights: what the kernels of large networks are stored as, see `component_weights`.
        """
        return self.base.load(name, dtype, device=device, weights=weights).params

    def example(self, row: dict[str, Any], rng: np.random.Generator) -> Element:
        """Returns a row's images, tokens and, where the family has them, sizes.

        A row of a cache is returned as it is.
        """
        if self.cached:
            return row
        return self.make_example(self.config.data, self.base, self.size, row, rng)

    def loss(self, trained: Params, frozen: Params, batch: Batch, keys: jax.Array) -> jax.Array:
        """Returns the loss of each example, b; see `DenoisingLoss`."""
        return self.denoising(trained, frozen, batch, keys)

    def validate(self, trained: Params, frozen: Params) -> list[Image.Image]:
        """Generates images for the validation prompts, with the prompts beneath."""
        return self.captioned(self.draw(trained, frozen, tasks.text_to_image))

    def save(self, trained: Params, folder: Path) -> None:
        """Saves what was trained, in float32: the adapters, or see `save_networks`."""
        if self.lora is None:
            self.save_networks(trained, folder)
            return
        kind, encoders = self.config.lora.format, len(self.base.text_encoders)
        write_result(
            self.lora,
            trained,
            folder,
            kind=kind,
            encoders=encoders,
            networks=self.networks,
            references_layout=self.references_layout,
        )

    def card(self) -> dict[str, Any]:
        return {"base_model": self.config.model, "pipeline_tag": "text-to-image"}

    def save_networks(self, trained: Params, folder: Path) -> None:
        """Saves the checkpoint with its trained networks replaced, all in float32."""
        models: dict[str, Any] = {
            name: self.base.trained(name, trained[name]) for name in self.components
        }
        pipe = self.pipeline_class.from_pretrained(
            self.base.folder, dtype="float32", scheduler=self.base.scheduler, **models
        )
        pipe.register_to_config(**self.result_options())
        pipe.save_pretrained(folder)

    def result_options(self) -> dict[str, Any]:
        """Returns the options in the result's model_index.json that are not the checkpoint's."""
        return {}

    def draw(
        self, trained: Params, frozen: Params, task: Task, **arguments: Any
    ) -> list[Image.Image]:
        """Generates an image for each validation prompt, with the seed of the run.

        arguments: arguments of the call, besides those of all recipes or in their place.
        """
        config, lora = self.config, self.lora
        params = {**frozen, **trained} if lora is None else frozen
        params = {name: own for name, own in params.items() if name in self.networks}
        # With adapters the checkpoint stays as it is, its options too.
        options = self.result_options() if lora is None else {}
        components = self.base.components(params, **options)
        if lora is not None:
            networks = {name: self.networks[name] for name in self.components}
            components.adapters.add("lora", to_lora(lora, to_host(trained), networks), networks)
            arguments["adapters"] = {"lora": 1.0}
        height, width = self.validation_size
        own = {
            "prompt": list(config.validation.prompts),
            "height": height,
            "width": width,
            "num_inference_steps": config.validation.steps,
            "guidance_scale": config.validation.guidance,
            "seed": config.seed,
            **self.base.of_texts,
        }
        return draw_images(components, task, Call(**{**own, **arguments}))

    @property
    def validation_size(self) -> Size:
        """The height and width in pixels of the validation images."""
        options = self.config.validation
        return options.height or self.size, options.width or self.size

    def captioned(self, images: list[Image.Image]) -> list[Image.Image]:
        """Returns the images with the validation prompts beneath."""
        return captioned(images, self.config.validation.prompts)

    def _frozen_names(self) -> list[str]:
        validates = bool(self.config.validation.every)
        names = [self.base.denoiser]
        if validates or not self.cached:
            names.append(self.base.autoencoder)
        if validates or not self.embedded:
            names += self.base.text_encoders
        if self.lora is not None:
            return list(dict.fromkeys([*names, *self.components]))
        return [name for name in names if name not in self.components]

    def _open_lora(self, edits: bool) -> TrainedLora:
        """Returns the adapters to train."""
        base, options = self.base, self.config.lora
        stored = read_network(base.folder / base.denoiser)
        if edits and stored.shapes != self.networks[base.denoiser].shapes:
            raise ValueError(
                f"{base.folder} is no InstructPix2Pix checkpoint, so that its denoiser cannot see "
                "the image to edit, and adapters would not change that; train without lora.rank, "
                "or start from a checkpoint that edits"
            )
        networks = {name: self.networks[name] for name in self.components}
        if options.path is None:
            return TrainedLora.of(options, networks)
        known = {**networks, **{name: self.networks[name] for name in base.text_encoders}}
        encoders = self.config.train_text_encoder
        return plan_of_file(
            options.path,
            known,
            train_text_encoder=encoders,
            dropout=options.dropout,
            references_layout=self.references_layout,
        )

    def _first_adapters(self, lora: TrainedLora, mesh: Mesh | None) -> Params:
        options, networks = self.config.lora, self.networks
        if options.path is not None:
            return params_of_file(options.path, {name: networks[name] for name in self.components})
        load = functools.partial(self.load, device=mesh)
        return lora.initial(options, networks, seed=self.config.seed, load=load)

    def _texts(self, load: Callable[[str, str], Params], run: Callable[..., Any]) -> Params:
        """Returns the parameters that stand for texts: the empty caption, and `prompts`.

        They are tokens; or the embeddings' entries in a batch without the axis b, where texts are
        embedded once.

        Args:
            load: returns a text encoder's parameters in a dtype, or their shapes.
            run: calls a function with its arguments, or returns the shapes of its result.
        """
        base, dtype = self.base, self.config.compute_dtype
        if not self.embedded:
            return {"empty": base.tokenize("")}
        known = getattr(self.source, "empty", {})
        if known and not self.prompts:
            # No text encoder has to be read for what a cache holds.
            return cast_params({"empty": known}, dtype)

        def embed(params: Params, tokens: Params) -> Params:
            def one(ids: Params) -> Params:
                batch = {name: x[None] for name, x in ids.items()}
                encoded = encode_captions(
                    base.family, base.networks, params, batch, base.hidden_layers
                )
                return {name: x[0] for name, x in embedding_entries(base.family, encoded).items()}

            return cast_params({name: one(ids) for name, ids in tokens.items()}, dtype)

        # The embeddings in caches are those of float32 encoders.
        encoded_in = dtype if self.prompts else "float32"
        params = {name: load(name, encoded_in) for name in base.text_encoders}
        texts = {"empty": "", **self.prompts}
        return run(embed, params, {name: base.tokenize(text) for name, text in texts.items()})

    def _check_validation(self) -> None:
        options = self.config.validation
        if options.every and not options.prompts:
            raise ValueError(
                f"validation.every={options.every} has nothing to show; give validation.prompts"
            )
        if options.prompts and not options.every:
            raise ValueError("validation.prompts are never shown; give validation.every")
        multiple = self.base.multiple
        for name, n in zip(("height", "width"), self.validation_size):
            if n % multiple:
                low = n // multiple * multiple
                raise ValueError(
                    f"validation.{name} must be divisible by {multiple}, the pixels per latent "
                    f"(got {n}); use {low} or {low + multiple}"
                )
        if options.every:
            scheduler = self.base.scheduler
            shifts = getattr(scheduler, "use_dynamic_shifting", False) and scheduler.needs_mu
            # Any shift does to see whether the scheduler takes so many steps.
            scheduler.schedule(options.steps, mu=1.0 if shifts else None)
