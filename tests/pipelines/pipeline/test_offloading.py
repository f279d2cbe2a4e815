"""Components in the host's memory: the same bits, and off the device but for their turn."""

import inspect
import json
from unittest import mock

import diffusers
import jax
import numpy as np
import pytest
import torch
from support.adapted import random_adapter
from support.compiled_programs import forget_executables
from support.many_devices import run_on_devices
from support.runs import RUNS
from support.tiny_transformers import flux_pipeline

import diffusax
from diffusax.models.adapters.low_rank import kernel_shapes
from diffusax.pipelines.pipeline import offloading
from diffusax.runtime.programs.compilations import count_compilations
from diffusax.runtime.programs.program import PROGRAMS


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
    assert pipe.parts.offload is None
    assert not any(isinstance(x, np.ndarray) for x in jax.tree.leaves(pipe.params))


@pytest.fixture(scope="module")
def quiet(tiny_checkpoints):
    """Makes a pipeline without progress bars."""
    folder, _ = tiny_checkpoints.pipeline("sd")

    def make(**options):
        pipe = diffusax.StableDiffusionPipeline.from_pretrained(folder, **options)
        pipe.set_progress_bar_config(disable=True)
        return pipe

    return make


CALL = {"num_inference_steps": 2, "output_type": "np", "seed": 3}


def kinds(params):
    """JAX's names of the memory of parameters: of those in numbered blocks, and of others."""
    found = {"blocks": set(), "others": set(), "vectors": set()}
    for path, x in jax.tree_util.tree_leaves_with_path(params):
        numbered = any(key.key.isdecimal() for key in path)
        place = "vectors" if x.ndim < 2 else "blocks" if numbered else "others"
        found[place].add(x.sharding.memory_kind)
    return found


def test_streamed_parameters_are_where_they_are_promised(quiet):
    pipe = quiet()
    expected = pipe("a cat", **CALL).images
    host, device = {"pinned_host"}, {"device"}
    for enable, others in (
        (lambda: pipe.enable_group_offload("cuda", num_blocks_per_group=1), device),
        (lambda: pipe.enable_sequential_cpu_offload(gpu_id=0), host),
    ):
        enable()
        for name in ("unet", "text_encoder"):
            wanted = {"blocks": host, "others": others, "vectors": device}
            assert kinds(pipe.params[name]) == wanted
        np.testing.assert_array_equal(pipe("a cat", **CALL).images, expected)
        with count_compilations() as compiled:
            pipe("a dog", **{**CALL, "num_inference_steps": 3})
        assert compiled == []
        shapes = [shape for shape, *_ in PROGRAMS["denoise"].uses()]
        assert any("host" in part for shape in shapes for part in shape.arrays)
        memory = pipe.memory()
        assert memory["host"]["unet"] > 0.9 * memory["parameters"]["unet"] > 0
        end = pipe.remove_all_hooks if others == device else pipe.reset_device_map
        end()
        assert "host" not in pipe.memory()
        assert set().union(*kinds(pipe.params["unet"]).values()) == device
        np.testing.assert_array_equal(pipe("a cat", **CALL).images, expected)


def test_streaming_goes_with_everything_else(quiet, tmp_path):
    pipe, plain = quiet(), quiet()
    pipe.enable_group_offload("cuda", num_blocks_per_group=1, exclude_modules="text_encoder")
    assert "text_encoder" not in pipe.memory()["host"]
    network = pipe.parts.networks["unet"]
    paths = [path for path in kernel_shapes(network) if "to_q" in path]
    adapter = random_adapter(network, "unet", 4, paths, 0).components
    for each in (pipe, plain):
        each.add_adapter("style", adapter)
    adapted = {**CALL, "adapters": {"style": 0.8}}
    expected = plain("a cat", **adapted).images
    # Kernels that lie on the device have the adapter added to them.
    np.testing.assert_allclose(pipe("a cat", **adapted).images, expected, atol=1e-5)
    with diffusax.RunningBatch(pipe) as batch:
        running = batch.submit("a cat", **adapted).result().images
    np.testing.assert_allclose(running, expected, atol=1e-5)
    other = diffusax.StableDiffusionImg2ImgPipeline.from_pipe(pipe)
    assert other.params["unet"] is pipe.params["unet"]

    for each in (pipe, plain):
        each.set_adapters("style", 0.8)
        each.fuse_lora()
    fused = plain("a cat", **CALL).images
    np.testing.assert_array_equal(pipe("a cat", **CALL).images, fused)
    assert kinds(pipe.params["unet"])["blocks"] == {"pinned_host"}
    for each in (pipe, plain):
        each.unfuse_lora()
    for each in (pipe, plain):
        each.quantize("int8")
    eight = plain("a cat", **CALL).images
    np.testing.assert_array_equal(pipe("a cat", **CALL).images, eight)
    stored = pipe.params["unet"]["mid_block"]["resnets"]["0"]["conv1"]["kernel"]
    assert stored.values.sharding.memory_kind == "pinned_host"
    assert stored.scale.sharding.memory_kind == "device"
    pipe.save_pretrained(tmp_path)
    again = diffusax.StableDiffusionPipeline.from_pretrained(tmp_path)
    written = again.params["unet"]["mid_block"]["resnets"]["0"]["conv1"]["kernel"]
    np.testing.assert_array_equal(written, stored)


