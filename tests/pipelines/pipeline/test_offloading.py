"""Components in the host's memory: the same bits, and off the device but for their turn."""

import json

import jax
import numpy as np
import pytest
from support.many_devices import run_on_devices
from support.runs import RUNS

import diffusax
from diffusax.runtime.programs.compilations import count_compilations


def test_parameters_on_the_host_give_the_same_bits_and_compile_nothing(tiny_checkpoints):
    folder, _ = tiny_checkpoints.pipeline("sd")
    pipe = diffusax.StableDiffusionPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    call = {"num_inference_steps": 2, "output_type": "np", "seed": 3}
    expected = pipe("a cat", **call).images
    for name in ("text_encoder", "vae"):
        pipe.params[name] = jax.tree.map(np.array, pipe.params[name])
    with count_compilations() as compiled:
        np.testing.assert_array_equal(pipe("a cat", **call).images, expected)
    assert compiled == []
    assert sorted(pipe.memory()["host"]) == ["text_encoder", "vae"]
    pipe.enable_model_cpu_offload()
    pipe.remove_all_hooks()
    assert "host" not in pipe.memory()
    np.testing.assert_array_equal(pipe("a cat", **call).images, expected)


@pytest.mark.slow
def test_a_second_device_and_a_mesh(tiny_checkpoints, tmp_path):
    folder, _ = tiny_checkpoints.pipeline("sd")
    run_on_devices(RUNS / "offload_run.py", folder, tmp_path / "out", devices=2)
    found = json.loads((tmp_path / "out").read_text())
    device, mesh = found["device"], found["mesh"]
    assert device["moved"] > 0.95 * device["size"] > 6e6
    # The stack of the adapters stays on the device.
    for when in ("after a call", "after an image"):
        assert device[when] > 0.9 * device["size"]
    assert device["memory"] == {"host": ["text_encoder", "vae"], "parameters": ["unet"]}
    assert device["compiled"] == mesh["compiled"] == []
    assert device["shared"] == [True, True]
    assert device["assigned"]
    assert max(device["running"], device["ahead"]) < 1e-4
    assert not device["compiled in calls"]
    assert all("1" in name for name in device["back"])
    assert device["equal"] == [True] * 7
    assert mesh["equal"] == [True] * 3
    # Each device had half of the parameters.
    assert mesh["moved"] > 0.45 * mesh["size"]
    assert mesh["words"] < 1e-4 < 0.01 < mesh["changed"]
    assert mesh["devices"] == 2


def test_on_the_cpu_nothing_moves(tiny_checkpoints):
    folder, _ = tiny_checkpoints.pipeline("sd")
    pipe = diffusax.StableDiffusionPipeline.from_pretrained(folder)
    before = jax.tree.leaves(pipe.params)
    pipe.enable_model_cpu_offload(gpu_id=0, device="cuda")
    pipe.maybe_free_model_hooks()
    assert all(a is b for a, b in zip(before, jax.tree.leaves(pipe.params), strict=True))
    pipe.reset_device_map()
    assert not pipe.parts.offloaded
    assert not any(isinstance(x, np.ndarray) for x in jax.tree.leaves(pipe.params))


@pytest.mark.parametrize("name", ["enable_sequential_cpu_offload", "enable_group_offload"])
def test_what_changes_nothing_says_so(tiny_checkpoints, caplog, name):
    folder, _ = tiny_checkpoints.pipeline("sd")
    pipe = diffusax.StableDiffusionPipeline.from_pretrained(folder)
    getattr(pipe, name)("cuda")
    assert f"{name} changes nothing in diffusax; enable_model_cpu_offload keeps" in caplog.text
