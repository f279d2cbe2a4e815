"""How well the models inside the package follow edges, on placements that the training never had.

Emoji are placed, turned and mirrored by another seed than the training's; edges are those of
examples/emoji_control/edges.py.
  edges: the F1 score of the edges of what is drawn and those asked for, where an edge counts as
    found within one pixel.
  error: the root mean square to the true picture at 32x32, in [0, 1].

It needs the icons that examples/emoji_edit/README.md fetches.
    python benchmarks/edge_quality.py --icons out/emoji_edit/npm
    python benchmarks/edge_quality.py --icons out/emoji_edit/npm --model out/emoji_flow/model
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
from edit_quality import distance, picture
from machine import describe
from PIL import Image

import diffusax

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "emoji_flow"))
sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "emoji_control"))
from build_control_data import rows as placed
from build_flow_data import EDGES
from edges import edges

ROWS = 100


def main() -> None:
    """Prints the means."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--icons", type=Path, required=True)
    names = Path("/usr/share/unicode/emoji/emoji-test.txt")
    parser.add_argument("--names", type=Path, default=names)
    parser.add_argument("--model", help="one that looks at images; by default emoji-control")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1, help="of the placements")
    args = parser.parse_args()
    print(describe())
    rows = list(placed(args.icons, args.names, copies=1, seed=args.seed))
    chosen = np.random.default_rng(args.seed).choice(len(rows), ROWS, replace=False)
    rows = [rows[i] for i in chosen]
    draw = steered(args.steps) if args.model is None else edited(args.model, args.steps)
    images = [draw(row["text"], shown(row), seed) for seed, row in enumerate(rows)]
    wanted = [edge_map(shown(row)) for row in rows]
    found = [edge_map(edges(image)) for image in images]
    scores = [f1(a, b) for a, b in zip(found, wanted)]
    true = [picture(row["image"]) for row in rows]
    errors = [distance(np.asarray(x, np.float32) / 255, y) for x, y in zip(images, true)]
    print(
        f"{args.model or 'emoji-control'}: edges {np.mean(scores):.3f}, error {np.mean(errors):.3f}"
    )


def steered(steps: int) -> Any:
    """The function that draws by the ControlNet."""
    net = diffusax.ControlNetModel.from_pretrained("emoji-control")
    pipe = diffusax.StableDiffusionControlNetPipeline.from_pretrained("emoji", controlnet=net)
    pipe.set_progress_bar_config(disable=True)
    options = pipe.call_defaults | {"num_inference_steps": steps}
    return lambda text, image, seed: pipe(text, image=image, seed=seed, **options).images[0]


def edited(model: str, steps: int) -> Any:
    """The function that draws by a model that looks at the edges."""
    pipe = diffusax.DiffusionPipeline.from_pretrained(model)
    pipe.set_progress_bar_config(disable=True)
    options = pipe.call_defaults | {"num_inference_steps": steps}
    return lambda text, image, seed: (
        pipe(text + EDGES, image=image, seed=seed, **options).images[0]
    )


def shown(row: dict[str, Any]) -> Image.Image:
    """The edges that a row asks for."""
    return Image.fromarray(np.uint8(picture(row["conditioning_image"]) * 255 + 0.5))


def edge_map(image: Image.Image) -> np.ndarray:
    """Where there are edges, 64 64."""
    return np.asarray(image.convert("L")) > 127


def f1(found: np.ndarray, wanted: np.ndarray) -> float:
    """The harmonic mean of precision and recall, to within one pixel."""
    precision = (found & grown(wanted)).sum() / max(1, found.sum())
    recall = (wanted & grown(found)).sum() / max(1, wanted.sum())
    return float(2 * precision * recall / max(1e-9, precision + recall))


def grown(edge: np.ndarray) -> np.ndarray:
    """The map with its neighbours of one pixel."""
    padded = np.pad(edge, 1)
    h, w = edge.shape
    return np.logical_or.reduce([padded[y : y + h, x : x + w] for y in range(3) for x in range(3)])


if __name__ == "__main__":
    main()
