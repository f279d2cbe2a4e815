"""Adapters in pipelines: names and weights are data, stacks are shared, mistakes are told."""

import dataclasses
import gc
import weakref
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.extend.core import jaxprs_in_params
from support.adapted import random_adapter
from support.compiled_programs import compiled_programs, forget_executables

import diffusax
from diffusax.lora.lora import lora_of_arrays
from diffusax.lora.stacks import WeightGroups, covers, group_of, round_rank, stack, stack_shapes
from diffusax.models.adapters.low_rank import kernel_shapes
from diffusax.pipelines.pipeline import ahead
from diffusax.pipelines.run import mixing
from diffusax.pipelines.run.programs import run_rows
from diffusax.runtime.programs.compilations import count_compilations

CALL = {"num_inference_steps": 2, "output_type": "np", "guidance_scale": 3.0, "seed": 1}


def layers_of(pipe, component, rank, pattern="to_", seed=0):
    network = pipe.parts.networks[component]
    paths = [path for path in kernel_shapes(network) if pattern in path]
    return random_adapter(network, component, rank, paths, seed).components


def fresh(tiny_checkpoints, **options):
    folder, _ = tiny_checkpoints.pipeline("sd")
    pipe = diffusax.StableDiffusionPipeline.from_pretrained(folder, **options)
    pipe.set_progress_bar_config(disable=True)
    unet, text = layers_of(pipe, "unet", 4), layers_of(pipe, "text_encoder", 2, "_proj")
    pipe.add_adapter("style", {**unet, **text})
    pipe.add_adapter("face", layers_of(pipe, "unet", 8, "to_q", seed=1))
    return pipe


@pytest.fixture
def pipe(tiny_checkpoints):
    return fresh(tiny_checkpoints)


def test_names_and_weights_compile_nothing(pipe):
    plain = pipe("a cat", **CALL).images
    first = pipe("a cat", **CALL, adapters={"style": 1.0}).images
    assert np.abs(first - plain).max() > 0.02
    with count_compilations() as compiled:
        np.testing.assert_array_equal(pipe("a cat", **CALL, adapters={}).images, plain)
        half = pipe("a cat", **CALL, adapters={"style": 0.5}).images
        both = pipe("a cat", **CALL, adapters={"style": 1.0, "face": 0.7}).images
        nothing = pipe("a cat", **CALL, adapters={"style": 0.0, "face": 0}).images
        pipe.delete_adapters("face")
        # Fewer layers of the same kind.
        pipe.add_adapter("face", {**layers_of(pipe, "unet", 11, "to_v"), **_text(pipe)})
        other = pipe("a cat", **CALL, adapters=[{"face": np.float32(0.7)}]).images
    assert compiled == []
    assert min(np.abs(a - first).max() for a in (half, both, other)) > 0.01
    np.testing.assert_allclose(nothing, plain, atol=1e-5)


def _text(pipe):
    return layers_of(pipe, "text_encoder", 3, "q_proj", seed=5)


def test_steps_have_no_more_products_where_all_images_weigh_adapters_alike(pipe, monkeypatch):
    # Most of so small a network are its attentions.
    monkeypatch.setattr(mixing, "_SHARE", 1)

    def products(**given):
        call = ahead.example_call(pipe, 1, (32, 32), {"prompt": ["a cat", "a dog"], **given})
        requests = ahead.requests(pipe.parts, pipe.task, call, None)
        (request,) = [request for request in requests if request.program.name == "denoise"]
        ((_, denoiser),) = request.static
        jaxpr = jax.make_jaxpr(lambda *given: run_rows(denoiser, *given))(*request.dynamic[:-1])
        names = list(looped(jaxpr.jaxpr))
        return names.count("dot_general")

    plain = products()
    assert plain > 20
    assert products(adapters={"style": 1.0}) == plain
    assert products(adapters=[{"style": 1.0}, {"style": 0.5}]) > plain


