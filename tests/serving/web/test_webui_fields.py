"""What A1111's fields mean: each with null, empty, odd and huge values; steps; the second pass."""

import dataclasses
import json
import math
import types

import pytest
from PIL import Image
from support.running_server import picture, running, sent

import diffusax
from diffusax.pipelines.families.policies import FlowSteps, WholeSteps
from diffusax.pipelines.tasks.tasks import image_to_image
from diffusax.serving.catalogue.calls import step_arguments
from diffusax.serving.engine.upscaling import Upscalers
from diffusax.serving.requests.errors import Refused
from diffusax.serving.requests.generation import Generation
from diffusax.serving.web.a1111.fields import ImageToImage, Shared, TextToImage
from diffusax.serving.web.a1111.hires import enlargement, second_pass, settings_of_second_pass
from diffusax.serving.web.a1111.reading import with_noise
from diffusax.serving.web.fields import GenerationFields, read_fields
from diffusax.serving.web.replies import in_webui_words

UPSCALERS = Upscalers(dict, 4096)
ODD = (None, "", "None", 0, -1, 2.5, "7", True, 10**30)
"""The values that each field is given."""
TAKEN, REFUSED, UNKNOWN = "1", "-", "?"
"""What is answered: 200, 422 with the field's name, or 404."""
EXPECTED = {
    # null "" "None" 0 -1 2.5 "7" true 10**30
    "prompt": "111---1--",
    "negative_prompt": "111---1--",
    "seed": "1--11-11-",
    "subseed": "1--11-111",
    "subseed_strength": "1--1---1-",
    "seed_resize_from_w": "1--11-111",
    "sampler_name": "11?---?--",
    "sampler_index": "11?---?--",
    "scheduler": "111---1--",
    "batch_size": "1-----11-",
    "n_iter": "1-----11-",
    "steps": "1-----11-",
    "cfg_scale": "1--11111-",
    "width": "1--------",
    "height": "1--------",
    "tiling": "1--1-----",
    "restore_faces": "1--1---1-",
    "send_images": "1--1---1-",
    "styles": "111---1--",
    "script_name": "111------",
    "refiner_checkpoint": "111------",
    "refiner_switch_at": "1--111111",
    "eta": "1--1---1-",
    "s_churn": "1--1-111-",
    "s_noise": "1--1-111-",
    "s_tmin": "1--1-111-",
    "s_tmax": "1--111111",
    "s_min_uncond": "1--1-----",
    "infotext": "11-------",
    "override_settings": "1--------",
    "alwayson_scripts": "1--------",
    "enable_hr": "1--1---1-",
    "denoising_strength": "1--111111",
    "hr_scale": "1--111111",
    "hr_second_pass_steps": "1--11-111",
    "hr_upscaler": "111---1--",
    "hr_checkpoint_name": "111---1--",
    "hr_prompt": "111---1--",
    "hr_resize_x": "1--11-111",
    "firstphase_width": "1--1--11-",
    "firstpass_image": "11-------",
    "disable_extra_networks": "1--1---1-",
}
"""What txt2img answers for each field and odd value."""
SECOND = {
    "denoising_strength": "1--1---1-",
    "hr_scale": "1------1-",
    "hr_second_pass_steps": "1--1--11-",
    "hr_upscaler": "111------",
    "hr_checkpoint_name": "111---?--",
    "hr_sampler_name": "111---?--",
    "hr_scheduler": "111---1--",
    "hr_prompt": "111---1--",
    "hr_cfg": "1--11111-",
    "hr_resize_x": "1--1--11-",
}
"""The same with a second pass."""
IMAGES = {
    "init_images": "---------",
    "denoising_strength": "1--1---1-",
    "resize_mode": "1--1---1-",
    "mask": "111------",
    "mask_blur": "1--1-111-",
    "mask_blur_x": "1--1-111-",
    "inpainting_fill": "1--1---1-",
    "inpaint_full_res": "1--1---1-",
    "inpaint_full_res_padding": "1--1--11-",
    "inpainting_mask_invert": "1--1---1-",
    "initial_noise_multiplier": "1------1-",
    "latent_mask": "11-------",
    "image_cfg_scale": "1--11111-",
    "include_init_images": "1--1---1-",
}
"""What img2img answers."""


