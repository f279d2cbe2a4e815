"""Trains DreamBooth (Ruiz et al. 2023): a checkpoint learns a subject from a few images.

The denoising loss of the subject's images with a prompt that names it, and that of images of its
class, which the checkpoint generates before the training, so that the class stays what it was.
Upstream: diffusers examples/dreambooth/train_dreambooth.py and train_dreambooth_lora.py.
"""

import dataclasses
from pathlib import Path
from typing import Annotated, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from msgspec import Meta

from diffusax.boundary.options import Count, Weight
from diffusax.models.network import Params
from diffusax.training.config import DenoiserConfig
from diffusax.training.data.batches import Element
from diffusax.training.data.buckets import SIZE, buckets_of
from diffusax.training.data.examples import LOSS_WEIGHTS, PRIOR, is_text, write_caption
from diffusax.training.data.image_files import IMAGE_SUFFIXES
from diffusax.training.data.options import CaptionedDataConfig
from diffusax.training.data.pairs import CLASS, INSTANCE, KeptImages, Pairs, Repeated
from diffusax.training.data.sources import Source
from diffusax.training.data.summary import log_summary
from diffusax.training.optimizers import FineTuningOptimizerConfig
from diffusax.training.options import require_options
from diffusax.training.recipes.cached import CachedSource, is_cache
from diffusax.training.recipes.class_images import (
    ClassImages,
    MissingImages,
    class_source,
)
from diffusax.training.recipes.denoiser import Denoiser
from diffusax.training.recipes.row_examples import caption_example
from diffusax.training.step.step import Batch

_CAPTION = "text"


@dataclasses.dataclass(frozen=True)
class DreamBoothDataConfig(CaptionedDataConfig):
    """A few images of a subject."""

    captions_may_lack: ClassVar[bool] = True
    caption_column: str = ""
    """The column with captions in the place of the instance prompt, which images without one
    keep; by default every image has the instance prompt."""


