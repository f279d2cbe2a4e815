"""Single files: diffusers reads ours, they come back as they were, broken ones are a sentence."""

import functools
import json
import os
import random
import shutil
import subprocess
import sys
import textwrap

import diffusers
import jax
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from support.effort import examples, few, first
from support.single_files import hollow, model_shapes, original_shapes, packed

import diffusax
from diffusax.checkpoints import read_model_index, resolve
from diffusax.checkpoints.converting import pack_single_file, unpack_single_file
from diffusax.checkpoints.networks import read_network
from diffusax.checkpoints.single_file import Reading, configs, opened_view, read_contents
from diffusax.checkpoints.tree import fitted, params_to_tensors
from diffusax.checkpoints.weight_file import find_file
from diffusax.networks import load_network
from diffusax.pipelines.components.loading import class_for
from diffusax.training.recipes.base_model import BaseModel

KINDS = [
    ("sd", "a"),
    ("sd", "b"),
    ("sd-inpaint", "a"),
    ("sd-instruct", "a"),
    ("lcm", "a"),
    ("xl", "a"),
    ("xl", "b"),
    ("xl-refiner", "a"),
    ("xl-inpaint", "a"),
    ("xl-cosxl", "a"),
]


@pytest.fixture(scope="module")
def files(tmp_path_factory, tiny_checkpoints):
    """A function that gives the folder and the single file of a tiny checkpoint."""
    root = tmp_path_factory.mktemp("single")

    def find(kind, variation="a"):
        folder, _ = tiny_checkpoints.pipeline(kind, variation)
        return folder, packed(folder, root / f"{kind}-{variation}.safetensors")

    return find


def same_tensors(params, folder):
    """Asserts that parameters are those of the files in a folder, bit for bit."""
    ours = params_to_tensors(params)
    network = read_network(folder)
    stored = [load_file(file) for file in folder.glob("*.safetensors")]
    found = fitted(network.module_class, network.shapes, stored, where="a test")
    assert ours.keys() == found.keys()
    for name, tensor in ours.items():
        assert np.array_equal(tensor, found[name].reshape(tensor.shape)), name


# Tiny models: diffusers reads our files, and we read them back.


# diffusers does not know the name of the layer for an LCM's guidance scale.
THEIRS = [case for case in KINDS if case[0] != "lcm"]


@pytest.mark.parametrize(("kind", "variation"), few(THEIRS, ("xl", "a")))
def test_diffusers_reads_our_files_bit_for_bit(files, kind, variation):
    folder, path = files(kind, variation)
    name, listed, _ = read_model_index(folder)
    read = getattr(diffusers, name).from_single_file(
        str(path), config=str(folder), local_files_only=True
    )
    whole = diffusers.DiffusionPipeline.from_pretrained(folder, safety_checker=None)
    for component in ("unet", "vae", "text_encoder", "text_encoder_2"):
        if component in listed:
            expected = getattr(whole, component).state_dict()
            actual = getattr(read, component).state_dict()
            assert expected.keys() == actual.keys()
            assert all(torch.equal(expected[key], actual[key]) for key in expected)


@pytest.mark.parametrize(("kind", "variation"), few(KINDS, ("sd", "b"), ("xl", "a")))
def test_a_single_file_is_the_folder_that_it_was_made_of(files, kind, variation):
    folder, path = files(kind, variation)
    read = diffusax.DiffusionPipeline.from_single_file
    pipe = read(path, config=folder)
    expected = diffusax.DiffusionPipeline.from_pretrained(folder)
    shared = {name: value for name, value in pipe.components.items() if name != "scheduler"}
    # Every sampler of these checkpoints knows both.
    own = expected.scheduler.prediction_type
    other = "epsilon" if own == "v_prediction" else "v_prediction"
    changed = read(path, config=folder, prediction_type=other, **shared)
    assert changed.scheduler.prediction_type == other
    assert changed.unet.params is pipe.unet.params
    assert type(pipe) is type(expected)
    assert pipe.scheduler == expected.scheduler
    for name, params in pipe.params.items():
        same_tensors(params, folder / name)


