import json
import os
import shutil
import subprocess
import sys
import textwrap
import warnings

import diffusers
import jax
import ml_dtypes
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.effort import first
from support.tiny import (
    TEXT,
    UNET,
    build_stable_diffusion,
    build_stable_diffusion_xl,
    randomize,
)
from support.tiny_language import T5

import diffusax
from diffusax.checkpoints import save_network
from diffusax.checkpoints.keywords import stored_as
from diffusax.checkpoints.tree import params_to_tensors
from diffusax.models import (
    AutoencoderTiny,
    AutoencoderTinyConfig,
    UNet2DConditionConfig,
    UNet2DConditionModel,
)
from diffusax.networks import initialize, load_network

WEIGHTS = "diffusion_pytorch_model.safetensors"


@pytest.fixture
def folder(tmp_path):
    randomize(diffusers.UNet2DConditionModel(**UNET["sd1"])).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_load_and_save_gives_the_same_bytes_and_opens_in_diffusers(folder, dtype):
    before = {k: v.to(dtype) for k, v in load_file(folder / WEIGHTS).items()}
    save_file(before, folder / WEIGHTS)
    save_network(load_network(folder), folder / "out")
    after = load_file(folder / "out" / WEIGHTS)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[k], after[k]) and after[k].dtype == dtype for k in before)
    upstream = diffusers.UNet2DConditionModel.from_pretrained(folder / "out", torch_dtype=dtype)
    assert all(torch.equal(upstream.state_dict()[k], before[k]) for k in before)


def test_network_made_here_opens_in_diffusers(tmp_path):
    network = initialize(UNet2DConditionModel, UNet2DConditionConfig(**UNET["sd2"]))
    save_network(network, tmp_path)
    upstream, report = diffusers.UNet2DConditionModel.from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert upstream.config.block_out_channels == [32, 64]


@pytest.mark.parametrize("variant", [None, "fp16"])
def test_shards_and_variants_are_written_and_read(folder, variant):
    network = load_network(folder)
    out = folder / "out"
    save_network(network, out, variant=variant, max_shard_size=2**20)
    assert len(list(out.glob("*.safetensors"))) > 2
    assert_same(load_network(out, variant=variant), network)
    upstream = diffusers.UNet2DConditionModel.from_pretrained(out, variant=variant)
    expected = load_file(folder / WEIGHTS)
    assert all(torch.equal(upstream.state_dict()[k], expected[k]) for k in expected)


def test_shards_of_diffusers_are_read(folder):
    unet = diffusers.UNet2DConditionModel.from_pretrained(folder)
    unet.save_pretrained(folder / "out", max_shard_size="1MB", variant="fp16")
    assert_same(load_network(folder / "out", variant="fp16"), load_network(folder))
    with pytest.raises(ValueError, match="variant='fp16'"):
        load_network(folder / "out")


@pytest.mark.parametrize(
    ("index", "shard"),
    [
        ("{}.safetensors.index.fp16.json", "{}.fp16-{}.safetensors"),
        ("{}.safetensors.fp16.index.json", "{}-{}.fp16.safetensors"),
        ("{}.fp16.safetensors.index.json", "{}-{}.fp16.safetensors"),
    ],
)
def test_every_spelling_of_shards_of_a_variant_is_read(folder, index, shard):
    """The first two are diffusers', of which it calls the second deprecated and reads it still."""
    stem, out = "diffusion_pytorch_model", folder / "out"
    unet = diffusers.UNet2DConditionModel.from_pretrained(folder)
    unet.save_pretrained(out, max_shard_size="1MB", variant="fp16")
    old = out / f"{stem}.safetensors.index.fp16.json"
    data = json.loads(old.read_text())
    old.unlink()
    for name in set(data["weight_map"].values()):
        number = name.removeprefix(f"{stem}.fp16-").removesuffix(".safetensors")
        (out / name).rename(out / shard.format(stem, number))
        data["weight_map"] = {
            key: shard.format(stem, number) if file == name else file
            for key, file in data["weight_map"].items()
        }
    (out / index.format(stem)).write_text(json.dumps(data))
    assert_same(load_network(out, variant="fp16"), load_network(folder))
    with pytest.raises(ValueError, match=r"has only the variant 'fp16'; pass variant='fp16'"):
        load_network(out)
    if "fp16.safetensors.index" not in index:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            theirs = diffusers.UNet2DConditionModel.from_pretrained(out, variant="fp16")
        assert torch.equal(theirs.conv_in.weight, unet.conv_in.weight)
    (out / index.format(stem)).unlink()
    with pytest.raises(ValueError, match=r"no index of such files|only the variant 'fp16'"):
        load_network(out)


