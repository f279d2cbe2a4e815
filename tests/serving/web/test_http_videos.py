"""Videos over HTTP: jobs, OpenAI's videos API with its own client, and what is refused."""

import base64
import dataclasses
import io

import numpy as np
import pytest
from PIL import Image
from support.running_server import picture, running, sent
from support.tiny_transformers import (
    wan_image_components,
    wan_pipeline,
    wan_transformer,
    wan_vace_transformer,
)

import diffusax
from diffusax.images import clips
from diffusax.runtime.programs.compilations import count_compilations
from diffusax.serving.catalogue.catalogue import Catalogue
from diffusax.serving.engine.videos import Video
from diffusax.serving.requests.errors import Refused
from diffusax.serving.requests.generation import Generation
from diffusax.serving.web.replies import encode, in_base64

pytest.importorskip("imageio_ffmpeg")

pytestmark = pytest.mark.filterwarnings("ignore:The Sora API:DeprecationWarning")
SIZE = {"width": 32, "height": 16, "num_frames": 9}
FEW = {"num_inference_steps": 3, "guidance_scale": 1.0, "seed": 1}
FIELDS = {"prompt": "a cat", **SIZE, **FEW}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Models of texts, of images, of both, and VACE's."""
    root = tmp_path_factory.mktemp("models")
    wan_pipeline(root / "texts")
    wan_pipeline(
        root / "images", "WanImageToVideoPipeline", transformer=wan_transformer(4, in_channels=10)
    )
    wan_pipeline(root / "both", expand_timesteps=True)
    wan_pipeline(root / "vace", "WanVACEPipeline", transformer=wan_vace_transformer())
    return root


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    """A model with two transformers, one of first and last images, one of first alone."""
    root = tmp_path_factory.mktemp("others")
    wan_pipeline(root / "two", transformer_2=wan_transformer(7), boundary_ratio=0.7)
    for name, places in (("between", 10), ("first", None)):
        wan_pipeline(root / name, "WanImageToVideoPipeline", **wan_image_components(places=places))
    return root


@pytest.fixture(scope="module")
def server(folder):
    limits = {"most_frames": 33, "most_video_pixels": 96 * 96 * 36}
    with running("texts", folder, **limits) as found:
        yield found


@pytest.fixture(scope="module")
def client(server):
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as found:
        yield found


def read(data):
    with clips.opened(data, 999, 10**9) as reader:
        return reader.fps(), list(reader.frames)


def grey(frames):
    """Frames without their colours, which H.264 keeps at half the resolution."""
    return np.stack([np.asarray(frame.convert("L"), int) for frame in frames])


def done(server, fields):
    answer = server.post("/jobs", fields)
    assert answer.status == 202, answer.body
    job = server.finish(answer.json["id"])
    assert job["state"] == "done", job["error"]
    return job


def test_a_job_makes_the_video_of_the_pipeline_with_its_settings_inside(server, folder):
    job = done(server, {**FIELDS, "num_images": 2})
    assert (job["images"], len(job["videos"])) == ([], 2)
    assert (job["settings"]["num_frames"], job["settings"]["fps"]) == (9, 16)
    file = server.get(job["videos"][1])
    assert file.headers["content-type"] == server.get("/capabilities").json["video_type"]
    assert 'filename="diffusax-2.mp4"' in file.headers["content-disposition"]
    fps, frames = read(file.body)
    assert (fps, len(frames), frames[0].size) == (16, 9, (32, 16))
    pipe = diffusax.WanPipeline.from_pretrained(folder / "texts")
    expected = pipe("a cat", **SIZE, **{**FEW, "seed": 2}, output_type="pil").frames[0]
    for one, other in zip(grey(frames), grey(expected), strict=True):
        assert np.abs(one - other).mean() < 10
    found = server.post("/png-info", {"image": in_base64(file.body)}).json
    stated = {**FIELDS, "seed": 2, "fps": 16, "model": "texts"}
    assert stated.items() <= found["settings"].items()
    assert found["left_out"] == []
    assert "Frames: 9, FPS: 16" in found["text"]


