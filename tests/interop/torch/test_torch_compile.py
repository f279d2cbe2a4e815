"""PyTorch pipelines whose modules run in JAX, against themselves in PyTorch."""

import copy
import functools
import inspect
import re

import diffusers
import numpy as np
import pytest
import torch
import transformers
from peft import LoraConfig
from support.effort import first
from support.many_devices import run_on_devices
from support.pairs import picture
from support.repository import ROOT
from support.runs import RUNS
from support.tiny import build_stable_diffusion
from support.torch_families import REGISTRY
from support.torch_families.check import arrays

import diffusax.torch
from diffusax.interop.torch.compiling import CompiledMethod
from diffusax.interop.torch.explaining import NotTraceable

# Others are quick in test_torch_fused.py: SDXL, InstructPix2Pix, PixArt, Flux, SD 3.
QUICK = (
    "StableDiffusionImg2ImgPipeline",
    "StableDiffusionInpaintPipeline",
    "StableDiffusionControlNetPipeline",
    "AuraFlowPipeline",
    "CogView4Pipeline",
    "HunyuanDiTPipeline",
    "Lumina2Pipeline",
    "QwenImagePipeline",
    "SanaPipeline",
    "ZImagePipeline",
)
PAGE = ROOT / "docs/reference/torch_pipelines.md"
# Those with a module that the page calls impossible to trace.
EAGER = re.findall(r"(?m)^\| (\w+) \|[^|]*\| works with on_error='eager'", PAGE.read_text())
# Of random weights: what each step makes of the last one's rounding grows in the priors.
LOOSE = {"KandinskyV22InpaintCombinedPipeline": 5e-3, "KandinskyPipeline": 2e-3}
NATIVE = tuple(name for name in QUICK if name.startswith("StableDiffusion") and "3" not in name)


def draw(pipe, inputs, seed=0):
    torch.manual_seed(seed)
    generator = torch.Generator("cpu").manual_seed(seed)
    return arrays(pipe(**inputs, generator=generator))[0]


@pytest.fixture(scope="module")
def blog(tmp_path_factory):
    """The tiny SD 2 of the blog's program."""
    pipe = build_stable_diffusion(tmp_path_factory.mktemp("torch") / "sd2", style="sd2")
    pipe.set_progress_bar_config(disable=True)
    return pipe


TASKS = re.compile(
    "Img2Img|Image2Image|Inpaint(ing)?|PAG|Control(Net)?|Union|Fill|Kontext|Video(2|To)Video|ImageToVideo"
)
"""The words in the names of classes that are one model's for several tasks."""


@pytest.fixture
def call(blog):
    """The blog's call, and the pipeline in PyTorch again afterwards."""
    scheduler = blog.scheduler
    yield functools.partial(
        draw,
        blog,
        {
            "prompt": "a photograph of an astronaut riding a horse",
            "num_inference_steps": 4,
            "height": 64,
            "width": 64,
            "output_type": "np",
        },
    )
    blog.scheduler = scheduler
    diffusax.torch.restore(blog)


def programs(pipe):
    """How many programs each compiled method has."""
    modules = [m for m in pipe.components.values() if isinstance(m, torch.nn.Module)]
    methods = [v for m in modules for v in vars(m).values() if isinstance(v, CompiledMethod)]
    return sum(method._jitted.compiled_shapes for method in methods)


def test_the_blogs_program_with_one_call(blog, call):
    expected, other = call(), call(seed=1)
    assert diffusax.torch.compile(blog) is blog
    np.testing.assert_allclose(call(), expected, atol=1e-4)
    count = programs(blog)
    assert count == 3
    np.testing.assert_allclose(call(seed=1), other, atol=1e-4)
    assert programs(blog) == count
    assert diffusax.torch.restore(blog) is blog
    assert programs(blog) == 0
    # PyTorch itself may round otherwise in a later call.
    np.testing.assert_allclose(call(), expected, atol=1e-5)


