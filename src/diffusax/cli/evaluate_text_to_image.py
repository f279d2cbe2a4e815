"""`diffusax evaluate text-to-image`."""

import dataclasses
import functools
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta
from tqdm.auto import tqdm
from tyro.conf import FlagCreatePairsOff, configure

import diffusax
from diffusax import offline
from diffusax.boundary.messages import escaped
from diffusax.boundary.options import Count, Pixels, Seed
from diffusax.cli.evaluate_edits import PreferenceOptions
from diffusax.cli.generation import GenerationOptions, call
from diffusax.cli.messages import show_messages
from diffusax.cli.parsing import OWN, parse
from diffusax.evaluation import (
    CLIP,
    Gaussian,
    ImageScores,
    Inception,
    Measures,
    evaluate_images,
    frechet_distance,
    save_statistics,
    statistics,
)
from diffusax.evaluation.features import batched
from diffusax.evaluation.images import read_images
from diffusax.evaluation.layouts import PromptBenchmark, write_prompts
from diffusax.evaluation.measures import TITLES
from diffusax.offline.folder import claim
from diffusax.offline.run import pipeline_facts

CaptionedImages = Iterable[tuple[Any, str | None]]
_WRITTEN = ("output", "samples", "profile", "compiled", "batch_size", "mesh", "prompts")
"""The options that change no image of a benchmark."""