@pytest.mark.parametrize("kind", ["UNet2DConditionModel", "CLIPTextModel"])
def test_of_a_whole_file_and_shards_the_library_says_which_is_taken(tmp_path, kind):
    """diffusers takes the shards, transformers the file."""
    if kind == "CLIPTextModel":
        text = {**TEXT, "vocab_size": 99, "max_position_embeddings": 16}
        library, model = (
            transformers,
            transformers.CLIPTextModel(transformers.CLIPTextConfig(**text)),
        )
    else:
        library, model = diffusers, diffusers.UNet2DConditionModel(**UNET["sd1"])
    randomize(model).save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*-of-*.safetensors"))) > 1
    whole = tmp_path / "whole"
    randomize(model, 1).save_pretrained(whole)
    (file,) = whole.glob("*.safetensors")
    shutil.copy(file, tmp_path)
    theirs = getattr(library, kind).from_pretrained(tmp_path).state_dict()
    ours = params_to_tensors(load_network(tmp_path).params)
    prefix = "" if next(iter(theirs)) in ours else "text_model."
    for name, tensor in theirs.items():
        np.testing.assert_array_equal(ours[prefix + name], tensor)


def test_the_class_in_model_index_wins_as_in_diffusers(tmp_path, caplog):
    build_stable_diffusion_xl(tmp_path)
    for name, change in {
        "text_encoder/config": {"architectures": None},
        "text_encoder_2/config": {"architectures": ["CLIPTextModel"]},
        "scheduler/scheduler_config": {"_class_name": "PNDMScheduler", "skip_prk_steps": True},
    }.items():
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
    theirs = diffusers.StableDiffusionXLPipeline.from_pretrained(tmp_path)
    ours = diffusax.StableDiffusionXLPipeline.from_pretrained(tmp_path)
    assert ours.text_encoder.class_name == type(theirs.text_encoder).__name__
    assert ours.text_encoder_2.class_name == type(theirs.text_encoder_2).__name__
    assert type(ours.scheduler).__name__ == type(theirs.scheduler).__name__
    ours.scheduler.set_timesteps(7)
    theirs.scheduler.set_timesteps(7)
    np.testing.assert_allclose(ours.scheduler.sigmas, theirs.scheduler.sigmas, rtol=1e-5)
    for name, found, taken in (
        ("text_encoder_2/config.json", "CLIPTextModel", "CLIPTextModelWithProjection"),
        ("scheduler/scheduler_config.json", "PNDMScheduler", "EulerDiscreteScheduler"),
    ):
        assert f"{name} is of {found}, and model_index.json lists {taken}, which" in caplog.text
    assert "text_encoder/config.json" not in caplog.text


def test_the_encoder_of_a_whole_t5_is_read(tmp_path):
    config = transformers.T5Config(**T5)
    whole = randomize(transformers.T5ForConditionalGeneration(config))
    whole.save_pretrained(tmp_path)
    model = diffusax.T5EncoderModel.from_pretrained(tmp_path)
    theirs = transformers.T5EncoderModel.from_pretrained(tmp_path)
    ids = np.arange(12).reshape(1, 12)
    with torch.no_grad():
        expected = theirs(torch.tensor(ids)).last_hidden_state
    np.testing.assert_allclose(model(ids).last_hidden_state, expected, atol=1e-4)


def test_dtype_is_a_name_or_a_dtype(folder):
    for dtype in ("bfloat16", jax.numpy.bfloat16, ml_dtypes.bfloat16):
        assert load_network(folder, dtype=dtype).dtype == jax.numpy.bfloat16
    for wrong in ("float31", "int8", 3):
        with pytest.raises(ValueError, match="dtype must be a floating-point type"):
            load_network(folder, dtype=wrong)


def test_all_keys_that_do_not_fit_are_in_one_error(folder):
    tensors = load_file(folder / WEIGHTS)
    del tensors["conv_in.bias"], tensors["conv_out.weight"]
    tensors["conv_in.weight"] = torch.zeros(32, 9, 3, 3)
    tensors["extra.weight"] = torch.zeros(1)
    save_file(tensors, folder / WEIGHTS)
    with pytest.raises(ValueError, match=WEIGHTS) as error:
        load_network(folder)
    for part in (
        "2 missing: conv_in.bias, conv_out.weight",
        "1 unexpected: extra.weight",
        "1 misshapen: conv_in.weight (has (32, 9, 3, 3), the config asks for (32, 4, 3, 3))",
    ):
        assert part in str(error.value)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.uint8, torch.int64, torch.bool])
