"""Settings that other programs write into images."""

import io
import json

import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from diffusax.infotext.files import open_image, texts_of
from diffusax.infotext.others import webui_text
from diffusax.infotext.text import read


def node(kind, **inputs):
    return {"class_type": kind, "inputs": inputs}


def sampler(**more):
    common = {"seed": 123456789, "steps": 30, "cfg": 6.5, "sampler_name": "dpmpp_2m"}
    links = {"model": ["10", 0], "positive": ["6", 0], "negative": ["7", 0]}
    return node("KSampler", **common, scheduler="karras", denoise=1.0, **links, **more)


COMFYUI = {
    "4": node("CheckpointLoaderSimple", ckpt_name="sdxl/juggernautXL_v9.safetensors"),
    "10": node(
        "LoraLoader",
        **{"lora_name": "detail.safetensors", "strength_model": 0.8, "model": ["4", 0]},
    ),
    "20": node("StringConstant", string="a fox, (fur:1.2)"),
    "6": node("CLIPTextEncode", text=["20", 0], clip=["10", 1]),
    "7": node("CLIPTextEncode", text="blurry", clip=["10", 1]),
    "5": node("EmptyLatentImage", width=1024, height=768, batch_size=1),
    "3": sampler(latent_image=["5", 0]),
    "11": node("LatentUpscaleBy", scale_by=1.5, samples=["3", 0]),
    "12": {**sampler(latent_image=["11", 0])},
    "13": node("VAEDecode", samples=["12", 0], vae=["4", 2]),
    "14": node("SaveImage", images=["13", 0]),
}
FLUX = {
    "1": node("UNETLoader", unet_name="flux1-dev.safetensors"),
    "3": node("CLIPTextEncode", text="a lighthouse", clip=["2", 0]),
    "33": node("FluxGuidance", guidance=3.5, conditioning=["3", 0]),
    "4": node("BasicGuider", model=["1", 0], conditioning=["33", 0]),
    "5": node("RandomNoise", noise_seed=42),
    "6": node("KSamplerSelect", sampler_name="euler"),
    "7": node("BasicScheduler", scheduler="simple", steps=20, denoise=1.0, model=["1", 0]),
    "9": node("EmptySD3LatentImage", width=1344, height=768),
    "8": node(
        "SamplerCustomAdvanced",
        **{"noise": ["5", 0], "guider": ["4", 0], "sampler": ["6", 0], "sigmas": ["7", 0]},
        latent_image=["9", 0],
    ),
    "12": node("SaveImage", images=["8", 0]),
}
NOVELAI = {
    **{"prompt": "1girl", "steps": 28, "height": 1216, "width": 832, "scale": 5.0, "seed": 99},
    **{"sampler": "k_euler_ancestral", "uc": "lowres", "noise_schedule": "native", "sm": True},
    **{"request_type": "PromptGenerateRequest", "signed_hash": "x", "n_samples": 1},
}
INVOKEAI = {
    **{"generation_mode": "sdxl_txt2img", "positive_prompt": "a cabin", "width": 1024},
    **{"negative_prompt": "blurry", "height": 768, "seed": 2718281828, "cfg_scale": 7.5},
    **{"steps": 30, "scheduler": "dpmpp_2m_sde_k", "model": {"name": "juggernaut", "key": "x"}},
    **{"loras": [{"model": {"name": "detail"}, "weight": 0.6}], "clip_skip": 0},
    **{"vae": {"name": "better"}, "app_version": "5.4.2", "seamless_x": False},
}
OLD_INVOKEAI = {
    "model_weights": "sd-1.5",
    "image": {
        **{"prompt": [{"prompt": "a robot [blurry, text]", "weight": 1.0}], "steps": 50},
        **{"cfg_scale": 7.5, "height": 512, "width": 512, "seed": 161803, "sampler": "k_lms"},
    },
}
SWARMUI = {
    "sui_image_params": {
        **{"prompt": "a fox", "negativeprompt": "bad", "model": "x/pony_v6", "seed": 8826},
        **{"steps": 28, "cfgscale": 6.0, "width": 1216, "height": 768, "sampler": "dpmpp_2m"},
        **{"scheduler": "normal", "clipstopatlayer": -2, "loras": ["style"]},
        **{"loraweights": ["0.4"], "swarm_version": "0.9.3.1", "zeronegative": True},
    }
}
FOOOCUS = {
    **{"prompt": "cat", "full_prompt": ["cat, fine"], "negative_prompt": "", "seed": "123"},
    **{"full_negative_prompt": ["bad"], "resolution": "(1152, 896)", "guidance_scale": 4.0},
    **{"sampler": "dpmpp_2m_sde_gpu", "scheduler": "karras", "steps": 30, "clip_skip": 2},
    **{"base_model": "jugger", "loras": [["offset", 0.1, "x"]], "sharpness": 2.0},
    **{"lora_combined_1": "offset : 0.1", "refiner_model": "None", "refiner_switch": 0.5},
}
DRAW_THINGS = {
    **{"c": "a frog & co", "uc": "bad", "model": "sd_f16.ckpt", "sampler": "DPM++ 2M Karras"},
    **{"scale": 7.5, "seed": 9, "steps": 20, "size": "512x640", "strength": 1.0},
    **{"lora": [{"model": "style_f16.ckpt", "weight": 0.6}], "shift": 1.5},
}
CIVITAI = {
    "6": node("CLIPTextEncode", text="a fox"),
    "extraMetadata": json.dumps(
        {
            **{"prompt": "a fox", "negativePrompt": "bad", "steps": 25, "cfgScale": 4},
            **{"sampler": "euler_ancestral", "seed": 77, "width": 832, "height": 1216},
            "resources": [{"modelVersionId": 1}],
        }
    ),
}
EASY = {
    **{"prompt": "a cat", "negative_prompt": "b", "seed": "5", "sampler_name": "euler_a"},
    **{"use_stable_diffusion_model": "C:\\m\\sd-v1-4.ckpt", "width": "512", "height": "512"},
    **{"num_inference_steps": "25", "guidance_scale": "7.5"},
}
XMP = '<exif:UserComment><rdf:Alt><rdf:li xml:lang="x-default">{}</rdf:li></rdf:Alt>'
AS_JSON = json.dumps(DRAW_THINGS).replace("&", "&amp;").replace('"', "&quot;")

