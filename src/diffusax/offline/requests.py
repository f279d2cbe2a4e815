"""Makes the requests for images from a line's row, the run's settings and the pipeline."""

import dataclasses
import functools
import inspect
import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import numpy as np
from msgspec import Meta

from diffusax.batch.image import table_height
from diffusax.boundary.options import ImageCount, Options, Pixels, Scale, Seed, Steps
from diffusax.lora.stacks import RANKS, stack_shapes
from diffusax.offline.clips import ClipFormat, check_writes
from diffusax.offline.prompts import COLUMNS, VIDEO_COLUMNS
from diffusax.pipelines.components.adapters import call_adapters, resolve_adapters
from diffusax.pipelines.components.components import Components
from diffusax.pipelines.plan import guidance
from diffusax.pipelines.plan.arguments import Call, check_call
from diffusax.pipelines.tasks.composed_prompts import compose
from diffusax.pipelines.tasks.setup import (
    check_frames,
    check_memory,
    image_size,
    make_schedule,
    require_channels,
)
from diffusax.pipelines.tasks.tasks import text_to_image
from diffusax.samplers import Schedule, scheduler_from_name
from diffusax.text.extra_networks import log_prompt_warnings, read_tags


@dataclasses.dataclass(frozen=True)
class CheckedImage:
    """A checked image to generate from a prompt."""

    call: Call
    """A call with one prompt and one seed."""
    scheduler: Any
    schedule: Schedule
    """The rows of its sampler."""
    kind: tuple[Any, ...]
    """The key that all images of a batch have in common; it begins with height and width. Of videos
    it also has the number of frames."""
    branches: int
    """The lanes that it needs at first."""
    guided_until: int
    """The row from which on it needs one lane."""
    adapters: tuple[str, ...] = ()
    """The adapters that lie side by side in its batch; their order decides bits."""
    number: int = 0
    """The index of the image; image i of a seed is the same as that of a pipeline's call."""

    @property
    def rows(self) -> int:
        """The number of rows of its run."""
        return len(self.schedule)


def check_image(c: Components, call: Call, scheduler: Any, number: int = 0) -> CheckedImage:
    """Checks the arguments of a call for one image with this sampler, and makes its schedule.

    Raises:
        ValueError: an argument is not valid; says which, and what is.
    """
    c = c.variant(scheduler=scheduler)
    size = image_size(c, call)
    check_frames(c, call)
    check_memory(c, 1, *size, frames=call.num_frames)
    require_channels(c, c.latents.channels, "text to image")
    if call.noise != "jax":
        raise ValueError(f"noise must be 'jax' in a batch of several seeds (got {call.noise!r})")
    if not isinstance(call.seed, int) or not 0 <= call.seed < 2**32:
        raise ValueError(f"seed must be an integer from 0 to {2**32 - 1} (got {call.seed})")
    schedule = make_schedule(c, call, size)
    texts = compose(c, call, len(schedule)) if call.prompt_weighting else None
    if texts is not None and not (texts.is_plain and len(texts.stretches) == 1):
        raise ValueError(
            "prompt has AND, a weight of its own or text that changes from step to step, which "
            "runs over many prompts do not read; leave prompt_weighting out, or generate it alone"
        )
    rows, weights = len(schedule), c.family.guidance.weights(c, call)
    table = c.family.guidance.by_row(c, call, weights, schedule.timesteps, rows)
    until = guidance.last_guided_row(table)
    thresholds = schedule.table().threshold is not None
    adapters = stacked_adapters(c, call)
    frames = () if call.num_frames is None else (call.num_frames,)
    kind = (*size, *frames, c.family.batch_key(c, call), table_height(rows), thresholds, adapters)
    branches = len(weights) + 1 if until else 1
    return CheckedImage(call, scheduler, schedule, kind, branches, until, adapters, number)


def stacked_adapters(c: Components, call: Call) -> tuple[str, ...]:
    """Returns the names of the adapters that lie beside each other in the batch of an image.

    They are all of the pipeline, so that images with any of them share a batch, or those of the
    image where all would be more than a stack of the largest bucket.
    """
    networks = {name: c.networks[name] for name in c.denoiser.components}
    adapters = call_adapters(c, call, 1)
    if adapters is None:
        return ()
    known = c.adapters.adapters
    all_names = [name for name, one in known.items() if networks.keys() & one.components]
    shapes = stack_shapes([known[name] for name in all_names], networks)
    if all(shape.rank <= RANKS[-1] for shape in shapes.values()):
        return tuple(all_names)
    return tuple(name for name in all_names if name in adapters.loras)


