"""IP-Adapters of our pipelines: what is data, what stays as it was, and clear errors."""

import warnings

import jax
import numpy as np
import pytest
from support.effort import examples
from support.ip_adapters import EMBED, build_image_encoder, write_ip_adapters
from support.pairs import PROMPTS, picture

import diffusax
from diffusax.runtime.programs.compilations import count_compilations

CALL = {"num_inference_steps": 2, "output_type": "latent", "guidance_scale": 3.0}


@pytest.fixture(scope="module")
def adapters(tiny_checkpoints, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    write_ip_adapters(folder, tiny_checkpoints.pipeline("sd")[1].unet)
    return folder


@pytest.fixture(scope="module")
def loaded(tiny_checkpoints, adapters):
    """A pipeline with a plain IP-Adapter."""
    pipe = diffusax.DiffusionPipeline.from_pretrained(tiny_checkpoints.pipeline("sd")[0])
    pipe.set_progress_bar_config(disable=True)
    pipe.plain = pipe("a cat", seed=1, **CALL).images
    pipe.load_ip_adapter(adapters / "plain.safetensors")
    return pipe


@pytest.fixture(autouse=True)
def scale_of_one(request):
    yield
    if "loaded" in request.fixturenames:
        request.getfixturevalue("loaded").set_ip_adapter_scale(1.0)


def embeds(seed, prompts=1):
    rng = np.random.default_rng(seed)
    positive = rng.standard_normal((prompts, 1, EMBED)).astype(np.float32)
    return [np.concatenate([np.zeros_like(positive), positive])]


def test_a_call_without_images_is_what_it_was(loaded):
    with count_compilations() as compiled:
        again = loaded("a cat", seed=1, **CALL).images
    assert not compiled
    np.testing.assert_array_equal(again, loaded.plain)
    shown = loaded("a cat", seed=1, ip_adapter_image_embeds=embeds(0), **CALL).images
    assert np.abs(shown - again).max() > 0.01
    loaded.set_ip_adapter_scale(0.0)
    nothing = loaded("a cat", seed=1, ip_adapter_image_embeds=embeds(0), **CALL).images
    np.testing.assert_allclose(nothing, again, atol=2e-5)


def test_prompts_of_one_call_see_images_of_their_own(loaded):
    pair = embeds(0, prompts=2)
    both = loaded(PROMPTS, seed=[3, 4], ip_adapter_image_embeds=pair, **CALL).images
    for i, prompt in enumerate(PROMPTS):
        one = [pair[0][[i, 2 + i]]]
        alone = loaded(prompt, seed=[3 + i], ip_adapter_image_embeds=one, **CALL)
        np.testing.assert_allclose(both[i], alone.images[0], atol=1e-4)


def test_calls_with_images_join_one_running_batch(loaded):
    calls = [{"prompt": "a cat", "seed": i, "ip_adapter_image_embeds": embeds(i)} for i in range(3)]
    calls += [{"prompt": "a dog", "seed": 9}]
    scales = [1.0, {"mid": 0.5, "up": 0.3}, -0.6, 1.0]
    alone = []
    with diffusax.RunningBatch(loaded, lanes=8, smallest=8) as batch:
        futures = []
        for call, scale in zip(calls, scales):
            loaded.set_ip_adapter_scale(scale)
            futures.append(batch.submit(**call, **CALL))
        for call, scale in zip(calls, scales):
            loaded.set_ip_adapter_scale(scale)
            alone.append(loaded(**call, **CALL).images)
        for expected, future in zip(alone, futures):
            np.testing.assert_allclose(future.result(120).images, expected, atol=1e-4)


@pytest.mark.slow
def test_the_pure_function_sees_images(loaded):
    given = {"prompt": "a cat", "seed": 1, "ip_adapter_image": picture(1), "guidance_scale": 3.0}
    inputs = loaded.prepare_inputs(**given, num_inference_steps=2)
    actual = loaded.generate_fn(loaded.params, inputs)
    expected = loaded(**given, num_inference_steps=2, output_type="np").images
    np.testing.assert_allclose(actual, expected, atol=1e-4)
    (prompt,) = inputs.plan.conditions.images
    assert prompt.tokens.shape == (1, 2, 1, 4, 32)


@pytest.mark.slow
def test_programs_that_were_compiled_ahead_of_time_are_used(loaded):
    jax.clear_caches()
    call = {**CALL, "output_type": "np"}
    loaded.compile(ip_adapter_image=picture(1), guidance_scale=3.0, num_inference_steps=2)
    loaded("a cat", seed=1, ip_adapter_image=picture(2), **call)
    with count_compilations() as compiled:
        loaded("a cat", seed=1, ip_adapter_image=picture(3), **call)
    assert not compiled


@pytest.mark.slow
def test_a_pipeline_may_have_another_dtype(tiny_checkpoints, adapters):
    half = diffusax.DiffusionPipeline.from_pretrained(
        tiny_checkpoints.pipeline("sd")[0], dtype="bfloat16"
    )
    half.load_ip_adapter(adapters / "plain.safetensors")
    layers = half.parts.ip_adapters.placed(half.parts).layers
    assert {leaf.dtype.name for leaf in jax.tree.leaves(layers)} == {"bfloat16"}
    half.to("float32")
    layers = half.parts.ip_adapters.placed(half.parts).layers
    assert {leaf.dtype.name for leaf in jax.tree.leaves(layers)} == {"float32"}


def test_a_saved_checkpoint_has_the_image_encoder(loaded, tmp_path):
    loaded.save_pretrained(tmp_path)
    again = diffusax.DiffusionPipeline.from_pretrained(tmp_path)
    assert again.image_encoder.network == loaded.image_encoder.network
    assert again.feature_extractor == loaded.feature_extractor
    import diffusers

    theirs = diffusers.DiffusionPipeline.from_pretrained(tmp_path)
    assert theirs.image_encoder.config.image_size == 30
    assert theirs.feature_extractor.crop_size["height"] == 30
    back = diffusax.DiffusionPipeline.from_torch(theirs)
    assert back.image_encoder.config.image_size == 30
    assert back.feature_extractor == loaded.feature_extractor


def test_what_is_unloaded_is_gone(tiny_checkpoints, adapters):
    pipe = diffusax.DiffusionPipeline.from_pretrained(tiny_checkpoints.pipeline("sd")[0])
    names = ["plain.safetensors", "plus.safetensors"]
    pipe.load_ip_adapter(str(adapters), subfolder="", weight_name=names)
    assert len(pipe.parts.ip_adapters) == 2
    pipe.unload_ip_adapter()
    assert pipe.image_encoder is None
    with pytest.raises(ValueError, match="ip_adapter_image needs an IP-Adapter; load_ip_adapter"):
        pipe("a cat", ip_adapter_image=picture(1))
    with pytest.raises(ValueError, match="no IP-Adapter whose scale to set"):
        pipe.set_ip_adapter_scale(0.5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"ip_adapter_image": [picture(1), picture(2)]}, "one entry for each of 1 IP-Adapters"),
        ({"ip_adapter_image": [[]]}, "must not be an empty list"),
        ({"ip_adapter_image": "nothing.png"}, "cannot read the image"),
        ({"ip_adapter_image_embeds": np.zeros((2, 1, 16))}, "must be a list"),
        ({"ip_adapter_image_embeds": [np.zeros((2, 1, 17))]}, "with a width of 16 at index 0"),
        ({"ip_adapter_image_embeds": [np.zeros((3, 1, 16))]}, "the shape .2 times prompts"),
        ({"ip_adapter_image_embeds": [np.zeros((6, 1, 16))]}, "3 entries for 1 prompts"),
        ({"ip_adapter_image_embeds": [None]}, "must have the shape"),
        ({"ip_adapter_image_embeds": [[["a"]]]}, "must have the shape"),
        ({"ip_adapter_image": picture(1), "ip_adapter_image_embeds": []}, "only one of"),
        ({"cross_attention_kwargs": {"ip_adapter_masks": []}}, "ip_adapter_masks need"),
        ({"cross_attention_kwargs": {"masks": []}}, "may hold only 'scale'.*'ip_adapter_masks'"),
    ],
)
def test_what_does_not_fit_is_one_sentence(loaded, call, message):
    with pytest.raises(ValueError, match=message):
        loaded("a cat", **CALL, **call)


