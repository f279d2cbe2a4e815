"""Styles: named words for prompts, in stable-diffusion-webui's styles.csv."""

import csv
import dataclasses
import io
from collections.abc import Iterable
from pathlib import Path

FILE = "styles.csv"
_PLACE = "{prompt}"
_MOST_BYTES = 4 * 2**20


@dataclasses.dataclass(frozen=True)
class Style:
    """Words that are put around a prompt, or behind it."""

    name: str
    prompt: str
    negative_prompt: str


def find_styles(folder: Path | None) -> dict[str, Style]:
    """Returns the styles by name in the file of a folder of models, or of webui's above it.

    Raises:
        ValueError: the file cannot be read; says why.
    """
    if folder is None:
        return {}
    places = [folder, *([folder.parent] if folder.name.lower() == "models" else [])]
    file = next((place / FILE for place in places if (place / FILE).is_file()), None)
    return {} if file is None else read_styles(file)


def read_styles(file: Path) -> dict[str, Style]:
    """Returns the styles of a file by name, the first of each name.

    Source: stable-diffusion-webui, modules/styles.py, StyleDatabase.load_from_csv.

    Raises:
        ValueError: it cannot be read; says why.
    """
    if file.stat().st_size > _MOST_BYTES:
        raise ValueError(f"{file} must have at most {_MOST_BYTES} bytes; split it")
    found: dict[str, Style] = {}
    try:
        text = io.StringIO(file.read_text("utf-8-sig"), newline="")
        for row in csv.DictReader(text, skipinitialspace=True):
            # Old files call the prompt "text".
            name, prompt = row.get("name"), row.get("prompt") or row.get("text") or ""
            if name and not name.startswith("#"):
                style = Style(name, prompt, row.get("negative_prompt") or "")
                found.setdefault(name, style)
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{file} must be CSV in UTF-8 ({error})") from None
    return found


def with_styles(prompt: str, negative_prompt: str, styles: Iterable[Style]) -> tuple[str, str]:
    """Returns a prompt and a negative prompt with the words of styles.

    Source: stable-diffusion-webui, modules/styles.py, merge_prompts.
    """
    for style in styles:
        prompt = _merged(style.prompt, prompt)
        negative_prompt = _merged(style.negative_prompt, negative_prompt)
    return prompt, negative_prompt


def _merged(style: str, prompt: str) -> str:
    if _PLACE in style:
        return style.replace(_PLACE, prompt)
    return ", ".join(filter(None, (prompt.strip(), style.strip())))
