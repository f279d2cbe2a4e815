"""CLIPTokenizer against the live transformers CLIPTokenizer, with CLIP's real vocabulary."""

import json
import random
import shutil
import subprocess
import sys
import textwrap
import time
import unicodedata
import warnings
from pathlib import Path

import jax
import numpy as np
import pytest
import transformers
from support.clip_vocabulary import write_clip_vocabulary

from diffusax.text.tokenizer import CLIPTokenizer

PADS = {"sd1": "<|endoftext|>", "sd2": "!"}

TRICKY = [
    *("", " ", "  \n\t ", "a", "A", "a photo of a cat", "A Photo, of a CAT.", "cat  dog", " cat "),
    *(
        "Été à la plage",
        "E\u0301te\u0301",
        "e\u0301\u0323",
        "ＦＵＬＬ　ｗｉｄｔｈ",
        "ﬁancé ﬀ",
        "naïve Ångström Å",
    ),
    *("İstanbul", "ΣΊΣΥΦΟΣ ς", "ẞ straße", "ǅ ǆ", "DŽ", "Ⅷ ⅷ ² ½ ①", "𝒳𝓎𝔷", "١٢٣ 一二三"),
    *("😀", "👩‍👩‍👧‍👦 family", "🏳️‍🌈🇫🇷", "a😀b", "☃️❄", "👍🏽!!"),
    *(
        "中文字符",
        "猫の絵",
        "고양이 그림",
        "한국어테스트 中文 mixed",
        "ภาษาไทย",
        "עברית",
        "العربية",
        "हिन्दी क्षत्रिय",
    ),
    *(
        "don't",
        "DON'T CAN'T",
        "I'm you're we've they'll he'd it's",
        "'s",
        "''s",
        "rock'n'roll",
        "it’s",
    ),
    *("'S 'T", "o'sullivan", "'''", "'sx", "x'ds"),
    *("1234", "3.14", "1,000,000", "2nd", "4k 8K hdr10", "a1b2c3", "v1.5-pruned"),
    *("hello!!!", "!", "!!", "! !", "wow!cat", "?!", "...", "a.b.c", "e-mail@x.com", "C++ C# F*"),
    *("<|startoftext|>", "<|endoftext|>", "a <|endoftext|> b", "x<|endoftext|>y", "<|ENDOFTEXT|>"),
    *(
        "<|StartOfText|> a",
        "<|endoftext|><|endoftext|>",
        "<|endoftext",
        "|endoftext|>",
        "<| endoftext |>",
    ),
    *("</w>", "a</w>", "cat</w> dog", "<w>", "w</w", "</W>"),
    *("tab\tnew\nline\r\n", "a\u00a0b", "a\u2003b", "a\u200bb", "a\u2028b", "a\x85b", "\ufeffbom"),
    *("\x00", "a\x00b", "a\x01\x1fb", "\x7f", "\u0080\u009f", "\ufffd", "\ufffe", "\U0010ffff"),
    *("(word:1.3)", "[a]", "{a|b}", "a\\(b\\)", "a_b __c__", "$100 & 50%", "~`^|", '"quoted" “q”'),
    *(
        "supercalifragilisticexpialidocious",
        "x" * 300,
        "asdfghjklqwertyuiop",
        "http://a.b/c?d=e&f=g#h",
    ),
    *("trending on artstation, 8k, octane render", "masterpiece,best quality,1girl", "a:b;c"),
    *(
        "\u0130",
        "\u0345",
        "\u1e9e",
        "\u03a3",
        "a\u0308\u0304",
        "\u1100\u1161\u11a8",
        "\u0958",
        "\u2126",
    ),
]


@pytest.fixture(scope="module", params=["sd1", "sd2"])
def style(request):
    return request.param


@pytest.fixture(scope="module")
def folder(style, tmp_path_factory):
    return write_clip_vocabulary(tmp_path_factory.mktemp(style), pad=PADS[style])


@pytest.fixture(scope="module")
def theirs(folder):
    return transformers.CLIPTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def ours(folder):
    return CLIPTokenizer.from_folder(folder)


