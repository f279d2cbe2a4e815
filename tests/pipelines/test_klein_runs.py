"""What every family has, with FLUX.2 klein: running batches, offline runs, adapters, meshes."""

import jax
import numpy as np
import pytest
import torch
from kleins import CALL, SIZE, pipeline
from lora import add_lora, lora_layers
from offline.runs import pictures, pixels, run
from pairs import picture
from peft import get_peft_model_state_dict

import diffusax
from diffusax import offline
from diffusax.pipelines import ahead
from diffusax.runtime.compilations import count_compilations
from diffusax.serving.entries import describe_model

PROMPT = "an old house on a hill"
KEPT = {"output_type": "np", **CALL}


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    folder = tmp_path_factory.mktemp("klein")
    reference = pipeline(folder)
    pipe = diffusax.AutoPipelineForText2Image.from_pretrained(folder)
    assert type(pipe) is diffusax.Flux2KleinPipeline
    pipe.set_progress_bar_config(disable=True)
    return reference, pipe


@pytest.fixture
def pipe(both):
    return both[1]


def test_other_prompts_steps_guidance_and_seeds_compile_nothing(pipe):
    pipe(prompt=PROMPT, seed=0, num_inference_steps=2, **KEPT)
    with count_compilations() as compiled:
        pipe(prompt="two dogs", seed=1, num_inference_steps=3, guidance_scale=2.0, **KEPT)
        pipe(prompt="a", seed=2, num_inference_steps=4, sigmas=[1.0, 0.5], **KEPT)
        sampler = diffusax.FlowMatchHeunDiscreteScheduler(shift=2.0)
        other = diffusax.Flux2KleinPipeline.from_pipe(pipe, scheduler=sampler)
        other.set_progress_bar_config(disable=True)
        other(prompt="a", seed=2, num_inference_steps=3, **KEPT)
    assert compiled == []


@pytest.mark.slow
def test_other_images_of_the_same_sizes_compile_nothing(pipe):
    call = {"num_inference_steps": 2, "prompt": "a hat", **KEPT}
    pipe(image=[picture(1, 64, 72), picture(2, 80, 64)], seed=0, **call)
    with count_compilations() as compiled:
        pipe(image=[picture(3, 64, 72), picture(4, 80, 64)], seed=1, **call)
    assert compiled == []


@pytest.mark.slow
def test_programs_that_are_listed_ahead_are_those_of_a_call(pipe):
    given = {"prompt": PROMPT, "max_sequence_length": 64, "text_encoder_out_layers": (1, 2, 3)}
    call = ahead.example_call(pipe, 1, (24, 40), given)
    found = {r.program.name for r in ahead.requests(pipe.parts, pipe.task, call)}
    assert found == {"encode_texts", "denoise", "decode"}
    looking = ahead.example_call(pipe, 1, (24, 40), {**given, "image": picture(1)})
    found = {r.program.name for r in ahead.requests(pipe.parts, pipe.task, looking)}
    assert found == {"encode_texts", "encode_image", "denoise", "decode"}
    call = {"prompt": PROMPT, "image": picture(1), "seed": 0, "num_inference_steps": 2}
    inputs = pipe.prepare_inputs(**call, **CALL)
    images = jax.jit(pipe.generate_fn)(pipe.params, inputs)
    expected = pipe(**call, **KEPT).images
    np.testing.assert_allclose(images, expected, atol=1e-5)


@pytest.mark.slow
def test_compiled_ahead(pipe):
    given = {"max_sequence_length": 64, "text_encoder_out_layers": (1, 2, 3)}
    pipe.compile(sizes=[(32, 24)], **given)
    size = {"height": 32, "width": 24}
    with count_compilations() as compiled:
        pipe(prompt=PROMPT, seed=0, num_inference_steps=2, **{**KEPT, **size})
    assert not {"denoise", "encode_texts", "decode"} & set(compiled)


@pytest.mark.slow
def test_a_running_batch_mixes_prompts_steps_guidance_and_images(pipe):
    calls = [
        {"prompt": "a red apple", "seed": 1, "num_inference_steps": 3},
        {"prompt": PROMPT, "seed": 2, "num_inference_steps": 4, "guidance_scale": 2.0},
        {"prompt": "two dogs", "seed": 3, "num_inference_steps": 2, "guidance_scale": 1.0},
        {"prompt": "a hat", "seed": 4, "num_inference_steps": 3, "image": picture(1)},
        {
            "prompt": PROMPT,
            "seed": 5,
            "num_inference_steps": 2,
            "text_encoder_out_layers": (3, 1, 0),
        },
    ]
    calls = [{**KEPT, **call} for call in calls]
    with diffusax.RunningBatch(pipe) as batch:
        futures = [batch.submit(**call) for call in calls]
        found = [future.result(120).images[0] for future in futures]
    for image, call in zip(found, calls, strict=True):
        np.testing.assert_allclose(image, pipe(**call).images[0], atol=1e-4)


