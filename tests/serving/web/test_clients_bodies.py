"""The clients that people have, each by the body that it sends and by what it reads of the answer.

Bodies are those of the clients' sources, in sizes that are generated quickly.
"""

import base64
import io
import json
import re
import uuid

import pytest
from PIL import Image
from support.running_server import mask, picture, running, sent
from support.upscalers import save_upscaler

from diffusax.serving.web.replies import encode, in_base64

SIZE = {"width": 64, "height": 64}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    (folder / "ESRGAN").mkdir()
    save_upscaler(folder / "ESRGAN" / "4x-Tiny.safetensors")
    with running("emoji", folder) as found:
        yield found


def opened(text):
    return Image.open(io.BytesIO(base64.b64decode(text)))


def post(server, path, body, **headers):
    answer = server.post(path, body, **headers)
    assert answer.status == 200, answer.body
    return answer.json


def get(server, path, **headers):
    answer = server.get(path, **headers)
    assert answer.status == 200, answer.body
    return answer.json


def form(server, path, fields, files):
    """Sends a form as fetch and requests do; files are pairs of a field's name and an image."""
    boundary, parts = uuid.uuid4().hex, []
    for name, value in fields.items():
        head = f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n'
        parts.append(head.encode() + str(value).encode() + b"\r\n")
    for name, image in files:
        head = f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"; filename="a.png"'
        parts.append(
            f"{head}\r\nContent-Type: image/png\r\n\r\n".encode() + encode(image) + b"\r\n"
        )
    body = b"".join([*parts, f"--{boundary}--\r\n".encode()])
    kind = f"multipart/form-data; boundary={boundary}"
    answer = server.ask("POST", path, body=body, Content_Type=kind)
    assert answer.status == 200, answer.body
    return answer.json


class TestOpenWebUI:
    """backend/open_webui/routers/images.py of open-webui/open-webui."""

    def test_with_openai_s_api(self, server):
        body = {"model": "dall-e-3", "prompt": "a lion", "n": 1, "size": "64x64"}
        (one,) = post(server, "/v1/images/generations", {**body, "response_format": "b64_json"})[
            "data"
        ]
        assert one.get("url", None) is None
        assert opened(one["b64_json"]).size == (64, 64)
        # For gpt-image it leaves the format out, and takes either.
        (one,) = post(server, "/v1/images/generations", {**body, "model": "gpt-image-1"})["data"]
        assert opened(one["b64_json"]).format == "PNG"

    def test_edits(self, server):
        fields = {"model": "gpt-image-1", "prompt": "a lion", "size": "64x64"}
        (one,) = form(server, "/v1/images/edits", fields, [("image", picture())])["data"]
        assert opened(one["b64_json"]).size == (64, 64)

    def test_with_a1111_s_api(self, server):
        basic = {"authorization": f"Basic {in_base64(b'user:password')}"}
        options = get(server, "/sdapi/v1/options", **basic)
        models = get(server, "/sdapi/v1/sd-models", **basic)
        assert {"title", "model_name"} <= set(models[0])
        options["sd_model_checkpoint"] = models[0]["title"]
        post(server, "/sdapi/v1/options", options, **basic)
        body = {"prompt": "a lion", "batch_size": 2, **SIZE, "steps": 4, "negative_prompt": "b"}
        body |= {"cfg_scale": 4.0, "sampler_name": "DPM++ 2M", "scheduler": "Karras"}
        answer = post(server, "/sdapi/v1/txt2img", body, **basic)
        assert [opened(image).size for image in answer["images"]] == [(64, 64)] * 2
        assert answer["info"]


