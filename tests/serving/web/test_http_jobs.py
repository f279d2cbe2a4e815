"""Jobs over HTTP: submitted, watched, fetched, cancelled."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import iTXt
from PIL.TiffImagePlugin import IFDRational
from support.running_server import mask, picture, running, sent

import diffusax
from diffusax.infotext.files import open_image
from diffusax.serving.requests.generation import Generation, read_image, write_infotext
from diffusax.serving.web.replies import Json, encode, sse


@pytest.fixture(scope="module")
def server():
    with running(most_steps=50, most_images=4) as found:
        yield found


def test_a_job_is_submitted_drawn_and_fetched(server):
    fields = {"prompt": "a red apple", "num_inference_steps": 3, "seed": 7, "num_images": 2}
    answer = server.post("/jobs", {**fields, "sampler": "euler"})
    assert answer.status == 202
    job = answer.json
    assert answer.headers["location"] == f"/jobs/{job['id']}"
    assert job["state"] in ("queued", "loading", "running")
    assert job["seeds"] == [7, 8]
    done = server.finish(job["id"])
    assert (done["state"], done["progress"], done["steps_done"]) == ("done", 1.0, 6)
    assert done["settings"]["sampler"] == "euler"
    assert done["settings"]["guidance_scale"] == 2.0
    for path, seed in zip(done["images"], done["seeds"]):
        text = server.get(path).image.text["parameters"]
        assert text.startswith("a red apple\nSteps: 3, Sampler: Euler, ")
        assert f"Seed: {seed}, Size: 64x64, Model: emoji" in text


@pytest.mark.slow
def test_images_are_those_of_the_pipeline(server):
    fields = {"prompt": "a red apple", "num_inference_steps": 3, "seed": 7, "num_images": 2}
    job = server.post("/jobs", {**fields, "sampler": "euler"}).json
    pipe = diffusax.DiffusionPipeline.from_pretrained("emoji")
    pipe.scheduler = diffusax.EulerDiscreteScheduler.from_config(pipe.scheduler.config)
    for path, seed in zip(server.finish(job["id"])["images"], (7, 8)):
        expected = pipe("a red apple", num_inference_steps=3, guidance_scale=2.0, seed=seed)
        # A batch of another size rounds its sums otherwise.
        drawn = np.asarray(server.get(path).image).astype(int)
        assert abs(drawn - np.asarray(expected.images[0])).max() <= 2


def test_events_tell_of_a_job_from_its_state_to_its_end(server):
    id = server.post("/jobs", {"prompt": "a cat", "num_inference_steps": 4}).json["id"]
    events = list(server.events(f"/jobs/{id}/events?previews=0"))
    names = [name for name, _ in events]
    assert (names[0], names[-1]) == ("state", "end")
    assert "image" in names
    assert "preview" not in names
    assert "settings" not in events[0][1]
    steps = [data["steps_done"] for _, data in events]
    assert steps == sorted(steps)
    # Who comes back later hears how it ended.
    again = list(server.events(f"/jobs/{id}/events"))
    assert [name for name, _ in again] == ["state", "end"]
    assert again[-1][1]["images"] == [f"/jobs/{id}/images/0"]


@pytest.mark.parametrize("wanted", [True, False])
def test_previews_come_to_who_wants_them(server, wanted):
    fields = {"prompt": "a cat", "num_inference_steps": 50, "num_images": 4}
    previews = []
    # On a crowded machine a job may be over before its reader is heard.
    for _ in range(5 if wanted else 1):
        id = server.post("/jobs", fields).json["id"]
        found = list(server.events(f"/jobs/{id}/events?previews={int(wanted)}"))
        previews += [data["preview"] for name, data in found if name == "preview"]
        if previews:
            break
    assert bool(previews) == wanted
    assert all(text.startswith("data:image/jpeg;base64,") for text in previews)


def test_a_job_ends_when_it_is_cancelled(server):
    id = server.post("/jobs", {"prompt": "a cat", "num_inference_steps": 50, "num_images": 4}).json[
        "id"
    ]
    assert server.ask("DELETE", f"/jobs/{id}").json["state"] == "cancelled"
    assert server.finish(id)["state"] == "cancelled"
    assert server.get(f"/jobs/{id}/images/3").status == 404
    assert id in [job["id"] for job in server.get("/jobs").json["jobs"]]


def test_a_job_that_is_not_done_at_its_deadline_fails(server):
    fields = {"prompt": "a", "num_inference_steps": 50, "num_images": 4, "deadline": 0.01}
    job = server.post("/jobs", fields).json
    assert job["deadline"] == pytest.approx(job["created"] + 0.01, abs=0.01)
    late = server.finish(job["id"])
    assert late["state"] == "failed"
    assert "not ready within 0.0 seconds" in late["error"]["message"]
    own = {"prompt": "a", "num_inference_steps": 50, "n": 4, "deadline": 0.01}
    assert server.post("/v1/images/generations", own).status == 504
    assert server.post("/jobs", {"prompt": "a"}).json["deadline"] is None


def test_a_reader_that_leaves_cancels_nothing(server):
    id = server.post("/jobs", {"prompt": "a cat", "num_inference_steps": 6}).json["id"]
    assert len(list(server.events(f"/jobs/{id}/events", count=1))) == 1
    assert server.finish(id)["state"] == "done"


def test_pictures_come_as_base64_and_keep_what_the_mask_keeps(server):
    image = picture()
    fields = {"prompt": "a lion", "num_inference_steps": 4, "seed": 1, "strength": 0.9}
    job = server.post("/jobs", {**fields, "image": sent(image), "mask_image": sent(mask())})
    assert job.status == 202, job.body
    done = server.finish(job.json["id"])
    assert done["state"] == "done", done
    assert (done["settings"]["width"], done["settings"]["height"]) == (64, 64)
    assert "image" not in done["settings"]


def test_settings_are_read_back_from_a_png(server):
    prompt = 'りんご, b: c\nNegative prompt: "e"'
    fields = {"prompt": prompt, "negative_prompt": "d", "num_inference_steps": 2, "seed": 5}
    fields |= {"guidance_scale": 3.5, "sampler": "dpm++2m_karras", "width": 64, "height": 64}
    id = server.post("/jobs", fields).json["id"]
    server.finish(id)
    png = server.get(f"/jobs/{id}/images/0")
    assert png.headers["content-type"] == "image/png"
    read = server.post("/png-info", {"image": sent_bytes(png.body)}).json
    assert fields.items() <= read["settings"].items()
    assert read["left_out"] == []
    theirs = server.post("/sdapi/v1/png-info", {"image": sent_bytes(png.body)}).json
    assert theirs["info"] == theirs["items"]["parameters"] == read["text"]
    shown = ("Prompt", "Negative prompt", "Steps", "Sampler", "Schedule type", "CFG scale", "Seed")
    found = [theirs["parameters"][name] for name in (*shown, "Size-1", "Clip skip", "Hires prompt")]
    assert found == [prompt, "d", "2", "DPM++ 2M", "Karras", "3.5", "5", "64", "1", ""]
    body, kind = form("image", png.body)
    assert server.ask("POST", "/png-info", body=body, Content_Type=kind).json == read
    plain = server.post("/png-info", {"image": sent(picture())})
    assert plain.status == 422
    assert "has none" in plain.json["error"]["message"]


@pytest.mark.parametrize("kind", ["jpeg", "webp"])
def test_other_formats_hold_the_settings_in_a_comment(server, kind):
    prompt = "りんご 🍎\nNegative prompt: b"
    data = encode(
        picture(), kind, text=write_infotext(Generation(prompt=prompt, width=8, height=8), 5)
    )
    assert read_image(open_image(data)).settings["prompt"] == prompt
    assert server.post("/png-info", {"image": sent_bytes(data)}).json["settings"]["seed"] == 5


def test_whatever_comes_from_a_file_or_a_library_has_json(caplog):
    odd = {
        **{"text": iTXt("りんご", "", ""), "third": IFDRational(1, 3), "none": float("nan")},
        **{"number": np.float32(2), "list": np.arange(3), "path": Path("x"), "long": 10**40},
    }
    assert json.loads(Json(odd).body) == {
        **{"text": "りんご", "third": 1 / 3, "none": None, "number": 2.0, "list": [0, 1, 2]},
        **{"path": "x", "long": 10**40},
    }
    assert not caplog.records
    assert json.loads(Json({"broken": "a\ud800", (1, 2): {3}}).body) == {
        "broken": "a?",
        "(1, 2)": [3],
    }
    endless = []
    endless.append(endless)
    json.loads(Json(endless).body)
    assert json.loads(sse("x", {"a": "\ud800"}).split(b"data: ")[1]) == {"a": "?"}
    assert "a reply held what has no JSON" in caplog.text


def sent_bytes(data):
    import base64

    return base64.b64encode(data).decode()


def form(name, data):
    """A multipart form with one file."""
    head = f'--X\r\nContent-Disposition: form-data; name="{name}"; filename="a.png"\r\n\r\n'
    return head.encode() + data + b"\r\n--X--\r\n", "multipart/form-data; boundary=X"


@pytest.mark.parametrize(
    ("fields", "status", "said"),
    [
        ({"prompt": 3}, 422, "prompt must be a text"),
        ({"steps": 3}, 422, "'steps' is no field here"),
        ({"num_inference_steps": 51}, 422, "num_inference_steps must be at most 50 steps (got 51)"),
        ({"num_images": 5}, 422, "num_images must be at most 4 images (got 5)"),
        ({"width": 4096, "height": 4096}, 422, "width times height must be at most"),
        ({"width": 63}, 422, "width must be divisible by 8 (got 63)"),
        ({"seed": -1}, 422, "seed must be a whole number from 0"),
        ({"model": "../../etc/passwd"}, 404, "'../../etc/passwd', which is not listed"),
        ({"adapters": {"../a": 1.0}}, 404, "which is not listed"),
        ({"sampler": "nix"}, 422, "sampler must be one that suits"),
        ({"image": "https://example.org/a.png"}, 422, "not an address"),
        ({"image": "aGVsbG8="}, 422, "none of PNG, JPEG, WEBP"),
        ({"mask_image": None, "strength": 0.5}, 422, "strength needs image"),
        ({"controls": [{"model": "a"}]}, 422, "controls"),
        ({"controls": [{"model": "a", "image": "x"}] * 5}, 422, "controls must be at most 4"),
        ({"deadline": 0}, 422, "deadline must be a number"),
        ({"prompt": "x" * 10_001}, 422, "prompt must be at most 10000 characters"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(server, fields, status, said):
    answer = server.post("/jobs", fields)
    assert answer.status == status, answer.body
    error = answer.json["error"]
    assert said in error["message"]
    assert "\n" not in error["message"]
    assert set(error) == {"message", "type", "param", "code"}


def test_a_bomb_is_refused_by_its_header(server):
    for side, said in ((5000, "got 5000x5000"), (14_000, "got many times as many")):
        file = io.BytesIO()
        Image.new("1", (side, side)).save(file, "PNG", compress_level=1)
        answer = server.post("/jobs", {"prompt": "a", "image": sent_bytes(file.getvalue())})
        assert answer.status == 413
        assert said in answer.json["error"]["message"]


def test_other_formats_than_png_jpeg_and_webp_are_not_opened(server):
    file = io.BytesIO()
    picture().save(file, "GIF")
    answer = server.post("/jobs", {"prompt": "a", "image": sent_bytes(file.getvalue())})
    assert answer.status == 422
    for kind in ("JPEG", "WEBP"):
        file = io.BytesIO()
        picture().save(file, kind)
        fields = {"prompt": "a", "num_inference_steps": 2, "image": sent_bytes(file.getvalue())}
        job = server.post("/jobs", fields)
        assert job.status == 202, job.body
        server.ask("DELETE", f"/jobs/{job.json['id']}")


def test_capabilities_list_what_requests_can_name(server):
    found = server.get("/capabilities").json
    model = found["models"][0]
    assert (model["name"], model["width"], model["multiple"]) == ("emoji", 64, 8)
    assert "path" not in model
    assert set(model["samplers"]) <= set(found["samplers"])
    assert found["limits"]["steps"] == 50
    assert list(found["sampler_titles"].items())[:2] == [
        ("dpm++2m_karras", "DPM++ 2M Karras"),
        ("dpm++2m", "DPM++ 2M"),
    ]
    assert set(found["sampler_titles"]) == set(found["samplers"])
    assert (model["images"], model["strength"]) == (1, True)
    assert not found["api_key_needed"]


@pytest.mark.parametrize(
    ("prompt", "tokens", "windows"),
    [
        ("", 0, 1),
        ("a red apple", 3, 1),
        ("a (red:1.3) apple <lora:x:0.5>", 3, 1),
        ("apple " * 27, 27, 2),
        ("a BREAK apple", 2, 2),
    ],
)
def test_tokens_are_counted_as_the_model_reads_them(server, prompt, tokens, windows):
    if not server.service.catalogue.entry("emoji").loaded:
        unknown = {"tokens": None, "most": None, "window": None}
        assert server.post("/tokens", {"prompt": prompt}).json == unknown
        server.finish(server.post("/jobs", {"num_inference_steps": 1}).json["id"])
    found = server.post("/tokens", {"prompt": prompt, "model": "emoji"}).json
    assert found == {"tokens": tokens, "most": 26 * windows, "window": 26}


def test_tokens_of_a_text_that_cannot_be_read_are_refused(server):
    server.finish(server.post("/jobs", {"num_inference_steps": 1}).json["id"])
    assert "number" in server.post("/tokens", {"prompt": "<lora:x:y>"}).json["error"]["message"]
    assert server.post("/tokens", {"prompt": "", "model": "none"}).status == 404


def test_more_images_than_the_model_looks_at_are_refused(server):
    image = sent(picture())
    one = server.post("/jobs", {"prompt": "a", "image": image, "more_images": [image]})
    assert (one.status, "at most 1 times" in one.json["error"]["message"]) == (422, True)
    none = server.post("/jobs", {"prompt": "a", "more_images": [image]})
    assert none.json["error"]["param"] == "more_images"
    wrong = server.post("/jobs", {"image": image, "more_images": ["?"]})
    assert wrong.json["error"]["param"] == "more_images[0]"


def test_health_readiness_and_metrics(server, monkeypatch):
    assert server.get("/health").json == {"status": "ok"}
    assert server.get("/ready").json == {"status": "ready"}
    assert server.get("/nix").status == 404
    refused = server.engine.metrics.jobs["refused"]
    assert server.post("/jobs", {"num_inference_steps": 51}).status == 422
    with monkeypatch.context() as broken:
        broken.delattr(server.engine, "metrics")
        assert server.get("/metrics").status == 500
    text = server.get("/metrics").body.decode()
    assert "diffusax_queued " in text
    assert f'diffusax_jobs_total{{state="refused"}} {refused + 1}' in text
    for route, status in (("none", 404), ("/jobs", 422), ("/metrics", 500)):
        assert f'diffusax_requests_total{{route="{route}",status="{status}"}}' in text
    assert 'diffusax_requests_total{route="/health",status="200"}' in text


def test_pictures_beside_loras_are_sent(tmp_path):
    folder = tmp_path / "Lora"
    folder.mkdir()
    for name in ("owl", "plain"):
        owl = Path(diffusax.__file__).parent / "data/emoji_owl/pytorch_lora_weights.safetensors"
        (folder / f"{name}.safetensors").write_bytes(owl.read_bytes())
    data = encode(picture(8, 8))
    (folder / "owl.preview.png").write_bytes(data)
    with running("emoji", tmp_path) as found:
        loras = found.get("/capabilities").json["loras"]
        assert {one["name"]: one["preview"] for one in loras} == {"owl": True, "plain": False}
        answer = found.get("/loras/owl/preview")
        assert (answer.headers["content-type"], answer.body) == ("image/png", data)
        assert found.get("/loras/plain/preview").status == 404
        (folder / "owl.preview.png").unlink()
        assert found.get("/loras/owl/preview").status == 404
        assert found.get("/loras/..%2f..%2fx/preview").status == 404
