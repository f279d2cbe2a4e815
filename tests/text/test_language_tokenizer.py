"""Tokenizers of language models and their chat templates against transformers, live."""

import json
import shutil
import threading
from unittest import mock

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from support.effort import examples
from support.tiny_language import TEMPLATE, write_qwen_tokenizer, write_t5_tokenizer

import diffusax
from diffusax.text.chat import render_chat
from diffusax.text.language_tokenizer import Qwen2Tokenizer, T5Tokenizer

KINDS = {
    "qwen-4": (Qwen2Tokenizer, lambda folder: write_qwen_tokenizer(folder, layout=4)),
    "qwen-5": (Qwen2Tokenizer, write_qwen_tokenizer),
    "t5": (T5Tokenizer, write_t5_tokenizer),
    "t5-4": (T5Tokenizer, lambda folder: write_t5_tokenizer(folder, "4")),
    "t5-spiece": (T5Tokenizer, lambda folder: write_t5_tokenizer(folder, "spiece")),
}
PIECES = [
    *("a photo of a cat", " ", "  ", "\n\n", "\t", "don't", "WE'LL", "1234", "猫", "고양이", "été"),
    *(
        "e\u0301",
        "\u00a0",
        "😀",
        "👩‍👩‍👧",
        "\u200d",
        "…",
        "<|im_start|>",
        "<|im_end|>",
        "<think>",
        "</think>",
    ),
    *(
        "<|endoftext|>",
        "</s>",
        "<pad>",
        "<unk>",
        "<extra_id_0>",
        "<extra_id_7>",
        "▁",
        "▁a",
        "ﬁ",
        "\x00",
        "<sep>",
    ),
    # What the table of T5 drops, what it makes spaces of, and white space that it leaves.
    *("\x01", "\x7f", "\x80", "\x85", "\x9f", "\u00ad", "\ufeff", "\u200b", "\u3000", "\uff21"),
    *("\x0b", "\x1c", "\u2028", "\u2029", "\u1680", "\u180e", "\U000e0001", "\uffff"),
]
TEXTS = st.lists(st.sampled_from(PIECES) | st.text(max_size=12), max_size=12).map("".join)
CALLS = [
    {},
    {"padding": True},
    {"padding": "max_length"},
    {"padding": "max_length", "max_length": 24, "truncation": True},
    {"truncation": True},
    {"truncation": True, "max_length": 5, "add_special_tokens": False},
    {"max_length": 3},
]


@pytest.fixture(scope="module", params=KINDS)
def pair(request, tmp_path_factory):
    """Our tokenizer, theirs and the folder of both."""
    folder = tmp_path_factory.mktemp(request.param)
    kind, write = KINDS[request.param]
    theirs = write(folder)
    assert type(theirs).__name__ == kind.__name__
    return getattr(diffusax, kind.__name__).from_pretrained(folder), theirs, folder


@settings(max_examples=examples(60, 1500), deadline=None)
@given(st.lists(TEXTS, min_size=1, max_size=4), st.sampled_from(CALLS))
def test_ids_and_masks_equal_transformers(pair, texts, call):
    ours, theirs, _ = pair
    actual, expected = ours(texts, **call), theirs(texts, **call)
    assert actual.input_ids == expected.input_ids
    assert actual.attention_mask == expected.attention_mask
    assert ours(texts[0]).input_ids == theirs(texts[0]).input_ids
    ids = actual.input_ids
    for skip in (False, True):
        assert ours.batch_decode(ids, skip) == theirs.batch_decode(ids, skip_special_tokens=skip)


def test_special_tokens_and_tensors_equal_transformers(pair):
    ours, theirs, _ = pair
    assert ours.special == theirs.special_tokens_map
    for name in ("pad_token_id", "eos_token_id", "model_max_length", "vocab_size"):
        assert getattr(ours, name) == getattr(theirs, name)
    options = {"padding": "max_length", "max_length": 9, "truncation": True}
    texts = ["a cat", "a photo of a cat on the sofa in front of it"]
    actual = ours(texts, return_tensors="pt", **options)
    assert torch.equal(actual.input_ids, theirs(texts, return_tensors="pt", **options).input_ids)
    assert set(ours(texts, return_attention_mask=False)) == {"input_ids"}
    ours.check_fits(len(theirs))
    with pytest.raises(ValueError, match=f"the id {len(theirs) - 1}, but .*do not belong together"):
        ours.check_fits(len(theirs) - 1)


def test_saved_tokenizer_opens_in_transformers(pair, tmp_path):
    ours, theirs, _ = pair
    ours.save_pretrained(tmp_path)
    again = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert type(again) is type(theirs)
    text = "a <|im_end|>cat </s> <think>猫 "
    for tokenizer in (again, type(ours).from_folder(tmp_path)):
        assert tokenizer(text).input_ids == theirs(text).input_ids
        assert tokenizer.chat_template == theirs.chat_template
    assert again.special_tokens_map == theirs.special_tokens_map


MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant"]), "content": TEXTS},
        optional={"extra": st.none() | st.lists(st.text() | st.integers()) | st.just({"a": "<é>"})},
    ),
    min_size=1,
    max_size=3,
)


@settings(max_examples=examples(30, 500), deadline=None)
@given(MESSAGES, st.booleans(), st.sampled_from([{}, {"enable_thinking": False}, {"tools": [{}]}]))
def test_chats_equal_transformers(tmp_path_factory, messages, prompt, options):
    ours, theirs = _chatting(tmp_path_factory)
    options = {"add_generation_prompt": prompt, **options}
    expected = theirs.apply_chat_template(messages, tokenize=False, **options)
    assert ours.apply_chat_template(messages, tokenize=False, **options) == expected
    both = [messages, [{"role": "user", "content": "a cat"}]]
    for call in ({}, {"padding": "max_length", "max_length": 20, "truncation": True}):
        actual = ours.apply_chat_template(both, **call, **options)
        wanted = theirs.apply_chat_template(both, **call, **options)
        assert dict(actual) == dict(wanted)
    ids = theirs.apply_chat_template(messages, return_dict=False, **options)
    assert ours.apply_chat_template(messages, return_dict=False, **options) == ids


def test_a_chat_has_no_end_but_the_template_s(tmp_path):
    theirs = write_t5_tokenizer(tmp_path)
    chat = [{"role": "user", "content": "a cat"}]
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    actual = T5Tokenizer.from_folder(tmp_path).apply_chat_template(chat, chat_template=template)
    expected = theirs.apply_chat_template(chat, chat_template=template)
    assert dict(actual) == dict(expected)
    assert actual.input_ids[-1] != theirs.eos_token_id


def test_tokens_that_only_the_config_names_are_added(tmp_path):
    write_qwen_tokenizer(tmp_path, layout=4)
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text())
    i = 1 + max(map(int, config["added_tokens_decoder"]))
    config["added_tokens_decoder"][i] = config["added_tokens_decoder"][str(i - 1)] | {
        "content": "<image>",
        "special": True,
    }
    config["pad_token"] = "<fill>"
    path.write_text(json.dumps(config))
    ours, theirs = (
        Qwen2Tokenizer.from_folder(tmp_path),
        transformers.AutoTokenizer.from_pretrained(tmp_path),
    )
    texts = ["a<image>cat <fill> ", "<image>"]
    assert ours(texts, padding=True).input_ids == theirs(texts, padding=True).input_ids
    assert ours("<image>").input_ids == [i]
    assert ours.pad_token_id == theirs.pad_token_id == i + 1


_PAIRS = []


def _chatting(tmp_path_factory):
    if not _PAIRS:
        folder = tmp_path_factory.mktemp("chat")
        theirs = write_qwen_tokenizer(folder)
        _PAIRS.append((Qwen2Tokenizer.from_folder(folder), theirs))
    return _PAIRS[0]


USER = [{"role": "user", "content": "a cat"}]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('never') }}", "TemplateError: never"),
        ("{% for %}", "TemplateSyntaxError"),
        ("{{ messages.__class__.__mro__ }}", "SecurityError"),
        ("{{ ''.__class__.__base__.__subclasses__() }}", "SecurityError"),
        ("{% set n = namespace() %}{% set n.__class__ = 1 %}", "SecurityError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ messages[0].content / 2 }}", "TypeError"),
        ("{{ range(10 ** 9) }}", "OverflowError"),
    ],
)
def test_a_template_that_fails_or_reaches_out_is_an_error(template, message):
    with pytest.raises(ValueError, match=f"the chat template cannot render .*{message}"):
        render_chat(template, USER)


def test_conversations_that_cannot_be_rendered_are_errors(pair):
    ours, _, _ = pair
    given = {"chat_template": TEMPLATE}
    with pytest.raises(ValueError, match="at least one message"):
        ours.apply_chat_template([], **given)
    with pytest.raises(ValueError, match="messages must be plain data"):
        ours.apply_chat_template([{"role": "user", "content": object()}], **given)
    with pytest.raises(ValueError, match="no such role: painter"):
        ours.apply_chat_template([{"role": "painter", "content": ""}], **given)
    with pytest.raises(ValueError, match="continue_final_message must be left out"):
        ours.apply_chat_template(USER, continue_final_message=True, **given)
    if ours.chat_template is None:
        with pytest.raises(ValueError, match="has no chat template"):
            ours.apply_chat_template(USER)


