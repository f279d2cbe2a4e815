"""The nodes for ComfyUI, run by its protocol before a real server."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from support.comfyui import PACKAGE, InterruptProcessingException, loaded_nodes
from support.running_server import mask, picture, running
from support.tiny_transformers import klein_pipeline

import diffusax
from diffusax.serving.engine.engine import EngineSettings

DATA = Path(diffusax.__file__).parent / "data"
REQUEST = PACKAGE / "api_requests" / "generate_and_edit.json"
WORKFLOW = PACKAGE / "example_workflows" / "generate_and_edit.json"
PLACES = {
    "emoji": "checkpoints",
    "emoji_edit": "checkpoints",
    "emoji_control": "controlnet",
    "emoji_owl": "loras",
}
SETTINGS = {
    **{"model": "default", "prompt": "a red apple", "negative_prompt": "", "width": 0, "height": 0},
    **{"steps": 2, "guidance_scale": -1, "sampler": "euler", "seed": 7, "batch_size": 1},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for name, place in PLACES.items():
        source = DATA / name
        if place == "loras":
            (folder / place).mkdir()
            (folder / place / "owl.safetensors").symlink_to(next(source.glob("*.safetensors")))
        else:
            (folder / place).mkdir(exist_ok=True)
            (folder / place / name).symlink_to(source)
    klein_pipeline(folder / "checkpoints" / "klein", layers=28)
    with running("emoji", folder, bounds=EngineSettings(lanes=4, smallest=4)) as found:
        yield found


@pytest.fixture(scope="module")
def package(server):
    with loaded_nodes(server.url) as found:
        yield found


@pytest.fixture
def comfy(package):
    for told in (package.progress, package.previews, package.texts):
        told.clear()
    package.interrupt_at = None
    package.interrupted.clear()
    return package


def prompt_of(server, kind, inputs, **more):
    """A prompt of one node that generates, with the node Connect."""
    connect = {"class_type": "DiffusaxConnect", "inputs": {"url": server.url}}
    node = {"class_type": f"Diffusax{kind}", "inputs": {"server": ["connect", 0], **inputs}}
    return {"connect": connect, **more, "node": node}


def run(comfy, server, kind, inputs, **more):
    """Runs such a prompt; returns what the node returns, and the generations of its jobs."""
    before = {job.id for job in server.engine.jobs()}
    returned = comfy.run(prompt_of(server, kind, inputs, **more))["node"]
    jobs = [job for job in server.engine.jobs() if job.id not in before]
    return *returned, [job.generation for job in sorted(jobs, key=lambda job: job.created)]


def tensor(*images):
    """ComfyUI's IMAGE, or MASK, of PIL images."""
    return torch.from_numpy(np.stack([np.asarray(image, np.float32) / 255 for image in images]))


def newest(server):
    """The generation of the newest job."""
    return max(server.engine.jobs(), key=lambda job: job.created).generation


def files_of(server, count):
    """The PNG files of the newest job."""
    job = server.get("/jobs").json["jobs"][0]
    return [server.get(f"/jobs/{job['id']}/images/{i}").image for i in range(count)]


@pytest.mark.slow
def test_the_example_generates_and_edits(comfy, server):
    prompt = json.loads(REQUEST.read_text())["prompt"]
    prompt = {id: node for id, node in prompt.items() if node["class_type"].startswith("Diffusax")}
    prompt["1"]["inputs"]["url"] = server.url
    for id in ("2", "4"):
        prompt[id]["inputs"].update(steps=3, sampler="euler")
    prompt["4"]["inputs"]["model"] = "emoji_edit"
    found = comfy.run(prompt)
    assert found["1"][1].splitlines()[:2] == [
        "emoji: text-to-image, image-to-image, inpainting; 64x64, 50 steps",
        "emoji_edit: edit; 64x64, 100 steps",
    ]
    for id, model in (("2", "emoji"), ("4", "emoji_edit")):
        images, settings = found[id]
        assert (images.shape, images.dtype) == ((1, 64, 64, 3), torch.float32)
        assert 0 <= images.min() < 0.5 < images.max() <= 1
        assert f"Seed: 1, Size: 64x64, Model: {model}" in settings
        assert (id, "done") in comfy.texts
    assert settings.startswith("make it green\n")
    assert comfy.progress[-1] == (3, 3)