@pytest.mark.parametrize("cast", [None, "float32"])
def test_weights_that_are_no_floating_point_numbers_are_refused(folder, dtype, cast):
    tensors = load_file(folder / WEIGHTS)
    tensors["conv_in.weight"] = tensors["conv_in.weight"].to(dtype)
    save_file(tensors, folder / WEIGHTS)
    with pytest.raises(ValueError, match=r"conv_in.weight holds .*, not floating-point numbers"):
        load_network(folder, dtype=cast)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_8_bit_floats_are_read_into_a_wider_dtype_only(folder, dtype):
    tensors = load_file(folder / WEIGHTS)
    tensors["conv_in.weight"] = tensors["conv_in.weight"].to(dtype)
    save_file(tensors, folder / WEIGHTS)
    with pytest.raises(ValueError, match="in which networks do not compute; give a dtype"):
        load_network(folder)
    params = load_network(folder, dtype="float32").params
    expected = tensors["conv_in.weight"].float().permute(2, 3, 1, 0)
    np.testing.assert_array_equal(params["conv_in"]["kernel"], expected)


def test_a_tensor_that_two_shards_hold_is_refused(folder):
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    save_file(tensors, folder / "a.safetensors")
    save_file({"conv_in.bias": tensors["conv_in.bias"]}, folder / "b.safetensors")
    weight_map = {**dict.fromkeys(tensors, "a.safetensors"), "conv_in.bias": "b.safetensors"}
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ValueError, match=r"1 there twice: conv_in.bias"):
        load_network(folder)


def test_an_error_names_fifteen_tensors_at_most(folder):
    names = [f"extra.{i}" for i in range(30)]
    tensors = load_file(folder / WEIGHTS) | {name: torch.zeros(1) for name in names}
    save_file(tensors, folder / WEIGHTS)
    with pytest.raises(ValueError, match=r"30 unexpected: extra.0, .* and 15 more$") as error:
        load_network(folder)
    assert str(error.value).count("extra.") == 15


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        (None, "has no weight_map"),
        ({}, "has no weight_map"),
        (["a.safetensors"], "has no weight_map"),
        ({"a": 3}, "names 3, which is no safetensors file beside it"),
        ({"a": ["b"]}, r"names \['b'\], which is no safetensors file beside it"),
        ({"a": "../a.safetensors"}, "names '../a.safetensors', which is no safetensors file"),
        ({"a": "config.json"}, "names 'config.json', which is no safetensors file"),
    ],
)
def test_a_broken_index_is_one_clear_sentence(folder, weight_map, message):
    (folder / WEIGHTS).unlink()
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ValueError, match=message):
        load_network(folder)


def test_a_variant_that_is_not_there_is_refused(folder):
    with pytest.raises(ValueError, match="has no weights of variant='fp16'"):
        load_network(folder, variant="fp16")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_pipeline_saved_in_half_precision_draws_in_diffusers_without_arguments(tmp_path, dtype):
    """Transformers loads what the config says, or else the file's dtype; diffusers float32."""
    build_stable_diffusion(tmp_path)
    for name in ("text_encoder", "unet", "vae"):
        save_network(load_network(tmp_path, subfolder=name, dtype=dtype), tmp_path / name)
    theirs = diffusers.StableDiffusionPipeline.from_pretrained(tmp_path)
    theirs.set_progress_bar_config(disable=True)
    image = theirs("a cat", num_inference_steps=1, output_type="np").images[0]
    assert np.isfinite(image).all()
    for name in ("text_encoder", "unet", "vae"):
        assert load_network(tmp_path / name).dtype == dtype


