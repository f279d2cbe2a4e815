"""Draws each task on one device and on meshes of eight, in one process of eight devices.

python mesh_run.py CHECKPOINTS OUT.json, where CHECKPOINTS holds tiny checkpoints by kind.
"""

import json
import sys
from pathlib import Path

import jax
import numpy as np
from PIL import Image

import diffusax

MESHES = ("data=8", "fsdp=8", "data=2,fsdp=2,tensor=2", "data=4,tensor=2")
CALL = {"num_inference_steps": 2, "output_type": "np", "seed": 3, "guidance_scale": 3.0}
PROMPTS = ["a frog", "a boat", "two dogs"]


def picture(seed: int) -> Image.Image:
    """Smooth random colours."""
    pixels = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), np.uint8)
    return Image.fromarray(pixels).resize((64, 64))


def tasks() -> dict[str, tuple[str, str, dict]]:
    """Class, kind of checkpoint and arguments of each task."""
    image = {"image": picture(0)}
    masked = {**image, "mask_image": picture(1).convert("L")}
    return {
        "text": ("StableDiffusionPipeline", "sd", {}),
        "xl": ("StableDiffusionXLPipeline", "xl", {}),
        "img2img": ("StableDiffusionImg2ImgPipeline", "sd", {**image, "strength": 1.0}),
        "inpaint": ("StableDiffusionInpaintPipeline", "sd", masked),
        "inpaint9": ("StableDiffusionInpaintPipeline", "sd-inpaint", masked),
        "instruct": ("StableDiffusionInstructPix2PixPipeline", "sd-instruct", image),
        "control": ("StableDiffusionControlNetPipeline", "sd", image),
    }


def draw(root: Path, task: str, sampler: str | None = None, **options) -> np.ndarray:
    """The pictures of three prompts, a number that no mesh divides."""
    name, kind, arguments = tasks()[task]
    if task == "control":
        net = diffusax.ControlNetModel.from_pretrained(root / "controlnet")
        options["controlnet"] = net
    pipe = getattr(diffusax, name).from_pretrained(root / kind, **options)
    pipe.set_progress_bar_config(disable=True)
    if sampler:
        pipe.scheduler = getattr(diffusax, sampler).from_config(pipe.scheduler.config)
    return pipe(PROMPTS, **arguments, **CALL).images


def check_split(root: Path, mesh: str) -> dict[str, int]:
    """How many of the UNet's arrays are split over each axis of the mesh."""
    pipe = diffusax.StableDiffusionPipeline.from_pretrained(root / "sd", mesh=mesh)
    specs = [leaf.sharding.spec for leaf in jax.tree.leaves(pipe.params["unet"])]
    return {axis: sum(axis in spec for spec in specs) for axis in ("fsdp", "tensor")}


def main(root: Path, out: Path) -> None:
    """Writes the greatest difference from one device, for each task and mesh."""
    one = jax.devices()[0]
    found = {"split": {mesh: check_split(root, mesh) for mesh in MESHES}, "differences": {}}
    for task in tasks():
        alone = draw(root, task, device=one)
        chosen = MESHES if task == "text" else MESHES[2:3]
        for mesh in (None, *chosen) if task == "text" else chosen:
            drawn = draw(root, task, mesh=mesh)
            assert drawn.shape == alone.shape, (drawn.shape, alone.shape)
            found["differences"][f"{task} {mesh}"] = float(np.abs(drawn - alone).max())
    found["spread"] = float(np.std(alone))
    out.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