@pytest.fixture
def copy(tmp_path, folder):
    return Path(shutil.copytree(folder, tmp_path / "tokenizer"))


def random_texts(count: int) -> list[str]:
    """Strings from mixed Unicode ranges, some with words and special tokens between."""
    rng = random.Random(0)
    ranges = [
        *(
            (0x20, 0x7E),
            (0x00, 0x24F),
            (0x250, 0x3FF),
            (0x400, 0x6FF),
            (0x900, 0xE7F),
            (0x1100, 0x11FF),
        ),
        *((0x1E00, 0x1FFF), (0x2000, 0x2BFF), (0x3000, 0x30FF), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3)),
        *((0xF900, 0xFFFF), (0x1D400, 0x1D7FF), (0x1F300, 0x1FAFF), (0x0, 0x10FFFF)),
    ]
    pieces = [
        "cat",
        "Dog's",
        "<|endoftext|>",
        "<|startoftext|>",
        "</w>",
        " ",
        "\t",
        "!",
        "'LL",
        "12",
    ]
    texts = []
    for _ in range(count):
        parts = []
        for _ in range(rng.randint(1, 12)):
            if rng.random() < 0.3:
                parts.append(rng.choice(pieces))
            else:
                code = rng.randint(*rng.choice(ranges))
                parts.append("" if 0xD800 <= code < 0xE000 else chr(code) * rng.randint(1, 2))
        texts.append("".join(parts))
    return texts


def padded(tokenizer, texts):
    ids = tokenizer(texts, padding="max_length", max_length=77, truncation=True).input_ids
    return np.array(ids, np.int32)


def assert_same_ids(ours, theirs, texts):
    for text in texts:
        expected = theirs(text, add_special_tokens=False).input_ids
        assert ours.ids_of(text) == expected, repr(text)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        actual = ours.windows(texts)
    assert actual.dtype == np.int32
    np.testing.assert_array_equal(actual, padded(theirs, texts))


def test_special_ids_are_transformers(ours, theirs):
    assert ours.bos_token_id == theirs.bos_token_id == 49406
    assert ours.eos_token_id == theirs.eos_token_id == 49407
    assert ours.pad_token_id == theirs.pad_token_id
    assert ours.model_max_length == theirs.model_max_length == 77


def test_pads_of_sd1_and_sd2(ours, style):
    assert ours.windows("").tolist() == [[49406, 49407] + [{"sd1": 49407, "sd2": 0}[style]] * 75]


def test_tricky_texts_have_transformers_ids(ours, theirs):
    assert_same_ids(ours, theirs, TRICKY)


def test_every_assigned_character_of_the_basic_plane(ours, theirs):
    characters = (chr(c) for c in range(0x10000))
    text = [c for c in characters if unicodedata.category(c) not in ("Cn", "Cs", "Co")]
    for i in range(0, len(text), 50):
        chunk = " x".join(text[i : i + 50])
        assert ours.ids_of(chunk) == theirs(chunk, add_special_tokens=False).input_ids, repr(chunk)


def test_random_unicode_has_transformers_ids(ours, theirs):
    assert_same_ids(ours, theirs, random_texts(1500))


def test_ids_are_decoded_as_in_transformers(ours, theirs):
    for text in TRICKY:
        ids = theirs(text).input_ids
        assert ours.decode(ids) == theirs.decode(ids), repr(text)
        shown = ours.decode(np.array(ids), skip_special_tokens=True)
        assert shown == theirs.decode(ids, skip_special_tokens=True), repr(text)


TEXTS = ["a red apple", "Two DOGS, running over the hills!", "", "x " * 100]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"padding": True},
        {"padding": "longest", "add_special_tokens": False},
        {"padding": "max_length"},
        {"padding": "max_length", "truncation": True, "return_tensors": "np"},
        {"padding": "max_length", "max_length": 12, "truncation": True, "return_tensors": "pt"},
        {"truncation": True, "max_length": 5},
        {"max_length": 6},
        {"padding": "do_not_pad", "truncation": "longest_first", "return_attention_mask": False},
    ],
)
def test_a_call_gives_what_transformers_gives(ours, theirs, options):
    for given in (TEXTS, TEXTS[0], TEXTS[3]):
        actual, expected = ours(given, **options), theirs(given, **options)
        assert list(actual) == list(expected)
        for name in expected:
            a, e = actual[name], expected[name]
            assert type(a) is type(e)
            assert a is getattr(actual, name)
            if isinstance(e, list):
                assert a == e
            else:
                assert a.dtype == e.dtype
                np.testing.assert_array_equal(a, e)


