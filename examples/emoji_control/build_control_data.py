"""Makes the data set: emoji anywhere in the picture, turned and mirrored, with their edges.

It needs what examples/emoji_edit/build_data.py needs, from which it has the pictures, in Noto's
style.
    python examples/emoji_control/build_control_data.py --icons out/emoji_edit/npm \
        --output out/emoji_control/data
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

# The later of them has the right build_data.
sys.path.insert(0, str(Path(__file__).parents[1] / "emoji"))
sys.path.insert(0, str(Path(__file__).parents[1] / "emoji_edit"))
from build_data import Row, png, read_icons, render
from edges import edges
from names import BACKGROUNDS, article, emoji_names
from scenes import RESOLUTION

SCALES = (0.5, 1.0)
"""The sizes of emoji."""


def place(glyph: Image.Image, color: str, rng: np.random.Generator) -> Image.Image:
    """The emoji anywhere on a background, smaller, turned by any angle, mirrored or not."""
    canvas = glyph.width
    if rng.random() < 0.5:
        glyph = glyph.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    angle = rng.uniform(-180, 180) if rng.random() < 0.5 else 0
    glyph = glyph.rotate(angle, Image.Resampling.BICUBIC)
    side = round(canvas * rng.uniform(*SCALES))
    glyph = glyph.resize((side, side), Image.Resampling.LANCZOS)
    picture = Image.new("RGBA", (canvas, canvas), (*BACKGROUNDS[color], 255))
    left, top = (int(n) for n in rng.integers(0, canvas - side + 1, 2))
    picture.alpha_composite(glyph, (left, top))
    return picture.convert("RGB").resize((RESOLUTION, RESOLUTION), Image.Resampling.BOX)


def rows(icons: Path, names: Path, copies: int) -> Iterator[Row]:
    """Every emoji several times."""
    rng = np.random.default_rng(0)
    svgs = read_icons(icons, "noto")
    for emoji, name in emoji_names(names):
        code = "-".join(f"{ord(c):x}" for c in emoji if c != "\ufe0f")
        if code not in svgs:
            continue
        glyph = render(svgs[code])
        for _ in range(copies):
            color = "white" if rng.random() < 0.2 else str(rng.choice(list(BACKGROUNDS)))
            said = article(name) if rng.random() < 0.5 else name
            picture = place(glyph, color, rng)
            yield {
                "image": png(np.asarray(picture)),
                "conditioning_image": png(np.asarray(edges(picture))),
                "text": said if color == "white" else f"{said} on {article(color)} background",
            }


def main() -> None:
    """Writes one Parquet file."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--icons", type=Path, required=True, help="the npm packages' folder")
    names = Path("/usr/share/unicode/emoji/emoji-test.txt")
    parser.add_argument("--names", type=Path, default=names)
    parser.add_argument("--copies", type=int, default=12, help="pictures of each emoji")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    table = pa.Table.from_pylist(list(rows(args.icons, args.names, args.copies)))
    pq.write_table(table, args.output / "train.parquet", row_group_size=1000)
    print(f"{table.num_rows} pictures in {args.output}")


if __name__ == "__main__":
    main()