@pytest.mark.slow
def test_a_whole_offline_run(tmp_path):
    pipeline(tmp_path / "model", layers=28)
    pipe = diffusax.DiffusionPipeline.from_pretrained(tmp_path / "model")
    pipe.set_progress_bar_config(disable=True)
    rows = [
        {"prompt": "a red apple", "seed": 1, **SIZE},
        {"prompt": PROMPT * 4, "seed": 2, "steps": 3, **SIZE},
        {"prompt": "two dogs", "seed": 3, "guidance": 1.0, **SIZE},
    ]
    (tmp_path / "run").mkdir()
    assert run(pipe, rows, tmp_path / "run") == offline.Summary(drawn=3, errors=0, finished=True)
    found = {info["line"]: pixels(data) for info, data in pictures(tmp_path / "run")}
    for number, row in enumerate(rows, 1):
        call = {"num_inference_steps": row.get("steps", 2), "seed": row["seed"], **SIZE}
        scale = row.get("guidance", 4.0)
        image = pipe(prompt=row["prompt"], guidance_scale=scale, **call).images[0]
        # Programs of another batch size round otherwise, which may turn a half.
        assert np.abs(found[number].astype(int) - np.asarray(image).astype(int)).max() <= 1


def test_adapters_are_those_of_pytorch(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapted")
    reference = pipeline(folder)
    pipe = diffusax.DiffusionPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    add_lora(reference.transformer, "style", 3)
    layers = lora_layers(reference.transformer, "style")
    assert any("to_qkv_mlp_proj" in path for path in layers)
    pipe.add_adapter("style", {"transformer": layers})
    call = {"prompt": PROMPT, "num_inference_steps": 2, **KEPT}
    expected = reference(generator=torch.Generator().manual_seed(7), **call).images
    actual = pipe(generator=7, adapters={"style": 1.0}, **call).images
    assert np.abs(actual - expected).max() < 1e-4
    plain = pipe(generator=7, adapters={}, **call).images
    assert np.abs(plain - expected).max() > 0.02


@pytest.mark.slow
def test_lora_files_of_diffusers(tmp_path):
    reference = pipeline(tmp_path / "model")
    pipe = diffusax.DiffusionPipeline.from_pretrained(tmp_path / "model")
    pipe.set_progress_bar_config(disable=True)
    add_lora(reference.transformer, "style", 3, ["to_q", "to_qkv_mlp_proj", "linear_out"])
    layers = get_peft_model_state_dict(reference.transformer, adapter_name="style")
    config = {"transformer": reference.transformer.peft_config["style"]}
    metadata = {"transformer_lora_adapter_metadata": config["transformer"].to_dict()}
    reference.save_lora_weights(tmp_path, transformer_lora_layers=layers, **metadata)
    pipe.load_lora_weights(tmp_path, adapter_name="style")
    call = {"prompt": PROMPT, "num_inference_steps": 2, **KEPT}
    for scale in (1.0, 0.4):
        options = {"attention_kwargs": {"scale": scale}}
        expected = reference(generator=torch.Generator().manual_seed(7), **call, **options).images
        assert np.abs(pipe(generator=7, **call, **options).images - expected).max() < 1e-4


def test_converted_from_pytorch_objects_and_saved(both, tmp_path):
    reference, pipe = both
    converted = diffusax.DiffusionPipeline.from_torch(reference)
    converted.set_progress_bar_config(disable=True)
    assert type(converted) is diffusax.Flux2KleinPipeline
    for name in ("transformer", "vae"):
        assert getattr(converted, name).network == getattr(pipe, name).network
    call = {"prompt": PROMPT, "num_inference_steps": 2, **KEPT}
    expected = pipe(seed=3, **call).images
    np.testing.assert_array_equal(converted(seed=3, **call).images, expected)
    converted.save_pretrained(tmp_path)
    again = type(reference).from_pretrained(tmp_path)
    theirs = again(generator=torch.Generator().manual_seed(1), **call).images
    assert np.abs(theirs - pipe(generator=1, **call).images).max() < 1e-4


def test_the_task_classes_and_the_server_find_it(pipe, tmp_path):
    pipe.save_pretrained(tmp_path)
    entry = describe_model(tmp_path, "klein", "FLUX.2 klein").entry
    assert entry.tasks == ("text-to-image", "image-to-image", "inpainting")
    assert (entry.height, entry.multiple, entry.guidance_scale) == (256, 4, 4.0)
    other = diffusax.AutoPipelineForImage2Image.from_pipe(pipe)
    assert type(other) is diffusax.Flux2KleinPipeline
    assert other.params["transformer"] is pipe.params["transformer"]
    other = diffusax.AutoPipelineForInpainting.from_pipe(pipe)
    assert type(other) is diffusax.Flux2KleinInpaintPipeline


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"height": 26}, "height must be divisible by 4"),
        ({"text_encoder_out_layers": (1, 9)}, "text_encoder_out_layers must be hidden states"),
        ({"attention_kwargs": {"x": 1}}, "attention_kwargs may hold only 'scale'"),
        ({"image": picture(1, 63, 80)}, r"at least 64 pixels.* \(got 63x80\)"),
        ({"image": picture(1, 640, 64)}, "one at most 8 times as long"),
        ({"image": []}, "image must have at least one image"),
    ],
)
def test_what_is_wrong_is_named(pipe, call, message):
    with pytest.raises(ValueError, match=message):
        pipe(**{"prompt": PROMPT, **KEPT, **call})