def test_tokens_may_be_arrays_of_jax(ours):
    found = ours(["a cat", "a dog"], return_tensors="jax")
    assert isinstance(found.input_ids, jax.Array)
    assert found.to("cpu").attention_mask.shape == (2, 4)
    assert ours.batch_decode(found.input_ids, skip_special_tokens=True) == ["a cat", "a dog"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"padding": "left"}, "padding must be True, False, 'longest'"),
        ({"truncation": 3}, "truncation must be True, False, 'longest_first'"),
        (
            {"padding": True, "return_tensors": "tf"},
            "return_tensors must be 'np', 'pt', 'jax' or None .got 'tf'",
        ),
        ({"return_tensors": "np"}, "return_tensors needs rows of one length: pass padding=True"),
        ({"max_length": 1, "truncation": True}, "max_length must be at least 2 .got 1"),
        ({"text": 3}, "text must be a string or a list of strings, not int"),
    ],
)
def test_a_wrong_call_is_one_sentence(ours, options, message):
    with pytest.raises(ValueError, match=message):
        ours(**{"text": TEXTS, **options})


def test_the_vocabulary_has_a_size(ours, theirs):
    assert ours.vocab_size == theirs.vocab_size


def test_a_text_of_75_tokens_is_not_cut(ours, theirs, recwarn):
    text = " ".join(["cat"] * 75)
    np.testing.assert_array_equal(ours.windows(text), padded(theirs, [text]))
    assert not recwarn


def test_what_does_not_fit_is_cut_off_with_a_warning(ours, theirs):
    text = "cat " * 74 + "Cafe\u0301 Old HOUSES, and More"
    message = "a text is longer than 75 tokens; what does not fit is cut off"
    with pytest.warns(UserWarning, match=message):
        ids = ours.windows([text])
    np.testing.assert_array_equal(ids, padded(theirs, [text]))
    assert ids[0, -1] == ours.eos_token_id