def looped(jaxpr, inside=False):
    """The names of the operations of all loops of a program."""
    for eqn in jaxpr.eqns:
        if inside:
            yield eqn.primitive.name
        for inner in jaxprs_in_params(eqn.params):
            yield from looped(inner, inside or eqn.primitive.name in ("while", "scan"))


def test_the_next_call_with_the_same_names_copies_nothing(pipe):
    c = pipe.parts
    both = dict(pipe.adapters)
    before = c.adapters.stacked(c, both)
    again = c.adapters.stacked(c, both)
    assert all(before[name] is again[name] for name in before)
    assert set(before) == {"unet", "text_encoder"}
    (down, up, which, _), *_ = before["unet"].values()
    assert down.shape[-1] == len(up) == len(which) == 16
    shapes = stack_shapes(tuple(both.values()), c.networks, rank=100)
    assert covers(shapes, stack_shapes(tuple(both.values()), c.networks))
    wider = c.adapters.stacked(c, both, shapes)
    assert wider["unet"].popitem()[1].up.shape[0] == 128
    texts = [
        weakref.ref(x) for x in jax.tree.leaves([one["text_encoder"] for one in (before, wider)])
    ]
    del before, again, wider, down, up, which
    pipe.delete_adapters(["style"])
    assert list(pipe.adapters) == ["face"]
    gc.collect()
    assert [text for text in texts if text() is not None] == []


def test_pipelines_of_the_same_components_share_adapters(pipe):
    other = diffusax.StableDiffusionImg2ImgPipeline.from_pipe(pipe)
    assert list(other.adapters) == ["style", "face"]
    other.delete_adapters("style")
    assert list(pipe.adapters) == ["face"]
    with pytest.raises(TypeError):
        pipe.adapters["mine"] = pipe.adapters["face"]


def test_the_whole_call_as_a_function_of_adapters(pipe):
    given = {"adapters": [{"style": 0.8}, {"face": 0.5}], "num_images_per_prompt": 2}
    texts = {"prompt": ["a cat", "a dog"], "seed": [1, 2, 3, 4]}
    call = {**CALL, **given, **texts}
    expected = pipe(**call).images
    del call["output_type"]
    inputs = pipe.prepare_inputs(**call)
    assert set(inputs.adapters) == {"unet", "text_encoder"}
    np.testing.assert_allclose(pipe.generate_fn(pipe.params, inputs), expected, atol=1e-4)


@pytest.mark.slow
def test_gradients_of_an_adapter(pipe):
    inputs = pipe.prepare_inputs("a cat", num_inference_steps=2, seed=1, adapters={"style": 0.8})
    path = next(iter(inputs.adapters["text_encoder"]))

    @jax.jit
    def brightness(up):
        adapters = jax.tree.map(lambda x: x, inputs.adapters)
        adapters["text_encoder"][path] = adapters["text_encoder"][path]._replace(up=up)
        return pipe.generate_fn(pipe.params, inputs._replace(adapters=adapters)).mean()

    up = inputs.adapters["text_encoder"][path].up
    gradient = jax.grad(brightness)(up)
    step = 1e-2 * jnp.sign(gradient)
    slope = (brightness(up + step) - brightness(up - step)) / 2
    np.testing.assert_allclose(slope, (gradient * step).sum(), rtol=0.05)


def test_programs_made_ahead_and_saved(pipe, tmp_path):
    adapters = {"style": 0.8}
    pipe.compile(adapters=adapters, guidance_scale=3.0)
    pipe.save_compiled(tmp_path)
    try:
        forget_executables()
        assert pipe.load_compiled(tmp_path) == 3
        with compiled_programs() as compiled:
            loaded = pipe("a cat", **CALL, adapters={"face": 0.3, "style": 0.5}).images
        assert compiled == []
    finally:
        forget_executables()
    direct = pipe("a cat", **CALL, adapters={"face": 0.3, "style": 0.5}).images
    np.testing.assert_allclose(loaded, direct, atol=1e-4)


