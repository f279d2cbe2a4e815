"""The folders that benchmarks' own judges read, for models that edit and models of text to image.

gedit    fullset/{task_type}/{language}/{key}.png and {key}_SRCIMG.png, the image before:
GEdit-Bench/generate_image_example.py and test_gedit_score.py in stepfun-ai/Step1X-Edit,
whose --save_path has a folder for each model
imgedit  {key}.png for each key of the benchmark's JSON file:
Benchmark/Basic/basic_bench.py and Benchmark/singleturn_bench.py in
PKU-YuanGroup/ImgEdit, as --result_img_folder
geneval  {00000}/metadata.jsonl, {00000}/samples/{0000}.png and {00000}/grid.png:
README.md and evaluation/evaluate_images.py in djghosh13/geneval, as its folder
dpg      {item}.png, four images in two rows without a gap, for each file prompts/{item}.txt:
dpg_bench/compute_dpg_bench.py in TencentQQGYLab/ELLA, as --image-root-path with
--pic-num 4 and --resolution
"""

import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from PIL import Image
from tqdm.auto import tqdm

from diffusax.boundary.files import load_json, written_whole
from diffusax.evaluation.editors import opened_editor
from diffusax.evaluation.edits import Edit, EditSettings, Shapes, batches_by_size
from diffusax.images.reading import load_image
from diffusax.images.sheets import make_image_grid
from diffusax.training.data.examples import read_image
from diffusax.training.data.finding import open_source
from diffusax.training.data.sources import Kind

Draw = Callable[[Sequence[str], Sequence[int]], list[Image.Image]]
"""A function (prompts, seeds) -> an image of each."""
_IMGEDIT = ("singleturn.json", "basic_edit.json", "UGE_edit.json", "hard.json")
_GENEVAL = "evaluation_metadata.jsonl"
_NAME = re.compile(r"[^/\\\0]+")


class BenchmarkEdit(NamedTuple):
    """An edit of a benchmark.

    image: the image to edit. file: the file of the result, below the judge's folder. source: the
    file and the image before the edit that the judge reads there, if it does.
    """

    image: Image.Image
    instruction: str
    file: Path
    source: tuple[Path, Image.Image] | None = None


class EditBenchmark(Protocol):
    """The edits of a benchmark, read when they are asked for."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> BenchmarkEdit:
        """Returns an edit.

        Raises:
            ValueError: its image cannot be read, or a text is missing; names it.
        """

    def files(self, index: int) -> list[Path]:
        """Returns the files of an edit below the judge's folder; reads no images."""


def open_edit_benchmark(
    layout: Literal["gedit", "imgedit"], data: str, *, split: str | None = None
) -> EditBenchmark:
    """Opens a benchmark of edits.

    Args:
        layout: which one.
        data: of GEdit-Bench stepfun-ai/GEdit-Bench or its Parquet files; of ImgEdit-Bench its JSON
            file, beside which the images are, or the folder of both.
        split: the split of a data set; by default train.

    Raises:
        ValueError: there is no such benchmark.
    """
    return ImgEditBench(Path(data)) if layout == "imgedit" else GEditBench(data, split)


class GEditBench:
    """The edits of GEdit-Bench (Liu et al. 2025, "Step1X-Edit").

    The model edits `input_image_raw`; `input_image`, which has another size, is what the judge
    compares with, as in upstream's example.
    """

    _TEXTS = ("key", "task_type", "instruction", "instruction_language")
    _IMAGES = ("input_image_raw", "input_image")

    def __init__(self, data: str, split: str | None = None):
        kinds: dict[str, Kind] = dict.fromkeys(self._IMAGES, "image")
        columns = (*self._IMAGES, *self._TEXTS)
        self._source = open_source(data, columns, kinds=kinds, split=split)
        self._files: dict[int, list[Path]] = {}

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> BenchmarkEdit:
        row, name = self._source[index], self._source.name(index)
        file, before = self._files_of(row, name)
        try:
            image, shown = (read_image(row[column]) for column in self._IMAGES)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        return BenchmarkEdit(image, row["instruction"], file, (before, shown))

    def files(self, index: int) -> list[Path]:
        # To read a row is to read its images.
        if index not in self._files:
            row, name = self._source[index], self._source.name(index)
            self._files[index] = list(self._files_of(row, name))
        return self._files[index]

    def _files_of(self, row: dict[str, Any], name: str) -> tuple[Path, Path]:
        key, task, language = (
            checked_name(row[column], f"{name}: {column}")
            for column in ("key", "task_type", "instruction_language")
        )
        if not isinstance(row["instruction"], str):
            raise ValueError(f"{name}: instruction must be a text")
        folder = Path("fullset", task, language)
        return folder / f"{key}.png", folder / f"{key}_SRCIMG.png"


