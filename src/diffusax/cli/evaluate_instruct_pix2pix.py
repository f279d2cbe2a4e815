"""`diffusax evaluate instruct-pix2pix`: `evaluate edits` at the settings of the paper."""

import dataclasses
from typing import ClassVar

from tyro.conf import FlagCreatePairsOff, configure

from diffusax.boundary.options import Scale, Steps
from diffusax.cli.evaluate_edits import EvaluateEdits
from diffusax.cli.parsing import parse
from diffusax.evaluation.edits import EditSettings, ImageGuidance
from diffusax.evaluation.measures import Score


@configure(FlagCreatePairsOff)
@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluateInstructPix2Pix(EvaluateEdits):
    """Measure edits over image guidance scales, as figure 8 of Brooks et al. 2023 does.

    It is `diffusax evaluate edits` with the paper's scales and steps. For each scale, the images of
    a data set are edited, and two means are taken: of the cosine between CLIP's features of the
    image before and after (what was kept), and of the cosine between the change of the images and
    the change of their captions (what was done). The output folder gets metrics.jsonl with a line
    for each scale, table.md, edits.png with the first few images, and plot.png if matplotlib is
    installed.
    """

    captions_needed: ClassVar[bool] = True

    scores: tuple[Score, ...] = ("clip",)
    """What to measure, see `diffusax evaluate edits`."""
    image_guidance: tuple[ImageGuidance, ...] = EditSettings.image_guidance
    """The image guidance scales to compare."""
    guidance: Scale | None = EditSettings.guidance
    """The guidance scale of the instruction."""
    steps: Steps | None = EditSettings.steps
    """The number of sampler steps."""


def command(args: list[str]) -> EvaluateInstructPix2Pix:
    """Reads the options from the arguments."""
    return parse(EvaluateInstructPix2Pix, args, prog="diffusax evaluate instruct-pix2pix")