@pytest.mark.skipif(sys.platform == "win32", reason="limits the size of files")
@pytest.mark.parametrize(("limit", "file"), [(2**16, WEIGHTS), (10, "config.json")])
def test_a_full_disk_is_one_sentence_and_leaves_no_part(folder, tmp_path, limit, file):
    out = tmp_path / "out"
    program = f"""
        import resource
        from diffusax.checkpoints import save_network
        from diffusax.networks import load_network
        model = load_network({str(folder)!r})
        resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
        try:
            save_network(model, {str(out)!r})
        except OSError as error:
            print(error)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith(f"{out / file} could not be written (")
    assert done.stdout.count("\n") == 1
    assert not list(out.glob("*.partial"))
    assert not (out / file).exists()


def broken(folder, what):
    weights, config = folder / WEIGHTS, folder / "config.json"
    match what:
        case "truncated":
            weights.write_bytes(weights.read_bytes()[:-100])
        case "corrupt":
            weights.write_bytes(b"\xff" * 64 + weights.read_bytes()[64:])
        case "empty":
            weights.write_bytes(b"")
        case "no weights":
            weights.unlink()
        case "pickle":
            weights.rename(folder / "diffusion_pytorch_model.bin")
        case "no config":
            config.unlink()
        case "bad config":
            config.write_text("{")
        case "unknown class":
            config.write_text(json.dumps({**json.loads(config.read_text()), "_class_name": "X3"}))
        case "missing shard":
            index = {"weight_map": {"conv_in.weight": "shard-1.safetensors"}}
            weights.unlink()
            (folder / f"{WEIGHTS}.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("truncated", f"{WEIGHTS} is not a whole safetensors file"),
        ("corrupt", f"{WEIGHTS} is not a whole safetensors file"),
        ("empty", f"{WEIGHTS} is not a whole safetensors file"),
        ("no weights", "has no safetensors file"),
        ("pickle", "safe_serialization=True"),
        ("no config", "config.json is missing"),
        ("bad config", "config.json is not valid JSON"),
        ("unknown class", "asks for X3"),
        ("missing shard", r"names shard-1.safetensors, which is missing"),
    ],
)
def test_broken_folders_are_one_clear_sentence(folder, what, message):
    broken(folder, what)
    with pytest.raises(ValueError, match=message) as error:
        load_network(folder)
    assert "\n" not in str(error.value)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("stored", "loaded", "weights"),
    [
        *first(
            [
                ("float32", "float32", None),
                ("float16", "float32", None),
                ("float32", "bfloat16", None),
            ]
        ),
        ("float32", "bfloat16", "fp8"),
    ],
)
def test_peak_memory_while_loading_is_little_more_than_the_parameters(
    tmp_path, stored, loaded, weights
):
    # What loading needs besides comes in with the small one.
    for folder, width in (("small", 32), ("large", 384)):
        config = UNet2DConditionConfig(
            block_out_channels=(width,) * 4, cross_attention_dim=768, layers_per_block=2
        )
        save_network(initialize(UNet2DConditionModel, config, dtype=stored), tmp_path / folder)
    program = f"""
        import threading, time
        import jax
        from diffusax.networks import load_network
        options = {{"dtype": {loaded!r}, "weights": {weights!r}}}
        load_network({str(tmp_path / "small")!r}, **options)

        def resident():
            for line in open("/proc/self/status"):
                if line.startswith("VmRSS"):
                    return int(line.split()[1]) * 1024

        peak = before = resident()
        done = False

        def watch():
            global peak
            while not done:
                peak = max(peak, resident())
                time.sleep(0.002)

        thread = threading.Thread(target=watch)
        thread.start()
        network = load_network({str(tmp_path / "large")!r}, **options)
        jax.block_until_ready(network.params)
        done = True
        thread.join()
        size = sum(x.nbytes for x in jax.tree.leaves(network.params))
        print((peak - before) / size, size / 2**20)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True
    )
    ratio, mebibytes = map(float, done.stdout.split())
    assert mebibytes > (80 if weights else 200)
    assert ratio < (1.2 if weights else 1.1)


@pytest.mark.parametrize("weights", [None, "int8", "fp8"])
def test_tensors_that_are_read_in_parts_are_the_same(folder, monkeypatch, weights):
    whole = load_network(folder, weights=weights).params
    monkeypatch.setattr("diffusax.checkpoints.tree._AT_ONCE", 1000)
    monkeypatch.setattr("diffusax.models.quantized._PART", 1000)
    jax.tree.map(np.testing.assert_array_equal, load_network(folder, weights=weights).params, whole)


