"""What of A1111's syntax is not read, in sentences."""

import pytest

from diffusax.text.extra_networks import log_prompt_warnings, prompt_warnings


@pytest.mark.parametrize(
    ("prompt", "negative", "begins"),
    [
        ("a (cat:1.2) [a|b] {c} snake_case __init <lora:x:1> a__b__c", "", []),
        ("a <hypernet:x:1>", "", ["the prompt names <hypernet:x:1>, which is left out"]),
        ("<lora:x:1:lbw=A>", "", ["the prompt names lbw of <lora:x:1:lbw=A>"]),
        ("a {red|2$$blue} cat", "", ["the prompt has '{red|2$$blue}', which is read as words"]),
        (
            "a __colours/*__ cat",
            "__b__",
            ["the prompt has '__col", "the negative prompt has '__b__'"],
        ),
        ("a", "<lyco:x:1>", ["the negative prompt names '<lyco:x:1>', which is read as words"]),
    ],
)
def test_what_is_not_read_is_named(prompt, negative, begins):
    found = prompt_warnings(prompt, negative)
    assert len(found) == len(begins)
    assert all(text.startswith(begin) for text, begin in zip(found, begins))


def test_a_warning_is_logged_once(caplog):
    for _ in range(2):
        log_prompt_warnings("a __wildcard_that_no_other_test_has__")
    assert len(caplog.records) == 1
