"""Through how many files and functions a call passes, and how often its path changes the file.

What somebody would have to read who followed it, in all threads. Functions are counted once each,
however often they are called; a change of file is a call into another file than the call before in
its thread. Comprehensions, which are functions of their own until Python 3.12, are counted apart:
`def`s says what is left without them. What XLA and PyTorch do is in other packages and not counted.
PyTorch is imported only for the walks of the tiny checkpoint, which diffusers walks, too.

Walks: the first and the second call of a text-to-image pipeline, here and in diffusers on the same
tiny checkpoint, and of the embedded model; a batch of training a LoRA, once its step is compiled;
the way of a LoRA's file to an adapter, and a call with it; a request to the server, the second.
    python benchmarks/call_path.py --list
"""

import argparse
import collections
import contextlib
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from PIL import Image

import diffusax

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

CALL = {"prompt": "a cat", "num_inference_steps": 4}
_STEPS = range(6, 22)
"""The steps of training that are followed; its data are prepared by threads that run ahead."""


class Walk:
    """The functions of a package that are called while it is on, by file, in order."""

    def __init__(self, package: ModuleType = diffusax):
        """Follows a package. Lambdas are functions, too."""
        self._root = str(Path(package.__file__ or "").parent)
        self.files: dict[str, list[str]] = {}
        self.changes = self.changes_of_defs = 0
        self.is_on = False
        self._last: dict[int, str] = {}
        self._last_def: dict[int, str] = {}
        self._calls: collections.Counter[str] = collections.Counter()
        self._span: tuple[str, range] | None = None

    @property
    def functions(self) -> int:
        """The number of functions of all files."""
        return sum(map(len, self.files.values()))

    @property
    def defs(self) -> int:
        """The number of functions that are no comprehensions."""
        names = [name for functions in self.files.values() for name in functions]
        return sum(not _is_comprehension(name) for name in names)

    @property
    def lines(self) -> int:
        """The lines of all files."""
        return sum(len(Path(self._root, file).read_text().splitlines()) for file in self.files)

    @contextlib.contextmanager
    def everywhere(self) -> Iterator[None]:
        """Follows this thread, and those that start inside the context, while the walk is on."""
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def of(self, call: Callable[[], Any]) -> "Walk":
        """Follows one call."""
        with self.everywhere():
            self.is_on = True
            call()
            self.is_on = False
        return self

    def between(self, function: str, numbers: range) -> None:
        """Follows what comes between a function's calls of these numbers."""
        self._span = function, numbers

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(self._root):
            return
        if code.co_name == "<module>":
            return
        name = code.co_qualname
        if self._span is not None and name == self._span[0]:
            self._calls[name] += 1
            self.is_on = self._calls[name] in self._span[1]
        if not self.is_on:
            return
        file = str(Path(code.co_filename).relative_to(self._root))
        functions = self.files.setdefault(file, [])
        if name not in functions:
            functions.append(name)
        thread = threading.get_ident()
        self.changes += self._last.get(thread, file) != file
        self._last[thread] = file
        if not _is_comprehension(name):
            self.changes_of_defs += self._last_def.get(thread, file) != file
            self._last_def[thread] = file


def _is_comprehension(name: str) -> bool:
    return name.endswith(("<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>"))


def main() -> None:
    """Prints the counts and, if asked for, what was counted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true", help="name the functions of each file")
    args = parser.parse_args()
    walks: dict[str, Walk] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        walks |= calls()
        walks |= training(folder)
        walks |= lora(folder)
        walks |= request()
        walks |= tiny_calls(folder / "tiny")
    columns = f"{'files':>7}{'lines':>8}{'functions':>11}{'defs':>6}{'changes':>9}{'of defs':>9}"
    print(f"{'walk':40}{columns}")
    for name, walk in walks.items():
        counts = f"{len(walk.files):7}{walk.lines:8}{walk.functions:11}{walk.defs:6}"
        print(f"{name:40}{counts}{walk.changes:9}{walk.changes_of_defs:9}")
    if args.list:
        for name, walk in walks.items():
            print(f"\n{name}")
            for file, functions in walk.files.items():
                print(f"  {file} ({len(functions)}): {', '.join(functions)}")


def tiny_calls(folder: Path) -> dict[str, Walk]:
    """Two calls of a tiny checkpoint, here and in diffusers."""
    import diffusers
    from support.tiny import build_checkpoint

    theirs = build_checkpoint(folder, "sd", "a")
    ours = diffusax.DiffusionPipeline.from_pretrained(folder)
    ours.set_progress_bar_config(disable=True)
    found = {}
    for package, pipe in ((diffusax, ours), (diffusers, theirs)):
        for which in ("first", "second"):
            name = f"tiny model, {which} call, {package.__name__}"
            found[name] = Walk(package).of(lambda p=pipe: p(**CALL))
    return found


def calls() -> dict[str, Walk]:
    """Two calls of the embedded model."""
    pipe = diffusax.DiffusionPipeline.from_pretrained("emoji")
    pipe.set_progress_bar_config(disable=True)
    return {f"{which} call": Walk().of(lambda: pipe(**CALL)) for which in ("first", "second")}


def training(folder: Path) -> dict[str, Walk]:
    """One batch of a run that trains a LoRA of the embedded model."""
    from diffusax.training import (
        CaptionedDataConfig,
        LoRAConfig,
        TextToImageConfig,
        text_to_image,
        train,
    )

    data = folder / "data"
    data.mkdir()
    for i in range(4):
        Image.new("RGB", (64, 64), (60 * i, 0, 0)).save(data / f"{i}.png")
        (data / f"{i}.txt").write_text("a red square")
    config = TextToImageConfig(
        model="emoji",
        data=CaptionedDataConfig(path=str(data)),
        output=str(folder / "run"),
        lora=LoRAConfig(rank=4),
        batch_size=2,
        steps=_STEPS.stop + 4,
    )
    walk = Walk()
    walk.between("_Run.advance", _STEPS)
    with walk.everywhere():
        train(text_to_image(config), config)
    walk.changes //= len(_STEPS)
    walk.changes_of_defs //= len(_STEPS)
    return {"a batch of training": walk}


def lora(folder: Path) -> dict[str, Walk]:
    """A LoRA's file to an adapter, and then a second call with it."""
    pipe = diffusax.DiffusionPipeline.from_pretrained("emoji")
    pipe.set_progress_bar_config(disable=True)
    load = Walk().of(lambda: pipe.load_lora_weights("emoji-owl", adapter_name="owl"))
    pipe(**CALL)
    return {"a LoRA's file to an adapter": load, "a call with it": Walk().of(lambda: pipe(**CALL))}


def request() -> dict[str, Walk]:
    """The second request of A1111's txt2img to a server."""
    from support.running_server import running

    walk = Walk()
    with walk.everywhere(), running() as server:
        body = {"prompt": "a cat", "steps": CALL["num_inference_steps"], "seed": 1}
        for walk.is_on in (False, True):
            assert server.post("/sdapi/v1/txt2img", body).status == 200
        walk.is_on = False
    return {"a request to the server, the second": walk}


if __name__ == "__main__":
    main()
