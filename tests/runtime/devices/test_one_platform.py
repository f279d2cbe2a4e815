"""Programs are traced for the platform that they run on, and for all where it is not known."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import diffusax
from diffusax.pipelines.pipeline import ahead
from diffusax.runtime.devices.lowering import by_platform, lowering_for, plain_lowerings
from diffusax.runtime.programs.compilations import count_compilations
from diffusax.runtime.programs.program import Program, lower

FORMS = {
    "cpu": lambda x: x + 1.0,
    "cuda": jnp.sin,
    "rocm": jnp.tanh,
    "tpu": jnp.exp,
}
MARKS = {"cpu": "add", "cuda": "sine", "rocm": "tanh", "tpu": "exponential"}
SHAPE = jax.ShapeDtypeStruct((3,), "float32")


def choose(x):
    return by_platform(lambda platform: platform, FORMS, x)


@jax.jit
def cached(x):
    """What JAX traces once for a shape, as it does with the layers of a network."""
    return choose(x)


def named(text):
    """The platforms whose forms are in a module."""
    return {platform for platform, mark in MARKS.items() if f"stablehlo.{mark}" in text}


@pytest.mark.parametrize("inner", [choose, cached])
def test_a_program_has_the_form_of_one_platform(inner):
    program = Program(lambda x: inner(x))
    request = program.request(SHAPE)
    assert named(lower(request).as_text()) == {"cpu"}
    for platform in FORMS:
        assert named(lower(request, lowering_platforms=(platform,)).as_text()) == {platform}


def test_a_programs_trace_for_one_platform_serves_no_other():
    program = Program(lambda x: cached(x) * 1)
    x = np.ones(3, np.float32)
    np.testing.assert_array_equal(program(x), x + 1)
    assert named(lower(program.request(SHAPE), lowering_platforms=("tpu",)).as_text()) == {"tpu"}
    with count_compilations() as compiled:
        np.testing.assert_array_equal(program(x), x + 1)
    assert not compiled


@pytest.mark.parametrize("platform", FORMS)
def test_a_users_function_is_lowered_for_the_platform_that_it_is_lowered_for(platform):
    program = Program(lambda x: cached(x) / 2)
    np.testing.assert_array_equal(program(np.ones(3, np.float32)), np.ones(3))

    @jax.jit
    def function(x):
        return program(x) - cached(x)

    text = function.trace(SHAPE).lower(lowering_platforms=(platform,)).as_text()
    assert named(text) == {platform}
    np.testing.assert_array_equal(function(np.ones(3, np.float32)), -np.ones(3))


def test_an_export_for_several_platforms_has_the_forms_of_all_of_them():
    exported = jax.export.export(jax.jit(choose), platforms=("cpu", "cuda", "tpu"))(SHAPE)
    assert named(exported.mlir_module()) == {"cpu", "cuda", "tpu"}
    program = Program(lambda x: cached(x))
    several = lower(program.request(SHAPE), lowering_platforms=("cpu", "tpu")).as_text()
    assert named(several) == {"cpu", "tpu"}


def test_the_default_device_decides():
    program = Program(lambda x: cached(x))
    with jax.default_device("cpu"):
        assert named(lower(program.request(SHAPE)).as_text()) == {"cpu"}
    with jax.default_device(jax.local_devices()[0]):
        assert named(lower(program.request(SHAPE)).as_text()) == {"cpu"}


def test_plain_lowerings_leave_nothing_behind():
    function = jax.jit(lambda x: cached(x))
    with plain_lowerings():
        function.trace(SHAPE)
    with lowering_for(["tpu"]):
        function.trace(SHAPE)
    assert named(function.lower(SHAPE).as_text()) == {"cpu"}


def test_no_program_of_a_pipeline_names_another_platform():
    pipe = diffusax.DiffusionPipeline.from_pretrained("emoji")
    call = ahead.example_call(pipe, 1, None, {})
    for request in ahead.requests(pipe.parts, pipe.task, call):
        text = lower(request).as_text()
        assert not re.search(r"\b(tpu|cuda|rocm|cudnn)|platform", text)
        # A choice among platforms would be one; noise is drawn in some steps only.
        assert text.count("stablehlo.case") == (request.program.name == "denoise")
