"""One class for each network: loading, pipelines and JAX's transformations give and take it."""

import copy
import pickle

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from jax.sharding import SingleDeviceSharding
from support import tiny, tiny_flux3, tiny_language, tiny_transformers, tiny_unconditional

import diffusax
from diffusax import models
from diffusax.models import MODELS
from diffusax.models.network import Network
from diffusax.networks import Model
from diffusax.training.recipes.editors import to_instruct_pix2pix

VISION = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
    "projection_dim": 16,
}
DINO = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}
CONTROLNET = {
    **{k: v for k, v in tiny.UNET["sd1"].items() if k not in ("sample_size", "up_block_types")},
    "conditioning_embedding_out_channels": (4, 8, 16),
}
CONFIGS = {
    "AsymmetricAutoencoderKL": tiny.ASYMMETRIC,
    "AutoencoderKL": tiny.VAE,
    "AutoencoderKLFlux2": tiny_transformers.KLEIN_VAE,
    "AutoencoderKLQwenImage": tiny_transformers.QWEN_IMAGE_VAE,
    "AutoencoderTiny": {},
    "CLIPModel": {"text_config": tiny.TEXT, "vision_config": VISION, "projection_dim": 16},
    "CLIPTextModel": tiny.TEXT,
    "CLIPTextModelWithProjection": tiny.TEXT,
    "CLIPVisionModel": VISION,
    "CLIPVisionModelWithProjection": VISION,
    "ControlNetModel": CONTROLNET,
    "Dinov2Model": DINO,
    "Flux2Transformer2DModel": tiny_transformers.KLEIN,
    "Flux3Transformer2DModel": tiny_flux3.FLUX3,
    "FluxControlNetModel": {**tiny_transformers.FLUX, "num_layers": 1, "num_single_layers": 1},
    "FluxTransformer2DModel": tiny_transformers.FLUX,
    "Krea2Transformer2DModel": tiny_transformers.KREA2,
    "Qwen2_5_VLForConditionalGeneration": tiny_language.QWEN2_5_VL,
    "Qwen2_5_VLModel": tiny_language.QWEN2_5_VL,
    "Qwen2_5_VLTextModel": tiny_language.QWEN2_5_VL_TEXT,
    "Qwen2_5_VisionTransformerPretrainedModel": tiny_language.QWEN2_5_VL_VISION,
    "Qwen3ForCausalLM": tiny_language.QWEN3,
    "Qwen3Model": tiny_language.QWEN3,
    "Qwen3VLForConditionalGeneration": tiny_language.QWEN3_VL,
    "Qwen3VLModel": tiny_language.QWEN3_VL,
    "Qwen3VLTextModel": tiny_language.QWEN3_VL_TEXT,
    "Qwen3VLVisionModel": tiny_language.QWEN3_VL_VISION,
    "T2IAdapter": tiny.T2I_ADAPTER["sd"],
    "T5EncoderModel": tiny_language.T5,
    "UMT5EncoderModel": tiny_language.T5,
    "UNet2DConditionModel": tiny.UNET["sd1"],
    "UNet2DModel": tiny_unconditional.UNET,
    "ViTModel": {**DINO, "intermediate_size": 40},
    "WanTransformer3DModel": tiny_transformers.WAN,
    "WanVACETransformer3DModel": {**tiny_transformers.WAN, **tiny_transformers.WAN_VACE},
    "AutoencoderKLQwenImage21": tiny_transformers.QWEN_IMAGE21_VAE,
    "AutoencoderKLWan": tiny_transformers.WAN22_VAE,
    "QwenImageTransformer2DModel": tiny_transformers.QWEN_IMAGE,
    "QwenImage21Transformer2DModel": tiny_transformers.QWEN_IMAGE21,
    "ZImageTransformer2DModel": tiny_transformers.Z_IMAGE,
}