_ID = re.compile(r"[A-Za-z0-9_-]{1,100}")
_OF_VIDEOS = ("frames", "fps", "clip_format")
"""The settings that are for videos alone."""
_ARGUMENTS = frozenset(field.name for field in dataclasses.fields(Call))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(Options):
    """The settings that decide the images of a run, besides the pipeline and the prompts.

    The values of a line override them.
    """

    format: Literal["images", "webdataset", "parquet"] = "images"
    """The format to write: folders of PNG files or clips, tar files, or Parquet files."""
    batch_size: ImageCount = 8
    """The number of images that are generated at once."""
    images_per_shard: Annotated[int, Meta(ge=1, le=1_000_000)] = 256
    """The most images that a folder, tar or Parquet file holds."""
    num_images: ImageCount = 1
    """The number of images to generate for each line."""
    seed: Seed = 0
    """The seed from which, with the number of the line, lines without a seed get theirs."""
    negative_prompt: str | None = None
    """A text to steer away from."""
    steps: Steps | None = None
    """The number of sampler steps; the pipeline's own by default."""
    guidance: Scale | None = None
    """Classifier-free guidance scale, off at 1 (Z-Image: at 0); the pipeline's own by default."""
    sampler: str | None = None
    """The name of a sampler; the checkpoint's own by default."""
    height: Pixels | None = None
    """Height in pixels; by default the model's own."""
    width: Pixels | None = None
    """Width in pixels; by default the model's own."""
    clip_skip: Annotated[int, Meta(ge=0, le=100)] | None = None
    """The number of the text encoder's last layers to leave out."""
    long_prompt: bool = False
    """Use all of a long prompt, in windows as long as the text encoder reads."""
    prompt_weighting: bool = False
    """Read (word:1.3) as a weight."""
    frames: Annotated[int, Meta(ge=1, le=100_000)] | None = None
    """The number of frames, for models that generate videos; the pipeline's own by default."""
    fps: Annotated[float, Meta(gt=0, le=240)] | None = None
    """The frames per second that the files of videos say; the model's own by default."""
    clip_format: ClipFormat | None = None
    """The files of videos: mp4, the default, animated webp or gif, or npz, an array as it is."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_images > self.images_per_shard:
            raise ValueError(
                f"images_per_shard={self.images_per_shard} must be at least "
                f"num_images={self.num_images}"
            )

    @property
    def lines_per_shard(self) -> int:
        """The number of lines in a shard; all images of a line are in one shard."""
        return self.images_per_shard // self.num_images


@dataclasses.dataclass(frozen=True)
class Request:
    """An image to generate, its key and the information about it."""

    key: str
    image: CheckedImage
    info: dict[str, Any]


class Requests:
    """Makes requests from rows for one pipeline.

    videos: whether it generates videos.
    """

    def __init__(self, pipe: Any, settings: Settings):
        """Checks that the settings suit the pipeline. pipe: a text-to-image pipeline, or one of
            text to video.

        Raises:
            ValueError: the pipeline needs more than prompts, or the settings do not suit it.
            ImportError: what writes its videos is not installed.
        """
        self.videos: bool = pipe.family.draws_videos
        rate = pipe.family.frame_rate
        self._usual_fps = settings.fps or (rate and rate(pipe.parts.options))
        given = [name for name in _OF_VIDEOS if getattr(settings, name) is not None]
        if given and not self.videos:
            raise ValueError(
                f"{given[0]} is for models that generate videos, and {type(pipe).__name__} "
                "generates images; leave it out"
            )
        if self.videos:
            check_writes(settings.clip_format or "mp4")
        if type(pipe).task is not text_to_image:
            raise ValueError(
                f"a run over many prompts draws from prompts alone, which {type(pipe).__name__} "
                "does not; take AutoPipelineForText2Image"
            )
        self._pipe, self.settings = pipe, settings
        self._columns = {**COLUMNS, **(VIDEO_COLUMNS if self.videos else {})}
        self._scheduler = functools.lru_cache(
            lambda name: pipe.scheduler
            if name is None
            else scheduler_from_name(name, pipe.scheduler)
        )
        parameters = inspect.signature(type(pipe).__call__).parameters
        own = {n: p.default for n, p in parameters.items() if p.default is not p.empty}
        own |= {n: value for n, value in pipe.call_defaults.items() if n in parameters}
        own |= self._arguments({n: v for n, v in vars(settings).items() if n in self._columns})
        for name in ("clip_skip", "long_prompt", "prompt_weighting"):
            own[name] = getattr(settings, name)
        self._defaults = {n: v for n, v in own.items() if n in _ARGUMENTS}
        # A mistake that concerns every line is one error, not a million.
        self._images({"prompt": ""}, number=1)

    def of_row(self, row: Mapping[str, Any], number: int) -> list[Request]:
        """Returns the requests for the images of line `number`.

        Raises:
            ValueError: a value in the row is not valid; names the column and what is valid.
        """
        given = self._arguments(row)
        if not isinstance(given.get("prompt"), str):
            got = "nothing" if given.get("prompt") is None else repr(given["prompt"])[:80]
            raise ValueError(f"prompt must be a text (got {got})")
        key, fps = _key(given.pop("id", None), number), self._fps(given.pop("fps", None))
        images = self._images(given, number)
        keys = [key] if len(images) == 1 else [f"{key}-{i}" for i in range(len(images))]
        return [
            Request(key, image, self._info(key, number, image, given.get("sampler"), fps))
            for key, image in zip(keys, images)
        ]

    def unknown_columns(self, row: Mapping[str, Any]) -> list[str]:
        """Returns the columns of a row that are not used."""
        return [str(name) for name in row if name not in self._columns]

    @property
    def ending(self) -> str:
        """The ending of the files of images or videos, without a dot."""
        return (self.settings.clip_format or "mp4") if self.videos else "png"

    def _arguments(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the values of a row under the names of a call's arguments."""
        given: dict[str, Any] = {}
        for name, value in row.items():
            argument = self._columns.get(name)
            if argument is None or value is None:
                continue
            if argument in given:
                raise ValueError(f"{name} is another name of {argument}; give one of the two")
            given[argument] = value
        return given

    def _fps(self, given: Any) -> float | None:
        """Returns the frames per second of a line's video, or None where images are generated.

        Raises:
            ValueError: they are no number that files can have.
        """
        if not self.videos:
            return None
        found = self._usual_fps if given is None else given
        if isinstance(found, bool) or not isinstance(found, int | float) or not 0 < found <= 240:
            raise ValueError(f"fps must be a number up to 240 (got {given!r})")
        return float(found)

    def _images(self, given: dict[str, Any], number: int) -> list[CheckedImage]:
        arguments = {**self._defaults, "seed": line_seed(self.settings.seed, number), **given}
        sampler = arguments.pop("sampler", self.settings.sampler)
        if sampler is not None and not isinstance(sampler, str):
            raise ValueError(f"sampler must be a name (got {sampler!r})")
        scheduler, call = self._scheduler(sampler), check_call(_with_adapters(arguments))
        if isinstance(call.negative_prompt, list):
            raise ValueError("negative_prompt must be a text (got a list)")
        scale = self._pipe.family.guidance.argument
        if call.negative_prompt and scale not in COLUMNS.values():
            raise ValueError(
                f"negative_prompt does nothing for {self._pipe.family.name} without {scale}, which "
                "runs over many prompts do not have; leave it out"
            )
        numbers = range(self.settings.num_images)
        c, call = resolve_adapters(self._pipe.parts, call)
        if c is not self._pipe.parts:
            raise ValueError(
                "adapters has one that is no product of low rank, and would be merged into the "
                "model's parameters; call fuse_lora before the run"
            )
        return [check_image(c, call, scheduler, number) for number in numbers]

    def _info(
        self, key: str, line: int, image: CheckedImage, sampler: str | None, fps: float | None
    ) -> dict[str, Any]:
        call, (height, width) = image.call, image.kind[:2]
        of_videos = {
            "num_frames": call.num_frames,
            "fps": fps,
            "guidance_scale_2": call.guidance_scale_2,
        }
        return {
            "key": key,
            "line": line,
            "prompt": call.prompt,
            "negative_prompt": call.negative_prompt,
            "seed": call.seed,
            "number": image.number,
            "height": height,
            "width": width,
            "num_inference_steps": call.num_inference_steps,
            "guidance_scale": call.guidance_scale,
            "sampler": sampler or self.settings.sampler or self._pipe.scheduler.class_name,
            **(of_videos if self.videos else {}),
        }


