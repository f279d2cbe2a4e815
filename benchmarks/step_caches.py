"""Caches of steps: the operations that they save, and how far latents are from those without.

The embedded model by DeepCache, and tiny transformers with random weights by First Block Cache and
TaylorSeer, which is about the methods and not about pictures. Each is compared with fewer steps of
the whole network.

    python benchmarks/step_caches.py
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
from machine import describe

import diffusax
from diffusax import DeepCacheConfig, FirstBlockCacheConfig, TaylorSeerCacheConfig
from diffusax.pipelines.run import programs
from diffusax.runtime.programs.flops import count_flops

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support import tiny_transformers
from support.step_caches import computed_rows

SUBJECTS = ("a red apple", "an owl", "a house", "a sailboat", "a cat", "a guitar", "a tree", "fire")
DEEP = [DeepCacheConfig(n, branch) for branch in (0, 2) for n in (2, 3, 5)]
TRANSFORMER = [
    *map(FirstBlockCacheConfig, (0.4, 0.5, 0.6, 0.7)),
    *(TaylorSeerCacheConfig(n, use_lite_mode=True) for n in (2, 3, 5)),
    TaylorSeerCacheConfig(5, max_order=2, use_lite_mode=True),
    TaylorSeerCacheConfig(5),
]
TINY: dict[str, Callable[[Path], Any]] = {
    "FLUX.1, tiny and random": tiny_transformers.flux_pipeline,
    "Qwen-Image, tiny and random": tiny_transformers.qwen_image_pipeline,
}


def pipelines(folder: Path) -> Iterator[tuple[str, Any, list[Any], dict[str, Any]]]:
    """Yields the name, the pipeline, the caches to try and the arguments of a call."""
    pipe = diffusax.DiffusionPipeline.from_pretrained("emoji")
    yield "emoji", pipe, DEEP, {"prompt": list(SUBJECTS), "guidance_scale": 2.0}
    for name, build in TINY.items():
        build(folder / name)
        pipe = diffusax.DiffusionPipeline.from_pretrained(folder / name)
        yield name, pipe, TRANSFORMER, {"prompt": SUBJECTS[0], "height": 64, "width": 64}


def operations(pipe: Any, call: dict[str, Any]) -> tuple[int, int]:
    """Returns the operations of an evaluation of the network, and of one that the cache spares."""
    plan = pipe.prepare_inputs(**call).plan
    state = programs.first_state(plan.latents)
    model = programs._row_model(pipe.parts.denoiser, pipe.parts.denoiser_params, state, plan)
    first = state[0], plan.table.timestep[0], 0
    memory = jax.eval_shape(model, *first, None)[1]
    whole = count_flops(lambda x: model(x, *first[1:], None)[0], first[0])
    if memory is None:
        return whole, whole
    with mock.patch.object(jax.lax, "cond", lambda wanted, compute, leave_out: leave_out()):
        spared = count_flops(lambda kept, x: model(x, *first[1:], kept)[0], memory, first[0])
    return whole, spared


def measure(pipe: Any, call: dict[str, Any], config: Any) -> tuple[np.ndarray, float]:
    """Returns the latents of a call with a cache, and the operations, in whole evaluations."""
    network = pipe.parts.models[pipe.parts.denoiser.components[0]]
    network.enable_cache(config)
    try:
        latents = np.asarray(pipe(**call, output_type="latent").images)
        computed = computed_rows(pipe, **call, output_type="latent").any(1)
        whole, spared = operations(pipe, call)
    finally:
        network.disable_cache()
    return latents, computed.sum() + (~computed).sum() * spared / whole


def report(name: str, pipe: Any, configs: list[Any], call: dict[str, Any], steps: int) -> None:
    """Prints a row for each cache, and for fewer steps."""
    call = {**call, "seed": 0, "num_inference_steps": steps}
    reference = np.asarray(pipe(**call, output_type="latent").images)

    def row(what: str, latents: np.ndarray, used: float) -> None:
        error = np.linalg.norm(latents - reference) / np.linalg.norm(reference)
        print(f"| {name} | {steps} | {what} | {1 - used / steps:.0%} | {error:.3f} |", flush=True)

    for fewer in (steps * 2 // 3, steps // 2, steps // 3, steps // 5):
        own = {**call, "num_inference_steps": fewer, "output_type": "latent"}
        row(f"{fewer} steps", np.asarray(pipe(**own).images), fewer)
    for config in configs:
        first, default = next(iter(vars(config))), type(config)()
        options = {k: v for k, v in vars(config).items() if k == first or v != getattr(default, k)}
        given = ", ".join(f"{k}={v}" for k, v in options.items())
        row(
            f"{type(config).__name__.removesuffix('Config')}({given})", *measure(pipe, call, config)
        )


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, nargs="+", default=[50])
    parser.add_argument("--models", nargs="+", help="those whose names begin so")
    args = parser.parse_args()
    print(describe())
    print("| model | steps | instead | operations saved | relative error of latents |")
    print("|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for name, pipe, configs, call in pipelines(Path(folder)):
            if args.models and not name.startswith(tuple(args.models)):
                continue
            pipe.set_progress_bar_config(disable=True)
            for steps in args.steps:
                report(name, pipe, configs, call, steps)


if __name__ == "__main__":
    main()
