"""Damages checkpoints at random and loads them; run in a process of its own, which may die.

    python damage.py FOLDER SCRATCH FIRST LAST

prints a JSON line for each seed: what was done, what loading said, how long it took.

    python damage.py FOLDER SCRATCH

puts each of VALUES in the place of each value in the checkpoint's JSON files, one at a time, and
traces a call of what can be loaded.
"""

import copy
import json
import os
import random
import resource
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

NUMBERS = [0, 1, -1, 2, 3, 7, 77, 2**31, 2**32, 2**63, 2**64, 10**30, -(2**63), 10**9]
FLOATS = [0.5, -0.5, 1e-320, 1e308, -1e308, float("nan"), float("inf"), float("-inf")]
STRINGS = ["", "x", "silu", "../..", "/dev/zero", "a\0b", "\ud800", "\u2028", "x" * 500, "None"]
VALUES = [0, -1, 1, 0.5, 10**9, None, True, "x", [], [0], {}]
LIBRARIES = [["diffusers", "X"], ["diffusers"], [None, None], ["a", 1], ["diffusers", ["X"]]]
DTYPES = [np.int8, np.int16, np.uint8, np.int64, np.bool_, np.float64, np.float16]


def value(rng: random.Random, depth: int = 0) -> Any:
    """Any JSON value."""
    kind = rng.randrange(8 if depth < 3 else 5)
    if kind == 6:
        return [value(rng, depth + 1) for _ in range(rng.randrange(4))]
    if kind == 7:
        return {rng.choice(STRINGS): value(rng, depth + 1) for _ in range(rng.randrange(3))}
    if kind == 5:
        return copy.deepcopy(rng.choice(LIBRARIES))
    return rng.choice([[None, True, False], NUMBERS, FLOATS, STRINGS, range(-5, 100)][kind])