@pytest.fixture(scope="module")
def server():
    with running(most_image_pixels=128 * 128) as found:
        yield found


@pytest.fixture
def cheap(server, monkeypatch):
    """The server, of whose calls nothing is drawn but what the first steps check."""
    from diffusax.serving.web.a1111 import generation

    async def checked(request, work, generations):
        found = [server.service.check(generation) for generation in generations]
        image = Image.new("RGB", (found[0].width, found[0].height))
        jobs = [
            types.SimpleNamespace(
                generation=one, singles=[one.single(0)], images=[image], error=None
            )
            for one in found
        ]
        work.add([])
        return jobs

    monkeypatch.setattr(generation, "_run", checked)
    return server


def answers(server, path, fields, name):
    found = ""
    for value in ODD:
        answer = server.post(
            f"/sdapi/v1/{path}", {"steps": 2, "prompt": "a", **fields, name: value}
        )
        assert answer.status in (200, 404, 422), (name, value, answer.body)
        found += {200: TAKEN, 404: UNKNOWN, 422: REFUSED}[answer.status]
        if answer.status == 422:
            said = answer.json["detail"].replace("schedule type", "hr_scheduler")
            assert said.startswith(name), (name, value, said)
    return found


def test_each_field_takes_or_refuses_odd_values(cheap):
    found = {name: answers(cheap, "txt2img", {}, name) for name in EXPECTED}
    assert found == EXPECTED
    second = {name: answers(cheap, "txt2img", {"enable_hr": True}, name) for name in SECOND}
    assert second == SECOND
    own = {"init_images": [sent(picture())]}
    images = {name: answers(cheap, "img2img", own, name) for name in IMAGES}
    assert images == IMAGES


def test_the_table_has_all_fields():
    known = {f.name for kind in (TextToImage, ImageToImage) for f in dataclasses.fields(kind)}
    twins = {"seed_resize_from_h", "hr_negative_prompt", "hr_resize_y", "firstphase_height"}
    twins |= {"mask_blur_y", "mask_round", "override_settings_restore_afterwards"}
    assert known == {*EXPECTED, *SECOND, *IMAGES, *twins}


@pytest.mark.parametrize(
    ("values", "status"),
    [
        ({"sd_vae": "mine.safetensors", "CLIP_stop_at_last_layers": "2"}, 200),
        ({"sd_vae": None, "CLIP_stop_at_last_layers": None, "sd_model_checkpoint": "None"}, 200),
        ({"CLIP_stop_at_last_layers": 0, "sd_model_checkpoint": "emoji [abcdef1234]"}, 200),
        ({"CLIP_stop_at_last_layers": 2.5}, 422),
        ({"CLIP_stop_at_last_layers": 10**30}, 422),
        ({"sd_model_checkpoint": 3}, 422),
        ({"sd_model_checkpoint": "mine.safetensors [abcdef1234]"}, 404),
        ({"img2img_fix_steps": "x"}, 422),
    ],
)
def test_options_of_the_clients_own(cheap, values, status):
    answer = cheap.post("/sdapi/v1/txt2img", {"prompt": "a", "override_settings": values})
    assert answer.status == status, answer.body
    if status != 200:
        assert answer.json["detail"].startswith(next(iter(values)))
    elif values.get("sd_vae"):
        warnings = json.loads(answer.json["info"])["warnings"]
        assert warnings == ["sd_vae is read over, as models bring their own (got mine.safetensors)"]


