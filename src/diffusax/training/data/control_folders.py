"""Edits in folders: images to learn with captions, and folders of those to look at, by their names.

The layouts are ai-toolkit's (dataloader_mixins.py: up to three folders as control_path, in which
files have the names of the images to learn, whatever their suffix) and musubi-tuner's
(docs/dataset_config.md: one control_directory, in which several for an image are called 1_0.png,
1_1.png and so on).
"""

import dataclasses
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from diffusax.training.data.captions import Lines, read_captions
from diffusax.training.data.edits import EditColumns
from diffusax.training.data.folders import FolderSource
from diffusax.training.data.image_files import METADATA, Listing, stem_of
from diffusax.training.data.sources import MAX_BROKEN, Facts

log = logging.getLogger(__name__)

_CONTROL = re.compile(
    r"(?:controls?|sources?|originals?|references?|inputs?|before)"
    r"(?:_(?:path|images?|directory|dir))?(?:[-_ ]?(\d))?",
    re.IGNORECASE,
)
"""Folders that hold images to look at, with their number where there are several."""
_NUMBERED = re.compile(r"(.+)_(\d+)")


def pair_folders(
    listing: Listing,
    columns: EditColumns,
    lines: Lines = "first",
    *,
    all_images: Sequence[str] = (),
) -> FolderSource | None:
    """Pairs the images of a folder with those that have their names in its folders of controls.

    In the rows, the columns have the names that were asked for: of images to look at a list, in the
    order of the folders.

    Args:
        listing: the folder.
        columns: the columns as they are asked for; those that a user named are names of folders.
        lines: what captions' files of several lines say; see `captions`.
        all_images: those that may be masks: in a folder of the masks' name, with the names of the
            images to learn, or beside these, as 1_mask.png beside 1.png.

    Returns:
        The edits; None where there are no such folders.

    Raises:
        ValueError: captions cannot be read; or more than one image in a hundred has none, or
            nothing to look at where that is not optional.
    """
    masks = _mask_files(all_images, columns.masks)
    apart = {mask for own in masks.values() for mask in own}
    listing = dataclasses.replace(
        listing, images=tuple(path for path in listing.images if path not in apart)
    )
    controls = _control_folders(listing, columns)
    targets = _targets(listing, columns, controls)
    if not targets or not (controls or columns.optional):
        return None
    looked_at = [_looked_at(target, controls) for target in targets]
    own = dataclasses.replace(listing, images=tuple(targets))
    captions = read_captions(own, columns.prompt, lines, may_lack=True)
    rows, left = list[dict[str, Any]](), list[str]()
    files: list[dict[str, Any]] = []
    mask = ""
    for target, text, images in zip(targets, captions.texts, looked_at, strict=True):
        if not images and not columns.optional:
            left.append(f"{target} has no image of its name in {' or '.join(controls)}")
        elif not text or not any(text):
            left.append(f"{target} has no instruction")
        elif columns.masks and not (mask := _mask_of(target, masks)):
            left.append(f"{target} has no mask of its name in {columns.masks} or beside it")
        else:
            rows.append({columns.prompt: text})
            files.append({columns.edited: target, columns.originals[0]: images})
            if columns.masks:
                files[-1][columns.masks] = mask
    if left:
        some = f"{len(left)} of {len(targets)} images of {listing.folder} cannot be used: "
        text = some + "; ".join(left[:3])
        if len(left) > MAX_BROKEN * len(targets):
            raise ValueError(f"{text}; write what is missing, or name images in a {METADATA[0]}")
        log.warning("%s; these are left out", text)
    log.info("images before the edit are those in %s", ", ".join(controls) or "no folder")
    facts = Facts(captions=captions.sources)
    return FolderSource(str(listing.folder), tuple(rows), tuple(files), facts)


def _control_folders(
    listing: Listing, columns: EditColumns
) -> dict[str, Mapping[str, Sequence[str]]]:
    """Returns the folders of images to look at in their order, with the files by their stems."""
    named = (*columns.originals, *columns.further)
    found: dict[str, list[str]] = {}
    for image in listing.images:
        found.setdefault(image.rpartition("/")[0], []).append(image)

    def rank(folder: str) -> tuple[int, str] | None:
        name = PurePosixPath(folder).name
        if name in named:
            return named.index(name), folder
        match = _CONTROL.fullmatch(name) if "originals" not in columns.fixed else None
        return (len(named) + int(match[1] or 0), folder) if match else None

    ranks = {folder: place for folder in found if (place := rank(folder)) is not None}
    return {folder: _by_stem(found[folder]) for folder in sorted(ranks, key=lambda f: ranks[f])}


def _mask_files(images: Sequence[str], name: str) -> dict[str, list[str]]:
    """Returns masks by the name of what they are for: an image's path, or stem, without a suffix.

    name: that of their folders, and of what stands behind the names of masks beside images.
    """
    found: dict[str, list[str]] = {}
    if not name:
        return found
    beside = re.compile(rf"(.+)[-_.]{re.escape(name)}", re.IGNORECASE)
    for path in images:
        folder, stem = path.rpartition("/")[0], path.rpartition(".")[0]
        if PurePosixPath(folder).name == name:
            found.setdefault(f"{PurePosixPath(folder).parent}/{stem_of(path)}", []).append(path)
        elif match := beside.fullmatch(stem):
            found.setdefault(match[1], []).append(path)
    return found


def _mask_of(target: str, masks: Mapping[str, Sequence[str]]) -> str:
    """Returns an image's mask: beside it, or in the nearest folder of masks; "" without one."""
    own = target.rpartition(".")[0]
    above = [str(folder) for folder in PurePosixPath(target).parents]
    places = [own, *(f"{folder}/{stem_of(target)}" for folder in above)]
    return next((masks[place][0] for place in places if place in masks), "")


def _by_stem(images: Sequence[str]) -> dict[str, list[str]]:
    """Returns images by their stems; numbered ones also by the stem before the number."""
    found: dict[str, list[str]] = {}
    numbered: dict[str, list[tuple[int, str]]] = {}
    for image in images:
        stem = stem_of(image)
        found.setdefault(stem, []).append(image)
        if match := _NUMBERED.fullmatch(stem):
            numbered.setdefault(match[1], []).append((int(match[2]), image))
    several = {stem: [image for _, image in sorted(own)] for stem, own in numbered.items()}
    # Two files of one name and several suffixes are one image, as in ai-toolkit.
    return several | {stem: own[:1] for stem, own in found.items()}


def _targets(
    listing: Listing, columns: EditColumns, controls: Mapping[str, Mapping[str, Sequence[str]]]
) -> list[str]:
    """Returns the images to learn: those outside the folders of images to look at."""
    images = [path for path in listing.images if path.rpartition("/")[0] not in controls]
    if "edited" in columns.fixed:
        images = [path for path in images if columns.edited in path.split("/")[:-1]]
    return images


def _looked_at(target: str, controls: Mapping[str, Mapping[str, Sequence[str]]]) -> list[str]:
    """Returns the images to look at of one to learn, from the folders nearest to it.

    A folder of controls is near those beside it and those inside them.
    """
    above = {folder: folder.rpartition("/")[0] for folder in controls}
    near = [f for f, parent in above.items() if not parent or target.startswith(f"{parent}/")]
    depth = max((len(above[folder]) for folder in near), default=0)
    nearest = [controls[folder] for folder in near if len(above[folder]) == depth]
    return [image for images in nearest for image in images.get(stem_of(target), ())]
