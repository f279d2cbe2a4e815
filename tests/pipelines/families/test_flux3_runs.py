"""What FLUX.3 klein has beside other families: its index, its texts' windows, and LoRAs."""

import json

import diffusers
import jax
import numpy as np
import pytest
import torch
from peft import get_peft_model_state_dict
from safetensors.torch import save_file
from support.lora import add_lora
from support.pairs import mask, picture, slow
from support.tiny_flux3 import FLUX3_CALL, flux3_pipeline

import diffusax
from diffusax.checkpoints.original.layout import original_modules
from diffusax.checkpoints.original.transformers import ORIGINALS
from diffusax.pipelines.families.flux3 import padded_length
from diffusax.pipelines.pipeline import ahead
from diffusax.runtime.programs.compilations import count_compilations
from diffusax.serving.catalogue.entries import describe_model

PROMPT = "an old house on a hill"
LONG = "an old house on a hill by the sea, and two dogs that run before it, " * 3
KEPT = {"output_type": "np", **FLUX3_CALL}


def opened(folder, **options):
    pipe = diffusax.DiffusionPipeline.from_pretrained(folder, **options)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("flux3")
    reference = flux3_pipeline(folder)
    return reference, opened(folder), folder


@pytest.mark.parametrize("distilled", [slow(False), True])
def test_saved_and_read_again_here_and_by_diffusers(tmp_path, distilled):
    flux3_pipeline(tmp_path / "model", distilled)
    pipe = opened(tmp_path / "model")
    assert pipe.call_defaults == ({"num_inference_steps": 16} if distilled else {})
    assert pipe.scheduler.config["shift"] == 6.93
    pipe.save_pretrained(tmp_path / "saved")
    again = opened(tmp_path / "saved")
    call = {"prompt": PROMPT, "seed": 1, "num_inference_steps": 2, **KEPT}
    np.testing.assert_array_equal(again(**call).images, pipe(**call).images)
    kept = "preprocessor_config.json"
    files = [
        json.loads((tmp_path / n / "tokenizer" / kept).read_text()) for n in ("model", "saved")
    ]
    assert files[0] == files[1]
    theirs = diffusers.ModularPipeline.from_pretrained(tmp_path / "saved")
    named = "Flux3DistilledModularPipeline" if distilled else "Flux3ModularPipeline"
    assert type(theirs).__name__ == named
    theirs.load_components(names=["transformer", "vae", "text_encoder", "scheduler"])
    assert theirs.scheduler.config.shift == 6.93
    assert theirs.transformer.config.flow_map == distilled


def test_a_component_of_another_repository_is_asked_for(made, tmp_path):
    _, pipe, folder = made
    (tmp_path / "transformer").symlink_to(folder / "transformer")
    (tmp_path / "vae").symlink_to(folder / "vae")
    (tmp_path / "tokenizer").symlink_to(folder / "tokenizer")
    (tmp_path / "modular_model_index.json").write_bytes(
        (folder / "modular_model_index.json").read_bytes()
    )
    with pytest.raises(ValueError, match=r"text_encoder"):
        opened(tmp_path)
    found = opened(tmp_path, text_encoder=pipe.text_encoder)
    call = {"prompt": PROMPT, "seed": 1, "num_inference_steps": 2, **KEPT}
    np.testing.assert_array_equal(found(**call).images, pipe(**call).images)


@pytest.mark.parametrize(
    ("tokens", "length"), [(1, 80), (80, 80), (81, 160), (161, 320), (321, 640), (1700, 1920)]
)
def test_the_lengths_that_programs_are_compiled_for(tokens, length):
    assert padded_length(tokens) == length


def test_windows_of_one_length_share_programs(made):
    _, pipe, _ = made
    call = {"num_inference_steps": 2, **KEPT}
    pipe(prompt=LONG, seed=0, **call)
    with count_compilations() as compiled:
        pipe(prompt=LONG[:-40], seed=1, **call)
    assert compiled == []


@pytest.mark.slow
def test_a_running_batch_of_texts_and_images_to_look_at(made):
    _, pipe, _ = made
    looks = {"image": [picture(1, 64, 72), picture(2, 80, 64)]}
    calls = [
        {"prompt": PROMPT, "seed": 1, "num_inference_steps": 3, **looks},
        {"prompt": LONG, "seed": 2, "num_inference_steps": 2, **looks},
        {"prompt": LONG, "seed": 3, "num_inference_steps": 2, "guidance_scale": 1.0},
        {"prompt": "a hat", "seed": 4, "num_inference_steps": 4, "negative_prompt": LONG},
        {"prompt": "a hat", "seed": 4, "num_inference_steps": 2, "image": picture(1, 67, 90)},
    ]
    size = {"height": 72, "width": 64}
    calls = [{**KEPT, **size, **call} for call in calls]
    for name in size:
        del calls[-1][name]
    with diffusax.RunningBatch(pipe) as batch:
        futures = [batch.submit(**call) for call in calls]
        found = [future.result(200).images[0] for future in futures]
    for image, call in zip(found, calls, strict=True):
        np.testing.assert_allclose(image, pipe(**call).images[0], atol=1e-4)
    assert found[-1].shape == (90, 67, 3)


