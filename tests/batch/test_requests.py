"""Requests of running batches: calls as they were when they were submitted."""

import gc
import weakref

import jax
import numpy as np
import PIL.Image
import pytest
from support.adapted import random_adapter

import diffusax
from diffusax.batch.request import Request
from diffusax.lora import Lora
from diffusax.models.adapters.low_rank import kernel_shapes
from diffusax.pipelines.components import adapters as adapter_store
from diffusax.pipelines.tasks.text_cache import TextCache

torch = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def pipe(tiny_checkpoints):
    return diffusax.StableDiffusionPipeline.from_pretrained(tiny_checkpoints.pipeline("sd")[0])


def request_of(pipe, **given):
    request = Request()
    request.take_call(pipe, None, ("a cat",), given, texts=TextCache())
    return request


def test_what_a_caller_changes_later_changes_nothing_of_its_call(pipe):
    repaint = diffusax.StableDiffusionImg2ImgPipeline.from_pipe(pipe)
    array, tensor = np.ones((1, 4, 16, 16), np.float32), torch.ones((1, 4, 16, 16))
    weights, canvas, pictures = {}, PIL.Image.new("RGB", (64, 64), "white"), [array]
    calls = {
        name: request_of(repaint, image=image).call
        for name, image in (("canvas", canvas), ("pictures", pictures), ("tensor", tensor))
    }
    other = request_of(pipe, latents=array, adapters=weights).call
    canvas.paste((0, 0, 0), (0, 0, 64, 64))
    array[:], tensor[:], weights["style"] = 0, 0, -3.0
    pictures.clear()
    assert np.asarray(calls["canvas"].image).min() == 255
    assert calls["pictures"].image[0].min() == calls["tensor"].image.min() == 1
    assert other.latents.min() == 1
    assert other.adapters == {}


def test_a_picture_that_cannot_be_read_is_an_error_of_the_result(pipe, tmp_path):
    repaint, path = diffusax.StableDiffusionImg2ImgPipeline.from_pipe(pipe), tmp_path / "half.png"
    PIL.Image.effect_noise((64, 64), 50).save(path)
    path.write_bytes(path.read_bytes()[:500])
    with (
        PIL.Image.open(path) as image,
        diffusax.RunningBatch(pipe, lanes=4) as batch,
        pytest.raises(ValueError, match=r"half\.png.*truncated"),
    ):
        batch.submit("a cat", pipe=repaint, image=image, num_inference_steps=2).result(60)


def test_each_of_several_prompts_has_its_own_loras(pipe):
    paths = [path for path in kernel_shapes(pipe.parts.networks["unet"]) if path.endswith("to_q")]
    style = random_adapter(pipe.parts.networks["unet"], "unet", 4, paths).components
    pipe.add_adapter("style", style)
    prompts, weights = ["a cat", "a dog", "a cat"], [{"style": 1.0}, {}, {"style": -1.0}]
    call = {"adapters": weights, "num_inference_steps": 2, "seed": 1, "output_type": "latent"}
    try:
        expected = np.asarray(pipe(prompts, **call).images)
        with diffusax.RunningBatch(pipe, lanes=4) as batch:
            found = np.asarray(batch.submit(prompts, **call).result(60).images)
    finally:
        pipe.delete_adapters("style")
    assert np.linalg.norm(found - expected) < 1e-4 * np.linalg.norm(expected)
    assert np.linalg.norm(expected[0] - expected[2]) > 1e-2 * np.linalg.norm(expected)


@pytest.fixture
def loha(pipe):
    """The name of an adapter that is merged into the UNet's parameters."""
    rng, kernels = np.random.default_rng(0), kernel_shapes(pipe.parts.networks["unet"])
    (path, (c, d)), *_ = [item for item in kernels.items() if item[0].endswith("to_q")]
    names, sizes = ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"), ((d, 4), (4, c)) * 2
    parts = {name: rng.normal(size=size).astype("f4") for name, size in zip(names, sizes)}
    pipe.add_adapter("loha", Lora({}, {"unet": {f"{path}.kernel": parts}}))
    yield "loha"
    pipe.delete_adapters("loha")


def test_adapters_are_checked_in_submit_and_merged_when_a_call_is_prepared(pipe, loha):
    own, arrays = pipe.params["unet"], len(jax.live_arrays())
    request = request_of(pipe, adapters={loha: 0.5}, num_inference_steps=2)
    assert request.c.params["unet"] is own
    assert len(jax.live_arrays()) == arrays
    request.prepare()
    assert request.c.params["unet"] is not own
    with pytest.raises(ValueError, match="several weights in one call"):
        request_of(pipe, adapters=[{loha: 1.0}, {loha: 0.5}])


@pytest.mark.slow
def test_calls_with_other_merged_adapters_hold_one_copy_of_the_parameters(pipe, loha, monkeypatch):
    pipe.set_progress_bar_config(disable=True)
    call = {"num_inference_steps": 3, "seed": 1, "output_type": "latent", "guidance_scale": 1.0}
    weights = [0.5, -0.5, 1.0, 0.25]
    expected = [
        np.asarray(pipe("a cat", adapters={loha: weight}, **call).images) for weight in weights
    ]
    copies, alive, own = [], [], adapter_store.merged_params

    def merged_params(*given, **options):
        gc.collect()
        alive.append(len([copy for copy in copies if copy() is not None]))
        found = own(*given, **options)
        changed = set(map(id, jax.tree.leaves(found)))
        changed -= set(map(id, jax.tree.leaves(pipe.params)))
        copies.extend(weakref.ref(x) for x in jax.tree.leaves(found) if id(x) in changed)
        return found

    monkeypatch.setattr(adapter_store, "merged_params", merged_params)
    with diffusax.RunningBatch(pipe, lanes=4) as batch:
        callback = {"callback_on_step_end": lambda *_: {}}
        futures = [
            batch.submit("a cat", adapters={loha: weight}, **call, **(callback if i == 2 else {}))
            for i, weight in enumerate(weights)
        ]
        plain = batch.submit("a cat", **{**call, "adapters": {}})
    for future, before in zip(futures, expected, strict=True):
        found = np.asarray(future.result(0).images)
        assert np.linalg.norm(found - before) < 1e-4 * np.linalg.norm(before)
    assert plain.done()
    assert np.linalg.norm(expected[0] - expected[1]) > 1e-2 * np.linalg.norm(expected[0])
    assert len(copies) == 4
    # The rows of the call before may not have been looked at yet.
    assert max(alive) <= 1