def test_parts_and_small_pictures_of_a_video_are_sent(server):
    path = done(server, FIELDS)["videos"][0]
    whole = server.get(path).body
    part = server.get(path, Range="bytes=4-11")
    assert (part.status, part.body) == (206, whole[4:12])
    assert part.headers["content-range"] == f"bytes 4-11/{len(whole)}"
    assert server.get(path, Range="bytes=-5").body == whole[-5:]
    assert server.get(path, Range="bytes=10-").body == whole[10:]
    assert server.get(path, Range="bytes=0-1,5-6").status == 200
    assert server.get(path, Range=f"bytes={len(whole)}-").status == 416
    assert server.get(f"{path}?variant=thumbnail").image.size == (32, 16)
    sheet = server.get(f"{path}?variant=spritesheet")
    assert (sheet.headers["content-type"], sheet.image.size) == ("image/jpeg", (128, 48))
    assert server.get(f"{path}?variant=x").status == 422
    assert server.get(path.replace("videos", "images")).status == 404


def test_another_prompt_compiles_nothing(server):
    done(server, FIELDS)
    with count_compilations() as compiled:
        done(server, {**FIELDS, "prompt": "a dog", "num_inference_steps": 5, "seed": 3})
    assert compiled == []


def test_previews_show_the_middle_and_move(server):
    id = server.post("/jobs", {**FIELDS, "num_inference_steps": 200}).json["id"]
    shown = [data for name, data in server.events(f"/jobs/{id}/events") if name == "preview"]
    assert shown
    still, *moving = (
        Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2])))
        for uri in (shown[-1]["preview"], *shown[-1]["frames"])
    )
    assert [(one.format, one.size) for one in (still, *moving)] == [("JPEG", (32, 16))] * 6
    # Close to what becomes of it: nearer to its own middle frame than to another's.
    own = read(server.get(server.finish(id)["videos"][0]).body)[1][4]
    other = read(server.get(done(server, {**FIELDS, "seed": 9})["videos"][0]).body)[1][4]
    far = [np.abs(np.asarray(still, int) - np.asarray(x, int)).mean() for x in (own, other)]
    assert far[0] < far[1]


