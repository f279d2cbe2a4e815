"""Says in a few lines what was found in a data set, so that a wrong guess is seen at once."""

import collections
import io
import itertools
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from PIL import Image

from diffusax.images.reading import upright_size
from diffusax.training.data.clips import ClipFacts, clip_facts
from diffusax.training.data.edits import beneath
from diffusax.training.data.examples import image_file
from diffusax.training.data.sources import Facts, Kind, Source, SourceFailed, as_list
from diffusax.training.data.streaming import StreamedSource

log = logging.getLogger(__name__)

LOOKED_AT = 100
"""The number of rows whose images are looked at, spread over the data set; headers alone are."""
_COUNTED = 100_000
"""The number of captions that are looked at for empty ones."""


def log_summary(
    source: Source,
    columns: Sequence[str],
    kinds: Mapping[str, Kind],
    *,
    place: str = "",
    clips: bool = False,
) -> None:
    """Logs a data set's rows, captions, splits, sizes and modes; in the first process alone.

    Args:
        source: the data set.
        columns: the columns that are read.
        kinds: what they hold; others are not looked at.
        place: where the data set is, if it does not say so itself.
        clips: whether the images may be clips.
    """
    if jax.process_index():
        return
    facts: Facts = getattr(source, "facts", Facts())
    log.info(
        "data: %d rows of %s; columns %s", len(source), facts.place or place, ", ".join(columns)
    )
    if facts.subset:
        log.info("data: the subset is %s; data.subset chooses another", facts.subset)
    if facts.split:
        left = ", ".join(f"{name} {count}" for name, count in facts.left.items())
        rest = f"; files of other splits: {left}; data.split chooses" if left else ""
        log.info("data: the split is %s%s", facts.split, rest)
    images = [column for column in columns if kinds.get(column, "").startswith("image")]
    texts = [column for column in columns if kinds.get(column) in ("text", "text or none")]
    # To look at a streamed row is to fetch a row group of many megabytes.
    if isinstance(beneath(source), StreamedSource) or not images + texts:
        return
    count = len(source)
    numbers = sorted({i * count // LOOKED_AT for i in range(LOOKED_AT)}) if count else []
    rows = [_row(source, number) for number in numbers]
    for column in texts:
        _log_captions(source, column, facts, [row.get(column) for row in rows])
    looks = _looks_of_clips if clips else _looks
    for column in images:
        cells = [cell for row in rows for cell in as_list(row.get(column))[:1]]
        of = "" if len(rows) == count else f" of {len(rows)} looked at"
        log.info("data: %s%s: %s", column, of, "; ".join(looks(cells)))


def _row(source: Source, number: int) -> Mapping[str, Any]:
    """Returns a row; nothing of one that cannot be used, which the run will name."""
    try:
        return source[number]
    except SourceFailed:
        raise
    except Exception:
        return {}


def _log_captions(source: Any, column: str, facts: Facts, examples: Sequence[Any]) -> None:
    """Logs where captions come from, how many are empty, and one of them."""
    kept = getattr(beneath(source), "rows", None)
    cells = examples
    if kept is not None:
        cells = [row.get(column) for row in itertools.islice(kept, _COUNTED)]
    empty = sum(not _first_text(cell).strip() for cell in cells)
    origins = [f"{count} from {kind}" for kind, count in facts.captions.items()]
    # A data set of another kind has them in its own column.
    where = ", ".join(origins) or f"in the column {column}"
    of = "" if len(cells) == len(source) else f" of {len(cells)} looked at"
    one = next((text for cell in examples if (text := _first_text(cell).strip())), "")
    log.info("data: %s: %s, %d empty%s; such as %r", column, where, empty, of, one[:100])


def _looks(cells: Sequence[Any]) -> list[str]:
    """Returns the sizes, modes and colour profiles of images, from their headers."""
    sizes: list[tuple[int, int]] = []
    modes: collections.Counter[str] = collections.Counter()
    profiles = broken = 0
    for cell in cells:
        try:
            file = image_file(cell)
            height, width = upright_size(file)
            mode, profile = _mode(file)
        except Exception:
            # The run names those that cannot be read, and ends where they are many.
            broken += 1
            continue
        sizes.append((width, height))
        modes[mode] += 1
        profiles += profile
    if not sizes:
        return [f"{broken} cannot be read"]
    areas = sorted(sizes, key=lambda size: size[0] * size[1])
    least, most = ("x".join(map(str, size)) for size in (areas[0], areas[-1]))
    found = [f"sizes {least}" if least == most else f"sizes {least} to {most}"]
    found.append("modes " + ", ".join(f"{mode} {count}" for mode, count in modes.most_common()))
    if profiles:
        found.append(f"{profiles} with a colour profile (ICC) that is not sRGB")
    if broken:
        found.append(f"{broken} cannot be read")
    return found


def _looks_of_clips(cells: Sequence[Any]) -> list[str]:
    """Returns the sizes, numbers of frames and rates of clips, from their headers."""
    facts: list[ClipFacts] = []
    broken = 0
    for cell in cells:
        try:
            facts.append(clip_facts(cell))
        except Exception:
            # The run names those that cannot be read, and ends where they are many.
            broken += 1
    moving = [own for own in facts if own.seconds]
    sizes = [(own.height * own.width, f"{own.width}x{own.height}") for own in facts]
    frames = [(own.frames, str(own.frames)) for own in moving]
    rates = [(rate, f"{rate:.4g}") for own in moving if (rate := own.frames / own.seconds)]
    found = [_span("sizes", sizes), _span("frames", frames), _span("frames a second", rates)]
    still = len(facts) - len(moving)
    found += [f"{still} images"] if still else []
    found += [f"{broken} cannot be read"] if broken else []
    return [text for text in found if text]


def _span(name: str, values: Sequence[tuple[float, str]]) -> str:
    """Returns the least and the most of values with their texts; an empty text where none are."""
    if not values:
        return ""
    least, most = min(values)[1], max(values)[1]
    return f"{name} {least}" if least == most else f"{name} {least} to {most}"


def _mode(file: Any) -> tuple[str, bool]:
    """Returns an image's mode, and whether it has a colour profile that is not sRGB."""
    if isinstance(file, Image.Image):
        return file.mode, False
    with Image.open(io.BytesIO(file) if isinstance(file, bytes) else file) as image:
        profile = image.info.get("icc_profile") or b""
        named = b"sRGB" in profile or "sRGB".encode("utf-16-be") in profile
        return image.mode, bool(profile) and not named


def _first_text(cell: Any) -> str:
    text = cell[0] if isinstance(cell, list) and cell else cell
    return text if isinstance(text, str) else ""
