"""Models under the names of PyTorch's modules, beside PyTorch's own."""

import copy
import pickle
from collections.abc import Mapping

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from diffusers.models.attention_processor import AttnProcessor2_0

import diffusax


@pytest.fixture(scope="module")
def folder(tiny_checkpoints):
    return tiny_checkpoints.pipeline("sd")[0]


@pytest.fixture
def unet(folder):
    return diffusax.UNet2DConditionModel.from_pretrained(folder, subfolder="unet")


@pytest.fixture(scope="module")
def theirs(folder):
    return diffusers.UNet2DConditionModel.from_pretrained(folder, subfolder="unet")


def test_parameters_go_to_pytorch_and_back(unet, theirs):
    other = diffusers.UNet2DConditionModel.from_config(theirs.config)
    other.load_state_dict({k: torch.tensor(v) for k, v in unet.state_dict().items()})
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor)
    doubled = {name: tensor * 2 for name, tensor in theirs.state_dict().items()}
    before = jax.tree.map(np.asarray, unet.params)
    assert unet.load_state_dict(doubled) == ([], [])
    jax.tree.map(np.testing.assert_array_equal, unet.params, jax.tree.map(lambda x: x * 2, before))
    first = next(iter(doubled))
    with pytest.raises(ValueError, match=rf"missing: {first}.*unexpected: foo"):
        unet.load_state_dict({**{k: v for k, v in doubled.items() if k != first}, "foo": 1.0})
    assert unet.load_state_dict({"foo": 1.0}, strict=False).unexpected_keys == ["foo"]
    with pytest.raises(ValueError, match=rf"misshapen: {first} \(has \(1,\)"):
        unet.load_state_dict({**doubled, first: torch.ones(1)})


def test_parameters_are_counted_and_written_as_pytorchs(unet, theirs):
    ours = {name: tuple(p.shape) for name, p in unet.named_parameters()}
    assert ours == {name: tuple(p.shape) for name, p in theirs.named_parameters()}
    assert sum(p.numel() for p in unet.parameters()) == theirs.num_parameters()
    assert sum(p.numel() for p in unet.parameters() if p.requires_grad) == theirs.num_parameters()
    assert unet.get_memory_footprint() == theirs.get_memory_footprint()
    unet.requires_grad_(False)
    assert not [p for p in unet.parameters() if p.requires_grad]
    assert unet.num_parameters(only_trainable=True) == 0
    kernel = unet.get_parameter("conv_in.weight")
    assert np.array_equal(kernel, theirs.conv_in.weight.detach())
    kernel.data[1] = 3.0
    assert np.asarray(unet.params["conv_in"]["kernel"])[..., 1].tolist() == (
        np.full(kernel.shape[2:] + kernel.shape[1:2], 3.0).tolist()
    )
    with pytest.raises(ValueError, match=r"conv_in.weight must keep the shape \(32, 4, 3, 3\)"):
        kernel.copy_(np.ones(3))


@pytest.mark.slow
def test_dtypes_devices_and_modes(unet):
    assert unet.half().dtype == jnp.float16
    assert unet.to("cpu", torch.bfloat16).dtype == jnp.bfloat16
    assert unet.float().cuda().cpu().eval().train().compile() is unet
    parameter = next(unet.parameters())
    assert (parameter.dtype, parameter.device) == (jnp.float32, unet.device)


