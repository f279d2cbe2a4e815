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
from diffusax.pipelines.families.policies import References
from diffusax.pipelines.tasks import tasks
from diffusax.pipelines.tasks.tasks import Task
from diffusax.training.config import DenoiserConfig, ImagesValidationConfig
from diffusax.training.data.batches import Element
from diffusax.training.data.examples import ALONE, EMPTY, is_of_images, prepare_images
from diffusax.training.data.options import EditDataConfig
from diffusax.training.recipes.cached import CachedSource
from diffusax.training.recipes.denoiser import Denoiser
from diffusax.training.recipes.editors import edit_class, instruct_class
from diffusax.training.recipes.row_examples import (
    check_references,
    edit_example,
    reference_policy,
)
from diffusax.training.step.encoding import original_names

_CHOICE = 7
"""What the seed is joined by for the batches whose images are left out."""


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

    name = cached_as = "instruct-pix2pix"
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
        self._check_alone()
        self.denoising = dataclasses.replace(self.denoising, **dropout)
        self.guides_by_image = instruct_class(family) is not None
        if not self.guides_by_image:
            _check_guidance(config, family.name)
        if (editor := edit_class(family)) is not None:
            self.pipeline_class = editor
        self.task: Task = getattr(editor, "task", tasks.text_to_image)
        self.images = [self._cut(path) for path in config.validation.images]

    def _policy(self) -> References | None:
        return reference_policy(self.base.family, self.config.data)

    def choose(self, examples: Element, size: str, step: int | None) -> tuple[Element, str]:
        """Leaves out the images to look at of all of a batch, in a share of the steps.

        Args:
            examples: the batch, or one example.
            size: the name of its images' size.
            step: the step; None where none is left out.

        Returns:
            What remains, and the name of its size.
        """
        share, names = self.config.data.reference_dropout, original_names(examples)
        kept = {name: x for name, x in examples.items() if not name.startswith(ALONE)}
        if step is None or not share or not names:
            return kept, size
        if np.random.default_rng((self.config.seed, _CHOICE, step)).random() >= share:
            return kept, size
        alone = {name: x for name, x in examples.items() if name.startswith(ALONE)}
        texts = {name.removeprefix(ALONE): x for name, x in alone.items()}
        others = {name: x for name, x in kept.items() if name not in names}
        if texts:
            others = {name: x for name, x in others.items() if not is_of_images(name)}
        return {**others, **texts}, f"{size.partition('+')[0]}+0"

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

    def _check_alone(self) -> None:
        """Raises ValueError where a cache lacks the texts for batches without images."""
        cache, data = self.source, self.config.data
        if not isinstance(cache, CachedSource) or not data.reference_dropout:
            return
        of_rows = cache.shapes_by_size or (cache.shapes,)
        if any(EMPTY in own and not any(k.startswith(ALONE) for k in own) for own in of_rows):
            raise ValueError(
                f"data.reference_dropout needs the texts of {data.path} without their images, too; "
                "write it again with data.reference_dropout"
            )

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
