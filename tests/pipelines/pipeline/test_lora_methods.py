"""The methods that load LoRAs: names and weights, what compiles, saving, mistakes in files."""

import json
import random
import threading

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.adapted import random_adapter
from support.lora_files import write_kohya, write_peft

import diffusax
from diffusax.models.adapters.low_rank import kernel_shapes
from diffusax.pipelines.components.adapters import resolve_adapters
from diffusax.pipelines.plan.arguments import check_call
from diffusax.runtime.programs.compilations import count_compilations

CALL = {"num_inference_steps": 2, "output_type": "np", "guidance_scale": 3.0, "seed": 1}
TEXT = (".q_proj", ".k_proj", ".v_proj", ".out_proj")
ENDS = {"unet": (".to_q", ".to_v"), "text_encoder": TEXT}


@pytest.fixture(scope="module")
def theirs(tiny_checkpoints):
    _, pipe = tiny_checkpoints.pipeline("sd")
    return {name: getattr(pipe, name) for name in ENDS}


@pytest.fixture(scope="module")
def files(theirs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("loras")
    write_peft(folder / "style.safetensors", theirs, ENDS, (4, 4), (4.0, 4.0))
    write_kohya(folder / "face.safetensors", theirs, ENDS)
    return folder


@pytest.fixture
def pipe(tiny_checkpoints):
    folder, _ = tiny_checkpoints.pipeline("sd")
    pipe = diffusax.StableDiffusionPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def test_names_weights_and_what_compiles(pipe, files):
    plain = pipe("a cat", **CALL).images
    pipe.load_lora_weights(files, weight_name="style.safetensors")
    assert pipe.get_active_adapters() == ["default_0"]
    first = pipe("a cat", **CALL).images
    assert np.abs(first - plain).max() > 0.01
    with count_compilations() as compiled:
        pipe.load_lora_weights(files / "face.safetensors", adapter_name="face")
        face = pipe("a cat", **CALL).images
        pipe.set_adapters("default_0")
        np.testing.assert_array_equal(pipe("a cat", **CALL).images, first)
        pipe.set_adapters(["default_0", "face"], [{"unet": {"mid": 0.3}, "text_encoder": 0}, 0.5])
        mixed = pipe("a cat", **CALL).images
        pipe.disable_lora()
        np.testing.assert_array_equal(pipe("a cat", **CALL).images, plain)
        named = pipe("a cat", **CALL, adapters={"face": 1.0}).images
        np.testing.assert_array_equal(named, face)
        np.testing.assert_array_equal(pipe("a cat", **CALL, adapters={}).images, plain)
        pipe.enable_lora()
        half = pipe("a cat", **CALL, cross_attention_kwargs={"scale": 0.5}).images
        pipe.load_lora_weights(files / "style.safetensors", adapter_name="face", hotswap=True)
        swapped = pipe("a cat", **CALL, adapters={"face": 1.0}).images
    assert compiled == []
    np.testing.assert_allclose(swapped, first, atol=1e-5)
    images = [plain, first, face, mixed, half]
    assert all(np.abs(a - b).max() > 3e-3 for i, a in enumerate(images) for b in images[:i])
    assert pipe.get_list_adapters() == {
        name: ["default_0", "face"] for name in ("text_encoder", "unet")
    }
    pipe.delete_adapters("default_0")
    assert pipe.get_active_adapters() == ["face"]
    other = diffusax.StableDiffusionImg2ImgPipeline.from_pipe(pipe)
    pipe.unload_lora_weights()
    assert not other.adapters
    np.testing.assert_array_equal(pipe("a cat", **CALL).images, plain)


def test_eight_mixtures_of_four_in_one_batch(pipe, files, theirs):
    """Each picture is that of its own mixture; another LoRA of the same bucket compiles nothing."""
    shapes = kernel_shapes(pipe.unet.network)
    some = [path for path in shapes if path.endswith(("to_q", "to_k"))]
    for i in range(4):
        pipe.add_adapter(f"l{i}", random_adapter(pipe.unet.network, "unet", 3, some, i).components)
    rng = np.random.default_rng(0)
    rows = [{f"l{i}": float(w) for i, w in enumerate(rng.normal(size=4))} for _ in range(8)]
    prompts, seeds = [f"cat {i}" for i in range(8)], list(range(8))
    call = {**CALL, "seed": seeds}
    together = pipe(prompts, **call, adapters=rows).images
    with count_compilations() as compiled:
        others = pipe(prompts, **call, adapters=rows[::-1]).images
        pipe.delete_adapters("l3")
        pipe.add_adapter("l3", random_adapter(pipe.unet.network, "unet", 2, some, 9).components)
        new = pipe(prompts, **call, adapters=rows).images
    assert compiled == []
    assert np.abs(together - others).max((1, 2, 3)).min() > 1e-3
    assert np.abs(together - new).max((1, 2, 3)).min() > 1e-3
    for i in (0, 5):
        alone = pipe(prompts[i], **{**CALL, "seed": i}, adapters=rows[i]).images[0]
        np.testing.assert_allclose(new[i], alone, atol=1e-4)


def test_fused_parameters_are_saved_and_are_not_counted_twice(pipe, files, tmp_path):
    pipe.load_lora_weights(files / "style.safetensors", adapter_name="style")
    pipe.set_adapters("style", 0.7)
    apart = pipe("a cat", **CALL).images
    pipe.fuse_lora(components="unet")
    assert pipe.fused_loras == {"style"}
    # The text encoder's part still lies beside its parameters.
    np.testing.assert_allclose(pipe("a cat", **CALL).images, apart, atol=1e-4)
    with pytest.raises(ValueError, match="'style' is merged already; unfuse_lora undoes it"):
        pipe.fuse_lora()
    pipe.fuse_lora(components="text_encoder", safe_fusing=True)
    # The same program as without any LoRA.
    c, call = resolve_adapters(pipe.parts, check_call({"prompt": "a cat"}))
    assert c is pipe.parts
    assert call.adapters == {}
    np.testing.assert_allclose(pipe("a cat", **CALL).images, apart, atol=1e-4)
    pipe.unload_lora_weights()
    np.testing.assert_allclose(pipe("a cat", **CALL).images, apart, atol=1e-4)
    pipe.save_pretrained(tmp_path)
    saved = diffusax.DiffusionPipeline.from_pretrained(tmp_path)
    np.testing.assert_allclose(saved("a cat", **CALL).images, apart, atol=1e-4)


def test_saved_files_are_read_by_both(pipe, files, tmp_path, theirs):
    pipe.load_lora_weights(files / "style.safetensors", adapter_name="style")
    parts = pipe.adapters["style"].components
    pipe.save_lora_weights(tmp_path, parts["unet"], parts["text_encoder"])
    expected = load_file(files / "style.safetensors")
    found = load_file(tmp_path / "pytorch_lora_weights.safetensors")
    short = {key.replace("text_model.", ""): tensor for key, tensor in found.items()}
    assert set(short) == set(expected)
    assert all(torch.equal(short[key], expected[key]) for key in expected)
    with safe_open(files / "style.safetensors", "np") as file:
        options = json.loads(file.metadata()["lora_adapter_metadata"])
    metadata = {k.removeprefix("unet."): v for k, v in options.items() if k.startswith("unet.")}
    unet = {k.removeprefix("unet."): v for k, v in expected.items() if k.startswith("unet.")}
    pipe.save_lora_weights(tmp_path, unet, unet_lora_adapter_metadata=metadata, weight_name="x")
    with safe_open(tmp_path / "x", "np") as file:
        assert json.loads(file.metadata()["lora_adapter_metadata"])["unet.r"] == 4
    pipe.load_lora_weights(tmp_path, weight_name="x", adapter_name="x")
    for path, (down, up) in pipe.adapters["x"].components["unet"].items():
        np.testing.assert_array_equal(down, parts["unet"][path][0])
        np.testing.assert_array_equal(up, parts["unet"][path][1])


def test_a_lora_in_a_running_batch_and_ahead_of_time(pipe, files):
    pipe.load_lora_weights(files / "style.safetensors", adapter_name="style")
    whole = {"lora_unet_conv_in.diff": np.full((32, 4, 3, 3), 0.05, np.float32)}
    pipe.load_lora_weights(whole, adapter_name="whole")
    rows = [{"style": 0.5}, {"style": -0.5, "whole": 1.0}, {}, {"whole": 1.0}]
    expected = [pipe("a cat", **CALL, adapters=row).images[0] for row in rows]
    with diffusax.RunningBatch(pipe, lanes=4) as batch:
        futures = [batch.submit("a cat", **CALL, adapters=row) for row in rows]
        actual = [future.result().images[0] for future in futures]
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)
    with pytest.raises(ValueError, match="call fuse_lora first"):
        pipe.prepare_inputs("a cat", adapters={"whole": 1.0})