def test_many_long_texts_are_one_warning(ours):
    """Python keeps each different warning, so a data set's captions must not stand in them."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for i in range(5):
            ours.windows([f"cat {i}" * 80, f"dog {i}" * 90])
    assert len(caught) == 1


def test_fit_gives_the_first_tokens_and_the_rest_of_the_text(ours):
    text = "cat cat Cafe\u0301 Old HOUSES, and More"
    assert ours.fit(text, 3) == (ours.ids_of(text)[:3], "Old HOUSES, and More")
    assert ours.fit(text, 100) == (ours.ids_of(text), "")
    assert ours.fit(text, 0) == ([], text)
    first, *_ = ours.ids_of("supercalifragilistic")
    rest = "supercalifragilistic"[len(ours.decode([first])) :]
    assert ours.fit("supercalifragilistic", 1) == ([first], rest)


LONG = {
    "words": "a photo of a cat, ",
    "one word": "supercalifragilistic",
    "letters": "x",
    "punctuation": "!?",
    "digits": "1234567890",
    "marks": "e\u0301\u0323\u0304",
    "jamo": "\u1112\u1161\u11ab",
    "emoji": "👩‍👩‍👧‍👦",
    "spaces": "cat" + " " * 300,
    "brackets": "(a" * 5,
}


@pytest.mark.parametrize("kind", LONG)
def test_the_end_of_a_long_text_is_not_needed_for_its_first_tokens(ours, kind):
    piece = LONG[kind]
    text = piece * (60_000 // len(piece))
    ids, rest = ours.fit(text, 75)
    assert ids == ours.ids_of(text)[:75]
    assert text.endswith(rest)


@pytest.mark.parametrize("kind", LONG)
def test_a_text_of_10_megabytes_takes_a_second_at_most(ours, kind):
    piece = LONG[kind]
    text = piece * (10_000_000 // len(piece))
    start = time.process_time()
    with pytest.warns(UserWarning, match="cut off"):
        ours.windows(text)
    assert time.process_time() - start < 4  # a slow machine; without a bound it is a minute


def test_a_text_encoder_must_have_embeddings_for_all_ids_and_positions(ours, copy):
    assert ours.max_id == 49407
    ours.check_fits(49408, 77)
    with pytest.raises(
        ValueError, match=r"'<\|endoftext\|>' the id 49407, but .* vocab_size=49407"
    ):
        ours.check_fits(49407, 77)
    with pytest.raises(ValueError, match=r"model_max_length=77, but .* max_position_embeddings=76"):
        ours.check_fits(49408, 76)
    (copy / "added_tokens.json").write_text(json.dumps({"<cat-toy>": 49408}))
    with pytest.raises(ValueError, match="gives '<cat-toy>' the id 49408"):
        CLIPTokenizer.from_folder(copy).check_fits(49408, 77)


@pytest.mark.parametrize("written_by", ["transformers", "diffusax"])
def test_round_trip_through_files(ours, theirs, written_by, tmp_path):
    if written_by == "transformers":
        theirs.save_pretrained(tmp_path)
    else:
        ours.save(tmp_path)
    for source in (tmp_path, _without(tmp_path, "tokenizer.json", tmp_path / "legacy")):
        if not (source / "tokenizer.json").exists() and not (source / "vocab.json").exists():
            continue  # transformers 5 writes tokenizer.json only
        reopened = CLIPTokenizer.from_folder(source)
        assert_same_ids(reopened, theirs, TRICKY)
        by_transformers = transformers.CLIPTokenizer.from_pretrained(source)
        assert_same_ids(reopened, by_transformers, TRICKY)
        assert by_transformers.pad_token_id == ours.pad_token_id
        assert by_transformers.model_max_length == 77
        np.testing.assert_array_equal(padded(by_transformers, TRICKY), padded(theirs, TRICKY))


def _without(folder: Path, name: str, copy: Path) -> Path:
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns(name, copy.name))
    return copy


def test_saved_files_have_the_vocabulary_and_merges_they_came_from(ours, folder, tmp_path):
    ours.save(tmp_path)
    for name in ("vocab.json", "merges.txt"):
        saved, original = ((f / name).read_text("utf-8") for f in (tmp_path, folder))
        if name == "vocab.json":
            assert json.loads(saved) == json.loads(original)
        else:
            assert saved.split() == original.split()


@pytest.mark.parametrize("legacy", [True, False])
def test_added_tokens_have_transformers_ids(copy, tmp_path, legacy):
    """Textual inversion adds tokens; old files list them in added_tokens.json."""
    if legacy:
        (copy / "added_tokens.json").write_text(
            json.dumps({"<cat-toy>": 49408, "SKS": 49409, "two words": 49410})
        )
    else:
        tokenizer = transformers.CLIPTokenizer.from_pretrained(copy)
        tokenizer.add_tokens(["<cat-toy>", "SKS", "two words"])
        shutil.rmtree(copy)
        tokenizer.save_pretrained(copy)
    ours = CLIPTokenizer.from_folder(copy)
    theirs = transformers.CLIPTokenizer.from_pretrained(copy)
    texts = ["a <cat-toy> in Paris", "SKS dog", "sks dog", "a<CAT-TOY>b", "xSKSx", "Two \n words"]
    assert 49408 in ours.ids_of(texts[0])
    assert ours.ids_of(texts[-1]) == [49410]
    assert_same_ids(ours, theirs, texts)
    ours.save(tmp_path / "saved")
    assert_same_ids(CLIPTokenizer.from_folder(tmp_path / "saved"), theirs, texts)
    assert_same_ids(ours, transformers.CLIPTokenizer.from_pretrained(tmp_path / "saved"), texts)


def test_additional_special_tokens_have_transformers_ids(copy):
    path = copy / "special_tokens_map.json"
    data = json.loads(path.read_text()) | {"additional_special_tokens": ["<style>"]}
    path.write_text(json.dumps(data))
    ours = CLIPTokenizer.from_folder(copy)
    theirs = transformers.CLIPTokenizer.from_pretrained(copy)
    assert_same_ids(ours, theirs, ["a <style> house", "<STYLE>"])
    assert 49408 in ours.ids_of("<style>")


def test_without_config_files_the_defaults_are_sd1s(copy):
    (copy / "special_tokens_map.json").unlink()
    (copy / "tokenizer_config.json").unlink()
    ours = CLIPTokenizer.from_folder(copy)
    theirs = transformers.CLIPTokenizer.from_pretrained(copy)
    assert ours.model_max_length == 77  # transformers does not know
    assert_same_ids(ours, theirs, TRICKY)


def test_an_added_tokens_decoder_counts_before_the_special_tokens_map(copy):
    """Written by transformers 4.34 and later; its flags decide how special tokens are found."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": True}
    added = {
        str(i): {"content": token, "special": True, **flags}
        for i, token in ((49406, "<|startoftext|>"), (49407, "<|endoftext|>"), (49408, "<s1>"))
    }
    _edit(copy / "tokenizer_config.json", added_tokens_decoder=added)
    _edit(copy / "special_tokens_map.json", pad_token="cat</w>")
    ours = CLIPTokenizer.from_folder(copy)
    theirs = transformers.CLIPTokenizer.from_pretrained(copy)
    assert ours.pad_token_id == theirs.pad_token_id != 2368
    assert_same_ids(ours, theirs, [*TRICKY, "a <s1> b"])
    assert ours.ids_of("<|ENDOFTEXT|>") == [49407]


