"""The clients from PyPI against a running server: openai, webuiapi, huggingface_hub."""

import base64
import io
import json
import threading
import time

import numpy as np
import pytest
from PIL import Image
from support.running_server import mask, picture, running, sent

import diffusax
from diffusax.serving.client import ENDED
from diffusax.serving.requests.generation import SEEDS

FEW = {"num_inference_steps": 3}


@pytest.fixture(scope="module")
def server():
    with running() as found:
        yield found


@pytest.fixture(scope="module")
def openai_client(server):
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def webui(server):
    webuiapi = pytest.importorskip("webuiapi")
    host, port = server.url.removeprefix("http://").split(":")
    client = webuiapi.WebUIApi(host=host, port=int(port), steps=3)
    yield client
    client.session.close()


def opened(text):
    return Image.open(io.BytesIO(base64.b64decode(text)))


def file_of(image):
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


class TestOpenAI:
    def test_lists_models(self, openai_client):
        assert [model.id for model in openai_client.models.list()] == ["emoji"]
        assert openai_client.models.retrieve("emoji").owned_by == "diffusax"

    def test_generates(self, openai_client):
        own = {**FEW, "seed": 3, "guidance_scale": 1.0, "sampler": "euler_a"}
        answer = openai_client.images.generate(
            prompt="a lion", model="emoji", n=2, size="64x64", extra_body=own
        )
        images = [opened(datum.b64_json) for datum in answer.data]
        assert [image.size for image in images] == [(64, 64)] * 2
        assert "Sampler: Euler a, " in images[0].text["parameters"]
        assert [datum.seed for datum in answer.data] == [3, 4]
        again = openai_client.images.generate(prompt="a lion", extra_body={**own, "seed": 4})
        same = np.asarray(opened(again.data[0].b64_json)).astype(int) - np.asarray(images[1])
        assert abs(same).max() <= 2

    @pytest.mark.slow
    @pytest.mark.parametrize("kind", ["jpeg", "webp"])
    def test_writes_other_formats(self, openai_client, kind):
        answer = openai_client.images.generate(
            prompt="a", output_format=kind, output_compression=50, quality="high", extra_body=FEW
        )
        assert opened(answer.data[0].b64_json).format == kind.upper()
        assert answer.output_format == kind

    @pytest.mark.slow
    def test_answers_with_addresses(self, server, openai_client):
        answer = openai_client.images.generate(prompt="a", response_format="url", extra_body=FEW)
        url = answer.data[0].url
        assert url.startswith(server.url)
        assert server.get(url.removeprefix(server.url)).image.size == (64, 64)

    @pytest.mark.slow
    def test_streams(self, openai_client):
        events = list(
            openai_client.images.generate(
                prompt="a cat",
                stream=True,
                partial_images=2,
                extra_body={"num_inference_steps": 12},
            )
        )
        assert events[-1].type == "image_generation.completed"
        assert opened(events[-1].b64_json).size == (64, 64)
        partial = [event for event in events if event.type == "image_generation.partial_image"]
        assert len(partial) == len(events) - 1 <= 2
        assert [event.partial_image_index for event in partial] == list(range(len(partial)))

    @pytest.mark.slow
    def test_edits_with_a_mask_whose_transparent_part_is_drawn_anew(self, openai_client):
        image, hole = picture(), Image.new("RGBA", (64, 64), (0, 0, 0, 255))
        hole.paste((0, 0, 0, 0), (0, 0, 32, 64))
        answer = openai_client.images.edit(
            image=("a.png", file_of(image)),
            mask=("m.png", file_of(hole)),
            prompt="a lion",
            extra_body={**FEW, "strength": 1.0, "seed": 1},
        )
        drawn = np.asarray(opened(answer.data[0].b64_json)).astype(int)
        change = abs(drawn - np.asarray(image)).mean(axis=(0, 2))
        assert change[:28].mean() > 3 * change[36:].mean()

    @pytest.mark.slow
    def test_edits_streams_and_lists_of_one(self, openai_client):
        events = list(
            openai_client.images.edit(
                image=[("a.png", file_of(picture()))], prompt="a", stream=True, extra_body=FEW
            )
        )
        assert events[-1].type == "image_edit.completed"

    def test_errors_are_those_of_openai(self, openai_client):
        openai = pytest.importorskip("openai")
        with pytest.raises(openai.NotFoundError, match="'nix', which is not listed"):
            openai_client.images.generate(prompt="a", model="nix")
        with pytest.raises(openai.UnprocessableEntityError) as error:
            openai_client.images.generate(prompt="a", size="big")
        assert error.value.param == "size"
        files = [("a.png", file_of(picture()))] * 2
        with pytest.raises(openai.UnprocessableEntityError, match="at most 1 times"):
            openai_client.images.edit(image=files, prompt="a")
        with pytest.raises(openai.UnprocessableEntityError, match="'steps' is no field here"):
            openai_client.images.generate(prompt="a", extra_body={"steps": 3})


