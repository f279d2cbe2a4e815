"""PyTorch modules that diffusax does not have, inside its compiled programs."""

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from support.many_devices import run_on_devices
from support.pairs import NEGATIVES, PROMPTS, Pair, picture
from support.runs import RUNS
from support.tiny import TEXT, UNET, randomize

import diffusax
from diffusax.interop.torch.explaining import NotTraceable
from diffusax.interop.torch.models import native_network, to_model
from diffusax.interop.torch.networks import TorchNetwork
from diffusax.runtime.programs.compilations import count_compilations

CALL = {"prompt": PROMPTS[0], "negative_prompt": NEGATIVES[0]}


@pytest.fixture(scope="module", autouse=True)
def quick_compilation():
    """Halves the time, most of which is compilation; later tests get programs of their own."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
    jax.clear_caches()


class Squashed(diffusers.UNet2DConditionModel):
    """A user's UNet, with a forward of its own."""

    def forward(self, sample, timestep, encoder_hidden_states, **options):
        late = (timestep / 1000).reshape(-1, 1, 1, 1).to(sample.dtype)
        found = super().forward(sample, timestep, encoder_hidden_states, **options)[0]
        return (found + 0.3 * late * torch.tanh(sample),)


class Tinted(diffusers.AutoencoderKL):
    """A user's autoencoder."""

    def encode(self, x, return_dict=True):
        return super().encode(x.flip(1), return_dict=return_dict)

    def decode(self, z, return_dict=True, generator=None):
        return (super().decode(z).sample.flip(1),)


class Louder(transformers.CLIPTextModel):
    """A user's text encoder."""

    def forward(self, *args, **kwargs):
        found = super().forward(*args, **kwargs)
        found.last_hidden_state = 1.5 * found.last_hidden_state
        return found


class Branching(diffusers.UNet2DConditionModel):
    """One that looks at values, which are not known while a program is compiled."""

    def forward(self, sample, *args, **kwargs):
        return super().forward(sample if sample.mean() > 0 else -sample, *args, **kwargs)


def remade(kind, module):
    """A module of another class with the same weights."""
    new = kind(module.config) if kind is Louder else kind.from_config(module.config)
    new.load_state_dict(module.state_dict())
    new = new.eval().requires_grad_(False)
    if kind is Louder:
        # As in pairs.py.
        object.__setattr__(new, "text_model", new)
    return new


def converted(pipe, **options):
    ours = diffusax.DiffusionPipeline.from_torch(pipe, **options)
    ours.set_progress_bar_config(disable=True)
    return ours


def with_parts(pipe, **parts):
    """The same PyTorch pipeline with other components."""
    options = {k: v for k, v in pipe.config.items() if k in ("force_zeros_for_empty_prompt",)}
    if "XL" not in type(pipe).__name__:
        options["requires_safety_checker"] = False
    known = {name: value for name, value in pipe.components.items() if value is not None}
    new = type(pipe)(**{**dict.fromkeys(pipe.components), **known, **parts}, **options)
    new.set_progress_bar_config(disable=True)
    return new


@pytest.fixture(scope="module")
def unet(pairs):
    """One module for all tests with a UNet of SD's, so that its programs compile once."""
    return remade(Squashed, pairs("StableDiffusionPipeline", "sd").reference.unet)


@pytest.fixture(scope="module")
def pair(pairs, unet):
    reference = with_parts(pairs("StableDiffusionPipeline", "sd").reference, unet=unet)
    return Pair(reference, converted(reference))


def test_the_pictures_are_those_of_the_torch_pipeline(pair):
    assert isinstance(pair.ours.parts.networks["unet"], TorchNetwork)
    drawn = pair.check(**CALL)
    native = diffusax.StableDiffusionPipeline.from_pipe(pair.ours)
    assert native.unet.class_name == "UNet2DConditionModel"
    assert drawn.shape == (1, 64, 64, 3)


def test_knobs_compile_nothing(pair):
    pair.check(**CALL)
    with count_compilations() as compiled:
        pair.check(prompt=PROMPTS[1], guidance_scale=3.0, num_inference_steps=6)
        for sampler in ("dpm++2m-karras", "ddim", "unipc"):
            pair.check(**CALL, sampler=sampler)
        Pair(pair.reference, converted(pair.reference)).check(**CALL)
    assert compiled == []


def test_another_task_takes_the_same_program(pair, pairs):
    reference = pairs("StableDiffusionImg2ImgPipeline", "sd").reference
    reference = with_parts(reference, unet=pair.reference.unet)
    ours = converted(reference)
    ours(**CALL, image=picture(1), num_inference_steps=4, seed=0)
    pair.ours(**CALL, num_inference_steps=4, seed=0)
    with count_compilations() as compiled:
        Pair(reference, ours).check(**CALL, image=picture(1), strength=0.6)
    assert compiled == []


