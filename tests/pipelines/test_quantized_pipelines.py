"""Pipelines whose kernels are stored in eight bits, beside PyTorch's with those multiplied out."""

import copy
import pickle

import diffusers
import jax
import numpy as np
import pytest
from safetensors.torch import save_file
from support.adapted import random_adapter
from support.compiled_programs import compiled_programs, forget_executables
from support.many_devices import run_on_devices
from support.pairs import Pair, slow
from support.quantised import EIGHT_BITS, encoded
from support.runs import RUNS
from support.tiny_transformers import (
    FLUX_SIZE,
    Z_IMAGE_SIZE,
    flux_arguments,
    flux_inputs,
    flux_pipeline,
    flux_transformer,
    qwen_image_pipeline,
    upstream_flux,
    z_image_pipeline,
)

import diffusax
from diffusax.checkpoints.tree import checkpoint_name
from diffusax.models.parameter_tree import ordered_leaves
from diffusax.models.quantized import Quantized
from diffusax.pipelines.pipeline import ahead

PROMPT = "a red apple"


@pytest.fixture(scope="module")
def folders(tmp_path_factory, tiny_checkpoints):
    found = {"sd": tiny_checkpoints.pipeline("sd")[0]}
    for name, make in {"flux": flux_pipeline, "z-image": z_image_pipeline}.items():
        found[name] = tmp_path_factory.mktemp(name)
        make(found[name])
    return found


def kept(pipe):
    """The kernels of eight bits by component."""
    return {
        name: [leaf for _, leaf in ordered_leaves(params) if isinstance(leaf, Quantized)]
        for name, params in pipe.params.items()
    }


def opened(folder, **options):
    pipe = diffusax.DiffusionPipeline.from_pretrained(folder, **options)
    pipe.set_progress_bar_config(disable=True)
    return pipe


CALLS = {
    "sd": {"prompt": [PROMPT, "two dogs"], "guidance_scale": 3.0},
    "flux": {"prompt": PROMPT, "guidance_scale": 2.0, **FLUX_SIZE},
    "z-image": {"prompt": PROMPT, "guidance_scale": 2.0, **Z_IMAGE_SIZE},
}


MORE = [("flux", "fp8"), ("z-image", "int8"), ("z-image", "int8_convrot"), ("sd", "fp8")]


@pytest.mark.parametrize(
    ("name", "weights"),
    [("sd", "int8"), *(slow(*x) for x in MORE)],
)
def test_they_draw_what_pytorch_draws_from_the_kernels_multiplied_out(
    folders, tmp_path, name, weights
):
    ours = opened(folders[name], weights=weights)
    plain = opened(folders[name])(**CALLS[name], seed=0, output_type="np", num_inference_steps=4)
    ours.save_pretrained(tmp_path)
    theirs = diffusers.DiffusionPipeline.from_pretrained(tmp_path)
    theirs.set_progress_bar_config(disable=True)
    Pair(theirs, ours).check(**CALLS[name])
    # What is rounded is not what was loaded.
    drawn = ours(**CALLS[name], seed=0, output_type="np", num_inference_steps=4)
    assert np.abs(drawn.images - plain.images).max() > 1e-4


def test_what_is_loaded_in_eight_bits_is_what_is_quantised_later(folders):
    loaded = opened(folders["sd"], weights="int8")
    later = opened(folders["sd"])
    before = {name: model.get_memory_footprint() for name, model in later.parts.models.items()}
    assert later.quantize("int8") is later
    assert jax.tree.structure(loaded.params) == jax.tree.structure(later.params)
    for own, other in zip(jax.tree.leaves(loaded.params), jax.tree.leaves(later.params)):
        np.testing.assert_allclose(np.asarray(own), np.asarray(other), rtol=1e-6)
    counts = {name: len(found) for name, found in kept(later).items()}
    assert counts["unet"] > 50
    assert counts["text_encoder"] > 5
    assert counts["vae"] == 0
    after = {name: model.get_memory_footprint() for name, model in later.parts.models.items()}
    assert after["vae"] == before["vae"]
    shares = [
        (sum(k.nbytes for k in found), sum(4 * k.size for k in found))
        for found in kept(later).values()
        if found
    ]
    assert all(own <= 0.32 * other for own, other in shares)


def test_components_can_be_chosen(folders):
    pipe = opened(folders["sd"], weights={"unet": "fp8"})
    assert {name: bool(found) for name, found in kept(pipe).items()} == {
        "unet": True,
        "text_encoder": False,
        "vae": False,
    }
    pipe.quantize("int8", "vae")
    assert kept(pipe)["vae"]
    assert {k.values.dtype for k in kept(pipe)["unet"]} == {np.dtype("float8_e4m3fn")}
    only = opened(folders["sd"], weights={"default": "int8", "text_encoder": None})
    assert not kept(only)["text_encoder"]
    with pytest.raises(ValueError, match="components has 'net'; those here are"):
        pipe.quantize("int8", ["net"])
    with pytest.raises(ValueError, match="weights must be one of 'int8'"):
        opened(folders["sd"], weights="int4")


