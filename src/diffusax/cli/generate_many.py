"""`diffusax generate --prompts`."""

import dataclasses
import functools
import re
import sys
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta
from tyro.conf import FlagCreatePairsOff, configure

import diffusax
from diffusax import offline
from diffusax.boundary.messages import escaped
from diffusax.boundary.options import ImageCount, Pixels
from diffusax.cli import loras
from diffusax.cli.generation import GenerationOptions, lines_of_input
from diffusax.cli.parsing import OWN, parse
from diffusax.cli.parts import jax_part, parse_part
from diffusax.offline.clips import ClipFormat

LEFT_OUT = 3
"""The exit code of a run that has generated all possible images, and has left lines out."""


@configure(FlagCreatePairsOff)
@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateMany(GenerationOptions, offline.Settings):
    """Generate the images, or videos, of all lines of a file, for up to millions of lines.

    Run the same command again to continue a run that stopped, however it ended.
    """

    essentials: ClassVar[tuple[str, ...]] = (
        *("prompts", "out", "model", "format", "batch_size", "images_per_shard", "num_images"),
        *("steps", "guidance", "sampler", "seed", "height", "width", "dtype", "shard"),
        *("distributed", "engine"),
    )

    prompts: Path
    """The prompts: a .txt file with one a line, or a .jsonl, .csv or .parquet file with a column
    prompt, where a line may also have its own id, seed, height, width, negative_prompt, sampler,
    steps, guidance and adapters, and for videos frames, fps and guidance_scale_2; or - for standard
    input, with one a line."""
    out: Path
    """The folder to write."""
    model: str = "emoji"
    """A checkpoint: a folder in diffusers' layout, a .safetensors or .gguf file, or a Hub
    repository id; by default the small model inside the package, which generates emoji."""
    height: Annotated[Pixels | None, OWN] = None
    """Height in pixels; by default the model's own."""
    width: Annotated[Pixels | None, OWN] = None
    """Width in pixels; by default the model's own."""
    frames: Annotated[Annotated[int, Meta(ge=1, le=100_000)] | None, OWN] = None
    """The number of frames, for models that generate videos; by default the model's own."""
    fps: Annotated[Annotated[float, Meta(gt=0, le=240)] | None, OWN] = None
    """The frames per second that the files of videos say; the model's own by default."""
    clip_format: Annotated[ClipFormat | None, OWN] = None
    """The files of videos: mp4, the default, animated webp or gif, or npz, an array as it is."""
    clip_skip: Annotated[Annotated[int, Meta(ge=0, le=100)] | None, OWN] = None
    """The number of the text encoder's last layers to leave out."""
    shard: Annotated[str | None, OWN] = None
    """Generate a part of the images, such as 0/4 for the first of four processes."""
    distributed: bool = False
    """Run as one of several JAX processes and generate its part: they find each other on TPU pods
    and under Slurm by themselves, elsewhere through JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and
    JAX_PROCESS_ID."""
    engine: Literal["local", "ray"] = "local"
    """Generate in this process, or in the workers of a Ray cluster."""
    ray_workers: ImageCount = 2
    """The number of Ray workers that generate at the same time."""
    ray_resources: Annotated[str | None, OWN] = None
    """The resources of each Ray worker, such as GPU=1 or TPU=4,CPU=8; by default one CPU."""

    def __post_init__(self) -> None:
        super().__post_init__()
        parse_part("shard", self.shard)
        _resources(self.ray_resources)
        if self.engine == "ray" and (self.shard or self.distributed):
            raise ValueError("--engine ray divides the work itself; leave --shard out")
        if self.shard and self.distributed:
            raise ValueError("--distributed says which part to draw; leave --shard out")
        if self.ray_resources and self.engine != "ray":
            raise ValueError("--ray-resources needs --engine ray")

    def run(self) -> None:
        """Generates the images and prints their number; exits with 3 where lines were left out."""
        part = jax_part() if self.distributed else parse_part("shard", self.shard)
        try:
            done = self._generate_with_ray() if self.engine == "ray" else self._generate(part)
        except offline.Stopped as stopped:
            print(f"diffusax: {escaped(stopped)}", file=sys.stderr)
            sys.exit(stopped.exit_code)
        lines = "line" if done.errors == 1 else "lines"
        left_out = f", {done.errors} {lines} left out: see errors.jsonl" if done.errors else ""
        rest = "" if done.finished else "; other shards are not finished"
        print(f"{escaped(self.out)} ({done.drawn} drawn{left_out}{rest})")
        if done.errors:
            sys.exit(LEFT_OUT)

    def settings(self) -> offline.Settings:
        """Returns the settings that decide the images."""
        names = [field.name for field in dataclasses.fields(offline.Settings)]
        return offline.Settings(**{name: getattr(self, name) for name in names})

    def source(self) -> dict[str, Any]:
        """Returns the checkpoint and options that the pipeline is loaded from."""
        source = {"model": self.model, "variant": self.variant, "revision": self.revision}
        return {
            **source,
            **({"embeddings": list(map(str, self.embeddings))} if self.embeddings else {}),
        }

    def load(self) -> Any:
        """Loads the pipeline. Its sampler is the option's, which lines may override."""
        pipe = diffusax.AutoPipelineForText2Image.from_pretrained(self.model, **self.loading())
        if self.lora_dir is not None:
            loras.load_folder(pipe, self.lora_dir)
        return self.equip(pipe)

    def _prompts(self) -> Path | list[str]:
        return lines_of_input() if str(self.prompts) == "-" else self.prompts

    def _generate(self, part: tuple[int, int] | None) -> offline.Summary:
        # Checked before anything large is loaded.
        prompts = offline.open_prompts(self._prompts())
        pipe = self.load()
        with self.profiled():
            return offline.generate(
                pipe,
                prompts,
                self.out,
                self.settings(),
                shard=part,
                source=self.source(),
            )

    def _generate_with_ray(self) -> offline.Summary:
        return offline.generate_with_ray(
            functools.partial(GenerateMany.load, self),
            self._prompts(),
            self.out,
            self.settings(),
            workers=self.ray_workers,
            resources=_resources(self.ray_resources),
            source=self.source(),
        )


def command(args: list[str]) -> GenerateMany:
    """Reads the options from the arguments."""
    return parse(GenerateMany, args, prog="diffusax generate")


def _resources(text: str | None) -> dict[str, float]:
    """Reads GPU=1,CPU=8 into numbers by name."""
    if text is None:
        return {"CPU": 1.0}
    pairs = [re.fullmatch(r"([A-Za-z][\w.:-]*)=(\d+(?:\.\d+)?)", part) for part in text.split(",")]
    if not all(pairs):
        raise ValueError(f"ray_resources must be NAME=AMOUNT, such as GPU=1 (got {text})")
    return {found[1]: float(found[2]) for found in pairs if found}