class TestSillyTavern:
    """src/endpoints/stable-diffusion.js of SillyTavern/SillyTavern, and its extension."""

    def test_lists(self, server):
        assert "forge_preset" not in get(server, "/sdapi/v1/options")
        for path in ("upscalers", "latent-upscale-modes", "samplers", "schedulers"):
            assert all("name" in one for one in get(server, f"/sdapi/v1/{path}"))
        assert [one["title"] for one in get(server, "/sdapi/v1/sd-models")]
        assert get(server, "/sdapi/v1/sd-vae") == []

    def test_generates(self, server):
        body = {
            "url": server.url,
            "auth": "",
            "prompt": "a lion",
            "negative_prompt": "b",
            "sampler_name": "Euler a",
            "scheduler": "Align Your Steps",
            "steps": 3,
            "cfg_scale": 7,
            **SIZE,
            "restore_faces": True,
            "enable_hr": False,
            "hr_upscaler": "Latent",
            "hr_scale": 2,
            "hr_additional_modules": [],
            "denoising_strength": 0.7,
            "hr_second_pass_steps": 0,
            "seed": 5,
            "override_settings": {
                "CLIP_stop_at_last_layers": 1,
                "sd_vae": "Automatic",
                "forge_additional_modules": [],
            },
            "override_settings_restore_afterwards": True,
            "clip_skip": 1,
            "save_images": True,
            "send_images": True,
            "do_not_save_grid": False,
            "do_not_save_samples": False,
            "alwayson_scripts": {
                "ADetailer": {"args": [True, True, {"ad_model": "face_yolov8n.pt"}]}
            },
        }
        answer = post(server, "/sdapi/v1/txt2img", body)
        assert opened(answer["images"][0]).size == (64, 64)
        warned = json.loads(answer["info"])["warnings"]
        assert any("ADetailer" in text for text in warned)
        progress = get(server, "/sdapi/v1/progress")
        assert (progress["progress"], progress["state"]["job_count"]) == (0, 0)
        assert post(server, "/sdapi/v1/interrupt", {}) == {}


class TestLibreChat:
    """api/app/clients/tools/structured/ of danny-avila/LibreChat."""

    def test_stable_diffusion(self, server):
        body = {"prompt": "a lion", "negative_prompt": "b", "cfg_scale": 4.5, "steps": 3, **SIZE}
        answer = post(server, "/sdapi/v1/txt2img", body)
        assert opened(answer["images"][0].split(",", 1)[0])
        info = json.loads(answer["info"])
        assert {"height", "width", "seed", "infotexts"} <= set(info)
        assert info["infotexts"][0].split("\n").pop().startswith("Steps: 3")

    def test_dall_e(self, server):
        body = {"model": "dall-e-3", "quality": "standard", "style": "vivid", "n": 1}
        answer = post(server, "/v1/images/generations", {**body, "size": "64x64", "prompt": "a"})
        url = answer["data"][0]["url"]
        assert re.search(r"\.(jpg|jpeg|png|webp)$", url)
        assert server.get(url.removeprefix(server.url)).image.size == (64, 64)

    def test_image_tools(self, server):
        body = {
            "model": "gpt-image-1",
            "prompt": "a",
            "n": 1,
            "background": "auto",
            "quality": "high",
        }
        body |= {"size": "64x64", "moderation": "low", "output_format": "webp"}
        body |= {"output_compression": 90}
        (one,) = post(server, "/v1/images/generations", body)["data"]
        assert opened(one["b64_json"]).format == "WEBP"
        fields = {"model": "gpt-image-1", "prompt": "a", "quality": "auto", "size": "auto", "n": 1}
        (one,) = form(server, "/v1/images/edits", fields, [("image[]", picture())])["data"]
        assert opened(one["b64_json"]).size == (64, 64)


class TestLangChain:
    """utilities/dalle_image_generator.py of langchain-community."""

    def test_body(self, server):
        body = {"prompt": "a lion", "n": 2, "size": "64x64", "model": "dall-e-2"}
        body["quality"] = "standard"
        answer = post(server, "/v1/images/generations", body)
        assert all(one["url"].startswith(server.url) for one in answer["data"])

    def test_package(self, server):
        module = pytest.importorskip("langchain_community.utilities.dalle_image_generator")
        wrapper = module.DallEAPIWrapper(
            model="dall-e-2", size="64x64", api_key="none", base_url=f"{server.url}/v1", n=2
        )
        urls = wrapper.run("a lion").split("\n")
        sizes = [server.get(url.strip().removeprefix(server.url)).image.size for url in urls if url]
        assert sizes == [(64, 64)] * 2


def test_n8n(server):
    """actions/image/generate.operation.ts and analyze of n8n's node for OpenAI."""
    body = {"prompt": "a lion", "model": "dall-e-3", "response_format": "b64_json"}
    body |= {"quality": "hd", "size": "64x64", "style": "natural"}
    assert opened(post(server, "/v1/images/generations", body)["data"][0]["b64_json"])
    (one,) = post(server, "/v1/images/generations", {**body, "response_format": "url"})["data"]
    assert one["url"]
    body = {"prompt": "a lion", "model": "gpt-image-1"}
    assert opened(post(server, "/v1/images/generations", body)["data"][0]["b64_json"])


