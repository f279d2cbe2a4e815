"""`diffusax evaluate edits`."""

import csv
import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta
from tyro.conf import FlagCreatePairsOff, Positional, configure

import diffusax
from diffusax.boundary.files import written_whole
from diffusax.boundary.messages import escaped, install_command
from diffusax.boundary.options import Scale, Steps
from diffusax.cli.edit import load_editor
from diffusax.cli.generation import GenerationOptions
from diffusax.cli.messages import show_messages
from diffusax.cli.parsing import OWN, parse
from diffusax.evaluation.edit_runs import EditScores, evaluate_edits
from diffusax.evaluation.editors import check_guided_by_image, looks_at_images
from diffusax.evaluation.edits import Edits, EditSettings, ImageGuidance, Shapes
from diffusax.evaluation.measures import TITLES, Measures, Score
from diffusax.evaluation.metrics import Mean, table
from diffusax.evaluation.preferences import AESTHETIC, CLIP_H, CLIP_L, HPS, PICKSCORE
from diffusax.images.sheets import labelled_grid
from diffusax.offline.folder import claim
from diffusax.offline.run import pipeline_facts

_OUTPUT = ("output", "sheet", "save_images", "profile", "compiled", "batch_size", "mesh", "layout")
_CHOICE = ("samples", "image_guidance")
"""The options that change no row's scores: what is written, and which rows and scales."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreferenceOptions:
    """The networks of the scores of preference, each a folder or a Hub repository id."""

    pickscore: str = PICKSCORE
    """PickScore's CLIP."""
    hps: str = HPS
    """HPSv2's state of OpenCLIP: a .pt file, or where HPS_v2.1_compressed.pt is."""
    hps_processor: str = CLIP_H
    """The CLIP with the config and the tokenizer of HPSv2's and PickScore's."""
    aesthetic: str = AESTHETIC
    """The layers of the aesthetic score: a .pth or .safetensors file, or where aesthetic-model.pth
    is."""
    aesthetic_clip: str = CLIP_L
    """The CLIP whose features the aesthetic score reads."""

    def preferences(self) -> dict[str, str]:
        """Returns the folders and repositories by the names that `Measures.load` takes."""
        return {name: getattr(self, name) for name in _PREFERENCES}


_PREFERENCES = [field.name for field in dataclasses.fields(PreferenceOptions)]


