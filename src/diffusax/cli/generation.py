"""What the commands that generate images share: options, the call, the files they write.

Modules that take long to import, such as JAX, are imported once the options are checked.
"""

import contextlib
import dataclasses
import inspect
import itertools
import secrets
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import UseAppendAction

from diffusax.boundary.messages import escaped
from diffusax.boundary.options import Options, Scale, Seed, Steps
from diffusax.cli.parsing import OWN

Dtype = Literal["float32", "bfloat16", "float16"]
StoredWeights = Literal["int8", "int8_convrot", "fp8", "file"]
Generator = Callable[[Any, int], tuple[list[Any], list[str]]]
"""A function of a command's options and a seed that returns images and the text of each."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationOptions(Options):
    """The options of all commands that generate images."""

    negative_prompt: Annotated[str | None, OWN] = None
    """A text to steer away from."""
    steps: Annotated[Steps | None, OWN] = None
    """Number of sampler steps; the pipeline's own by default."""
    guidance: Annotated[Scale | None, OWN] = None
    """Classifier-free guidance scale, off at 1 (Z-Image: at 0); the pipeline's own by default."""
    sampler: Annotated[str | None, OWN] = None
    """Name of a sampler, such as dpm++2m or euler_a; the checkpoint's own by default."""
    dtype: Dtype = "float32"
    """The dtype of the parameters and of the computation."""
    vae_dtype: Annotated[Dtype | None, OWN] = None
    """The dtype of the autoencoder, if it should differ."""
    weights: StoredWeights = "file"
    """Store the large networks' kernels in eight bits (int8, int8_convrot, fp8), which halves what
    they take in bfloat16; with file only those that are quantised in their file, with the same
    numbers."""
    step_cache: Annotated[str | None, OWN] = None
    """Leave out a part of the network in some steps: first-block=0.1 or taylorseer=5 for a
    transformer, deep=3 for a UNet. The number is a threshold, or one in how many steps is whole."""
    variant: Annotated[str | None, OWN] = None
    """Load the checkpoint's variant of this name, such as fp16."""
    revision: Annotated[str | None, OWN] = None
    """Load this branch, tag or commit of a Hub repository."""
    vae_tiling: bool = False
    """Decode large images in tiles."""
    mesh: Annotated[str | None, OWN] = None
    """The devices to spread images and parameters over, such as data=4,tensor=2; by default each
    generates its share of the images."""
    compiled: Annotated[Path | None, OWN] = None
    """Use the programs that `diffusax compile --output` wrote to this folder; it must be one that
    you trust, as programs can run any code."""
    lora_dir: Annotated[Path | None, OWN] = None
    """The folder with the LoRAs that prompts name: <lora:NAME:0.8> is NAME.safetensors in it, with
    a weight of 0.8."""
    embeddings: UseAppendAction[tuple[Path, ...]] = ()
    """Load embeddings of textual inversion: a safetensors file, or a folder of some, whose names
    are the words for prompts; can be given several times."""
    profile: Annotated[Path | None, OWN] = None
    """Write a trace of the run to this folder, for TensorBoard or Perfetto."""

    def loading(self) -> dict[str, Any]:
        """Returns the options of `from_pretrained`."""
        names = ("dtype", "vae_dtype", "weights", "variant", "revision", "mesh")
        return {name: getattr(self, name) for name in names}

    def prepare(self, pipe: Any) -> Any:
        """Sets the sampler and what `equip` does. Returns the pipeline."""
        if self.sampler is not None:
            from diffusax.samplers import scheduler_from_name

            pipe.scheduler = scheduler_from_name(self.sampler, pipe.scheduler)
        return self.equip(pipe)

    def equip(self, pipe: Any) -> Any:
        """Sets what the options name: tiling, cache, embeddings, programs. Returns the pipeline."""
        if self.vae_tiling:
            pipe.enable_vae_tiling()
        if self.step_cache is not None:
            from diffusax.models.caches.configs import config_from_text

            for name in pipe.parts.denoiser.predicting:
                pipe.parts.models[name].enable_cache(config_from_text(self.step_cache))
        if self.embeddings:
            from diffusax.checkpoints.embeddings import embedding_files

            files = [file for path in self.embeddings for file in embedding_files(path)]
            pipe.load_textual_inversion(files)
        if self.compiled is not None:
            pipe.load_compiled(self.compiled)
        return pipe

    def profiled(self) -> contextlib.AbstractContextManager[Any]:
        """Returns the context that writes the trace, if the options ask for one."""
        if self.profile is None:
            return contextlib.nullcontext()
        import jax

        return jax.profiler.trace(str(self.profile))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToFile(GenerationOptions):
    """The options of commands that write one image, or a few beside each other."""

    seed: Annotated[Seed | None, OWN] = None
    """Random seed, another one each time by default. Image i of a seed is always the same."""
    noise: Literal["jax", "torch"] = "jax"
    """The source of the noise: JAX, or the numbers that PyTorch draws for the seed."""
    output: Annotated[str | None, OWN] = None
    """Write the image to this .png file, replacing an older one; by default to out.png or the first
    of out-1.png, out-2.png, ... that does not exist. Several images are numbered, and this file is
    their contact sheet. Videos are written to .mp4 or .gif files."""


