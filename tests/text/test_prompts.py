"""Windows and weights against cases computed by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.clip_vocabulary import write_clip_vocabulary

from diffusax.text.prompts import apply_weights, parse_weights, tokenize_prompts
from diffusax.text.tokenizer import CLIPTokenizer

BOS, EOS = 49406, 49407
A, CAT, DOG, COMMA = 320, 2368, 1929, 267


@pytest.fixture(scope="module", params=["<|endoftext|>", "!"])
def tokenizer(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    return CLIPTokenizer.from_folder(write_clip_vocabulary(folder, pad=request.param))


def padded(tokenizer, ids):
    row = [BOS, *ids, EOS]
    return row + [tokenizer.pad_token_id] * (77 - len(row))


def approximately(parts):
    return [(text, pytest.approx(weight, rel=1e-6)) for text, weight in parts]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", []),
        ("a cat", [("a cat", 1)]),
        ("a (cat) b", [("a ", 1), ("cat", 1.1), (" b", 1)]),
        ("((cat))", [("cat", 1.21)]),
        ("[cat]", [("cat", 0.9090909)]),
        ("[[cat]]", [("cat", 0.8264463)]),
        ("([cat])", [("cat", 1)]),
        ("(cat:1.3)", [("cat", 1.3)]),
        ("(cat: 1.3 )", [("cat", 1.3)]),
        ("(cat:.5)", [("cat", 0.5)]),
        ("(cat:-1)", [("cat", -1)]),
        ("(cat:0)", [("cat", 0)]),
        ("(a (cat:2) b:1.5)", [("a ", 1.5), ("cat", 3), (" b", 1.5)]),
        ("(a (cat) b:1.5)", [("a ", 1.5), ("cat", 1.65), (" b", 1.5)]),
        ("[a (cat:2.2)]", [("a ", 0.9090909), ("cat", 2)]),
        (r"a \(cat\)", [("a (cat)", 1)]),
        (r"(\(cat\):2)", [("(cat)", 2)]),
        (r"\[a\] \\ b", [("[a] \\ b", 1)]),
        ("a \\ b", [("a \\ b", 1)]),
        ("ratio 16:9", [("ratio 16:9", 1)]),
        ("(ratio 16:9 wide)", [("ratio 16:9 wide", 1.1)]),
        ("a (cat", [("a ", 1), ("cat", 1.1)]),
        ("a ((cat", [("a ", 1), ("cat", 1.21)]),
        ("a [cat", [("a ", 1), ("cat", 0.9090909)]),
        ("a cat) b]", [("a cat) b]", 1)]),
        ("a cat:1.3) b", [("a cat:1.3) b", 1)]),
        ("(cat:x)", [("cat:x", 1.1)]),
        ("(a)(b)", [("ab", 1.1)]),
        ("(a:1.2)(b:1.3)", [("a", 1.2), ("b", 1.3)]),
        ("()", []),
        ("line\n(two:1.2)", [("line\n", 1), ("two", 1.2)]),
    ],
)
def test_weights_are_parsed_as_in_webui(text, parts):
    assert parse_weights(text) == approximately(parts)


def test_one_window_is_the_tokenizers(tokenizer):
    tokens = tokenize_prompts(tokenizer, ["a cat", ""])
    assert tokens.input_ids.shape == (2, 1, 77)
    assert tokens.input_ids.dtype == np.int32
    assert tokens.weights is None
    np.testing.assert_array_equal(tokens.input_ids[:, 0], tokenizer.windows(["a cat", ""]))


def test_parentheses_are_text_without_weighting(tokenizer):
    text = "a (cat:1.3) [dog] \\("
    for long_prompt in (False, True):
        tokens = tokenize_prompts(tokenizer, text, long_prompt=long_prompt)
        assert tokens.input_ids[0, 0].tolist() == padded(tokenizer, tokenizer.ids_of(text))


def test_weights_stand_at_their_tokens(tokenizer):
    tokens = tokenize_prompts(tokenizer, "a (cat:1.3), [dog]", weighting=True)
    assert tokens.input_ids[0, 0].tolist() == padded(tokenizer, [A, CAT, COMMA, DOG])
    assert tokens.weights.dtype == np.float32
    expected = np.ones((1, 1, 77))
    expected[0, 0, 2] = 1.3
    expected[0, 0, 4] = 1 / 1.1
    np.testing.assert_allclose(tokens.weights, expected, rtol=1e-6)


def test_a_prompt_without_brackets_has_the_same_ids_with_weighting(tokenizer):
    text = "a cat, on the mat's edge: 4k"
    plain, weighted = (tokenize_prompts(tokenizer, text, weighting=w) for w in (False, True))
    np.testing.assert_array_equal(plain.input_ids, weighted.input_ids)
    np.testing.assert_array_equal(weighted.weights, 1)


def test_long_prompts_fill_windows_of_75(tokenizer):
    ids = [CAT] * 75 + [DOG] * 75 + [A]
    text = "cat " * 75 + "dog " * 75 + "a"
    tokens = tokenize_prompts(tokenizer, [text, "a cat", ""], long_prompt=True)
    assert tokens.windows == 3
    assert tokens.input_ids.dtype == np.int32
    first = [padded(tokenizer, ids[s : s + 75]) for s in (0, 75, 150)]
    second = [padded(tokenizer, part) for part in ([A, CAT], [], [])]
    third = [padded(tokenizer, [])] * 3
    assert tokens.input_ids.tolist() == [first, second, third]


@pytest.mark.parametrize(
    ("count", "windows"), [(0, 1), (1, 1), (75, 1), (76, 2), (150, 2), (151, 3)]
)
def test_a_long_prompt_has_a_window_for_every_75_tokens(tokenizer, count, windows):
    tokens = tokenize_prompts(tokenizer, "cat " * count, long_prompt=True)
    assert tokens.windows == windows
    assert (tokens.input_ids == CAT).sum() == count


def test_weights_of_long_prompts_go_on_in_the_next_window(tokenizer):
    text = "cat " * 74 + "(dog dog:1.5) a"
    tokens = tokenize_prompts(tokenizer, text, long_prompt=True, weighting=True)
    assert tokens.input_ids[0, 1].tolist() == padded(tokenizer, [DOG, A])
    expected = np.ones((1, 2, 77))
    expected[0, 0, 75] = expected[0, 1, 1] = 1.5
    np.testing.assert_allclose(tokens.weights, expected)


def test_positive_and_negative_prompts_share_the_number_of_windows(tokenizer):
    positive = tokenize_prompts(tokenizer, "cat " * 100, long_prompt=True, weighting=True)
    negative = tokenize_prompts(
        tokenizer, "(dog:2)", long_prompt=True, weighting=True, windows=positive.windows
    )
    assert negative.input_ids.shape == negative.weights.shape == (1, 2, 77)
    assert negative.input_ids[0, 1].tolist() == padded(tokenizer, [])
    np.testing.assert_array_equal(negative.weights[0, 1], 1)


def test_too_few_windows_are_refused(tokenizer):
    with pytest.raises(ValueError, match="windows=1 is too few: a prompt needs 2 windows of 75"):
        tokenize_prompts(tokenizer, "cat " * 76, long_prompt=True, windows=1)
    with pytest.raises(ValueError, match="windows=0 is too few"):
        tokenize_prompts(tokenizer, "cat", windows=0)


def test_a_wrong_prompt_is_refused(tokenizer):
    with pytest.raises(ValueError, match="number 1 is of type int"):
        tokenize_prompts(tokenizer, ["cat", 1])


@pytest.mark.parametrize("weighting", [False, True])
def test_without_long_prompt_the_rest_is_cut_off_and_logged(tokenizer, weighting, caplog):
    text = "cat " * 74 + "dog Red, House"
    tokens = tokenize_prompts(tokenizer, text, weighting=weighting)
    assert "than 75 tokens; this part was cut off: 'Red, House' (long_prompt=True" in caplog.text
    assert tokens.input_ids[0, 0].tolist() == padded(tokenizer, [CAT] * 74 + [DOG])


def test_the_part_cut_off_may_span_several_weights(tokenizer, caplog):
    text = "cat " * 74 + "(dog Red:1.2) House [On] hill"
    tokens = tokenize_prompts(tokenizer, text, weighting=True)
    assert "cut off: 'Red House On hill'" in caplog.text
    assert tokens.weights[0, 0, 75] == np.float32(1.2)
    assert tokens.weights[0, 0, 76] == 1


def test_a_long_part_cut_off_is_not_logged_whole(tokenizer, caplog):
    tokenize_prompts(tokenizer, "cat " * 100_000)
    assert "cut off: 'cat cat" in caplog.text
    assert len(caplog.text) < 500


def test_no_warning_where_nothing_is_cut_off(tokenizer, recwarn, caplog):
    tokenize_prompts(tokenizer, "cat " * 74 + "(dog:1.2) ", weighting=True)
    tokenize_prompts(tokenizer, "cat " * 200, long_prompt=True)
    assert not recwarn
    assert not caplog.text


def ids_of(tokens):
    """The ids in each window of the first prompt, without bos, eos and pads."""
    rows = [row.tolist() for row in tokens.input_ids[0]]
    return [row[1 : row.index(EOS)] for row in rows]


@pytest.mark.parametrize("weighting", [False, True])
def test_break_starts_a_new_window(tokenizer, weighting):
    def windows(text):
        return ids_of(tokenize_prompts(tokenizer, text, long_prompt=True, weighting=weighting))

    assert windows("a cat BREAK dog") == [[A, CAT], [DOG]]
    assert windows("a cat BREAK") == [[A, CAT]]
    assert windows("BREAK a cat") == [[], [A, CAT]]
    assert windows("cat BREAK BREAK dog") == [[CAT], [], [DOG]]
    assert windows("BREAK") == [[]]
    assert len(windows("cat break dog BREAKING")) == 1
    assert windows("cat " * 75 + "BREAK dog") == [[CAT] * 75, [DOG]]


def test_break_in_brackets_keeps_the_weight(tokenizer):
    text = "(cat BREAK dog:1.5) a"
    tokens = tokenize_prompts(tokenizer, text, long_prompt=True, weighting=True)
    assert ids_of(tokens) == [[CAT], [DOG, A]]
    np.testing.assert_allclose(tokens.weights[0, :, 1], 1.5)
    assert tokens.weights[0, 1, 2] == 1


def test_break_is_text_in_one_window(tokenizer):
    text = "cat BREAK dog"
    ids = tokenize_prompts(tokenizer, text, weighting=True).input_ids[0, 0].tolist()
    assert ids == padded(tokenizer, tokenizer.ids_of(text))


@pytest.mark.parametrize(
    ("before", "first"),
    [(54, 75), (55, 56), (60, 61), (73, 74), (74, 75)],
    ids=["too early", "20 back", "in between", "one back", "at the end"],
)
def test_a_window_ends_after_a_late_comma(tokenizer, before, first):
    text = "cat " * before + "," + " dog" * 40
    windows = ids_of(tokenize_prompts(tokenizer, text, long_prompt=True))
    assert list(map(len, windows)) == [first, before + 41 - first]


def test_a_comma_that_no_longer_fits_begins_the_next_window(tokenizer):
    text = "cat " * 60 + "," + " cat" * 14 + ", dog"
    windows = ids_of(tokenize_prompts(tokenizer, text, long_prompt=True))
    assert list(map(len, windows)) == [75, 2]
    assert windows[1] == [COMMA, DOG]


def test_prompts_beyond_all_measure_are_refused(tokenizer):
    tokenize_prompts(tokenizer, "cat " * 75 * 64, long_prompt=True)
    with pytest.raises(ValueError, match="prompt needs 65 windows of 75 tokens, more than 64"):
        tokenize_prompts(tokenizer, "cat " * (75 * 64 + 1), long_prompt=True)
    for options in {"long_prompt": True}, {"weighting": True}:
        with pytest.raises(ValueError, match="prompt has 100001 characters; with long_prompt or"):
            tokenize_prompts(tokenizer, "a" * 100_001, **options)


@pytest.mark.parametrize("text", ["(cat:1001)", "(cat:-1001)", "(cat:" + "9" * 400 + ")"])
def test_a_weight_beyond_all_measure_is_refused(tokenizer, text):
    with pytest.raises(ValueError, match=r"prompt gives 'cat' a weight of .*; use weights from"):
        tokenize_prompts(tokenizer, text, weighting=True)
    with pytest.raises(ValueError, match="prompt gives 'cat' a weight of inf"):
        tokenize_prompts(tokenizer, "(" * 10_000 + "cat", weighting=True)


def test_apply_weights_by_hand():
    # Mean 2.5 before; after doubling the second token [1, 2], [6, 8]: 4.25. So times 2.5 / 4.25.
    embeddings = np.array([[[1, 2], [3, 4]]], np.float32)
    weighted = apply_weights(embeddings, np.array([[1, 2]], np.float32))
    np.testing.assert_allclose(weighted, np.array([[[1, 2], [6, 8]]]) * 2.5 / 4.25, rtol=1e-6)


def test_apply_weights_keeps_the_mean_of_each_row_apart():
    rng = np.random.default_rng(0)
    embeddings = rng.normal(1, 1, (3, 77, 8)).astype(np.float32)
    weights = rng.uniform(0.5, 2, (3, 77)).astype(np.float32)
    weighted = apply_weights(embeddings, weights)
    np.testing.assert_allclose(weighted.mean((1, 2)), embeddings.mean((1, 2)), rtol=1e-5)
    for i in range(3):
        alone = apply_weights(embeddings[i : i + 1], weights[i : i + 1])
        np.testing.assert_allclose(alone[0], weighted[i], rtol=1e-6)
    ratio = weighted / embeddings / weights[..., None]
    np.testing.assert_allclose(ratio, np.broadcast_to(ratio[:, :1, :1], ratio.shape), rtol=1e-5)


def test_weights_of_one_change_nothing():
    embeddings = np.random.default_rng(0).normal(size=(2, 77, 8)).astype(np.float32)
    np.testing.assert_array_equal(
        apply_weights(embeddings, np.ones((2, 77), np.float32)), embeddings
    )


def test_apply_weights_in_jax_keeps_the_dtype_and_computes_in_that_of_the_weights():
    rng = np.random.default_rng(0)
    embeddings = jnp.asarray(rng.normal(1, 1, (2, 77, 8)), jnp.bfloat16)
    weights = jnp.asarray(rng.uniform(0.5, 2, (2, 77)), jnp.float32)
    weighted = jax.jit(apply_weights)(embeddings, weights)
    assert weighted.dtype == jnp.bfloat16
    exact = apply_weights(np.asarray(embeddings, np.float32), np.asarray(weights))
    # Half a unit in the last place of bfloat16: only the result was rounded.
    np.testing.assert_allclose(np.asarray(weighted, np.float32), exact, rtol=2**-8)
