"""Pictures of single files are those that PyTorch diffusers draws from them."""

import diffusers
import pytest
from support.effort import first
from support.pairs import NEGATIVES, PROMPTS, Pair, mask, picture
from support.single_files import packed

import diffusax

TEXT = {"prompt": PROMPTS[0], "negative_prompt": NEGATIVES[0]}
IMAGE = {**TEXT, "image": picture(0)}
INPAINT = {**IMAGE, "mask_image": mask(0)}
CASES = {
    "sd": ("StableDiffusionPipeline", TEXT),
    "xl": ("StableDiffusionXLPipeline", TEXT),
    "sd-b": ("StableDiffusionPipeline", {**TEXT, "height": 64, "width": 64}),
    "sd-inpaint": ("StableDiffusionInpaintPipeline", INPAINT),
    "sd-instruct": ("StableDiffusionInstructPix2PixPipeline", IMAGE),
    "xl-refiner": ("StableDiffusionXLImg2ImgPipeline", IMAGE),
    "xl-inpaint": ("StableDiffusionXLInpaintPipeline", INPAINT),
    "xl-instruct": ("StableDiffusionXLInstructPix2PixPipeline", IMAGE),
    "xl-cosxl": ("StableDiffusionXLInstructPix2PixPipeline", IMAGE),
}


def opened(tmp_path, tiny_checkpoints, case, class_name, **components):
    """The pipeline of a class, of PyTorch diffusers and of ours, from one file."""
    kind, variation = (case[:-2], "b") if case.endswith("-b") else (case, "a")
    folder, _ = tiny_checkpoints.pipeline(kind, variation)
    path = packed(folder, tmp_path / "model.safetensors")
    theirs = {name: pair[0] for name, pair in components.items()}
    ours = {name: pair[1] for name, pair in components.items()}
    reference = getattr(diffusers, class_name).from_single_file(
        str(path), config=str(folder), local_files_only=True, **theirs
    )
    reference.set_progress_bar_config(disable=True)
    pipe = getattr(diffusax, class_name).from_single_file(path, config=folder, **ours)
    pipe.set_progress_bar_config(disable=True)
    return Pair(reference, pipe)


@pytest.mark.parametrize("case", first(CASES))
def test_pictures_are_diffusers(tmp_path, tiny_checkpoints, case):
    class_name, call = CASES[case]
    opened(tmp_path, tiny_checkpoints, case, class_name).check(**call)


@pytest.mark.slow
def test_pictures_with_a_controlnet_from_a_file_are_diffusers(tmp_path, tiny_checkpoints):
    # diffusers knows the names of a hint of four levels only, which "b" has.
    folder, _ = tiny_checkpoints.controlnet("sd", "b")
    path = packed(folder, tmp_path / "control.safetensors")
    theirs = diffusers.ControlNetModel.from_single_file(str(path), config=str(folder))
    ours = diffusax.ControlNetModel.from_single_file(path, config=folder)
    pair = opened(
        *(tmp_path, tiny_checkpoints, "sd-b", "StableDiffusionControlNetPipeline"),
        controlnet=(theirs, ours),
    )
    pair.check(**IMAGE)