class ImgEditBench:
    """The edits of ImgEdit-Bench (Ye et al. 2025): its JSON file, and images beside it."""

    def __init__(self, path: Path):
        self._file = path
        if path.is_dir():
            found = [path / name for name in _IMGEDIT if (path / name).is_file()]
            if len(found) != 1:
                there = ", ".join(file.name for file in found) or "none"
                raise ValueError(f"{path} must have one of {', '.join(_IMGEDIT)} (it has {there})")
            self._file = found[0]
        if not self._file.is_file():
            raise ValueError(f"there is no file {path}; give ImgEdit's singleturn.json")
        self._items = list(load_json(self._file).items())

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> BenchmarkEdit:
        key, item = self._items[index]
        texts = [item.get(name) if isinstance(item, dict) else None for name in ("id", "prompt")]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError(f"{self._file}: {key} must have an id and a prompt")
        image = self._file.parent / str(texts[0])
        if (
            ".." in Path(str(texts[0])).parts
            or Path(str(texts[0])).is_absolute()
            or not image.is_file()
        ):
            raise ValueError(
                f"{self._file}: the image of {key}, {texts[0]}, is not beside the file"
            )
        return BenchmarkEdit(load_image(image), str(texts[1]), self.files(index)[0])

    def files(self, index: int) -> list[Path]:
        key = self._items[index][0]
        return [Path(f"{checked_name(key, f'{self._file}: a key')}.png")]


def write_edits(
    pipe: Any,
    benchmark: EditBenchmark,
    settings: EditSettings,
    shapes: Shapes,
    output: Path,
    *,
    count: int,
) -> None:
    """Edits the first `count` images of a benchmark, and writes them for its judge.

    Those whose files are there are left out, so that a run that was interrupted goes on. An image
    is brought to the nearest of some sizes, and its noise is that of its number.

    Args:
        pipe: a pipeline that edits images by instructions.
        benchmark: the edits.
        settings: the guidance, steps, seed and batch size.
        shapes: the sizes to which images are brought.
        output: the judge's folder.
        count: how many to edit.

    Raises:
        ValueError: the pipeline does not edit images, or an option or an edit is wrong.
    """
    missing = [
        i for i in range(count) if not all((output / f).is_file() for f in benchmark.files(i))
    ]
    if len(settings.image_guidance) > 1:
        raise ValueError(
            f"image_guidance must be one scale for a benchmark (got {settings.image_guidance})"
        )
    scale = next(iter(settings.image_guidance), None)
    bar = tqdm(total=count, initial=count - len(missing), desc="editing", disable=None)

    def edits() -> Iterator[Edit]:
        for i in missing:
            given = benchmark[i]
            if given.source is not None:
                _save(output / given.source[0], given.source[1])
            seed = (settings.seed + i) % 2**32
            yield Edit(shapes.cut([given.image]), given.instruction, seed=seed, row=i)

    with bar, opened_editor(pipe, settings) as edit:
        for batch in batches_by_size(edits(), settings.batch_size):
            for own, image in zip(batch, edit(batch, scale), strict=True):
                _save(output / benchmark.files(own.row)[0], image)
            bar.update(len(batch))


@dataclasses.dataclass(frozen=True)
class PromptBenchmark:
    """The prompts of a benchmark of text to image, and how their images are written.

    names: of GenEval the folders, of DPG-Bench the files without their endings. metadata: what is
    said of each prompt of GenEval.
    """

    layout: Literal["geneval", "dpg"]
    names: tuple[str, ...]
    prompts: tuple[str, ...]
    metadata: tuple[Any, ...] = ()

    @classmethod
    def open(cls, layout: Literal["geneval", "dpg"], path: Path) -> "PromptBenchmark":
        """Reads the prompts: GenEval's evaluation_metadata.jsonl, or DPG-Bench's folder of texts.

        Raises:
            ValueError: there are none, or one cannot be read.
        """
        return _open_geneval(path) if layout == "geneval" else _open_dpg(path)

    def is_written(self, index: int, output: Path, images: int) -> bool:
        """Returns whether a prompt's images are there."""
        return all((output / file).is_file() for file in self._files(index, images))

    def write(self, index: int, output: Path, images: Sequence[Image.Image]) -> None:
        """Writes a prompt's images."""
        columns = min(len(images), 2)
        rows = -(-len(images) // columns)
        blank = [Image.new("RGB", images[0].size)] * (rows * columns - len(images))
        grid = make_image_grid([*images, *blank], rows, columns)
        if self.layout == "dpg":
            _save(output / f"{self.names[index]}.png", grid)
            return
        folder = output / self.names[index]
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.metadata[index], ensure_ascii=False)
        with written_whole(folder / "metadata.jsonl") as partial:
            partial.write_text(text, encoding="utf-8")
        _save(folder / "grid.png", grid)
        for file, image in zip(self._files(index, len(images)), images, strict=True):
            _save(output / file, image)

    def _files(self, index: int, images: int) -> list[Path]:
        name = self.names[index]
        if self.layout == "dpg":
            return [Path(f"{name}.png")]
        return [Path(name, "samples", f"{i:04}.png") for i in range(images)]