@pytest.mark.parametrize(("kind", "variation"), few(KINDS, ("sd", "b"), ("xl", "a")))
def test_there_and_back_gives_the_same_bits(files, tmp_path, kind, variation):
    folder, path = files(kind, variation)
    # Attention's layers are convolutions there; a model that predicts v is marked.
    tensors = load_file(path)
    assert tensors["first_stage_model.decoder.mid.attn_1.q.weight"].shape[2:] == (1, 1)
    assert ("v_pred" in tensors) == (variation == "b")
    unpack_single_file(path, tmp_path / "folder", Reading(config=folder))
    for name in ("unet", "vae", "text_encoder", "text_encoder_2"):
        if (folder / name).is_dir():
            (file,) = (tmp_path / "folder" / name).glob("*.safetensors")
            same_tensors(load_network(tmp_path / "folder" / name).params, folder / name)
            assert file.name in [f.name for f in (folder / name).iterdir()]
    pack_single_file(tmp_path / "folder", tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == path.read_bytes()
    whole = diffusers.DiffusionPipeline.from_pretrained(tmp_path / "folder", safety_checker=None)
    assert type(whole).__name__ == read_model_index(folder)[0]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_stays_and_eight_bits_are_cast(files, tmp_path, dtype):
    folder, path = files("sd")
    half = tmp_path / "half.safetensors"
    pack_single_file(folder, half, dtype=dtype)
    unet = diffusax.UNet2DConditionModel.from_single_file(half, config=folder, dtype="auto")
    assert unet.dtype == dtype
    whole = diffusax.UNet2DConditionModel.from_single_file(path, config=folder, dtype=dtype)
    assert jax.tree.all(jax.tree.map(np.array_equal, unet.params, whole.params))
    kind = {"float16": torch.float8_e4m3fn, "bfloat16": torch.float8_e5m2}[dtype]
    from safetensors.torch import load_file, save_file

    eight = {name: x.to(kind) for name, x in load_file(path).items()}
    save_file(eight, tmp_path / "eight.safetensors")
    options = {"config": folder, "torch_dtype": torch.float32}
    unet = diffusax.UNet2DConditionModel.from_single_file(tmp_path / "eight.safetensors", **options)
    expected = eight["model.diffusion_model.out.2.weight"].float().numpy()
    assert np.array_equal(params_to_tensors(unet.params)["conv_out.weight"], expected)
    with pytest.raises(ValueError, match="in which networks do not compute; give a dtype"):
        diffusax.UNet2DConditionModel.from_single_file(
            tmp_path / "eight.safetensors", config=folder, dtype="auto"
        )


def test_networks_are_read_from_whole_models_and_alone(files, tmp_path, tiny_checkpoints, caplog):
    folder, path = files("sd")
    # diffusers knows the names of a hint of four levels only, which "b" has.
    control, _ = tiny_checkpoints.controlnet("sd", "b")
    classes = {
        "unet": (diffusax.UNet2DConditionModel, folder / "unet"),
        "vae": (diffusax.AutoencoderKL, folder / "vae"),
        "controlnet": (diffusax.ControlNetModel, control),
    }
    for name, (cls, source) in classes.items():
        alone = packed(source, tmp_path / f"{name}.safetensors")
        same_tensors(cls.from_single_file(alone, config=source).params, source)
        # diffusers reads it, and its own layout may be one file, too.
        reference = getattr(diffusers, cls.__name__).from_single_file(
            str(alone), config=str(source), local_files_only=True
        )
        expected = load_file(next(source.glob("*.safetensors")))
        actual = reference.state_dict()
        assert actual.keys() == expected.keys()
        assert all(np.array_equal(actual[key].numpy(), expected[key]) for key in expected)
        own = shutil.copy(next(source.glob("*.safetensors")), tmp_path / f"own-{name}.safetensors")
        same_tensors(cls.from_single_file(own, config=source).params, source)
        if name != "controlnet":
            same_tensors(cls.from_single_file(path, config=folder).params, source)
    vae = original_shapes(configs.AUTOENCODER)
    alone = hollow(tmp_path / "full.safetensors", vae)
    with opened_view(alone, Reading(), "vae") as view:
        assert read_network(view).config.scaling_factor == 0.18215
    assert "for SDXL's pass scaling_factor=0.13025" in caplog.text
    with opened_view(alone, Reading(changes=(("scaling_factor", 0.13025),)), "vae") as view:
        assert read_network(view).config.scaling_factor == 0.13025


def test_averaged_parameters_are_read_on_request(files, tmp_path):
    folder, path = files("sd")
    tensors = load_file(path)
    prefix = "model.diffusion_model."
    for name in [name for name in tensors if name.startswith(prefix)]:
        flat = "model_ema.diffusion_model" + name.removeprefix(prefix).replace(".", "")
        tensors[flat] = tensors[name] + 1
    tensors["model_ema.decay"] = np.float32(0.9999).reshape(1)
    save_file(tensors, tmp_path / "both.safetensors")
    read = diffusax.UNet2DConditionModel.from_single_file
    plain = read(tmp_path / "both.safetensors", config=folder)
    same_tensors(plain.params, folder / "unet")
    for option in ("use_ema", "extract_ema"):
        averaged = read(tmp_path / "both.safetensors", config=folder, **{option: True})
        moved = jax.tree.map(lambda x: x + 1, plain.params)
        assert jax.tree.all(jax.tree.map(np.array_equal, averaged.params, moved))
    with pytest.raises(ValueError, match="holds no averaged parameters"):
        read(path, config=folder, use_ema=True)


@pytest.mark.slow
def test_continuous_noise_levels_are_those_of_the_file(files, tmp_path):
    folder, _ = files("xl-cosxl")
    copy = shutil.copytree(folder, tmp_path / "folder")
    levels = {"sigma_min": 0.002, "sigma_max": 120.0, "sigma_data": 1.0}
    scheduler = diffusers.EDMEulerScheduler(
        **levels, prediction_type="v_prediction", sigma_schedule="exponential"
    )
    scheduler.save_pretrained(copy / "scheduler")
    index = json.loads((copy / "model_index.json").read_text())
    index["scheduler"] = ["diffusers", "EDMEulerScheduler"]
    (copy / "model_index.json").write_text(json.dumps(index))
    pack_single_file(copy, tmp_path / "edm.safetensors")
    contents = read_contents(tmp_path / "edm.safetensors")
    assert contents.has_continuous_levels
    names = ("edm_vpred.sigma_max", "edm_vpred.sigma_min")
    found = [load_file(tmp_path / "edm.safetensors")[name] for name in names]
    assert np.array_equal(found, np.float32([120, 0.002]))
    written = configs.scheduler_config(contents, None, (0.002, 120.0))
    ours = diffusax.DiffusionPipeline.from_single_file(tmp_path / "edm.safetensors", config=copy)
    read = type(ours.scheduler).from_config(written)
    assert read == ours.scheduler


# Files by their paths, and what is wrong with others.


def test_a_path_opens_where_a_folder_would(tmp_path):
    path = hollow(tmp_path / "model.safetensors", model_shapes("sd1"))
    folder = resolve(path)
    assert folder == resolve(str(path))
    assert read_network(resolve(path, subfolder="unet")).config.cross_attention_dim == 768
    assert folder.name == path.name
    # So do training, and commands that compile without parameters.
    base = BaseModel.open(str(path))
    assert (base.default_size, base.factor, base.denoiser) == (512, 8, "unet")
    assert base.tokenize("a cat")["input_ids"].shape == (77,)
    assert class_for(diffusax.DiffusionPipeline, folder) is diffusax.StableDiffusionPipeline
    control = hollow(tmp_path / "control.safetensors", {"input_hint_block.0.weight": (16, 3, 3, 3)})
    with pytest.raises(ValueError, match="attends to texts of width None"):
        resolve(control)
    with pytest.raises(ValueError, match="holds no controlnet"):
        resolve(path, subfolder="controlnet")


LORA = "a LoRA; give it to load_lora_weights"
OTHERS = {
    "lora_unet_down_blocks_0.lora_down.weight": LORA,
    "unet.down_blocks.0.attn1.to_q.lora_A.weight": LORA,
    "double_blocks.0.img_attn.proj.weight": "the Flux family",
    "model.diffusion_model.joint_blocks.0.x": "Stable Diffusion 3",
    "emb_params": "a textual inversion",
    "ip_adapter.1.to_k_ip.weight": "an IP-Adapter",
    "x": "tensors such as 'x', and no UNet, ControlNet or autoencoder",
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_files_are_told_apart(tmp_path, name):
    path = hollow(tmp_path / "other.safetensors", {name: (1, 1)})
    with pytest.raises(ValueError, match=f"other.safetensors holds .*{OTHERS[name]}"):
        diffusax.DiffusionPipeline.from_single_file(path)


def test_mistakes_are_one_sentence(files, tmp_path):
    folder, path = files("sd")
    (tmp_path / "model.ckpt").write_bytes(b"pickle")
    tensors = load_file(path)
    save_file(
        {k: v for k, v in tensors.items() if not k.startswith("first_stage_model.")},
        tmp_path / "bare.safetensors",
    )
    pipe, xl = diffusax.DiffusionPipeline, diffusax.StableDiffusionXLPipeline
    vae = packed(folder / "vae", tmp_path / "vae.safetensors")
    cases = [
        (pipe, tmp_path / "nothing.safetensors", {}, "there is no file .*nothing.safetensors"),
        (pipe, tmp_path, {}, "is a folder; open it with from_pretrained"),
        (pipe, tmp_path / "model.ckpt", {}, "model.ckpt is not a .safetensors file, and loading"),
        (pipe, "https://example.org/a/b/c.safetensors", {}, "must be downloaded first"),
        (pipe, path, {}, "the unet attends to texts of width 32, .*pass config="),
        (pipe, path, {"config": folder, "prediction_type": "v"}, "'epsilon', 'v_prediction'"),
        (xl, path, {"config": folder}, "StableDiffusionXLPipeline is for Stable Diffusion XL; "),
        (pipe, tmp_path / "bare.safetensors", {"config": folder}, "does not hold an autoenc.*vae="),
        (pipe, vae, {}, "holds only vae, not the UNet"),
        (pipe, 3, {}, "must be a path or an address"),
        (diffusax.ControlNetModel, path, {}, "holds unet, vae, text_encoder, but not controlnet"),
        (
            diffusax.AutoencoderKL,
            path,
            {"config": folder / "unet"},
            "the config is that of a U",
        ),
    ]
    for cls, file, options, message in cases:
        with pytest.raises(ValueError, match=message) as error:
            cls.from_single_file(file, **options)
        assert "\n" not in str(error.value)
        assert "diffusax-" not in str(error.value)
    given = diffusax.AutoencoderKL.from_pretrained(folder / "vae")
    made = pipe.from_single_file(tmp_path / "bare.safetensors", config=folder, vae=given)
    same_tensors(made.vae.params, folder / "vae")


def test_a_file_of_the_hub_is_looked_for_in_the_cache(tmp_path):
    for address in (
        "someone/tiny/model.safetensors",
        "https://huggingface.co/someone/tiny/blob/main/sub/model.safetensors",
        "https://huggingface.co/someone/tiny/resolve/main/model.safetensors?download=true",
    ):
        with pytest.raises(ValueError, match=r"model\.safetensors of 'someone/tiny' is not in the"):
            find_file(address, local_files_only=True, cache_dir=tmp_path)
    snapshot = tmp_path / "models--someone--tiny" / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").write_bytes(b"x")
    (refs := tmp_path / "models--someone--tiny" / "refs").mkdir()
    (refs / "main").write_text("a" * 40)
    found = find_file(
        "https://huggingface.co/someone/tiny/blob/main/model.safetensors",
        local_files_only=True,
        cache_dir=tmp_path,
    )
    assert found == snapshot / "model.safetensors"


def mutated(rng, data):
    """A safetensors file's bytes, damaged: cut off, its header changed, or its tensors."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    name = rng.choice([name for name in header if name != "__metadata__"])
    what = rng.choice(["cut", "byte", "huge", "drop", "rename", "shape", "dtype", "nan", "text"])
    if what == "cut":
        return data[: rng.randrange(len(data))]
    if what == "byte":
        place = rng.randrange(8 + length)
        return data[:place] + bytes([rng.randrange(256)]) + data[place + 1 :]
    if what == "huge":
        return (2 ** rng.randrange(20, 63)).to_bytes(8, "little") + data[8:]
    if what == "nan":
        begin = 8 + length + header[name]["data_offsets"][0]
        return data[:begin] + b"\xff" * 4 + data[begin + 4 :]
    if what == "text":
        return b"PK\x03\x04" + data[4:]
    entry = header.pop(name)
    if what == "rename":
        header[rng.choice([name + ".x", name[:-1], "v_pred", ""])] = entry
    elif what != "drop":
        value = rng.choice([[], [1], [2, 3], [2**40], entry["shape"][::-1], None, "x"])
        header[name] = {**entry, what: value if what == "shape" else rng.choice(["I8", "F64", 3])}
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


def test_a_broken_file_is_a_model_or_one_sentence(files, tmp_path):
    folder, path = files("sd", "b")
    whole = diffusax.DiffusionPipeline.from_single_file(path, config=folder)
    data, rng = path.read_bytes(), random.Random(0)
    broken = tmp_path / "broken.safetensors"
    readers = [
        functools.partial(diffusax.UNet2DConditionModel.from_single_file, broken, config=folder),
        functools.partial(diffusax.AutoencoderKL.from_single_file, broken, config=folder),
        functools.partial(
            diffusax.DiffusionPipeline.from_single_file,
            broken,
            config=folder,
            tokenizer=whole.tokenizer,
        ),
    ]
    messages = []
    for i in range(examples(100, 400)):
        broken.write_bytes(mutated(rng, data))
        try:
            readers[i % 2 if i % 10 else 2]()
        except ValueError as error:
            messages.append(str(error))
    assert len(messages) > 30
    assert not [text for text in messages if str(broken) not in text]
    assert not [text for text in messages if "\n" in text or len(text) > 4000]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("dtype", first(["float16", "float32"]))
def test_a_file_is_held_once(tmp_path, dtype):
    from diffusax.checkpoints import save_network
    from diffusax.models import UNet2DConditionConfig, UNet2DConditionModel
    from diffusax.networks import initialize

    for name, width in (("small", 32), ("large", 384)):
        config = UNet2DConditionConfig(
            block_out_channels=(width,) * 4, cross_attention_dim=768, layers_per_block=2
        )
        save_network(initialize(UNet2DConditionModel, config, dtype=dtype), tmp_path / name)
        pack_single_file(tmp_path / name, tmp_path / f"{name}.safetensors")
    program = f"""
        import threading, time
        import jax, diffusax

        def load(name):
            path = {str(tmp_path)!r} + "/" + name
            read = diffusax.UNet2DConditionModel.from_single_file
            return read(path + ".safetensors", config=path, dtype="float32")

        def resident():
            for line in open("/proc/self/status"):
                if line.startswith("VmRSS"):
                    return int(line.split()[1]) * 1024

        load("small")
        peak = before = resident()
        done = False

        def watch():
            global peak
            while not done:
                peak = max(peak, resident())
                time.sleep(0.002)

        thread = threading.Thread(target=watch)
        thread.start()
        network = load("large")
        jax.block_until_ready(network.params)
        done = True
        thread.join()
        size = sum(x.nbytes for x in jax.tree.leaves(network.params))
        print((peak - before) / size, size / 2**20)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ,
    )
    ratio, mebibytes = map(float, done.stdout.split())
    assert mebibytes > 200
    assert ratio < 1.15
