"""Makes the data set: emoji in four styles, and in other colours, on ten backgrounds.

It needs what examples/emoji_edit/build_data.py needs.
    python examples/emoji_styles/build_styles.py --icons out/emoji_edit/npm
"""

import argparse
import multiprocessing
import sys
from pathlib import Path

# Both have a build_data; that of the edits is wanted.
sys.path.insert(0, str(Path(__file__).parents[1] / "emoji"))
sys.path.insert(0, str(Path(__file__).parents[1] / "emoji_edit"))
from build_data import Row, png, read_glyphs, write
from compositions import Composition, captions, held_out, others, styled, tinted
from scenes import Glyphs, draw

HELD_OUT_STYLES, HELD_OUT_TINTS = 200, 100
OTHERS = 60
"""Other emoji that a picture of the test is compared with."""


def training_row(composition: Composition, text: str, glyphs: Glyphs) -> Row:
    """A picture and what it is called."""
    return {"image": png(draw(composition.scene, glyphs)), "text": text, **composition._asdict()}


def test_row(composition: Composition, glyphs: Glyphs, seed: int) -> Row:
    """A composition held out, with all that its picture could be taken for."""
    found = [png(draw(x.scene, glyphs)) for x in others(composition, glyphs, OTHERS, seed)]
    text = composition.caption(says_style=False)
    return {**training_row(composition, text, glyphs), "other_images": found}


def main() -> None:
    """Writes the pictures for training and for the test."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--icons", type=Path, default=Path("out/emoji_edit/npm"))
    names_file = Path("/usr/share/unicode/emoji/emoji-test.txt")
    parser.add_argument("--names", type=Path, default=names_file)
    parser.add_argument("--output", type=Path, default=Path("out/emoji_styles"))
    args = parser.parse_args()
    with multiprocessing.Pool() as pool:
        glyphs = read_glyphs(args.icons, args.names, pool)
    kept = [x for part in held_out(glyphs, HELD_OUT_STYLES, HELD_OUT_TINTS) for x in part]
    write(
        [test_row(x, glyphs, i) for i, x in enumerate(kept)], args.output / "test" / "test.parquet"
    )
    known = set(kept)
    shown = [x for x in (*styled(glyphs), *tinted(glyphs)) if x not in known]
    rows = [
        training_row(x, text, glyphs) for turn, x in enumerate(shown) for text in captions(x, turn)
    ]
    write(rows, args.output / "data" / "train.parquet")


if __name__ == "__main__":
    main()