def write_prompts(
    benchmark: PromptBenchmark,
    draw: Draw,
    output: Path,
    *,
    images: int = 4,
    batch_size: int = 8,
    seed: int = 0,
    count: int | None = None,
) -> int:
    """Generates the images of a benchmark's prompts, and writes them for its judge.

    Prompts whose files are there are left out, so that a run that was interrupted goes on. Image i
    of prompt n has the seed `seed + n images + i`.

    Args:
        benchmark: the prompts.
        draw: generates images; it always gets `batch_size` prompts, the last one repeated.
        output: the judge's folder.
        images: the number of images of each prompt.
        batch_size: the number of images to generate at a time.
        seed: the seed of the first image.
        count: the number of prompts, by default all.

    Returns:
        The number of prompts that the folder has.
    """
    total = len(benchmark.names) if count is None else min(count, len(benchmark.names))
    missing = [n for n in range(total) if not benchmark.is_written(n, output, images)]
    todo = [(n, i) for n in missing for i in range(images)]
    bar = tqdm(total=total * images, initial=total * images - len(todo), disable=None)
    done: dict[int, list[Image.Image]] = {}
    with bar:
        for start in range(0, len(todo), batch_size):
            batch = todo[start : start + batch_size]
            filled = [*batch, *[batch[-1]] * (batch_size - len(batch))]
            prompts = [benchmark.prompts[n] for n, _ in filled]
            drawn = draw(prompts, [(seed + n * images + i) % 2**32 for n, i in filled])
            for (n, _), image in zip(batch, drawn):
                done.setdefault(n, []).append(image)
                if len(done[n]) == images:
                    benchmark.write(n, output, done.pop(n))
            bar.update(len(batch))
    return total


def _open_geneval(path: Path) -> PromptBenchmark:
    file = path / _GENEVAL if path.is_dir() else path
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{file} cannot be read as GenEval's {_GENEVAL} ({error}); give that file"
        ) from None
    metadata = []
    for number, line in enumerate(filter(str.strip, text.splitlines()), 1):
        try:
            item = json.loads(line)
            if not isinstance(item["prompt"], str):
                raise TypeError("prompt")
        except (ValueError, KeyError, TypeError, RecursionError):
            raise ValueError(f"{file} line {number} must be JSON with a prompt") from None
        metadata.append(item)
    if not metadata:
        raise ValueError(f"{file} has no prompts")
    names = tuple(f"{i:05}" for i in range(len(metadata)))
    prompts = tuple(item["prompt"] for item in metadata)
    return PromptBenchmark("geneval", names, prompts, tuple(metadata))


def _open_dpg(path: Path) -> PromptBenchmark:
    files = sorted(path.glob("*.txt")) if path.is_dir() else []
    if not files:
        raise ValueError(f"{path} must be DPG-Bench's folder of prompts, a .txt file for each")
    try:
        prompts = tuple(file.read_text(encoding="utf-8").strip() for file in files)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} holds a file that is not UTF-8 ({error})") from None
    return PromptBenchmark("dpg", tuple(file.stem for file in files), prompts)


def checked_name(value: Any, what: str) -> str:
    """Returns a text that can be the name of a file or folder.

    Raises:
        ValueError: it is none.
    """
    text = str(value) if isinstance(value, str | int) else ""
    if not _NAME.fullmatch(text) or text in (".", ".."):
        raise ValueError(f"{what} must be the name of a file (got {value!r:.80})")
    return text


def _save(file: Path, image: Image.Image) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(file) as partial:
        image.save(partial, format="png")