@pytest.mark.parametrize(
    ("masks", "message"),
    [
        ([], "one entry for each of 1"),
        ([np.zeros((64, 64))], "must have the shape .1, images, height, width"),
        (np.zeros((64, 64)), "must have the shape"),
        ([np.zeros((1, 2, 64, 64))], "must have the shape .1, 1, height, width. at index 0"),
        ("mask.png", "must be an array of real numbers"),
    ],
)
def test_masks_that_do_not_fit_are_one_sentence(loaded, masks, message):
    kwargs = {"cross_attention_kwargs": {"ip_adapter_masks": masks}}
    with pytest.raises(ValueError, match=message):
        loaded("a cat", ip_adapter_image_embeds=embeds(0), **kwargs, **CALL)


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        ("high", "finite number"),
        (float("nan"), "finite number"),
        (True, "finite number"),
        ([0.5, 0.5], "each of 1 IP-Adapters .got 2"),
        ({"left": 1}, "'down', 'mid' and 'up' .got 'left'"),
        ({"up": {"block_0": 1.0}}, "may have the keys 'block_1' .got 'block_0'"),
        ({"up": {"block_1": [1.0, 2.0, 3.0]}}, "must have 2 entries"),
        ([[]], "empty list"),
        ([{"down": {"block_0": [[1.0, 2.0]]}, "mid": [1.0, 2.0, 3.0]}], "as many numbers"),
    ],
)
def test_scales_that_cannot_be_are_one_sentence(loaded, scale, message):
    with pytest.raises(ValueError, match=message):
        loaded.set_ip_adapter_scale(scale)
    assert (loaded.parts.ip_adapters.scales[0] == 1).all()