def in_float32(name):
    """A new pipeline and its small call."""
    pipe, inputs = REGISTRY[name]()
    if name == "ZImageOmniPipeline":
        pipe.to(torch.float32)
    return pipe, inputs


def check_family(name, **options):
    expected = draw(*in_float32(name))
    # One that has never run in PyTorch: what modules do in their first call is traced, too.
    pipe, inputs = in_float32(name)
    diffusax.torch.compile(pipe, **options)
    tolerance = LOOSE.get(name, 1e-4 if name in NATIVE else 1e-3)
    # Embeddings and latents of random priors reach a thousand.
    scale = max(1.0, expected.std())
    np.testing.assert_allclose(draw(pipe, inputs), expected, atol=tolerance * scale)


@pytest.mark.parametrize("name", first(QUICK))
def test_families_draw_what_they_do_in_pytorch(name):
    check_family(name)


def by_networks(names):
    """The names; those that have the networks of one before them are marked as `families`."""
    known, cases = set(), []
    for name in sorted(names, key=lambda name: (TASKS.sub("", name), len(name), name)):
        marks = [pytest.mark.families] if TASKS.sub("", name) in known else []
        known.add(TASKS.sub("", name))
        cases.append(pytest.param(name, marks=marks))
    return cases


@pytest.mark.slow
@pytest.mark.parametrize("name", by_networks(set(REGISTRY) - set(QUICK) - set(EAGER)))
def test_all_families_draw_what_they_do_in_pytorch(name, monkeypatch):
    # Z-Image Omni casts its pictures, whatever the dtype of its networks.
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.float)
    check_family(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(EAGER))
def test_families_with_a_module_that_stays_with_torch(name, caplog):
    pipe, inputs = REGISTRY[name]()
    diffusax.torch.compile(pipe)
    with pytest.raises(NotTraceable, match=r"cannot be compiled: .*on_error='eager'"):
        draw(pipe, inputs)
    check_family(name, on_error="eager")
    assert "runs in PyTorch: " in caplog.text


def test_schedulers_callbacks_and_slicing_go_on(blog, call):
    def stop_late(pipe, step, timestep, tensors):
        seen.append((step, int(timestep), tensors["latents"].shape))
        return {"latents": tensors["latents"] * 0.9}

    seen = []
    blog.scheduler = diffusers.EulerAncestralDiscreteScheduler.from_config(blog.scheduler.config)
    blog.enable_attention_slicing()
    more = {"callback_on_step_end": stop_late, "num_images_per_prompt": 2}
    inputs = {**call.args[1], **more}
    expected, steps = draw(blog, inputs), list(seen)
    seen.clear()
    diffusax.torch.compile(blog)
    np.testing.assert_allclose(draw(blog, inputs), expected, atol=1e-4)
    assert seen == steps
    assert len(steps) == 4


