"""Damages encoded weights at random and draws with them; run in a process of its own.

    python damaged_encodings.py FOLDER SCRATCH FIRST LAST

FOLDER has a pipeline, and in FOLDER/files single files of its transformer. It prints a JSON line
for each seed: what was done, what came of it, how long it took.
"""

import json
import random
import shutil
import sys
import time
from pathlib import Path

import torch
from damage import FLOATS, NUMBERS, change_header, cut, peak_kibibytes, places, value
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import diffusax
from diffusax.checkpoints.single_file import kind_of_file

ENDS = (
    *("weight_scale", "scale_weight", "weight_scale_2", "pre_quant_scale", "SCB", "absmax"),
    *("quant_map", "nested_absmax", "nested_quant_map", "comfy_quant", "nf4", "fp4"),
)
"""The ends of the names of what belongs to encodings."""
DTYPES = (torch.float32, torch.float16, torch.uint8, torch.int64, torch.float8_e4m3fn, torch.bool)


def change_companion(rng: random.Random, file: Path) -> str:
    """Removes, renames, retypes or reshapes a scale or a table, or makes its numbers others."""
    tensors = load_file(file)
    found = sorted(name for name in tensors if name.endswith(ENDS))
    name = rng.choice(found or sorted(tensors))
    tensor = tensors[name]
    what = rng.choice(["remove", "rename", "retype", "reshape", "numbers", "weight", "twice"])
    match what:
        case "remove":
            del tensors[name]
        case "rename":
            tensors[rng.choice([name + ".x", "x", name[1:]])] = tensors.pop(name)
        case "retype":
            tensors[name] = tensor.float().to(rng.choice(DTYPES))
        case "reshape":
            shapes = [tensor[None], tensor.reshape(-1), tensor.reshape(-1)[:1]]
            tensors[name] = rng.choice([*shapes, tensor[..., :0]] if tensor.ndim else shapes)
        case "numbers":
            tensors[name] = torch.full_like(tensor.double(), rng.choice(FLOATS)).to(tensor.dtype)
        case "weight":
            weight = next(k for k in sorted(tensors) if k.endswith(".weight"))
            own = tensors[weight]
            tensors[weight] = rng.choice([own[:1].clone(), own.float(), own[None], own.view(-1)])
        case _:
            tensors[rng.choice([name.replace("weight_scale", "scale_weight"), name[2:]])] = tensor
    rewrite(file, tensors)
    return f"{what} {name}"


def change_json(rng: random.Random, file: Path) -> str:
    """Changes what a file says of its encoding."""
    tensors = load_file(file)
    found = sorted(name for name in tensors if name.endswith(("comfy_quant", "nf4", "fp4")))
    if not found:
        told = rng.choice(["{", json.dumps(value(rng)), json.dumps({"layers": value(rng)})])
        save_file(tensors, file, {"_quantization_metadata": told.replace("\ud800", "")})
        return f"header: {told:.80}"
    name = rng.choice(found)
    told = json.loads(bytes(tensors[name].numpy()))
    container, key = rng.choice(places(told))
    formats = ["nvfp4", "mxfp8", "int8_tensorwise", "convrot_w4a4", "float8_e5m2"]
    container[key] = rng.choice([value(rng), rng.choice(NUMBERS), rng.choice(formats)])
    text = rng.choice([json.dumps(told), json.dumps(told), '{"a":' * 10**4, "", "[]", "\0" * 9])
    tensors[name] = torch.tensor(list(text.encode("utf-8", "replace")), dtype=torch.uint8)
    rewrite(file, tensors)
    return f"{name}: {text:.80}"


def rewrite(file: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Writes changed tensors with the texts that the file had."""
    with safe_open(file, framework="pt") as opened:
        metadata = opened.metadata()
    save_file({k: x.clone().contiguous() for k, x in tensors.items()}, file, metadata)


def change_numbers(rng: random.Random, file: Path) -> str:
    """Puts other numbers into the header of a GGUF file: counts, lengths, types, places."""
    data = bytearray(file.read_bytes())
    size = rng.choice([1, 4, 8])
    number = rng.choice([0, 1, 2, 10, 20, 33, 255, 2**16, 2**31, 2**32 - 1, 2**40, 2**64 - 1])
    place = rng.randrange(4, min(len(data) - 8, rng.choice([64, 6000])))
    data[place : place + size] = (number % 256**size).to_bytes(size, "little")
    file.write_bytes(data)
    return f"{number} in {size} bytes at {place}"


def flip(rng: random.Random, file: Path) -> str:
    """Changes bytes anywhere, most of them in weights."""
    data = bytearray(file.read_bytes())
    for _ in range(rng.randint(1, 50)):
        data[rng.randrange(len(data))] = rng.randrange(256)
    file.write_bytes(data)
    return "bytes"


def header(rng: random.Random, file: Path) -> str:
    """Changes the header of a safetensors file."""
    return change_header(rng, file.parent)


def shorter(rng: random.Random, file: Path) -> str:
    """Makes the file shorter or longer."""
    return cut(rng, file.parent)


def main(folder: Path, scratch: Path, first: int, last: int) -> None:
    """Damages one file after the other."""
    pipe = diffusax.FluxPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    files = sorted((folder / "files").iterdir())
    for seed in range(first, last):
        rng = random.Random(seed)
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        file = Path(shutil.copy(files[seed % len(files)], scratch))
        gguf = file.suffix == ".gguf"
        ways = [change_companion] * 3 + [change_json] * 2 + [header, flip, shorter]
        way = rng.choice([change_numbers] * 4 + [flip, shorter] if gguf else ways)
        done, began = way(rng, file), time.perf_counter()
        report = {"seed": seed, "file": file.name, "done": done}
        try:
            kind = diffusax.FluxTransformer2DModel
            pipe.transformer = kind.from_single_file(file, config=folder, dtype="float32")
            size = {"height": 24, "width": 40, "max_sequence_length": 32}
            pipe("a", num_inference_steps=1, seed=0, output_type="np", **size)
            report["result"] = "drawn"
        except ValueError as error:
            report |= {"result": "ValueError", "message": str(error)}
        except BaseException as error:
            report |= {"result": type(error).__name__, "message": str(error)[:500]}
        try:
            kind_of_file(file)
        except ValueError as error:
            report["kind"] = str(error)
        report["seconds"] = time.perf_counter() - began
        report["kibibytes"] = peak_kibibytes()
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