def test_configs_are_read_as_diffusers(unet, theirs, folder):
    def plain(value):
        return list(value) if isinstance(value, tuple) else value

    for name, value in theirs.config.items():
        if name not in ("_name_or_path", "_diffusers_version"):
            assert plain(unet.config[name]) == plain(value), name
    assert {*dict(unet.config)} == {*theirs.config} - {"_name_or_path", "_diffusers_version"}
    assert unet.config.get("sample_size") == unet.config.sample_size == 16
    assert unet.config.get("nothing", 3) == 3
    assert "nothing" not in unet.config
    assert isinstance(unet.config, Mapping)
    assert len(unet.config) == len({**unet.config}) == len([*unet.config.items()])
    assert {unet.config: 1}[pickle.loads(pickle.dumps(unet.config))] == 1
    with pytest.raises(TypeError):
        unet.config["in_channels"] = 9
    assert diffusax.UNet2DConditionModel.from_config({**unet.config}).config == unet.config
    assert unet.config.act_fn == theirs.config.act_fn
    with pytest.raises(KeyError, match="nothing"):
        _ = unet.config["nothing"]
    with pytest.raises(AttributeError, match="UNet2DConditionConfig has no option 'nothing'"):
        _ = unet.config.nothing
    again = diffusax.UNet2DConditionModel.from_config(unet.config)
    assert again.network == unet.network
    assert isinstance(again, diffusax.UNet2DConditionModel)
    assert not isinstance(again, diffusax.AutoencoderKL)
    from diffusax.models import UNet2DConditionModel as Module

    assert Module.from_pretrained(folder, subfolder="unet").network == unet.network


def test_plain_attention_is_taken_and_another_refused(unet, theirs):
    assert {*unet.attn_processors} == {*theirs.attn_processors}
    unet.set_attn_processor(AttnProcessor2_0())
    unet.set_attn_processor(unet.attn_processors)
    unet.set_default_attn_processor()
    unet.enable_gradient_checkpointing()
    unet.enable_xformers_memory_efficient_attention()

    class Watching:
        pass

    with pytest.raises(ValueError, match=r"processor must be one of plain .* \(got Watching\)"):
        unet.set_attn_processor({"mid_block": Watching()})


@pytest.mark.slow
def test_copies_and_pickles_hold_the_model_alone(unet):
    store = {"vae": jnp.zeros(10**6)}
    bound = unet.bound_to(store, "unet")
    for again in (copy.deepcopy(bound), pickle.loads(pickle.dumps(bound))):
        assert again.network == unet.network
        jax.tree.map(np.testing.assert_array_equal, again.params, unet.params)
    assert len(pickle.dumps(bound)) < 4_000_000


def test_a_network_of_changed_options_leaves_out_what_it_lacks(folder):
    options = {"subfolder": "text_encoder", "num_hidden_layers": 2}
    ours = diffusax.CLIPTextModel.from_pretrained(folder, **options)
    theirs = transformers.CLIPTextModel.from_pretrained(folder, **options)
    assert ours.num_parameters() == theirs.num_parameters()
    assert ours.config.num_hidden_layers == 2


def test_tables_of_tokens_grow_as_transformers(folder):
    ours = diffusax.CLIPTextModel.from_pretrained(folder, subfolder="text_encoder")
    theirs = transformers.CLIPTextModel.from_pretrained(folder, subfolder="text_encoder")
    size = ours.config.vocab_size
    for encoder in (ours, theirs):
        encoder.resize_token_embeddings(size + 2)
        with torch.no_grad():
            encoder.get_input_embeddings().weight.data[size] = torch.arange(32.0) / 9
        assert encoder.config.vocab_size == size + 2
    table = ours.get_input_embeddings()
    assert (table.num_embeddings, table.embedding_dim) == (size + 2, ours.config.hidden_size)
    ids = np.array([[5, size, 7]])
    assert np.array_equal(table(ids)[0, 1], np.float32(np.arange(32.0) / 9))
    expected = theirs(torch.tensor(ids)).last_hidden_state.detach()
    np.testing.assert_allclose(ours(ids).last_hidden_state, expected, atol=1e-5)
    ours.resize_token_embeddings(size)
    assert ours.config.vocab_size == size
    with pytest.raises(ValueError, match="is no CLIP text encoder"):
        diffusax.AutoencoderKL.from_pretrained(folder, subfolder="vae").resize_token_embeddings(3)