class TestWebui:
    def test_generates(self, webui):
        answer = webui.txt2img(
            prompt="a red apple", negative_prompt="b", seed=5, width=64, height=64, n_iter=2
        )
        assert [image.size for image in answer.images] == [(64, 64)] * 2
        assert answer.info["all_seeds"] == [5, 6]
        assert answer.info["sampler_name"] == "Euler a"
        assert answer.info["infotexts"][0] == answer.image.text["parameters"]
        assert "Negative prompt: b\nSteps: 3, Sampler: Euler a, " in answer.info["infotexts"][0]
        assert answer.parameters["steps"] == 3

    @pytest.mark.slow
    def test_makes_the_image_larger_in_a_second_pass(self, webui):
        answer = webui.txt2img(prompt="a", width=64, height=64, enable_hr=True, hr_scale=1.5)
        assert answer.image.size == (96, 96)
        assert "Denoising strength: 0.7" in answer.info["infotexts"][0]
        assert "Hires upscale: 1.5, Hires upscaler: Latent" in answer.info["infotexts"][0]

    @pytest.mark.slow
    def test_changes_an_image(self, webui):
        answer = webui.img2img(
            images=[picture(80, 64)], prompt="a", width=64, height=64, resize_mode=1, seed=1
        )
        assert answer.image.size == (64, 64)

    @pytest.mark.slow
    @pytest.mark.parametrize("whole", [True, False])
    def test_inpaints(self, webui, whole):
        image = picture(96, 64)
        answer = webui.img2img(
            images=[image],
            mask_image=mask(96, 64),
            prompt="a lion",
            width=64,
            height=64,
            denoising_strength=1.0,
            inpaint_full_res=not whole,
            inpaint_full_res_padding=8,
            inpainting_fill=1,
            mask_blur=0,
            steps=8,
            seed=1,
            sampler_name="DDIM",
            eta=0.0,
        )
        assert answer.image.size == ((64, 64) if whole else (96, 64))
        kept = np.asarray(answer.image.resize((96, 64))).astype(int)[:, 60:]
        assert abs(kept - np.asarray(image)[:, 60:]).mean() < 25

    @pytest.mark.slow
    def test_reads_settings_from_a_png(self, webui):
        drawn = webui.txt2img(prompt="a red apple", width=64, height=64, seed=5).image
        assert webui.png_info(drawn).info.startswith("a red apple\nSteps: 3, ")

    def test_sets_the_model_and_shows_lists(self, webui):
        assert webui.util_get_model_names() == ["emoji"]
        webui.util_set_model("emo")
        assert webui.util_get_current_model() == "emoji"
        everything = webui.get_options()
        assert webui.set_options({**everything, "CLIP_stop_at_last_layers": 2}) is None
        assert webui.get_options()["CLIP_stop_at_last_layers"] == 2
        webui.set_options(everything)
        assert "Euler a" in webui.util_get_sampler_names()
        assert "karras" in webui.util_get_scheduler_names()
        assert {one["name"] for one in webui.get_upscalers()} >= {"None", "Lanczos"}
        assert webui.get_latent_upscale_modes()[0] == {"name": "Latent"}
        assert webui.get_embeddings() == {"loaded": {}, "skipped": {}}
        assert webui.get_loras() == webui.get_sd_vae() == webui.get_face_restorers() == []
        assert webui.get_memory()["ram"]["total"] > 0
        assert webui.get_cmd_flags() == {}
        assert webui.get_scripts()["txt2img"][0] == "controlnet"
        assert webui.refresh_checkpoints() is None
        assert webui.controlnet_model_list() == []
        assert webui.controlnet_module_list()[:2] == ["none", "canny"]
        assert webui.controlnet_version() == 3
        webui.util_wait_for_ready(check_interval=0.05)

    @pytest.mark.slow
    def test_shows_progress_and_ends_on_request(self, server, webui):
        found = {}

        def draw():
            found["answer"] = server.post(
                "/sdapi/v1/txt2img", {"prompt": "a", "steps": 150, "n_iter": 3}
            )

        thread = threading.Thread(target=draw)
        thread.start()
        until = time.monotonic() + 30
        while (shown := webui.get_progress())["progress"] < 0.01 and time.monotonic() < until:
            time.sleep(0.01)
        assert shown["state"]["job_count"] == 3
        assert shown["state"]["sampling_steps"] == 150
        webui.skip()
        assert webui.interrupt() == {}
        thread.join()
        assert found["answer"].status == 200
        assert len(found["answer"].json["images"]) < 3
        assert webui.get_progress()["progress"] == 0
        # What comes after it is not ended.
        assert len(webui.txt2img(prompt="a", width=64, height=64).images) == 1

    def test_errors_are_those_of_a1111(self, server, webui):
        with pytest.raises(RuntimeError) as error:
            webui.txt2img(prompt="a", sampler_name="nix")
        status, text = error.value.args
        assert status == 404
        assert set(json.loads(text)) == {"error", "detail", "body", "errors"}
        for fields, said in (
            ({"tiling": True}, "tiling must be False here"),
            ({"subseed_strength": 2.0}, "subseed_strength must be a number from 0 up to 1"),
            ({"alwayson_scripts": {"AnimateDiff": {"args": [True]}}}, "has 'AnimateDiff'"),
            ({"override_settings": {"sd_vae": 3}}, "sd_vae must be the name"),
        ):
            answer = server.post("/sdapi/v1/txt2img", fields)
            assert answer.status == 422
            assert said in answer.json["detail"]


