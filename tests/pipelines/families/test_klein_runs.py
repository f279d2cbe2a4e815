"""What FLUX.2 klein has beside other families: images to look at, and files of LoRAs."""

import base64
import io

import diffusers
import jax
import numpy as np
import pytest
import torch
from peft import get_peft_model_state_dict
from PIL import Image
from support.lora import add_lora
from support.pairs import mask, picture
from support.running_server import running, sent
from support.tiny_transformers import KLEIN_CALL, klein_pipeline

import diffusax
from diffusax.cli.console import main
from diffusax.pipelines.pipeline import ahead
from diffusax.runtime.programs.compilations import count_compilations
from diffusax.serving.catalogue.entries import describe_model

PROMPT = "an old house on a hill"
KEPT = {"output_type": "np", **KLEIN_CALL}


@pytest.fixture(scope="module")
def pipe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("klein")
    klein_pipeline(folder)
    pipe = diffusax.AutoPipelineForText2Image.from_pretrained(folder)
    assert type(pipe) is diffusax.Flux2KleinPipeline
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.mark.slow
def test_programs_that_are_listed_ahead_encode_images_to_look_at(pipe):
    given = {"prompt": PROMPT, "max_sequence_length": 64, "text_encoder_out_layers": (1, 2, 3)}
    looking = ahead.example_call(pipe, 1, (24, 40), {**given, "image": picture(1)})
    found = {r.program.name for r in ahead.requests(pipe.parts, pipe.task, looking)}
    assert found == {"encode_texts", "encode_image", "denoise", "decode"}
    repaint = diffusax.Flux2KleinInpaintPipeline.from_pipe(pipe)
    call = {**given, "image": picture(1, 40, 24), "mask_image": mask(1, 40, 24)}
    ahead_of = ahead.example_call(repaint, 1, (24, 40), call)
    again = {r.program.name for r in ahead.requests(repaint.parts, repaint.task, ahead_of)}
    assert again == found
    own = {"seed": 0, "num_inference_steps": 3, "image_reference": picture(2, 30, 35), **call}
    images = jax.jit(repaint.generate_fn)(repaint.params, repaint.prepare_inputs(**own))
    expected = repaint(**own, output_type="np").images
    np.testing.assert_allclose(images, expected, atol=1e-5)


@pytest.mark.slow
def test_other_images_of_the_same_sizes_compile_nothing(pipe):
    call = {"num_inference_steps": 2, "prompt": "a hat", **KEPT}
    pipe(image=[picture(1, 64, 72), picture(2, 80, 64)], seed=0, **call)
    with count_compilations() as compiled:
        pipe(image=[picture(3, 64, 72), picture(4, 80, 64)], seed=1, **call)
    assert compiled == []


@pytest.mark.slow
def test_lora_files_of_diffusers(tmp_path):
    reference = klein_pipeline(tmp_path / "model")
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


def test_the_server_finds_it(pipe, tmp_path):
    pipe.save_pretrained(tmp_path)
    entry = describe_model(tmp_path, "klein", "FLUX.2 klein").entry
    assert entry.tasks == ("text-to-image", "image-to-image", "inpainting")
    assert (entry.height, entry.multiple, entry.guidance_scale) == (256, 4, 4.0)


def test_the_server_edits_with_several_images(tmp_path):
    klein_pipeline(tmp_path, layers=28)
    pipe = diffusax.DiffusionPipeline.from_pretrained(tmp_path)
    pipe.set_progress_bar_config(disable=True)
    looks = [picture(1, 64, 72), picture(2, 80, 64)]
    fields = {"prompt": PROMPT, "size": "64x72", "num_inference_steps": 2, "seed": 3}
    with running(str(tmp_path)) as server:
        found = [
            server.post("/v1/images/edits", {**fields, "image": [sent(x) for x in images]}).json
            for images in (looks, looks[:1], looks * 6)
        ]
    both, first = (opened_image(answer["data"][0]["b64_json"]) for answer in found[:2])
    call = {"num_inference_steps": 2, "seed": 3, "width": 64, "height": 72}
    expected = pipe(prompt=PROMPT, image=looks, **call).images[0]
    assert np.abs(both - np.asarray(expected, np.int32)).max() <= 1
    assert np.abs(both - first).max() > 3
    assert "image must be given at most 10 times for" in found[2]["error"]["message"]


def test_the_command_looks_at_several_images(tmp_path, capsys):
    klein_pipeline(tmp_path / "model", layers=28)
    looks = []
    for i, size in enumerate([(64, 72), (80, 64)]):
        looks.append(str(tmp_path / f"{i}.png"))
        picture(i, *size).save(looks[-1])
    pipe = diffusax.DiffusionPipeline.from_pretrained(tmp_path / "model")
    pipe.set_progress_bar_config(disable=True)
    call = {"num_inference_steps": 2, "seed": 3, "width": 64, "height": 72}
    size = ["--steps", "2", "--seed", "3", "--width", "64", "--height", "72"]
    run = ["generate", PROMPT, "--model", str(tmp_path / "model"), *size]
    run += ["--image", looks[0], "--output", str(tmp_path / "out.png")]
    main([*run, "--reference", looks[1]])
    found = np.asarray(diffusax.load_image(tmp_path / "out.png"), np.int32)
    expected = pipe(prompt=PROMPT, image=looks, **call).images[0]
    assert np.abs(found - np.asarray(expected, np.int32)).max() <= 1
    with pytest.raises(SystemExit):
        main(["generate", "a", "--image", looks[0], "--reference", looks[1], "--output", looks[0]])
    assert "looks at no further images" in capsys.readouterr().err


def opened_image(text):
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(text))).convert("RGB"), np.int32)


@pytest.mark.slow
def test_a_running_batch_of_images_that_are_computed_once(tmp_path):
    parts = klein_pipeline(tmp_path / "klein").components
    diffusers.Flux2KleinKVPipeline(**parts, is_distilled=True).save_pretrained(tmp_path / "kv")
    pipe = diffusax.DiffusionPipeline.from_pretrained(tmp_path / "kv")
    pipe.set_progress_bar_config(disable=True)
    looks = {"image": [picture(1, 64, 72), picture(2, 80, 64)]}
    calls = [
        {"prompt": PROMPT, "seed": 1, "num_inference_steps": 3, **looks},
        {"prompt": "a hat", "seed": 2, "num_inference_steps": 2, **looks},
        {"prompt": "a hat", "seed": 3, "num_inference_steps": 2},
    ]
    calls = [{**KEPT, **call} for call in calls]
    with diffusax.RunningBatch(pipe) as batch:
        futures = [batch.submit(**call) for call in calls]
        found = [future.result(200).images[0] for future in futures]
    for image, call in zip(found, calls, strict=True):
        np.testing.assert_allclose(image, pipe(**call).images[0], atol=1e-4)
    given = {k: v for k, v in calls[0].items() if k != "output_type"}
    images = jax.jit(pipe.generate_fn)(pipe.params, pipe.prepare_inputs(**given))
    np.testing.assert_allclose(images, pipe(**calls[0]).images, atol=1e-5)