def test_a_pipeline_that_shares_parameters_keeps_its_own(folders):
    pipe = opened(folders["sd"])
    other = diffusax.StableDiffusionImg2ImgPipeline.from_pipe(pipe)
    pipe.quantize()
    assert kept(pipe)["unet"]
    assert not kept(other)["unet"]


def test_dtype_and_copies_and_tables_of_parameters(folders):
    pipe = opened(folders["sd"], weights="int8", dtype="bfloat16")
    assert pipe.dtype == pipe.unet.dtype == jax.numpy.bfloat16
    size = opened(folders["sd"]).unet.num_params
    assert pipe.unet.num_params == size
    assert set(pipe.unet.state_dict()) == set(opened(folders["sd"]).unet.state_dict())
    pipe.to("float32")
    assert pipe.dtype == np.float32
    assert {k.dtype for k in kept(pipe)["unet"]} == {np.dtype("float32")}
    assert all(k.values.dtype == np.int8 for k in kept(pipe)["unet"])
    call = {**CALLS["sd"], "seed": 0, "output_type": "np", "num_inference_steps": 2}
    expected = pipe(**call).images
    for same in (copy.deepcopy(pipe), pickle.loads(pickle.dumps(pipe))):
        np.testing.assert_array_equal(same(**call).images, expected)
    parameter = dict(pipe.unet.named_parameters())["down_blocks.0.resnets.0.conv1.weight"]
    written = np.asarray(parameter) * 0.5
    parameter.copy_(written)
    assert isinstance(parameter.value, Quantized)
    np.testing.assert_allclose(parameter.numpy(), written, atol=1e-3)


def test_turning_a_knob_compiles_nothing_and_saved_programs_are_for_eight_bits(folders, tmp_path):
    pipe = opened(folders["sd"], weights="int8")
    call = {"prompt": PROMPT, "seed": 0, "output_type": "np", "num_inference_steps": 2}
    expected = pipe(**call, guidance_scale=3.0).images
    with compiled_programs() as names:
        pipe(**call, guidance_scale=4.0)
        opened(folders["sd"], weights="int8")(**call, guidance_scale=2.0)
    assert not names
    pipe.compile((1,), guidance_scale=3.0)
    assert len(pipe.save_compiled(tmp_path)) >= 3
    forget_executables()
    again = opened(folders["sd"], weights="int8")
    assert again.load_compiled(tmp_path) >= 3
    with compiled_programs() as names:
        np.testing.assert_array_equal(again(**call, guidance_scale=3.0).images, expected)
    assert not [name for name in names if "denoise" in name or "encode" in name]
    report = again.memory()
    plain = opened(folders["sd"]).memory()
    assert report["parameters"]["unet"] < 0.4 * plain["parameters"]["unet"]


def test_adapters_in_calls_and_merged(folders):
    pipe = opened(folders["sd"], weights="int8")
    dense = opened(folders["sd"])
    dense.unet.params = jax.tree.map(np.asarray, pipe.unet.params, is_leaf=is_kernel)
    dense.text_encoder.params = jax.tree.map(
        np.asarray, pipe.text_encoder.params, is_leaf=is_kernel
    )
    style = random_adapter(pipe.parts.networks["unet"], "unet", 4)
    for one in (pipe, dense):
        one.add_adapter("style", style.components)
        one.set_adapters("style", 0.7)
    call = {**CALLS["sd"], "seed": 0, "output_type": "np", "num_inference_steps": 2}
    drawn = pipe(**call).images
    np.testing.assert_allclose(drawn, dense(**call).images, atol=1e-4)
    before = jax.tree.map(np.asarray, pipe.params)
    pipe.fuse_lora()
    assert kept(pipe)["unet"]
    # A sum is rounded to eight bits again.
    assert 1e-5 < np.abs(pipe(**call).images - drawn).max() < 0.2
    pipe.unfuse_lora()
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, pipe.params), before)


def is_kernel(leaf):
    return isinstance(leaf, Quantized)


def test_a_running_batch_draws_what_each_call_alone_does(folders):
    pipe = opened(folders["sd"], weights="int8")
    call = {"num_inference_steps": 3, "guidance_scale": 3.0, "output_type": "np"}
    expected = [pipe("a frog", seed=i, **call).images[0] for i in range(2)]
    with diffusax.RunningBatch(pipe, smallest=4) as batch:
        futures = [batch.submit("a frog", seed=i, **call) for i in range(2)]
        found = [future.result(120) for future in futures]
    for own, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(own.images[0], other, atol=1e-4)


