"""Values as their declared types, and the sentences about those that cannot be."""

import dataclasses
from typing import Annotated, Any, ClassVar, Literal

import jax.numpy as jnp
import numpy as np
import pytest
from msgspec import Meta

from diffusax.boundary.convert import Mismatch, alternatives, convert, field_types
from diffusax.boundary.options import Options
from diffusax.models.encoders.configs import CLIPTextConfig
from diffusax.pipelines.plan.arguments import check_call
from diffusax.samplers import DDPMScheduler

Whole = Annotated[int, Meta(ge=1, le=9)]


@dataclasses.dataclass(frozen=True)
class Inner(Options):
    """A group of options."""

    group: ClassVar[str] = "inner."

    rate: Annotated[float, Meta(gt=0, lt=1)] = 0.5


@dataclasses.dataclass(frozen=True)
class Outer(Options):
    """Options with a group."""

    count: Whole | None = None
    kinds: tuple[Literal["a", "b"], ...] = ()
    inner: Inner = dataclasses.field(default_factory=Inner)


@pytest.mark.parametrize(
    ("value", "hint", "expected"),
    [
        (np.int64(3), Whole, 3),
        (np.float32(2), float, 2.0),
        (1, float, 1.0),
        (np.array([1, 2]), tuple[int, ...], (1, 2)),
        (jnp.arange(2), list[int], [0, 1]),
        ([1, 2], tuple[Whole, Whole], (1, 2)),
    ],
)
def test_values_become_what_their_type_says(value, hint, expected):
    found = convert(value, hint)
    assert (type(found), found) == (type(expected), expected)


def test_any_takes_the_value_itself():
    array = np.zeros(3)
    assert convert(array, Any) is array


def test_texts_are_numbers_only_where_that_is_asked_for():
    assert convert("3", Whole, strict=False) == 3
    with pytest.raises(Mismatch, match="Expected `int`, got `str`") as caught:
        convert("3", Whole)
    assert (caught.value.value, caught.value.hint) == ("3", Whole)


def test_a_mistake_inside_a_value_has_its_place_beside_the_reason():
    with pytest.raises(Mismatch, match=r" - at `\$\[1\]`$") as caught:
        convert([1, 0], list[Whole])
    assert caught.value.reason == "Expected `int` >= 1"


def test_the_types_of_fields_keep_their_ranges():
    assert field_types(Outer)["count"] == Whole | None
    with pytest.raises(TypeError):
        field_types(Outer)["count"] = int


def test_alternatives_read_as_a_sentence():
    assert alternatives(("a",)) == "'a'"
    assert alternatives(("a", 2, None)) == "'a', 2 or None"
    assert alternatives(("a", 2, None), " or ") == "'a' or 2 or None"


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (
            lambda: Outer(count=10),
            "count must be a whole number from 1 up to 9 or nothing (got 10)",
        ),
        (
            lambda: Outer(kinds=("c",)),
            "kinds must be a list, and each of it one of a, b (got ('c',))",
        ),
        (
            lambda: Outer(inner=3),
            "inner must be a group of options, such as inner.rate (got 3)",
        ),
        (
            lambda: Inner(rate=1),
            "inner.rate must be a number above 0 below 1 (got 1)",
        ),
        (
            lambda: CLIPTextConfig(hidden_act="silu"),
            "hidden_act='silu' is not supported by diffusax's CLIPTextModel "
            "(only 'quick_gelu' or 'gelu')",
        ),
        (
            lambda: CLIPTextConfig(hidden_act=3),
            "hidden_act=3 is not supported by diffusax's CLIPTextModel (Expected `str`, got `int`)",
        ),
        (
            lambda: CLIPTextConfig(hidden_size=np.int64(0)),
            "hidden_size=0 is not supported by diffusax's CLIPTextModel (Expected `int` >= 1)",
        ),
        (
            lambda: DDPMScheduler(variance_type=3),
            "variance_type=3 is not supported by diffusax's DDPMScheduler; use None, "
            "'fixed_small', 'fixed_small_log' or 'fixed_large'",
        ),
        (
            lambda: DDPMScheduler(trained_betas=[0.1, 2]),
            "trained_betas=[0.1, 2] is not supported by diffusax's DDPMScheduler; "
            "expected float < 1.0",
        ),
        (
            lambda: check_call({"guidance_scale": 20_000}),
            "guidance_scale must be at most 10000 (got 20000)",
        ),
        (
            lambda: check_call({"output_type": "x" * 90}),
            f"output_type must be one of 'pil', 'np', 'jax', 'pt', 'latent' (got '{'x' * 76}...)",
        ),
        (
            lambda: check_call({"original_size": (1, 2, 3)}),
            "original_size must be a pair of integers (got [1, 2, 3])",
        ),
        (
            lambda: check_call({"controlnet_conditioning_scale": "1"}),
            "controlnet_conditioning_scale must be a number or a list of them (got '1')",
        ),
    ],
)
def test_each_caller_tells_mistakes_in_its_own_words(make, sentence):
    with pytest.raises(ValueError) as caught:
        make()
    assert str(caught.value) == sentence
