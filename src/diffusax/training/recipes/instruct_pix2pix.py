"""Trains InstructPix2Pix (Brooks et al. 2023), which edits images as a text says.

The denoising loss of the edited image, with the latents of the original image as further input
channels and the instruction as the caption, as in diffusers' examples/instruct_pix2pix. A family
that looks at images learns to look at the original one instead, as in diffusers'
examples/dreambooth/train_dreambooth_lora_flux_kontext.py and _flux2_klein_img2img.py; Krea 2 and
Z-Image begin to, as Krea 2 does in ai-toolkit.
"""

import dataclasses
from typing import Annotated, Any, Literal

import numpy as np
from msgspec import Meta
from PIL import Image

from diffusax.images.reading import load_image
from diffusax.images.sheets import make_image_grid
from diffusax.models.network import Params
from diffusax.pipelines.tasks import tasks
from diffusax.pipelines.tasks.tasks import Task
from diffusax.training.config import DenoiserConfig, ImagesValidationConfig
from diffusax.training.data.buckets import buckets_of
from diffusax.training.data.examples import prepare_images
from diffusax.training.data.opening import references_of
from diffusax.training.data.options import EditDataConfig
from diffusax.training.recipes.base_model import (
    check_references,
    edit_class,
    edit_example,
    instruct_class,
)
from diffusax.training.recipes.denoiser import Denoiser
from diffusax.training.step.seen_images import SeenImages


@dataclasses.dataclass(frozen=True)
class InstructPix2PixValidationConfig(ImagesValidationConfig):
    """Images before and after the edits that the prompts ask for."""

    image_guidance: Annotated[float, Meta(ge=0, le=1000)] = 1.5
    """The image guidance scale; nothing for networks that look at images."""


@dataclasses.dataclass(frozen=True)
class InstructPix2PixConfig(DenoiserConfig):
    """Train a model that edits images as a text says, on images before and after an edit."""

    conditioning_dropout: Annotated[float, Meta(ge=0, le=1 / 3)] = 0.05
    """The share of examples without their instruction, that without their image, and that without
    both, for guidance by each; for networks that look at images (as FLUX.2 klein) the share without
    their instruction alone."""
    keep_pooled: bool = False
    """Keep SDXL's pooled embedding where the instruction is dropped, as diffusers' script does;
    pipelines do not have it there."""
    references_layout: Literal["blind", "joint"] | None = None
    """What the tokens of images to look at see, of Krea 2 and Z-Image: "blind" for each other
    alone, so that a run computes them once, or "joint" for all tokens; by default what the
    checkpoint has learned, or "blind"."""
    data: EditDataConfig = dataclasses.field(default_factory=EditDataConfig)
    """The examples."""
    validation: InstructPix2PixValidationConfig = dataclasses.field(
        default_factory=InstructPix2PixValidationConfig
    )
    """The images that are edited during the run."""


class InstructPix2Pix(Denoiser):
    """The recipe that trains InstructPix2Pix: `diffusax.training.instruct_pix2pix(config)`.

    The denoiser of a text-to-image checkpoint gets input channels for the other image, with weights
    of zero; that of an InstructPix2Pix checkpoint, or of one that looks at images, is trained as it
    is.
    """

    name = "instruct-pix2pix"
    config: InstructPix2PixConfig
    make_example = staticmethod(edit_example)

    def __init__(self, config: InstructPix2PixConfig, *, compile_only: bool = False):
        """Reads the configs and opens the data set.

        compile_only: see `TextToImage`.

        Raises:
            ValueError: the checkpoint, the data set or a validation image cannot be used, or
                options do not go together; says why.
        """
        data = config.data
        super().__init__(
            config,
            (data.original_image_column, data.edit_prompt_column, data.edited_image_column),
            edits=True,
            references_layout=config.references_layout,
            compile_only=compile_only,
            keep_pooled=config.keep_pooled,
        )
        family = self.base.family
        check_references(family, data)
        dropout: dict[str, Any] = family.edits.dropout(config.conditioning_dropout)
        seen = self._seen_images()
        self.denoising = dataclasses.replace(self.denoising, seen=seen, **dropout)
        self.guides_by_image = instruct_class(family) is not None
        if not self.guides_by_image:
            _check_guidance(config, family.name)
        if (editor := edit_class(family)) is not None:
            self.pipeline_class = editor
        self.task: Task = getattr(editor, "task", tasks.text_to_image)
        self.images = [self._cut(path) for path in config.validation.images]

    def _seen_images(self) -> SeenImages | None:
        """Returns where texts speak of images, where they do.

        Raises:
            ValueError: the images have several sizes, or there are embeddings that know of none.
        """
        base, data = self.base, self.config.data
        if not base.family.edits.reads_with_text:
            return None
        name = base.family.name
        if data.bucketed:
            raise ValueError(
                f"data.buckets and data.bucket_step cannot be for {name}, whose texts speak of "
                "images of one size; leave them out"
            )
        if self.cached:
            raise ValueError(
                f"data.path must hold images for {name}, whose texts speak of them, and no cache"
            )
        if buckets_of(self.source) is not None:
            raise ValueError(
                f"the rows of {data.path} differ in the number of images before the edit, and all "
                f"texts of {name} speak of as many; train on those with one number"
            )
        return base.seen_images(self.size, references_of(self.source, data))

    def validate(self, trained: Params, frozen: Params) -> list[Image.Image]:
        """Returns each validation image beside its edited one, with the prompt beneath."""
        count = len(self.config.validation.prompts)
        before = self.images * (count // len(self.images))
        after = self._edited(trained, frozen, before)
        return self.captioned(
            [make_image_grid(pair, rows=1, cols=2) for pair in zip(before, after, strict=True)]
        )

    def result_options(self) -> dict[str, Any]:
        """Returns the options that make a missing negative prompt an empty text, as in training."""
        name = "force_zeros_for_empty_prompt"
        return {name: False} if name in self.base.options else {}

    def card(self) -> dict[str, Any]:
        return {**super().card(), "pipeline_tag": "image-to-image"}

    def _edited(
        self, trained: Params, frozen: Params, before: list[Image.Image]
    ) -> list[Image.Image]:
        """Returns the images after the edits that the validation prompts ask for."""
        if self.guides_by_image:
            scale = self.config.validation.image_guidance
            own = {"image": before, "image_guidance_scale": scale}
            return self.draw(trained, frozen, self.task, **own)
        more = self.base.family.edits.arguments(*self.validation_size)
        # All images of a call are looked at for each of its prompts.
        return [
            self.draw(trained, frozen, self.task, prompt=prompt, image=image, **more)[0]
            for prompt, image in zip(self.config.validation.prompts, before, strict=True)
        ]

    def _cut(self, path: str) -> Image.Image:
        """Returns the center of a validation image, at the size of the validation."""
        rng = np.random.default_rng(0)
        (pixels,), _ = prepare_images(
            [load_image(path)],
            rng,
            resolution=self.validation_size,
            center_crop=True,
            random_flip=False,
        )
        return Image.fromarray(pixels)


def _check_guidance(config: InstructPix2PixConfig, family: str) -> None:
    """Raises ValueError where a scale is given that a family without image guidance ignores."""
    scale = config.validation.image_guidance
    if scale != InstructPix2PixValidationConfig.image_guidance:
        raise ValueError(
            f"validation.image_guidance={scale} does nothing for {family}, which looks at "
            "images; leave it out"
        )


instruct_pix2pix = InstructPix2Pix