def test_threads_do_not_disturb_each_other(pair):
    ours, _, _ = pair
    texts = ["a cat"] * 3
    expected = {n: ours(texts, truncation=True, max_length=n).input_ids for n in (2, 3, 20)}
    wrong = []

    def run(length):
        for _ in range(40):
            found = ours(texts, truncation=True, max_length=length).input_ids
            wrong.extend([length] if found != expected[length] else [])

    threads = [threading.Thread(target=run, args=(n,)) for n in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        (
            "tokenizer.json",
            None,
            r"is missing, and there is no (spiece.model|vocab.json and merges.txt) either; write",
        ),
        ("tokenizer.json", "{}", "tokenizer.json is no tokenizer"),
        ("tokenizer_config.json", {"tokenizer_class": "CLIPTokenizer"}, "is not supported .only"),
        ("tokenizer_config.json", {"padding_side": "left"}, "padding_side='left' is not supported"),
        ("tokenizer_config.json", {"model_max_length": "512"}, "model_max_length must be from 1"),
        ("tokenizer_config.json", {"pad_token": {"a": 1}}, "special tokens in no known form"),
        ("tokenizer_config.json", "[]", "must hold a JSON object"),
    ],
)
def test_a_broken_folder_is_an_error(pair, tmp_path, file, change, message):
    ours, _, folder = pair
    copy = shutil.copytree(folder, tmp_path / "tokenizer")
    path = copy / file
    if file == "tokenizer.json":
        (copy / "spiece.model").unlink(missing_ok=True)
        path.touch()
    if change is None:
        path.unlink()
    elif isinstance(change, str):
        path.write_text(change)
    else:
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=message):
        type(ours).from_folder(copy)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data[:-1], "it ends early"),
        (lambda data: b"", "it has no pieces"),
        (lambda data: b"\x0f" + data, "wire type 7"),
        (lambda data: b"\x80" * 20, "more than 64 bits"),
        (lambda data: data + b"\x12\x02\x18\x02", "its model_type is 2"),
        (lambda data: b"\x0a\x03\x0a\x01\xff" + data, "invalid start byte"),
    ],
)
def test_a_broken_model_of_sentencepiece_is_an_error(tmp_path, change, message):
    write_t5_tokenizer(tmp_path, "spiece")
    path = tmp_path / "spiece.model"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ValueError, match=f"spiece.model is no unigram model .*{message}"):
        T5Tokenizer.from_folder(tmp_path)


def test_a_qwen_of_vocabulary_and_merges_alone_is_that_of_transformers(tmp_path):
    theirs = write_qwen_tokenizer(tmp_path, layout=4)
    data = json.loads((tmp_path / "tokenizer.json").read_text())["model"]
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "vocab.json").write_text(json.dumps(data["vocab"]))
    merges = "\n".join(" ".join(pair) for pair in data["merges"])
    (tmp_path / "merges.txt").write_text(f"#version: 0.2\n{merges}\n")
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text())
    texts = ["a <|im_end|>cat\x7f <think>猫\x85 ", "\u2028 the\x00 foxes'"]
    assert Qwen2Tokenizer.from_folder(tmp_path)(texts).input_ids == theirs(texts).input_ids
    for change in ({"add_eos_token": True}, {"add_prefix_space": True}):
        path.write_text(json.dumps(config | change))
        other = transformers.Qwen2Tokenizer.from_pretrained(tmp_path)(texts).input_ids
        assert Qwen2Tokenizer.from_folder(tmp_path)(texts).input_ids == other
        assert other != theirs(texts).input_ids


def test_special_tokens_of_a_config_are_the_only_ones_beside_a_model_of_sentencepiece(tmp_path):
    write_t5_tokenizer(tmp_path, "spiece")
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text())
    for change in ({"additional_special_tokens": ["<extra_id_1>"]}, {"eos_token": "<sep>"}):
        path.write_text(json.dumps(config | change))
        with mock.patch("transformers.convert_slow_tokenizer.requires_backends"):
            theirs = transformers.T5Tokenizer.from_pretrained(tmp_path)
        text = "a<sep> cat<extra_id_1> <extra_id_0></s>"
        assert T5Tokenizer.from_folder(tmp_path)(text).input_ids == theirs(text).input_ids


def test_a_tokenizer_of_another_kind_is_an_error(tmp_path):
    write_t5_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(ValueError, match="a model of the kind Unigram, not BPE"):
        Qwen2Tokenizer.from_folder(tmp_path)
    with pytest.raises(ValueError, match="there is no folder"):
        T5Tokenizer.from_folder(tmp_path / "nowhere")


def test_padding_without_a_token_for_it_is_an_error(tmp_path):
    write_qwen_tokenizer(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pad_token": None}))
    ours = Qwen2Tokenizer.from_folder(tmp_path)
    assert ours("a cat").input_ids
    with pytest.raises(ValueError, match="has no pad_token"):
        ours(["a cat", "cats"], padding=True)
    with pytest.raises(ValueError, match="max_length must be at least 0"):
        ours("a cat", truncation=True, max_length=-1)
    assert np.asarray(ours("a cat", return_tensors="np").input_ids).ndim == 2
