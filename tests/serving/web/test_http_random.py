"""Random bad requests: each is answered with one sentence, and the server goes on."""

import random

import pytest
from support.running_server import picture, running, sent

WRONG = (None, True, -1, 0, 1e9, 2**70, 1.5, "", "x", "\x00\n", "../../etc/passwd", "😀" * 40)
WRONG += ([], {}, [[1]], {"a": {"b": []}}, ["x"] * 50, "A" * 20_000, "data:image/png;base64,AAAA")
WRONG += ("http://127.0.0.1:1/", "NaN", "1e999", "<lora:../x:1>", "<lora:x:nan>", "((((")
RAW = (b"", b"{", b"[1]", b"null", b'"x"', b'{"prompt": NaN}', b"\xff\xfe", b"[" * 9000, b"{}" * 3)
RAW += (b'{"a":' * 40 + b"1" + b"}" * 40, b"--X\r\n", b"--X--\r\n", b"%PDF", b"\x00" * 500)
POSTS = {
    "/jobs": (
        "prompt num_inference_steps width height seed num_images sampler model image "
        "mask_image strength controls adapters guidance_scale clip_skip mask_blur num_frames fps "
        "video"
    ),
    "/v1/videos": "prompt model size seconds num_frames fps strength input_reference seed",
    "/v1/videos/x/remix": "prompt",
    "/v1/images/generations": (
        "prompt n size model response_format output_format stream partial_images seed"
    ),
    "/v1/images/edits": "prompt image images mask n size strength mask_blur",
    "/sdapi/v1/txt2img": (
        "prompt steps sampler_name scheduler batch_size n_iter seed cfg_scale width "
        "height enable_hr hr_scale hr_upscaler override_settings alwayson_scripts styles"
    ),
    "/sdapi/v1/img2img": (
        "init_images mask resize_mode inpainting_fill denoising_strength mask_blur "
        "inpaint_full_res_padding alwayson_scripts steps"
    ),
    "/models/emoji": "inputs parameters options",
    "/models/nix": "inputs parameters",
    "/png-info": "image",
    "/sdapi/v1/png-info": "image",
    "/sdapi/v1/options": "sd_model_checkpoint CLIP_stop_at_last_layers sd_vae",
}
OTHERS = ("/v1/videos?limit=x", "/v1/videos/x", "/v1/videos/x/content", "/jobs/x/videos/0")
OTHERS += ("/jobs/x", "/jobs/x/events", "/jobs/x/images/y", "/v1/models/x", "/nix", "//", "/%00")
KINDS = ("application/json", "text/plain", "multipart/form-data; boundary=X", "image/png", "x", "")
# What is right may be answered with a picture, so that few steps have to be asked for.
CHEAP = {"num_inference_steps": 1, "steps": 1}


@pytest.fixture(scope="module")
def server():
    with running(most_steps=20, most_images=2, most_image_pixels=128 * 128) as found:
        yield found


@pytest.fixture(scope="module")
def roomy():
    """A server that takes the model's own number of steps."""
    with running(most_images=2, most_image_pixels=128 * 128) as found:
        yield found


def bad_json(draw, names):
    """Values for a few of a request's fields, among them at least one that is wrong."""
    names = names.split()
    found = {
        name: draw.choice(WRONG) for name in draw.sample(names, min(len(names), draw.randint(1, 3)))
    }
    if draw.random() < 0.3:
        found["no_such_field"] = 1
    return {**{name: value for name, value in CHEAP.items() if name in names}, **found}


def test_500_random_bad_requests_are_answered_in_one_sentence(server):
    draw = random.Random(20)
    answered = {}
    for i in range(500):
        path, names = draw.choice(list(POSTS.items()))
        way = draw.random()
        if way < 0.6:
            what = bad_json(draw, names)
            answer = server.post(path, what)
        elif way < 0.9:
            what, kind = draw.choice(RAW), draw.choice(KINDS)
            headers = {"Content_Type": kind} if kind else {}
            answer = server.ask("POST", path, body=what, **headers)
        else:
            path, what = (
                draw.choice([*OTHERS, *POSTS]),
                draw.choice(("PUT", "PATCH", "GET", "BREW")),
            )
            answer = server.ask(what, path)
        answered[answer.status] = answered.get(answer.status, 0) + 1
        about = f"request {i}: {path} {str(what)[:200]} -> {answer.status} {answer.body[:300]!r}"
        assert answer.status < 500, about
        if answer.status >= 400:
            said = answer.json
            text = said["detail"] if path.startswith("/sdapi") else said["error"]["message"]
            assert text.strip(), about
            assert "\n" not in text, about
            assert "Traceback" not in text, about
    assert sum(count for status, count in answered.items() if status >= 400) > 400
    for job in server.engine.jobs():
        job.cancel()
    good = server.post("/jobs", {"prompt": "a", "num_inference_steps": 2, "image": sent(picture())})
    done = server.finish(good.json["id"])
    assert done["state"] == "done", done["error"]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["POSITIVE", "NEGATIVE"])
def test_the_openapi_document_says_what_the_server_does(roomy, mode):
    """Answers have the statuses, types and forms that the document has for them."""
    schemathesis = pytest.importorskip("schemathesis")
    import hypothesis
    from schemathesis.specs.openapi import checks

    schema = schemathesis.openapi.from_url(f"{roomy.url}/openapi.json")
    # A schema cannot say which texts are pictures, nor which models there are; and A1111's API
    # takes numbers as texts.
    excluded = [checks.positive_data_acceptance, checks.negative_data_rejection]
    failures = []
    for found in schema.exclude(path_regex="events$").get_all_operations():
        operation = found.ok()

        @hypothesis.given(
            case=operation.as_strategy(generation_mode=schemathesis.GenerationMode[mode])
        )
        @hypothesis.settings(
            max_examples=15, deadline=None, suppress_health_check=list(hypothesis.HealthCheck)
        )
        def conforms(case):
            case.call_and_validate(timeout=60, excluded_checks=excluded)

        try:
            conforms()
        except hypothesis.errors.Unsatisfiable:
            assert mode == "NEGATIVE"  # Without parameters there are no wrong ones.
        except BaseExceptionGroup as error:
            failures.append(f"{operation.label}: {error}")
        except Exception as error:
            failures.append(f"{operation.label}: {error}")
    assert not failures, "\n\n".join(failures)
