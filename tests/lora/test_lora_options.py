"""What PEFT writes beside a LoRA's tensors, and keys that are not applied."""

import json
import warnings

import diffusers
import jax
import numpy as np
import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.tiny import TEXT, UNET, randomize

from diffusax import lora
from diffusax.lora.changes import delta, merge
from diffusax.models import CLIPTextConfig, CLIPTextModel, UNet2DConditionConfig
from diffusax.models import UNet2DConditionModel as OurUNet
from diffusax.models.network import Network

LAYER = "mid_block.attentions.0.transformer_blocks.0.attn1.to_q"
UNET_NETWORK = Network(OurUNet, UNet2DConditionConfig(**UNET["sd1"]))


@pytest.fixture(scope="module")
def unet():
    return randomize(diffusers.UNet2DConditionModel(**UNET["sd1"])).requires_grad_(False)


def changes_in(source, **networks):
    """The changes of a network's parameters by path."""
    file = lora.read_lora(source)
    made = lora.lora_of_layers(lora.find_layers(file, networks), file, networks)
    return {name: change for _, name, change in made.parameter_changes(products=True)}


CONFIGS = {
    "lora": peft.LoraConfig(r=4, lora_alpha=6, use_rslora=True, alpha_pattern={"conv1": 3}),
    "loha": peft.LoHaConfig(r=4, alpha=6, rank_pattern={"conv1": 2}, use_effective_conv2d=True),
    "lokr": peft.LoKrConfig(r=4, alpha=6, decompose_both=True, use_effective_conv2d=True),
    # Both factors are whole, and PEFT scales their product all the same.
    "lokr-whole": peft.LoKrConfig(r=99, alpha=60),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_folder_of_peft_has_the_scale_of_its_config(unet, tmp_path, name):
    config = CONFIGS[name]
    config.target_modules = [LAYER, "mid_block.resnets.0.conv1"]
    before = {key: x.clone() for key, x in unet.state_dict().items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = peft.get_peft_model(unet, config)
        generator = torch.Generator().manual_seed(0)
        for key, parameter in adapted.named_parameters():
            if ".default" in key:
                parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3
        adapted.save_pretrained(tmp_path)
        merged = {k: x.clone() for k, x in adapted.merge_and_unload().state_dict().items()}
    unet.load_state_dict(before)
    found = changes_in(tmp_path, unet=UNET_NETWORK)
    assert set(found) == {f"{target}.kernel" for target in config.target_modules}
    for path, change in found.items():
        key = path.replace(".kernel", ".weight")
        expected = (merged[key] - before[key]).numpy()
        assert np.abs(expected).max() > 0.02
        pairs = [delta(change, before[key].numpy(), 1.0)]
        np.testing.assert_allclose(pairs[0], expected, atol=1e-5)


def test_a_lora_of_a_table_is_that_of_peft():
    text = transformers.CLIPTextConfig(**TEXT, vocab_size=99, max_position_embeddings=16)
    model = randomize(transformers.CLIPTextModel(text)).requires_grad_(False)
    config = peft.LoraConfig(
        r=3, lora_alpha=3, target_modules=["token_embedding"], init_lora_weights=False
    )
    before = model.get_input_embeddings().weight.clone()
    adapted = peft.get_peft_model(model, config)
    tensors = peft.get_peft_model_state_dict(adapted)
    after = adapted.merge_and_unload().get_input_embeddings().weight
    own = CLIPTextConfig(**TEXT, vocab_size=99, max_position_embeddings=16)
    network = Network(CLIPTextModel, own)
    prefix = "base_model.model."
    given = {f"text_encoder.{key.removeprefix(prefix)}": x for key, x in tensors.items()}
    ((name, change),) = changes_in(given, text_encoder=network).items()
    assert name.endswith("token_embedding.embedding")
    np.testing.assert_allclose(merge(before.numpy(), [change], [1.0], False), after, atol=1e-6)


def test_names_of_adapters_and_forms_of_alpha_change_nothing():
    rng = np.random.default_rng(0)
    down, up = rng.normal(size=(4, 64)), rng.normal(size=(64, 4))
    expected = 0.5 * up @ down
    for name in ("", ".default", ".my-style", ".Style_2"):
        for alpha in (np.array([2.0]), np.int64(2), np.float32(2), np.array([[2]], np.uint8)):
            tensors = {f"unet.{LAYER}.lora_A{name}.weight": down}
            tensors |= {f"unet.{LAYER}.lora_B{name}.weight": up, f"unet.{LAYER}.alpha": alpha}
            ((_, change),) = changes_in(tensors, unet=UNET_NETWORK).items()
            weight = jax.ShapeDtypeStruct((64, 64), np.float32)
            np.testing.assert_allclose(delta(change, weight, 1.0), expected, atol=1e-5)


@pytest.mark.parametrize(
    "prefix", ["unet.", "lora_unet_", "diffusion_model.", "model.diffusion_model.", "lycoris_"]
)
def test_the_original_names_of_a_unet_have_dots_or_underscores(prefix):
    layer = "middle_block.1.transformer_blocks.0.attn1.to_q"
    if prefix == "unet.":
        layer = LAYER
    elif not prefix.endswith("."):
        layer = layer.replace(".", "_")
    ones = {"lora_down.weight": np.ones((4, 64)), "lora_up.weight": np.ones((64, 4))}
    tensors = {f"{prefix}{layer}.{key}": x for key, x in ones.items()}
    assert set(changes_in(tensors, unet=UNET_NETWORK)) == {f"{LAYER}.kernel"}


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("unet.conv_in.bias", "a whole bias, as PEFT's bias='all' and 'lora_only'"),
        ("unet.conv_norm_out.weight", "a whole weight, as PEFT's modules_to_save"),
        (f"unet.{LAYER}.modules_to_save.weight", "a whole weight, as PEFT's modules_to_save"),
        ("oft_unet_mid_block_attentions_0_proj_in.oft_blocks", "OFT or BOFT"),
        (f"unet.{LAYER}.boft_R", "OFT or BOFT"),
        (f"lora_unet_{LAYER.replace('.', '_')}.b1.weight", "GLoRA"),
        ("base_model.vera_A", "VeRA"),
        (f"base_model.model.{LAYER}.vera_lambda_d", "VeRA"),
        (f"base_model.model.{LAYER}.ia3_l", "IA3 in PEFT's layout"),
        ("bundle_emb.word.string_to_param.*", "OneTrainer's embeddings"),
    ],
)
def test_keys_that_are_not_applied_are_named(key, message):
    pair = {f"unet.{LAYER}.lora_A.weight": np.ones((4, 64))}
    pair |= {f"unet.{LAYER}.lora_B.weight": np.ones((64, 4))}
    given = {**pair, key: np.ones(32)}
    with pytest.raises(ValueError, match=f"is of .*{message}.*strict=False leaves out") as error:
        changes_in(given, unet=UNET_NETWORK)
    assert repr(key) in str(error.value)
    file = lora.read_lora(given)
    layers = lora.find_layers(file, {"unet": UNET_NETWORK}, strict=False)
    assert set(layers) == {("unet", LAYER)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"r": 8}, "has a rank of 4, where PEFT's options say 8"),
        ({"rank_pattern": {"attn1.to_q": 6}}, "has a rank of 4, where PEFT's options say 6"),
        ({"peft_type": "BOFT"}, "of PEFT's peft_type='BOFT'; those that are applied are LORA"),
        ({"init_lora_weights": "pissa_niter_4"}, "changes the model's own weights, too; save it"),
        ({"init_lora_weights": "olora"}, "changes the model's own weights, too; save it"),
        ({"alora_invocation_tokens": [3]}, r"alora_invocation_tokens=\[3\] .* is not applied"),
        ({"target_parameters": ["x"]}, "target_parameters=.* is not applied"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices=.* is not applied"),
    ],
)
@pytest.mark.parametrize("beside", [False, True])
def test_options_that_do_not_fit_are_named(tmp_path, options, message, beside):
    path = tmp_path / ("adapter_model.safetensors" if beside else "x.safetensors")
    pair = {
        f"{LAYER}.lora_A.weight": torch.ones(4, 64),
        f"{LAYER}.lora_B.weight": torch.ones(64, 4),
    }
    given = {"lora_alpha": 4, "r": 4, "init_lora_weights": "gaussian", **options}
    if beside:
        save_file(pair, path)
        (tmp_path / "adapter_config.json").write_text(json.dumps(given))
    else:
        text = json.dumps({f"unet.{name}": value for name, value in given.items()})
        named = {f"unet.{key}": tensor for key, tensor in pair.items()}
        save_file(named, path, {"lora_adapter_metadata": text})
    with pytest.raises(ValueError, match=message) as error:
        changes_in(path, unet=UNET_NETWORK)
    assert str(path) in str(error.value)
    assert load_file(path)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"lora_A.weight": (0, 64), "lora_B.weight": (64, 0)}, "has a rank of 0"),
        ({"lora_B.bias": (64,)}, "to_q has bias but not down"),
        ({"lora_A.weight": (4, 64), "lora_B.weight": (64, 4), "lora_B.bias": (3,)}, "bias is .3,"),
        (
            {"lora_A.weight": (4, 64), "lora_B.weight": (64, 4), "lora_B.bias": (64,)}
            | {"lora_magnitude_vector": (64,)},
            "has a bias of B, which PEFT has neither with DoRA nor for tables",
        ),
    ],
)
def test_tensors_that_make_no_product_are_named(tensors, message):
    given = {f"unet.{LAYER}.{name}": np.ones(shape) for name, shape in tensors.items()}
    with pytest.raises(ValueError, match=message):
        changes_in(given, unet=UNET_NETWORK)
