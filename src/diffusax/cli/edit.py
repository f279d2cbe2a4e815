"""`diffusax edit`."""

import dataclasses
import itertools
import math
from pathlib import Path
from typing import Annotated, Any, ClassVar, get_args

from PIL import Image, ImageOps
from tyro.conf import FlagCreatePairsOff, Positional, configure

import diffusax
from diffusax.boundary.options import ImageCount, Pixels, Scale
from diffusax.cli import generation, loras
from diffusax.cli.parsing import OWN, given_flags, parse
from diffusax.images.sheets import labelled_grid
from diffusax.text.extra_networks import read_tags

# Sides are multiples of this, so that a network can halve the latents three times.
MULTIPLE = 64


@configure(FlagCreatePairsOff)
@dataclasses.dataclass(frozen=True, kw_only=True)
class Edit(generation.ToFile):
    """Change an image as an instruction says.

    By InstructPix2Pix (Brooks et al. 2023), or by a model that looks at images.
    """

    essentials: ClassVar[tuple[str, ...]] = (
        *("model", "output", "steps", "guidance", "image_guidance", "sampler", "seed"),
        *("negative_prompt", "resolution", "num_images", "sweep", "dtype"),
    )

    image: Positional[Path]
    """The image to change."""
    prompt: Positional[str]
    """The instruction, such as "make it snowy"."""
    model: str = "emoji-edit"
    """A checkpoint of InstructPix2Pix or of a model that looks at images: a folder in diffusers'
    layout, a .safetensors or .gguf file, or a Hub repository id; by default the small model inside
    the package, which edits emoji."""
    image_guidance: Annotated[Scale | None, OWN] = None
    """How closely InstructPix2Pix keeps to the image, from 1 up; the pipeline's own by default."""
    resolution: Annotated[Pixels | None, OWN] = None
    """Resize the image's longer side to this many pixels; by default the model's own size, and for
    a model that looks at images the image's own."""
    num_images: ImageCount = 1
    """The number of versions to generate."""
    sweep: bool = False
    """Generate a labelled grid over both guidance scales, to choose them by."""
    sweep_guidance: tuple[Scale, ...] = (3.0, 5.0, 7.5, 10.0)
    """The guidance scales of the grid, its rows."""
    sweep_image_guidance: tuple[Scale, ...] = (1.0, 1.25, 1.5, 2.0)
    """The image guidance scales of the grid, its columns."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sweep:
            for flag in given_flags(self, ("guidance", "image_guidance")):
                raise ValueError(f"--sweep takes --sweep-{flag[2:]} instead of {flag}")
            if self.num_images > 1:
                raise ValueError("--sweep makes one image for each pair; leave --num-images out")
            if not self.sweep_guidance or not self.sweep_image_guidance:
                raise ValueError("--sweep needs at least one value of each scale")

    def run(self) -> list[Path]:
        """Generates the versions and returns the files written, the sheet first."""
        from diffusax.images.reading import load_image

        output = generation.output_file(self.output)
        seed = generation.seed_or_random(self.seed)
        image = load_image(self.image)
        pipe, looks = self._load()
        if looks and self.sweep:
            raise ValueError(f"--sweep is over two scales, of which {pipe.family.name} has one")
        if self.resolution or not looks:
            image = fit(image, self.resolution or max(pipe.parts.default_size))
        loras.load_named(pipe, self.lora_dir, read_tags(self.prompt)[1])
        prompt, adapters = loras.adapters_of(pipe, self.prompt)
        sizes = pipe.family.edits.resize.keeping(image.height, image.width)
        images, texts = [], []
        with self.profiled():
            for guidance, image_guidance in self._scales():
                found = generation.call(
                    pipe,
                    prompt=prompt,
                    **adapters,
                    image=image,
                    negative_prompt=self.negative_prompt,
                    num_inference_steps=self.steps,
                    guidance_scale=guidance,
                    image_guidance_scale=image_guidance,
                    num_images_per_prompt=self.num_images,
                    seed=seed,
                    noise=self.noise,
                    **sizes,
                )
                images += found
                given = {"image_guidance_scale": image_guidance}
                files = {"Image": self.image.name}
                texts += generation.describe(pipe, self, found, seed, given, files)
        return generation.save(output, images, texts, seed, sheet=self._sheet(images))

    def _load(self) -> tuple[Any, bool]:
        """Loads the pipeline; also returns whether it is one that looks at images."""
        from diffusax.models.transformers.references import Layout
        from diffusax.pipelines.classes.auto import looks_at_images

        auto = diffusax.AutoPipelineForImage2Image
        layout = loras.learned_layout(self.lora_dir, read_tags(self.prompt)[1])
        more = {"references_layout": layout} if layout in get_args(Layout) else {}
        hub = {"variant": self.variant, "revision": self.revision}
        if not looks_at_images(self.model, **hub, **more):
            return load_editor(self), False
        return self.prepare(auto.from_pretrained(self.model, **self.loading(), **more)), True

    def _scales(self) -> list[tuple[float | None, float | None]]:
        if not self.sweep:
            return [(self.guidance, self.image_guidance)]
        return list(itertools.product(self.sweep_guidance, self.sweep_image_guidance))

    def _sheet(self, images: list[Image.Image]) -> Image.Image | None:
        """Returns the labelled grid of a sweep."""
        if not self.sweep:
            return None
        columns = len(self.sweep_image_guidance)
        return labelled_grid(
            [images[i : i + columns] for i in range(0, len(images), columns)],
            [f"guidance {scale:g}" for scale in self.sweep_guidance],
            [f"image guidance {scale:g}" for scale in self.sweep_image_guidance],
        )


def command(args: list[str]) -> Edit:
    """Reads the options from the arguments."""
    return parse(Edit, args, prog="diffusax edit")


def fit(image: Image.Image, side: int) -> Image.Image:
    """Resizes an image so that its longer side is as near to `side` as multiples of 64 allow.

    Like InstructPix2Pix's edit_cli.py, it cuts off evenly what exceeds the multiples.
    """
    scale = side / max(image.size)
    shorter = min(image.size)
    scale = math.ceil(shorter * scale / MULTIPLE) * MULTIPLE / shorter
    width, height = (int(length * scale) // MULTIPLE * MULTIPLE for length in image.size)
    return ImageOps.fit(image, (width, height), method=Image.Resampling.LANCZOS)


def load_editor(options: Any) -> Any:
    """Loads the editing pipeline of the checkpoint's family, whichever pipeline its index names.

    options: the options of a command that generates images, with the checkpoint as `model`.
    """
    from diffusax.checkpoints import read_model_index, resolve

    folder = resolve(options.model, variant=options.variant, revision=options.revision)
    class_name, _, _ = read_model_index(folder)
    kind = (
        diffusax.StableDiffusionXLInstructPix2PixPipeline
        if "XL" in class_name
        else diffusax.StableDiffusionInstructPix2PixPipeline
    )
    return options.prepare(kind.from_pretrained(options.model, **options.loading()))