def places(data: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) in a JSON value."""
    items = data.items() if isinstance(data, dict) else enumerate(data)
    return [
        place
        for key, item in items
        for place in [(data, key), *(places(item) if isinstance(item, dict | list) else ())]
    ]


def edit_json(rng: random.Random, folder: Path) -> str:
    """Replaces, adds or removes one to three values of a JSON file."""
    file = rng.choice(sorted(folder.rglob("*.json")))
    data = json.loads(file.read_text("utf-8"))
    done = []
    for _ in range(rng.randint(1, 3)):
        if not (found := places(data)):
            break
        container, key = rng.choice(found)
        match rng.choice(["replace", "replace", "remove", "add"]):
            case "remove":
                del container[key]
                done.append(f"without {key!r:.40}")
            case "add" if isinstance(container, dict):
                container[rng.choice([*STRINGS, "dtype", "quantization_config"])] = value(rng)
                done.append("one added")
            case _:
                container[key] = value(rng)
                done.append(f"{key!r:.40} = {container[key]!r:.60}")
    file.write_text(json.dumps(data))
    return f"{file.relative_to(folder)}: {', '.join(done)}"


def replace_json(rng: random.Random, folder: Path) -> str:
    """Gives a JSON file other contents altogether."""
    file = rng.choice(sorted(folder.rglob("*.json")))
    depth = 10 ** rng.randint(2, 5)
    content = rng.choice(
        [json.dumps(value(rng)), '{"a":' * depth, "[" * depth, "1" * depth, '"', "{}", "\ufeff{}"]
    )
    file.write_text(content)
    return f"{file.relative_to(folder)} = {content:.60}"


def flip(rng: random.Random, folder: Path) -> str:
    """Changes a few bytes of a file of text, or of the beginning of any file."""
    file = rng.choice(sorted(p for p in folder.rglob("*") if p.is_file()))
    data = bytearray(file.read_bytes())
    end = min(len(data), 4000) if file.suffix == ".safetensors" else len(data)
    for _ in range(rng.randint(1, 5)):
        data[rng.randrange(end)] = rng.randrange(256)
    file.write_bytes(data)
    return f"bytes of {file.relative_to(folder)}"


def cut(rng: random.Random, folder: Path) -> str:
    """Cuts off the end of a file, or appends to it."""
    file = rng.choice(sorted(p for p in folder.rglob("*") if p.is_file()))
    size = file.stat().st_size
    wanted = rng.choice([0, 1, 7, 8, 9, size // 2, size - 1, size + 1, rng.randrange(size), 2**38])
    os.truncate(file, wanted)
    return f"{file.relative_to(folder)}: {wanted} of {size} bytes"


def remove(rng: random.Random, folder: Path) -> str:
    """Removes a file or a folder, or puts something else there."""
    path = rng.choice(sorted(folder.rglob("*")))
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    what = rng.choice(["nothing", "nothing", "a folder", "an empty file", "a circle", "a pipe"])
    match what:
        case "a folder":
            path.mkdir()
        case "an empty file":
            path.touch()
        case "a circle":
            path.symlink_to(path.name)
        case "a pipe":
            os.mkfifo(path)
    return f"{path.relative_to(folder)} is {what}"


def swap(rng: random.Random, folder: Path) -> str:
    """Exchanges two files."""
    a, b = rng.sample(sorted(p for p in folder.rglob("*") if p.is_file()), 2)
    first, second = a.read_bytes(), b.read_bytes()
    a.write_bytes(second)
    b.write_bytes(first)
    return f"{a.relative_to(folder)} and {b.relative_to(folder)} exchanged"


def edit_tensors(rng: random.Random, folder: Path) -> str:
    """Renames, removes, adds, retypes or reshapes tensors."""
    file = rng.choice(sorted(folder.rglob("*.safetensors")))
    tensors = load_file(file)
    done = []
    for _ in range(rng.randint(1, 3)):
        name = rng.choice(sorted(tensors))
        tensor = tensors[name]
        what = rng.choice(["rename", "remove", "add", "retype", "reshape", "scale"])
        done.append(f"{what} {name}")
        match what:
            case "rename":
                tensors[rng.choice([name + ".x", "x", "", name[1:]])] = tensors.pop(name)
            case "remove":
                del tensors[name]
            case "add":
                tensors[rng.choice(STRINGS[:4])] = tensor
            case "retype":
                tensors[name] = tensor.astype(rng.choice(DTYPES))
            case "reshape":
                other = [
                    tensor[..., None],
                    tensor[:0],
                    tensor.reshape(-1),
                    tensor[None],
                    tensor[:1],
                ]
                tensors[name] = rng.choice(other)
            case _:
                tensors[name] = tensor * np.float32(rng.choice(FLOATS))
    contiguous = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    save_file(contiguous, file)
    return f"{file.relative_to(folder)}: {', '.join(done)}"


def change_header(rng: random.Random, folder: Path) -> str:
    """Changes what a safetensors file says of its tensors, or how long it says that is."""
    file = rng.choice(sorted(folder.rglob("*.safetensors")))
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    if rng.random() < 0.3:
        length = rng.choice([0, 1, length - 1, length + 1, 2**31, 2**63, 2**64 - 1])
        file.write_bytes(length.to_bytes(8, "little") + data[8:])
        return f"{file.relative_to(folder)}: header of {length} bytes"
    header = json.loads(data[8 : 8 + length])
    container, key = rng.choice(places(header))
    container[key] = value(rng)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    return f"{file.relative_to(folder)}: {key!r:.60} = {container[key]!r:.60}"


def replace_value(rng: random.Random, folder: Path) -> str:
    """Puts one of VALUES in the place of a value."""
    name, place, value = rng.choice(list(replacements(folder)))
    put(folder / name, place, value)
    return f"{name}: {place} = {value!r}"


def replacements(folder: Path) -> Iterator[tuple[str, tuple[Any, ...], Any]]:
    """Yields each JSON file, each place in it, and each of VALUES to put there."""
    for file in sorted(folder.rglob("*.json")):
        # A vocabulary's values are of one kind.
        if file.name in ("vocab.json", "tokenizer.json"):
            continue
        for place in paths(json.loads(file.read_text("utf-8"))):
            for value in VALUES:
                yield str(file.relative_to(folder)), place, value


def paths(data: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the keys that lead to each value in a JSON value; of long lists only the list."""
    items = data.items() if isinstance(data, dict) else enumerate(data)
    for key, item in items:
        yield (*before, key)
        if isinstance(item, dict | list) and len(item) < 9:
            yield from paths(item, (*before, key))


