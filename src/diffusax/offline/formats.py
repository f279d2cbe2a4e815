"""Formats of finished shards: a folder of files, a tar file, or a Parquet file.

An item is an image as a PNG file, or a video as a file of a format of its own.

A shard is made of pieces, one for each batch, so that a run that stops loses no finished batch. A
piece is written before its batch counts as done; the pieces then become the shard at once.
"""

import json
import os
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any, Protocol

from diffusax.boundary.files import sync_folder, write_durably
from diffusax.boundary.messages import require_extra

Info = Mapping[str, Any]
Item = tuple[Info, bytes]
"""The information about an image or a video, and its file."""


class Format(Protocol):
    """A way to write shards. suffix: the suffix of their names."""

    suffix: str

    def write_piece(self, work: Path, number: int, items: Sequence[Item], pool: Executor) -> None:
        """Writes the images of a batch into the shard's working folder."""

    def join(self, work: Path, pieces: int, infos: Sequence[Info], shard: Path) -> None:
        """Makes the shard, which appears only when whole, from the working folder."""


def open_format(name: str, ending: str = "png") -> Format:
    """Returns the format of this name. ending: that of the items' files, without a dot.

    Raises:
        ImportError: the package that writes it is not installed.
    """
    kinds: dict[str, type] = {"images": Images, "webdataset": WebDataset, "parquet": Parquet}
    found: Format = kinds[name](ending)
    return found


class Images:
    """A folder with KEY.png for each image and metadata.jsonl, which `datasets` reads."""

    suffix = ""

    def __init__(self, ending: str) -> None:
        self._ending = ending

    def write_piece(self, work: Path, number: int, items: Sequence[Item], pool: Executor) -> None:
        folder = work / "shard"
        folder.mkdir(exist_ok=True)
        files = [folder / f"{info['key']}.{self._ending}" for info, _ in items]
        list(pool.map(write_durably, files, [data for _, data in items]))

    def join(self, work: Path, pieces: int, infos: Sequence[Info], shard: Path) -> None:
        folder = work / "shard"
        folder.mkdir(exist_ok=True)
        rows = [{"file_name": f"{info['key']}.{self._ending}", **info} for info in infos]
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        write_durably(folder / "metadata.jsonl", text.encode())
        os.replace(folder, shard)
        sync_folder(shard.parent)


class WebDataset:
    """A tar file with KEY.png and KEY.json for each image, side by side."""

    suffix = ".tar"

    def __init__(self, ending: str) -> None:
        self._ending = ending

    def write_piece(self, work: Path, number: int, items: Sequence[Item], pool: Executor) -> None:
        blocks = [x for info, data in items for x in _members(info, data, self._ending)]
        write_durably(work / f"{number:06}.part", b"".join(blocks))

    def join(self, work: Path, pieces: int, infos: Sequence[Info], shard: Path) -> None:
        def blocks() -> Iterator[bytes]:
            for number in range(pieces):
                yield (work / f"{number:06}.part").read_bytes()
            yield bytes(2 * tarfile.BLOCKSIZE)

        write_durably(shard, blocks())


class Parquet:
    """A Parquet file with a column `image` of {bytes, path}, and one for each other value.

    Of videos it is the column `video`.
    """

    suffix = ".parquet"

    def __init__(self, ending: str) -> None:
        self._ending = ending
        self._column = "image" if ending == "png" else "video"
        self._arrow = require_extra("pyarrow", "offline")
        self._parquet = require_extra("pyarrow.parquet", "offline")

    def write_piece(self, work: Path, number: int, items: Sequence[Item], pool: Executor) -> None:
        rows = [
            {**info, self._column: {"bytes": data, "path": f"{info['key']}.{self._ending}"}}
            for info, data in items
        ]
        table = self._arrow.Table.from_pylist(rows, self._schema())
        sink = self._arrow.BufferOutputStream()
        # The files are compressed already.
        self._parquet.write_table(table, sink, compression="none")
        write_durably(work / f"{number:06}.part", sink.getvalue().to_pybytes())

    def join(self, work: Path, pieces: int, infos: Sequence[Info], shard: Path) -> None:
        sink = self._arrow.BufferOutputStream()
        with self._parquet.ParquetWriter(sink, self._schema(), compression="none") as writer:
            for number in range(pieces):
                writer.write_table(self._parquet.read_table(work / f"{number:06}.part"))
        write_durably(shard, sink.getvalue().to_pybytes())

    def _schema(self) -> Any:
        text, whole, real = self._arrow.string(), self._arrow.int64(), self._arrow.float64()
        file = self._arrow.struct([("bytes", self._arrow.binary()), ("path", text)])
        kinds = {
            self._column: file,
            "key": text,
            "line": whole,
            "prompt": text,
            "negative_prompt": text,
            "seed": whole,
            "number": whole,
            "height": whole,
            "width": whole,
            "num_inference_steps": whole,
            "guidance_scale": real,
            "sampler": text,
        }
        if self._column == "video":
            kinds |= {"num_frames": whole, "fps": real, "guidance_scale_2": real}
        return self._arrow.schema(list(kinds.items()))


def _members(info: Mapping[str, Any], data: bytes, ending: str) -> Iterator[bytes]:
    """Yields the bytes of an item's two files in a tar file."""
    text = json.dumps(info, ensure_ascii=False).encode()
    for suffix, content in ((ending, data), ("json", text)):
        member = tarfile.TarInfo(f"{info['key']}.{suffix}")
        member.size = len(content)
        yield member.tobuf(tarfile.USTAR_FORMAT)
        yield content
        yield bytes(-len(content) % tarfile.BLOCKSIZE)
