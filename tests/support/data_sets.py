"""Small data sets of random pictures."""

import io
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image


def picture(seed: int, size: tuple[int, int] = (40, 32)) -> Image.Image:
    """Random pixels; size is (width, height)."""
    width, height = size
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(pixels)


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def smooth_picture(seed: int) -> Image.Image:
    """Returns smooth random colours, 64x64."""
    return picture(seed, (4, 4)).resize((64, 64))


def row(index: int, **size) -> dict:
    return {
        "image": {"bytes": png(picture(index, **size)), "path": None},
        "text": f"number {index}",
    }


def edit_row(index: int) -> dict:
    """A picture, what to do to it, and its negative."""
    before = picture(index)
    after = Image.fromarray(255 - np.asarray(before))
    return {
        "input_image": {"bytes": png(before), "path": None},
        "edit_prompt": f"turn number {index} around",
        "edited_image": {"bytes": png(after), "path": None},
    }


def write_parquet(folder: Path, rows: list[dict], *, shards: int = 1) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(shards):
        part = rows[i * len(rows) // shards : (i + 1) * len(rows) // shards]
        pq.write_table(pa.Table.from_pylist(part), folder / f"train-{i:05}.parquet")
    return folder


def write_image_folder(folder: Path, count: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for i in range(count):
        picture(i).save(folder / f"{i}.png")
        lines.append(json.dumps({"file_name": f"{i}.png", "text": f"number {i}"}))
    (folder / "metadata.jsonl").write_text("\n".join(lines) + "\n")
    return folder
