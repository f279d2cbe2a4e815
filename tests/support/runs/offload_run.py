"""Offloads a pipeline that computes on the second of two devices, and prints what was seen.

python offload_run.py CHECKPOINT OUT.json
"""

import gc
import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

import diffusax
from diffusax.models.adapters.low_rank import kernel_shapes
from diffusax.runtime.programs.compilations import count_compilations
from diffusax.runtime.programs.program import PROGRAMS
from support.adapted import random_adapter
from support.compiled_programs import forget_executables

CALL = {"num_inference_steps": 2, "output_type": "np", "seed": 3, "guidance_scale": 3.0}
OFFLOADED = ("text_encoder", "vae")


def quiet(pipe: Any) -> Any:
    pipe.set_progress_bar_config(disable=True)
    return pipe


def kept(device: jax.Device) -> int:
    """The bytes that live on a device."""
    gc.collect()
    return sum(x.nbytes for x in jax.live_arrays() if device in x.devices())


def size(pipe: Any, *names: str) -> int:
    return sum(x.nbytes for name in names for x in jax.tree.leaves(pipe.params[name]))


def add_adapter(pipe: Any) -> None:
    """Layers of the UNet and of the text encoder."""
    layers = {}
    for name, pattern in (("unet", "to_q"), ("text_encoder", "q_proj")):
        network = pipe.parts.networks[name]
        paths = [path for path in kernel_shapes(network) if pattern in path]
        layers |= random_adapter(network, name, 4, paths, 0).components
    pipe.add_adapter("style", layers)


def one_device(folder: str) -> dict[str, Any]:
    """A pipeline on the second device, before, while and after it is offloaded."""
    device = jax.devices()[1]
    pipe = quiet(diffusax.StableDiffusionPipeline.from_pretrained(folder, device=device))
    add_adapter(pipe)
    adapted = {**CALL, "adapters": {"style": 0.8}}
    expected = [pipe("a cat", **call).images for call in (CALL, adapted)]
    held = kept(device)
    pipe.enable_model_cpu_offload()
    found: dict[str, Any] = {"moved": held - kept(device), "size": size(pipe, *OFFLOADED)}
    found["memory"] = {
        k: sorted(v) for k, v in pipe.memory().items() if k in ("host", "parameters")
    }
    images = [pipe("a cat", **call).images for call in (CALL, adapted)]
    found["after a call"] = held - kept(device)
    with count_compilations() as compiled:
        images += [pipe("a cat", **call).images for call in (CALL, adapted)]
        other = quiet(diffusax.StableDiffusionImg2ImgPipeline.from_pipe(pipe))
        shared = [other.params[n] is pipe.params[n] for n in OFFLOADED]
    found |= {"compiled": compiled, "shared": shared}
    picture = np.random.default_rng(0).random((1, 64, 64, 3), np.float32)
    given = {**CALL, "image": picture, "strength": 1.0}
    from_host = other("a cat", **given).images
    found["after an image"] = held - kept(device)

    pipe.load_textual_inversion({"<cat>": np.ones((2, 32), np.float32)})
    word = pipe("a <cat>", **CALL).images
    new = diffusax.AutoencoderKL.from_pretrained(f"{folder}/vae", device=device)
    pipe.vae, was = new, pipe.vae
    found["assigned"] = isinstance(jax.tree.leaves(pipe.params["vae"])[0], np.ndarray)
    pipe.vae = was
    with diffusax.RunningBatch(pipe) as batch:
        running = batch.submit("a <cat>", **CALL).result().images
    found["running"] = float(np.abs(running - word).max())

    forget_executables()
    pipe.compile(guidance_scale=3.0)
    found["ahead"] = float(np.abs(pipe("a <cat>", **CALL).images - word).max())
    called = ("encode_texts", "denoise", "decode")
    found["compiled in calls"] = sum(PROGRAMS[name].compiled_shapes for name in called)
    forget_executables()

    pipe.remove_all_hooks()
    found["back"] = sorted(str(x) for x in jax.tree.leaves(pipe.params["vae"])[0].devices())
    back = [pipe("a <cat>", **CALL).images, word, other("a cat", **given).images, from_host]
    pipe.unload_textual_inversion()
    back += [pipe("a cat", **CALL).images, expected[0]]
    pairs = [*zip(images, expected * 2), *zip(back[::2], back[1::2])]
    found["equal"] = [bool((a == b).all()) for a, b in pairs]
    return found


def on_mesh(folder: str) -> dict[str, Any]:
    """A pipeline on both devices, which split its parameters."""
    pipe = quiet(diffusax.StableDiffusionPipeline.from_pretrained(folder, mesh="fsdp=2"))
    prompts = ["a cat", "a dog"]
    expected, held = pipe(prompts, **CALL).images, kept(jax.devices()[1])
    pipe.enable_model_cpu_offload()
    images = pipe(prompts, **CALL).images
    with count_compilations() as compiled:
        again = diffusax.StableDiffusionPipeline.from_pipe(pipe)
        same = quiet(again)(prompts, **CALL).images
    moved = held - kept(jax.devices()[1])
    pipe.remove_all_hooks()
    equal = [bool((a == expected).all()) for a in (images, same, pipe(prompts, **CALL).images)]
    found = {"compiled": compiled, "equal": equal, "moved": moved, "size": size(pipe, *OFFLOADED)}

    alone = diffusax.StableDiffusionPipeline.from_pretrained(folder, device=jax.devices()[0])
    one = []
    for each in (pipe, quiet(alone)):
        each.load_textual_inversion({"<cat>": np.eye(2, 32, dtype=np.float32)})
        one.append(each(["a <cat>", "a dog"], **CALL).images)
    table = pipe.params["text_encoder"]["text_model"]["embeddings"]["token_embedding"]["embedding"]
    found |= {"words": float(np.abs(one[0] - one[1]).max()), "devices": len(table.devices())}
    return found | {"changed": float(np.abs(one[0] - expected).max())}


def main(folder: str, out: str) -> None:
    found = {"device": one_device(folder), "mesh": on_mesh(folder)}
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
