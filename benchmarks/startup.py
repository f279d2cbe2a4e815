"""From the start of a process to its first picture, with the model inside the package.

    python benchmarks/startup.py [--runs 5] [--full-size]

Cold (an empty compilation cache), warm (a full one), and with saved executables; each is a process
of its own that runs `diffusax generate`. Then the same call in Python, warm: how much of it the
imports, from_pretrained and the call take, and what of these tracing, lowering and loading of
programs take. Beside it `import jax; jax.numpy.zeros(1)` alone. --full-size: seconds to compile the
UNet of SD 2, cold and from the cache.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from machine import describe

FULL_SIZE = """
import sys, time
sys.path.insert(0, {benchmarks!r})
import full_size, jax
from diffusax.models import UNet2DConditionModel
from diffusax.models.network import Network
from diffusax.runtime.programs.cache import enable_compilation_cache
enable_compilation_cache({cache!r})
network = Network(UNet2DConditionModel, UNet2DConditionModel.config_class(**full_size.SD2))
at = jax.ShapeDtypeStruct
args = at((2, 64, 64, 4), "float32"), at((2,), "float32"), at((2, 77, 1024), "float32")
lowered = jax.jit(network.apply).lower(network.shapes, *args)
began = time.perf_counter()
lowered.compile()
print(time.perf_counter() - began)
"""


JAX_ALONE = "import jax; jax.numpy.zeros(1)"
PARTS = """
import collections, json, time
began = time.perf_counter()
def passed():
    global began
    before, began = began, time.perf_counter()
    return began - before
import jax
jax.numpy.zeros(1)
found = {"jax alone": passed()}
events = collections.Counter()
jax.monitoring.register_event_duration_secs_listener(
    lambda event, seconds, **_: events.update({event.split("/")[-1]: seconds})
)
import diffusax
diffusax.DiffusionPipeline
found["imports"] = passed()
pipe = diffusax.DiffusionPipeline.from_pretrained("emoji")
found["from_pretrained"] = passed()
pipe.set_progress_bar_config(disable=True)
pipe("a red apple", seed=1)
found["first call"] = passed()
pipe("a red apple", seed=1)
found["second call"] = passed()
found["tracing"] = events["jaxpr_trace_duration"]
found["lowering"] = events["jaxpr_to_mlir_module_duration"]
found["compiling, or loading"] = events["backend_compile_duration"]
print(json.dumps(found))
"""


def seconds(command: list[str], **variables: str) -> float:
    """How long a command takes, as a process of its own."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
    began = time.perf_counter()
    done = subprocess.run(command, env={**environment, **variables}, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return time.perf_counter() - began


def measured_parts(**variables: str) -> dict[str, float]:
    """The seconds of the parts of a process that generates an image."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
    command, environment = [sys.executable, "-c", PARTS], {**environment, **variables}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--full-size", action="store_true")
    options = parser.parse_args()
    print(describe())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [sys.executable, "-m", "diffusax"]
        picture = [*command, "generate", "a red apple", "--seed", "1", "--output", f"{name}/o.png"]
        saved = [*picture, "--compiled", f"{name}/compiled"]
        cache = {"DIFFUSAX_COMPILATION_CACHE": f"{name}/cache"}
        seconds([*command, "compile", "emoji", "--output", f"{name}/compiled"], **cache)
        seconds(picture, **cache)
        cases = {
            "cold": lambda i: seconds(picture, DIFFUSAX_COMPILATION_CACHE=str(folder / f"cold{i}")),
            "warm": lambda i: seconds(picture, **cache),
            "saved executables": lambda i: seconds(saved, **cache),
            "jax alone": lambda i: seconds([sys.executable, "-c", JAX_ALONE]),
        }
        for case, run in cases.items():
            times = [run(i) for i in range(options.runs)]
            print(f"{case:20} median {statistics.median(times):6.2f} s  least {min(times):6.2f} s")
        parts = [measured_parts(**cache) for _ in range(options.runs)]
        for name in parts[0]:
            times = [found[name] for found in parts]
            print(
                f"  {name:24} median {statistics.median(times):6.2f} s  least {min(times):6.2f} s"
            )
        if options.full_size:
            code = FULL_SIZE.format(benchmarks=str(Path(__file__).parent), cache=f"{name}/full")
            for case in ("cold", "from the cache"):
                done = subprocess.run(
                    [sys.executable, "-c", code], capture_output=True, text=True, check=True
                )
                print(f"SD 2's UNet, {case:15} {float(done.stdout):6.1f} s to compile")


if __name__ == "__main__":
    main()
