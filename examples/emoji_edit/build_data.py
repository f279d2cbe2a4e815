"""Makes the pairs: emoji in four styles before and after edits whose result is known.

Needs Unicode's emoji-test.txt (Debian's unicode-data), the PyPI package resvg_py, and in one folder
the unpacked npm packages of the styles (`npm pack @iconify-json/noto`...), each by its short name.
    python examples/emoji_edit/build_data.py --icons out/emoji_edit/npm --output out/emoji_edit/data
"""

import argparse
import io
import json
import multiprocessing
from collections.abc import Iterator
from multiprocessing.pool import Pool
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import resvg_py
from instructions import SHARES, instructions, wordings
from names import emoji_names
from PIL import Image
from scenes import BACKGROUNDS, RESOLUTION, Glyphs, Scene, draw, edited

FOLDERS = {"noto": "noto", "twemoji": "twemoji", "3d": "fluent-emoji", "flat": "fluent-emoji-flat"}
CANVAS, GLYPH = 2 * RESOLUTION, 116
HELD_OUT_PAIRS, HELD_OUT_NAMES = 300, 30
EDITED_BEFORE = 0.2
"""The share of pictures that have had another edit before."""
VISIBLE = 0.06
"""The least difference, a root mean square, that an edit makes in the test."""

Row = dict[str, object]


def read_icons(folder: Path, style: str) -> dict[str, str]:
    """SVG by the emoji's code points without variation selectors, as "1f9d1-200d-1f3a8"."""
    icons = json.loads((folder / FOLDERS[style] / "icons.json").read_text("utf-8"))
    # Fluent's two sets have the same names; one alone lists the code points.
    names = FOLDERS["flat" if style == "3d" else style]
    codes = json.loads((folder / names / "chars.json").read_text("utf-8"))
    found = {}
    for code, name in codes.items():
        icon = icons["icons"].get(name)
        if icon is not None:
            width, height = (icon.get(k, icons.get(k, 16)) for k in ("width", "height"))
            head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">'
            found[code] = f"{head}{icon['body']}</svg>"
    return found