def test_a_callback_keeps_the_adapters(pipe):
    def change(pipe, row, timestep, tensors):
        pipe._guidance_scale = 3.0001
        return tensors

    adapters = {"style": 0.8}
    expected = pipe("a cat", **CALL, adapters=adapters).images
    actual = pipe("a cat", **CALL, adapters=adapters, callback_on_step_end=change).images
    np.testing.assert_allclose(actual, expected, atol=1e-3)


@pytest.mark.slow
def test_prompts_of_several_windows(pipe):
    call = {**CALL, "long_prompt": True, "adapters": [{"style": 0.8}, {"face": 0.5}]}
    texts, seeds = ["a cat " * 60, "a dog " * 40], [1, 2]
    together = pipe(texts, **{**call, "seed": seeds}).images
    row = {**CALL, "long_prompt": True, "adapters": {"style": 0.8}, "seed": 1}
    np.testing.assert_allclose(together[0], pipe(texts[0], **row).images[0], atol=1e-4)
    embeds, _ = pipe.encode_prompt(texts, long_prompt=True, adapters=call["adapters"])
    plain, _ = pipe.encode_prompt(texts, long_prompt=True)
    changes = np.abs(embeds - plain).max((1, 2))
    assert changes[0] > 0.01
    np.testing.assert_allclose(embeds[1], plain[1], atol=1e-5)


@pytest.mark.slow
def test_half_precision_changes_an_adapter_little(pipe):
    exact = pipe("a cat", **CALL, adapters={"style": 0.8}).images
    plain = pipe("a cat", **CALL).images
    pipe.to("bfloat16")
    half = pipe("a cat", **CALL, adapters={"style": 0.8}).images
    style = {"style": pipe.adapters["style"]}
    layers = pipe.parts.adapters.stacked(pipe.parts, style)["unet"]
    assert {layer.up.dtype for layer in layers.values()} == {jnp.dtype(jnp.bfloat16)}
    assert np.abs(half - exact).mean() < 0.2 * np.abs(exact - plain).mean()


@pytest.mark.parametrize(
    ("adapters", "message"),
    [
        ({"stile": 1.0}, "adapters has the name 'stile'; the adapters are 'style', 'face'"),
        ([{"style": 1.0}] * 3, "adapters has 3 entries for 2 prompts; give 1 or 2"),
        ({"style": float("nan")}, r"adapters must give 'style' a finite number \(got nan\)"),
        ({"style": "much"}, "adapters must give 'style' a finite number"),
        ({"style": True}, "adapters must give 'style' a finite number"),
        ("style", "adapters must be a dictionary of names and weights"),
    ],
)
def test_calls_that_cannot_be(pipe, adapters, message):
    with pytest.raises(ValueError, match=message):
        pipe(["a cat", "a dog"], **CALL, adapters=adapters)


PATH = "mid_block.attentions.0.proj_in"


def pair(*shapes):
    return tuple(np.zeros(shape, np.float32) for shape in shapes)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ({"vae": {PATH: pair((4, 2), (2, 4))}}, "component 'vae'; those .* are text_encoder, unet"),
        ({"unet": {"mid_block.attention.0.proj_in": pair((4, 2), (2, 4))}}, f"nearest are {PATH}"),
        ({"unet": {PATH: pair((1, 1, 64, 2), (2, 4))}}, r"takes \(1, 1, 64, rank\) and \(rank, 64"),
        ({"unet": {PATH: pair((64, 2), (2, 64))}}, r"takes \(1, 1, 64, rank\)"),
        ({"unet": {PATH: pair((1, 1, 64, 2), (3, 64))}}, f"{PATH} a pair of arrays of floats"),
        ({"unet": {PATH: pair((1, 1, 64, 0), (0, 64))}}, "a pair of arrays of floats"),
        ({"unet": {PATH: np.zeros(3)}}, "a pair of arrays of floats"),
        ({"unet": {PATH: tuple(np.zeros((2, 2, 2), int))}}, "a pair of arrays of floats"),
        ({"unet": {}}, "must be a dictionary such as"),
        ([], "must be a dictionary such as"),
        ({}, "has no layers"),
    ],
)
def test_adapters_that_fit_nothing(pipe, layers, message):
    with pytest.raises(ValueError, match=message) as error:
        pipe.add_adapter("mine", layers)
    assert "\n" not in str(error.value)
    assert "mine" in str(error.value)


