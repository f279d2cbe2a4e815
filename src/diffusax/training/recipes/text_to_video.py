"""Trains videos: flow matching on the latents of clips with captions (Team Wan 2025)."""

import dataclasses
import itertools
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from jax.sharding import Mesh
from msgspec import Meta

from diffusax.boundary.messages import require_extra
from diffusax.boundary.options import Count, Share
from diffusax.images.reading import load_image
from diffusax.images.sheets import contact_sheet
from diffusax.lora.trained import TrainedLora, params_of_file, plan_of_file, write_result
from diffusax.models.network import Params
from diffusax.pipelines.tasks import tasks
from diffusax.pipelines.tasks.tasks import Task
from diffusax.pipelines.tasks.videos import image_to_video
from diffusax.samplers.processes import Flow
from diffusax.training.config import DenoiserConfig, DenoiserValidationConfig
from diffusax.training.data.examples import GIVEN
from diffusax.training.data.opening import open_clips
from diffusax.training.data.options import VideoDataConfig
from diffusax.training.data.sources import Source
from diffusax.training.recipes.cached import VIDEOS, CachedSource
from diffusax.training.recipes.denoiser import Denoiser
from diffusax.training.recipes.recipe import Clip
from diffusax.training.recipes.row_examples import clip_example
from diffusax.training.recipes.video_model import Expert, VideoModel
from diffusax.training.step.given_frames import IMAGE_ENCODER, GivenFrames

_IN_FILES = "transformer"
"""The name that layers have in files of LoRAs, of both transformers."""
_USAGE = """```python
import diffusax
from diffusax.utils import export_to_video, load_image

pipe = diffusax.DiffusionPipeline.from_pretrained("{model}")
{load}export_to_video(pipe({call}).frames[0], "video.mp4", fps={fps})
```

PyTorch diffusers loads the same files by the same methods.
"""


@dataclasses.dataclass(frozen=True)
class VideoValidationConfig(DenoiserValidationConfig):
    """Videos generated from prompts, and perhaps from images, always from the same noise."""

    guidance: Annotated[float, Meta(ge=0, le=1000)] = 5.0
    """The guidance scale."""
    images: tuple[str, ...] = ()
    """The images that videos begin with, one or one for each of the prompts, for checkpoints of
    image to video."""
    num_frames: Annotated[int, Meta(ge=1, le=10_000)] | None = None
    """The number of frames; by default the largest of data.num_frames."""
    format: Literal["mp4", "gif", "webp"] = "mp4"
    """The files that videos are written to; .mp4 needs the extra video."""

    def __post_init__(self) -> None:
        super().__post_init__()
        images, prompts = len(self.images), len(self.prompts)
        if images > 1 and images != prompts:
            raise ValueError(
                f"validation.images must be one or as many as validation.prompts (got {images} for "
                f"{prompts})"
            )


@dataclasses.dataclass(frozen=True)
class TextToVideoConfig(DenoiserConfig):
    """Train a model of videos on clips and captions; also one that begins with an image."""

    refused: ClassVar[tuple[str, ...]] = ("train_text_encoder", "prediction_type", "snr_gamma")
    refusal: ClassVar[str] = "videos are trained by flow matching, for a text encoder as it is"

    batch_size: Count = 1
    """The number of clips of an update, over all devices and microbatches."""
    gradient_checkpointing: Literal["none", "blocks", "full"] = "blocks"
    """What is computed again for the gradient to save memory: none, or blocks (each transformer
    block; full is the same)."""
    caption_dropout: Share = 0.1
    """The share of captions replaced by the empty one, for classifier-free guidance."""
    expert: Expert | None = None
    """Of checkpoints with two transformers (Wan 2.2 A14B) the one that is trained, at its noise
    levels alone: high_noise, which begins videos, or low_noise, for their details."""
    first_frame: Share = 0.0
    """Of Wan 2.2 TI2V-5B: the share of clips whose first frame is given, so that it learns to go on
    from images; 0 for text to video alone."""
    data: VideoDataConfig = dataclasses.field(default_factory=VideoDataConfig)
    """The examples."""
    validation: VideoValidationConfig = dataclasses.field(default_factory=VideoValidationConfig)
    """The videos that are generated during the run."""


