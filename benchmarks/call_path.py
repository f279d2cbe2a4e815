"""Through how many files and functions a text-to-image call passes, here and in diffusers.

Counted are a second call on a tiny checkpoint, and the first one, in which diffusax's networks and
programs are traced: what somebody would have to read who followed it. Functions are counted once
each, however often they are called; what XLA and PyTorch do is in other packages and not counted.
    python benchmarks/call_path.py --list
"""

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import diffusers

import diffusax

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from tiny import build_checkpoint

CALL = {"prompt": "a cat", "num_inference_steps": 4, "output_type": "pil"}


def main() -> None:
    """Prints the two counts side by side and, if asked for, what was counted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true", help="name the functions of each file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        theirs = build_checkpoint(Path(folder) / "tiny", "sd", "a")
        ours = diffusax.DiffusionPipeline.from_pretrained(Path(folder) / "tiny")
    ours.set_progress_bar_config(disable=True)
    calls = {"diffusax": (ours, diffusax), "diffusers": (theirs, diffusers)}
    print("              " + "".join(f"{name:>12}" for name in calls))
    for which in ("first call", "second call"):
        paths = {name: passed(lambda p=p: p(**CALL), m) for name, (p, m) in calls.items()}
        print(which)
        print("  files       " + "".join(f"{len(files):12}" for files in paths.values()))
        print("  functions   " + "".join(f"{count(files):12}" for files in paths.values()))
    if args.list:
        for name, files in paths.items():
            print(f"\n{name}, second call")
            for file, functions in files.items():
                print(f"  {file} ({len(functions)}): {', '.join(functions)}")


def count(files: dict[str, list[str]]) -> int:
    """The number of functions of all files."""
    return sum(map(len, files.values()))


def passed(call: Callable[[], Any], package: ModuleType) -> dict[str, list[str]]:
    """The functions of a package that a call passes through, by file, in order.

    Lambdas and comprehensions belong to the functions that they stand in.
    """
    root = str(Path(package.__file__ or "").parent)
    files: dict[str, list[str]] = {}

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(root) or code.co_name[0] == "<":
            return
        functions = files.setdefault(str(Path(code.co_filename).relative_to(root)), [])
        if code.co_qualname not in functions:
            functions.append(code.co_qualname)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return files


if __name__ == "__main__":
    main()