@pytest.mark.slow
def test_programs_that_are_listed_ahead_encode_images_to_look_at(made):
    _, pipe, _ = made
    given = {"prompt": PROMPT, "text_encoder_out_layers": (1, 2, 4)}
    looking = ahead.example_call(pipe, 1, (24, 40), {**given, "image": picture(1)})
    found = {r.program.name for r in ahead.requests(pipe.parts, pipe.task, looking)}
    assert found == {"encode_texts", "encode_image", "denoise", "decode"}
    repaint = diffusax.Flux3KleinInpaintPipeline.from_pipe(pipe)
    call = {**given, "image": picture(1, 40, 24), "mask_image": mask(1, 40, 24)}
    own = {"seed": 0, "num_inference_steps": 3, "image_reference": picture(2, 30, 35), **call}
    images = jax.jit(repaint.generate_fn)(repaint.params, repaint.prepare_inputs(**own))
    expected = repaint(**own, output_type="np").images
    np.testing.assert_allclose(images, expected, atol=1e-5)


LAYERS = ["to_q", "to_out.0", "linear_in", "proj_out", "early_stream_modulations.txt.linear"]


def test_lora_files_of_diffusers(tmp_path):
    reference = flux3_pipeline(tmp_path / "model")
    pipe = opened(tmp_path / "model")
    add_lora(reference.transformer, "style", 3, LAYERS)
    layers = get_peft_model_state_dict(reference.transformer, adapter_name="style")
    config = reference.transformer.peft_config["style"].to_dict()
    metadata = {"transformer_lora_adapter_metadata": config}
    reference.pipe.save_lora_weights(tmp_path, transformer_lora_layers=layers, **metadata)
    pipe.load_lora_weights(tmp_path, adapter_name="style")
    call = {"prompt": PROMPT, "num_inference_steps": 2, **KEPT}
    expected = reference(generator=torch.Generator().manual_seed(7), **call).images
    assert np.abs(pipe(generator=7, **call).images - expected).max() < 1e-4
    assert np.abs(pipe(generator=7, adapters={}, **call).images - expected).max() > 0.01


@pytest.mark.parametrize("prefix", ["diffusion_model.", "lora_unet_"])
def test_lora_files_with_the_names_of_the_original_code(made, tmp_path, prefix):
    reference, _, folder = made
    network = flux3_pipeline(tmp_path / "model").transformer
    add_lora(network, "style", 3, LAYERS[:3])
    layers = get_peft_model_state_dict(network, adapter_name="style")
    paths = list(dict.fromkeys(key.partition(".lora_")[0] for key in layers))
    names = {
        own: n
        for n, m in original_modules(ORIGINALS["Flux3Transformer2DModel"], paths).items()
        for own in m.paths
    }
    assert names["mode_blocks.image_cond.1.attn.to_q"] == "content_mode_blocks.image_cond.1.q_proj"
    tensors = {}
    for key, tensor in layers.items():
        path, _, part = key.partition(".lora_")
        name = names[path]
        if prefix == "lora_unet_":
            name, part = name.replace(".", "_"), {"A": "down", "B": "up"}[part[0]] + part[1:]
        tensors[f"{prefix}{name}.lora_{part}"] = tensor.contiguous()
    save_file(tensors, tmp_path / "style.safetensors")
    pipe = opened(folder)
    pipe.load_lora_weights(tmp_path / "style.safetensors", adapter_name="style")
    if prefix == "diffusion_model.":
        own = reference.pipe.lora_state_dict(str(tmp_path / "style.safetensors"))
        assert {k.removeprefix("transformer.") for k in own} == set(layers)
    plain = opened(folder)
    diffusers_file = {f"transformer.{key}": x.contiguous() for key, x in layers.items()}
    save_file(diffusers_file, tmp_path / "plain.safetensors")
    plain.load_lora_weights(tmp_path / "plain.safetensors", adapter_name="style")
    call = {"prompt": PROMPT, "seed": 1, "num_inference_steps": 2, **KEPT}
    np.testing.assert_allclose(pipe(**call).images, plain(**call).images, atol=1e-6)
    assert np.abs(pipe(**call, adapters={}).images - plain(**call).images).max() > 0.01


@pytest.mark.parametrize("distilled", [False, True])
def test_the_server_finds_it(tmp_path, distilled):
    flux3_pipeline(tmp_path, distilled)
    entry = describe_model(tmp_path, "klein", "FLUX.3 klein").entry
    assert entry.tasks == ("text-to-image", "image-to-image", "inpainting")
    assert (entry.height, entry.multiple, entry.guidance_scale) == (256, 4, 3.5)
    assert entry.steps == (16 if distilled else 50)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"image": [picture(1, 3, 80), picture(2)]}, r"at least 4 pixels .* \(got 3x80\)"),
        ({"image": []}, "image must have at least one image"),
        ({"text_encoder_out_layers": (1, 9)}, "text_encoder_out_layers must be hidden states"),
        ({"attention_kwargs": {"x": 1}}, "attention_kwargs may hold only 'scale'"),
    ],
)
def test_what_is_wrong_is_named(made, call, message):
    with pytest.raises(ValueError, match=message):
        made[1](**{"prompt": PROMPT, **KEPT, **call})