def same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_all_networks_are_tried():
    # Other tests add networks of their own.
    assert {*CONFIGS} <= {*MODELS}
    assert {*CONFIGS} >= {*MODELS} & {*dir(diffusers), *dir(transformers)}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_network_has_one_class(name, tmp_path):
    cls = getattr(diffusax, name)
    assert getattr(models, name) is cls
    assert cls.module_class is MODELS[name]
    made = cls(**CONFIGS[name])
    made.save_pretrained(tmp_path)
    again = cls(made.network, made.params)
    loaded = cls.from_pretrained(tmp_path)
    for model in (made, again, loaded, diffusax.AutoModel.from_pretrained(tmp_path)):
        assert type(model) is cls
        assert isinstance(model, diffusax.AutoModel)
        assert model.network == Network(cls, made.config) == Network(MODELS[name], made.config)
        same(model, made)
    assert type(diffusax.load_network(tmp_path)) is type(Model(made.network, None)) is cls
    other = diffusax.AutoencoderTiny if name == "UNet2DModel" else diffusax.UNet2DModel
    assert not isinstance(made, other)
    with pytest.raises(ValueError, match=f"network is a {name}, not a {other.__name__}"):
        other(made.network, made.params)
    with pytest.raises(ValueError, match=f"holds a {name}, not a {other.__name__}"):
        other.from_pretrained(tmp_path)


def test_pipelines_hold_such_models(tiny_checkpoints):
    folder, theirs = tiny_checkpoints.pipeline("xl")
    pipe = diffusax.DiffusionPipeline.from_pretrained(folder)
    for own in (pipe, diffusax.DiffusionPipeline.from_torch(theirs)):
        for name in ("unet", "vae", "text_encoder", "text_encoder_2"):
            kind = type(getattr(theirs, name)).__name__
            assert type(getattr(own, name)) is getattr(diffusax, kind), name
    controlnet = diffusax.ControlNetModel.from_unet(pipe.unet)
    assert type(controlnet) is diffusax.ControlNetModel
    both = diffusax.StableDiffusionXLControlNetPipeline.from_pipe(
        pipe, controlnet=[controlnet, controlnet]
    )
    assert {type(one) for one in both.controlnet.nets} == {diffusax.ControlNetModel}
    unet = diffusax.UNet2DConditionModel.from_pretrained(folder, subfolder="unet")
    pipe.unet = unet
    assert isinstance(pipe.unet, diffusax.UNet2DConditionModel)
    same(pipe.unet, unet)


def test_widened_networks_and_modules_of_pytorch_are_of_the_class(tiny_checkpoints):
    folder, theirs = tiny_checkpoints.pipeline("sd")
    pipe = diffusax.DiffusionPipeline.from_pretrained(folder)
    assert type(to_instruct_pix2pix(pipe).unet) is diffusax.UNet2DConditionModel

    class Own(diffusers.UNet2DConditionModel):
        pass

    own = Own.from_config(theirs.unet.config)
    pipe = diffusax.DiffusionPipeline.from_torch(
        diffusers.StableDiffusionPipeline(**{**theirs.components, "unet": own})
    )
    assert type(pipe.unet.network).__name__ == "TorchUNet"
    assert type(pipe.unet) is diffusax.UNet2DConditionModel


def test_a_class_of_ones_own_names_its_module(monkeypatch, tmp_path):
    monkeypatch.setattr(Model, "kinds", dict(Model.kinds))
    for name in ("Tiny", "Registered"):
        monkeypatch.delitem(MODELS, name, raising=False)
    module = type("Tiny", (MODELS["AutoencoderTiny"],), {})

    class Tiny(Model):
        module_class = module

    config = MODELS["AutoencoderTiny"].config_class()
    made = diffusax.networks.initialize(module, config)
    assert type(made) is Tiny
    assert MODELS["Tiny"] is module
    assert type(Tiny(made.network, made.params)) is Tiny
    # A module that is entered without a class is any model.
    MODELS["Registered"] = type("Registered", (MODELS["AutoencoderTiny"],), {})
    assert type(diffusax.networks.initialize(MODELS["Registered"], config)) is Model
    del MODELS["Registered"], MODELS["Tiny"]


