"""Makes one data set of images and of edits, from those of the models that do only one of them.

It needs examples/emoji_styles/build_styles.py, examples/emoji_edit/build_data.py and
examples/emoji_control/build_control_data.py. A row without an image before the edit is text to
image.
    python examples/emoji_flow/build_data.py --output out/emoji_flow/data
"""

import argparse
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

COLUMNS = ("input_image", "edit_prompt", "edited_image")
EDGES = ", from these edges"
"""What a caption ends with where the image to look at shows edges."""


def images(folder: Path) -> pa.Table:
    """Images with captions, and nothing to look at."""
    table = pq.read_table(folder, columns=["image", "text"])
    nothing = pa.nulls(table.num_rows, table.schema.field("image").type)
    return pa.table([nothing, table["text"], table["image"]], COLUMNS)


def edits(folder: Path) -> pa.Table:
    """Images before and after edits."""
    return pq.read_table(folder, columns=list(COLUMNS))


def outlines(folder: Path) -> pa.Table:
    """Images to be drawn from their edges."""
    table = pq.read_table(folder, columns=["image", "conditioning_image", "text"])
    said = pc.binary_join_element_wise(table["text"], EDGES, "")
    return pa.table([table["conditioning_image"], said, table["image"]], COLUMNS)


def main() -> None:
    """Writes one Parquet file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=Path, default=Path("out/emoji_styles/data"))
    parser.add_argument("--edits", type=Path, default=Path("out/emoji_edit/data"))
    parser.add_argument("--edges", type=Path, default=Path("out/emoji_control/data"))
    parser.add_argument("--output", type=Path, default=Path("out/emoji_flow/data"))
    args = parser.parse_args()
    parts = images(args.images), edits(args.edits), outlines(args.edges)
    args.output.mkdir(parents=True, exist_ok=True)
    table = pa.concat_tables(parts, promote_options="permissive")
    pq.write_table(table, args.output / "train.parquet", row_group_size=1000)
    for name, part in zip(("images", "edits", "edges"), parts):
        print(f"{part.num_rows} {name}")


if __name__ == "__main__":
    main()