@configure(FlagCreatePairsOff)
@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluateTextToImage(PreferenceOptions, GenerationOptions):
    """Measure images: how well they fit their captions, and how far they are from others.

    The images are those that a model generates from prompts (--model, --prompts), or those of a
    data set (--images). With --clip, the CLIP score is the mean of 100 max(cos, 0) over CLIP's
    features of images and captions. With --inception and --reference, the Frechet Inception
    distance (FID) to the reference images is computed like pytorch-fid's. --scores adds what
    people are said to prefer. The output folder gets metrics.json, and statistics.npz, which can be
    a --reference.

    With --layout, the images are written instead for the judges of a benchmark.
    """

    essentials: ClassVar[tuple[str, ...]] = (
        *("model", "prompts", "images", "image_column", "caption_column", "clip", "inception"),
        *("reference", "scores", "layout", "output", "samples", "steps", "guidance", "sampler"),
        *("height", "width", "batch_size", "seed", "dtype"),
    )

    model: Annotated[str | None, OWN] = None
    """The checkpoint that generates: a folder in diffusers' layout, or a Hub repository id."""
    prompts: Annotated[Path | None, OWN] = None
    """The prompts: a .txt file with a prompt a line, or a .jsonl, .csv or .parquet file with a
    column prompt. Of a benchmark GenEval's evaluation_metadata.jsonl, or DPG-Bench's folder of
    prompts."""
    layout: Annotated[Literal["geneval", "dpg"] | None, OWN] = None
    """Write the images of a benchmark as its judge reads them, and measure nothing."""
    images_per_prompt: Annotated[int, Meta(ge=1, le=64)] = 4
    """The number of images of each prompt of a benchmark; of DPG-Bench at most 4."""
    images: Annotated[str | None, OWN] = None
    """Images to measure instead: a folder of images, with a metadata.jsonl or .txt files if their
    captions count, or a data set of Parquet files."""
    split: Annotated[str | None, OWN] = None
    """The split of --images, such as test, several with + between, or all; by default train where
    the data set has splits."""
    reference_split: Annotated[str | None, OWN] = None
    """The split of --reference; by default train where the data set has splits."""
    image_column: str = "image"
    """The column with the images of a data set, also of the reference."""
    caption_column: str = "text"
    """The column with the captions of a data set."""
    clip: Annotated[str | None, OWN] = None
    """The CLIP for the CLIP score: a folder with a whole CLIPModel, or a Hub repository id, such as
    openai/clip-vit-large-patch14."""
    scores: tuple[Literal["pickscore", "hps", "aesthetic"], ...] = ()
    """What PickScore, HPSv2.1 and the predictor of aesthetics say, one or more of them."""
    inception: Annotated[Path | None, OWN] = None
    """The weights of FID's Inception v3: pytorch-fid's pt_inception-2015-12-05-6726825d.pth, or a
    .safetensors file with its tensors."""
    reference: Annotated[str | None, OWN] = None
    """What FID compares with: a folder or data set of images, or an .npz file with mu and sigma."""
    samples: Annotated[Count | None, OWN] = None
    """The number of images; by default one for each prompt, or all there are. With more images than
    prompts, prompts are used again with other noise. Of a benchmark the number of prompts."""
    height: Annotated[Pixels | None, OWN] = None
    """The height of generated images in pixels; by default the model's own."""
    width: Annotated[Pixels | None, OWN] = None
    """The width of generated images in pixels; by default the model's own."""
    batch_size: Count = 8
    """The number of images to generate and measure at a time, over all devices."""
    seed: Seed = 0
    """The random seed. Each prompt has noise of its own."""
    output: Path
    """The folder to write."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.model is None) == (self.images is None):
            raise ValueError("give either --model with --prompts, or --images")
        if (self.model is None) != (self.prompts is None):
            raise ValueError("--model and --prompts go together")
        if self.layout is not None:
            self._check_layout()
        elif self.clip is None and self.inception is None and not self.scores:
            raise ValueError("there is nothing to measure with; give --clip, --inception or both")
        if self.reference is not None and self.inception is None:
            raise ValueError("--reference needs --inception")
        for option, data in (("split", "images"), ("reference_split", "reference")):
            if getattr(self, option) is not None and getattr(self, data) is None:
                raise ValueError(f"--{option.replace('_', '-')} needs --{data}")

    def _check_layout(self) -> None:
        if self.model is None:
            raise ValueError(f"--layout {self.layout} needs --model and --prompts")
        if self.clip is not None or self.inception is not None or self.scores:
            raise ValueError("--layout measures nothing; leave --clip, --inception, --scores out")
        if self.layout == "dpg" and self.images_per_prompt not in (1, 4):
            raise ValueError(
                "images_per_prompt must be 4 or 1 for dpg, whose judge reads four images in two "
                f"rows, or one (got {self.images_per_prompt})"
            )

    def run(self) -> None:
        """Measures, and writes the results."""
        show_messages()
        if self.layout is not None:
            self._write_layout()
            return
        size = self.batch_size
        clip = None if self.clip is None else CLIP.from_pretrained(self.clip, batch_size=size)
        inception, reference = None, None
        if self.inception is not None:
            inception = Inception.from_file(self.inception, batch_size=size)
            if self.reference is not None:
                reference = statistics(
                    inception, self.reference, self.image_column, split=self.reference_split
                )
        measures = Measures.load(self.scores, self.preferences(), batch_size=size)
        with self.profiled():
            scores = evaluate_images(
                self._images(), clip=clip, inception=inception, measures=measures
            )
        self._write(scores, reference)

    def _images(self) -> CaptionedImages:
        if self.images is not None:
            reads = self.clip is not None or {*self.scores} & {"pickscore", "hps"}
            column = self.caption_column if reads else None
            images = read_images(
                self.images, self.image_column, column, self.samples, split=self.split
            )
            return tqdm(images, desc="measuring", disable=None)
        assert self.model is not None
        assert self.prompts is not None
        prompts = read_prompts(self.prompts)
        count = len(prompts) if self.samples is None else self.samples
        return tqdm(self._generated(self.model, prompts, count), "generating", count, disable=None)

    def _load(self, model: str) -> Any:
        pipe = diffusax.AutoPipelineForText2Image.from_pretrained(model, **self.loading())
        pipe = self.prepare(pipe)
        pipe.set_progress_bar_config(disable=True)
        return pipe

    def _draw(self, pipe: Any, texts: Sequence[str], seeds: Sequence[int]) -> list[Any]:
        negative = self.negative_prompt
        return call(
            pipe,
            prompt=list(texts),
            negative_prompt=None if negative is None else [negative] * len(texts),
            num_inference_steps=self.steps,
            guidance_scale=self.guidance,
            height=self.height,
            width=self.width,
            seed=list(seeds),
        )

    def _generated(self, model: str, prompts: list[str], count: int) -> Iterator[tuple[Any, str]]:
        pipe = self._load(model)
        for batch in batched(range(count), self.batch_size):
            # The last batch is filled up, so that all have the same shape.
            numbers = [*batch, *[batch[-1]] * (self.batch_size - len(batch))]
            texts = [prompts[number % len(prompts)] for number in numbers]
            images = self._draw(pipe, texts, [(self.seed + n) % 2**32 for n in numbers])
            yield from zip(images[: len(batch)], texts)

    def _write_layout(self) -> None:
        assert self.layout is not None
        assert self.model is not None
        assert self.prompts is not None
        benchmark = PromptBenchmark.open(self.layout, self.prompts)
        pipe = self._load(self.model)
        names = [field.name for field in dataclasses.fields(self) if field.name not in _WRITTEN]
        facts = {**pipeline_facts(pipe), **{name: getattr(self, name) for name in names}}
        manifest = json.loads(json.dumps(facts, default=str))
        self.output.mkdir(parents=True, exist_ok=True)
        # The judge's folder holds nothing else.
        claim(self.output.with_name(f"{self.output.name}.json"), manifest, self.output)
        with self.profiled():
            count = write_prompts(
                benchmark,
                functools.partial(self._draw, pipe),
                self.output,
                images=self.images_per_prompt,
                batch_size=self.batch_size,
                seed=self.seed,
                count=self.samples,
            )
        print(
            f"wrote {escaped(self.output)} ({count} prompts, as {self.layout}'s judge reads them)"
        )

    def _write(self, scores: ImageScores, reference: Gaussian | None) -> None:
        self.output.mkdir(parents=True, exist_ok=True)
        metrics: dict[str, Any] = {"pictures": scores.pictures}
        if scores.clip_score is not None:
            mean, error = scores.clip_score
            metrics |= {"clip_score": mean, "clip_score_error": error}
            print(f"CLIP score {mean:.3f} ± {error:.3f}")
        for name, (mean, error) in scores.means.items():
            metrics |= {name: mean, f"{name}_error": error}
            print(f"{TITLES[name]} {mean:.4f} ± {error:.4f}")
        if scores.gaussian is not None:
            save_statistics(self.output / "statistics.npz", scores.gaussian)
            if reference is not None:
                metrics["fid"] = frechet_distance(scores.gaussian, reference)
                print(f"FID {metrics['fid']:.3f}")
        names = ("model", "prompts", "images", "clip", "inception", "reference", "seed", "steps")
        networks: dict[str, Any] = {name: getattr(self, name) for name in self.scores}
        settings = {name: getattr(self, name) for name in (*names, "guidance", "sampler")}
        settings |= networks
        metrics |= {
            f"{k}_model" if k in networks else k: str(v) if isinstance(v, Path) else v
            for k, v in settings.items()
        }
        text = json.dumps({k: v for k, v in metrics.items() if v is not None}, indent=2)
        (self.output / "metrics.json").write_text(text + "\n", encoding="utf-8")
        print(f"wrote {escaped(self.output)} ({scores.pictures} images)")


def command(args: list[str]) -> EvaluateTextToImage:
    """Reads the options from the arguments."""
    return parse(EvaluateTextToImage, args, prog="diffusax evaluate text-to-image")


def read_prompts(path: Path) -> list[str]:
    """Reads the prompts of a file; empty lines are left out.

    Raises:
        ValueError: the file cannot be read, or a line has no prompt; names the file and the line.
    """
    source, texts = offline.open_prompts(path), []
    for _, lines in source.parts(1024, lambda part: True):
        for line in lines:
            try:
                row = source.row(line)
                if row is None:
                    continue
                if not isinstance(row.get("prompt"), str):
                    raise ValueError("it has no prompt")
            except ValueError as error:
                raise ValueError(f"{path} line {line.number}: {error}") from None
            texts.append(row["prompt"])
    if not texts:
        raise ValueError(f"{path} has no prompts")
    return texts
