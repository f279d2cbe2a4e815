"""Which programs are given tensors of PyTorch, and which arrays of JAX."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from support.pairs import picture

from diffusax.boundary.tensors import (
    HostArray,
    alike,
    as_tensor,
    for_reader,
    function_wants_tensors,
)
from diffusax.images.vae_image_processor import VaeImageProcessor
from diffusax.runtime.random.noise import noise_source
from diffusax.samplers import DDIMScheduler

CALL = "found = processor.preprocess(image), scheduler.timesteps, scheduler.alphas_cumprod"
INSIDE = f"""
def program():
    {{}}
    global found
    {CALL}
program()
"""
HELPER = """
def helper():
    global found
    found = processor.preprocess(image), scheduler.timesteps, scheduler.alphas_cumprod
def program():
    import torch
    helper()
program()
"""


def run(program):
    """What a program gets that stands in a module of its own."""
    scheduler = DDIMScheduler()
    scheduler.set_timesteps(3)
    names = {"processor": VaeImageProcessor(), "image": picture(1), "scheduler": scheduler}
    exec(compile(program, "program", "exec"), names)
    return names["found"]


@pytest.mark.parametrize(
    "program",
    [
        f"import torch\n{CALL}",
        f"import torch.nn.functional as F\n{CALL}",
        f"from torch import inference_mode, randn_like\n{CALL}",
        INSIDE.format("import torch"),
        INSIDE.format("from torch import nn"),
        HELPER,
        f"import torch\nlist(map(lambda _: exec({CALL!r}, globals()), [0]))",
    ],
)
def test_programs_that_import_torch_are_given_tensors(program):
    pixels, timesteps, alphas = run(program)
    assert (type(pixels), pixels.dtype) == (torch.Tensor, torch.float32)
    assert (type(timesteps), timesteps.dtype) == (torch.Tensor, torch.int64)
    assert (type(alphas), alphas.dtype) == (torch.Tensor, torch.float32)


@pytest.mark.parametrize(
    "program",
    [
        CALL,
        f"import numpy, sys\n{CALL}",
        f"import torch, jax\n{CALL}",
        f"import torch\nimport jax.numpy as jnp\n{CALL}",
        f"import torch\nfrom jax import jit\n{CALL}",
        f"import torch\nfrom flax import nnx\n{CALL}",
        "import torch\n" + INSIDE.format("import jax"),
        # A tensor that it was given is no import.
        f"tensor = __import__('torch').ones(3)\n{CALL}",
    ],
)
def test_other_programs_are_given_arrays(program):
    pixels, timesteps, alphas = run(program)
    assert isinstance(pixels, jax.Array)
    assert isinstance(timesteps, np.ndarray)
    assert (type(alphas), alphas.dtype) == (HostArray, np.float32)


def test_a_setting_decides_whatever_is_imported():
    image = picture(1)
    assert isinstance(VaeImageProcessor(tensors="pt").preprocess(image), torch.Tensor)
    program = f"import torch\nprocessor = type(processor)(tensors='jax')\n{CALL}"
    assert isinstance(run(program)[0], jax.Array)


def test_images_that_are_arrays_of_a_kind_decide_for_themselves():
    pixels = np.full((1, 3, 8, 8), 0.5, np.float32)
    for given, kind in ((torch.from_numpy(pixels), torch.Tensor), (jnp.asarray(pixels), jax.Array)):
        for library in ("torch", "jax"):
            code = f"import {library}\nimage = given\n{CALL}"
            names = {"processor": VaeImageProcessor(), "scheduler": DDIMScheduler()}
            names["given"] = given if kind is torch.Tensor else given.transpose(0, 2, 3, 1)
            exec(code, names)
            assert isinstance(names["found"][0], kind)


def test_dtypes_and_devices_are_those_of_the_readers_library():
    class Owner:
        place = property(lambda self: for_reader(self.value))

    for library, expected in (
        ("torch", (torch.bfloat16, torch.float32, torch.device("cpu"))),
        ("jax", (jnp.dtype("bfloat16"), np.dtype("float32"), jax.devices()[0])),
    ):
        owner, names = Owner(), {}
        exec(f"import {library}\ndef read(owner): return owner.place", names)
        for value, wanted in zip(("bfloat16", "float32", jax.devices()[0]), expected, strict=True):
            owner.value = jnp.dtype(value) if isinstance(value, str) else value
            assert names["read"](owner) == wanted


CALLBACK = """
import {library}
class Callback:
    def __call__(self): pass
    def method(self): pass
def function(): pass
"""


@pytest.mark.parametrize("library", ["torch", "jax", "numpy", "torch, jax"])
def test_callbacks_are_given_what_their_own_module_works_with(library):
    names = {}
    exec(CALLBACK.format(library=library), names)
    made, function = names["Callback"](), names["function"]
    kinds = [function, functools.partial(function), made, made.method, torch.no_grad()(function)]
    for callback in kinds:
        for otherwise in (True, False):
            expected = otherwise if library == "numpy" else library == "torch"
            assert function_wants_tensors(callback, otherwise) is expected
    assert function_wants_tensors(print, True) is True


def test_a_callback_that_imports_torch_for_itself_counts():
    names = {}
    exec("def callback():\n    import torch\n", names)
    assert function_wants_tensors(names["callback"], False)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32", "bool"])
def test_tensors_are_copies_that_may_be_changed(dtype):
    for array in (jnp.ones((2, 3), dtype), np.asarray(jnp.ones((2, 3), dtype))):
        tensor = as_tensor(array)
        assert tensor.dtype == getattr(torch, dtype)
        tensor[0] = 0
        assert np.asarray(array).all()
        assert tensor.sum() == 3
    (other,) = alike((jnp.ones(2, dtype),), torch.zeros(1))
    assert other.dtype == getattr(torch, dtype)


def test_generators_of_torch_go_on_from_run_to_run():
    ours, theirs = (torch.Generator().manual_seed(3) for _ in range(2))
    for _ in range(2):
        noise = noise_source("torch", 3, 2, (ours,)).draw("start", (4, 5, 3))
        expected = torch.randn(2, 3, 4, 5, generator=theirs).permute(0, 2, 3, 1)
        np.testing.assert_array_equal(noise, expected)
    one_each = noise_source("torch", [3, 4], 2, (ours, 4)).draw("start", (4, 5, 3))
    np.testing.assert_array_equal(
        one_each[0], torch.randn(3, 4, 5, generator=theirs).permute(1, 2, 0)
    )
    second = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(4)).permute(1, 2, 0)
    np.testing.assert_array_equal(one_each[1], second)
