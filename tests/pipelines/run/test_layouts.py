"""The kernels of convolutions in the order in which a device's library reads them."""

import jax
import numpy as np
import pytest
from support.adapted import random_adapter
from support.compiled_programs import compiled_programs, forget_executables

import diffusax
from diffusax.pipelines.pipeline import ahead
from diffusax.runtime.devices import layouts
from diffusax.runtime.programs.program import key, lower

ORDER = (3, 0, 1, 2)
CALL = {"num_inference_steps": 2, "output_type": "np", "seed": 1, "guidance_scale": 3.0}


@pytest.fixture(scope="module")
def expected():
    return loaded()("a frog", **CALL).images


@pytest.fixture(autouse=True)
def as_on_gpus(expected, monkeypatch):
    """CPUs keep kernels as GPUs do; their own library reads any order."""
    monkeypatch.setitem(layouts.ORDERS, "cpu", ORDER)
    forget_executables()
    yield
    forget_executables()


def loaded():
    pipe = diffusax.DiffusionPipeline.from_pretrained("emoji")
    pipe.set_progress_bar_config(disable=True)
    return pipe


def orders(params):
    """How many kernels of convolutions lie in which order."""
    kernels = [x for x in jax.tree.leaves(params) if x.ndim == 4 and x.shape[:2] != (1, 1)]
    found = [layouts.order_of(x) for x in kernels]
    return {order: found.count(order) for order in set(found)}


def request_of(pipe):
    """The program that decodes."""
    call = ahead.example_call(pipe, 1, None, {})
    found = ahead.requests(pipe.parts, pipe.task, call)
    return next(request for request in found if request.program.name == "decode")


def test_pictures_and_files_are_the_same(expected, monkeypatch, tmp_path):
    pipe = loaded()
    assert set(orders(pipe.params)) == {ORDER}
    np.testing.assert_allclose(pipe("a frog", **CALL).images, expected, atol=1e-5)
    # A parameter that is set lies as the others do.
    pipe.params = jax.tree.map(lambda x: np.asarray(x) + 0, pipe.params)
    pipe.params = jax.tree.map(jax.numpy.asarray, pipe.params)
    assert set(orders(pipe.params)) == {ORDER}
    pipe.save_pretrained(tmp_path)
    monkeypatch.delitem(layouts.ORDERS, "cpu")
    again = diffusax.DiffusionPipeline.from_pretrained(tmp_path)
    for x, y in zip(jax.tree.leaves(again.params), jax.tree.leaves(pipe.params), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.slow
def test_a_program_that_is_compiled_ahead_takes_them(expected, tmp_path):
    pipe = loaded()
    pipe.compile(guidance_scale=CALL["guidance_scale"])
    pipe.save_compiled(tmp_path)
    forget_executables()
    assert pipe.load_compiled(tmp_path) == 3
    with compiled_programs() as compiled:
        np.testing.assert_allclose(pipe("a frog", **CALL).images, expected, atol=1e-5)
    assert compiled == []


def test_a_program_reads_kernels_in_their_order(monkeypatch):
    pipe = loaded()
    decode = request_of(pipe)
    text, own = lower(decode).compile().as_text(), key(decode)
    shapes = [x.shape for x in jax.tree.leaves(pipe.params["vae"]["decoder"])]
    h, w, c, d = max((s for s in shapes if len(s) == 4), key=np.prod)
    assert f"f32[{h},{w},{c},{d}]{{2,1,0,3}} parameter" in text
    monkeypatch.delitem(layouts.ORDERS, "cpu")
    assert key(request_of(pipe)) != own


def test_offloaded_weights_get_the_order_for_their_turn():
    pipe = loaded()
    pipe.parts.params["vae"] = jax.tree.map(np.asarray, pipe.params["vae"])
    assert set(orders(pipe.parts.ready("vae"))) == {ORDER}


@pytest.mark.slow
def test_fused_weights_keep_the_order():
    pipe = loaded()
    network = pipe.parts.networks["unet"]
    pipe.add_adapter("style", random_adapter(network, "unet", 3, seed=0).components)
    before = jax.tree.leaves(pipe.params["unet"])
    pipe.fuse_lora(adapter_names=["style"])
    fused = pipe.params["unet"]
    changed = [x for x, y in zip(jax.tree.leaves(fused), before, strict=True) if x is not y]
    assert set(orders(changed)) == set(orders(fused)) == {ORDER}
    pipe.unfuse_lora()
    assert set(orders(pipe.params["unet"])) == {ORDER}