def test_what_nothing_applies_is_named(cheap):
    prompt, negative = "a <hypernet:x:1> {b|c} __d__ # a comment", "<lora:x:1>"
    fields = {"prompt": prompt, "negative_prompt": negative}
    answer = cheap.post("/sdapi/v1/txt2img", fields)
    info = json.loads(answer.json["info"])
    assert [text.split(",")[0] for text in info["warnings"]] == [
        "the prompt names <hypernet:x:1>",
        "the prompt has '{b|c}'",
        "the prompt has '__d__'",
        "the negative prompt names '<lora:x:1>'",
    ]
    assert info["prompt"] == "a <hypernet:x:1> {b|c} __d__"


SDE = "dpm++2m_sde_karras"


@pytest.mark.parametrize(
    ("fields", "sampler", "expected"),
    [
        ({}, "euler_a", ("euler_a", 0.0)),
        ({"eta": 1.0}, "euler_a", ("euler_a", 0.0)),
        ({"eta": 0.0}, "euler_a", ("euler", 0.0)),
        ({"eta": 0.0}, SDE, ("dpm++2m_karras", 0.0)),
        ({"eta": 0.5}, "euler_a", "eta must be 1"),
        ({"eta": 0.5}, "ddim", ("ddim", 0.5)),
        ({"eta": 1.5}, "ddim", "eta must be from 0 to 1"),
        ({"eta": 0.5}, "euler", ("euler", 0.0)),
        ({"s_churn": 0.5}, "heun", "s_churn must be 0"),
        ({"s_churn": 0.5}, "euler_a", ("euler_a", 0.0)),
        ({"s_noise": 0.5}, "euler", ("euler", 0.0)),
        ({"s_noise": 0.5}, SDE, "s_noise must be 1"),
    ],
)
def test_noise_counts_where_a1111s_sampler_reads_it(fields, sampler, expected):
    if isinstance(expected, tuple):
        assert with_noise(Shared(**fields), sampler) == expected
    else:
        with pytest.raises(Refused, match=expected):
            with_noise(Shared(**fields), sampler)


def webui_steps(strength, steps, fixed):
    """A1111's rule: the steps of the schedule, and how many at its end are evaluated."""
    if fixed:
        whole = int(steps / min(strength, 0.999)) if strength > 0 else 0
        return whole, steps
    return steps, int(min(strength, 0.999) * steps) + 1


@pytest.mark.parametrize("early", [False, True])
def test_strengths_leave_a1111s_steps(early):
    start = FlowSteps() if early else WholeSteps()
    family = types.SimpleNamespace(start=start)
    cls = types.SimpleNamespace(family=family, task=image_to_image)
    generation = Generation(image=Image.new("RGB", (8, 8)))
    for fixed, rule in ((False, "webui"), (True, "exact")):
        for steps in (1, 2, 3, 4, 7, 10, 20, 49, 50, 93, 100):
            for strength in (0.0, 0.04, 0.2, 0.29, 0.3, 0.5, 0.58, 0.75, 0.999, 1.0):
                given = {"num_inference_steps": steps, "strength": strength, "strength_rule": rule}
                found = step_arguments(
                    cls, dataclasses.replace(generation, **given), diffusax.EulerDiscreteScheduler()
                )
                whole, kept = found["num_inference_steps"], found["strength"]
                left = whole - start.first_step(whole, kept)
                expected = webui_steps(strength, steps, fixed)
                if fixed and not 0 < expected[0] <= 1000:
                    # So long a schedule is none here: its last part has the strength's noise.
                    expected = 1000, min(steps, max(1, math.floor(1000 * min(strength, 0.999))))
                assert (whole, left) == expected, given