class TestHub:
    @pytest.fixture
    def client(self, server):
        hub = pytest.importorskip("huggingface_hub")
        return hub.InferenceClient(model=f"{server.url}/models/emoji", token="none")

    def test_generates(self, client):
        options = {"num_inference_steps": 3, "guidance_scale": 2, "seed": 1, "height": 64}
        image = client.text_to_image(
            "a lion", negative_prompt="b", width=64, scheduler="EulerDiscreteScheduler", **options
        )
        assert image.size == (64, 64)
        assert "Seed: 1, " in image.text["parameters"]

    @pytest.mark.slow
    def test_changes_an_image(self, client):
        image = client.image_to_image(file_of(picture()), prompt="a", num_inference_steps=3)
        assert image.size == (64, 64)
        assert client.image_to_image(file_of(picture())).size == (64, 64)


def test_a_client_that_goes_away_cancels_its_job(server):
    import http.client
    from urllib.parse import urlsplit

    connection = http.client.HTTPConnection(urlsplit(server.url).netloc)
    body = json.dumps({"prompt": "left alone", "num_inference_steps": 200})
    connection.request("POST", "/v1/images/generations", body, {"Content-Type": "application/json"})
    until = time.monotonic() + 30
    while (newest := server.engine.jobs()[0]).generation.prompt != "left alone":
        assert time.monotonic() < until
        time.sleep(0.01)
    connection.close()
    assert newest.wait(10) in ENDED
    assert newest.state == "cancelled"