@dataclasses.dataclass(frozen=True)
class DreamBoothConfig(DenoiserConfig):
    """Teach a text-to-image model a subject from a few images of it."""

    steps: Count = 400
    """The number of updates of the parameters."""
    batch_size: Count = 4
    """The number of the subject's examples of an update, over all devices and microbatches; as many
    of the class come on top."""
    instance_data: str = ""
    """The images of the subject: another name of data.path."""
    instance_prompt: str = ""
    """What the images show, with a rare word for the subject: a photo of sks dog."""
    class_prompt: str = ""
    """What the subject is one of: a photo of dog. By default nothing is preserved."""
    class_data: str = ""
    """The folder with images of the class; the model generates those that it lacks. By
    default the folder class in the output folder."""
    class_images: Count = 200
    """The number of images of the class."""
    class_batch_size: Count = 4
    """The number of images of the class that are generated at a time."""
    class_steps: Annotated[int, Meta(ge=1, le=1000)] | None = None
    """The number of sampler steps for an image of the class; by default the pipeline's own."""
    class_guidance: Annotated[float, Meta(ge=0, le=1000)] | None = None
    """The guidance scale for images of the class; by default the pipeline's own."""
    prior_loss_weight: Weight = 1.0
    """What the loss of the class is multiplied by."""
    data: DreamBoothDataConfig = dataclasses.field(default_factory=DreamBoothDataConfig)
    """The examples of the subject."""
    optimizer: FineTuningOptimizerConfig = dataclasses.field(
        default_factory=FineTuningOptimizerConfig
    )
    """The options of the optimizer."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.instance_data and self.data.path not in ("", self.instance_data):
            raise ValueError(
                f"instance_data={self.instance_data!r} and data.path={self.data.path!r} are two "
                "names of one option; give one of them"
            )
        if self.class_data and not self.class_prompt:
            raise ValueError(
                f"class_data={self.class_data!r} is not used without a class prompt; give "
                "class_prompt"
            )

    @property
    def data_path(self) -> str:
        """The name of the data set, under either of its options."""
        return self.instance_data or self.data.path


class DreamBooth(Denoiser):
    """The recipe that trains DreamBooth: `diffusax.training.dreambooth(config)`.

    With prior preservation an example is a pair: each of its arrays holds that of the subject and
    that of the class.
    """

    name = "dreambooth"
    config: DreamBoothConfig

    def __init__(self, config: DreamBoothConfig, *, generate: bool = True):
        """Opens the data, and generates the images of the class that are missing.

        generate: whether they are generated; without them the recipe can be compiled, not trained,
            and no weights are read: a cache is not compared with the checkpoint's networks.

        Raises:
            ValueError: the checkpoint, the images or the folder of the class cannot be used, or
                options do not go together; says why.
        """
        require_options(config, ("model",))
        data = dataclasses.replace(config.data, path=config.data_path)
        config = dataclasses.replace(config, data=data, instance_data="")
        if not data.path:
            raise ValueError("--instance-data must be given, or instance_data in the --config file")
        if Path(data.path).suffix.lower() in IMAGE_SUFFIXES and Path(data.path).is_file():
            raise ValueError(
                f"instance_data={data.path!r} is an image; give the folder that holds those of "
                "the subject"
            )
        if not (config.instance_prompt or data.caption_column or is_cache(data.path)):
            raise ValueError(
                "the images have no captions; give instance_prompt, such as 'a photo of sks dog'"
            )
        if data.streaming:
            raise ValueError("data.streaming is for large data sets; leave it out of DreamBooth")
        columns = [name for name in (data.image_column, data.caption_column) if name]
        super().__init__(config, tuple(columns), compile_only=not generate)
        self.prior = bool(config.class_prompt)
        self.prompts = self._constant_prompts()
        self.embedded = self.embedded or bool(self.prompts)
        if not self.cached and data.mask != "alpha":
            self.source = KeptImages(self.source, data.image_column)
        if self.prior:
            self.source = Pairs(self.source, self._classes(generate))
        self.source = Repeated(self.source)

    def example(self, row: dict[str, Any], rng: np.random.Generator) -> Element:
        """Returns the pixels or latents, tokens and sizes of a row, or of both rows of a pair.

        The arrays of a pair have a first axis of 2: the subject, the class. There are no tokens of
        prompts that are embedded once.
        """
        if not self.prior:
            return self._one(row, rng)
        instance = self._one(row[INSTANCE], rng)
        # Both are of the size of the subject's image.
        size = {SIZE: row[INSTANCE][SIZE]} if SIZE in row[INSTANCE] else {}
        preserved = self._one({**row[CLASS], **size}, rng, of=CLASS)
        return {**_paired(instance, preserved), PRIOR: np.array([False, True])}

    def loss(self, trained: Params, frozen: Params, batch: Batch, keys: jax.Array) -> jax.Array:
        """Returns the loss of each example, b: that of the subject and, weighted, of the class."""
        if not self.prior:
            return super().loss(trained, frozen, self._with_prompts(frozen, batch, keys), keys)
        batch, keys = one_by_one(batch, keys)
        batch = self._with_prompts(frozen, batch, keys)
        losses = super().loss(trained, frozen, batch, keys).reshape(-1, 2)
        return losses[:, 0] + self.config.prior_loss_weight * losses[:, 1]

    def card(self) -> dict[str, Any]:
        return {**super().card(), "instance_prompt": self.config.instance_prompt}

    def _constant_prompts(self) -> dict[str, str]:
        """Returns the prompts of the subject and of the class that are the same in all steps.

        There are none where text encoders are trained, or images have captions of their own. The
        class has a constant one beside a cache that holds embeddings of captions.
        """
        config, data = self.config, self.config.data
        if config.train_text_encoder or data.caption_column or data.shuffle_tags:
            return {}
        preserved = {CLASS: config.class_prompt} if self.prior else {}
        if not config.instance_prompt:
            return preserved if self.embedded else {}
        own = write_caption(data, config.instance_prompt, np.random.default_rng(0))
        return {INSTANCE: own, **preserved}

    def _with_prompts(self, frozen: Params, batch: Batch, keys: jax.Array) -> Batch:
        """Returns a batch of examples with the embeddings of their prompts."""
        if not self.prompts:
            return batch
        of_class = batch.get(PRIOR, jnp.zeros(len(keys), bool))
        own = frozen.get(INSTANCE, batch)

        def chosen(name: str) -> jax.Array:
            x = own[name] if own is batch else own[name][None]
            other = frozen[CLASS][name] if self.prior else x
            return jnp.where(of_class.reshape(-1, *(1,) * (x.ndim - 1)), other, x)

        return {**batch, **{name: chosen(name) for name in frozen["empty"]}}

    def _one(self, row: dict[str, Any], rng: np.random.Generator, *, of: str = INSTANCE) -> Element:
        """Returns the example of a row. of: INSTANCE or CLASS, which has no caption of its own."""
        config, own = self.config, of == INSTANCE
        prompt = config.instance_prompt if own else config.class_prompt
        if not self.cached:
            example = self._of_image(row, prompt, rng, own=own)
        else:
            example = {**self._without_text(row), **self.base.tokenize(prompt)} if prompt else row
        return self._without_text(example) if of in self.prompts else example

    def _without_text(self, example: Element) -> Element:
        columns = self.base.family.embedding_columns
        return {k: x for k, x in example.items() if k not in columns and not is_text(k)}

    def _of_image(
        self, row: dict[str, Any], prompt: str, rng: np.random.Generator, *, own: bool
    ) -> Element:
        """Returns the example of a row with an image. own: whether its own caption is used."""
        data = self.config.data
        column = data.caption_column if own else ""
        trigger = data.trigger if own else ""
        named = dataclasses.replace(data, caption_column=column or _CAPTION, trigger=trigger)
        if not own and (data.mask_column or data.mask != "none"):
            # Images of the class are opaque, so that all of them counts.
            named = dataclasses.replace(named, mask_column="", mask="alpha")
        caption = _filled(row.get(column), prompt) if column else prompt
        row = {**row, named.caption_column: caption}
        return caption_example(named, self.base, self.size, row, rng)

    def _classes(self, generate: bool) -> Source:
        """Opens the images of the class, and generates those that are missing."""
        config = self.config
        folder = config.class_data or str(Path(config.output) / "class")
        if self.cached or is_cache(folder):
            return self._cached_classes(folder, generate)
        _check_apart(config.data.path, folder)
        drawn = ClassImages(
            config.model,
            config.class_prompt,
            self.size,
            config.class_steps,
            config.class_guidance,
            config.class_batch_size,
            config.compute_dtype,
            config.mesh,
        )
        if not generate:
            # To compile a step, any image does.
            return self.source
        if drawn.missing(Path(folder), config.class_images) and _has_done_its_steps(config):
            return MissingImages(folder)
        drawn.ensure(Path(folder), config.class_images)
        column = config.data.image_column
        classes = class_source(Path(folder), config.class_images, column)
        log_summary(classes, (column,), {column: "image"}, place=f"{folder}, the class")
        return KeptImages(classes, column)

    def _cached_classes(self, folder: str, check: bool) -> Source:
        if not (self.cached and is_cache(folder)):
            raise ValueError(
                f"instance_data={self.config.data.path!r} and class_data={folder!r} must both hold "
                "latents, or both images; write the other with cache-latents"
            )
        source = CachedSource.open(folder, self.base, recipe="text-to-image", check=check)
        cached = [(self.config.data.path, self.source), (folder, source)]
        if by_size := [name for name, own in cached if buckets_of(own) is not None]:
            raise ValueError(
                f"{' and '.join(by_size)} hold{'' if len(by_size) > 1 else 's'} latents of several "
                "sizes, and none of the class can be cut to the size of the subject's beside it; "
                "write both caches without data.buckets and data.bucket_step, or train with the "
                "images themselves, which are cut alike"
            )
        sizes = [self._cached_size(own) for _, own in cached]
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"{folder} holds latents of images of {sizes[1]} pixels, and "
                f"{self.config.data.path} of {sizes[0]}; write one again with cache-latents and "
                "the other's data.resolution"
            )
        return source

    def _cached_size(self, source: Any) -> str:
        """Returns the size of the images in a cache of one size, as WIDTHxHEIGHT."""
        height, width, _ = source.shapes["moments"]
        return f"{width * self.base.factor}x{height * self.base.factor}"


dreambooth = DreamBooth


def _filled(cell: Any, prompt: str) -> Any:
    """Returns a cell's caption or captions, with the prompt for each that is empty or missing.

    Upstream: diffusers examples/dreambooth/train_dreambooth_lora_sdxl.py, DreamBoothDataset.
    """
    if isinstance(cell, list) and cell:
        return [_filled(caption, prompt) for caption in cell]
    empty = cell is None or cell == [] or (isinstance(cell, str) and not cell.strip())
    return prompt if prompt and empty else cell


def _check_apart(instances: str, classes: str) -> None:
    """Raises ValueError where one of two folders of images holds the other."""
    one, other = Path(instances).resolve(), Path(classes).resolve()
    if one.is_dir() and (one.is_relative_to(other) or other.is_relative_to(one)):
        raise ValueError(
            f"class_data={classes!r} and instance_data={instances!r} hold each other, and images "
            "of one would be taken for the other's; use two folders side by side"
        )


def _has_done_its_steps(config: DreamBoothConfig) -> bool:
    """Returns whether the output folder has a checkpoint of the last step."""
    folders = (Path(config.output) / "checkpoints").glob("[0-9]*")
    return any(f.name.isdigit() and int(f.name) >= config.steps for f in folders)


def _paired(instance: Element, preserved: Element) -> Element:
    """Returns the arrays of both examples, stacked; an example without a mask counts everywhere.

    Where that of the class lacks a text, that of the subject stands for it.
    """
    masks = [one[LOSS_WEIGHTS] for one in (instance, preserved) if LOSS_WEIGHTS in one]
    plain = {LOSS_WEIGHTS: np.ones_like(masks[0])} if masks else {}
    instance, preserved = {**plain, **instance}, {**plain, **preserved}
    return {name: np.stack([x, preserved.get(name, x)]) for name, x in instance.items()}


def one_by_one(batch: Batch, keys: jax.Array) -> tuple[Batch, jax.Array]:
    """Returns a batch of b pairs as 2b examples, and a random key for each of them."""
    apart = {name: x.reshape(-1, *x.shape[2:]) for name, x in batch.items()}
    return apart, jax.vmap(jax.random.split)(keys).reshape(-1)
