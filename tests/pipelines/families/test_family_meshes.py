"""Transformers on several devices: tokens, parameters, images, and text encoders elsewhere."""

import functools

import jax
import pytest
from jax.sharding import Mesh
from support.many_devices import run_on_devices
from support.qwen_edits import PLUS, images
from support.runs import RUNS
from support.tiny_flux3 import flux3_pipeline
from support.tiny_transformers import (
    flux_pipeline,
    klein_pipeline,
    krea2_pipeline,
    qwen_image21_pipeline,
    qwen_image_pipeline,
    wan_pipeline,
    z_image_pipeline,
)

from diffusax.runtime.devices.mesh import batch_size, check_processes, make_mesh

# The last arguments are those of calls.
FAMILIES = {
    "z-image": (z_image_pipeline, ()),
    "flux": (flux_pipeline, ("max_sequence_length=32",)),
    "krea2": (krea2_pipeline, ("max_sequence_length=240",)),
    "klein": (klein_pipeline, ("text_encoder_out_layers=(1,2,3)", "max_sequence_length=64")),
    "qwen-image": (qwen_image_pipeline, ("max_sequence_length=240",)),
    "qwen-image-edit": (
        functools.partial(qwen_image_pipeline, kind=PLUS, zero_cond_t=True),
        ("image='{folder}/a.png'",),
    ),
    "qwen-image21": (qwen_image21_pipeline, ("negative_prompt='a hat'",)),
    "wan": (wan_pipeline, ("num_frames=5", "max_sequence_length=24")),
    "klein-3": (flux3_pipeline, ("text_encoder_out_layers=(1,2,4)",)),
}


def built(name, folder):
    """Makes a checkpoint and an image beside it; returns the arguments of calls."""
    build, options = FAMILIES[name]
    build(folder)
    images(1)[0].save(folder / "a.png")
    return [option.format(folder=folder) for option in options]


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_over_eight_devices_give_the_same_images(tmp_path, name):
    options = built(name, tmp_path)
    script = RUNS / "split_tokens.py"
    found = run_on_devices(script, tmp_path, *options, devices=8)
    assert found == ["data=1,context=8", "data=2,context=2,tensor=2"]


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_parameters_and_images_over_four_devices_give_the_same_images(tmp_path, name):
    FAMILIES[name][0](tmp_path)
    found = run_on_devices(RUNS / "family_on_mesh.py", name, tmp_path)
    assert found == ["data=2,tensor=2", "data=2,fsdp=2"]


# The script's sizes are no multiples of 32, and its texts are also encoded before the images are
# known.
@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*FAMILIES} - {"qwen-image21", "qwen-image-edit"}))
def test_text_encoders_on_devices_of_their_own_give_the_same_images(tmp_path, name):
    options = built(name, tmp_path)
    script = RUNS / "encoders_apart.py"
    found = " ".join(run_on_devices(script, tmp_path, *options, devices=8))
    assert found.startswith("one and seven two and four one and one another class a running batch")
    last = "compiled ahead on devices that are elsewhere adapters generate_fn says no"
    assert found.endswith(last)


def test_the_axis_is_there_only_if_it_is_asked_for():
    devices = jax.devices() * 4
    plain = make_mesh("data=4", devices=devices)
    assert plain.axis_names == ("data", "fsdp", "tensor")
    split = make_mesh("data=2,context=2", devices=devices)
    assert dict(split.shape) == {"data": 2, "fsdp": 1, "tensor": 1, "context": 2}
    assert batch_size(split) == 2
    check_processes(split)
    assert make_mesh(split).axis_names == split.axis_names
    others = make_mesh(Mesh(split.devices, ("tokens", "fsdp", "tensor", "data")))
    assert dict(others.shape) == {"data": 4, "fsdp": 1, "tensor": 1}