def test_what_is_assigned_is_streamed(quiet):
    pipe = quiet()
    expected = pipe("a cat", **CALL).images
    pipe.enable_group_offload("cuda", num_blocks_per_group=1)
    pipe.unet = quiet().unet
    assert kinds(pipe.params["unet"])["blocks"] == {"pinned_host"}
    pipe.params["unet"] = quiet().params["unet"]
    np.testing.assert_array_equal(pipe("a cat", **CALL).images, expected)
    assert kinds(pipe.params["unet"])["blocks"] == {"pinned_host"}


def test_executables_of_streamed_programs(quiet, tmp_path):
    pipe, plain = quiet(), quiet()
    pipe.enable_group_offload("cuda", num_blocks_per_group=1)
    expected = plain("a cat", **CALL).images
    forget_executables()
    pipe.compile()
    pipe.save_compiled(tmp_path)
    forget_executables()
    pipe.load_compiled(tmp_path)
    with count_compilations() as compiled:
        np.testing.assert_array_equal(pipe("a cat", **CALL).images, expected)
        assert not any("denoise" in name or "encode_texts" in name for name in compiled)
    # Parameters on the device are for other programs.
    np.testing.assert_array_equal(plain("a cat", **CALL).images, expected)
    forget_executables()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"offload_type": "module"}, "offload_type must be 'block_level' or 'leaf_level'"),
        ({}, "num_blocks_per_group must be given with offload_type='block_level'"),
        ({"offload_type": "leaf_level", "record_stream": True}, "record_stream goes with"),
    ],
)
def test_arguments_of_group_offload(quiet, given, message):
    with pytest.raises(ValueError, match=message):
        quiet().enable_group_offload("cuda", **given)


def test_diffusers_arguments_are_those_of_its_methods(quiet, caplog):
    for name in ("enable_group_offload", "enable_sequential_cpu_offload"):
        own, others = (
            inspect.signature(getattr(cls, name)).parameters
            for cls in (diffusax.StableDiffusionPipeline, diffusers.DiffusionPipeline)
        )
        assert list(own) == list(others)
        defaults = [p.default for p in others.values()]
        assert [p.default for p in own.values()] == [
            "cpu" if isinstance(d, torch.device) else d for d in defaults
        ]
    pipe = quiet()
    pipe.enable_group_offload(
        torch.device("cuda"),
        torch.device("cpu"),
        diffusers.hooks.group_offloading.GroupOffloadingType.LEAF_LEVEL,
        num_blocks_per_group=2,
        non_blocking=True,
        use_stream=True,
        record_stream=True,
        low_cpu_mem_usage=True,
        offload_to_disk_path="/tmp/there",
        exclude_modules=["vae", "none"],
    )
    assert "offload_to_disk_path changes nothing: parameters stay in memory" in caplog.text
    assert kinds(pipe.params["unet"])["others"] == {"pinned_host"}


def test_methods_that_do_not_go_together(quiet):
    pipe = quiet()
    group = {"onload_device": "cuda", "num_blocks_per_group": 1}
    pipe.enable_model_cpu_offload()
    pipe.enable_sequential_cpu_offload()
    with pytest.raises(ValueError, match="enable_sequential_cpu_offload, which is in force"):
        pipe.enable_group_offload(**group)
    pipe.enable_model_cpu_offload()
    with pytest.raises(ValueError, match="enable_model_cpu_offload, which is in force"):
        pipe.enable_group_offload(**group)
    pipe.remove_all_hooks()
    pipe.enable_group_offload(**group)
    for name in ("enable_model_cpu_offload", "enable_sequential_cpu_offload"):
        with pytest.raises(ValueError, match=f"{name} does not go with enable_group_offload"):
            getattr(pipe, name)()
    assert kinds(pipe.params["unet"])["blocks"] == {"pinned_host"}


def test_a_device_without_such_memory(quiet, caplog):
    pipe = quiet()
    with mock.patch.object(offloading, "has_host_memory", return_value=False):
        pipe.enable_sequential_cpu_offload()
    assert "reads no memory of its host; all parameters stay" in caplog.text
    assert pipe.parts.offload is None


@pytest.mark.slow
def test_streaming_on_a_second_device_and_meshes(tmp_path):
    flux_pipeline(tmp_path / "flux")
    run_on_devices(RUNS / "stream_run.py", tmp_path / "flux", tmp_path / "out", devices=4)
    found = json.loads((tmp_path / "out").read_text())
    assert found.pop("on the device") < 0.5
    assert found == {
        place: [0.0, 0.0] for place in ("device", "fsdp=2,tensor=2", "data=2,context=2")
    }
