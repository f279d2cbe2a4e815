"""Texts with images for Qwen's models against transformers' processors, live."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from support.effort import examples
from support.tiny_language import build
from support.tiny_vision_language import TEMPLATE, write_processor

import diffusax
from diffusax.text.image_tokens import image_positions

PLACE = "<|vision_start|><|image_pad|><|vision_end|>"


def picture(width, height):
    values = np.random.default_rng(width).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(values)


IMAGES = [picture(30, 44), picture(100, 20), picture(9, 9)]
TEXTS = [f"a photo of {PLACE} and{PLACE}on the sofa", "a cat", f"{PLACE}the plage été"]
NESTED = [IMAGES[:2], [], IMAGES[2:]]


KINDS = ["Qwen3VLProcessor", "Qwen2_5_VLProcessor", "Qwen2VLProcessor"]


@pytest.fixture(scope="module", params=KINDS[:1])
def pair(request, tmp_path_factory):
    """Our processor, theirs and the folder of both."""
    folder = tmp_path_factory.mktemp("processor")
    theirs = write_processor(folder, request.param)
    ours = getattr(diffusax, request.param).from_pretrained(folder)
    assert type(ours).__name__ == request.param
    return ours, theirs, folder


with_every_kind = pytest.mark.parametrize("pair", KINDS, indirect=True)


def same(actual, expected):
    assert {*actual} == {*expected}
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(actual[name], value), name
            assert actual[name].dtype == value.dtype, name
        else:
            assert actual[name] == value, name


@with_every_kind
@pytest.mark.parametrize("side", ["right", "left"])
def test_tokens_patches_and_types_equal_transformers(pair, side):
    ours, theirs, _ = pair
    options = {"padding": True, "padding_side": side, "return_tensors": "pt"}
    for images, texts in [(NESTED, TEXTS), (IMAGES, TEXTS), (None, ["a cat", "the red sofa"])]:
        same(ours(images, texts, **options), theirs(images=images, text=texts, **options))
    same(ours(None, "a cat"), theirs(text="a cat"))
    options |= {"padding": "max_length", "max_length": 70, "truncation": True}
    same(ours(NESTED, TEXTS, **options), theirs(images=NESTED, text=TEXTS, **options))


@settings(max_examples=examples(20, 300), deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=3), st.randoms(use_true_random=False))
def test_tokens_of_any_texts_equal_transformers(pair, counts, random):
    ours, theirs, _ = pair
    words = ["a cat", " ", "<|im_start|>", "été", "\n", "<|image", "pad|>", "12:30", "猫"]

    def text(count):
        parts = [random.choice(words) for _ in range(random.randrange(6))] + [PLACE] * count
        random.shuffle(parts)
        return "".join(parts)

    texts = [text(count) for count in counts]
    images = [[random.choice(IMAGES) for _ in range(count)] for count in counts]
    flat = [image for own in images for image in own] or None
    actual, expected = ours(images, texts), theirs(images=flat, text=texts)
    assert actual.input_ids == expected["input_ids"]
    assert actual.attention_mask == expected["attention_mask"]
    assert actual.mm_token_type_ids == expected["mm_token_type_ids"]


@with_every_kind
def test_chats_equal_transformers(pair):
    ours, theirs, _ = pair
    first = [
        {"role": "system", "content": "the user's assistant"},
        {
            "role": "user",
            "content": [
                {"type": "image", "image": IMAGES[0]},
                {"type": "text", "text": "a photo of"},
                {"type": "image", "image": IMAGES[1]},
            ],
        },
    ]
    second = [{"role": "user", "content": [{"type": "text", "text": "a cat"}]}]
    for chat in (first, second, [first, second]):
        for prompt in (True, False):
            options = {"add_generation_prompt": prompt, "add_vision_id": prompt}
            expected = theirs.apply_chat_template(chat, **options)
            assert ours.apply_chat_template(chat, **options) == expected
            options |= {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
            options["processor_kwargs"] = {"padding": True}
            same(
                ours.apply_chat_template(chat, **options),
                theirs.apply_chat_template(chat, **options),
            )
    alone = ours.apply_chat_template(first, tokenize=True)
    assert alone == theirs.apply_chat_template(first, tokenize=True)


@with_every_kind
@pytest.mark.parametrize("side", ["right", "left"])
def test_inputs_of_the_networks_equal_transformers(pair, side):
    ours, theirs, _ = pair
    found = ours.read(TEXTS, NESTED, padding_side=side)
    options = {"padding": True, "padding_side": side, "return_tensors": "pt"}
    expected = theirs(images=IMAGES, text=TEXTS, **options)
    np.testing.assert_array_equal(found.ids, expected["input_ids"])
    np.testing.assert_array_equal(found.mask, expected["attention_mask"])
    np.testing.assert_array_equal(found.images, expected["mm_token_type_ids"] == 1)
    np.testing.assert_array_equal(np.concatenate(found.patches), expected["pixel_values"])
    np.testing.assert_array_equal(found.grids, expected["image_grid_thw"][:, 1:])
    assert [len(own) for own in found.patches] == found.grids.prod(axis=1).tolist()
    del expected["pixel_values"]
    mask = expected.pop("attention_mask")
    model = "Qwen3VLModel" if type(ours).__name__ == KINDS[0] else "Qwen2_5_VLModel"
    positions, _ = build(model).get_rope_index(**expected, attention_mask=mask)
    assert found.positions.shape == (3, *found.ids.shape)
    np.testing.assert_array_equal(found.positions, positions)
    assert (found.positions[1] != found.positions[2]).any()
    texts = ours.read(["a cat", "the red sofa in front"], [[], []], padding_side=side)
    assert texts.patches == ()
    np.testing.assert_array_equal(texts.positions, [(texts.mask.cumsum(1) - 1) * texts.mask] * 3)


@pytest.mark.parametrize("kind", ["Qwen3VLModel", "Qwen2_5_VLModel"])
def test_positions_of_frames_equal_transformers(kind):
    types = np.array([[0, 0, *[1] * 12, 0, 0, 1, 0]])
    grids = np.array([[2, 4, 6], [1, 2, 2]])
    ids = np.arange(types.size)[None]
    given = (torch.tensor(x) for x in (ids, types, grids))
    expected, _ = build(kind).get_rope_index(*given)
    np.testing.assert_array_equal(image_positions(types, grids), expected)


@pytest.mark.parametrize(
    ("types", "grids", "message"),
    [
        ([[0, 1, 1]], [[1, 2, 2]], r"an image must have 1 tokens of type 1 \(got 2 of type 1\)"),
        ([[0, 1, 0, 1]], [[1, 2, 2]], r"an image must have 0 tokens of type 1 \(got 1 of type 1\)"),
        ([[0, 2]], [[1, 2, 2]], r"got 1 of type 2"),
        ([[0, 0]], [[1, 2, 2]], "got more images"),
    ],
)
def test_images_that_do_not_fit_the_tokens_are_an_error(types, grids, message):
    with pytest.raises(ValueError, match=message):
        image_positions(np.array(types), grids)


@with_every_kind
def test_saved_it_opens_in_transformers(pair, tmp_path):
    ours, theirs, _ = pair
    ours.save_pretrained(tmp_path)
    again = type(ours).from_pretrained(tmp_path)
    assert again.chat_template == theirs.chat_template
    tokenizer = type(theirs.tokenizer).from_pretrained(tmp_path)
    images = type(theirs.image_processor).from_pretrained(tmp_path)
    opened = type(theirs)(images, tokenizer, None, chat_template=theirs.chat_template)
    options = {"padding": True, "return_tensors": "pt"}
    same(again(NESTED, TEXTS, **options), opened(images=NESTED, text=TEXTS, **options))


def test_the_template_of_older_files_is_read(pair, tmp_path):
    ours, _, _ = pair
    dataclasses.replace(ours.tokenizer, chat_template=None).save(tmp_path)
    ours.image_processor.save(tmp_path)
    assert diffusax.Qwen3VLProcessor.from_folder(tmp_path).chat_template is None
    file = tmp_path / "chat_template.json"
    file.write_text(json.dumps({"chat_template": TEMPLATE}))
    assert diffusax.Qwen3VLProcessor.from_folder(tmp_path).chat_template == TEMPLATE
    file.write_text(json.dumps({"chat_template": 1}))
    with pytest.raises(ValueError, match=r"chat_template.json: chat_template must be a text"):
        diffusax.Qwen3VLProcessor.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("images", "texts", "options", "message"),
    [
        (NESTED, TEXTS[:2], {}, r"must have <.image_pad.> for each image, 3 in all \(got 2\)"),
        (IMAGES[:2], TEXTS, {}, r"2 in all \(got 3\)"),
        (NESTED, TEXTS, {"max_length": 9, "truncation": True}, "must leave room for the tokens of"),
        (
            NESTED,
            TEXTS,
            {"padding": True, "padding_side": "top"},
            "padding_side must be 'right' or",
        ),
        (["no_such.png"], TEXTS[2:], {}, "no_such.png"),
        (NESTED, [1], {}, "text must be"),
    ],
)
def test_what_does_not_fit_is_an_error(pair, images, texts, options, message):
    with pytest.raises(ValueError, match=message):
        pair[0](images, texts, **options)
