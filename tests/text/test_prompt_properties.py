"""Properties of prompt weighting and windows, beside a slow model of stable-diffusion-webui's."""

import contextlib
import itertools
import re
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.clip_vocabulary import write_clip_vocabulary
from support.effort import examples

from diffusax.text.prompts import parse_weights, tokenize_prompts
from diffusax.text.tokenizer import CLIPTokenizer

QUICK = settings(deadline=None, max_examples=examples(60, 300))
# Mostly what the syntax is made of.
PROMPTS = st.lists(
    st.sampled_from(
        ["(", ")", "[", "]", "\\", ":", "1.3", ":1.3)", ": .5 )", ":-2)", ":1.2.3)", " ", "\n", ","]
    )
    | st.sampled_from(["cat", "a dog", "BREAK", "16:9", "cat " * 30, "cat," * 12, "été", "猫"])
    | st.text(max_size=5),
    max_size=30,
).map("".join)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return CLIPTokenizer.from_folder(write_clip_vocabulary(tmp_path_factory.mktemp("tokenizer")))


def webui_weights(text):
    """Each character with its weight, as prompt_parser.py's parse_prompt_attention gives them.

    One rule differs: a backslash that escapes nothing is text here; there it is dropped.
    """
    characters, opened = [], {"(": [], "[": []}

    def multiply(start, factor):
        for entry in characters[start:]:
            entry[1] *= factor

    while text:
        weight = re.match(r":\s*([+-]?(?:\d+\.?\d*|\.\d+))\s*\)", text)
        size = 1
        if text[0] == "\\" and text[1:2] and text[1] in "()[]\\":
            characters.append([text[1], 1.0])
            size = 2
        elif text[0] in opened:
            opened[text[0]].append(len(characters))
        elif weight and opened["("]:
            multiply(opened["("].pop(), float(weight[1]))
            size = weight.end()
        elif weight:
            characters += [[c, 1.0] for c in weight[0]]
            size = weight.end()
        elif text[0] == ")" and opened["("]:
            multiply(opened["("].pop(), 1.1)
        elif text[0] == "]" and opened["["]:
            multiply(opened["["].pop(), 1 / 1.1)
        else:
            characters.append([text[0], 1.0])
        text = text[size:]
    for start in opened["("]:
        multiply(start, 1.1)
    for start in opened["["]:
        multiply(start, 1 / 1.1)
    return characters


def webui_windows(ids, comma, size=75, backtrack=20):
    """The chunks that sd_hijack_clip.py's tokenize_line makes of tokens; None stands for BREAK."""
    chunks, chunk, last_comma = [], [], -1
    for token in ids:
        if token is None:
            chunks.append(chunk)
            chunk, last_comma = [], -1
            continue
        if token == comma:
            last_comma = len(chunk)
        elif len(chunk) == size and last_comma != -1 and len(chunk) - last_comma <= backtrack:
            chunks.append(chunk[: last_comma + 1])
            chunk, last_comma = chunk[last_comma + 1 :], -1
        if len(chunk) == size:
            chunks.append(chunk)
            chunk, last_comma = [], -1
        chunk.append(token)
    return [*chunks, chunk] if chunk or not chunks else chunks


@QUICK
@given(PROMPTS)
def test_weights_are_webuis(text):
    ours = [(c, weight) for part, weight in parse_weights(text) for c in part]
    theirs = webui_weights(text)
    assert [c for c, _ in ours] == [c for c, _ in theirs]
    np.testing.assert_allclose([w for _, w in ours], [w for _, w in theirs], rtol=1e-9)


@QUICK
@given(PROMPTS)
def test_neighbours_have_different_weights(text):
    weights = [weight for _, weight in parse_weights(text)]
    assert all(a != b for a, b in itertools.pairwise(weights))


@QUICK
@given(st.text())
def test_escaped_text_comes_back_as_it_was(text):
    escaped = re.sub(r"([()\[\]\\])", r"\\\1", text)
    assert parse_weights(escaped) == ([(text, 1.0)] if text else [])


@QUICK
@given(st.lists(st.sampled_from(["cat", "dog", ",", "BREAK"]) | st.just("a " * 20), max_size=40))
def test_windows_are_webuis(tokenizer, words):
    text = " ".join(words)
    comma = tokenizer.ids_of(",")[0]
    ids = [
        None if word == "BREAK" else token
        for word in words
        for token in ([0] if word == "BREAK" else tokenizer.ids_of(word))
    ]
    expected = webui_windows(ids, comma)
    tokens = tokenize_prompts(tokenizer, text, long_prompt=True)
    actual = [tokenizer.window(window).tolist() for window in expected]
    assert tokens.input_ids[0].tolist() == actual


@settings(QUICK, max_examples=examples(30, 100))
@given(PROMPTS, st.booleans(), st.booleans())
def test_every_prompt_has_windows_of_finite_weights(tokenizer, text, long_prompt, weighting):
    tokens = tokenize_prompts(tokenizer, text, long_prompt=long_prompt, weighting=weighting)
    assert tokens.input_ids.shape == (1, tokens.windows, 77)
    assert tokens.windows == 1 or long_prompt
    assert (tokens.input_ids >= 0).all()
    assert (tokens.input_ids <= tokenizer.max_id).all()
    assert (tokens.input_ids[:, :, 0] == tokenizer.bos_token_id).all()
    assert tokens.weights is None or np.isfinite(tokens.weights).all()


@pytest.mark.parametrize(
    "piece",
    [
        "(a",
        "(a)",
        "[a",
        "([a",
        "([a)b]",
        "\\(",
        ":",
        ":1",
        ": ",
        "(:1)",
        "a",
        " ",
        ")",
        "(" * 50 + ")",
    ],
)
@pytest.mark.parametrize("end", ["", ")" * 10_000 + ":1.1)" * 2000])
def test_parsing_takes_time_in_proportion_to_the_text(piece, end):
    """What is quadratic takes half a minute here, or more."""
    text = piece * (50_000 // len(piece)) + end
    start = time.process_time()
    parse_weights(text)
    assert time.process_time() - start < 5


@pytest.mark.parametrize("piece", ["1", " ", "\\(", "(a:1.2) ", "BREAK ", "猫", "cat,"])
@pytest.mark.parametrize("start", ["", "(a:"])
def test_windows_take_seconds_at_most(tokenizer, piece, start):
    text = (start + piece * 100_000)[:100_000]
    began = time.process_time()
    with contextlib.suppress(ValueError):
        tokenize_prompts(tokenizer, text, long_prompt=True, weighting=True)
    assert time.process_time() - began < 10
