"""What A1111's calls take beside the usual: variation seeds, masks, styles, scripts."""

import base64
import io
import json
import threading
import time
import types

import numpy as np
import pytest
import torch
from PIL import Image
from support.running_server import mask, picture, running, sent

import diffusax
from diffusax.serving.requests.generation import SEEDS, Generation
from diffusax.serving.web.a1111.fields import TextToImage, read_call
from diffusax.serving.web.a1111.reading import call_warnings, sampler_of

STYLES = """name,prompt,negative_prompt
Oil,"an oil painting of {prompt}, thick paint",photo
Dark,at night,
# a remark,,
Oil,another one of the name,
"""
FEW = {"prompt": "a lion", "steps": 3, "seed": 5, "width": 64, "height": 64, "cfg_scale": 3.0}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    (folder / "styles.csv").write_text(STYLES, "utf-8-sig")
    with running("emoji", folder) as found:
        yield found


@pytest.fixture(scope="module")
def pipe():
    pipe = diffusax.StableDiffusionPipeline.from_pretrained("emoji")
    pipe.set_progress_bar_config(disable=True)
    return pipe


def post(server, path, **fields):
    answer = server.post(f"/sdapi/v1/{path}", {**FEW, **fields})
    assert answer.status == 200, answer.body
    images = [Image.open(io.BytesIO(base64.b64decode(text))) for text in answer.json["images"]]
    return images, json.loads(answer.json["info"])


def same(one, other, most=2):
    """Whether two images are the same but for rounding."""
    return abs(np.asarray(one).astype(int) - np.asarray(other).astype(int)).max() <= most


def slerp(share, low, high):
    """stable-diffusion-webui's of one noise, c h w."""
    units = [x / torch.norm(x, dim=1, keepdim=True) for x in (low, high)]
    omega = torch.acos((units[0] * units[1]).sum(1))
    so = torch.sin(omega)
    parts = [torch.sin((1.0 - share) * omega) / so, torch.sin(share * omega) / so]
    return parts[0].unsqueeze(1) * low + parts[1].unsqueeze(1) * high


def noise_of(pipe, seed):
    """The first noise of a seed, c h w."""
    from diffusax.runtime.random.noise import noise_source

    shape = pipe.parts.latents.shape(64, 64)
    drawn = np.array(noise_source("jax", seed, 1).draw("start", shape))[0]
    return torch.tensor(drawn.transpose(2, 0, 1))


def test_a_variation_seed_turns_the_first_noise(server, pipe):
    asked = {"subseed": 7, "subseed_strength": 0.3, "batch_size": 2, "sampler_name": "Euler"}
    images, info = post(server, "txt2img", **asked)
    assert (info["all_seeds"], info["all_subseeds"]) == ([5, 5], [7, 8])
    assert (info["subseed"], info["subseed_strength"]) == (7, 0.3)
    told = "Seed: 5, Variation seed: 8, Variation seed strength: 0.3"
    assert told in info["infotexts"][1]
    assert images[1].text["parameters"] == info["infotexts"][1]
    pipe.scheduler = diffusax.samplers.scheduler_from_name("euler", pipe.scheduler)
    for image, other in zip(images, (7, 8)):
        first = slerp(0.3, noise_of(pipe, 5), noise_of(pipe, other))[None].numpy()
        call = {"num_inference_steps": 3, "height": 64, "width": 64, "seed": 5}
        expected = pipe("a lion", latents=first, guidance_scale=3.0, **call).images[0]
        assert same(image, expected)
    assert not same(*images, most=40)


def test_the_ends_of_a_variation_are_the_seeds_own_images(server):
    plain = [post(server, "txt2img", seed=seed, sampler_name="Euler")[0][0] for seed in (5, 7)]
    asked = {"subseed": 7, "sampler_name": "Euler"}
    (whole,), _ = post(server, "txt2img", subseed_strength=1.0, **asked)
    assert same(whole, plain[1])
    (none,), info = post(server, "txt2img", subseed_strength=0.0, **asked)
    assert same(none, plain[0])
    assert "Variation" not in info["infotexts"][0]


def test_iterations_go_on_in_the_variation_seeds(server):
    own = {"sampler_name": "Euler a", "subseed_strength": 0.4}
    images, info = post(server, "txt2img", subseed=7, n_iter=2, **own)
    assert (info["all_seeds"], info["all_subseeds"]) == ([5, 5], [7, 8])
    asked = {"seed": 5, "num_inference_steps": 3, "prompt": "a lion", "sampler": "euler_a"}
    asked |= {"variation_seed": 8, "variation_strength": 0.4, "width": 64, "height": 64}
    job = server.post("/jobs", {**asked, "guidance_scale": 3.0}).json
    assert server.finish(job["id"])["state"] == "done"
    again, _ = post(server, "txt2img", subseed=8, **own)
    assert same(again[0], server.get(f"/jobs/{job['id']}/images/0").image)
    assert same(again[0], images[1])


@pytest.mark.slow
def test_the_second_pass_keeps_the_variation(server):
    asked = {"subseed": 7, "subseed_strength": 0.4, "batch_size": 2, "enable_hr": True}
    images, info = post(server, "txt2img", hr_scale=1.0, denoising_strength=0.5, **asked)
    assert len(images) == 2
    assert info["all_subseeds"] == [7, 8]
    assert "Variation seed: 8" in info["infotexts"][1]