def test_a_stream_that_is_left_cancels_its_job(server, openai_client):
    events = openai_client.images.generate(
        prompt="streamed", stream=True, partial_images=3, extra_body={"num_inference_steps": 200}
    )
    job = next(job for job in server.engine.jobs() if job.generation.prompt == "streamed")
    events.close()
    assert job.wait(10) == "cancelled"


def test_control_units_need_a_known_model(server):
    unit = {"image": sent(picture()), "module": "none", "model": "nix [1234abcd]"}
    scripts = {"controlnet": {"args": [unit]}}
    answer = server.post("/sdapi/v1/txt2img", {"prompt": "a", "alwayson_scripts": scripts})
    assert answer.status == 404
    assert "'nix'" in answer.json["detail"]
    scripts["controlnet"]["args"] = [{**unit, "module": "depth_midas"}]
    answer = server.post("/sdapi/v1/txt2img", {"prompt": "a", "alwayson_scripts": scripts})
    said = "module must be one of none, canny, invert (got 'depth_midas'), as there are no networks"
    assert said in answer.json["detail"]


@pytest.fixture(scope="module")
def with_models(tmp_path_factory):
    """A server over a folder with a model that edits, and a ControlNet."""
    from diffusax.checkpoints import resolve

    folder = tmp_path_factory.mktemp("models")
    for name, place in (("emoji-edit", "diffusers"), ("emoji-control", "ControlNet")):
        (folder / place).mkdir()
        (folder / place / name).symlink_to(resolve(name), target_is_directory=True)
    with running("emoji", folder) as found:
        yield found


@pytest.mark.slow
def test_a_controlnet_steers_as_in_a1111(with_models):
    webuiapi = pytest.importorskip("webuiapi")
    host, port = with_models.url.removeprefix("http://").split(":")
    client = webuiapi.WebUIApi(host=host, port=int(port), steps=4)
    assert client.controlnet_model_list() == ["emoji-control"]
    unit = webuiapi.ControlNetUnit(image=picture(), model="emoji-control", weight=1.0)
    fields = {"prompt": "a red apple", "width": 64, "height": 64, "seed": 1}
    # The client writes into its default for these scripts, and sends them again.
    steered = client.txt2img(**fields, controlnet_units=[unit], alwayson_scripts={})
    plain = client.txt2img(**fields, alwayson_scripts={})
    assert "ControlNet 0: " in steered.info["infotexts"][0]
    change = np.asarray(steered.image).astype(int) - np.asarray(plain.image)
    assert abs(change).mean() > 1
    client.session.close()


@pytest.mark.slow
def test_a_model_that_edits_takes_both_scales(with_models):
    fields = {"init_images": [sent(picture())], "prompt": "make it blue", "steps": 3, "seed": 1}
    fields |= {"override_settings": {"sd_model_checkpoint": "emoji-edit"}, "cfg_scale": 5}
    images = []
    for scale in (1.0, 2.0):
        answer = with_models.post("/sdapi/v1/img2img", {**fields, "image_cfg_scale": scale})
        assert answer.status == 200, answer.body
        info = json.loads(answer.json["info"])
        assert f"Image CFG scale: {scale:g}" in info["infotexts"][0]
        images.append(np.asarray(opened(answer.json["images"][0])).astype(int))
    assert abs(images[0] - images[1]).mean() > 0.5
    answer = with_models.post("/models/emoji-edit", {"inputs": "a prompt alone"})
    assert answer.status == 422
    assert "give it an image" in answer.json["error"]["message"]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("txt2img", {"width": 16384, "height": 16384}),
        ("txt2img", {"width": 2048, "height": 2048, "enable_hr": True, "hr_scale": 8}),
        ("img2img", {"width": 16384, "height": 16384, "init_images": [sent(picture())]}),
    ],
)
def test_no_picture_is_made_larger_than_an_image_may_be(server, monkeypatch, path, fields):
    monkeypatch.setattr(Image.Image, "resize", lambda *_: pytest.fail("it was resized"))
    answer = server.post(f"/sdapi/v1/{path}", {"prompt": "a", **fields})
    assert answer.status == 422
    assert "pixels (got 16384x16384)" in answer.json["detail"]