VIDEOS = (".mp4", ".gif")
"""The files that videos are written to."""


def output_file(text: str | None, *others: str) -> Path | None:
    """Returns the PNG to write, and makes its folder; returns None where no file is named.

    others: further suffixes that it may have.

    Raises:
        ValueError: the text cannot name such a file.
        OSError: its folder cannot be made.
    """
    if text is None:
        return None
    path = Path(text)
    if not path.name or text.endswith(("/", "\\")) or path.is_dir():
        raise ValueError(f"--output must be a file, not a folder (got {text})")
    path = path.with_suffix(path.suffix or ".png")
    if path.suffix.lower() not in (".png", *others):
        raise ValueError(f"--output must be a {' or '.join(('.png', *others))} file (got {text})")
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def seed_or_random(seed: int | None) -> int:
    """Returns the seed, or a random one for None."""
    return secrets.randbits(32) if seed is None else seed


def call(pipe: Any, **options: Any) -> list[Any]:
    """Calls the pipeline with the options that are not None, and returns its images, or videos.

    Raises:
        ValueError: the pipeline does not know an option, or refuses its value.
    """
    from diffusax.pipelines.tasks.setup import size_warning

    given = {name: value for name, value in options.items() if value is not None}
    for name in given:
        if name not in inspect.signature(type(pipe).__call__).parameters:
            raise ValueError(f"{type(pipe).__name__} has no {name}; leave the option out")
    names = inspect.signature(type(pipe).__call__).parameters
    if "true_cfg_scale" in names and given.get("negative_prompt"):
        raise ValueError(
            f"{type(pipe).__name__} reads a negative prompt only with true_cfg_scale, which "
            "commands do not have; leave --negative-prompt out, or draw in Python"
        )
    if sentence := size_warning(pipe.parts, given.get("height"), given.get("width")):
        warnings.warn(sentence, stacklevel=2)
    own = {name: value for name, value in pipe.call_defaults.items() if name in names}
    return pipe(**{**own, **given, "output_type": "pil"})[0]


def describe(
    pipe: Any,
    command: Any,
    images: Sequence[Any],
    seed: int,
    given: Mapping[str, Any],
    more: Mapping[str, Any] | None = None,
) -> list[str]:
    """Returns the settings of each image in the form that stable-diffusion-webui writes.

    Arguments:
        pipe: the pipeline after its call.
        command: the command's options.
        images: the images.
        seed: the seed of the run.
        given: the fields of `infotext.write` that this command alone has, and the values of the
            call's arguments where they are not the command's options; None for those of the call.
        more: further settings by name; those that are None are left out.
    """
    from diffusax.samplers import sampler_name

    parameters = inspect.signature(type(pipe).__call__).parameters
    used = {name: one.default for name, one in parameters.items()} | pipe.call_defaults
    fields = {
        "num_inference_steps": command.steps or used["num_inference_steps"],
        "sampler": command.sampler or sampler_name(pipe.scheduler),
        "guidance_scale": pipe.guidance_scale,
        "noise": command.noise,
        **{name: used.get(name) if value is None else value for name, value in given.items()},
    }
    settings = {**_loading_settings(command), **(more or {})}
    return write_texts(command, images, seed, fields, settings)


def write_texts(
    command: Any,
    images: Sequence[Any],
    seed: int,
    fields: Mapping[str, Any],
    settings: Mapping[str, Any],
) -> list[str]:
    """Returns the text of each image: its fields beside those of every command, and settings."""
    from diffusax.infotext import text as infotext

    common = {
        "prompt": command.prompt,
        "negative_prompt": command.negative_prompt or "",
        "seed": seed,
        "width": images[0].width,
        "height": images[0].height,
        "model": Path(command.model).name,
        "prompt_weighting": False,
        "long_prompt": False,
    }
    texts = ({**common, **fields, "number": i} for i in range(len(images)))
    return [infotext.write(text, settings) for text in texts]