@pytest.mark.slow
def test_a_controlnet_of_ours_works_beside_it(pairs, unet):
    reference = pairs("StableDiffusionControlNetPipeline", "sd", controls=2).reference
    reference = with_parts(reference, unet=unet)
    images = [picture(2), picture(3)]
    ours = converted(reference)
    assert not isinstance(ours.parts.networks["controlnet_1"], TorchNetwork)
    Pair(reference, ours).check(**CALL, image=images, controlnet_conditioning_scale=[0.7, 0.4])


@pytest.mark.slow
def test_a_t2i_adapter_of_ours_works_beside_it(pairs, unet):
    reference = pairs("StableDiffusionAdapterPipeline", "sd", t2i=("sd",)).reference
    reference = with_parts(reference, unet=unet)
    ours = converted(reference)
    assert not isinstance(ours.parts.networks["adapter"], TorchNetwork)
    Pair(reference, ours).check(**CALL, image=picture(2), adapter_conditioning_scale=0.7)


@pytest.mark.slow
def test_a_unet_of_sdxl_draws_what_it_does_in_pytorch_and_knobs_compile_nothing(pairs):
    reference = pairs("StableDiffusionXLPipeline", "xl").reference
    reference = with_parts(reference, unet=remade(Squashed, reference.unet))
    pair = Pair(reference, converted(reference))
    pair.check(**CALL)
    with count_compilations() as compiled:
        pair.check(**CALL, guidance_scale=2.0, original_size=(32, 48), sampler="unipc")
    assert compiled == []


@pytest.mark.slow
def test_autoencoders_and_text_encoders_of_the_user(pairs, unet):
    reference = pairs("StableDiffusionImg2ImgPipeline", "sd").reference
    own = {"vae": Tinted, "text_encoder": Louder}
    parts = {name: remade(kind, getattr(reference, name)) for name, kind in own.items()}
    reference = with_parts(reference, unet=unet, **parts)
    ours = converted(reference)
    assert all(isinstance(network, TorchNetwork) for network in ours.parts.networks.values())
    pair = Pair(reference, ours)
    pair.check(**CALL, image=picture(1), strength=0.7)
    pair.check(**CALL, image=picture(1), strength=0.7, clip_skip=1)


SMALL = {
    **UNET["sd1"],
    "block_out_channels": (16,),
    "down_block_types": ("DownBlock2D",),
    "up_block_types": ("UpBlock2D",),
}
STRANGE = {
    "blocks": {
        "down_block_types": ("AttnDownBlock2D",),
        "up_block_types": ("AttnUpBlock2D",),
    },
    "simple": {
        "down_block_types": ("SimpleCrossAttnDownBlock2D",),
        "mid_block_type": "UNetMidBlock2DSimpleCrossAttn",
        "up_block_types": ("SimpleCrossAttnUpBlock2D",),
        "resnet_time_scale_shift": "scale_shift",
    },
    "text": {"addition_embed_type": "text", "addition_embed_type_num_heads": 4},
    "options": {"act_fn": "gelu", "timestep_post_act": "silu", "time_embedding_type": "fourier"},
}


def inputs():
    """A UNet's: sample b h w c, timestep and context."""
    rng = np.random.default_rng(0)
    x, context = (rng.standard_normal(s).astype(np.float32) for s in ((2, 8, 8, 4), (2, 5, 32)))
    return x, np.array([3.0, 700.0], np.float32), context


def predicted(module):
    """What PyTorch makes of `inputs`, b h w c."""
    x, t, context = map(torch.from_numpy, inputs())
    with torch.no_grad():
        return module(x.permute(0, 3, 1, 2), t, context)[0].permute(0, 2, 3, 1).numpy()


@pytest.mark.slow
@pytest.mark.parametrize("case", STRANGE)
def test_configs_that_diffusax_does_not_have(case):
    module = randomize(diffusers.UNet2DConditionModel(**SMALL | STRANGE[case]))
    assert native_network("unet", module) is None
    expected = predicted(module)
    assert expected.std() > 0.1
    np.testing.assert_allclose(to_model("unet", module).run(*inputs()), expected, atol=1e-4)


def test_parameters_keep_the_modules_dtype_or_take_the_one_given():
    module = randomize(Squashed(**SMALL))
    expected = predicted(module)
    given = to_model("unet", module, dtype=jnp.bfloat16)
    own = to_model("unet", module.to(torch.bfloat16))
    assert given.dtype == own.dtype == jnp.bfloat16
    assert given.run(*inputs()).dtype == jnp.bfloat16
    for model in (given, own):
        assert 1e-4 < np.abs(np.float32(model.run(*inputs())) - expected).mean() < 0.03


