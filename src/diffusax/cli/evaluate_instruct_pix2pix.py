"""`diffusax evaluate instruct-pix2pix`."""

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any, ClassVar

from msgspec import Meta
from tyro.conf import FlagCreatePairsOff, Positional, configure

from diffusax.boundary.messages import escaped, install_command
from diffusax.cli.edit import load_editor
from diffusax.cli.generation import GenerationOptions
from diffusax.cli.messages import show_messages
from diffusax.cli.parsing import parse
from diffusax.evaluation import CLIP, Edits, EditScores, EditSettings, evaluate_edits
from diffusax.evaluation.metrics import Mean, table
from diffusax.images.sheets import labelled_grid

METRICS = {
    "image_similarity": "CLIP image similarity",
    "direction_similarity": "CLIP text-image direction similarity",
    "text_similarity": "CLIP text-image similarity",
}


@configure(FlagCreatePairsOff)
@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluateInstructPix2Pix(EditSettings, GenerationOptions):
    """Measure edits over image guidance scales, as figure 8 of Brooks et al. 2023 does.

    For each scale, the images of a data set are edited, and two means are taken: of the cosine
    between CLIP's features of the image before and after (what was kept), and of the cosine
    between the change of the images and the change of their captions (what was done). The output
    folder gets metrics.jsonl with a line for each scale, table.md, edits.png with the first few
    images, and plot.png if matplotlib is installed.
    """

    essentials: ClassVar[tuple[str, ...]] = (
        *("data", "output", "clip", "samples", "image_guidance", "guidance", "steps", "sampler"),
        *("resolution", "batch_size", "seed", "sheet", "dtype"),
    )

    model: Positional[str]
    """An InstructPix2Pix checkpoint of Stable Diffusion or SDXL: a folder in diffusers' layout, or
    a Hub repository id; --model DIR is the same."""
    clip: str = "openai/clip-vit-large-patch14"
    """The CLIP that measures: a folder with a whole CLIPModel, or a Hub repository id."""
    official_pixel_range: bool = False
    """Give CLIP pixels in [-1, 1] instead of [0, 1] before they are normalised. The authors' own
    script does so by mistake; only with this option are the numbers comparable with theirs."""
    sheet: Annotated[int, Meta(ge=0, le=64)] = 4
    """The number of rows of the data set to show in edits.png; 0 writes none."""
    output: Path
    """The folder to write."""

    def run(self) -> None:
        """Edits, measures, and writes the results line by line."""
        show_messages()
        clip = CLIP.from_pretrained(self.clip, batch_size=self.batch_size)
        if self.official_pixel_range:
            processor = clip.processor.with_pixels_from_minus_one()
            clip = dataclasses.replace(clip, processor=processor)
        pipe = load_editor(self)
        pipe.set_progress_bar_config(disable=True)
        size = self.resolution or max(pipe.parts.default_size)
        edits = Edits(self, size)
        self.output.mkdir(parents=True, exist_ok=True)
        found = []
        with (self.output / "metrics.jsonl").open("w", encoding="utf-8") as file, self.profiled():
            for scores in evaluate_edits(pipe, clip, edits, self, keep=self.sheet):
                found.append(scores)
                file.write(json.dumps(self._line(scores, len(edits), size)) + "\n")
                file.flush()
        self._write_table(found, len(edits))
        self._write_sheet(found, edits)
        plot = write_plot(found, self.output / "plot.png")
        print(f"wrote {escaped(self.output)}{'' if plot else NO_PLOT}")

    def _line(self, scores: EditScores, samples: int, size: int) -> dict[str, Any]:
        line: dict[str, Any] = {
            "image_guidance": scores.image_guidance,
            "guidance": self.guidance,
        }
        for name in METRICS:
            mean: Mean = getattr(scores, name)
            line |= {name: mean.mean, f"{name}_error": mean.error}
        settings = {"samples": samples, "steps": self.steps, "resolution": size, "seed": self.seed}
        names = ("model", "data", "clip", "official_pixel_range")
        return {**line, **settings, **{name: getattr(self, name) for name in names}}

    def _write_table(self, found: list[EditScores], samples: int) -> None:
        rows = [
            [f"{scores.image_guidance:g}", *(_shown(getattr(scores, name)) for name in METRICS)]
            for scores in found
        ]
        text = table(["image guidance", *METRICS.values()], rows)
        text += f"\n\nMeans over {samples} edits, and their standard errors."
        (self.output / "table.md").write_text(text + "\n", encoding="utf-8")
        print(text)

    def _write_sheet(self, found: list[EditScores], edits: Edits) -> None:
        shown = min(self.sheet, len(edits))
        if not shown:
            return
        rows = [[edits[i].image, *(scores.edited[i] for scores in found)] for i in range(shown)]
        labels = ["picture", *(f"{scores.image_guidance:g}" for scores in found)]
        labelled_grid(rows, column_labels=labels).save(self.output / "edits.png")


NO_PLOT = f"; for a plot install matplotlib: {install_command('plot')}"


def command(args: list[str]) -> EvaluateInstructPix2Pix:
    """Reads the options from the arguments."""
    return parse(EvaluateInstructPix2Pix, args, prog="diffusax evaluate instruct-pix2pix")


def write_plot(found: list[EditScores], file: Path) -> bool:
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
        axes.annotate(f"{scores.image_guidance:g}", place, (5, 5), textcoords="offset points")
    axes.set_xlabel(METRICS["direction_similarity"])
    axes.set_ylabel(METRICS["image_similarity"])
    axes.grid(alpha=0.3)
    figure.savefig(file, dpi=150)
    return True


def _shown(mean: Mean) -> str:
    return f"{mean.mean:.4f} ± {mean.error:.4f}"