def put(file: Path, place: tuple[Any, ...], value: Any) -> None:
    """Puts a value into a JSON file."""
    data = json.loads(file.read_text("utf-8"))
    container = data
    for key in place[:-1]:
        container = container[key]
    container[place[-1]] = value
    file.write_text(json.dumps(data))


DAMAGES: list[Callable[[random.Random, Path], str]] = [
    *(edit_json, edit_json, replace_value, replace_value, replace_json),
    *(flip, cut, remove, swap, edit_tensors, edit_tensors, change_header),
]


def peak_kibibytes() -> int:
    """The most memory that this process has had; `getrusage` counts what its parent had, too."""
    status = Path("/proc/self/status")
    if status.exists():
        return int(status.read_text().split("VmHWM:")[1].split()[0])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


class Traced(BaseException):
    """A call came to the compilation of its loop."""


def every_value(source: str, scratch: str) -> None:
    """Prints a JSON line for each of `replacements` that is neither loaded nor a sentence."""
    from jax._src import compiler

    import diffusax

    compiled = compiler.compile_or_get_cached

    def compile_some(backend: Any, computation: Any, *args: Any, **kwargs: Any) -> Any:
        if "denoise" in str(computation.operation.attributes["sym_name"]):
            raise Traced
        return compiled(backend, computation, *args, **kwargs)

    compiler.compile_or_get_cached = compile_some
    folder = Path(scratch) / "damaged"
    shutil.copytree(source, folder)
    count = 0
    for name, place, value in list(replacements(folder)):
        text = (folder / name).read_text("utf-8")
        put(folder / name, place, value)
        count += 1
        try:
            pipe = diffusax.DiffusionPipeline.from_pretrained(folder)
            pipe.set_progress_bar_config(disable=True)
            pipe("a cat", num_inference_steps=2)
        except Traced:
            pass
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            own = "/diffusax/" in frame.filename and "raise" in (frame.line or "")
            if not (own and isinstance(error, ValueError)) or "\n" in str(error):
                line = {"file": name, "place": place, "value": value, "error": repr(error)}
                print(json.dumps({**line, "at": f"{frame.filename}:{frame.lineno}"}), flush=True)
        (folder / name).write_text(text)
    print(json.dumps({"count": count}))


def main(source: str, scratch: str, first: str, last: str) -> None:
    """Damages copies of `source` with the seeds from `first` to before `last`."""
    import diffusax

    folder = Path(scratch) / "damaged"
    diffusax.DiffusionPipeline.from_pretrained(source)
    for seed in range(int(first), int(last)):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(source, folder)
        rng = random.Random(seed)
        damage = rng.choice(DAMAGES)(rng, folder)
        line: dict[str, Any] = {"seed": seed, "damage": damage}
        print(json.dumps(line), flush=True)
        begin = time.perf_counter()
        try:
            diffusax.DiffusionPipeline.from_pretrained(folder)
            line["result"] = "loaded"
        except ValueError as error:
            line["result"] = "ValueError"
            line["message"] = str(error)
        except BaseException as error:
            line["result"] = type(error).__name__
            line["message"] = repr(error)
        line["seconds"] = time.perf_counter() - begin
        line["kibibytes"] = peak_kibibytes()
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:]) if len(sys.argv) > 3 else every_value(*sys.argv[1:])