def test_home_assistant(server):
    """components/openai_conversation/__init__.py of home-assistant/core."""
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        assert client.with_options(timeout=10.0).models.list().data
        answer = client.images.generate(
            model="dall-e-3",
            prompt="a lion",
            size="64x64",
            quality="standard",
            style="vivid",
            response_format="url",
            n=1,
        )
    found = answer.data[0].model_dump(exclude={"b64_json"})
    assert found["url"]
    assert found["revised_prompt"] == "a lion"


class TestAIRender:
    """sd_backends/automatic1111_api.py of benrugg/AI-Render."""

    def test_renders_over_an_image(self, server):
        body = {
            "prompt": "a lion",
            "negative_prompt": "b",
            **SIZE,
            "image_similarity": 0.4,
            "denoising_strength": 0.6,
            "seed": 5,
            "cfg_scale": 7,
            "steps": 3,
            "sampler": "LMS",
            "sampler_index": "LMS",
            "init_images": [sent(picture())],
        }
        agent = {"User_Agent": "Blender/4.2.0", "Accept": "*/*", "Accept_Encoding": "gzip"}
        answer = post(server, "/sdapi/v1/img2img", body, **agent)
        assert opened(answer["images"][0].replace("data:image/png;base64,", "")).size == (64, 64)
        refused = server.post("/sdapi/v1/img2img", {**body, "sampler_index": "DPM fast"})
        assert refused.status == 404
        assert refused.json["detail"]

    def test_makes_it_larger(self, server):
        names = [one["name"] for one in get(server, "/sdapi/v1/upscalers")]
        assert "4x-Tiny" in names
        body = {"resize_mode": 0, "show_extras_results": True, "gfpgan_visibility": 0}
        body |= {"codeformer_visibility": 0, "codeformer_weight": 0, "upscaling_resize": 2}
        # Its default, which is A1111's own.
        body |= {"upscaler_1": "ESRGAN_4x", "image": sent(picture())}
        answer = post(server, "/sdapi/v1/extra-single-image", body)
        assert opened(answer["image"]).size == (128, 128)
        assert "There is no ESRGAN_4x here, so Lanczos" in answer["html_info"]

    def test_lists_controlnets(self, server):
        assert get(server, "/controlnet/model_list")["model_list"] == []
        assert "canny" in get(server, "/controlnet/module_list")["module_list"]


def test_photopea(server):
    """src/ of huchenlei/stable-diffusion-ps-pea: a common part and img2img's, with data URIs."""
    common = {
        "alwayson_scripts": {"ControlNet": {"args": []}},
        "batch_size": 1,
        "cfg_scale": 7,
        "comments": {},
        "disable_extra_networks": False,
        "do_not_save_grid": False,
        "do_not_save_samples": False,
        **SIZE,
        "n_iter": 1,
        "negative_prompt": "",
        "override_settings": {},
        "override_settings_restore_afterwards": True,
        "prompt": "a lion",
        "restore_faces": False,
        "s_churn": 0,
        "s_min_uncond": 0,
        "s_noise": 1,
        "s_tmax": None,
        "s_tmin": 0,
        "sampler_name": "DPM++ 2M Karras",
        "script_args": [],
        "script_name": None,
        "seed": -1,
        "seed_enable_extras": True,
        "seed_resize_from_h": -1,
        "seed_resize_from_w": -1,
        "steps": 3,
        "styles": [],
        "subseed": -1,
        "subseed_strength": 0,
        "tiling": False,
    }
    more = {
        "denoising_strength": 0.75,
        "image_cfg_scale": 0,
        "init_images": [sent(picture())],
        "initial_noise_multiplier": 1,
        "inpaint_full_res": False,
        "inpaint_full_res_padding": 0,
        "inpainting_fill": 1,
        "inpainting_mask_invert": 0,
        "mask": sent(mask()),
        "mask_blur": 4,
        "resize_mode": 0,
    }
    own = {"Origin": server.url}
    answer = post(server, "/sdapi/v1/img2img", {**common, **more}, **own)
    assert opened(answer["images"][0]).size == (64, 64)
    answer = post(server, "/sdapi/v1/txt2img", {**common, "enable_hr": False}, **own)
    assert opened(answer["images"][0]).size == (64, 64)


