"""Tokenizers' vocabularies under transformers' names, beside transformers' own."""

import copy

import pytest
from support.clip_vocabulary import write_clip_vocabulary
from transformers import CLIPTokenizer

import diffusax

TEXT = "A photo of <cat>, two DOGS!"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_clip_vocabulary(tmp_path_factory.mktemp("vocabulary"), pad="!")


@pytest.fixture(scope="module")
def loaded(folder):
    return diffusax.CLIPTokenizer.from_pretrained(folder)


@pytest.fixture
def pair(folder, loaded):
    return copy.copy(loaded), CLIPTokenizer.from_pretrained(folder)


def test_words_are_added_and_read_as_transformers(pair):
    found = []
    for tokenizer in pair:
        added = tokenizer.add_tokens(["<cat>", "<dog>"]), tokenizer.add_tokens("<cat>")
        ids = tokenizer.encode(TEXT)
        found.append(
            {
                "added": added,
                "length": len(tokenizer),
                "ids": ids,
                "plain": tokenizer.encode(TEXT, add_special_tokens=False),
                "tokens": tokenizer.convert_ids_to_tokens(ids),
                "kept": tokenizer.convert_ids_to_tokens(ids, skip_special_tokens=True),
                "one": tokenizer.convert_ids_to_tokens(ids[1]),
                "words": tokenizer.tokenize(TEXT),
                "known": tokenizer.convert_tokens_to_ids(["<cat>", "photo</w>", "nothing at all"]),
                "unknown": tokenizer.convert_tokens_to_ids("nothing at all"),
                "vocabulary": tokenizer.get_vocab(),
                "special": {*tokenizer.all_special_tokens},
                "around": tokenizer.num_special_tokens_to_add(),
                "room": tokenizer.max_len_single_sentence,
                "decoded": tokenizer.batch_decode([ids], skip_special_tokens=True),
            }
        )
    for name, value in found[1].items():
        assert found[0][name] == value, name


def test_special_tokens_are_set_by_name(pair):
    for tokenizer in pair:
        assert tokenizer.add_special_tokens({"additional_special_tokens": ["<a>"]}) == 1
        assert tokenizer.add_special_tokens({"pad_token": "<pad>"}) == 1
        assert tokenizer.pad_token_id == len(tokenizer) - 1
    ours, theirs = (t("a", padding="max_length").input_ids for t in pair)
    assert ours == theirs


def test_lengths_are_returned_and_other_options_refused(pair):
    options = {"padding": "max_length", "truncation": True, "max_length": 77}
    asked = {"return_length": True, "return_overflowing_tokens": False, "return_tensors": "pt"}
    ours, theirs = (t([TEXT], **options, **asked) for t in pair)
    assert {name: ours[name].tolist() for name in ours} == {n: theirs[n].tolist() for n in theirs}
    with pytest.raises(ValueError, match="return_offsets_mapping must be left out"):
        pair[0](TEXT, return_offsets_mapping=True)
    with pytest.raises(TypeError, match="no argument 'max_len'"):
        pair[0](TEXT, max_len=3)


def test_a_copy_gets_words_alone(pair):
    ours, _ = pair
    size = len(ours)
    other = copy.copy(ours)
    other.add_tokens("<new>")
    assert (len(ours), len(other)) == (size, size + 1)
    assert other.words == {"<new>": size}
    assert ours.words == {}