def test_a_scale_for_each_image_needs_masks(loaded):
    loaded.set_ip_adapter_scale([[0.5, 0.6]])
    with pytest.raises(ValueError, match="need ip_adapter_masks"):
        loaded("a cat", ip_adapter_image_embeds=embeds(0), **CALL)
    kwargs = {"cross_attention_kwargs": {"ip_adapter_masks": [np.ones((1, 1, 64, 64))]}}
    with pytest.raises(ValueError, match="2 numbers for 1 images"):
        loaded("a cat", ip_adapter_image_embeds=embeds(0), **kwargs, **CALL)


def test_an_encoder_of_another_kind_is_named(loaded, tmp_path, tiny_checkpoints, adapters):
    build_image_encoder(tmp_path, projection_dim=12)
    encoder = diffusax.CLIPVisionModelWithProjection.from_pretrained(tmp_path)
    folder = tiny_checkpoints.pipeline("sd")[0]
    pipe = diffusax.DiffusionPipeline.from_pretrained(folder, image_encoder=encoder)
    pipe.load_ip_adapter(adapters / "plain.safetensors")
    with pytest.raises(ValueError, match="features of width 16, but image_encoder gives 12"):
        pipe("a cat", ip_adapter_image=picture(1))
    pipe.unload_ip_adapter()
    pipe.load_ip_adapter(adapters / "plain.safetensors", image_encoder_folder=None)
    with pytest.raises(ValueError, match="no image_encoder to read ip_adapter_image with"):
        pipe("a cat", ip_adapter_image=picture(1))


def test_random_scales_are_those_of_diffusers(tiny_checkpoints):
    from diffusers.loaders.unet_loader_utils import _maybe_expand_lora_scales

    from diffusax.models.adapters.image_prompts import cross_attentions
    from diffusax.pipelines.components.ip_adapters import read_scale

    for kind, blocks in (("sd", ("block_0", "block_1")), ("xl", ("block_1", "block_0"))):
        folder, theirs = tiny_checkpoints.pipeline(kind)
        unet = diffusax.UNet2DConditionModel.from_pretrained(folder, subfolder="unet")
        paths = list(cross_attentions(unet.network))
        names = [n for n in theirs.unet.attn_processors if n.endswith("attn2.processor")]
        assert [f"{path}.processor" for path in paths] == names
        rng = np.random.default_rng(0)
        for _ in range(examples(30, 200)):
            scale = random_scale(rng, *blocks)
            (expanded,) = _maybe_expand_lora_scales(theirs.unet, [scale], default_scale=0.0)
            expected = [
                next(s for k, s in expanded.items() if path.startswith(f"{k}.")) for path in paths
            ]
            np.testing.assert_allclose(read_scale(scale, paths)[:, 0], expected, rtol=1e-6)


def random_scale(rng, down, up):
    def number():
        return float(rng.normal())

    def block(count):
        return number() if rng.random() < 0.5 else [number() for _ in range(count)]

    found = {"down": {down: block(1)}, "mid": number(), "up": {up: block(2)}}
    if rng.random() < 0.3:
        found["down"] = number()
    if rng.random() < 0.3:
        found["up"] = number()
    return {name: value for name, value in found.items() if rng.random() < 0.7}


def test_masks_are_made_smaller_as_in_diffusers():
    import torch
    from diffusers.image_processor import IPAdapterMaskProcessor

    from diffusax.images.image_prompt_masks import downsample_mask

    rng, downsample = np.random.default_rng(0), IPAdapterMaskProcessor.downsample
    shapes = [(64, 64), (96, 64), (48, 80), (40, 40), (7, 5)]
    for height, width in shapes:
        given = rng.random((2, height, width)).astype(np.float32)
        for queries in (256, 64, 16, 60, 96, 7, 4):
            # A mask of other proportions than the image's is a warning there.
            with warnings.catch_warnings(action="ignore"):
                expected = downsample(torch.from_numpy(given), 2, queries, 1)[..., 0]
            actual = downsample_mask(given, queries)
            np.testing.assert_allclose(actual, expected.numpy(), atol=2e-5)