def test_pipeline_folder_that_is_not_ours_is_one_clear_sentence(tmp_path):
    build_stable_diffusion(tmp_path / "m")
    index = tmp_path / "m" / "model_index.json"
    data = json.loads(index.read_text())
    index.write_text(json.dumps({**data, "_class_name": "SanaPipeline"}))
    with pytest.raises(ValueError, match="asks for SanaPipeline"):
        diffusax.DiffusionPipeline.from_pretrained(tmp_path / "m")
    index.write_text(json.dumps({k: v for k, v in data.items() if k != "vae"}))
    with pytest.raises(ValueError, match="has no vae"):
        diffusax.DiffusionPipeline.from_pretrained(tmp_path / "m")
    for value in ("None", {"a": 1}, ["transformers"], ["transformers", ["CLIPTextModel"]]):
        index.write_text(json.dumps({**data, "text_encoder": value}))
        with pytest.raises(ValueError, match="text_encoder must be a list of library and class"):
            diffusax.DiffusionPipeline.from_pretrained(tmp_path / "m")
    index.write_text(json.dumps({**data, "_class_name": ["StableDiffusionPipeline"]}))
    with pytest.raises(ValueError, match="_class_name must be a string"):
        diffusax.DiffusionPipeline.from_pretrained(tmp_path / "m")
    index.unlink()
    with pytest.raises(ValueError, match=r"model_index.json is missing"):
        diffusax.DiffusionPipeline.from_pretrained(tmp_path / "m")


def test_a_tokenizer_of_another_text_encoder_is_one_clear_sentence(tmp_path):
    """Token ids beyond the embedding would draw something else without a word."""
    folder = tmp_path / "m"
    build_stable_diffusion(folder, text={"vocab_size": 49000})
    with pytest.raises(ValueError, match=r"m: the tokenizer gives .* they do not belong together"):
        diffusax.DiffusionPipeline.from_pretrained(folder)


@pytest.mark.parametrize("mixed", [False, True])
def test_components_without_the_variant_are_taken_as_they_are(tmp_path, mixed):
    build_stable_diffusion(tmp_path, variant="fp16")
    if mixed:
        vae = tmp_path / "vae"
        (vae / WEIGHTS.replace("model.", "model.fp16.")).rename(vae / WEIGHTS)
    diffusax.DiffusionPipeline.from_pretrained(tmp_path, variant="fp16")
    with pytest.raises(ValueError, match="has no weights of variant='ema'; it has 'fp16'"):
        diffusax.DiffusionPipeline.from_pretrained(tmp_path, variant="ema")
    with pytest.raises(ValueError, match="has only the variant 'fp16'; pass variant='fp16'"):
        diffusax.DiffusionPipeline.from_pretrained(tmp_path)


def assert_same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a.params, b.params)
    assert a.config == b.config


def test_files_can_be_read_by_whom_the_umask_allows(tmp_path):
    config = AutoencoderTinyConfig(
        encoder_block_out_channels=(4,),
        decoder_block_out_channels=(4,),
        num_encoder_blocks=(1,),
        num_decoder_blocks=(1,),
    )
    before = os.umask(0o027)
    try:
        save_network(initialize(AutoencoderTiny, config), tmp_path)
    finally:
        os.umask(before)
    assert {file.stat().st_mode & 0o777 for file in tmp_path.iterdir()} == {0o640}


def test_configs_of_quantisation_are_understood():
    eight = diffusers.BitsAndBytesConfig(load_in_8bit=True)
    whole = diffusers.PipelineQuantizationConfig
    kwargs = {"load_in_8bit": True}
    cases = {
        "int8": [eight, eight.to_dict(), transformers.BitsAndBytesConfig(load_in_8bit=True)],
        "file": [diffusers.GGUFQuantizationConfig(compute_dtype=torch.bfloat16)],
    }
    for kind, configs in cases.items():
        assert [stored_as(config) for config in configs] == [kind] * len(configs)
    assert stored_as({"quant_method": "quanto", "weights_dtype": "float8"}) == "fp8"
    assert stored_as({"quant_method": "torchao", "quant_type": "int8_weight_only"}) == "int8"
    backend = whole(quant_backend="bitsandbytes_8bit", quant_kwargs=kwargs)
    assert stored_as(backend) == {"default": "int8"}
    some = whole(
        quant_backend="bitsandbytes_8bit", quant_kwargs=kwargs, components_to_quantize=["unet"]
    )
    assert stored_as(some) == stored_as(whole(quant_mapping={"unet": eight})) == {"unet": "int8"}
    four = diffusers.BitsAndBytesConfig(load_in_4bit=True)
    for config in (four, {"quant_method": "torchao", "quant_type": "int4wo"}, {}):
        with pytest.raises(ValueError, match="must ask for weights of eight bits"):
            stored_as(config)