def test_what_is_submitted_keeps_its_loras(pipe, files):
    pipe.load_lora_weights(files / "style.safetensors", adapter_name="style")
    expected = pipe("a cat", **CALL).images
    held, go = threading.Event(), threading.Event()

    def hold(_):
        if threading.current_thread() is not threading.main_thread():
            held.set()
            go.wait(60)

    with diffusax.RunningBatch(pipe, lanes=4) as batch:
        # A callback of a call that fails holds the thread in which calls are prepared.
        while not held.is_set():
            batch.submit("a cat", **{**CALL, "width": 65}).add_done_callback(hold)
            held.wait(0.2)
        future = batch.submit("a cat", **CALL)
        pipe.load_lora_weights(files / "face.safetensors", adapter_name="style", hotswap=True)
        pipe.delete_adapters("style")
        go.set()
        np.testing.assert_allclose(future.result(60).images, expected, atol=1e-4)
    again = pipe("a cat", **CALL).images
    assert np.abs(again - expected).max() > 0.01


KEY = "lora_unet_mid_block_attentions_0_transformer_blocks_0_attn1_to_q"


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"lora_unet_nothing.lora_down.weight": (4, 64)}, "'lora_unet_nothing.*fits no layer of"),
        ({f"{KEY}.lora_down.weight": (4, 64)}, "to_q has down but not up"),
        ({f"{KEY}.hada_w1_a": (4, 64)}, "has hada_w1_a but not hada_w1_b"),
        (
            {f"{KEY}.lora_down.weight": (4, 99), f"{KEY}.lora_up.weight": (64, 4)},
            r"to_q does not fit its kernel of \(64, 64\) \(it makes \(64, 99\)\)",
        ),
        ({f"{KEY}.lora_down.weight": (4, 64), f"{KEY}.lora_up.weight": (64, 3)}, "does not fit"),
        ({f"{KEY}.alpha": ()}, "to_q has alpha, which make no change"),
        ({"transformer.x.lora_A.weight": (4, 4)}, "for a transformer such as FLUX"),
        (
            {f"{KEY.replace('attn1_to_q', 'attn2_to_k')}.lora_down.weight": (4, 2048)}
            | {f"{KEY.replace('attn1_to_q', 'attn2_to_k')}.lora_up.weight": (64, 4)},
            "seems to be a LoRA for Stable Diffusion XL",
        ),
        ({}, "holds no tensors"),
    ],
)
def test_mistakes_in_files_are_one_sentence(pipe, tensors, message):
    arrays = {key: np.ones(shape, np.float32) for key, shape in tensors.items()}
    with pytest.raises(ValueError, match=message) as error:
        pipe.load_lora_weights(arrays)
    assert "\n" not in str(error.value)
    assert not pipe.adapters