@pytest.mark.parametrize("change", ["forward", "part", "hook", "processor", "weights"])
def test_modules_that_were_changed_by_hand_are_noticed(pair, change):
    unet = diffusers.UNet2DConditionModel.from_config(pair.reference.unet.config)
    assert native_network("unet", unet) is not None
    if change == "forward":
        unet.conv_in.forward = lambda x: x
    elif change == "part":
        unet.conv_in = type("Conv", (torch.nn.Conv2d,), {})(4, 32, 3, padding=1)
    elif change == "hook":
        unet.mid_block.register_forward_hook(lambda *_: None)
    elif change == "processor":
        unet.set_attn_processor(type("Mine", (), {})())
    else:
        unet.conv_in.register_parameter("scale", torch.nn.Parameter(torch.ones(1)))
    assert native_network("unet", unet) is None


def test_lora_layers_run_as_they_are():
    peft = pytest.importorskip("peft")
    module = randomize(diffusers.UNet2DConditionModel(**SMALL))
    before = predicted(module)
    module.add_adapter(peft.LoraConfig(r=2, target_modules=["to_q", "to_v"]))
    expected = predicted(randomize(module))
    assert np.abs(expected - before).max() > 1e-2
    model = to_model("unet", module)
    assert isinstance(model.network, TorchNetwork)
    np.testing.assert_allclose(model.run(*inputs()), expected, atol=1e-4)


def test_gradients_reach_its_parameters():
    model = to_model("unet", randomize(Squashed(**SMALL)))

    @jax.jit
    @jax.value_and_grad
    def loss(weight):
        changed = {**model.params, "conv_out.weight": weight}
        return model.apply(changed, *inputs(), gradient_checkpointing="full").sum()

    weight = model.params["conv_out.weight"]
    gradient = loss(weight)[1]
    step = 1e-2 * jnp.sign(gradient)
    rise = loss(weight + step)[0] - loss(weight - step)[0]
    np.testing.assert_allclose(rise, 2 * (gradient * step).sum(), rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["data=2", "fsdp=2"])
def test_meshes_draw_what_one_device_does(mesh, meshes):
    assert f"{mesh} ok" in meshes


@pytest.fixture(scope="module")
def meshes(tmp_path_factory):
    """What torch_networks_on_meshes.py says, which runs on two devices."""
    folder = tmp_path_factory.mktemp("meshes")
    return " ".join(run_on_devices(RUNS / "torch_networks_on_meshes.py", folder, devices=2))


def test_what_cannot_be_traced_is_said_in_one_sentence(pair):
    ours = converted(with_parts(pair.reference, unet=remade(Branching, pair.reference.unet)))
    with pytest.raises(NotTraceable, match=r"Branching .* `return super.*diffusax\.torch\.compile"):
        ours("a", num_inference_steps=1)


def test_saving_is_refused_before_anything_is_written(pair, tmp_path):
    sentence = "^UNet2DConditionModel is a PyTorch module that diffusax runs as it is; save it"
    with pytest.raises(ValueError, match=sentence):
        pair.ours.save_pretrained(tmp_path / "all")
    with pytest.raises(ValueError, match=sentence):
        pair.ours.unet.save_pretrained(tmp_path / "unet")
    assert not list(tmp_path.iterdir())


def test_freeu_is_refused(pair):
    pair.ours.enable_freeu(s1=0.9, s2=0.2, b1=1.2, b2=1.4)
    with pytest.raises(ValueError, match=r"^FreeU is turned on with the PyTorch UNet's own"):
        pair.ours(**CALL, num_inference_steps=1)
    pair.ours.disable_freeu()


def test_components_without_a_place_are_refused(pairs):
    pipe = pairs("StableDiffusionControlNetPipeline", "sd", controls=2).reference
    controlnet = type("Own", (diffusers.ControlNetModel,), {})
    own = remade(controlnet, pipe.controlnet.nets[0])
    with pytest.raises(ValueError, match=r"no Own like the pipeline's controlnet; diffusax\.torch"):
        converted(with_parts(pipe, controlnet=own))
    encoder = Louder(transformers.CLIPTextConfig(**TEXT, use_attention_mask=True))
    with pytest.raises(ValueError, match=r"^text_encoder asks for attention masks"):
        to_model("text_encoder", encoder)
    with pytest.raises(ValueError, match=r"^Linear has no config; "):
        to_model("unet", torch.nn.Linear(2, 2))