# texts of a PNG; prompt, negative prompt, steps, scale, seed, sampler, width x height; named
CASES = {
    "ComfyUI": (
        {"prompt": COMFYUI, "workflow": {"nodes": []}},
        ("a fox, (fur:1.2) <lora:detail:0.8>", "blurry", 30, 6.5, 123456789, "dpm++2m_karras"),
        (1024, 768, "juggernautXL_v9"),
        ["Further samplers: KSampler"],
    ),
    "ComfyUI with FLUX": (
        {"prompt": FLUX},
        ("a lighthouse", "", 20, 3.5, 42, "euler"),
        (1344, 768, "flux1-dev"),
        [],
    ),
    "NovelAI": (
        {"Description": "1girl", "Software": "NovelAI", "Comment": NOVELAI, "Source": "V3"},
        ("1girl", "lowres", 28, 5.0, 99, "euler_a"),
        (832, 1216, None),
        ["sm: True"],
    ),
    "InvokeAI": (
        {"invokeai_metadata": INVOKEAI},
        ("a cabin <lora:detail:0.6>", "blurry", 30, 7.5, 2718281828, "dpm++2m_sde_karras"),
        (1024, 768, "juggernaut"),
        ["VAE: better"],
    ),
    "InvokeAI 2": (
        {"sd-metadata": OLD_INVOKEAI},
        ("a robot", "blurry, text", 50, 7.5, 161803, "lms"),
        (512, 512, "sd-1.5"),
        [],
    ),
    "InvokeAI 1": (
        {"Dream": '"a robot, -s [blurry]" -s 50 -S 161803 -W 512 -H 640 -C 7.5 -A k_lms'},
        ("a robot, -s", "blurry", 50, 7.5, 161803, "lms"),
        (512, 640, None),
        [],
    ),
    "SwarmUI": (
        {"parameters": SWARMUI},
        ("a fox <lora:style:0.4>", "bad", 28, 6.0, 8826, "dpm++2m"),
        (1216, 768, "pony_v6"),
        ["zeronegative: True"],
    ),
    "Fooocus": (
        {"parameters": FOOOCUS, "fooocus_scheme": "fooocus"},
        ("cat, fine <lora:offset:0.1>", "bad", 30, 4.0, 123, "dpm++2m_sde_karras"),
        (1152, 896, "jugger"),
        ["sharpness: 2"],
    ),
    "Draw Things": (
        {"XML:com.adobe.xmp": XMP.format(AS_JSON)},
        ("a frog & co <lora:style_f16:0.6>", "bad", 20, 7.5, 9, "dpm++2m_karras"),
        (512, 640, "sd_f16"),
        ["shift: 1.5"],
    ),
    "Civitai": (
        {"UserComment": CIVITAI},
        ("a fox", "bad", 25, 4.0, 77, "euler_a"),
        (832, 1216, None),
        [],
    ),
    "Easy Diffusion": (EASY, ("a cat", "b", 25, 7.5, 5, "euler_a"), (512, 512, "sd-v1-4"), []),
    "SD.Next": (
        {
            "parameters": "a fox\nNegative prompt: b\nSteps: 20, Size: 64x48, Sampler: DPM++ 2M, "
            "Seed: 5, CFG scale: 6, App: SD.Next, Version: 6846f4e, Pipeline: X, CFG end: 0.9"
        },
        ("a fox", "b", 20, 6.0, 5, "dpm++2m_karras"),
        (64, 48, None),
        ["CFG end: 0.9"],
    ),
}
FIELDS = (
    *("prompt", "negative_prompt", "num_inference_steps", "guidance_scale", "seed", "sampler"),
    *("width", "height", "model"),
)


