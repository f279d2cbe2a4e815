"""Prompts that change from step to step and that AND joins: stable-diffusion-webui's rules."""

import pytest

from diffusax.text.prompt_schedules import Part, schedule, split_parts, text_at, with_whole_steps

# The examples in the docstring of webui's get_learned_conditioning_prompt_schedules, for ten steps.
DOCUMENTED = {
    "test": [[10, "test"]],
    "a [b:3]": [[3, "a "], [10, "a b"]],
    "a [b: 3]": [[3, "a "], [10, "a b"]],
    "a [[[b]]:2]": [[2, "a "], [10, "a [[b]]"]],
    "[(a:2):3]": [[3, ""], [10, "(a:2)"]],
    "a [b : c : 1] d": [[1, "a b  d"], [10, "a  c  d"]],
    "a[b:[c:d:2]:1]e": [[1, "abe"], [2, "ace"], [10, "ade"]],
    "a [unbalanced": [[10, "a [unbalanced"]],
    "a [b:.5] c": [[5, "a  c"], [10, "a b c"]],
    "((a][:b:c [d:3]": [[3, "((a][:b:c "], [10, "((a][:b:c d"]],
    "[a|(b:1.1)]": [[i, "(b:1.1)" if i % 2 == 0 else "a"] for i in range(1, 11)],
    "[fe|]male": [[i, "male" if i % 2 == 0 else "female"] for i in range(1, 11)],
    "[fe|||]male": [[i, "female" if i % 4 == 1 else "male"] for i in range(1, 11)],
}
# What its grammar (read with lark) makes of others.
FOUND = {
    "a [{b|d{:.5] c": [[10, "a [{b|d{:.5] c"]],
    "[a::4]": [[4, "a"], [10, ""]],
    "[a:b:0]": [[10, "b"]],
    "[a:b:1.0]": [[10, "a"]],
    "[a:b:12]": [[10, "a"]],
    "[a:b:x]": [[10, "[a:b:x]"]],
    "[a:b:c:3]": [[10, "[a:b:c:3]"]],
    r"[a\:x:b\]:3]": [[3, r"a\:x"], [10, r"b\]"]],
    "a | [b:c:3]": [[10, "a | [b:c:3]"]],
    "[b:c:3] \\": [[10, "[b:c:3] \\"]],
    "((a:1.2) [b:c:3 ]": [[3, "((a:1.2) b"], [10, "((a:1.2) c"]],
    "[:b:3]": [[3, ""], [10, "b"]],
}


@pytest.mark.parametrize("prompt", [*DOCUMENTED, *FOUND])
def test_schedules_are_webuis(prompt):
    expected = {**DOCUMENTED, **FOUND}[prompt]
    assert [list(span) for span in schedule(prompt, 10)] == expected


@pytest.mark.parametrize(
    ("prompt", "expected"),
    # The docstring's for a second pass of ten steps after ten, and others by its rule.
    [("a [b:.5] c", [(10, "a b c")]), ("a [b:1.5] c", [(5, "a  c"), (10, "a b c")])]
    + [("a [b:13]", [(3, "a "), (10, "a b")]), ("[a:b:9] AND [c|d]:2", None)],
)
def test_a_second_pass_counts_on(prompt, expected):
    written = with_whole_steps(prompt, 10, before=10)
    if expected is None:
        assert written == "[a:b:0] AND [c|d]:2"
    else:
        assert schedule(written, 10) == expected
        # Parts of a run are steps by then, so that its length says nothing.
        assert schedule(written, 50)[:-1] == expected[:-1]


@pytest.mark.parametrize(
    ("prompt", "parts"),
    [
        ("a cat", [("a cat", 1.0)]),
        (
            "a cat :1.2 AND a dog AND a penguin :2.2",
            [("a cat", 1.2), (" a dog", 1), (" a penguin", 2.2)],
        ),
        ("a\nAND b: -.5", [("a", 1.0), (" b", -0.5)]),
        ("SAND and ANDY", [("SAND and ANDY", 1.0)]),
        ("(a:1.2)", [("(a:1.2)", 1.0)]),
        ("a: 2.", [("a", 2.0)]),
    ],
)
def test_parts_are_webuis(prompt, parts):
    assert split_parts(prompt) == [Part(*part) for part in parts]


def test_a_change_comes_a_row_later_than_its_number():
    # reconstruct_cond_batch compares steps from 0 with ends from 1.
    spans = schedule("[a|b]", 4)
    assert [text_at(spans, row) for row in range(6)] == ["a", "a", "b", "a", "b", "a"]


def test_long_and_deep_prompts_take_little_time():
    deep = "[" * 50_000 + "a:b|" + ":3]" * 50_000
    assert schedule(deep, 10) == [(10, deep)]
    assert len(schedule("[a:b:0.5]" * 5_000, 10)) == 2
