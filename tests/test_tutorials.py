"""Programs of diffusers' documentation run on diffusax with only the import changed."""

import diffusers
import numpy as np
import pytest
import torch
import transformers
from support import tensor_programs
from support.effort import few
from support.pairs import TOLERANCE, mask, picture
from support.tiny_transformers import flux_pipeline
from support.tiny_unconditional import build_unconditional
from support.tutorials import PROGRAMS

import diffusax


@pytest.fixture(scope="module")
def places(tiny_checkpoints, tmp_path_factory):
    """The names that the programs use for folders and pictures."""
    folder = tmp_path_factory.mktemp("tutorials")
    picture(1, 96, 80).save(folder / "init.png")
    mask(1, 96, 80).save(folder / "mask.png")
    picture(9, 96, 80).save(folder / "control.png")
    xl = tiny_checkpoints.pipeline("xl")[1]
    xl.save_pretrained(folder / "fp16", variant="fp16")
    flux_pipeline(folder / "flux")
    kinds = {"SD": "sd", "XL": "xl", "REFINER": "xl-refiner", "INPAINT": "sd-inpaint"}
    kinds |= {"INSTRUCT": "sd-instruct", "LCM": "lcm"}
    return {
        **{name: str(tiny_checkpoints.pipeline(kind)[0]) for name, kind in kinds.items()},
        "OTHER": str(tiny_checkpoints.pipeline("sd", "c")[0]),
        "CONTROLNET": str(tiny_checkpoints.controlnet("sd")[0]),
        "NOISE_ALONE": str(_beside_the_index(build_unconditional(folder / "noise"))),
        "XL_FP16": str(folder / "fp16"),
        "FLUX": str(folder / "flux"),
        **{n: str(folder / f"{n.lower()}.png") for n in ("INIT", "MASK", "CONTROL")},
    }


def _beside_the_index(folder):
    """Moves a checkpoint's files beside its model_index.json, as in google/ddpm-cat-256."""
    for part in ("unet", "scheduler"):
        for file in (folder / part).iterdir():
            file.rename(folder / file.name)
        (folder / part).rmdir()
    return folder


def run(program, module, places, saved):
    load_image = diffusers.utils.load_image
    names = {"d": module, "torch": torch, "load_image": load_image, **places, "SAVED": str(saved)}
    names["text"] = transformers if module is diffusers else diffusax
    exec(compile(program, "tutorial", "exec"), names)
    return [np.asarray(image) for image in names["images"]], names.get("numbers")


ALL = {**PROGRAMS, **tensor_programs.PROGRAMS}
KEPT = (next(iter(PROGRAMS)), "deconstructed", "noise_alone_by_hand")


# diffusers warns of the older names that some programs use.
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", few(ALL, *KEPT, "callbacks_in_place", "inversion"))
def test_only_the_import_changes(name, places, tmp_path):
    expected, numbers = run(ALL[name], diffusers, places, tmp_path / "diffusers")
    actual, own_numbers = run(ALL[name], diffusax, places, tmp_path / "diffusax")
    assert own_numbers == numbers
    assert len(actual) == len(expected)
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.shape == theirs.shape
        assert ours.dtype == theirs.dtype
        assert theirs.std() > 0
        # A byte may be rounded to either side.
        limit = 1 if ours.dtype == np.uint8 else TOLERANCE
        assert np.abs(ours.astype(float) - theirs.astype(float)).max() <= limit


@pytest.mark.slow
def test_what_needs_a_gpu_in_diffusers_is_accepted(places):
    pipe = diffusax.DiffusionPipeline.from_pretrained(places["SD"], torch_dtype=torch.float16)
    assert pipe.to("cuda") is pipe
    assert pipe.dtype == torch.float16
    for name in (
        "enable_model_cpu_offload",
        "enable_sequential_cpu_offload",
        "enable_xformers_memory_efficient_attention",
        "enable_attention_slicing",
        "enable_vae_slicing",
        "enable_vae_tiling",
    ):
        getattr(pipe, name)()
    pipe.unet.to(memory_format=torch.channels_last)
    pipe.to(torch.float32)
    assert pipe.dtype == torch.float32
    pipe.to("cuda", torch.bfloat16)
    assert pipe.vae.dtype == torch.bfloat16
    assert torch.ones(1).to(pipe.device, pipe.unet.dtype).device == pipe.vae.device
