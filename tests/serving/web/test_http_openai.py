"""OpenAI's names of models, addresses of images, variations, and edits of several images."""

import time

import numpy as np
import pytest
from support.running_server import picture, running

from diffusax.serving.engine.engine import EngineSettings
from diffusax.serving.web.replies import encode

FEW = {"num_inference_steps": 2, "seed": 1}
BOUNDS = EngineSettings(lanes=4, smallest=4, keep_seconds=3600.0)


@pytest.fixture(scope="module")
def server():
    with running(aliases={"house-style": "emoji"}, bounds=BOUNDS) as found:
        yield found


@pytest.fixture(scope="module")
def client(server):
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as found:
        yield found


@pytest.mark.parametrize(
    ("model", "answers_with"),
    [
        ("dall-e-2", "url"),
        ("dall-e-3", "url"),
        ("gpt-image-1", "b64_json"),
        ("gpt-image-1-mini", "b64_json"),
        ("emoji", "b64_json"),
        ("house-style", "b64_json"),
        (None, "b64_json"),
    ],
)
def test_the_model_s_name_says_how_images_are_answered(server, model, answers_with):
    fields = {"prompt": "a lion", **FEW} | ({} if model is None else {"model": model})
    answer = server.post("/v1/images/generations", fields)
    assert answer.status == 200, answer.body
    [datum] = answer.json["data"]
    assert {"url", "b64_json"} & set(datum) == {answers_with}
    assert datum["revised_prompt"] == "a lion"


def test_what_is_asked_for_counts_more_than_the_name(client):
    answer = client.images.generate(
        prompt="a", model="dall-e-3", response_format="b64_json", extra_body=FEW
    )
    assert answer.data[0].url is None
    assert answer.data[0].b64_json
    events = list(client.images.generate(prompt="a", model="dall-e-3", stream=True, extra_body=FEW))
    assert events[-1].b64_json


def test_addresses_can_be_fetched_until_they_expire(server, client, monkeypatch):
    answer = client.images.generate(prompt="a", model="dall-e-2", extra_body=FEW)
    path = answer.data[0].url.removeprefix(server.url)
    assert server.get(path).image.size == (64, 64)
    now = time.time()
    monkeypatch.setattr("diffusax.serving.engine.engine.time.time", lambda: now + 3700)
    assert server.get(path).status == 404
    assert server.get("/jobs").json == {"jobs": []}


def test_names_that_are_given_are_listed_and_found(client):
    assert [model.id for model in client.models.list()] == ["emoji", "house-style"]
    assert client.models.retrieve("house-style").id == "house-style"
    assert client.models.retrieve("gpt-image-1").id == "emoji"


def test_other_names_are_not_found(client):
    openai = pytest.importorskip("openai")
    for name in ("gpt-4o", "dall", "my-dall-e-3"):
        with pytest.raises(openai.NotFoundError, match="is not listed"):
            client.images.generate(prompt="a", model=name)


def file_of(image):
    return "image.png", encode(image)


@pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning")
def test_varies_an_image(server, client):
    image = picture().convert("RGBA")
    image.putpixel((0, 0), (0, 0, 0, 0))
    answer = client.images.create_variation(
        image=file_of(image), n=2, size="64x64", extra_body={"num_inference_steps": 5, "seed": 1}
    )
    images = [server.get(one.url.removeprefix(server.url)).image for one in answer.data]
    assert [one.size for one in images] == [(64, 64)] * 2
    assert "Denoising strength: 0.6" in images[0].text["parameters"]
    first, second = (np.asarray(one).astype(int) for one in images)
    assert abs(first - second).mean() > 1
    close = abs(first - np.asarray(image.convert("RGB"))).mean()
    assert close < abs(first - np.asarray(picture(colour="blue"))).mean()


def test_a_variation_takes_no_mask(client):
    openai = pytest.importorskip("openai")
    with pytest.raises(openai.UnprocessableEntityError, match="left out of a variation"):
        client.post(
            "/images/variations",
            cast_to=object,
            body={"n": 1},
            files=[("image", file_of(picture())), ("mask", file_of(picture()))],
            options={"headers": {"Content-Type": "multipart/form-data"}},
        )


def test_a_model_that_looks_at_one_image_says_so(client):
    openai = pytest.importorskip("openai")
    said = "image must be given at most 1 times for 'emoji' together"
    with pytest.raises(openai.UnprocessableEntityError, match=said):
        client.images.edit(
            image=[file_of(picture())] * 2, prompt="a", model="gpt-image-1", extra_body=FEW
        )


@pytest.mark.parametrize("alias", ["dall-e-3", "=emoji", "dall-e-3=", "dall-e-3=nix"])
def test_an_alias_must_name_a_model(alias, capsys):
    from diffusax.cli.serve import command

    with pytest.raises(ValueError, match="--alias"):
        command(["--alias", alias, "--port", "0"]).run()
