"""Runs the small calls in PyTorch.

python -m support.torch_families.check [NAME ...], in tests/
"""

import sys
import time
import warnings
from typing import Any

import numpy as np
import torch

from . import REGISTRY
from .pictures import picture
from .registry import Family


def reworded(prompt: Any) -> Any:
    """Another prompt of the same form."""
    if isinstance(prompt, list):
        return [reworded(part) for part in prompt]
    if not isinstance(prompt, str):
        return prompt
    return prompt.replace("apple", "HOUSE") if "apple" in prompt else prompt + ", at night"


def run(family: Family, seed: int = 0, **changes: Any) -> Any:
    """The output of the small call, with some `changes`, of a new pipeline."""
    pipe, inputs = family()
    with torch.no_grad():
        return pipe(**inputs | changes, generator=torch.Generator("cpu").manual_seed(seed))


def effects(family: Family, made: list[np.ndarray]) -> str:
    """How much another prompt and other pictures change the first array."""
    changed: dict[str, Any] = {}
    for name, value in family.arguments().items():
        if "prompt" in name and "negative" not in name and isinstance(value, str | list):
            changed[name] = reworded(value)
        if hasattr(value, "convert") and "mask" not in name:
            changed[name] = picture(9, value.width).convert(value.mode)
    notes = []
    for name in changed:
        other = arrays(run(family, **{name: changed[name]}))[0]
        same_shape = other.shape == made[0].shape
        difference = np.abs(other - made[0]).max() if same_shape else np.inf
        notes.append(f", {name} {difference:.4f}" + (" IGNORED" if difference < 1e-4 else ""))
    return "".join(sorted(notes))


def arrays(output: Any) -> list[np.ndarray]:
    """All pictures, frames, sounds and embeddings of an output, as float32."""
    if hasattr(output, "to_tuple"):
        output = output.to_tuple()
    if torch.is_tensor(output):
        return [output.float().numpy()]
    if isinstance(output, np.ndarray):
        return [np.asarray(output, np.float32)]
    if isinstance(output, list | tuple):
        return [array for part in output for array in arrays(part)]
    if hasattr(output, "convert"):
        return [np.asarray(output, np.float32)]
    return []


def problem(made: list[np.ndarray]) -> str:
    """What is wrong with the arrays, or nothing."""
    if not made:
        return "no arrays"
    if not all(np.isfinite(a).all() for a in made):
        return "not finite"
    return "constant" if np.ptp(made[0]) < 1e-3 else ""


def describe(made: list[np.ndarray]) -> str:
    """Shapes, and how much of the first array is at its ends, as in pictures that are clipped."""
    first = made[0]
    ends = np.mean((first == first.min()) | (first == first.max()))
    return " ".join(str(a.shape) for a in made[:3]) + f", std {first.std():.3f}, ends {ends:.2f}"


def check(name: str) -> bool:
    """Runs one small call and prints its seconds and shapes, or what went wrong."""
    start = time.perf_counter()
    try:
        made = arrays(run(REGISTRY[name]))
        result = problem(made) or describe(made) + effects(REGISTRY[name], made)
        good = not problem(made)
    except Exception as error:
        result, good = f"{type(error).__name__}: {error}"[:300], False
    seconds = time.perf_counter() - start
    print(f"{'ok  ' if good else 'FAIL'} {name:52} {seconds:6.2f} s  {result}", flush=True)
    return good


def main(names: list[str]) -> int:
    """Runs those calls, or all."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    failed = [name for name in names or sorted(REGISTRY) if not check(name)]
    print(f"{len(names or REGISTRY) - len(failed)} run, {len(failed)} fail")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
