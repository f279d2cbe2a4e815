"""Every kind of program, compiled for GPUs that are not here: `make test-gpu-compiler`."""

import importlib.util
import io
import re

import jax
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

import diffusax
from diffusax.checkpoints import resolve
from diffusax.checkpoints.networks import read_network
from diffusax.cli.console import main
from diffusax.models.network import cast_shapes
from diffusax.models.ops.attention import attention
from diffusax.networks import Model
from diffusax.pipelines.pipeline import ahead
from diffusax.runtime.devices.chips import CARDS, chip_of
from diffusax.runtime.devices.lowering import lowering_platforms
from diffusax.runtime.programs.cost import cost_of, kernels_of, traffic
from diffusax.runtime.programs.program import lower, work_of
from diffusax.runtime.programs.topology import compile_there, topology_mesh
from diffusax.runtime.switches import in_mesh
from diffusax.training import CaptionedDataConfig, EMAConfig, TextToImageConfig, text_to_image
from diffusax.training.loop.program import abstract_arguments, bytes_on_device, lower_step

pytestmark = [
    pytest.mark.gpu_compiler,
    pytest.mark.skipif(
        not any(importlib.util.find_spec(f"jax_cuda{n}_plugin") for n in (12, 13)),
        reason="jax[cuda12] is not installed",
    ),
]

MESHES = [
    ("h200:1", "data=1"),
    ("h100:4", "data=4"),
    ("h200:4", "data=1,fsdp=4"),
    ("h200:4", "data=1,tensor=4"),
    ("a100:4", "data=2,tensor=2"),
    ("2xh100:4", "data=2,fsdp=4"),
]
TASKS = {
    "text-to-image": (diffusax.AutoPipelineForText2Image, "emoji"),
    "image-to-image": (diffusax.AutoPipelineForImage2Image, "emoji"),
    "inpainting": (diffusax.AutoPipelineForInpainting, "emoji"),
    "edits": (diffusax.DiffusionPipeline, "emoji-edit"),
    "control": (diffusax.StableDiffusionControlNetPipeline, "emoji"),
}


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """A data set of one row with the columns of all recipes."""
    file = io.BytesIO()
    Image.new("RGB", (64, 64)).save(file, "PNG")
    picture = [{"bytes": file.getvalue()}]
    names = ("image", "input_image", "edited_image", "conditioning_image")
    texts = {"text": ["a"], "edit_prompt": ["b"]}
    folder = tmp_path_factory.mktemp("rows")
    pq.write_table(pa.table({**dict.fromkeys(names, picture), **texts}), folder / "rows.parquet")
    return folder


@pytest.mark.parametrize("card", CARDS)
def test_the_compiler_knows_each_card(card):
    mesh = topology_mesh(f"{card}:1")
    assert chip_of(mesh.devices.flat[0]) == CARDS[card].chip
    x = jax.ShapeDtypeStruct((256, 256), jax.numpy.bfloat16)
    with in_mesh(mesh):
        lowered = jax.jit(lambda x: x @ x).trace(x).lower(lowering_platforms=("cuda",))
    cost = cost_of(compile_there(lowered, mesh), needed=2 * 256**3)
    assert cost.kernels
    assert cost.moved >= 3 * 2 * 256**2 / 1e9


@pytest.mark.parametrize(
    ("task", "topology", "mesh"),
    [("text-to-image", *place) for place in MESHES]
    + [(task, *MESHES[i]) for task in list(TASKS)[1:] for i in (0, -1)],
)
def test_every_program_of_a_task_compiles(task, topology, mesh):
    kind, model = TASKS[task]
    components = {}
    if task == "control":
        net = read_network(resolve("emoji-control", weights=False))
        components["controlnet"] = Model(net, cast_shapes(net.shapes, "bfloat16"))
    folder = resolve(model, weights=False)
    pipe = ahead.shapes_only(kind, folder, dtype="bfloat16", **components)
    devices = topology_mesh(topology, mesh)
    call = ahead.example_call(pipe, 8, (128, 128), {"guidance_scale": 7.5})
    for request in ahead.requests(pipe.parts, pipe.task, call, devices):
        own = ahead.mesh_of_program(request, devices)
        with in_mesh(own):
            lowered = lower(request, lowering_platforms=lowering_platforms(own))
            compiled = compile_there(lowered, own)
        cost = cost_of(compiled, needed=work_of(request).operations / own.size)
        assert cost.fits(chip_of(devices.devices.flat[0]))
        assert cost.kernels
        if request.program.name == "denoise":
            assert "__cudnn$fmha" in compiled.as_text()


def test_one_card_needs_no_number_and_hosts_are_processes():
    assert topology_mesh("H100").size == 1
    assert topology_mesh("2xh100:4", "data=2,tensor=4").size == 8
    with pytest.raises(ValueError, match="tensor axis within a process"):
        topology_mesh("2xh100:2", "data=1,tensor=4")


@pytest.mark.parametrize(
    ("card", "dtype"), [("t4", "float16"), ("t4", "bfloat16"), ("v100", "float16")]
)
def test_gpus_before_ampere_compile_without_cudnns_attention(card, dtype):
    devices = topology_mesh(f"{card}:1")
    lowered, _ = lowered_denoising(devices, dtype)
    assert "fmha" not in compile_there(lowered, devices).as_text()


def lowered_denoising(devices, dtype="bfloat16", weights=None):
    """The emoji model's steps, and their request."""
    folder = resolve("emoji", weights=False)
    kind = diffusax.AutoPipelineForText2Image
    pipe = ahead.shapes_only(kind, folder, dtype=dtype, weights=weights)
    call = ahead.example_call(pipe, 1, None, {"guidance_scale": 7.5})
    found = ahead.requests(pipe.parts, pipe.task, call, devices)
    (denoise,) = (request for request in found if request.program.name == "denoise")
    with in_mesh(devices):
        return lower(denoise, lowering_platforms=lowering_platforms(devices)), denoise


