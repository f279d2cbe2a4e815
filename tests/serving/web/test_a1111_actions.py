"""What A1111's clients ask for beside images: larger ones, edges, lists, and what is not there."""

import base64
import io
import json

import numpy as np
import pytest
from PIL import Image
from support.running_server import picture, running, sent
from support.upscalers import save_upscaler

from diffusax.images.conversion import png_parameters
from diffusax.images.edges import canny


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("webui") / "models"
    (folder / "ESRGAN").mkdir(parents=True)
    save_upscaler(folder / "ESRGAN" / "4x-Tiny.safetensors")
    (folder / "ESRGAN" / "broken.safetensors").write_bytes(b"nothing")
    with running("emoji", folder, most_pixels=512 * 512) as found:
        yield found


def opened(text):
    return Image.open(io.BytesIO(base64.b64decode(text)))


def test_upscalers_are_listed(server):
    listed = {one["name"]: one for one in server.get("/sdapi/v1/upscalers").json}
    assert list(listed) == ["None", "Lanczos", "Nearest", "Bicubic", "Bilinear", "4x-Tiny"]
    assert (listed["4x-Tiny"]["scale"], listed["None"]["model_name"]) == (4, None)
    [one] = server.get("/sdapi/v1/realesrgan-models").json
    assert one == {"name": "4x-Tiny", "path": "4x-Tiny.safetensors", "scale": 4}
    assert any("broken" in path.name for path in server.service.catalogue.unreadable)


def test_makes_an_image_larger_by_a_filter(server):
    image = picture(50, 40)
    fields = {"image": sent(image), "upscaling_resize": 2, "upscaler_1": "Lanczos"}
    answer = server.post("/sdapi/v1/extra-single-image", fields)
    assert answer.status == 200, answer.body
    found = opened(answer.json["image"])
    expected = image.resize((96, 80), Image.Resampling.LANCZOS)
    np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))
    assert answer.json["html_info"] == ""


def test_makes_an_image_larger_by_a_network(server):
    from diffusax.checkpoints.upscalers import read_upscaler

    image = picture(64, 32)
    fields = {"image": sent(image), "upscaling_resize": 4, "upscaler_1": "4x-Tiny"}
    found = opened(server.post("/sdapi/v1/extra-single-image", fields).json["image"])
    network, params = read_upscaler(server.service.catalogue.upscalers["4x-Tiny"].path)
    pixels = np.asarray(image, np.float32)[None] / 255
    expected = np.asarray(network.apply(params, pixels))[0].clip(0, 1) * 255
    assert found.size == (256, 128)
    assert abs(np.asarray(found) - expected).max() <= 1
    fields |= {"upscaling_resize": 2, "upscaler_2": "Lanczos"}
    half = opened(server.post("/sdapi/v1/extra-single-image", fields).json["image"])
    assert half.size == (128, 64)
    fields |= {"extras_upscaler_2_visibility": 0.5}
    blended = opened(server.post("/sdapi/v1/extra-single-image", fields).json["image"])
    lanczos = image.resize((128, 64), Image.Resampling.LANCZOS)
    mean = (np.asarray(half, float) + np.asarray(lanczos, float)) / 2
    assert abs(np.asarray(blended) - mean).max() <= 1


def test_fits_an_image_into_a_size(server):
    fields = {"image": sent(picture(64, 32)), "resize_mode": 1, "upscaler_1": "Nearest"}
    fields |= {"upscaling_resize_w": 128, "upscaling_resize_h": 128}
    cut = opened(server.post("/sdapi/v1/extra-single-image", fields).json["image"])
    assert cut.size == (128, 128)
    whole = server.post("/sdapi/v1/extra-single-image", {**fields, "upscaling_crop": False})
    assert opened(whole.json["image"]).size == (256, 128)
    unchanged = server.post("/sdapi/v1/extra-single-image", {"image": sent(picture(64, 32))})
    assert opened(unchanged.json["image"]).size == (64, 32)


def test_makes_several_images_larger_and_keeps_their_settings(server):
    file = io.BytesIO()
    picture(16, 16).save(
        file, "PNG", pnginfo=png_parameters("a cat\nSteps: 20, Seed: 1, Size: 8x8")
    )
    first = base64.b64encode(file.getvalue()).decode()
    listed = [{"data": first, "name": "a.png"}, {"data": sent(picture(24, 16)), "name": "b.png"}]
    fields = {"imageList": listed, "upscaler_1": "Bicubic", "gfpgan_visibility": 1}
    answer = server.post("/sdapi/v1/extra-batch-images", fields)
    assert answer.status == 200, answer.body
    images = [opened(text) for text in answer.json["images"]]
    assert [image.size for image in images] == [(32, 32), (48, 32)]
    assert images[0].text["parameters"].startswith("a cat\n")
    assert "no restorers of faces" in answer.json["html_info"]


@pytest.mark.parametrize(
    ("path", "fields", "said"),
    [
        ("extra-single-image", {"image": "x", "upscaler_1": "nix"}, "upscaler_1 must be one of"),
        ("extra-single-image", {"image": "x" * 9, "upscaler_1": "Lanczos"}, "image must be an"),
        ("extra-single-image", {}, "image must be given"),
        ("extra-batch-images", {"imageList": [{}] * 17}, "imageList must be at most 16 images"),
        ("extra-batch-images", {"imageList": []}, "imageList must"),
    ],
)
def test_impossible_calls_are_refused(server, path, fields, said):
    answer = server.post(f"/sdapi/v1/{path}", fields)
    assert answer.status == 422
    assert said in answer.json["detail"]