def test_special_tokens_from_tokenizer_config_alone(copy):
    (copy / "special_tokens_map.json").unlink()
    ours = CLIPTokenizer.from_folder(copy)
    assert_same_ids(ours, transformers.CLIPTokenizer.from_pretrained(copy), TRICKY)


def test_a_model_max_length_that_transformers_does_not_know_is_77(copy):
    _edit(copy / "tokenizer_config.json", model_max_length=int(1e30))
    assert CLIPTokenizer.from_folder(copy).model_max_length == 77


def test_model_max_length_is_read(copy):
    _edit(copy / "tokenizer_config.json", model_max_length=12)
    assert CLIPTokenizer.from_folder(copy).windows("a cat").shape == (1, 12)


def _edit(path: Path, **values):
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize("name", ["vocab.json", "merges.txt"])
def test_a_missing_file_is_named(copy, name):
    (copy / name).unlink()
    with pytest.raises(ValueError, match=f"{name} is missing"):
        CLIPTokenizer.from_folder(copy)


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"there is no folder .*nowhere"):
        CLIPTokenizer.from_folder(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("vocab.json", b'{"a": ', "vocab.json is not valid JSON"),
        ("vocab.json", b"[]", "vocab.json must hold a JSON object"),
        ("vocab.json", b'{"a": 0}', "merges.txt does not fit the vocabulary"),
        ("vocab.json", b'{"a": "x"}', "vocab.json must map each token"),
        ("vocab.json", b'{"a": true}', "vocab.json must map each token"),
        ("vocab.json", b'{"a": 4294967296}', "its id, an integer from 0 to 2\\*\\*31 - 1"),
        ("vocab.json", b'{"a": 2147483648}', "its id, an integer from 0 to 2\\*\\*31 - 1"),
        ("vocab.json", b'{"a": ' * 5000, "vocab.json is nested too deep"),
        ("merges.txt", b"#version: 0.2\na b c\n", "merges.txt is not a list of merges"),
        ("merges.txt", b"\xff\xfe\x00", "merges.txt is not a list of merges"),
        ("merges.txt", b"#version: 0.2\nqqqqqqq zzzzzzz\n", "merges.txt does not fit"),
        ("tokenizer.json", b"{", "tokenizer.json is not valid JSON"),
        ("tokenizer.json", b"{}", "tokenizer.json holds no byte-pair model"),
        (
            "tokenizer.json",
            b'{"model": {"vocab": {}, "merges": ["a b"]}}',
            "tokenizer.json does not",
        ),
        (
            "tokenizer.json",
            b'{"model": {"vocab": {}, "merges": [5]}}',
            "tokenizer.json does not fit",
        ),
        ("special_tokens_map.json", b'{"pad_token": ""}', "pad_token='', which cannot be a token"),
        ("tokenizer_config.json", b"{", "tokenizer_config.json is not valid JSON"),
        (
            "tokenizer_config.json",
            b'{"added_tokens_decoder": [1]}',
            "special tokens in no known form",
        ),
        ("special_tokens_map.json", b'{"bos_token": 5}', "special tokens in no known form"),
        ("special_tokens_map.json", b'{"bos_token": {}}', "special tokens in no known form"),
        ("added_tokens.json", b'{"a": "b", "c": 1}', "special tokens in no known form"),
        ("special_tokens_map.json", b"", "special_tokens_map.json is not valid JSON"),
        ("tokenizer_config.json", b'{"tokenizer_class": "T5Tokenizer"}', "tokenizer_class='T5Tok"),
        ("tokenizer_config.json", b'{"model_max_length": "77"}', "must be an integer .*got '77'"),
        ("tokenizer_config.json", b'{"padding_side": "left"}', "padding_side='left' is not supp"),
    ],
)
def test_a_broken_file_is_named(copy, name, content, message):
    (copy / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        CLIPTokenizer.from_folder(copy)


def write_xl_config(folder: Path):
    """The files beside the vocabulary of SDXL's tokenizer_2, as transformers 4.34 wrote them."""
    flags = {"lstrip": False, "rstrip": False, "single_word": False}
    added = {
        "0": {"content": "!", **flags, "normalized": False, "special": True},
        "49406": {"content": "<|startoftext|>", **flags, "normalized": True, "special": True},
        "49407": {"content": "<|endoftext|>", **flags, "normalized": False, "special": True},
    }
    _edit(folder / "tokenizer_config.json", added_tokens_decoder=added, pad_token="!")
    _edit(folder / "special_tokens_map.json", pad_token="!")


def test_the_second_tokenizer_of_sdxl(copy):
    write_xl_config(copy)
    ours = CLIPTokenizer.from_folder(copy)
    theirs = transformers.CLIPTokenizer.from_pretrained(copy)
    assert ours.pad_token_id == theirs.pad_token_id == 0
    assert_same_ids(ours, theirs, [*TRICKY, "wow! cat", "!!!"])
    assert ours.windows("a cat").tolist() == [[49406, 320, 2368, 49407] + [0] * 73]
    ours.save(copy / "saved")
    assert_same_ids(CLIPTokenizer.from_folder(copy / "saved"), theirs, TRICKY)


@pytest.mark.skipif(sys.platform == "win32", reason="limits the size of files")
def test_a_full_disk_is_one_sentence_and_leaves_no_part(tmp_path):
    folder = write_clip_vocabulary(tmp_path / "vocabulary")
    program = f"""
        import resource
        from diffusax.text.tokenizer import CLIPTokenizer
        tokenizer = CLIPTokenizer.from_folder({str(folder)!r})
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**18, 2**18))
        try:
            tokenizer.save({str(tmp_path / "out")!r})
        except OSError as error:
            print(error)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith(f"{tmp_path / 'out'} could not be written (")
    assert done.stdout.count("\n") == 1
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (3, "prompt must be a string or a list of strings, not int"),
        (None, "not NoneType"),
        (b"cat", "not bytes"),
        (["cat", 3], "number 1 is of type int"),
        ([["cat"]], "number 0 is of type list"),
        ([], "prompt must not be an empty list"),
        ("a\ud800b", "half a surrogate pair at position 1"),
    ],
)
def test_a_wrong_prompt_is_one_sentence(ours, prompt, message):
    with pytest.raises(ValueError, match=message):
        ours.windows(prompt)