def test_changes_of_prompts_count_the_steps_that_are_run():
    family = types.SimpleNamespace(start=WholeSteps())
    cls = types.SimpleNamespace(family=family, task=image_to_image)
    given = {"num_inference_steps": 10, "strength": 0.3, "strength_rule": "exact"}
    own = {"prompt": "[a:b:0.5] <lora:x:1>", "negative_prompt": "[c:0.2]", **given}
    generation = Generation(image=Image.new("RGB", (8, 8)), **own)
    found = step_arguments(cls, generation, diffusax.HeunDiscreteScheduler())
    assert found["num_inference_steps"] == 33
    assert (found["prompt"], found["negative_prompt"]) == ("[a:b:10]", "[:c:4]")
    # In a second pass numbers count on from the first one's.
    fields = TextToImage(enable_hr=True, hr_scale=1.0, hr_second_pass_steps=4)
    first = Generation(
        prompt="[a:b:0.5] [c:d:1.5]", sampler="euler", num_inference_steps=6, width=8, height=8
    )
    entry = types.SimpleNamespace(name="", multiple=8, sampler="euler")
    [second] = second_pass(
        fields, first, [(first.single(3), Image.new("RGB", (8, 8)))], entry, UPSCALERS
    )
    assert (second.prompt, second.seed, second.num_inference_steps) == ("[a:b:0] [c:d:2]", 3, 4)
    assert settings_of_second_pass(fields, first, second)["Hires prompt"] is None


@pytest.mark.parametrize(
    ("fields", "resized", "final", "corner"),
    [
        ({"hr_scale": 1.5}, (96, 72), (96, 72), (0, 0)),
        ({"hr_scale": 1.3}, (80, 56), (80, 56), (0, 0)),
        ({"hr_resize_x": 128}, (128, 96), (128, 96), (0, 0)),
        ({"hr_resize_y": 96}, (128, 96), (128, 96), (0, 0)),
        ({"hr_resize_x": 128, "hr_resize_y": 64}, (128, 96), (128, 64), (0, 16)),
        ({"hr_resize_x": 64, "hr_resize_y": 96}, (128, 96), (64, 96), (32, 0)),
        ({"hr_resize_x": 104, "hr_resize_y": 96}, (128, 96), (104, 96), (8, 0)),
    ],
)
def test_the_second_pass_is_cut_as_in_a1111(fields, resized, final, corner):
    found = enlargement(TextToImage(**fields), 64, 48, 8)
    assert (found.width, found.height) == resized
    assert (found.final_width, found.final_height) == final
    assert (found.left, found.top) == corner


def test_a_job_without_steps_is_refused_in_its_own_words(server):
    job = {"image": sent(picture()), "num_inference_steps": 4, "strength": 0.2}
    answer = server.post("/jobs", job)
    assert answer.status == 422
    said = answer.json["error"]["message"]
    assert said.startswith("strength leaves none of num_inference_steps=4 (got 0.2)")


def test_sentences_have_the_names_of_a1111s_fields():
    for sentence, said in (
        ("num_inference_steps must be at most 9 steps", "steps must be at most 9 steps"),
        ("strength must be 0", "denoising_strength must be 0"),
        ("the model has the strength to draw", "the model has the strength to draw"),
        ("adapters names the LoRA 'x'", "prompt names the LoRA 'x'"),
    ):
        assert in_webui_words(sentence) == said


@pytest.mark.parametrize(
    ("kind", "theirs", "ours", "value"),
    [
        (TextToImage, "steps", "num_inference_steps", 0),
        (TextToImage, "cfg_scale", "guidance_scale", 101),
        (TextToImage, "batch_size", "num_images", "a"),
        (TextToImage, "height", "height", 7),
        (TextToImage, "hr_cfg", "guidance_scale", -101),
        (ImageToImage, "image_cfg_scale", "image_guidance_scale", 101),
        (ImageToImage, "denoising_strength", "strength", 2),
        (ImageToImage, "mask_blur_x", "mask_blur", -1),
    ],
)
def test_a_field_under_a1111s_name_is_refused_in_the_words_of_ours(kind, theirs, ours, value):
    said = []
    for fields, name in ((kind, theirs), (GenerationFields, ours)):
        with pytest.raises(Refused) as error:
            read_fields(fields, {name: value}, strict=False)
        said.append(str(error.value).removeprefix(name))
    assert said[0] == said[1]
    assert " must be " in said[0]