def _loading_settings(command: GenerationOptions) -> dict[str, Any]:
    """Returns what else decides the pixels: how the model is loaded and its images decoded."""
    return {
        "Revision": command.revision,
        "Variant": command.variant,
        "Dtype": None if command.dtype == "float32" else command.dtype,
        "VAE dtype": command.vae_dtype,
        "Weights": None if command.weights == "file" else command.weights,
        "VAE tiling": command.vae_tiling or None,
        "Step cache": command.step_cache,
    }


def lines_of_input() -> list[str]:
    """Reads the lines of standard input that are not blank, without spaces around them.

    Raises:
        ValueError: there is no such line, or the input is not UTF-8 text.
    """
    try:
        text = sys.stdin.buffer.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"standard input is not UTF-8 text ({error.reason})") from None
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        raise ValueError("standard input has no line with a prompt")
    return lines


def save(
    output: Path | None,
    images: Sequence[Any],
    parameters: Sequence[str],
    seed: int,
    *,
    sheet: Any = None,
) -> list[Path]:
    """Writes the images, numbered beside a sheet if there are several, and prints the files' names.

    Arguments:
        output: the file of the image or of the sheet; None takes the first free name.
        images: PIL images of one size.
        parameters: the settings of each image.
        seed: the seed of the run.
        sheet: a PIL image with all of them; by default a contact sheet.
    """
    from diffusax.images.conversion import png_parameters
    from diffusax.images.sheets import contact_sheet

    count = len(images)
    files = _free_files(count) if output is None else _files(output, count)
    replaced = "; replaced" if any(file.exists() for file in files) else ""
    if count > 1:
        images = [contact_sheet(images) if sheet is None else sheet, *images]
        parameters = [parameters[0], *parameters]
    for file, image, text in zip(files, images, parameters):
        image.save(file, pnginfo=png_parameters(text))
    said = f"{count} image{'' if count == 1 else 's'}, seed {seed}{replaced}"
    print(f"{escaped(files[0])} ({said})")
    return files


def check_kind(command: Any, name: str, *, videos: bool) -> None:
    """Raises ValueError where options of videos are given for images, or the other way around.

    Arguments:
        command: the options of `diffusax generate`.
        name: what generates.
        videos: whether that generates videos.
    """
    suffix = Path(command.output or "").suffix.lower()
    if videos:
        if suffix == ".png" or command.grid:
            raise ValueError(
                f"{name} generates videos; give --output as .mp4 or .gif, and no --grid"
            )
    elif suffix in VIDEOS or command.frames is not None:
        raise ValueError(f"{name} generates images; give --output as .png, and no --frames")


def save_videos(output: Path | None, videos: Sequence[Any], seed: int) -> list[Path]:
    """Writes videos, numbered if there are several, and prints the files' names.

    Arguments:
        output: the file; None takes the first free name.
        videos: each a `Clip`, or its file, a `VideoFile`.
        seed: the seed of the run.
    """
    from diffusax.images.clips import SUFFIXES, VideoFile, encode_video

    count, made = len(videos), videos[0]
    usual = SUFFIXES[made.media_type] if isinstance(made, VideoFile) else VIDEOS[0]
    files = _free_files(count, usual) if output is None else _files(output, count)
    files = files[1:] or files
    kinds = {suffix: kind for kind, suffix in SUFFIXES.items()}
    for file, video in zip(files, videos, strict=True):
        kind, what = kinds[file.suffix.lower()], "video"
        if not isinstance(video, VideoFile) or video.media_type != kind:
            clip = _clip_of(video) if isinstance(video, VideoFile) else video
            what = f"{len(clip.frames)} frames"
            video = encode_video(clip.frames, clip.fps, media_type=kind)
        file.write_bytes(video.data)
        print(f"{escaped(file)} ({what}, seed {seed})")
    return files


def _clip_of(file: Any) -> Any:
    """Returns the `Clip` in a `VideoFile`, to write it as another kind."""
    from diffusax.images.clips import Clip, opened

    with opened(file.data, 100_000, 2**28) as reader:
        return Clip(tuple(reader.frames), reader.fps() or 1)


def _files(output: Path, count: int) -> list[Path]:
    """Returns the files that `count` images are written to: one, or a sheet and the images."""
    numbered = [output.with_stem(f"{output.stem}-{i}") for i in range(count)]
    return [output, *(numbered if count > 1 else ())]


def _free_files(count: int, suffix: str = ".png") -> list[Path]:
    """Returns the files of the first name of which none exists."""
    names = itertools.chain([f"out{suffix}"], (f"out-{i}{suffix}" for i in itertools.count(1)))
    candidates = (_files(Path(name), count) for name in names)
    return next(files for files in candidates if not any(file.exists() for file in files))