@pytest.mark.parametrize(
    "fields",
    [
        {"init_images": ["x"] * 17},
        {"init_images": ["x"], "n_iter": 17},
        {"alwayson_scripts": {"ControlNet": {"args": [{"image": "x"}] * 5}}},
    ],
)
def test_too_many_pictures_are_refused_before_they_are_decoded(server, fields):
    path = "img2img" if "init_images" in fields else "txt2img"
    answer = server.post(f"/sdapi/v1/{path}", fields)
    assert answer.status == 422
    assert " at most " in answer.json["detail"]


def test_all_iterations_of_a_call_count_as_its_images(server):
    answer = server.post("/sdapi/v1/txt2img", {"prompt": "a", "n_iter": 5, "batch_size": 4})
    assert answer.status == 422
    assert "at most 16 images (got 20)" in answer.json["detail"]


@pytest.fixture
def evaluated(monkeypatch):
    """The numbers of rows of the runs that are prepared."""
    evaluated = []
    schedule = diffusax.pipelines.tasks.setup.compute_schedule

    def counted(*args, **options):
        found = schedule(*args, **options)
        if not options.get("uncut"):
            evaluated.append(len(found))
        return found

    monkeypatch.setattr("diffusax.pipelines.tasks.setup.compute_schedule", counted)
    return evaluated


def test_the_second_pass_takes_its_steps_in_full(server, evaluated):
    fields = {"prompt": "a", "steps": 4, "seed": 3, "sampler_name": "Euler", "enable_hr": True}
    second = {"hr_scale": 1.0, "denoising_strength": 0.3, "hr_second_pass_steps": 3}
    answer = server.post("/sdapi/v1/txt2img", {**fields, **second, "hr_prompt": "b"})
    assert answer.status == 200, answer.body
    assert evaluated == [4, 3]
    [text] = json.loads(answer.json["info"])["infotexts"]
    assert text.startswith("a\nSteps: 4, Sampler: Euler, ")
    told = ["Size: 64x64", "Denoising strength: 0.3", "Hires upscale: 1, Hires steps: 3"]
    told += ["Hires upscaler: Latent", "Hires prompt: b"]
    assert [part for part in told if part not in text] == []


@pytest.mark.slow
@pytest.mark.parametrize("strength", [0.0, 0.2])
def test_img2img_evaluates_one_step_at_least(server, evaluated, strength):
    for extra in ({}, {"mask": sent(mask()), "inpainting_fill": 1, "inpaint_full_res": False}):
        own = {"prompt": "a", "steps": 4, "init_images": [sent(picture())], **extra}
        answer = server.post("/sdapi/v1/img2img", {**own, "denoising_strength": strength})
        assert answer.status == 200, answer.body
    assert evaluated == [1, 1]


def test_seeds_of_64_bits_are_seeds_of_their_own(server):
    found = []
    for seed in (5, 2**32 + 5, SEEDS - 1, -1 + SEEDS):
        body = {"prompt": "a", "seed": seed, "steps": 1, "batch_size": 1}
        answer = server.post("/sdapi/v1/txt2img", body)
        assert json.loads(answer.json["info"])["seed"] == seed
        found.append(answer.json["images"][0].split("IDAT")[0][-3000:])
    assert len(set(found)) == 3