def line_seed(seed: int, number: int) -> int:
    """Returns the seed of a line without one, which is the same in every run with this seed."""
    return int(np.random.SeedSequence(seed, spawn_key=(number,)).generate_state(1)[0])


def _with_adapters(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a line's arguments, with the LoRAs that the prompt or a column of JSON names."""
    log_prompt_warnings(arguments["prompt"])
    prompt, tags = read_tags(arguments["prompt"])
    adapters = arguments.get("adapters")
    if isinstance(adapters, str):
        try:
            adapters = json.loads(adapters)
        except (ValueError, RecursionError):
            raise ValueError(f"adapters must be JSON (got {adapters[:80]!r})") from None
    if isinstance(adapters, Mapping):
        # A table has all names in each of its lines.
        adapters = {name: weight for name, weight in adapters.items() if weight is not None}
    if tags:
        adapters = {**(adapters or {}), **tags}
    return {**arguments, "prompt": prompt, "adapters": adapters}


def _key(value: Any, number: int) -> str:
    """Returns the id of a line, or else its number as text."""
    if value is None:
        return f"{number:09}"
    text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    if not isinstance(text, str) or not _ID.fullmatch(text):
        raise ValueError(
            f"id must be a number or 1 to 100 letters, digits, '-' and '_' (got {value!r})"
        )
    return text
