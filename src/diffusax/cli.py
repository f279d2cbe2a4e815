"""The command line: one dataclass per command."""

import dataclasses
import secrets
import sys
import warnings
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from tyro.conf import Positional

import diffusax
from diffusax.arguments import parse_arguments
from diffusax.checkpoints import read_model_index, resolve
from diffusax.checkpoints.files import load_json, weight_files
from diffusax.checkpoints.tensors import read_entries
from diffusax.extras import require_extra
from diffusax.pictures import contact_sheet, png_parameters
from diffusax.samplers import SAMPLER_NAMES, scheduler_from_name


@dataclasses.dataclass(frozen=True)
class Generate:
    """Draw pictures from a prompt."""

    prompt: Positional[str]
    """What to draw."""
    model: str = "emoji"
    """A checkpoint: a folder in diffusers' layout, or a Hub repository id; by default the small
    model inside the package, which draws emoji."""
    negative_prompt: str = ""
    """What to steer away from."""
    steps: int = 20
    """Sampler steps."""
    guidance: float = 7.5
    """Classifier-free guidance scale; 1 turns it off."""
    seed: int | None = None
    """Of the run; picture i of a seed is always the same."""
    height: int | None = None
    """In pixels; the model's own size by default."""
    width: int | None = None
    """In pixels; the model's own size by default."""
    num_images: int = 1
    """How many pictures; more than one also gives a contact sheet."""
    sampler: str | None = None
    """A sampler by name, such as dpm++2m or euler_a; the checkpoint's own by default."""
    dtype: str = "float32"
    """Of parameters and computation: float32, bfloat16 or float16."""
    vae_dtype: str | None = None
    """The autoencoder's, where it should differ."""
    variant: str | None = None
    """The checkpoint's variant, such as fp16."""
    revision: str | None = None
    """Of a Hub repository: a branch, tag or commit."""
    noise: str = "jax"
    """jax, or torch for PyTorch's numbers of the same seed."""
    clip_skip: int | None = None
    """How many of the text encoder's last layers to leave out."""
    long_prompt: bool = False
    """Use all of a long prompt, in windows of 77 tokens."""
    prompt_weighting: bool = False
    """Read (word:1.3) as a weight."""
    vae_tiling: bool = False
    """Decode large pictures in tiles."""
    output: Path = Path("out.png")
    """The picture, or the contact sheet of several, which are numbered beside it."""


@dataclasses.dataclass(frozen=True)
class Info:
    """Show what a checkpoint holds, and which samplers there are."""

    model: Positional[str]
    """A folder in diffusers' layout, or a Hub repository id."""
    variant: str | None = None
    """The checkpoint's variant, such as fp16."""


def main(args: list[str] | None = None) -> None:
    """The entry point of `diffusax` and of `python -m diffusax`.

    A mistake ends with one line on stderr and exit code 2.
    """
    warnings.showwarning = _show_warning
    args = sys.argv[1:] if args is None else args
    try:
        if args[:1] in (["train"], ["cache-latents"]):
            _train(args)
            return
        command = parse_arguments(Generate | Info, args, prog="diffusax")
        generate(command) if isinstance(command, Generate) else info(command)
    except (ValueError, FloatingPointError, OSError, ImportError) as error:
        _fail(str(error))


def generate(command: Generate) -> list[Path]:
    """Draws the pictures and returns the files written, the contact sheet first if there is one."""
    output = command.output.with_suffix(command.output.suffix or ".png")
    if output.suffix.lower() != ".png":
        raise ValueError(f"--output must be a .png file (got {output})")
    seed = secrets.randbits(32) if command.seed is None else command.seed
    pipe = diffusax.DiffusionPipeline.from_pretrained(
        command.model,
        dtype=command.dtype,
        vae_dtype=command.vae_dtype,
        variant=command.variant,
        revision=command.revision,
    )
    if command.sampler is not None:
        pipe.scheduler = scheduler_from_name(command.sampler, pipe.scheduler)
    if command.vae_tiling:
        pipe.enable_vae_tiling()
    images = pipe(
        command.prompt,
        negative_prompt=command.negative_prompt,
        num_inference_steps=command.steps,
        guidance_scale=command.guidance,
        height=command.height,
        width=command.width,
        num_images_per_prompt=command.num_images,
        seed=seed,
        noise=command.noise,
        clip_skip=command.clip_skip,
        long_prompt=command.long_prompt,
        prompt_weighting=command.prompt_weighting,
    ).images
    output.parent.mkdir(parents=True, exist_ok=True)
    sampler = command.sampler or pipe.scheduler.class_name
    pnginfo = png_parameters(_parameters(command, sampler, seed, images[0].size))
    if len(images) == 1:
        images[0].save(output, pnginfo=pnginfo)
        files = [output]
    else:
        contact_sheet(images).save(output, pnginfo=pnginfo)
        files = [output, *(output.with_stem(f"{output.stem}-{i}") for i in range(len(images)))]
        for file, image in zip(files[1:], images):
            image.save(file, pnginfo=pnginfo)
    print(f"{output} ({len(images)} image{'s' * (len(images) > 1)}, seed {seed})")
    return files


def info(command: Info) -> None:
    """Prints the components of a checkpoint from the headers of its files; loads no weights."""
    folder = resolve(command.model, variant=command.variant)
    class_name, components, _ = read_model_index(folder)
    print(f"{class_name} in {folder}")
    for name, (_, component) in sorted(components.items()):
        print(f"  {name:14} {component:24} {_size(folder / name, command.variant)}".rstrip())
    print(f"samplers: {', '.join(SAMPLER_NAMES)}")


def _train(args: list[str]) -> None:
    # Its dependencies are an extra.
    require_extra("optax", "train")
    from diffusax.training.command import cache_command, train_command

    run = train_command if args[0] == "train" else cache_command
    run(args[1:])


def _size(folder: Path, variant: str | None) -> str:
    if not (folder / "config.json").is_file():
        return ""
    load_json(folder / "config.json")
    entries = [
        entry for file in weight_files(folder, variant) for entry in read_entries(file).values()
    ]
    count = sum(int(np.prod(entry.shape)) for entry in entries)
    nbytes = sum(entry.nbytes for entry in entries)
    dtypes = "/".join(sorted({str(entry.dtype) for entry in entries}))
    return f"{count / 1e6:9.1f} M parameters  {nbytes / 2**20:9.1f} MiB  {dtypes}"


def _parameters(command: Generate, sampler: str, seed: int, size: tuple[int, int]) -> str:
    """The settings in the form that stable-diffusion-webui writes and image tools read."""
    lines = [command.prompt]
    if command.negative_prompt:
        lines.append(f"Negative prompt: {command.negative_prompt}")
    settings: dict[str, Any] = {
        "Steps": command.steps,
        "Sampler": sampler,
        "CFG scale": command.guidance,
        "Seed": seed,
        "Size": f"{size[0]}x{size[1]}",
        "Model": Path(command.model).name,
        "RNG": command.noise,
        "Clip skip": command.clip_skip,
        "Version": f"diffusax {diffusax.__version__}",
    }
    lines.append(", ".join(f"{k}: {v}" for k, v in settings.items() if v is not None))
    return "\n".join(lines)


def _fail(message: str) -> NoReturn:
    print(f"diffusax: error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    print(f"diffusax: warning: {message}", file=sys.stderr)
