"""Which PyTorch pipelines of the installed diffusers run through `diffusax.torch.compile`.

Each class is built with tiny random networks (tests/support/torch_families) and draws a few steps
in PyTorch and in JAX. Results are kept in a file, so that a run that was stopped goes on.
    python benchmarks/torch_pipelines.py                      # all that are not in the file yet
    python benchmarks/torch_pipelines.py FluxPipeline ...     # these
    python benchmarks/torch_pipelines.py --page docs/reference/torch_pipelines.md
"""

import argparse
import json
import os
import re
import sys
import time
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import diffusers
import numpy as np
import torch
import transformers
from support.torch_families import REGISTRY, WITHOUT_ENTRY
from support.torch_families.check import arrays

import diffusax.torch

TOLERANCE = 1e-3
INTRODUCTION = """\
# PyTorch pipelines in JAX

What becomes of every pipeline class of diffusers {version} with `diffusax.torch.compile(pipe)`.
Each was built with tiny random networks and drew two steps on a CPU, in PyTorch and in JAX; the
difference is the largest of any number of the result, pictures being in [0, 1]. Where it is more
than 0.001, PyTorch is asked how far its own result moves when each weight is changed by half a
rounding: what works "within rounding" is at most twice as far away.
`python benchmarks/torch_pipelines.py` measures, and writes this page.

| Class | Makes | | Largest difference |
|---|---|---|---|
"""


def draw(pipe: Any, inputs: dict[str, Any]) -> np.ndarray:
    """The first array of the pipeline's result."""
    torch.manual_seed(0)
    with torch.no_grad():
        return arrays(pipe(**inputs, generator=torch.Generator("cpu").manual_seed(0)))[0]


def measure(name: str) -> dict[str, Any]:
    """What becomes of a class."""
    try:
        expected = draw(*REGISTRY[name]())
    except Exception as error:
        return {"outcome": "fails in PyTorch", "why": reason(error)}
    try:
        # One that has never run in PyTorch: what modules do in their first call is traced, too.
        found, outcome, why = compiled(*REGISTRY[name]())
    except Exception as error:
        return {"outcome": "fails", "why": reason(error)}
    scale = max(1.0, float(np.abs(expected).max()))
    difference = float(np.abs(found - expected).max()) / scale
    if not difference <= TOLERANCE:
        moved = max(rounding(name, expected, seed) for seed in range(3)) / scale
        within = difference <= 2 * moved
        outcome = f"{outcome} within rounding ({moved:.0e})" if within else "differs"
    return {"outcome": outcome, "why": why, "difference": difference}


def compiled(pipe: Any, inputs: dict[str, Any]) -> tuple[np.ndarray, str, str]:
    """The result in JAX, how it was come by, and why not simply."""
    try:
        diffusax.torch.compile(pipe)
        return draw(pipe, inputs), "works", ""
    except diffusax.torch.NotTraceable as error:
        diffusax.torch.compile(pipe, on_error="eager")
        return draw(pipe, inputs), "works with on_error='eager'", reason(error)


def rounding(name: str, expected: np.ndarray, seed: int) -> float:
    """How far PyTorch's result moves when weights are changed by half a rounding, up or down."""
    pipe, inputs = REGISTRY[name]()
    random = torch.Generator().manual_seed(seed)
    modules = [x for x in pipe.components.values() if isinstance(x, torch.nn.Module)]
    for weight in (p for module in modules for p in module.parameters()):
        if weight.is_floating_point():
            half = torch.finfo(weight.dtype).eps / 2
            change = 1 + half * torch.randn(weight.shape, generator=random).sign()
            weight.data = (weight.data.double() * change).to(weight.dtype)
    return float(np.abs(draw(pipe, inputs) - expected).max())


def reason(error: BaseException) -> str:
    """An error in one line."""
    said = " ".join(str(error).split()).split(". Leave it out")[0]
    return f"{type(error).__name__}: {said}"[:300]


def page(results: dict[str, dict[str, Any]]) -> str:
    """The table of all classes."""
    lines = [INTRODUCTION.format(version=version("diffusers"))]
    for name in sorted({*REGISTRY, *WITHOUT_ENTRY}):
        if name in WITHOUT_ENTRY and name not in REGISTRY:
            lines.append(f"| {name} | | not tried: {WITHOUT_ENTRY[name]} | |\n")
            continue
        found = results.get(name, {"outcome": "not measured yet", "why": ""})
        said = re.sub(r"\. Leave it out?.*|^NotTraceable: ", "", found["why"])
        why = f": {said}".replace("|", "\\|") if said else ""
        shown = f"{found['difference']:.0e}" if "difference" in found else ""
        lines.append(f"| {name} | {REGISTRY[name].task} | {found['outcome']}{why} | {shown} |\n")
    return "".join(lines)


def main() -> None:
    """Measures what is asked for, or writes the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--results", type=Path, default=Path("out/torch_pipelines.jsonl"))
    parser.add_argument("--page", type=Path, help="write the table here, and measure nothing")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    diffusers.logging.set_verbosity_error()
    lines = args.results.read_text("utf-8").splitlines() if args.results.exists() else []
    results = {found.pop("name"): found for found in map(json.loads, lines)}
    if args.page:
        args.page.write_text(page(results), "utf-8")
        return
    args.results.parent.mkdir(parents=True, exist_ok=True)
    for name in args.names or [name for name in sorted(REGISTRY) if name not in results]:
        start = time.perf_counter()
        found = measure(name)
        with args.results.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"name": name, **found}) + "\n")
        print(f"{name}: {found} ({time.perf_counter() - start:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