def test_a_video_is_cancelled_and_forgotten(server):
    id = server.post("/jobs", {**FIELDS, "num_inference_steps": 200}).json["id"]
    assert server.ask("DELETE", f"/jobs/{id}").json["state"] == "cancelled"
    failed = server.get(f"/v1/videos/{id}").json
    assert (failed["status"], failed["error"]["code"]) == ("failed", "cancelled")
    assert server.get(f"/v1/videos/{id}/content").status == 409
    kept = server.engine.state().kept
    assert server.ask("DELETE", f"/v1/videos/{id}").json["deleted"]
    assert server.get(f"/jobs/{id}").status == 404
    assert server.engine.state().kept == kept - 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_frames": 8}, "num_frames must be one more than a multiple of 2 .*; use 7 or 9"),
        ({"num_frames": 35}, "num_frames must be at most 33 frames"),
        (
            {"width": 128, "height": 96, "num_frames": 33},
            "width times height times num_frames must",
        ),
        ({"width": 30}, "width must be divisible by 4"),
        ({"fps": 0}, "fps must be"),
        ({"mask_image": sent(picture())}, "mask_image must be left out for 'texts'"),
        ({"image": sent(picture())}, "'texts' is made for text to video, not for image to video"),
        ({"model": "images"}, "'images' is made for image to video, not for text to video"),
        ({"video": "aGVsbG8="}, "video must be a video's file"),
        ({"video": "https://example.org/a.mp4"}, "not an address"),
        ({"controls": [{"model": "x", "image": sent(picture())}]}, "controls names"),
        ({"last_image": sent(picture())}, "last_image must be left out for 'texts', whose videos"),
        (
            {"mask_video": sent(picture())},
            "mask_video must be left out for 'texts', which reads no",
        ),
        ({"guidance_scale_2": 3}, "guidance_scale_2 must be left out for 'texts', which has one"),
        ({"model": "vace", "mask_video": sent(picture())}, "mask_video needs video"),
        ({"model": "vace", "last_image": sent(picture())}, "left out for 'vace', whose videos"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(server, change, message):
    answer = server.post("/jobs", {**FIELDS, **change})
    assert answer.status in (404, 422)
    with pytest.raises(ValueError, match=message):
        raise ValueError(answer.json["error"]["message"])


def test_apis_of_images_refuse_models_of_videos_and_those_of_videos_others(folder):
    (folder / "emoji").symlink_to(diffusax.checkpoints.hub.EMBEDDED["emoji"])
    try:
        with running("texts", folder) as server:
            for path, fields in (
                ("/v1/images/generations", {"prompt": "a", "model": "texts"}),
                ("/sdapi/v1/txt2img", {"prompt": "a", "steps": 1}),
            ):
                assert "generates videos" in str(server.post(path, fields).json)
            refused = server.post("/v1/videos", {"prompt": "a", "model": "emoji"}).json
            assert "generates images" in refused["error"]["message"]
            for name in ("num_frames", "fps", "guidance_scale_2"):
                refused = server.post("/jobs", {"prompt": "a", "model": "emoji", name: 5}).json
                assert f"{name} must be left out for 'emoji'" in refused["error"]["message"]
            # OpenAI's own names, and none, mean the first model that does what is asked for.
            few = {"num_inference_steps": 1, "seed": 1}
            made = server.post("/v1/images/generations", {"prompt": "a", **few})
            assert made.json["size"] == "64x64"
    finally:
        (folder / "emoji").unlink()


def test_openai_s_client_makes_polls_lists_and_deletes(server, client):
    few = {"extra_body": FEW}
    made = client.videos.create(prompt="a cat", model="sora-2", size="32x16", seconds="0.5", **few)
    assert made.status in ("queued", "in_progress")
    assert (made.size, made.seconds, made.model) == ("32x16", "0.5", "texts")
    video = client.videos.poll(made.id, poll_interval_ms=50)
    assert (video.status, video.progress, video.error) == ("completed", 100, None)
    assert video.created_at <= video.completed_at < video.expires_at
    content = client.videos.download_content(video.id)
    assert content.response.headers["content-type"] == "video/mp4"
    fps, frames = read(content.read())
    assert (fps, len(frames)) == (16, 9)
    for variant, kind in (("thumbnail", "WEBP"), ("spritesheet", "JPEG")):
        data = client.videos.download_content(video.id, variant=variant).read()
        assert Image.open(io.BytesIO(data)).format == kind
    again = client.videos.remix(video.id, prompt="a dog")
    assert (again.remixed_from_video_id, again.prompt) == (video.id, "a dog")
    assert server.finish(again.id)["settings"]["seed"] == 1
    ids = [one.id for one in client.videos.list(limit=1, order="asc")]
    assert ids[-2:] == [video.id, again.id]
    assert [one.id for one in client.videos.list()] == ids[::-1]
    assert client.videos.delete(video.id).deleted
    openai = pytest.importorskip("openai")
    with pytest.raises(openai.NotFoundError):
        client.videos.retrieve(video.id)


def test_openai_s_fields_come_as_json_and_are_checked(server):
    fields = {"prompt": "a", "size": "32x16", "seconds": "0.5", **FEW}
    answer = server.post("/v1/videos", fields)
    assert answer.status == 200, answer.body
    server.finish(answer.json["id"])
    for change, message in (
        ({"seconds": "soon"}, "seconds must be a number"),
        ({"num_frames": 9}, "seconds must be left out"),
        ({"size": "large"}, "size must be"),
        ({"input_reference": {"file_id": "file-1"}}, "no files are kept"),
    ):
        refused = server.post("/v1/videos", {**fields, **change})
        assert refused.status == 422
        assert message in refused.json["error"]["message"]
    assert server.get("/v1/videos?limit=0").status == 422
    assert server.get("/v1/videos?order=up").status == 422
    assert server.get("/v1/videos?after=x").status == 404


def test_hugging_face_s_route_answers_with_the_file(server):
    parameters = {**SIZE, **FEW}
    answer = server.post("/models/texts", {"inputs": "a cat", "parameters": parameters})
    assert answer.headers["content-type"] == "video/mp4"
    assert answer.headers["x-seed"] == "1"


@pytest.mark.slow
@pytest.mark.parametrize("model", ["images", "both", "vace"])
def test_a_video_is_made_of_an_image(client, model):
    file = "in.png", encode(picture(96, 48))
    made = client.videos.create_and_poll(
        prompt="it moves",
        model=model,
        input_reference=file,
        size="32x16",
        seconds="0.5",
        poll_interval_ms=50,
        extra_body=FEW,
    )
    assert made.status == "completed", made.error
    _, frames = read(client.videos.download_content(made.id).read())
    assert (len(frames), frames[0].size) == (13 if model == "both" else 9, (32, 16))


@pytest.mark.slow
@pytest.mark.parametrize("model", ["texts", "vace"])
def test_a_video_is_made_of_a_video(server, model):
    given = clips.encode_video([picture(64, 32)] * 10, 10).data
    fields = {"prompt": "a", "width": 32, "height": 16, "model": model, **FEW}
    fields["num_inference_steps"] = 5
    job = done(server, {**fields, "video": in_base64(given)})
    # As many frames as can be, at its own rate.
    assert (job["settings"]["num_frames"], job["settings"]["fps"]) == (9, 10)
    fps, frames = read(server.get(job["videos"][0]).body)
    assert (fps, len(frames)) == (10, 9)
    many = server.post("/jobs", {**fields, "num_frames": 11, "video": in_base64(given)})
    assert "at most the 10 frames of video" in many.json["error"]["message"]


def test_requests_take_the_shape_and_the_rate_of_what_they_start_from(folder):
    catalogue = Catalogue(None, folder)
    entries = {entry.name: entry for entry in catalogue.models}
    tasks = {
        "texts": ("text-to-video", "video-to-video"),
        "images": ("image-to-video",),
        "both": ("text-to-video", "image-to-video", "video-to-video"),
        "vace": ("text-to-video", "image-to-video", "video-to-video"),
    }
    assert {name: entry.tasks for name, entry in entries.items()} == tasks
    assert {name: entry.fps for name, entry in entries.items()} == {
        **dict.fromkeys(tasks, 16),
        "both": 24,
    }
    plain = catalogue.check(Generation(model="texts"))
    assert (plain.width, plain.height, plain.num_frames, plain.fps) == (208, 120, 81, 16)
    tall = catalogue.check(Generation(model="images", image=picture(300, 600)))
    assert (tall.width, tall.height) == tall.image.size == (112, 220)
    clip = clips.Clip((picture(64, 64),) * 8, 29.97)
    own = catalogue.check(Generation(model="texts", video=clip))
    assert (own.num_frames, own.fps, own.width, own.height) == (7, 30, 156, 156)
    assert (len(own.video.frames), own.video.size) == (7, (156, 156))
    assert (own.task, own.strength) == ("video-to-video", 0.8)
    with pytest.raises(Refused, match="cannot be given together"):
        catalogue.check(Generation(model="both", image=picture(), video=clip))
    several = Generation(model="vace", image=picture(), more_images=(picture(),) * 3, video=clip)
    assert catalogue.check(several).num_frames == 7
    with pytest.raises(Refused, match="at most 4 times"):
        catalogue.check(dataclasses.replace(several, more_images=(picture(),) * 4))


def test_the_less_noisy_steps_have_a_scale_of_their_own(others):
    fields = {"prompt": "a", "model": "two", **SIZE, **FEW, "guidance_scale": 2.0}
    with running("two", others) as server:
        listed = {one["name"]: one for one in server.get("/capabilities").json["models"]}
        assert [listed[x]["guidance_scale_2"] for x in ("two", "first")] == [True, False]
        job = done(server, {**fields, "guidance_scale_2": 90.0})
        [made] = server.engine.job(job["id"]).images
        file = server.get(job["videos"][0]).body
        found = server.post("/png-info", {"image": in_base64(file)}).json
        assert found["settings"]["guidance_scale_2"] == 90.0
        assert "CFG scale 2: 90" in found["text"]
        given = {**fields, "guidance_scale_2": 9.0, "video": in_base64(file)}
        refused = server.post("/jobs", given).json["error"]
        assert refused["param"] == "guidance_scale_2"
        assert "guidance_scale_2 must be left out for video to video" in refused["message"]
    pipe = diffusax.WanPipeline.from_pretrained(others / "two")
    call = {**SIZE, **FEW, "guidance_scale": 2.0, "output_type": "pil"}
    own, plain = (pipe("a", guidance_scale_2=scale, **call).frames[0][4] for scale in (90.0, None))
    far = [np.abs(grey([made.poster]) - grey([one])).mean() for one in (own, plain)]
    assert far[0] < 0.5 < 5 < far[1]


def arguments(catalogue, generation):
    """What the pipeline of a request is called with."""
    pipe, found = catalogue.acquire(catalogue.check(generation))
    catalogue.release(pipe)
    return found


def test_a_video_ends_with_an_image_where_the_model_was_trained_so(folder, others):
    catalogue = Catalogue(None, others)
    entries = {entry.name: entry for entry in catalogue.models}
    assert [entries[x].last_image for x in ("two", "between", "first")] == [False, True, False]
    assert [entries[x].needs_last_image for x in ("between", "first")] == [True, False]
    ends = Generation(model="between", image=picture(64, 32), last_image=picture(50, 50))
    given = arguments(catalogue, dataclasses.replace(ends, width=32, height=16))
    assert given["last_image"].size == given["image"].size == (32, 16)
    with pytest.raises(Refused, match="last_image must be given for 'between'"):
        catalogue.check(dataclasses.replace(ends, last_image=None))
    with pytest.raises(Refused, match="last_image must be left out for 'first'"):
        catalogue.check(dataclasses.replace(ends, model="first"))
    # Further channels alone know of it in Wan 2.2.
    plain = Catalogue(None, folder)
    assert [one.name for one in plain.models if one.last_image] == ["images"]
    assert "last_image" not in arguments(
        plain, dataclasses.replace(ends, model="images", last_image=None)
    )


def test_a_last_image_changes_the_video_and_is_ready_from_the_start(others):
    with running("between", others) as server:
        server.service.open()
        assert server.get("/ready").status == 200, server.service.failure
        fields = {"prompt": "a", **SIZE, **FEW, "image": sent(picture(32, 16))}
        ends = [Image.new("RGB", (32, 16), colour) for colour in ("black", "white")]
        jobs = [done(server, {**fields, "last_image": sent(one)}) for one in ends]
        one, other = (np.stack(read(server.get(job["videos"][0]).body)[1]) for job in jobs)
        assert np.abs(one.astype(int) - other).mean() > 1


def test_a_mask_says_what_of_a_video_is_new(folder):
    catalogue = Catalogue(None, folder)
    clip = clips.Clip((picture(64, 32),) * 5, 8)
    # White at the left, in another shape than the video, of which the middle is taken.
    mask = Image.new("L", (64, 64))
    mask.paste(255, (0, 0, 24, 64))
    given = Generation(model="vace", video=clip, mask_video=mask, width=16, height=16)
    found = arguments(catalogue, given)
    assert (len(found["video"]), len(found["mask"])) == (5, 5)
    grey = np.asarray(found["mask"][4].convert("L"))
    assert grey.shape == (16, 16)
    assert (grey[:, :3] > 127).all()
    assert (grey[:, 5:] < 128).all()
    # A video has a mask of its own for each frame, and is cut as the video is.
    frames = tuple(Image.new("L", (64, 32), 255 * (i % 2)) for i in range(5))
    moving = dataclasses.replace(given, mask_video=clips.Clip(frames, 8), num_frames=3)
    greys = [int(np.asarray(one).mean()) for one in arguments(catalogue, moving)["mask"]]
    assert greys == [0, 255, 0]
    again = catalogue.check(catalogue.check(moving))
    assert len(again.mask_video.frames) == 3
    with pytest.raises(Refused, match=r"mask_video must have the 5 frames .* \(got 4\)"):
        catalogue.check(dataclasses.replace(given, mask_video=clips.Clip(frames[:4], 8)))
    with pytest.raises(Refused, match="mask_video must be a Clip or a PIL image"):
        catalogue.check(dataclasses.replace(given, mask_video="a.png"))


@pytest.mark.slow
def test_a_mask_is_sent_as_an_image_or_as_a_video(server):
    video = in_base64(clips.encode_video([picture(64, 32)] * 9, 8).data)
    fields = {"prompt": "a", "model": "vace", **SIZE, **FEW, "video": video}
    white, black = (Image.new("RGB", (64, 32), colour) for colour in ("white", "black"))
    every, none = (
        np.stack(
            read(server.get(done(server, {**fields, "mask_video": mask})["videos"][0]).body)[1]
        )
        for mask in (sent(white), in_base64(clips.encode_video([black] * 9, 8).data))
    )
    assert np.abs(every.astype(int) - none).mean() > 1
    short = in_base64(clips.encode_video([black] * 5, 8).data)
    refused = server.post("/jobs", {**fields, "mask_video": short}).json["error"]["message"]
    assert "mask_video must have the 9 frames" in refused


def test_a_spritesheet_has_frames_from_the_first_to_the_last():
    frames = [Image.new("RGB", (64, 32), (3 * i, 0, 0)) for i in range(81)]
    sheet = np.asarray(Video.of(frames, 16, "").spritesheet())
    assert sheet.shape == (128, 256, 3)
    assert (sheet[0, 0, 0], sheet[-1, -1, 0]) == (0, 240)


@pytest.mark.parametrize("model", ["images", "emoji-edit"])
def test_models_that_need_an_image_are_ready_at_the_start(folder, model):
    with running(model, folder) as server:
        server.service.opened.clear()
        assert server.get("/ready").status == 503
        server.service.open()
        assert server.get("/ready").status == 200, server.service.failure
        first = server.get("/capabilities").json["models"][0]
        assert (first["name"], first["loaded"]) == (model, True)
        found = server.post("/tokens", {"prompt": "a cat"}).json
        assert found["tokens"] >= 2
        assert found["most"] == (512 if model == "images" else 14)


def test_without_ffmpeg_videos_are_animated_webps(server, monkeypatch):
    monkeypatch.setattr(clips.importlib.util, "find_spec", lambda name: None)
    assert server.get("/capabilities").json["video_type"] == "image/webp"
    job = done(server, FIELDS)
    file = server.get(job["videos"][0])
    assert (file.headers["content-type"], file.image.n_frames) == ("image/webp", 9)
    assert 'filename="diffusax-1.webp"' in file.headers["content-disposition"]
    found = server.post("/png-info", {"image": in_base64(file.body)}).json
    assert FIELDS.items() <= found["settings"].items()