def test_images_are_bounded(server):
    fields = {"image": sent(picture(300, 300)), "upscaling_resize": 2, "upscaler_1": "Lanczos"}
    answer = server.post("/sdapi/v1/extra-single-image", fields)
    assert answer.status == 422
    assert "at most 262144 pixels (got 600x600)" in answer.json["detail"]
    fields |= {"upscaler_1": "4x-Tiny", "upscaling_resize": 1.5}
    answer = server.post("/sdapi/v1/extra-single-image", fields)
    assert answer.status == 413
    assert "makes 4 times larger images" in answer.json["detail"]
    answer = server.post("/sdapi/v1/extra-single-image", {"image": sent(picture(600, 600))})
    assert answer.status == 413


def test_too_many_images_do_not_wait(server, monkeypatch):
    import threading

    fields = {"image": sent(picture(32, 32)), "upscaler_1": "4x-Tiny"}
    monkeypatch.setattr(server.service.upscalers, "_places", threading.Semaphore(0))
    answer = server.post("/sdapi/v1/extra-single-image", fields)
    assert answer.status == 429
    assert answer.headers["retry-after"] == "5"


def test_edges_are_found(server):
    fields = {"controlnet_module": "canny", "controlnet_input_images": [sent(picture(128, 96))]}
    fields |= {"controlnet_processor_res": 128, "controlnet_threshold_a": 100}
    fields |= {"controlnet_threshold_b": 200}
    answer = server.post("/controlnet/detect", fields)
    assert answer.status == 200, answer.body
    found = opened(answer.json["images"][0])
    expected = canny(picture(128, 96).resize((192, 128), Image.Resampling.LANCZOS), 100, 200)
    np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))
    inverted = server.post("/controlnet/detect", {**fields, "controlnet_module": "invert (from w)"})
    assert np.asarray(opened(inverted.json["images"][0]))[0, 0].tolist() == [0, 0, 0]
    refused = server.post("/controlnet/detect", {**fields, "controlnet_module": "depth_leres"})
    assert refused.status == 422
    assert "must be one of none, canny, invert (got 'depth_leres')" in refused.json["detail"]


def test_nothing_describes_images(server):
    answer = server.post("/sdapi/v1/interrogate", {"image": sent(picture()), "model": "clip"})
    assert answer.status == 501
    assert set(answer.json) == {"error", "detail", "body", "errors"}
    assert "there is none here" in answer.json["detail"]


def test_lists_that_clients_read(server):
    get = server.get
    assert get("/internal/ping").json == {}
    assert "sampler" in get("/sdapi/v1/scripts").json["txt2img"]
    info = get("/sdapi/v1/script-info").json
    assert {"name", "is_alwayson", "is_img2img", "args"} == set(info[0])
    assert get("/sdapi/v1/extensions").json[0]["name"] == "sd-webui-controlnet"
    assert get("/controlnet/module_list").json["module_list"][:2] == ["none", "canny"]
    kinds = get("/controlnet/control_types").json["control_types"]
    assert kinds["Canny"]["default_option"] == "canny"
    assert get("/controlnet/settings").json == {"control_net_unit_count": 4}
    names = {one["name"] for one in get("/sdapi/v1/schedulers").json}
    assert {"karras", "exponential", "sgm_uniform", "align_your_steps", "beta"} <= names


@pytest.mark.parametrize("what", ["checkpoints", "loras", "embeddings", "vae"])
def test_folders_are_listed_again(server, what):
    answer = server.post(f"/sdapi/v1/refresh-{what}")
    assert (answer.status, answer.json) == (200, None)


def test_unused_models_leave_memory_and_come_back(server):
    fields = {"prompt": "a", "steps": 1, "width": 64, "height": 64}
    assert server.post("/sdapi/v1/txt2img", fields).status == 200
    assert server.service.catalogue.entry().loaded
    assert server.post("/sdapi/v1/unload-checkpoint").json == {}
    assert not server.service.catalogue.entry().loaded
    assert server.post("/sdapi/v1/reload-checkpoint").json == {}
    assert server.post("/sdapi/v1/txt2img", fields).status == 200


@pytest.mark.slow
def test_the_second_pass_takes_a_network(server):
    fields = {"prompt": "a", "steps": 2, "width": 64, "height": 64, "enable_hr": True}
    fields |= {"hr_upscaler": "4x-Tiny", "hr_scale": 1.5, "denoising_strength": 0.3}
    answer = server.post("/sdapi/v1/txt2img", fields)
    assert answer.status == 200, answer.body
    assert opened(answer.json["images"][0]).size == (96, 96)
    assert "Hires upscaler: 4x-Tiny" in json.loads(answer.json["info"])["infotexts"][0]
    refused = server.post("/sdapi/v1/txt2img", {**fields, "hr_upscaler": "nix"})
    assert refused.status == 422
    assert "hr_upscaler must be one of Lanczos" in refused.json["detail"]


def test_keys_guard_all_of_it():
    with running(keys=("a-long-key",)) as server:
        for path in ("extra-single-image", "extra-batch-images", "interrogate"):
            assert server.post(f"/sdapi/v1/{path}", {}).status == 401
        for path in ("/controlnet/detect", "/sdapi/v1/unload-checkpoint", "/v1/images/variations"):
            assert server.post(path, {}).status == 401
        for path in ("/sdapi/v1/script-info", "/controlnet/control_types", "/internal/ping"):
            assert server.get(path).status == 401