@pytest.mark.slow
def test_tiles_are_drawn_after_compiling(blog, call, monkeypatch):
    diffusax.torch.compile(blog)
    whole = call()
    monkeypatch.setattr(blog.vae, "tile_sample_min_size", 32)
    monkeypatch.setattr(blog.vae, "tile_latent_min_size", 32 // blog.vae_scale_factor)
    blog.vae.enable_tiling()
    try:
        tiled = call()
        diffusax.torch.restore(blog)
        np.testing.assert_allclose(tiled, call(), atol=1e-4)
    finally:
        blog.vae.disable_tiling()
    assert np.abs(tiled - whole).max() > 1e-3


@pytest.mark.slow
def test_adapters_and_casts_are_noticed(blog, call):
    before = call()
    blog.unet.add_adapter(LoraConfig(r=4, target_modules=["to_q", "to_v"], init_lora_weights=False))
    try:
        expected = call()
        assert np.abs(expected - before).max() > 1e-3
        diffusax.torch.compile(blog)
        np.testing.assert_allclose(call(), expected, atol=1e-4)
    finally:
        blog.unet.delete_adapters("default")
    for part in (blog.unet, blog.text_encoder):
        part.to(torch.float16)
    try:
        assert blog.unet.conv_in.weight.dtype == torch.float16
        inputs = {**call.args[1], "num_inference_steps": 1, "output_type": "latent"}
        half = draw(blog, {**inputs, "latents": torch.ones(1, 4, 8, 8).half()})
        assert np.isfinite(half).all()
    finally:
        for part in (blog.unet, blog.text_encoder):
            part.to(torch.float32)


@pytest.mark.slow
def test_weights_of_adapters_are_noticed(blog, call):
    blog.unet.add_adapter(LoraConfig(r=4, target_modules=["to_q", "to_v"], init_lora_weights=False))
    try:
        expected = {}
        for weight in (0.3, 1.0):
            blog.unet.set_adapters("default", weight)
            expected[weight] = call()
        assert np.abs(expected[0.3] - expected[1.0]).max() > 1e-3
        diffusax.torch.compile(blog)
        for weight in (1.0, 0.3):
            blog.unet.set_adapters("default", weight)
            np.testing.assert_allclose(call(), expected[weight], atol=1e-4)
    finally:
        blog.unet.delete_adapters("default")


@pytest.mark.slow
def test_attention_processors_are_noticed(blog):
    class Halved(diffusers.models.attention_processor.AttnProcessor2_0):
        """Gives half of what attention gives."""

        def __call__(self, *args, **kwargs):
            return 0.5 * super().__call__(*args, **kwargs)

    context = torch.randn(1, 7, blog.unet.config.cross_attention_dim)
    given = [torch.randn(1, 4, 8, 8), torch.tensor(3), context]
    processors = blog.unet.attn_processors
    with torch.no_grad():
        plain = blog.unet(*given).sample
        diffusax.torch.compile(blog, components=("unet",))
        torch.testing.assert_close(blog.unet(*given).sample, plain, atol=1e-4, rtol=1e-4)
        blog.unet.set_attn_processor(Halved())
        try:
            found = blog.unet(*given).sample
            diffusax.torch.restore(blog)
            torch.testing.assert_close(found, blog.unet(*given).sample, atol=1e-4, rtol=1e-4)
        finally:
            blog.unet.set_attn_processor(processors)
            diffusax.torch.restore(blog)
    assert (found - plain).abs().max() > 1e-3


def test_encoded_images_have_pytorchs_distribution(blog, call):
    image = torch.from_numpy(np.asarray(picture(3), np.float32)).permute(2, 0, 1)[None] / 255
    with torch.no_grad():
        expected = blog.vae.encode(image).latent_dist
        diffusax.torch.compile(blog, components=("vae",))
        found = blog.vae.encode(image).latent_dist
    assert type(found) is type(expected)
    np.testing.assert_allclose(found.mean, expected.mean, atol=1e-5)
    drawn = [x.sample(torch.Generator().manual_seed(1)) for x in (found, expected)]
    np.testing.assert_allclose(*drawn, atol=1e-5)


@pytest.mark.slow
def test_dtype_is_that_of_the_computation(blog, call):
    expected = call()
    diffusax.torch.compile(blog, dtype="bfloat16")
    found = call()
    assert found.dtype == np.float32
    assert 1e-4 < np.abs(found - expected).mean() < 0.1


class Scaled(torch.nn.Module):
    """A module with a number, a switch and a table of its own."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.table = torch.arange(4.0)

    def forward(self, x, scale, count=1, flip=False):
        """scale (linear(x) + table), count times beside each other, backwards with `flip`."""
        y = scale * (self.linear(x) + self.table)
        y = y.flip(-1) if flip else y
        return {"y": torch.cat([y] * count, dim=-1), "count": count}


def test_signatures_are_the_modules_own():
    module = Scaled()
    expected = inspect.signature(module.forward)
    assert inspect.signature(diffusax.torch.compile(module).forward) == expected


def test_numbers_that_change_become_data():
    module = diffusax.torch.compile(Scaled())
    x = torch.randn(2, 4)
    with torch.no_grad():
        for scale in (1.0, 2.0, 3.5, -4.0):
            found = module(x, scale)
            expected = scale * (module.linear(x) + module.table)
            torch.testing.assert_close(found["y"], expected)
        assert programs_of(module) == 2
        for count in (1, 2, 3):
            found = module(x, 2.0, count=count, flip=True)
            assert found["count"] == count
            assert found["y"].shape == (2, 4 * count)
    assert programs_of(module) == 5


class Processing:
    """Like an attention's processor, with the scales of adapters."""

    scale = None


class Parts(torch.nn.Module):
    """A module with switches in its parts, as FreeU, GLIGEN, LoRA and IP-Adapters have them."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)
        self.inner.enabled, self.inner.scaling = True, {"default": 1.0}
        self.processor = Processing()
        self.processor.scale = [1.0]

    def forward(self, x):
        """b 4 -> b 4."""
        x = self.inner(x) * self.inner.scaling["default"] if self.inner.enabled else x
        return x * self.processor.scale[0] + getattr(self.inner, "more", 0)


def test_switches_of_parts_are_noticed():
    module = diffusax.torch.compile(Parts())
    plain = Parts()
    plain.load_state_dict(module.state_dict())
    x = torch.randn(2, 4)
    for change in (
        lambda m: m,
        lambda m: m.processor.scale.__setitem__(0, 2.0),
        lambda m: m.inner.scaling.update(default=0.5),
        lambda m: setattr(m.inner, "more", 1.0),
        lambda m: m.inner.register_forward_hook(lambda *given: given[2] + 3),
        lambda m: setattr(m.inner, "enabled", False),
        lambda m: setattr(m, "processor", type("Other", (Processing,), {"scale": [7.0]})()),
    ):
        change(module), change(plain)
        with torch.no_grad():
            torch.testing.assert_close(module(x), plain(x))
    assert programs_of(module) == 7
    module(x)
    assert programs_of(module) == 7


@pytest.mark.slow
def test_freeu_after_the_first_call(blog, call):
    plain = call()
    diffusax.torch.compile(blog)
    np.testing.assert_allclose(call(), plain, atol=1e-4)
    blog.enable_freeu(s1=0.9, s2=0.2, b1=1.5, b2=1.6)
    found = call()
    diffusax.torch.restore(blog)
    expected = call()
    blog.disable_freeu()
    assert np.abs(expected - plain).max() > 1e-2
    np.testing.assert_allclose(found, expected, atol=1e-4)


class Storing(torch.nn.Module):
    """Keeps what it computed in its processor, as self-attention guidance asks for."""

    def __init__(self):
        super().__init__()
        self.processor = Processing()

    def forward(self, x):
        """Any shape."""
        self.processor.kept = x.softmax(-1)
        return x @ self.processor.kept.T


def test_what_a_processor_keeps_is_refused(caplog):
    x = torch.randn(2, 2)
    module = diffusax.torch.compile(Storing())
    expected = (
        r"Storing\.forward cannot be compiled: its Processing keeps kept for others to read\."
    )
    with torch.no_grad(), pytest.raises(diffusax.torch.NotTraceable, match=expected):
        module(x)
    assert not vars(module.processor)
    module = diffusax.torch.compile(module, on_error="eager")
    with torch.no_grad():
        torch.testing.assert_close(module(x), x @ x.softmax(-1).T)
    torch.testing.assert_close(module.processor.kept, x.softmax(-1))


def test_hooks_that_only_look_are_refused():
    seen = []
    plain, x = Parts(), torch.randn(2, 4)
    module = diffusax.torch.compile(plain, on_error="raise")
    handle = module.inner.register_forward_hook(lambda *given: seen.append(given[2]))
    expected = r"Parts\.forward cannot be compiled: a hook looks at what its part inner computes\."
    with torch.no_grad(), pytest.raises(diffusax.torch.NotTraceable, match=expected):
        module(x)
    handle.remove()
    assert not module.inner._forward_hooks
    with torch.no_grad():
        assert module(x).shape == (2, 4)


def test_hooks_that_a_first_call_sets_are_not_set_twice():
    config = transformers.CLIPTextConfig(
        vocab_size=99, hidden_size=8, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=9,
    )  # fmt: skip
    # Never called in PyTorch: the call that sets them is traced.
    module = transformers.CLIPTextModel(config).eval()
    plain = copy.deepcopy(module)
    diffusax.torch.compile(module)
    for length in (5, 7, 9):
        ids = torch.randint(0, 99, (1, length))
        with torch.no_grad():
            found, expected = (m(ids, output_hidden_states=True) for m in (module, plain))
        torch.testing.assert_close(found.hidden_states, expected.hidden_states)
    assert not any(part._forward_hooks for part in module.modules())


@pytest.mark.parametrize("make", [lambda: torch.nn.Conv2d(8, 8, 3), lambda: torch.nn.Linear(9, 9)])
def test_weights_written_to_in_place_are_noticed(make):
    plain = torch.nn.Sequential(make(), make(), make())
    module = diffusax.torch.compile(copy.deepcopy(plain))
    x = torch.randn(1, 8, 9, 9)
    with torch.no_grad():
        for part in (1, 0, 2):
            plain[part].weight.mul_(2), module[part].weight.mul_(2)
            torch.testing.assert_close(module(x), plain(x))


def programs_of(module):
    return module.__dict__["forward"]._jitted.compiled_shapes


class Branching(torch.nn.Module):
    """Does what depends on the values of tensors."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))

    def forward(self, x, mask=None):
        """x weighted; its first columns where there is a mask, its sign where there is none."""
        if mask is not None:
            return x[:, : int(mask.sum())] * self.weight[:1]
        return x * self.weight if x.sum() > 0 else -x


def test_values_that_a_module_needs():
    x = torch.rand(2, 3)
    module = diffusax.torch.compile(Branching())
    with pytest.raises(diffusax.torch.NotTraceable) as error, torch.no_grad():
        module(x)
    assert str(error.value).startswith(
        "Branching.forward cannot be compiled: `return x * self.weight if x.sum() > 0 else -x` "
        "needs the value of a tensor"
    )
    assert "exclude=['Branching']" in str(error.value)
    assert "\n" not in str(error.value)
    with torch.no_grad():
        counts = []
        for ones in (1, 2, 1):
            mask = torch.arange(3)[None] < ones
            torch.testing.assert_close(module(x, mask), x[:, :ones])
            counts.append(programs_of(module))
    assert counts[0] < counts[1] == counts[2]


def test_a_module_that_cannot_be_compiled_stays_with_pytorch_if_asked(caplog):
    x = torch.rand(2, 3)
    module = diffusax.torch.compile(Branching(), on_error="eager")
    with torch.no_grad():
        torch.testing.assert_close(module(-x), x)
    assert "Branching runs in PyTorch: Branching.forward cannot be compiled" in caplog.text


def test_gradients_stay_with_torch():
    module = diffusax.torch.compile(Scaled())
    x = torch.randn(2, 4, requires_grad=True)
    module(x, 2.0)["y"].sum().backward()
    assert x.grad is not None


@pytest.mark.slow
def test_four_devices_draw_what_pytorch_does():
    run_on_devices(RUNS / "torch_mesh_run.py")


def test_options_that_name_nothing_are_refused(blog):
    with pytest.raises(
        ValueError, match=r"no module 'transformer'; it has vae, text_encoder, unet"
    ):
        diffusax.torch.compile(blog, exclude=("transformer",))
    with pytest.raises(ValueError, match="unet has no method 'decode_all'"):
        diffusax.torch.compile(blog, methods_to_compile={"unet": ("decode_all",)})
    with pytest.raises(TypeError, match="fast"):
        diffusax.torch.compile(blog, fast=True)
    assert programs(blog) == 0
