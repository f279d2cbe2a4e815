"""Streams a pipeline's parameters on the second of four devices, and on meshes of them.

python stream_run.py CHECKPOINT OUT.json
"""

import gc
import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

import diffusax
from support.many_devices import split_small_arrays

CALL = {"num_inference_steps": 2, "output_type": "np", "seed": 3, "height": 32, "width": 32}


def kept(device: jax.Device, kind: str) -> int:
    """The bytes that live in a memory of a device."""
    gc.collect()
    arrays = (x for x in jax.live_arrays() if device in x.devices())
    return sum(x.nbytes for x in arrays if x.sharding.memory_kind == kind)


def differences(pipe: Any) -> list[float]:
    """The largest differences of pictures with blocks and with all parameters streamed."""
    pipe.set_progress_bar_config(disable=True)
    prompts = ["a cat", "a dog"]
    expected = pipe(prompts, **CALL).images
    pipe.enable_group_offload("cuda", num_blocks_per_group=1)
    images = [pipe(prompts, **CALL).images]
    pipe.remove_all_hooks()
    pipe.enable_sequential_cpu_offload()
    images.append(pipe(prompts, **CALL).images)
    return [float(np.abs(own - expected).max()) for own in images]


def main(folder: str, out: str) -> None:
    device = jax.devices()[1]
    pipe = diffusax.FluxPipeline.from_pretrained(folder, device=device)
    held = kept(device, "device")
    found: dict[str, Any] = {"device": differences(pipe)}
    found["on the device"] = kept(device, "device") / held
    with split_small_arrays():
        for mesh in ("fsdp=2,tensor=2", "data=2,context=2"):
            found[mesh] = differences(diffusax.FluxPipeline.from_pretrained(folder, mesh=mesh))
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
