"""Makes the data set: Noto Color Emoji pictures with captions from Unicode's names.

Needs Debian's packages fonts-noto-color-emoji and unicode-data (or the two files from elsewhere).
    python examples/emoji/build_data.py --output out/emoji/data
"""

import argparse
import io
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from names import BACKGROUNDS, article, emoji_names
from PIL import Image, ImageDraw, ImageFont

# Of the one size in which the font has its pictures.
FONT_SIZE, GLYPH = 109, (136, 128)
CANVAS = 140
RESOLUTION = 64


def render(emoji: str, font: ImageFont.FreeTypeFont) -> Image.Image | None:
    """The emoji's picture, transparent around it; None where the font has none of its own."""
    if font.getbbox(emoji)[2] != GLYPH[0]:
        return None
    glyph = Image.new("RGBA", (CANVAS, CANVAS))
    origin = ((CANVAS - GLYPH[0]) // 2, (CANVAS - GLYPH[1]) // 2)
    ImageDraw.Draw(glyph).text(origin, emoji, font=font, embedded_color=True)
    return glyph


def captions(name: str, turn: int) -> Iterator[tuple[str, str]]:
    """(background, caption): the name alone is on white; half of the others have an article."""
    yield "white", name
    yield "white", article(name)
    for i, color in enumerate(BACKGROUNDS):
        said = article(name) if (turn + i) % 2 else name
        yield color, f"{said} on {article(color)} background"


def compose(glyph: Image.Image, color: str) -> bytes:
    """A PNG of the picture on a background."""
    picture = Image.new("RGBA", glyph.size, (*BACKGROUNDS[color], 255))
    picture.alpha_composite(glyph)
    small = picture.convert("RGB").resize((RESOLUTION, RESOLUTION), Image.Resampling.LANCZOS)
    file = io.BytesIO()
    small.save(file, "PNG")
    return file.getvalue()


def rows(font_path: Path, names_path: Path) -> Iterator[dict[str, object]]:
    """The data set's rows: image, text, name, background."""
    font = ImageFont.truetype(str(font_path), FONT_SIZE)
    seen: set[str] = set()
    for turn, (emoji, name) in enumerate(emoji_names(names_path)):
        glyph = render(emoji, font)
        if glyph is None or name in seen:
            continue
        seen.add(name)
        for color, text in captions(name, turn):
            image = {"bytes": compose(glyph, color), "path": None}
            yield {"image": image, "text": text, "name": name, "background": color}


def main() -> None:
    """Writes one Parquet file."""
    parser = argparse.ArgumentParser(description=__doc__)
    noto = Path("/usr/share/fonts/truetype/noto/NotoColorEmoji.ttf")
    parser.add_argument("--font", type=Path, default=noto)
    names = Path("/usr/share/unicode/emoji/emoji-test.txt")
    parser.add_argument("--names", type=Path, default=names)
    parser.add_argument("--output", type=Path, default=Path("out/emoji/data"))
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    table = pa.Table.from_pylist(list(rows(args.font, args.names)))
    pq.write_table(table, args.output / "train.parquet", row_group_size=1000)
    names = len(set(table["name"].to_pylist()))
    print(f"{table.num_rows} pictures of {names} emoji in {args.output}")


if __name__ == "__main__":
    main()
