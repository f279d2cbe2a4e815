"""Pipelines on many devices, in one process and in two, draw what one device draws."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from support.many_devices import run_on_devices
from support.runs import RUNS

import diffusax
from diffusax.models import Network, UNet2DConditionConfig, UNet2DConditionModel
from diffusax.runtime.devices.mesh import (
    AXES,
    _axis_to_gather,
    check_processes,
    make_mesh,
    param_sharding,
    parse_mesh,
    tree_name,
    tree_sharding,
)
from diffusax.training.loop.program import tensor_rules

MIXED = "data=2,fsdp=2,tensor=2"
CASES = [f"control {MIXED}"]
MORE = [
    *(f"text {MIXED}", "text default EulerAncestralDiscreteScheduler"),
    *(f"text {mesh}" for mesh in ("default", "data=8", "fsdp=8", "data=4,tensor=2")),
    *(
        f"{task} {MIXED}"
        for task in ("xl", "img2img", "several", "inpaint", "inpaint9", "instruct", "freeu")
    ),
    f"asymmetric {MIXED}",
    f"t2i {MIXED}",
    f"rule {MIXED}",
    *(f"adapters {mesh}" for mesh in ("default", "fsdp=8", MIXED)),
    f"adapters_of_control {MIXED}",
    *(f"images {mesh}" for mesh in ("default", MIXED)),
]
FLAGS = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count="


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    from support.ip_adapters import write_ip_adapters
    from support.tiny import build_asymmetric, build_checkpoint, build_controlnet, build_t2i_adapter

    root = tmp_path_factory.mktemp("mesh")
    built = {
        kind: build_checkpoint(root / kind, kind, "a")
        for kind in ("sd", "xl", "sd-inpaint", "sd-instruct")
    }
    write_ip_adapters(root / "ip_adapters", built["sd"].unet, ("plus",))
    build_controlnet(root / "controlnet", "sd", "a")
    build_asymmetric(root / "asymmetric")
    build_t2i_adapter(root / "t2i", "sd")
    return root


@pytest.mark.parametrize("cases", [CASES, pytest.param(MORE, marks=pytest.mark.slow)])
def test_eight_devices_draw_what_one_does(root, tmp_path, cases):
    run_on_devices(RUNS / "mesh_run.py", root, tmp_path / "out", *cases, devices=8)
    found = json.loads((tmp_path / "out").read_text())
    assert set(found["differences"]) == set(cases)
    assert max(found["differences"].values()) < 1e-4, found["differences"]
    assert found["encoding"] < 0.4
    # By heads; by queries where the devices do not divide the heads.
    shapes = {heads: shape for heads, (shape, _) in found["kernel"].items()}
    assert shapes == {"4": [1, 16, 1, 8], "5": [1, 4, 5, 8]}
    assert max(error for _, error in found["kernel"].values()) < 1e-5
    gathered, error = found["chunks"]
    assert gathered == 0
    assert error < 1e-5
    # Those that remain are the feed-forward's, whose channels are split.
    assert found["messages"]["whole"] <= 0.6 * found["messages"]["cut"]
    assert found["split"]["fsdp=8"]["fsdp"] > 10
    assert found["split"][MIXED]["tensor"] > 10
    assert found["split"]["data=8"] == {"fsdp": 0, "tensor": 0}


RUNNING = ["text data=8"]
MORE_RUNNING = [f"text {MIXED}", f"control {MIXED}", "control data=4,fsdp=2", "rule data=8"]


@pytest.mark.parametrize("cases", [RUNNING, pytest.param(MORE_RUNNING, marks=pytest.mark.slow)])
def test_a_running_batch_on_eight_devices_equals_each_call_on_one(root, tmp_path, cases):
    run_on_devices(RUNS / "batch_on_mesh.py", root, tmp_path / "out", *cases, devices=8)
    found = json.loads((tmp_path / "out").read_text())
    assert set(found["differences"]) == set(cases)
    assert max(found["differences"].values()) < 1e-4, found["differences"]
    if cases == RUNNING:
        # Whether any image draws noise is all that the devices tell each other.
        assert found["exchanged"] == {"data=8": [["pred[]", "all-reduce"]]}


def start(root: Path, folder: Path, mesh: str, *more: str) -> list[subprocess.Popen]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    variables = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2"}
    script = [sys.executable, str(RUNS / "processes_run.py"), str(root / "sd")]
    return [
        subprocess.Popen(
            [*script, str(folder / f"{i}.npy"), mesh, str(5 + i), *more],
            env={**os.environ, **variables, "XLA_FLAGS": f"{FLAGS}2", "JAX_PROCESS_ID": str(i)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i in range(2)
    ]


@pytest.mark.slow
def test_two_processes_draw_their_own_images_and_neither_outlives_the_other(root, tmp_path):
    for i in range(2):
        script = [str(RUNS / "processes_run.py"), str(root / "sd")]
        alone = [sys.executable, *script, str(tmp_path / f"alone{i}.npy"), "alone", str(5 + i)]
        subprocess.run(alone, check=True)
    first, second = start(root, tmp_path, "fsdp=4", "wait")
    try:
        limit = time.monotonic() + 120
        while not all((tmp_path / f"{i}.npy.drawing").exists() for i in range(2)):
            assert time.monotonic() < limit
            assert first.poll() is None, first.communicate()[0][-3000:]
            time.sleep(0.2)
        for i in range(2):
            images = [np.load(tmp_path / f"{name}{i}.npy") for name in ("", "alone")]
            np.testing.assert_allclose(*images, atol=1e-4)
        second.send_signal(signal.SIGKILL)
        text, _ = first.communicate(timeout=60)
        assert first.returncode != 0
        assert "another task died" in text
    finally:
        for process in (first, second):
            process.kill()
            process.communicate()


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ("data=3", "does not fit 1 devices"),
        ("model=2", "mesh must give sizes to data, fsdp, tensor"),
        ("data", "mesh must be sizes such as"),
        ("data=0", "mesh must give sizes"),
        ("data=-1,fsdp=-1", "does not fit"),
        ("data=1,data=1", "mesh must be sizes such as"),
    ],
)
def test_meshes_that_cannot_be(shape, message):
    import jax

    with pytest.raises(ValueError, match=message):
        make_mesh(shape, devices=jax.devices()[:1])


@pytest.mark.parametrize("name", ["device", "encoder_device"])
@pytest.mark.parametrize("value", ["cpu:1", 0, ["a", "b"]])
def test_what_is_no_device_is_a_sentence(name, value):
    message = f"^{name} must be a device, such as jax.devices.*, or a mesh .got "
    with pytest.raises(ValueError, match=message):
        diffusax.DiffusionPipeline.from_pretrained("emoji", **{name: value})


@pytest.mark.slow
def test_processes_cannot_share_images():
    class Device:
        def __init__(self, i):
            self.id, self.process_index, self.platform = i, i // 2, "cpu"

    devices = [Device(i) for i in range(4)]
    check_processes(make_mesh("data=2,tensor=2", devices=devices))
    check_processes(make_mesh("fsdp=4", devices=devices))
    with pytest.raises(ValueError, match="tensor axis within a process"):
        check_processes(make_mesh("data=1,tensor=4", devices=devices))


def test_sizes_of_a_mesh():
    class Device:
        def __init__(self, i):
            self.id, self.process_index, self.platform = i, 0, "cpu"

    assert parse_mesh("data=4, tensor=2") == {"data": 4, "tensor": 2}
    devices = [Device(i) for i in range(8)]
    for shape, sizes in (
        (None, (8, 1, 1)),
        ("fsdp=4", (2, 4, 1)),
        ("fsdp=-1", (1, 8, 1)),
        ("data=2,tensor=-1", (2, 1, 4)),
        ({"data": 2, "fsdp": 2, "tensor": 2}, (2, 2, 2)),
    ):
        assert tuple(make_mesh(shape, devices=devices).devices.shape) == sizes


RULES = ((r"to_q\.kernel", -1), (r"to_out\.0\.kernel", -2))


@pytest.mark.parametrize(
    ("name", "shape", "spec"),
    [
        ("blocks.0.to_q.kernel", (256, 512), ("fsdp", "tensor")),
        ("blocks.0.to_out.0.kernel", (512, 256), ("tensor", "fsdp")),
        ("blocks.0.not_to_q.kernel", (256, 512), (None, "fsdp")),
        ("blocks.0.to_q.kernel", (256, 511), ("fsdp", None)),
        ("conv.kernel", (3, 3, 64, 128), (None, None, None, "fsdp")),
        ("norm.scale", (512,), ()),
    ],
)
def test_where_parameters_lie(name, shape, spec):
    mesh = AbstractMesh((1, 2, 2), AXES)
    assert tuple(param_sharding(mesh, name, shape, RULES).spec) == spec


@pytest.mark.parametrize(
    ("shape", "free", "elsewhere", "on_gpus"),
    [
        ((3, 3, 64, 32), [2, 3], 2, 3),
        ((3, 3, 64, 64), [2, 3], 2, 3),
        # The tensor axis has the one that is slowest in memory.
        ((3, 3, 32, 64), [2], 2, 2),
        ((1, 1, 64, 32), [2, 3], 2, 2),
        ((64, 32), [0, 1], 0, 0),
    ],
)
def test_gpus_gather_kernels_of_convolutions_in_the_order_of_memory(
    shape, free, elsewhere, on_gpus
):
    for platform, axis in [*((p, elsewhere) for p in ("cpu", "tpu", "rocm")), ("cuda", on_gpus)]:
        assert _axis_to_gather(shape, free, platform) == axis


@pytest.mark.parametrize("kind", ["a network", "training", "adapters"])
def test_heads_that_the_devices_do_not_divide_stay_whole(kind):
    config = UNet2DConditionConfig(
        block_out_channels=(192, 256),
        down_block_types=("CrossAttnDownBlock2D",) * 2,
        up_block_types=("CrossAttnUpBlock2D",) * 2,
        attention_head_dim=(3, 4),
        cross_attention_dim=128,
    )
    network = Network(UNet2DConditionModel, config)
    mesh = AbstractMesh((1, 1, 2), AXES)
    tree, rules, start = network.shapes, network.tensor_rules, ""
    if kind == "training":
        tree, start = {"params": {"unet": tree}, "step": np.zeros(())}, "params.unet."
        rules = tensor_rules(SimpleNamespace(networks={"unet": network}))
    places = {
        tree_name(path): place.spec
        for path, place in jax.tree_util.tree_leaves_with_path(tree_sharding(mesh, tree, rules))
    }
    for level, heads in (("down_blocks.0", 3), ("down_blocks.1", 4), ("up_blocks.1", 3)):
        block = f"{start}{level}.attentions.0.transformer_blocks.0"
        for layer in ("attn1.to_q", "attn1.to_v", "attn2.to_k"):
            name, shape = f"{block}.{layer}.kernel", (None, "tensor")
            if kind == "adapters":
                name = f"{block}.{layer}.up"
                places[name] = param_sharding(mesh, name, (128, 64 * heads), rules).spec
            assert tuple(places[name]) == (shape if heads == 4 else ()), name
        whole = () if heads == 3 else ("tensor", None)
        assert tuple(places[f"{block}.attn1.to_out.0.kernel"]) == whole
        assert tuple(places[f"{block}.ff.net.2.kernel"]) == ("tensor", None)