def test_products_add_biases_and_residuals():
    devices = topology_mesh("h200:1")
    lowered, _ = lowered_denoising(devices)
    kernels, before = (
        [k for k in kernels_of(compiled.as_text()) if k.in_step]
        for compiled in (
            compile_there(lowered, devices),
            compile_there(lowered, devices, xla_gpu_enable_triton_gemm=True),
        )
    )
    assert not any("gemm_fusion" in kernel.kind for kernel in kernels)
    sums = [
        sum(kernel.kind == "loop_add_fusion" and kernel.written > 4096 for kernel in some)
        for some in (kernels, before)
    ]
    assert sums[0] == 0 < sums[1]
    assert traffic(kernels).kernels < 0.95 * traffic(before).kernels


@pytest.mark.parametrize(
    ("card", "dtype", "weights"),
    [
        *(("h200", "bfloat16", None), ("h200", "float32", None), ("h200", "bfloat16", "int8")),
        *(("t4", "float16", None), ("t4", "float32", None)),
    ],
)
def test_no_weights_are_copied_before_the_steps(card, dtype, weights):
    devices = topology_mesh(card)
    lowered, denoise = lowered_denoising(devices, dtype, weights)
    with in_mesh(devices):
        kernels = kernels_of(compile_there(lowered, devices).as_text())
    arguments = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(denoise.dynamic[0]))
    # The prompt's keys and values are turned before the steps, too, without cuDNN's attention.
    copies = [kernel.read for kernel in kernels if kernel.copies_weights]
    assert sum(size for size in copies if size > 2**15) < arguments / 100


@pytest.mark.parametrize("mesh", ["data=1", "data=4"])
def test_a_training_step_copies_no_weights(mesh, rows):
    data = CaptionedDataConfig(path=str(rows), resolution=64)
    config = TextToImageConfig(model="emoji", data=data, batch_size=8, ema=EMAConfig(rule="ramp"))
    recipe, devices = text_to_image(config), topology_mesh("h200:4", mesh)
    kernels = kernels_of(compile_there(lower_step(recipe, config, devices), devices).as_text())
    state, _, _ = abstract_arguments(recipe, config, devices)
    copied = sum(kernel.read for kernel in kernels if kernel.copies_weights)
    assert copied < bytes_on_device(state) / 100


def test_memory_says_whether_a_call_fits_a_card():
    folder = resolve("emoji", weights=False)
    pipe = ahead.shapes_only(diffusax.AutoPipelineForText2Image, folder, dtype="bfloat16")
    report = pipe.memory("l4:1", size=(64, 64), guidance_scale=3.0)
    assert report["pipeline"]["fits"]
    (denoise,) = (value for name, value in report.items() if name.startswith("denoise"))
    assert denoise["kernels"] > 100
    assert denoise["seconds"] >= denoise["moved"] / 300


@pytest.mark.parametrize(("topology", "mesh"), MESHES[1:])
def test_attention_asks_no_other_device(topology, mesh):
    def loss(*qkv):
        return attention(*qkv).astype(jax.numpy.float32).sum()

    devices = topology_mesh(topology, mesh)
    # An odd length, and heads that four devices do not divide.
    q, k = (jax.ShapeDtypeStruct((8, t, 5, 64), jax.numpy.bfloat16) for t in (256, 77))
    with in_mesh(devices):
        for function in (attention, jax.grad(loss, (0, 1, 2))):
            lowered = jax.jit(function).trace(q, k, k).lower(lowering_platforms=("cuda",))
            assert "__cudnn$fmha" in compile_there(lowered, devices).as_text()


MODELS = {"instruct-pix2pix": ["--model", "emoji-edit"], "unconditional": []}
WORD = ["--placeholder-token", "<frog>", "--initializer-token", "frog", "--num-vectors", "2"]


@pytest.mark.parametrize(
    ("recipe", "topology", "mesh", "more"),
    [
        ("text-to-image", "h200:4", "data=1,fsdp=4", []),
        ("text-to-image", "h200:4", "data=2,tensor=2", []),
        ("text-to-image", "h200:4", "data=1,tensor=4", []),
        ("text-to-image", "2xh100:4", "data=2,fsdp=4", []),
        ("text-to-image", "h200:4", "data=4", ["--lora.rank", "4"]),
        ("text-to-image", "2xh100:4", "data=1,fsdp=8", ["--lora.rank", "4"]),
        ("text-to-image", "t4", "data=1", []),
        ("instruct-pix2pix", "h200:4", "data=2,fsdp=2", []),
        ("controlnet", "h200:4", "data=1,fsdp=4", []),
        ("dreambooth", "h200:4", "data=2,fsdp=2", ["--instance-prompt", "a sks frog"]),
        ("textual-inversion", "h200:4", "data=4", WORD),
        ("autoencoder", "h200:4", "data=1,fsdp=4", []),
        ("unconditional", "h200:4", "data=4", []),
    ],
)
def test_the_step_of_a_recipe_compiles(recipe, topology, mesh, more, rows, tmp_path, capsys):
    options = ["--data.path", str(rows), "--data.resolution", "64", "--batch-size", "8"]
    options += ["--mesh", mesh, "--topology", topology, "--output", str(tmp_path / "out")]
    main(["train", recipe, *options, *MODELS.get(recipe, ["--model", "emoji"]), *more])
    head, _, line = capsys.readouterr().out.splitlines()
    assert re.match(r"[148] of (NVIDIA H[12]00|Tesla T4)", head)
    assert line.endswith("  yes")
    assert not (tmp_path / "out").exists()
