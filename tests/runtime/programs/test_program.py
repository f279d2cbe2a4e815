import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.compiled_programs import forget_executables
from support.effort import first

from diffusax.runtime.programs import room
from diffusax.runtime.programs.compilations import count_compilations
from diffusax.runtime.programs.program import PROGRAMS, Program
from diffusax.runtime.programs.room import make_room, memory_maps

pytestmark = pytest.mark.skipif(not memory_maps(), reason="the system does not list memory maps")
ROOM = 80


@pytest.fixture
def little_room(monkeypatch):
    """Programs may take a few memory maps more than there are; how many in all."""
    forget_executables()
    limit = memory_maps() + ROOM
    monkeypatch.setattr(room, "_map_limit", lambda: limit)
    monkeypatch.setattr(room, "ENOUGH", 1 - ROOM / 4 / limit)
    return limit


def double(x, params):
    return {"y": jnp.tanh(x) * 2 + params["bias"]}


def x_of(n):
    return np.full((n, 3), 1 / n, np.float32)


PARAMS = {"bias": np.float32(1)}


@pytest.mark.parametrize("shapes", first([70, 300]))
def test_any_number_of_shapes_in_one_process_stays_within_the_bound(little_room, shapes):
    function, most = Program(double), 0
    for n in range(1, shapes + 1):
        y = function(x_of(n), PARAMS)["y"]
        most = max(most, memory_maps())
    np.testing.assert_allclose(y, np.tanh(1 / shapes) * 2 + 1, rtol=1e-5)
    assert most < little_room + ROOM / 4
    assert 2 < function.compiled_shapes < 69


def test_what_was_used_last_stays_and_what_was_not_used_for_longest_goes(little_room):
    function = Program(double)
    for n in range(1, 41):
        function(x_of(n), PARAMS)
        function(x_of(1), PARAMS)
    with count_compilations() as compiled:
        function(x_of(1), PARAMS)
        function(x_of(40), PARAMS)
    assert not compiled
    first, is_new = function.call(function.request(x_of(2), PARAMS))
    assert is_new
    np.testing.assert_allclose(first["y"], np.tanh(1 / 2) * 2 + 1, rtol=1e-5)


def test_other_parameters_share_a_shapes_program():
    function = Program(double)
    function(x_of(2), PARAMS)
    with count_compilations() as compiled:
        _, is_new = function.call(function.request(x_of(2), {"bias": np.float32(5)}))
    assert not is_new
    assert not compiled
    assert function.compiled_shapes == 1


def test_static_arguments_and_dtypes_have_programs_of_their_own():
    function = Program(lambda n, x: x * n, static=["n"])
    for n, dtype in ((1, np.float32), (2, np.float32), (2, np.int32)):
        assert function(n, np.ones(2, dtype))[0] == n
    assert function.compiled_shapes == 3


def test_nothing_is_kept_of_a_call_inside_a_trace():
    function = Program(double)
    gradient = jax.grad(lambda bias: function(x_of(2), {"bias": bias})["y"].mean())
    assert gradient(1.0) == 1
    assert function.compiled_shapes == 0


def test_programs_of_other_functions_go_where_letting_go_of_shapes_is_not_enough(little_room):
    plain = jax.jit(lambda x: jnp.tanh(x))
    n = 1
    while memory_maps() <= little_room:
        plain(x_of(n))
        n += 1
    make_room()
    assert memory_maps() < little_room
    with count_compilations() as compiled:
        plain(x_of(1))
    assert compiled


def test_where_code_takes_a_devices_memory_its_bytes_are_counted(monkeypatch):
    forget_executables()
    monkeypatch.setattr(room, "counts_bytes", lambda: True)
    monkeypatch.setattr(room, "code_bytes", lambda compiled: 10)
    monkeypatch.setattr(room, "_byte_limit", lambda: 45)
    function = Program(double, donate=["x"])
    with count_compilations() as compiled:
        for n in range(1, 13):
            function(jax.device_put(x_of(n)), PARAMS)
            assert function.compiled_shapes * 10 <= 45 + 10
    assert len(compiled) == 12
    assert not function.call(function.request(jax.device_put(x_of(12)), PARAMS))[1]
    assert function.call(function.request(jax.device_put(x_of(1)), PARAMS))[1]


def test_a_programs_shapes_are_within_the_bound_too(little_room):
    program = Program(double, shape_of="x")
    try:
        for n in range(1, 60):
            program(x_of(n), PARAMS)
        assert memory_maps() < little_room + ROOM / 4
        assert program.compiled_shapes < 59
    finally:
        del PROGRAMS["double"]