def test_the_example_is_the_same_in_both_of_its_forms(comfy):
    """ComfyUI's page makes this request of this workflow."""
    workflow, request = json.loads(WORKFLOW.read_text()), json.loads(REQUEST.read_text())["prompt"]
    links = {link[0]: [str(link[1]), link[2]] for link in workflow["links"]}
    for node in workflow["nodes"]:
        expected = dict(request.pop(str(node["id"]))["inputs"])
        for slot in node["inputs"]:
            if slot["link"] is not None:
                assert expected.pop(slot["name"]) == links[slot["link"]]
        values = node.get("widgets_values", [])
        if "seed" in expected:
            assert values.pop(list(expected).index("seed") + 1) == "fixed"
        assert values == list(expected.values())
        if node["type"].startswith("Diffusax"):
            types = comfy.nodes.NODE_CLASS_MAPPINGS[node["type"]].INPUT_TYPES()
            named = {**types["required"], **types.get("optional", {})}
            slots = {slot["name"] for slot in node["inputs"]}
            assert [name for name in named if name not in slots] == list(expected)
    assert not request


def test_images_of_a_batch_have_seeds_that_follow_and_show_their_progress(comfy, server):
    images, settings, [generation] = run(comfy, server, "Generate", {**SETTINGS, "batch_size": 2})
    assert images.shape == (2, 64, 64, 3)
    assert (generation.seed, generation.num_images, generation.model) == (7, 2, "emoji")
    first, second = settings.split("\n\n")
    assert ("Seed: 7," in first, "Seed: 8," in second) == (True, True)
    files = files_of(server, 2)
    np.testing.assert_array_equal(tensor(*(file.convert("RGB") for file in files)), images)
    assert settings == "\n\n".join(file.text["parameters"] for file in files)
    assert comfy.progress[-1] == (4, 4)
    # Defaults of a node are the model's own values.
    assert (generation.guidance_scale, generation.width) == (2.0, 64)


def test_a_preview_is_the_first_images(comfy, server):
    run(comfy, server, "Generate", {**SETTINGS, "steps": 60, "batch_size": 2})
    assert comfy.previews
    for kind, image, side in comfy.previews:
        assert (kind, image.mode, side) == ("JPEG", "RGB", max(image.size))
    assert any(text.startswith("step ") for _, text in comfy.texts)


def test_each_image_of_a_batch_is_started_from_by_itself(comfy, server):
    greys = np.arange(64 * 64, dtype=np.uint16).reshape(64, 64) % 256
    starts = tensor(picture(), Image.fromarray(greys.astype(np.uint8)).convert("RGB"))
    inputs = {**SETTINGS, "image": starts, "strength": 0.5, "batch_size": 2, "seed": 2**64 - 2}
    images, _, found = run(comfy, server, "Generate", inputs)
    assert images.shape == (4, 64, 64, 3)
    assert [(one.seed, one.strength, one.task) for one in found] == [
        (2**64 - 2, 0.5, "image-to-image"),
        (0, 0.5, "image-to-image"),
    ]
    value, total = comfy.progress[-1]
    assert value == total
    for one, start in zip(found, starts):
        np.testing.assert_array_equal(tensor(one.image)[0], start)


def test_the_masked_part_is_generated_anew(comfy, server):
    inputs = {**SETTINGS, "image": tensor(picture()), "mask": tensor(mask()), "strength": 1.0}
    inputs |= {"mask_blur": 0.0, "padding_mask_crop": 8}
    images, _, [generation] = run(comfy, server, "Inpaint", inputs)
    assert (generation.task, generation.padding_mask_crop) == ("inpainting", 8)
    np.testing.assert_array_equal(generation.mask_image, mask())
    # Right of the mask the image is pasted back.
    assert abs(images - inputs["image"])[0, :, 34:].max() < 0.01
    assert abs(images - inputs["image"])[0, :, :30].max() > 0.1
    inputs |= {"mask": tensor(mask(), mask(), mask())}
    with pytest.raises(ValueError, match=r"mask must be one mask or 1, as image has \(got 3\)"):
        run(comfy, server, "Inpaint", inputs)


def test_loras_and_controlnets_chain(comfy, server):
    owl = {"class_type": "DiffusaxLora", "inputs": {"name": "owl", "weight": 0.5}}
    twice = {**owl, "inputs": {**owl["inputs"], "weight": 0.25, "loras": ["owl", 0]}}
    edges = {"model": "emoji_control", "image": tensor(picture()), "weight": 0.8}
    first = {"class_type": "DiffusaxControlNet", "inputs": {**edges, "start": 0.0, "end": 0.5}}
    other = {**edges, "start": 0.5, "end": 1.0, "controls": ["first", 0]}
    second = {"class_type": "DiffusaxControlNet", "inputs": other}
    nodes = {"owl": owl, "twice": twice, "first": first, "second": second}
    inputs = {**SETTINGS, "loras": ["twice", 0], "controls": ["second", 0]}
    # Their programs need not be compiled to see what arrives.
    comfy.interrupt_at = 0
    with pytest.raises(InterruptProcessingException):
        run(comfy, server, "Generate", inputs, **nodes)
    generation = newest(server)
    assert dict(generation.adapters) == {"owl": 0.75}
    controls = [(one.model, one.scale, one.start, one.end) for one in generation.controls]
    assert controls == [("emoji_control", 0.8, 0.0, 0.5), ("emoji_control", 0.8, 0.5, 1.0)]
    np.testing.assert_array_equal(generation.controls[0].image, picture())