def test_what_does_not_fit_can_be_left_out(pipe, files, caplog):
    tensors = load_file(files / "face.safetensors")
    strange = {"lora_unet_nothing.alpha": torch.tensor(1.0)}
    with pytest.raises(ValueError, match="strict=False leaves out"):
        pipe.load_lora_weights({**tensors, **strange})
    pipe.load_lora_weights({**tensors, **strange}, strict=False)
    assert "1 tensors fit no layer" in caplog.text


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda p: p.set_adapters("no"),
            "adapter_names has the name 'no'; the adapters are 'face'",
        ),
        (lambda p: p.set_adapters(["face"], [1, 2]), "1 adapter_names and 2 weights"),
        (lambda p: p.set_adapters("face", {"vae": 1}), "the components are"),
        (lambda p: p.set_adapters("face", {"unet": {"up": {"block_9": 1}}}), "weights of block_1"),
        (lambda p: p.set_adapters("face", {"unet": {"mid": [1, 2]}}), r"1 or 1 numbers \(got 2\)"),
        (lambda p: p.set_adapters("face", {"text_encoder": {"mid": 1}}), "no blocks of attention"),
        (lambda p: p.set_adapters("face", float("nan")), "a finite number"),
        (lambda p: p.fuse_lora(components="vae"), "components has 'vae'; those here are"),
        (lambda p: p.load_lora_weights("x.bin"), "x.bin is a pickle, which may run code"),
        (lambda p: p.load_lora_weights("./none"), "there is no file ./none"),
        (lambda p: p.load_lora_weights({"a": "b"}, adapter_name="face"), "holds <U1|which are no"),
        (lambda p: p.load_lora_weights("/"), "has no .safetensors file"),
        (lambda p: p("x", cross_attention_kwargs={"scale": "much"}), "lora_scale must be"),
    ],
)
def test_mistakes_in_calls_are_one_sentence(pipe, files, call, message):
    pipe.load_lora_weights(files / "face.safetensors", adapter_name="face")
    with pytest.raises(ValueError, match=message) as error:
        call(pipe)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("{", "is no JSON dictionary"),
        ("[1]", "is no JSON dictionary"),
        ('{"unet.lora_alpha": "x"}', "has no alpha of unet's"),
        ('{"unet.lora_alpha": 1, "unet.alpha_pattern": {"(": 2}}', "has no alpha of unet's"),
        ('{"unet.lora_alpha": 1, "unet.alpha_pattern": [3]}', "has no alpha of unet's"),
    ],
)
def test_broken_options_in_a_header(pipe, files, tmp_path, header, message):
    tensors = load_file(files / "style.safetensors")
    save_file(tensors, tmp_path / "x.safetensors", metadata={"lora_adapter_metadata": header})
    with pytest.raises(ValueError, match=message):
        pipe.load_lora_weights(tmp_path / "x.safetensors")