def test_shapes_of_absent_devices_are_those_of_the_parameters(folders):
    pipe = opened(folders["sd"], weights="int8", dtype="bfloat16")
    shapes = ahead.shapes_only(
        diffusax.DiffusionPipeline, folders["sd"], dtype="bfloat16", weights="int8"
    )
    for name in ("unet", "text_encoder", "vae"):
        own, other = pipe.params[name], shapes.params[name]
        assert jax.tree.structure(own) == jax.tree.structure(other)
        pairs = zip(jax.tree.leaves(own), jax.tree.leaves(other), strict=True)
        assert all((x.shape, x.dtype) == (y.shape, y.dtype) for x, y in pairs)


@pytest.mark.parametrize("name", ["flux", slow("sd"), slow("z-image")])
def test_meshes_draw_what_one_device_does(folders, name):
    assert run_on_devices(RUNS / "quantized_on_mesh.py", folders[name], name)


@pytest.mark.slow
def test_qwen_image_and_its_language_model(tmp_path):
    qwen_image_pipeline(tmp_path / "in")
    ours = opened(tmp_path / "in", weights="int8")
    assert min(len(kept(ours)[name]) for name in ("transformer", "text_encoder")) > 10
    ours.save_pretrained(tmp_path / "out")
    theirs = diffusers.DiffusionPipeline.from_pretrained(tmp_path / "out")
    theirs.set_progress_bar_config(disable=True)
    Pair(theirs, ours).check(prompt=PROMPT, height=32, width=32)


def test_a_model_loaded_alone_goes_into_a_pipeline(folders):
    model = diffusax.UNet2DConditionModel.from_pretrained(
        folders["sd"], subfolder="unet", weights="int8"
    )
    assert any(isinstance(leaf, Quantized) for _, leaf in ordered_leaves(model.params))
    pipe = opened(folders["sd"], unet=model)
    assert kept(pipe)["unet"]
    assert not kept(pipe)["text_encoder"]


@pytest.fixture(scope="module")
def wide():
    """A transformer whose matrices are wide enough for all encodings."""
    return flux_transformer(attention_head_dim=32, axes_dims_rope=(8, 12, 12))


@pytest.mark.parametrize("kind", [*EIGHT_BITS[:1], *map(slow, EIGHT_BITS[1:7]), *EIGHT_BITS[7:]])
def test_what_a_file_has_in_eight_bits_stays_so(wide, tmp_path, kind):
    wide.save_config(tmp_path)
    stored, expected = encoded(wide.state_dict(), kind)
    save_file(stored, tmp_path / "diffusion_pytorch_model.safetensors")
    found = diffusax.FluxTransformer2DModel.from_pretrained(tmp_path, weights="file")
    kernels = {
        checkpoint_name(path): leaf
        for path, leaf in ordered_leaves(found.params)
        if isinstance(leaf, Quantized)
    }
    assert set(kernels) == {n for n, x in stored.items() if n in expected and x.itemsize == 1}
    shares = {kernel.nbytes / (2 * kernel.size) for kernel in kernels.values()}
    assert max(shares) < (0.64 if "int8" in kind or kind in ("fp8r", "ConvRot") else 0.55)
    for name, kernel in kernels.items():
        np.testing.assert_allclose(np.asarray(kernel).T, expected[name], atol=1e-6)
    given = flux_inputs()
    reference = copy.deepcopy(wide)
    reference.load_state_dict(expected)
    actual = found(**{k: np.asarray(v) for k, v in flux_arguments(given).items()}).sample
    np.testing.assert_allclose(actual, upstream_flux(reference, given), atol=1e-5)


def test_what_stands_in_a_table_is_multiplied_out_or_rounded(wide, tmp_path):
    wide.save_config(tmp_path)
    stored, expected = encoded(wide.state_dict(), "nf4")
    save_file(stored, tmp_path / "diffusion_pytorch_model.safetensors")
    name = "transformer_blocks.0.attn.to_q.weight"
    for weights in ("file", "int8"):
        found = diffusax.FluxTransformer2DModel.from_pretrained(tmp_path, weights=weights)
        kernel = found.params["transformer_blocks"]["0"]["attn"]["to_q"]["kernel"]
        assert isinstance(kernel, Quantized) == (weights == "int8")
        error = np.abs(np.asarray(kernel).T - expected[name].numpy()).max()
        assert (0 < error < 0.01) if weights == "int8" else error == 0


@pytest.mark.parametrize(
    ("weights", "kind"), [("int8", "ConvRot"), ("int8_convrot", "ConvRot"), ("fp8", "fp8r")]
)
def test_eight_bits_of_the_kind_that_is_asked_for_are_not_rounded_again(
    wide, tmp_path, weights, kind
):
    wide.save_config(tmp_path)
    stored, expected = encoded(wide.state_dict(), kind)
    save_file(stored, tmp_path / "diffusion_pytorch_model.safetensors")
    found = diffusax.FluxTransformer2DModel.from_pretrained(tmp_path, weights=weights)
    kernel = found.params["transformer_blocks"]["0"]["attn"]["to_q"]["kernel"]
    name = "transformer_blocks.0.attn.to_q.weight"
    np.testing.assert_allclose(np.asarray(kernel).T, expected[name], atol=1e-6)