@configure(FlagCreatePairsOff)
@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluateEdits(PreferenceOptions, EditSettings, GenerationOptions):
    """Measure a model that edits images by instructions, on the rows of a data set.

    The images of the data set are edited, and the scores say what was kept of them, what was done,
    and how near the results are to the images after the edit, where the data set has such. Several
    scales of image guidance, of InstructPix2Pix, give figure 8 of Brooks et al. 2023. The output
    folder gets table.md, metrics.jsonl and metrics.csv with the means of each scale, rows.jsonl
    with the scores of each row, and edits.png with the first few images. Run the same command again
    to go on with a run that stopped.

    With --layout, the results are written instead for the judges of a benchmark.
    """

    essentials: ClassVar[tuple[str, ...]] = (
        *("data", "output", "scores", "layout", "samples", "image_guidance", "guidance", "steps"),
        *("sampler", "resolution", "shapes", "batch_size", "seed", "sheet", "dtype"),
    )

    captions_needed: ClassVar[bool] = False
    """Whether the data set must have both captions."""

    model: Positional[str]
    """A checkpoint that edits by instructions, such as of InstructPix2Pix, FLUX.1 Kontext, FLUX.2
    klein or Qwen-Image-Edit: a folder in diffusers' layout, or a Hub repository id; --model DIR is
    the same."""
    scores: tuple[Score, ...] = ("clip", "dino", "pixels")
    """What to measure: similarities of CLIP's and of DINO's features, distances of pixels, and what
    PickScore, HPSv2.1 and the predictor of aesthetics say of the results."""
    layout: Annotated[Literal["gedit", "imgedit"] | None, OWN] = None
    """Write the edits of a benchmark as its judge reads them, and measure nothing. --data is then
    stepfun-ai/GEdit-Bench or a copy of it, or ImgEdit's singleturn.json or basic_edit.json."""
    image_guidance: tuple[ImageGuidance, ...] = ()
    """The image guidance scales to compare, of InstructPix2Pix; the pipeline's own by default."""
    guidance: Annotated[Scale | None, OWN] = None
    """The guidance scale of the instruction; the pipeline's own by default."""
    steps: Annotated[Steps | None, OWN] = None
    """The number of sampler steps; the pipeline's own by default."""
    clip: str = CLIP_L
    """The CLIP that measures: a folder with a whole CLIPModel, or a Hub repository id."""
    dino: str = "facebook/dinov2-base"
    """The DINO or DINOv2 that measures, such as facebook/dino-vits16."""
    official_pixel_range: bool = False
    """Give CLIP pixels in [-1, 1] instead of [0, 1] before they are normalised. InstructPix2Pix's
    own script does so by mistake; only with this option are the numbers comparable with its."""
    sheet: Annotated[int, Meta(ge=0, le=64)] = 4
    """The number of rows of the data set to show in edits.png; 0 writes none."""
    save_images: bool = False
    """Write all edited images below images/ in the output folder, not only those of edits.png."""
    output: Path
    """The folder to write."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.scores:
            raise ValueError("there is nothing to measure with; give --scores, such as clip")
        if self.official_pixel_range and "clip" not in self.scores:
            raise ValueError("--official-pixel-range needs clip among --scores")

    def run(self) -> None:
        """Edits, measures, and writes the results scale by scale."""
        show_messages()
        if self.layout is not None:
            self._write_layout()
            return
        measures = self.measures()
        pipe = load_any_editor(self)
        pipe.set_progress_bar_config(disable=True)
        size, most = self.size_of(pipe)
        edits = Edits(self, self.shapes_of(pipe), references=most, required=self.captions_needed)
        self.output.mkdir(parents=True, exist_ok=True)
        claim(self.output / "manifest.json", self._manifest(pipe, size), self.output)
        found: list[EditScores] = []
        options: dict[str, Any] = {"keep": self.sheet, "folder": self.output}
        options["save_images"] = self.save_images
        with self.profiled():
            for scores in evaluate_edits(pipe, measures, edits, self, **options):
                found.append(scores)
                self._write_lines([self._line(own, len(edits), size) for own in found])
        self._write_table(found, len(edits))
        self._write_sheet(found, edits)
        plotted = len(found) > 1 and "direction_similarity" in found[0].means
        plot = not plotted or write_plot(found, self.output / "plot.png")
        print(f"wrote {escaped(self.output)}{'' if plot else NO_PLOT}")

    def sources(self) -> dict[str, str]:
        """Returns the folders and repositories of the networks of the scores."""
        return {"clip": self.clip, "dino": self.dino, **self.preferences()}

    def measures(self) -> Measures:
        """Loads the networks of the scores."""
        found = Measures.load(self.scores, self.sources(), batch_size=self.batch_size)
        if self.official_pixel_range and found.clip is not None:
            processor = found.clip.processor.with_pixels_from_minus_one()
            clip = dataclasses.replace(found.clip, processor=processor)
            found = dataclasses.replace(found, clip=clip)
        return found

    def size_of(self, pipe: Any) -> tuple[int, int]:
        """Returns the side in pixels of the edited squares, and the most images that are edited."""
        most = pipe.family.edits.most if looks_at_images(pipe) else 1
        return self.resolution or max(pipe.parts.default_size), most

    def shapes_of(self, pipe: Any, shapes: str | None = None) -> Shapes:
        """Returns the sizes to which images are brought."""
        multiple = pipe.parts.latents.multiple
        return Shapes.of(self.size_of(pipe)[0], shapes or self.shapes, multiple)

    def _write_layout(self) -> None:
        from diffusax.evaluation.layouts import open_edit_benchmark, write_edits

        assert self.layout is not None
        benchmark = open_edit_benchmark(self.layout, self.data, split=self.split)
        pipe = load_any_editor(self)
        pipe.set_progress_bar_config(disable=True)
        size, _ = self.size_of(pipe)
        # The judge's folder holds nothing else.
        beside = self.output.with_name(f"{self.output.name}.json")
        self.output.mkdir(parents=True, exist_ok=True)
        claim(beside, self._manifest(pipe, size), self.output)
        shapes = self.shapes_of(pipe, "own")
        count = len(benchmark) if self.samples is None else min(self.samples, len(benchmark))
        with self.profiled():
            write_edits(pipe, benchmark, self, shapes, self.output, count=count)
        print(f"wrote {escaped(self.output)} ({count} edits, as {self.layout}'s judge reads them)")

    def _manifest(self, pipe: Any, size: int) -> dict[str, Any]:
        names = [field.name for field in dataclasses.fields(self)]
        given = {name: getattr(self, name) for name in names if name not in (*_OUTPUT, *_CHOICE)}
        facts = {**pipeline_facts(pipe), **given, "layout": self.layout, "resolution": size}
        return json.loads(json.dumps(facts, default=str))

    def _line(self, scores: EditScores, samples: int, size: int) -> dict[str, Any]:
        line: dict[str, Any] = {
            "image_guidance": scores.image_guidance,
            "guidance": self.guidance,
        }
        for name, mean in scores.means.items():
            line |= {name: mean.mean, f"{name}_error": mean.error}
        settings = {"samples": samples, "steps": self.steps, "resolution": size, "seed": self.seed}
        names = ("model", "data", "official_pixel_range")
        networks = {
            name if name in ("clip", "dino") else f"{name}_model": source
            for name, source in self.sources().items()
            if name in self.scores
        }
        return {**line, **settings, **networks, **{name: getattr(self, name) for name in names}}

    def _write_lines(self, lines: Sequence[Mapping[str, Any]]) -> None:
        with written_whole(self.output / "metrics.jsonl") as partial:
            text = "".join(json.dumps(line) + "\n" for line in lines)
            partial.write_text(text, encoding="utf-8")
        with (
            written_whole(self.output / "metrics.csv") as partial,
            partial.open("w", encoding="utf-8", newline="") as file,
        ):
            writer = csv.DictWriter(file, list(lines[0]))
            writer.writeheader()
            writer.writerows(lines)

    def _write_table(self, found: Sequence[EditScores], samples: int) -> None:
        names = [name for name in TITLES if name in found[0].means]
        rows = [[_guidance(own), *(_shown(own.means[name]) for name in names)] for own in found]
        text = table(["image guidance", *(TITLES[name] for name in names)], rows)
        text += f"\n\nMeans over {samples} edits, and their standard errors."
        (self.output / "table.md").write_text(text + "\n", encoding="utf-8")
        print(text)

    def _write_sheet(self, found: Sequence[EditScores], edits: Edits) -> None:
        shown = min(self.sheet, len(edits))
        if not shown:
            return
        rows = [[edits[i].image, *(scores.edited[i] for scores in found)] for i in range(shown)]
        labels = ["picture", *map(_guidance, found)]
        labelled_grid(rows, column_labels=labels).save(self.output / "edits.png")


NO_PLOT = f"; for a plot install matplotlib: {install_command('plot')}"


def command(args: list[str]) -> EvaluateEdits:
    """Reads the options from the arguments."""
    return parse(EvaluateEdits, args, prog="diffusax evaluate edits")


def load_any_editor(options: Any) -> Any:
    """Loads a pipeline that edits images by instructions: one that looks at them, or else
    InstructPix2Pix's.

    options: the options of a command that generates images, with the checkpoint as `model`.

    Raises:
        ValueError: the checkpoint cannot be read, or does not edit.
    """
    from diffusax.checkpoints import resolve
    from diffusax.pipelines.components.loading import class_for

    folder = resolve(options.model, variant=options.variant, revision=options.revision)
    kind = class_for(diffusax.DiffusionPipeline, folder)
    if any(part.name == "unet" for part in kind.family.components):
        return load_editor(options)
    pipe = options.prepare(kind.from_pretrained(options.model, **options.loading()))
    if not looks_at_images(pipe):
        check_guided_by_image(pipe)
    return pipe


def write_plot(found: Sequence[EditScores], file: Path) -> bool:
    """Plots the paper's figure 8, with standard errors; returns False without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(7, 5), layout="constrained")
    axes = figure.add_subplot()
    x = [scores.direction_similarity for scores in found]
    y = [scores.image_similarity for scores in found]
    axes.errorbar(
        [mean.mean for mean in x],
        [mean.mean for mean in y],
        xerr=[mean.error for mean in x],
        yerr=[mean.error for mean in y],
        marker="o",
        markersize=4,
        capsize=2,
    )
    for scores in found:
        place = scores.direction_similarity.mean, scores.image_similarity.mean
        axes.annotate(_guidance(scores), place, (5, 5), textcoords="offset points")
    axes.set_xlabel(TITLES["direction_similarity"])
    axes.set_ylabel(TITLES["image_similarity"])
    axes.grid(alpha=0.3)
    figure.savefig(file, dpi=150)
    return True


def _guidance(scores: EditScores) -> str:
    return "own" if scores.image_guidance is None else f"{scores.image_guidance:g}"


def _shown(mean: Mean) -> str:
    return f"{mean.mean:.4f} ± {mean.error:.4f}"