def test_a_pipeline_with_a_class_of_ones_own_opens_in_pytorch(monkeypatch, tmp_path):
    monkeypatch.setattr(Model, "kinds", dict(Model.kinds))
    folder, saved = tmp_path / "given", tmp_path / "saved"
    theirs = tiny.build_stable_diffusion(folder, unet=tiny.SMALLEST_UNET, vae=tiny.SMALLEST_VAE)

    class HalvedModule(MODELS["UNet2DConditionModel"]):
        def __call__(self, *args, **kwargs):
            return super().__call__(*args, **kwargs) / 2

    class Halved(diffusax.UNet2DConditionModel):
        module_class = HalvedModule

    class Own(diffusax.UNet2DConditionModel):
        pass

    try:
        plain = diffusax.StableDiffusionPipeline.from_pretrained(folder)
        given = np.ones((1, 4, 8, 8), np.float32), 3, np.ones((1, 7, 32), np.float32)
        expected = plain.unet(*given).sample
        for kind, factor in ((Halved, 2), (Own, 1)):
            unet = kind.from_pretrained(folder / "unet")
            assert type(unet) is kind
            np.testing.assert_allclose(factor * unet(*given).sample, expected, atol=1e-5)
            pipe = diffusax.StableDiffusionPipeline.from_pretrained(folder, unet=unet)
            assert type(pipe.unet) is kind
            pipe.save_pretrained(saved)
            again = diffusers.StableDiffusionPipeline.from_pretrained(saved, safety_checker=None)
            assert type(again.unet) is diffusers.UNet2DConditionModel
            for name, value in theirs.unet.state_dict().items():
                np.testing.assert_array_equal(again.unet.state_dict()[name], value)
            same(kind.from_pretrained(saved / "unet"), unet)
            assert type(kind.from_config(theirs.unet.config)) is kind
            with pytest.raises(ValueError, match="holds a AutoencoderKL, not a"):
                kind.from_pretrained(saved / "vae")
    finally:
        MODELS.pop("HalvedModule", None)


@pytest.fixture(scope="module")
def unet():
    return diffusax.UNet2DConditionModel(
        **{**tiny.UNET["sd1"], **tiny.SMALLEST_UNET, "layers_per_block": 1}
    )


@pytest.fixture(scope="module")
def given():
    rng = np.random.default_rng(0)
    return rng.normal(size=(1, 4, 8, 8)), 3, rng.normal(size=(1, 7, 32))


def test_jit_takes_a_model_and_new_parameters_compile_nothing(unet, given):
    traces = []

    @jax.jit
    def predict(model, x, t, context):
        traces.append(type(model))
        return model(x, t, context).sample

    arrays = jax.tree.map(jnp.float32, given)
    np.testing.assert_allclose(predict(unet, *arrays), unet(*given).sample, atol=1e-5)
    predict(jax.tree.map(lambda x: 2 * x, unet), *arrays)
    assert traces == [diffusax.UNet2DConditionModel]


def test_losses_have_gradients_to_a_model(unet, given):
    arrays = jax.tree.map(jnp.float32, given)

    def loss(model):
        return (model(*arrays).sample ** 2).mean()

    @jax.jit
    def both(model):
        value, gradients = jax.value_and_grad(loss)(model)
        of_params = jax.grad(lambda p: loss(type(model)(model.network, p)))(model.params)
        return value, gradients, of_params

    value, gradients, of_params = both(unet)
    assert type(gradients) is diffusax.UNet2DConditionModel
    same(gradients.params, of_params)
    stepped = jax.tree.map(lambda p, g: p - 1e-3 * g, unet, gradients)
    assert both(stepped)[0] < value


def test_models_are_placed_described_and_copied(unet):
    device = jax.devices()[0]
    placed = jax.device_put(unet, SingleDeviceSharding(device))
    assert type(placed) is type(unet)
    assert placed.device == device
    same(placed, unet)
    shapes = jax.eval_shape(lambda model: model, unet)
    assert shapes.params["conv_in"]["kernel"].shape == unet.params["conv_in"]["kernel"].shape
    path, leaf = jax.tree_util.tree_leaves_with_path(unet)[0]
    assert jax.tree_util.keystr(path).startswith(".params['")
    assert leaf is jax.tree.leaves(unet.params)[0]
    for again in (copy.deepcopy(unet), pickle.loads(pickle.dumps(unet))):
        assert jax.tree.structure(again) == jax.tree.structure(unet)
        same(again, unet)


def test_switches_are_static_and_stay_with_the_model(unet):
    other = copy.deepcopy(unet)
    other.enable_freeu(s1=0.9, s2=0.2, b1=1.2, b2=1.4)
    mapped = jax.tree.map(lambda x: x, other)
    assert mapped.switches == other.switches
    assert mapped.switches is not other.switches
    assert jax.tree.structure(other) != jax.tree.structure(unet)
    hash(jax.tree.structure(other))