def settings_in(texts):
    info = PngInfo()
    for name, text in texts.items():
        text = text if isinstance(text, str) else json.dumps(text)
        info.add_itxt(name, text) if name.startswith("XML") else info.add_text(name, text)
    file = io.BytesIO()
    Image.new("RGB", (64, 48)).save(file, "PNG", pnginfo=info)
    image = open_image(file.getvalue())
    return read(webui_text(texts_of(image), image.size))


@pytest.mark.parametrize("program", CASES)
def test_what_a_program_states_is_read_and_the_rest_is_named(program):
    texts, words, size, named = CASES[program]
    found = settings_in(texts)
    assert tuple(map(found.fields.get, FIELDS)) == (*words, *size)
    assert found.left_out == named


def test_layers_that_programs_leave_out_are_counted_as_they_count_them():
    skips = {name: settings_in(CASES[name][0]).fields.get("clip_skip") for name in CASES}
    assert {name: skip for name, skip in skips.items() if skip is not None} == {
        **{"SwarmUI": 1, "Fooocus": 1, "InvokeAI": 0}
    }
    first = {"Software": "NovelAI", "Source": "Stable Diffusion 1D44365E", "Comment": NOVELAI}
    assert settings_in({**first, "Description": "x"}).fields["clip_skip"] == 1


def test_graphs_in_circles_and_other_nonsense_end():
    circle = {"3": sampler(latent_image=["3", 0]), "6": node("X", text=["6", 0])}
    circle |= {"10": node("Y", model=["3", 0]), "14": node("SaveImage", images=["3", 0])}
    assert settings_in({"prompt": circle}).fields["num_inference_steps"] == 30
    chain = {str(i): node("Z", conditioning=[str(i + 1), 0]) for i in range(5000)}
    chain |= {"s": sampler(latent_image=["0", 0]) | {}}
    chain["s"]["inputs"]["positive"] = ["0", 0]
    assert settings_in({"prompt": chain}).fields["prompt"] == ""
    for text in ("{" * 5000, "[]", "{}", '{"prompt": 3}', '{"1": {"class_type": 1, "inputs": {}}}'):
        for name in ("prompt", "parameters", "Comment", "invokeai_metadata", "sd-metadata"):
            settings_in({name: text, "Software": "NovelAI", "fooocus_scheme": "fooocus"})


def test_prompts_of_other_programs_with_lines_of_settings_are_read_whole():
    prompt = "a\nNegative prompt: b\nSteps: 1, Seed: 2, Size: 3x4"
    found = settings_in({"invokeai_metadata": {**INVOKEAI, "positive_prompt": prompt, "loras": []}})
    assert found.fields["prompt"] == prompt
    assert found.fields["negative_prompt"] == "blurry"
