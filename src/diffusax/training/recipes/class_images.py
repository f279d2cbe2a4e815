"""Generates the images of a class for prior preservation (Ruiz et al. 2023, section 3.3)."""

import dataclasses
import logging
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from tqdm.auto import tqdm

from diffusax.boundary.files import load_json, locked, write_json, written_whole
from diffusax.pipelines import DiffusionPipeline
from diffusax.runtime.devices.mesh import make_mesh, parse_mesh
from diffusax.training.data.folders import FolderSource
from diffusax.training.data.image_files import list_folder, without_companions

log = logging.getLogger(__name__)

_RECORD = "class.json"
_OWN = re.compile(r"class-\d{5,}\.png")


@dataclasses.dataclass(frozen=True)
class ClassImages:
    """How the images of a class are generated.

    Image i has the seed i. Images are generated in fixed blocks of `batch_size`, so that a run that
    was killed and started again writes the same files as one that was not.
    """

    model: str
    """The checkpoint that generates them."""
    prompt: str
    """What they show."""
    size: int
    """The height and width in pixels."""
    steps: int | None = None
    """The number of sampler steps; None for the pipeline's own."""
    guidance: float | None = None
    """The guidance scale; None for the pipeline's own."""
    batch_size: int = 4
    """The number of images that are generated at a time."""
    dtype: str = "float32"
    """The dtype that the networks compute in."""
    mesh: str | None = None
    """The mesh of the run, over whose devices the model is split; None generates on all of this
    process's devices, each with a copy."""

    def ensure(self, folder: Path, count: int) -> None:
        """Generates the images that a folder lacks to have `count`; those in it stay as they are.

        Images with other names than this function gives count, too. Each of several JAX processes
        generates a part; all of them must see the folder.

        Raises:
            ValueError: the images there were generated in another way, another run writes to the
                folder, or the processes do not see the same folder; says why.
            OSError: an image cannot be written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        own = max(count - len(_others(folder)), 0)
        if own and jax.process_index() == 0:
            self._note(folder)
        blocks = list(self._blocks(folder, own))[jax.process_index() :: jax.process_count()]
        if blocks:
            with locked(folder / f".lock-{jax.process_index()}", folder):
                self._generate(folder, blocks, own)
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices("class images generated")
        if missing := _missing(folder, range(own)):
            raise ValueError(
                f"{folder / _name(missing[0])} is missing; class_data must be a folder that all "
                "processes see"
            )

    def missing(self, folder: Path, count: int) -> bool:
        """Returns whether a folder lacks images to have `count`."""
        return bool(_missing(folder, range(max(count - len(_others(folder)), 0))))

    def _blocks(self, folder: Path, own: int) -> Iterator[range]:
        for start in range(0, own, self.batch_size):
            block = range(start, start + self.batch_size)
            if _missing(folder, block[: own - start]):
                yield block

    def _generate(self, folder: Path, blocks: Sequence[range], own: int) -> None:
        log.info("generating images of %r into %s", self.prompt, folder)
        pipe = DiffusionPipeline.from_pretrained(self.model, dtype=self.dtype, mesh=self._devices())
        pipe.set_progress_bar_config(disable=True)
        options: dict[str, Any] = {"num_inference_steps": self.steps}
        options["guidance_scale"] = self.guidance
        options = {name: value for name, value in options.items() if value is not None}
        for block in tqdm(blocks, desc="class images", unit="batch"):
            prompts = [self.prompt] * len(block)
            size = {"height": self.size, "width": self.size}
            images = pipe(prompt=prompts, seed=list(block), **size, **options).images
            for number in _missing(folder, block[: max(own - block.start, 0)]):
                with written_whole(folder / _name(number)) as partial:
                    images[number - block.start].save(partial, "PNG")

    def _devices(self) -> Mesh | None:
        # Each of several processes has images of its own, and splits the model over its devices if
        # the run does.
        if self.mesh is None or jax.process_count() == 1:
            return None if self.mesh is None else make_mesh(self.mesh)
        splits = any(axis != "data" for axis in parse_mesh(self.mesh))
        return make_mesh("fsdp=-1", devices=jax.local_devices()) if splits else None

    def _note(self, folder: Path) -> None:
        """Writes how the images are generated, or compares it with what an earlier run wrote."""
        own = {k: getattr(self, k) for k in ("model", "prompt", "size", "steps", "guidance")}
        file = folder / _RECORD
        if not file.is_file():
            write_json(file, own, ensure_ascii=False)
            return
        before = load_json(file)
        changed = [f"{k}={before.get(k)!r}" for k, v in own.items() if before.get(k) != v]
        if changed:
            raise ValueError(
                f"the class images in {folder} were generated with {', '.join(changed)}; use "
                "another class_data folder, or remove them"
            )


@dataclasses.dataclass(frozen=True)
class MissingImages:
    """Stands for missing images of a class that a run at its last step does not need.

    They are asked for only where the checkpoint of that step turns out to be damaged.
    """

    folder: str

    def __len__(self) -> int:
        raise ValueError(
            f"images of the class are missing in {self.folder}; start the same command again, "
            "which generates them"
        )

    def __getitem__(self, index: int) -> dict[str, Any]:
        raise IndexError(index)

    def name(self, index: int) -> str:
        """Returns the folder."""
        return self.folder


def class_source(folder: Path, count: int, column: str) -> FolderSource:
    """Returns the first `count` images of a folder, other images before the generated ones.

    column: the name of the column with the images.

    Raises:
        ValueError: the folder holds no image.
    """
    own = sorted(f.name for f in folder.glob("class-*.png") if _OWN.fullmatch(f.name))
    names = [*_others(folder), *own][:count]
    if not names:
        raise ValueError(f"{folder} holds no images of the class")
    cells: tuple[dict[str, Any], ...] = tuple({column: name} for name in names)
    return FolderSource(str(folder), ({},) * len(names), cells)


def _others(folder: Path) -> list[str]:
    """Returns the names of the images that were not generated here, sorted."""
    images = without_companions(list_folder(folder)).images
    return sorted(image for image in images if not _OWN.fullmatch(image.rpartition("/")[2]))


def _missing(folder: Path, numbers: range) -> list[int]:
    return [number for number in numbers if not (folder / _name(number)).is_file()]


def _name(number: int) -> str:
    return f"class-{number:05}.png"