def test_a_model_looks_at_several_images_in_their_order(comfy, server):
    names = ("negative_prompt", "width", "height", "steps", "guidance_scale", "seed", "batch_size")
    inputs = {name: SETTINGS[name] for name in names}
    inputs |= {"model": "klein", "instruction": "a hat", "sampler": "default", "steps": 1}
    inputs |= {"image_guidance_scale": -1, "image": tensor(picture(), picture(colour="red"))}
    inputs |= {"image_2": tensor(picture(72, 64, "blue")), "image_4": tensor(picture(80, 64))}
    # Its program need not be compiled to see what arrives.
    comfy.interrupt_at = 0
    with pytest.raises(InterruptProcessingException):
        run(comfy, server, "Edit", inputs)
    generation = newest(server)
    assert generation.prompt == "a hat"
    np.testing.assert_array_equal(generation.image, picture())
    sizes = [image.size for image in generation.more_images]
    assert sizes == [(64, 64), (72, 64), (80, 64)]
    np.testing.assert_array_equal(generation.more_images[0], picture(colour="red"))
    with pytest.raises(ValueError, match="image must be given at most 1 times for 'emoji_edit'"):
        run(comfy, server, "Edit", {**inputs, "model": "emoji_edit"})
    # This one is found out when the job has begun.
    comfy.interrupt_at = None
    with pytest.raises(ValueError, match="image must have sides of at least 64 pixels"):
        run(comfy, server, "Edit", {**inputs, "image_2": tensor(picture(48, 32))})


def test_an_interruption_cancels_the_job(comfy, server):
    comfy.interrupt_at = 3
    with pytest.raises(InterruptProcessingException):
        run(comfy, server, "Generate", {**SETTINGS, "steps": 200, "batch_size": 4})
    job = server.get("/jobs").json["jobs"][0]
    assert job["state"] == "cancelled"
    assert job["steps_done"] < job["steps"]


@pytest.mark.parametrize(
    ("inputs", "sentence"),
    [
        ({"width": 68}, r"width must be divisible by 8 \(got 68\); use 64 or 72"),
        ({"model": "nothing"}, "model names the model 'nothing', which is not listed"),
        ({"sampler": "nothing"}, "sampler"),
        ({"steps": 1000}, "num_inference_steps must be at most 200 steps"),
    ],
)
def test_errors_are_the_servers_sentences(comfy, server, inputs, sentence):
    with pytest.raises(ValueError, match=sentence):
        run(comfy, server, "Generate", {**SETTINGS, **inputs})


def test_lists_are_the_servers_and_take_other_names(comfy, server):
    types = {name: cls.INPUT_TYPES() for name, cls in comfy.nodes.NODE_CLASS_MAPPINGS.items()}
    models, about = types["DiffusaxGenerate"]["required"]["model"]
    assert (models, about["default"]) == (["default", "emoji", "emoji_edit", "klein"], "default")
    assert types["DiffusaxEdit"]["required"]["sampler"][0][:2] == ["default", "ddim"]
    assert types["DiffusaxLora"]["required"]["name"][0] == ["owl"]
    assert types["DiffusaxControlNet"]["required"]["model"][0] == ["emoji_control"]
    assert types["DiffusaxGenerate"]["required"]["seed"][1]["control_after_generate"] is True
    other = {"class_type": "DiffusaxLora", "inputs": {"name": "another server's", "weight": 1}}
    assert comfy.errors(other) == []
    assert comfy.errors({**other, "inputs": {"name": "owl", "weight": 101}})


def test_connect_runs_again_when_the_servers_lists_change(comfy, server):
    connect = comfy.nodes.NODE_CLASS_MAPPINGS["DiffusaxConnect"]
    before = connect.IS_CHANGED(url=server.url)
    assert connect.IS_CHANGED(url=server.url, api_key="") == before
    [lora] = server.service.catalogue.loras
    shutil.copy(lora.path, lora.path.with_name("owl2.safetensors"))
    server.post("/sdapi/v1/refresh-checkpoints")
    assert connect.IS_CHANGED(url=server.url) != before
