from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffusax.runtime.devices import lowering
from diffusax.runtime.devices.lowering import compiler_options
from diffusax.runtime.programs.program import Program


def mesh_of(platform, capability=""):
    device = SimpleNamespace(platform=platform, compute_capability=capability)
    return SimpleNamespace(devices=np.array([device]))


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_which_platforms_have_options(platform):
    assert bool(compiler_options(mesh_of(platform))) == (platform != "tpu")


def test_an_option_for_cpus_that_this_xla_does_not_know_is_left_out(monkeypatch):
    monkeypatch.setitem(lowering.OPTIONS, "cpu", {"xla_no_such_option": True})
    assert not compiler_options(mesh_of("cpu"))
    function = Program(lambda x: x + 1)
    assert function(1.0) == 2


@pytest.mark.parametrize(("capability", "last"), [("7.5", False), ("8.0", True), ("gfx942", False)])
def test_videos_have_channels_last_from_ampere_on(capability, last):
    assert (
        compiler_options(mesh_of("gpu", capability)).get("xla_gpu_force_conv_nhwc", False) == last
    )


def test_an_option_of_the_user_stays(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_triton_gemm=true")
    assert not compiler_options(mesh_of("gpu"))


def test_calls_are_compiled_with_the_options(monkeypatch):
    function = Program(lambda x: x + 1)
    monkeypatch.setitem(lowering.OPTIONS, jax.default_backend(), {"xla_no_such_option": True})
    monkeypatch.setattr(lowering, "_is_known", lambda name, value: True)
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_option"):
        function(jnp.ones(3))
    # Inside another trace there are none, which only the outermost function can have.
    assert jax.jit(function)(1.0) == 2


def test_programs_with_options_are_called_within_others(monkeypatch):
    """JAX takes options of the compiler for whole programs alone."""
    monkeypatch.setitem(lowering.OPTIONS, "cpu", {"xla_cpu_enable_fast_math": False})
    square = Program(lambda x: x * x)
    assert square(3.0) == 9
    assert jax.jit(lambda x: square(x) + 1)(3.0) == 10
    assert jax.grad(square)(3.0) == 6