@dataclasses.dataclass(frozen=True)
class OfPyTorch:
    """As the networks of PyTorch's modules: parameters by whole names, without kernels."""

    shapes = MappingProxyType({"conv_in.weight": jax.ShapeDtypeStruct((4, 4), jnp.float32)})


def test_networks_of_other_libraries_take_none():
    layers = {"unet": {"conv_in": pair((4, 2), (2, 4))}}
    with pytest.raises(ValueError, match="no network of diffusax's own"):
        lora_of_arrays("mine", layers, {"unet": OfPyTorch()})


def test_names_that_cannot_be(pipe):
    with pytest.raises(ValueError, match="'style' is there already"):
        pipe.add_adapter("style", layers_of(pipe, "unet", 1))
    with pytest.raises(ValueError, match="a text that is not empty"):
        pipe.add_adapter("", layers_of(pipe, "unet", 1))
    with pytest.raises(ValueError, match="adapter_names has the name 'mine'"):
        pipe.delete_adapters(["style", "mine"])
    assert list(pipe.adapters) == ["style", "face"]


def test_a_network_that_no_longer_fits(pipe, tiny_checkpoints):
    pipe("a cat", **CALL, adapters={"face": 1.0})
    folder, _ = tiny_checkpoints.pipeline("xl")
    pipe.unet = diffusax.UNet2DConditionModel.from_pretrained(folder / "unet")
    wide = np.zeros((1, 77, pipe.unet.config["cross_attention_dim"]), np.float32)
    with pytest.raises(ValueError, match="the adapter 'face' has"):
        pipe(prompt_embeds=wide, negative_prompt_embeds=wide, **CALL, adapters={"face": 1.0})


def test_tensors_of_pytorch_in_half_precision(pipe):
    layers = {
        path: tuple(torch.tensor(x).bfloat16() for x in pair)
        for path, pair in layers_of(pipe, "unet", 2)["unet"].items()
    }
    pipe.add_adapter("mine", {"unet": layers})
    adapter = pipe.adapters["mine"]
    assert adapter.rank == 2
    (down, up) = next(iter(adapter.components["unet"].values()))
    assert down.dtype == up.dtype == np.float32


def test_stacks_have_the_shapes_of_a_bucket(pipe):
    unet = pipe.parts.networks["unet"]
    known = kernel_shapes(unet)
    attention = group_of(unet, {p for p in known if p.endswith("to_q")})
    blocks = group_of(unet, {p for p in known if p.endswith(("to_q", "ff.net.2"))})
    everything = group_of(unet, {"conv_in"})
    assert set(attention) == {p for p in known if ".to_" in p}
    assert set(blocks) == {p for p in known if "attentions." in p}
    assert everything == tuple(known)
    ranks = [round_rank(r) for r in (1, 16, 17, 250, 257, 600)]
    assert ranks == [16, 16, 32, 256, 512, 768]
    stacked = stack(dict(pipe.adapters), pipe.parts.networks)["unet"]
    assert tuple(stacked) == attention
    rank = {path: int((np.abs(layer.up).sum(1) > 0).sum()) for path, layer in stacked.items()}
    assert set(rank.values()) == {4, 12}
    query = stacked[next(path for path in stacked if path.endswith("to_q"))]
    groups = WeightGroups(pipe.parts.networks)
    one, two, none = query.which[[0, 4, 12]]
    assert query.which.tolist() == [one] * 4 + [two] * 8 + [0] * 4
    assert two - one == groups.count
    assert none == 0
    weights = groups.table(["style", "face"], [{"face": 2.0}, {}])
    assert weights.shape == (2, 8 * groups.count)
    assert weights[0, [one, two]].tolist() == [0.0, 2.0]
    assert weights[0].sum() == 2 * groups.count
    assert not weights[1].any()