class TestPhotoshop:
    """utility/ of AbdullahAlfaraj/Auto-Photoshop-StableDiffusion-Plugin."""

    def test_inpaints_and_reads_the_settings(self, server):
        body = {
            "selection_info": {"left": 0, "top": 0},
            "prompt": "a lion",
            "negative_prompt": "b",
            "steps": 3,
            "batch_size": 1,
            "cfg_scale": 7,
            "seed": 5,
            "sampler_index": "Euler a",
            **SIZE,
            "inpaint_full_res": True,
            "inpaint_full_res_padding": 32,
            "inpainting_fill": 2,
            "mask_expansion": 10,
            "mask": in_base64(encode(mask())),
            "expanded_mask": in_base64(encode(mask())),
            "init_images": [in_base64(encode(picture()))],
            "denoising_strength": 0.7,
            "restore_faces": False,
            "mask_blur": 8,
            "use_prompt_shortcut": False,
            "prompt_shortcut_ui_dict": {},
            "uniqueDocumentId": "1234",
            "mode": "inpaint",
            "backend_type": "auto1111",
            "use_sharp_mask": False,
            "alwayson_scripts": {
                "ADetailer": {"args": [False, {"ad_model": "face_yolov8n.pt"}]},
                "controlnet": {"args": [{"enabled": False, "module": "openpose", "model": "x"}]},
            },
        }
        (image,) = post(server, "/sdapi/v1/img2img", body)["images"]
        png = {"image": f"data:image/png;base64,{image}"}
        info = post(server, "/sdapi/v1/png-info", png)["info"]
        settings = dict(one.split(":", 1) for one in info.split("\n")[-1].split(", ") if ":" in one)
        assert settings["Seed"].strip() == "5"

    def test_makes_a_layer_larger(self, server):
        body = {"resize_mode": 0, "show_extras_results": 0, "upscaling_resize": 2}
        body |= {"upscaler_1": "4x-Tiny", "upscaler_2": "None", "extras_upscaler_2_visibility": 0}
        body |= {"image": in_base64(encode(picture())), "uniqueDocumentId": "1234"}
        assert opened(post(server, "/sdapi/v1/extra-single-image", body)["image"]).size == (
            128,
            128,
        )


KRITA = {
    "batch_count": 1,
    "batch_size": 1,
    "base_size": 64,
    "max_size": 128,
    "tiling": False,
    "upscaler_name": "None",
    "restore_faces": False,
    "face_restorer": "None",
    "codeformer_weight": 0.5,
    "filter_nsfw": False,
    "do_exact_steps": True,
    "include_grid": False,
    "save_samples": False,
    "prompt": "a lion",
    "negative_prompt": "b",
    "sampler_name": "DPM++ 2M Karras",
    "steps": 3,
    "cfg_scale": 7.0,
    "denoising_strength": 0.6,
    "script": "None",
    "script_args": [],
    "seed": 5,
}
"""What the plugin of Krita sends with each image."""


class TestKrita:
    """frontends/krita of Interpause/auto-sd-paint-ext."""

    def test_lists(self, server):
        found = get(server, "/sdapi/interpause/config")
        assert "sample_path" in found
        lists = ("upscalers", "samplers", "samplers_img2img", "face_restorers", "sd_models")
        for name in (*lists, "scripts_txt2img", "scripts_img2img"):
            assert len(found[name]) > 0
        assert all(isinstance(one, list) for one in found["scripts_txt2img"].values())

    def test_generates_in_the_selection_s_size(self, server):
        (title,) = get(server, "/sdapi/interpause/config")["sd_models"]
        body = {**KRITA, "sd_model": title, "orig_width": 90, "orig_height": 70}
        answer = post(server, "/sdapi/interpause/txt2img", {**body, "highres_fix": False})
        assert opened(answer["outputs"][0]).size == (90, 70)
        info = json.loads(answer["info"])
        # Of the model's size, in steps of 64 pixels.
        assert (info["width"], info["height"]) == (128, 64)

    def test_inpaints(self, server):
        painted = Image.new("RGBA", (64, 64))
        painted.paste((0, 0, 0, 255), (0, 0, 32, 64))
        body = {**KRITA, "mode": 1, "src_img": in_base64(encode(picture()))}
        body |= {"mask_img": in_base64(encode(painted)), "invert_mask": False, "mask_blur": 0}
        body |= {"inpainting_fill": 1, "inpaint_full_res": False, "inpaint_full_res_padding": 0}
        image = opened(post(server, "/sdapi/interpause/img2img", body)["outputs"][0])
        assert image.mode == "RGBA"
        assert image.getpixel((5, 5))[3] == 255
        assert image.getpixel((60, 5))[3] == 0
        plain = {**body, "mode": 0, "color_correct": False}
        assert opened(post(server, "/sdapi/interpause/img2img", plain)["outputs"][0]).mode == "RGB"

    def test_makes_the_layer_larger(self, server):
        body = {"src_img": in_base64(encode(picture())), "upscaler_name": "4x-Tiny"}
        answer = post(server, "/sdapi/interpause/upscale", {**body, "downscale_first": True})
        assert opened(answer["output"]).size == (128, 128)