def render(svg: str) -> Image.Image:
    """The icon on a transparent square."""
    png = resvg_py.svg_to_bytes(svg_string=svg, width=GLYPH, height=GLYPH, skip_system_fonts=True)
    icon = Image.open(io.BytesIO(bytes(png))).convert("RGBA")
    glyph = Image.new("RGBA", (CANVAS, CANVAS))
    glyph.paste(icon, ((CANVAS - icon.width) // 2, (CANVAS - icon.height) // 2))
    return glyph


def read_glyphs(icons: Path, names: Path, pool: Pool) -> Glyphs:
    """Every emoji in every style that has it."""
    by_style = {style: read_icons(icons, style) for style in FOLDERS}
    found = {}
    for emoji, name in emoji_names(names):
        code = "-".join(f"{ord(c):x}" for c in emoji if c != "\ufe0f")
        for style, svgs in by_style.items():
            if code in svgs:
                found[name, style] = svgs[code]
    return dict(zip(found, pool.map(render, found.values(), chunksize=32)))


class Edits:
    """Random edits of the emoji there are."""

    def __init__(self, glyphs: Glyphs):
        """glyphs: all of them."""
        self.glyphs = glyphs
        self.styles: dict[str, list[str]] = {}
        for name, style in glyphs:
            self.styles.setdefault(name, []).append(style)
        self.names = sorted(self.styles)
        self.by_kind: dict[str, list[str]] = {kind: [] for kind in SHARES}
        for instruction in instructions():
            self.by_kind[instruction.partition(":")[0]].append(instruction)

    def scene(self, name: str, rng: np.random.Generator) -> Scene:
        """An emoji as it is on a background; as often on white as on all other colours."""
        style = str(rng.choice(self.styles[name]))
        colors = list(BACKGROUNDS)
        return Scene(name, style, "white" if rng.random() < 0.3 else str(rng.choice(colors)))

    def after(self, scene: Scene, instruction: str) -> Scene | None:
        """The scene after an edit, where it can be drawn."""
        result = edited(scene, instruction)
        return result if result and (result.name, result.style) in self.glyphs else None

    def instruction(self, rng: np.random.Generator) -> str:
        """One by its kind's share."""
        kind = str(rng.choice(list(SHARES), p=list(SHARES.values())))
        return str(rng.choice(self.by_kind[kind]))

    def pair(self, name: str, rng: np.random.Generator) -> tuple[Scene, str, Scene]:
        """A scene, an instruction that changes it, and the scene after."""
        while True:
            before = self.scene(name, rng)
            if rng.random() < EDITED_BEFORE:
                before = self.after(before, self.instruction(rng)) or before
            instruction = self.instruction(rng)
            after = self.after(before, instruction)
            if after is not None:
                return before, instruction, after


def png(pixels: np.ndarray) -> dict[str, object]:
    """A cell of a column of pictures."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG", compress_level=3)
    return {"bytes": file.getvalue(), "path": None}


def row(edits: Edits, before: Scene, instruction: str, after: Scene, prompt: str) -> Row:
    """A row of the data set."""
    return {
        "input_image": png(draw(before, edits.glyphs)),
        "edit_prompt": prompt,
        "edited_image": png(draw(after, edits.glyphs)),
        "name": before.name,
        "instruction": instruction,
        "kind": instruction.partition(":")[0],
        "style": before.style,
        "background": before.background,
    }


def choose_held_out(edits: Edits, names: list[str], count: int, seed: int) -> list[Row]:
    """Visible edits of plain scenes, as many of each instruction, with all the other targets."""
    rng = np.random.default_rng(seed)
    rows: list[Row] = []
    chosen: set[tuple[str, str]] = set()
    keys = instructions()
    while len(rows) < count:
        instruction, name = keys[len(rows) % len(keys)], str(rng.choice(names))
        before = edits.scene(name, rng)
        after = edits.after(before, instruction)
        if after is None or (name, instruction) in chosen:
            continue
        source, target = (draw(scene, edits.glyphs) for scene in (before, after))
        if np.sqrt(np.square((source - target.astype(np.float32)) / 255).mean()) < VISIBLE:
            continue
        chosen.add((name, instruction))
        others = {key: edits.after(before, key) for key in keys if key != instruction}
        made = row(edits, before, instruction, after, str(rng.choice(wordings(instruction))))
        made["new_wording"] = str(rng.choice(wordings(instruction, held_out=True)))
        made["other_images"] = [png(draw(s, edits.glyphs)) for s in others.values() if s]
        rows.append(made)
    return rows


def training_rows(job: tuple[int, int]) -> list[Row]:
    """A part of the pairs. job: its seed and its number of rows."""
    seed, count = job
    edits, names, held_out = _shared
    rng = np.random.default_rng((seed, 1))
    rows: list[Row] = []
    while len(rows) < count:
        before, instruction, after = edits.pair(str(rng.choice(names)), rng)
        if (before.name, instruction) not in held_out:
            said = str(rng.choice(wordings(instruction)))
            rows.append(row(edits, before, instruction, after, said))
    return rows


_shared: tuple[Edits, list[str], set[tuple[str, str]]]


def share(*values: object) -> None:
    """Keeps what the processes need."""
    global _shared
    _shared = values  # type: ignore[assignment]


def write(rows: list[Row], path: Path) -> None:
    """One Parquet file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=1000)
    print(f"{len(rows)} pairs in {path}")


def parts(count: int, size: int = 2000) -> Iterator[tuple[int, int]]:
    """Seeds and sizes of parts."""
    for start in range(0, count, size):
        yield start, min(size, count - start)


def main() -> None:
    """Writes the pairs for training and for the test."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--icons", type=Path, default=Path("out/emoji_edit/npm"))
    names_file = Path("/usr/share/unicode/emoji/emoji-test.txt")
    parser.add_argument("--names", type=Path, default=names_file)
    parser.add_argument("--pairs", type=int, default=50000)
    parser.add_argument("--output", type=Path, default=Path("out/emoji_edit"))
    args = parser.parse_args()
    with multiprocessing.Pool() as pool:
        glyphs = read_glyphs(args.icons, args.names, pool)
    edits = Edits(glyphs)
    order = np.random.default_rng(0).permutation(edits.names).tolist()
    unseen, names = order[:HELD_OUT_NAMES], order[HELD_OUT_NAMES:]
    print(f"{len(glyphs)} pictures of {len(edits.names)} emoji")
    test = choose_held_out(edits, names, HELD_OUT_PAIRS, seed=1)
    write(test, args.output / "test" / "pairs.parquet")
    write(choose_held_out(edits, unseen, 100, seed=2), args.output / "test" / "names.parquet")
    held_out = {(str(r["name"]), str(r["instruction"])) for r in test}
    with multiprocessing.Pool(initializer=share, initargs=(edits, names, held_out)) as pool:
        rows = [made for part in pool.map(training_rows, parts(args.pairs)) for made in part]
    write(rows, args.output / "data" / "train.parquet")


if __name__ == "__main__":
    main()
