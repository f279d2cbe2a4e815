"""The base of the recipes that train a denoiser: its checkpoint, loss, validation and result."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh
from PIL import Image

from diffusax.checkpoints.networks import read_network
from diffusax.images.sheets import captioned
from diffusax.lora.trained import LoRA
from diffusax.lora.trained_files import lora_of_file, params_of_file, to_adapter, write_result
from diffusax.models.autoencoders.latents import latent_statistics
from diffusax.models.network import Network, Params, cast_shapes, initialize_params
from diffusax.networks import Model
from diffusax.pipelines import DiffusionPipeline
from diffusax.pipelines.plan.arguments import Call
from diffusax.pipelines.tasks.tasks import Task
from diffusax.runtime.devices.mesh import to_host
from diffusax.training.data.batches import DataConfig
from diffusax.training.data.buckets import Size
from diffusax.training.data.examples import picture_size
from diffusax.training.data.opening import log_buckets, open_images
from diffusax.training.data.sources import Source
from diffusax.training.data.summary import log_summary
from diffusax.training.options import require_options
from diffusax.training.recipes.base_model import BaseModel, draw_images
from diffusax.training.recipes.cached import CachedSource, is_cache
from diffusax.training.recipes.denoiser_config import DenoiserConfig
from diffusax.training.recipes.prompt_embeddings import embed_texts, embedding_shapes
from diffusax.training.step.denoising import STATISTICS, DenoisingLoss
from diffusax.training.step.step import Batch

ZERO_AT_START = frozenset(["conv2", "proj_out", "conv_out"])
"""The ends of residual branches, which start as identities (Dhariwal and Nichol 2021's code)."""

_OF_ROWS = frozenset(
    [
        *("path", "own_part", "workers", "threads"),
        *("streaming", "streaming_cache", "streaming_window"),
    ]
)
"""The options of a data set that say nothing of its images or captions."""


class Denoiser:
    """A checkpoint's denoiser in training, with the configs read and the data set opened.

    Recipes derive from it and define their examples, validation images and results.
    """

    config: DenoiserConfig
    pipeline_class: Any = DiffusionPipeline
    """The class of the result's pipeline; by default the checkpoint's own."""

    def __init__(
        self,
        config: DenoiserConfig,
        columns: tuple[str, ...],
        *,
        edits: bool = False,
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
            controlnet: the ControlNet that is trained instead of the denoiser; see
                `BaseModel.with_controlnet`.
            compile_only: whether no weights are read, so that a cache's are not compared.
            dropout: options of `DenoisingLoss`.
        """
        require_options(config, ("model", "data.path"))
        self.config, data = config, config.data
        prediction_type = config.prediction_type
        self.base = base = BaseModel.open(
            config.model, prediction_type=prediction_type, edits=edits
        )
        if controlnet is not None:
            self.base = base = base.with_controlnet(controlnet)
        self.size = picture_size(data, base.default_size, base.multiple)
        self.source: Source
        self.cached, self.embedded = is_cache(data.path), False
        self.prompts: dict[str, str] = {}
        """Texts that are embedded once, by their names among the frozen parameters; a recipe with
        some has `embedded`, too, which says that steps have embeddings in the place of tokens."""
        if self.cached:
            _check_without_pictures(data)
            plain = "text-to-image" if controlnet is None else "controlnet"
            recipe = "instruct-pix2pix" if edits else plain
            check = not compile_only
            self.source = cache = CachedSource.open(data.path, base, recipe=recipe, check=check)
            log_summary(cache, tuple(cache.shapes), {}, place=f"{data.path}, latents")
            _check_parts(data, cache)
            self.embedded = base.family.embedding_columns[0] in cache.shapes
        else:
            image_column = columns[-1] if edits else columns[0]
            self.source = open_images(
                data,
                columns,
                image_column=image_column,
                side=self.size,
                factor=base.multiple,
                leave_out=config.output,
            )
        if self.embedded and config.train_text_encoder:
            raise ValueError(
                f"{data.path} holds text embeddings, so train_text_encoder has nothing to train; "
                "write it again without --text-embeddings"
            )
        self._check_validation()
        encoders = base.text_encoders if config.train_text_encoder else ()
        self.components = (base.denoiser if controlnet is None else "controlnet", *encoders)
        self.lora = self._open_lora(edits) if config.lora.on else None
        self.denoising = DenoisingLoss.of(
            config, base.family, base.networks, base.scheduler, lora=self.lora, **dropout
        )

    @property
    def networks(self) -> Mapping[str, Network]:
        """The checkpoint's networks, by component."""
        return self.base.networks

    def shapes(self) -> Params:
        """Returns the shapes of the trained parameters."""
        if self.lora is not None:
            return self.lora.shapes(self.base.networks)
        return {name: self.base.networks[name].shapes for name in self.components}

    def trained(self, mesh: Mesh | None = None) -> Params:
        """Returns the trained parameters, float32."""
        if self.lora is not None:
            return self._first_adapters(self.lora, mesh)
        if not self.config.from_scratch:
            return {name: self.load(name, device=mesh) for name in self.components}
        return {
            name: initialize_params(
                self.base.networks[name].shapes,
                seed=self.config.seed + i,
                zero=ZERO_AT_START if name == self.base.denoiser else (),
            )
            for i, name in enumerate(self.components)
        }

    def frozen(self, mesh: Mesh | None = None) -> Params:
        """Returns the frozen networks in the dtype of the computation, the empty caption, and the
        embeddings of `prompts`.

        The statistics of latents are float32, where the autoencoder has some.
        """
        base, dtype = self.base, self.config.compute_dtype
        # Text encoders that are used once have gone when the others come.
        texts = self._texts(functools.partial(embed_texts, mesh=mesh))
        frozen = {name: self.load(name, dtype, device=mesh) for name in self._frozen_names()}
        if latent_statistics(base.networks[base.autoencoder].shapes) is not None:
            frozen[STATISTICS] = latent_statistics(self.load(base.autoencoder))
        return {**frozen, **texts}

    def load(self, name: str, dtype: Any = "float32", *, device: Any = None) -> Params:
        """Loads the parameters of a network, on a device or split over a mesh."""
        return self.base.load(name, dtype, device=device).params

    def frozen_shapes(self) -> Params:
        """Returns the shapes of what `frozen` returns; no parameters are read."""
        networks, dtype = self.base.networks, self.config.compute_dtype
        frozen = {name: cast_shapes(networks[name].shapes, dtype) for name in self._frozen_names()}
        statistics = latent_statistics(networks[self.base.autoencoder].shapes)
        if statistics is not None:
            frozen[STATISTICS] = statistics
        return {**frozen, **jax.eval_shape(lambda texts: texts, self._texts(embedding_shapes))}

    def loss(self, trained: Params, frozen: Params, batch: Batch, keys: jax.Array) -> jax.Array:
        """Returns the loss of each example, b; see `DenoisingLoss`."""
        return self.denoising(trained, frozen, batch, keys)

    def save(self, trained: Params, folder: Path) -> None:
        """Saves what was trained, in float32: the adapters, or see `save_networks`."""
        if self.lora is None:
            self.save_networks(trained, folder)
            return
        kind, encoders = self.config.lora.format, len(self.base.text_encoders)
        own = self.base.networks
        write_result(self.lora, trained, folder, kind=kind, encoders=encoders, networks=own)

    def save_networks(self, trained: Params, folder: Path) -> None:
        """Saves the checkpoint with its trained networks replaced, all in float32."""
        models: dict[str, Any] = {
            name: Model(self.base.networks[name], trained[name]) for name in self.components
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
        self,
        trained: Params,
        frozen: Params,
        task: Task,
        **arguments: Any,
    ) -> list[Image.Image]:
        """Generates an image for each validation prompt, with the seed of the run.

        arguments: arguments of the call, besides those of all recipes or in their place.
        """
        config, lora = self.config, self.lora
        params = {**frozen, **trained} if lora is None else frozen
        params = {name: own for name, own in params.items() if name in self.base.networks}
        # Adapters are drawn with the checkpoint as it is, its options too.
        options = self.result_options() if lora is None else {}
        components = self.base.components(params, **options)
        if lora is not None:
            networks = {name: self.base.networks[name] for name in self.components}
            components.adapters.add("lora", to_adapter(lora, to_host(trained), networks), networks)
            arguments["adapters"] = {"lora": 1.0}
        height, width = self.validation_size
        own = {
            "prompt": list(config.validation.prompts),
            "height": height,
            "width": width,
            "num_inference_steps": config.validation.steps,
            "guidance_scale": config.validation.guidance,
            "seed": config.seed,
        }
        call = Call(**{**own, **arguments})
        return draw_images(components, task, call)

    @property
    def validation_size(self) -> Size:
        """The height and width in pixels of the validation images."""
        options = self.config.validation
        return options.height or self.size, options.width or self.size

    def captioned(self, images: list[Image.Image]) -> list[Image.Image]:
        """Returns the images with the validation prompts beneath."""
        return captioned(images, self.config.validation.prompts)

    def _frozen_names(self) -> list[str]:
        drawn = bool(self.config.validation.every)
        names = [self.base.denoiser, *([self.base.autoencoder] if drawn or not self.cached else [])]
        if drawn or not self.embedded:
            names += self.base.text_encoders
        if self.lora is not None:
            return list(dict.fromkeys([*names, *self.components]))
        return [name for name in names if name not in self.components]

    def _open_lora(self, edits: bool) -> LoRA:
        """Returns the adapters to train."""
        base, options = self.base, self.config.lora
        if edits and read_network(base.folder / base.denoiser) != base.networks[base.denoiser]:
            raise ValueError(
                f"{base.folder} is no InstructPix2Pix checkpoint, so that its denoiser cannot see "
                "the picture to edit, and adapters would not change that; train without lora.rank, "
                "or start from a checkpoint that edits"
            )
        networks = {name: base.networks[name] for name in self.components}
        if options.path is None:
            return LoRA.of(options, networks)
        known = {**networks, **{name: base.networks[name] for name in base.text_encoders}}
        encoders = self.config.train_text_encoder
        return lora_of_file(
            options.path, known, train_text_encoder=encoders, dropout=options.dropout
        )

    def _first_adapters(self, lora: LoRA, mesh: Mesh | None) -> Params:
        options, networks = self.config.lora, self.base.networks
        if options.path is not None:
            return params_of_file(options.path, {name: networks[name] for name in self.components})

        def load(name: str) -> Params:
            return self.load(name, device=mesh)

        return lora.initial(options, networks, seed=self.config.seed, load=load)

    def _texts(self, embed: Callable[..., Params]) -> Params:
        """Returns the empty caption and the embeddings of `prompts`.

        embed: the function `embed_texts`, or one with its arguments.
        """
        base, dtype = self.base, self.config.compute_dtype
        if not self.embedded:
            return {"empty": base.tokenize("")}
        # The embeddings in caches are those of float32 encoders.
        encoded_in = dtype if self.prompts else "float32"
        return embed(base, {"empty": "", **self.prompts}, dtype, encoded_in=encoded_in)

    def _check_validation(self) -> None:
        options = self.config.validation
        if options.every and not options.prompts:
            raise ValueError(
                f"validation.every={options.every} has nothing to draw; give validation.prompts"
            )
        if options.prompts and not options.every:
            raise ValueError("validation.prompts are never drawn; give validation.every")
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


def _check_parts(data: DataConfig, cache: CachedSource) -> None:
    """Raises ValueError where processes would step through sizes of their own; logs the sizes."""
    if cache.buckets is None:
        return
    if data.own_part:
        raise ValueError(
            f"data.own_part cannot be with {data.path}, as all processes step through the same "
            "sizes; put the cache where all of them see it"
        )
    log_buckets(cache.buckets)


def _check_without_pictures(data: DataConfig) -> None:
    """Raises ValueError where options for images are given with a cache of latents."""
    names = [field.name for field in dataclasses.fields(data) if field.name not in _OF_ROWS]
    given = [data.group + n for n in names if getattr(data, n) != getattr(type(data), n)]
    if given:
        raise ValueError(
            f"{data.path} holds latents, on which {' and '.join(given)} can do nothing; give "
            "them to cache-latents"
        )