class TestAIYA:
    """core/ of Kilvoctu/aiyabot."""

    def test_draws(self, server):
        # It logs in before, whatever comes of it.
        assert server.post("/login").status in (404, 405)
        post(server, "/sdapi/v1/options", {"sd_model_checkpoint": "emoji"})
        body = {
            "prompt": "a lion",
            "negative_prompt": "b",
            "steps": 3,
            **SIZE,
            "cfg_scale": 7.0,
            "sampler_index": "Euler a",
            "seed": 5,
            "seed_resize_from_h": 0,
            "seed_resize_from_w": 0,
            "denoising_strength": None,
            "n_iter": 2,
            "styles": ["None"],
            "restore_faces": True,
            "override_settings": {
                "CLIP_stop_at_last_layers": 1,
                "face_restoration_model": "GFPGAN",
            },
        }
        answer = post(server, "/sdapi/v1/txt2img", body)
        assert len(answer["images"]) == 2
        png = {"image": f"data:image/png;base64,{answer['images'][0]}"}
        assert "Seed: 5" in post(server, "/sdapi/v1/png-info", png)["info"]

    def test_asks_for_lists(self, server):
        for path in ("samplers", "sd-models", "face-restorers", "prompt-styles", "embeddings"):
            get(server, f"/sdapi/v1/{path}")
        assert {"loaded", "skipped"} == set(get(server, "/sdapi/v1/embeddings"))
        assert {"title", "model_name", "hash"} <= set(get(server, "/sdapi/v1/sd-models")[0])

    def test_makes_images_larger(self, server):
        body = {"upscaling_resize": 2.0, "upscaler_1": "SwinIR_4x", "image": sent(picture())}
        body |= {"gfpgan_visibility": 0.0, "codeformer_visibility": 0.0, "upscale_first": False}
        body |= {"upscaler_2": "Lanczos", "extras_upscaler_2_visibility": 0.5}
        assert opened(post(server, "/sdapi/v1/extra-single-image", body)["image"]).size == (
            128,
            128,
        )

    def test_is_told_that_nothing_describes_images(self, server):
        answer = server.post("/sdapi/v1/interrogate", {"image": sent(picture()), "model": "clip"})
        assert (answer.status, "caption" in answer.json) == (501, False)


class TestOpenAIForJavaScript:
    """src/resources/images.ts of openai/openai-node, whose forms name lists with brackets."""

    def test_generates(self, server):
        agent = {"User_Agent": "OpenAI/JS 6.9.0", "X_Stainless_Lang": "js"}
        body = {"model": "gpt-image-1", "prompt": "a lion", "size": "64x64", "n": 1}
        answer = post(server, "/v1/images/generations", body, **agent)
        assert {"created", "data", "usage", "size", "output_format"} <= set(answer)

    def test_edits_and_varies(self, server):
        fields = {"model": "gpt-image-1", "prompt": "a lion", "n": 1, "size": "64x64"}
        files = [("image", picture()), ("mask", mask())]
        (one,) = form(server, "/v1/images/edits", fields, files)["data"]
        assert opened(one["b64_json"])
        (one,) = form(server, "/v1/images/variations", {"n": 1}, [("image", picture())])["data"]
        assert one["url"]