class TextToVideo(Denoiser):
    """The recipe that trains videos: `diffusax.training.text_to_video(config)`.

    A checkpoint of image to video learns to go on from each clip's first frame.
    """

    name = cached_as = VIDEOS
    config: TextToVideoConfig
    base: VideoModel
    make_example = staticmethod(clip_example)

    def __init__(self, config: TextToVideoConfig, *, compile_only: bool = False):
        """Reads the configs and opens the data set.

        compile_only: see `TextToImage`.

        Raises:
            ValueError: the checkpoint, the data set or a validation image cannot be used, or
                options do not go together; says why.
        """
        columns = (config.data.image_column, config.data.caption_column)
        dropout = config.caption_dropout
        super().__init__(config, columns, compile_only=compile_only, caption_dropout=dropout)
        base, denoising = self.base, self.denoising
        assert isinstance(denoising.process, Flow)
        self.given = base.given
        if self.cached and self.given is not None and GIVEN not in self._cache.shapes:
            raise ValueError(
                f"{config.data.path} has nothing of first frames, which {config.model} is shown; "
                "write it again with this model"
            )
        if config.first_frame:
            self.given = self._from_first()
        self.denoising = dataclasses.replace(
            denoising,
            networks={n: net for n, net in base.networks.items() if n not in base.others},
            process=dataclasses.replace(denoising.process, within=base.within),
            given=self.given,
        )
        self.images = [load_image(path) for path in config.validation.images]
        self._check_images()

    def validate(self, trained: Params, frozen: Params) -> Clip:  # type: ignore[override]
        """Generates videos for the validation prompts, side by side with the prompts beneath."""
        videos: Any = []
        pairs = zip(self.config.validation.prompts, itertools.cycle(self.images or [None]))
        # One after the other, as several might need more memory than the step.
        for i, (prompt, image) in enumerate(pairs):
            task: Task = tasks.text_to_image if image is None else image_to_video
            own: dict[str, Any] = {} if image is None else {"image": image}
            own |= {"prompt": [prompt], "seed": self.config.seed + i}
            videos += self.draw(trained, frozen, task, num_frames=self.validation_frames, **own)
        sheets = [contact_sheet(self.captioned(list(shown))) for shown in zip(*videos, strict=True)]
        return Clip(sheets, self.fps, f".{self.config.validation.format}")

    def card(self) -> dict[str, Any]:
        kind = "text-to-video" if self.base.given is None else "image-to-video"
        adapters = self.lora is not None
        model = self.config.model if adapters else "{location}"
        second = ", load_into_transformer_2=True" if self.config.expert == "low_noise" else ""
        load = f'pipe.load_lora_weights("{{location}}"{second})\n' if adapters else ""
        call = '"a prompt"' if self.base.given is None else 'load_image("photo.png"), "a prompt"'
        usage = _USAGE.format(model=model, load=load, call=call, fps=round(self.fps))
        return {"base_model": self.config.model, "pipeline_tag": kind, "usage": usage}

    def save(self, trained: Params, folder: Path) -> None:
        """Saves what was trained; see `Denoiser.save`.

        Layers of both transformers have the names of the first in files, as in diffusers.
        """
        own = self.lora
        if own is None or self.base.denoiser == _IN_FILES:
            super().save(trained, folder)
            return
        plans = {_IN_FILES: own.plans[self.base.denoiser]}
        write_result(
            dataclasses.replace(own, plans=plans),
            {_IN_FILES: trained[self.base.denoiser]},
            folder,
            kind=self.config.lora.format,
            encoders=len(self.base.text_encoders),
            networks=self._in_files,
        )

    @property
    def fps(self) -> float:
        """The frames per second of the clips, and of the videos of the validation."""
        fps = self.config.data.fps
        return fps or self.base.fps

    @property
    def validation_frames(self) -> int:
        """The number of frames of the videos of the validation."""
        count = self.config.data.num_frames[-1]
        if self.cached:
            shapes = self._cache.shapes_by_size or (self._cache.shapes,)
            form = self.base.family.latents(self.networks[self.base.autoencoder].config)
            count = (max(own["moments"][0] for own in shapes) - 1) * form.frames + 1
        return self.config.validation.num_frames or count

    @property
    def _cache(self) -> CachedSource:
        assert isinstance(self.source, CachedSource)
        return self.source

    @property
    def _in_files(self) -> dict[str, Any]:
        """The trained transformer under the name that its layers have in files."""
        return {_IN_FILES: self.networks[self.base.denoiser]}

    def _open_model(self, **options: Any) -> VideoModel:
        return VideoModel.open_videos(self.config.model, self.config.expert)

    def _open_data(self, columns: tuple[str, ...], *, edits: bool) -> Source:
        fps, base = self.config.data.fps, self.base
        return open_clips(
            self.config.data,
            columns,
            side=self.size,
            factor=base.multiple,
            step=base.step,
            fps=base.fps if fps is None else fps,
            leave_out=self.config.output,
        )

    def _frozen_names(self) -> list[str]:
        names = super()._frozen_names()
        if self.config.validation.every:
            names += self.base.others
        if IMAGE_ENCODER in self.networks and (self.config.validation.every or not self.cached):
            names.append(IMAGE_ENCODER)
        return names

    def _open_lora(self, edits: bool) -> TrainedLora:
        options = self.config.lora
        if options.path is None:
            return super()._open_lora(edits)
        found = plan_of_file(
            options.path, self._in_files, train_text_encoder=False, dropout=options.dropout
        )
        return dataclasses.replace(found, plans={self.base.denoiser: found.plans[_IN_FILES]})

    def _first_adapters(self, lora: TrainedLora, mesh: Mesh | None) -> Params:
        path = self.config.lora.path
        if path is None:
            return super()._first_adapters(lora, mesh)
        return {self.base.denoiser: params_of_file(path, self._in_files)[_IN_FILES]}

    def _check_validation(self) -> None:
        super()._check_validation()
        options, frames = self.config.validation, self.validation_frames
        if not options.every:
            return
        if frames % self.base.step != 1 % self.base.step:
            low = (frames - 1) // self.base.step * self.base.step + 1
            raise ValueError(
                f"validation.num_frames must be one more than a multiple of {self.base.step} (got "
                f"{frames}); use {low} or {low + self.base.step}"
            )
        if options.format == "mp4":
            require_extra("imageio_ffmpeg", "video")

    def _check_images(self) -> None:
        """Raises ValueError where images for the validation are missing, or nothing reads them."""
        given = self.base.given
        begins = given is not None
        if given is not None and given.last and self.config.validation.every:
            raise ValueError(
                f"validation.every cannot be for {self.config.model}, whose videos end with an "
                "image, too; leave it out, and draw with the result"
            )
        if begins and self.config.validation.every and not self.images:
            raise ValueError(
                f"validation.images must be given for {self.config.model}, whose videos begin with "
                "an image"
            )
        if self.images and not (begins or self.base.times_of_tokens):
            raise ValueError(
                f"validation.images are nothing that {self.config.model} reads, which is of text "
                "to video; leave them out"
            )

    def _from_first(self) -> GivenFrames:
        share = self.config.first_frame
        if not self.base.times_of_tokens:
            why = "is of text to video" if self.base.given is None else "is always given it"
            raise ValueError(
                f"first_frame={share} cannot be for {self.config.model}, which {why}; leave it out"
            )
        return GivenFrames(in_channels=False, share=share)


text_to_video = TextToVideo
