"""Edits: which columns of a data set hold images before and after, and rows in one form of them."""

import dataclasses
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from diffusax.training.data.sources import Facts, Kind, Source, SourceFailed, as_list

_ROLES = ("originals", "prompt", "edited")


@dataclasses.dataclass(frozen=True)
class EditColumns:
    """The columns of a data set of edits, as it calls them."""

    originals: tuple[str, ...]
    """Those of the images to look at, in their order. Of a name without a number also the numbered
    ones count: control_path_0, control_path_1 and so on."""
    prompt: str
    """That of the instructions."""
    edited: str
    """That of the images after the edit."""
    further: tuple[str, ...] = ()
    """Those of further images to look at, which rows may lack."""
    fixed: frozenset[str] = frozenset()
    """Which of the three a user has named, so that no other names are tried."""
    masks: str = ""
    """That of the edited images' masks; none where it is empty."""
    optional: bool = False
    """Whether rows may lack all images to look at, which are then text to image."""

    def find(self, present: Collection[str]) -> "EditColumns | None":
        """Returns the columns by the names that a data set gives them: these, or `LAYOUTS`' ones.

        present: the names of all its columns. None where no names fit. Where rows may lack images
        to look at, their columns may be missing, too.
        """
        layouts = []
        for layout in (self, *LAYOUTS):
            free = {role: getattr(layout, role) for role in _ROLES if role not in self.fixed}
            found = dataclasses.replace(self, **free)
            layouts.append(
                dataclasses.replace(found, originals=_numbered(found.originals, present))
            )
        for found in layouts:
            if {*found.originals, found.prompt, found.edited} <= {*present}:
                return found
        for found in layouts if self.optional else ():
            if {found.prompt, found.edited} <= {*present}:
                return dataclasses.replace(found, originals=())
        return None

    def in_table(
        self, present: Sequence[str], columns: Sequence[str], kinds: Mapping[str, Kind]
    ) -> tuple[tuple[str, ...], Mapping[str, Kind]]:
        """Returns columns and what they hold by the names that a table gives those of edits.

        Args:
            present: the names of the table's columns.
            columns: the columns by the names that were asked for.
            kinds: what they hold.
        """
        found = self.find(present)
        if found is None and (free := dataclasses.replace(self, fixed=frozenset()).find(present)):
            # Only what a user has named is missing, and will be named.
            found = dataclasses.replace(free, **{role: getattr(self, role) for role in self.fixed})
        if found is None:
            return tuple(columns), kinds
        others = [column for column in columns if column not in self.names]
        may_lack = (*found.originals, *found.further) if self.optional else found.further
        own: dict[str, Kind] = dict.fromkeys((*found.originals, found.edited), "image")
        own |= dict.fromkeys(may_lack, "image or none")
        own[found.prompt] = "text"
        kept = {name: kind for name, kind in kinds.items() if name in others}
        return (*found.names, *others), {**kept, **own}

    @property
    def names(self) -> tuple[str, ...]:
        """All columns."""
        return (*self.originals, *self.further, self.prompt, self.edited)


LAYOUTS = (
    # timbrooks/instructpix2pix-clip-filtered.
    EditColumns(("original_image",), "edit_prompt", "edited_image"),
    # BleachNick/UltraEdit_500k, by training/train_sd3_pix2pix.py of HaozheZhao/UltraEdit.
    EditColumns(("source_image",), "edit_prompt", "edited_image"),
    # osunlp/MagicBrush: a row is one turn of a session already.
    EditColumns(("source_img",), "instruction", "target_img"),
    # TIGER-Lab/OmniEdit-Filtered-1.2M: several instructions for one image.
    EditColumns(("src_img",), "edited_prompt_list", "edited_img"),
    # sysuyy/ImgEdit.
    EditColumns(("input_images",), "prompt", "output_images"),
    # UCSC-VLAA/GPT-Image-Edit-1.5M.
    EditColumns(("input",), "instruction", "output"),
    # apple/pico-banana-400k after its map_openimage_url_to_local.py. Of a preference it is the
    # preferred image that is called output_image.
    EditColumns(("local_input_image",), "text", "output_image"),
    # musubi-tuner, docs/dataset_config.md.
    EditColumns(("control_path",), "caption", "image_path"),
)
"""The names of data sets that people train with, tried in this order where none are given."""


def _numbered(names: tuple[str, ...], present: Collection[str]) -> tuple[str, ...]:
    """Replaces each name that is not there by its numbered ones, in the order of the numbers."""
    found: list[str] = []
    for name in names:
        pattern = re.compile(rf"{re.escape(name)}_(\d+)")
        numbered = [other for other in present if pattern.fullmatch(other)]
        numbered.sort(key=lambda other: int(other.rpartition("_")[2]))
        found += [name] if name in present or not numbered else numbered
    return tuple(found)


@dataclasses.dataclass(frozen=True)
class EditSource:
    """The rows of a data set of edits in one form, whatever its columns are called.

    Of a row, the column of the original holds a list of the images to look at, one or more (or
    none, where these are optional); those of the instruction and of the edited image hold what the
    data set has: one, or a list.
    """

    source: Source
    found: EditColumns
    """The columns as the source calls them."""
    asked: EditColumns
    """The columns as rows call them here; the first of the originals."""
    most: int = 1
    """The most images to look at that a row may have."""
    alike: int = 0
    """The number that every row must have, where it cannot be known before; 0 for any."""

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Returns a row.

        Raises:
            ValueError: the row has no image to look at.
            SourceFailed: it has more than the model takes, as others will have.
        """
        row = self.source[index]
        originals = self.originals_of(row)
        if not originals and not self.asked.optional:
            raise ValueError(
                "there is no image before the edit, and data.references_optional is off"
            )
        if len(originals) > self.most:
            raise SourceFailed(too_many(self.name(index), len(originals), self.most))
        if self.alike and len(originals) != self.alike:
            raise ValueError(f"{len(originals)} images before the edit, and others {self.alike}")
        others = {name: cell for name, cell in row.items() if name not in self.found.names}
        return {
            **others,
            self.asked.originals[0]: originals,
            self.asked.prompt: row[self.found.prompt],
            self.asked.edited: row[self.found.edited],
        }

    def originals_of(self, row: dict[str, Any]) -> list[Any]:
        """Returns the images to look at of one of the source's rows; leaves out those missing."""
        columns = (*self.found.originals, *self.found.further)
        cells = [cell for name in columns for cell in as_list(row.get(name))]
        return [cell for cell in cells if not _missing(cell)]

    def name(self, index: int) -> str:
        return self.source.name(index)

    @property
    def facts(self) -> Facts:
        """What was found while the data set was opened."""
        facts: Facts = getattr(self.source, "facts", Facts())
        return facts


def too_many(where: str, count: int, most: int) -> str:
    """Returns the message for a row with more images to look at than the model takes."""
    return (
        f"{where} has {count} images before the edit, and this model looks at {most}; train one "
        "that looks at several, or name fewer by data.original_image_column"
    )


def beneath(source: Source) -> Source:
    """Returns the source whose rows an `EditSource` renames; others as they are."""
    return source.source if isinstance(source, EditSource) else source


def _missing(cell: Any) -> bool:
    # `datasets` writes an image that is not there as null, or as a struct of nulls.
    return cell is None or (isinstance(cell, dict) and not any(cell.values()))