def test_a_folder_with_several_files(pipe, files):
    with pytest.raises(ValueError, match=r"has face.safetensors, style.safetensors; name one with"):
        pipe.load_lora_weights(files)


def test_broken_files_are_one_sentence_or_a_lora(pipe, files, tmp_path):
    """Bytes and tensors of two files are changed at random."""
    rng, read, refused = random.Random(0), 0, []
    for i in range(100):
        source = files / rng.choice(["style.safetensors", "face.safetensors"])
        path = tmp_path / f"{i}.safetensors"
        if i % 2:
            data = bytearray(source.read_bytes())
            for _ in range(rng.choice([1, 5])):
                place = rng.randrange(rng.choice([8, 3000, len(data)]))
                data[place] = rng.randrange(256)
            path.write_bytes(data[: rng.choice([len(data), rng.randrange(len(data))])])
        else:
            save_file(mutated(load_file(source), rng), path)
        try:
            pipe.load_lora_weights(path, adapter_name=str(i))
            read += 1
        except ValueError as error:
            refused.append(str(error))
    assert read > 5
    assert len(refused) > 30
    assert not [text for text in refused if "\n" in text or len(text) > 600]


def mutated(tensors, rng):
    key = rng.choice(list(tensors))
    tensor = tensors[key]
    match rng.randrange(6):
        case 0:
            del tensors[key]
        case 1:
            tensors[key + "x"] = tensors.pop(key)
        case 2:
            tensors[key] = torch.randn(*tensor.shape, 2)
        case 3:
            tensors[key] = tensor.to(rng.choice([torch.int32, torch.bfloat16, torch.bool]))
        case 4:
            tensors[key] = torch.full_like(tensor, float("nan"))
        case 5:
            tensors[key] = tensor.flatten()[:0].clone()
    return tensors