@pytest.mark.parametrize("fill", [2, 3])
def test_latents_under_a_mask_begin_with_noise_or_nothing(server, pipe, fill):
    from diffusax.pipelines.plan.plan import Inpainting

    seen = []
    made = Inpainting.__new__

    image = picture()
    asked = {"init_images": [sent(image)], "mask": sent(mask()), "inpaint_full_res": False}
    asked |= {"inpainting_fill": fill, "denoising_strength": 0.5, "mask_blur": 0}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            Inpainting,
            "__new__",
            lambda cls, *args, **named: seen.append(args) or made(cls, *args, **named),
        )
        found, info = post(server, "img2img", sampler_name="Euler", **asked)
    small, latents, noise = (np.asarray(value)[0] for value in seen[0])
    inside = small[..., 0] == 1
    expected = noise[inside] if fill == 2 else np.zeros_like(noise[inside])
    np.testing.assert_allclose(latents[inside], expected, atol=1e-5)
    assert abs(latents[~inside] - noise[~inside]).mean() > 0.3
    words = {2: "latent noise", 3: "latent nothing"}[fill]
    assert f"Masked content: {words}" in info["infotexts"][0]
    kept = np.asarray(found[0]).astype(int)[:, 40:] - np.asarray(image)[:, 40:]
    assert abs(kept).mean() < 25


def test_styles_are_listed_and_put_around_prompts(server):
    listed = server.get("/sdapi/v1/prompt-styles").json
    assert [one["name"] for one in listed] == ["Oil", "Dark"]
    assert listed[0]["prompt"] == "an oil painting of {prompt}, thick paint"
    _, info = post(server, "txt2img", styles=["Oil", "Dark", "nix"], negative_prompt="bad")
    assert info["prompt"] == "an oil painting of a lion, thick paint, at night"
    assert info["negative_prompt"] == "bad, photo"
    assert "styles names 'nix', which is not in styles.csv" in info["warnings"]
    assert server.post("/sdapi/v1/txt2img", {**FEW, "styles": [3]}).status == 422


def test_what_is_not_here_is_read_over_with_a_warning(server):
    scripts = {
        "ADetailer": {"args": [True, {"ad_model": "face_yolov8n.pt"}]},
        "Sampler": {"args": [20, "Euler a", "Automatic"]},
        "Seed": {"args": [-1, False, -1, 0, 0, 0]},
        "Refiner": {"args": [False, "", 0.8]},
        "Comments": {"args": []},
        "Extra options": {"args": []},
        "Hypertile": {"args": [False]},
        "Soft Inpainting": {"args": [{"Soft inpainting": False, "Mask influence": 0}]},
    }
    _, info = post(server, "txt2img", alwayson_scripts=scripts, restore_faces=True)
    assert info["warnings"] == [
        "alwayson_scripts: ADetailer is read over, as it is not here",
        "restore_faces is read over, as there are no restorers of faces",
    ]


@pytest.mark.parametrize(
    ("sampler", "schedule", "told"),
    [
        ("Euler a", "Karras", "Euler a, Schedule type: Karras"),
        ("DPM++ 2M SDE", None, "DPM++ 2M SDE, Schedule type: Exponential"),
        ("DPM++ 2M", "SGM Uniform", "DPM++ 2M, Schedule type: SGM Uniform"),
        ("Euler", "align_your_steps", "Euler, Schedule type: Align Your Steps"),
        ("Euler", "beta", "Euler, Schedule type: Beta"),
    ],
)
def test_schedules_of_noise(server, sampler, schedule, told):
    _, info = post(server, "txt2img", sampler_name=sampler, scheduler=schedule)
    assert f"Sampler: {told}, " in info["infotexts"][0]
    assert info["warnings"] == []


def test_an_interrupted_call_answers_with_the_image_as_it_is(server):
    found = {}

    def draw():
        found["all"] = post(server, "txt2img", steps=150, n_iter=2, sampler_name="Euler")

    thread = threading.Thread(target=draw)
    thread.start()
    until = time.monotonic() + 30
    while (shown := server.get("/sdapi/v1/progress").json)["state"]["sampling_step"] < 20:
        assert time.monotonic() < until
        time.sleep(0.01)
    assert (shown["state"]["job_count"], shown["state"]["job_no"]) == (2, 0)
    assert server.post("/sdapi/v1/interrupt").json == {}
    thread.join(30)
    images, info = found["all"]
    assert images[0].size == (64, 64)
    assert len(info["infotexts"]) == len(images)
    assert np.asarray(images[0]).std() > 5
    shown = server.get("/sdapi/v1/progress").json
    assert (shown["progress"], shown["state"]["job_count"]) == (0, 0)


@pytest.mark.parametrize(
    ("asked", "schedule", "own"),
    [
        ("Euler", None, "flow_euler"),
        ("Euler", "Beta", "flow_euler"),
        ("Heun", None, "flow_heun"),
        ("DPM++ 2M", "Karras", "flow_euler"),
        ("UniPC", None, "unipc"),
        ("Flow Euler", None, "flow_euler"),
    ],
)
def test_networks_of_flow_matching_get_a_sampler_of_theirs(asked, schedule, own):
    samplers = ("flow_euler", "flow_heun", "unipc")
    entry = types.SimpleNamespace(
        name="flux", family="Flux", sampler="flow_euler", samplers=samplers, width=64, height=64
    )
    fields = read_call(TextToImage, {"sampler_name": asked, "scheduler": schedule})
    assert sampler_of(fields, entry) == own
    warned = call_warnings(fields, entry, {})
    assert bool(warned) == (asked == "DPM++ 2M" or schedule == "Beta")
    assert not warned or "which is generated with flow_euler (got" in warned[0]


def test_the_images_of_a_request_by_themselves():
    one = Generation(seed=SEEDS - 1, num_images=3)
    assert [one.single(i).seed for i in range(3)] == [SEEDS - 1, 0, 1]
    other = Generation(seed=5, variation_seed=SEEDS - 1, variation_strength=0.1)
    assert [other.single(i).variation_seed for i in range(2)] == [SEEDS - 1, 0]
    assert {other.single(i).seed for i in range(3)} == {5}
