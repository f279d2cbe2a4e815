"""The engine draws with all that a folder of models holds, as the pipelines do alone."""

import gc
import shutil
import time

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file
from support.lora_files import write_kohya
from support.running_server import mask, picture

import diffusax
from diffusax.checkpoints.hub import EMBEDDED
from diffusax.serving.catalogue.catalogue import Catalogue
from diffusax.serving.engine.engine import Engine
from diffusax.serving.requests.generation import Control, Generation

pytestmark = pytest.mark.slow

ENDS = {"unet": (".to_q", ".conv1"), "text_encoder": (".q_proj", ".v_proj")}
PICTURE, MASK = picture(), mask()
BRIEF = {"num_inference_steps": 4, "guidance_scale": 3.0, "sampler": "euler", "seed": 3}


@pytest.fixture(scope="module")
def folder(tiny_checkpoints, tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    for name in ("checkpoints", "loras", "embeddings", "controlnet"):
        (root / name).mkdir()
    plain, pipe = tiny_checkpoints.pipeline("sd")
    (root / "checkpoints" / "plain").symlink_to(plain)
    (root / "checkpoints" / "edit").symlink_to(tiny_checkpoints.pipeline("sd-instruct")[0])
    (root / "checkpoints" / "refiner").symlink_to(tiny_checkpoints.pipeline("xl-refiner")[0])
    (root / "controlnet" / "edges").symlink_to(tiny_checkpoints.controlnet("sd")[0])
    networks = {name: getattr(pipe, name) for name in ENDS}
    write_kohya(root / "loras" / "style.safetensors", networks, ENDS)
    vectors = np.random.default_rng(0).standard_normal((2, 32)).astype(np.float32)
    save_file({"emb_params": 0.3 * vectors}, root / "embeddings" / "sks.safetensors")
    return root


@pytest.fixture(scope="module")
def engine(folder):
    with Engine(Catalogue("plain", folder)) as found:
        yield found


def loaded(folder, name):
    pipe = diffusax.DiffusionPipeline.from_pretrained(folder / "checkpoints" / name)
    pipe.scheduler = diffusax.EulerDiscreteScheduler.from_config(pipe.scheduler.config)
    pipe.set_progress_bar_config(disable=True)
    return pipe


CALL = {name: BRIEF[name] for name in ("num_inference_steps", "guidance_scale", "seed")}
CASES = {
    "a lora and an embedding": (
        "plain",
        {"prompt": "a sks cat <lora:style:0.8:0.5>"},
        {"adapters": {"style": {"text_encoder": 0.8, "unet": 0.5}}},
    ),
    "image to image": (
        *("plain", {"prompt": "a cat", "image": PICTURE, "strength": 0.6}),
        {"image": PICTURE, "strength": 0.6},
    ),
    "inpainting with a control": (
        "plain",
        {
            **{"prompt": "a cat", "image": PICTURE, "mask_image": MASK, "strength": 1.0},
            "controls": (Control(model="edges", image=PICTURE, scale=0.7, end=0.8),),
        },
        {
            **{"image": PICTURE, "mask_image": MASK, "control_image": PICTURE, "strength": 1.0},
            **{"controlnet_conditioning_scale": 0.7, "control_guidance_end": 0.8},
        },
    ),
    "an edit": (
        *("edit", {"prompt": "a cat", "image": PICTURE, "image_guidance_scale": 1.2}),
        {"image": PICTURE, "image_guidance_scale": 1.2},
    ),
    "a refiner": (
        *("refiner", {"prompt": "a cat", "image": PICTURE, "strength": 0.5}),
        {"image": PICTURE, "strength": 0.5},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_drawings_are_those_of_the_pipelines(engine, folder, name):
    model, fields, call = CASES[name]
    job = engine.submit(Generation(model=model, **fields, **BRIEF))
    assert (job.wait(120), job.error) == ("done", None)
    pipe = loaded(folder, model)
    pipe.load_textual_inversion(
        folder / "embeddings" / "sks.safetensors"
    ) if model == "plain" else 0
    if "adapters" in call:
        pipe.load_lora_weights(folder / "loras" / "style.safetensors", adapter_name="style")
    if "mask_image" in call:
        net = diffusax.ControlNetModel.from_pretrained(folder / "controlnet" / "edges")
        pipe = diffusax.AutoPipelineForInpainting.from_pipe(pipe, controlnet=net)
    elif "strength" in call:
        pipe = diffusax.AutoPipelineForImage2Image.from_pipe(pipe)
    words = {"prompt_weighting": True, "long_prompt": True}
    prompt = fields["prompt"].partition(" <")[0]
    expected = pipe(prompt, **call, **CALL, **words).images[0]
    found = np.asarray(job.images[0]).astype(int)
    # A batch of another size rounds its sums otherwise.
    assert abs(found - np.asarray(expected)).max() <= 2


def test_models_that_leave_memory_leave_nothing_there(tmp_path):
    for name in ("one", "two"):
        shutil.copytree(EMBEDDED["emoji"], tmp_path / name)

    def held():
        gc.collect()
        return sum(array.nbytes for array in jax.live_arrays())

    def draw(name):
        job = engine.submit(
            Generation(model=name, prompt=f"a cat of {name}", num_inference_steps=2)
        )
        stop = job.listen(lambda event: None, previews=True)
        assert (job.wait(120), job.error) == ("done", None)
        stop()

    catalogue = Catalogue("one", tmp_path, memory=40 * 10**6)
    with Engine(catalogue) as engine:
        draw("one")
        before = held()
        for name in ("two", "one", "two", "one"):
            draw(name)
            time.sleep(0.5)
        assert held() < before + 2**20
