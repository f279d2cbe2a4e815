"""Single files of Wan, as its authors, ComfyUI and ComfyUI-GGUF have them."""

import diffusers
import numpy as np
import pytest
import torch
import transformers
from diffusers.loaders import single_file_utils
from safetensors.torch import load_file, save_file
from support.pairs import picture
from support.quantised import encoded, marking, save_gguf
from support.single_files import hollow, prefixed, wan22_name
from support.tiny import randomize
from support.tiny_transformers import (
    WAN22_VAE,
    wan_autoencoder,
    wan_image_components,
    wan_pipeline,
    wan_transformer,
    wan_vace_transformer,
)

import diffusax
from diffusax.checkpoints.converting import pack_single_file, unpack_single_file
from diffusax.checkpoints.networks import network_of, read_network
from diffusax.checkpoints.original.transformers import ORIGINALS, transformer_names
from diffusax.checkpoints.original.wan import umt5_names
from diffusax.checkpoints.single_file import (
    Reading,
    named_entries,
    opened_view,
    part_of,
    read_contents,
)
from diffusax.checkpoints.single_file.autoencoder_configs import WAN22
from diffusax.checkpoints.tree import params_to_tensors, torch_shapes

PLACES = "condition_embedder.image_embedder.pos_embed"
SMALL = {"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30}
SEES = {"in_channels": 36, "image_dim": 1280, "added_kv_proj_dim": 5120}
NETWORKS = {
    "2.1 T2V 1.3B": SMALL,
    "2.1 T2V 14B and 2.2 A14B": {},
    "2.1 I2V 14B": SEES,
    "2.1 FLF2V 14B": {**SEES, "pos_embed_seq_len": 514},
    "2.2 I2V A14B": {"in_channels": 36},
    "2.2 TI2V 5B": {
        **{"num_attention_heads": 24, "ffn_dim": 14336, "num_layers": 30},
        **{"in_channels": 48, "out_channels": 48},
    },
    "2.1 VACE 1.3B": {**SMALL, "vace_layers": list(range(0, 30, 2))},
    "2.1 VACE 14B": {"vace_layers": list(range(0, 40, 5))},
}
REPOSITORIES = {
    "2.1 T2V 1.3B": "Wan2.1-T2V-1.3B-Diffusers",
    "2.1 T2V 14B and 2.2 A14B": "Wan2.1-T2V-14B-Diffusers",
    "2.1 I2V 14B": "Wan2.1-I2V-14B-480P-Diffusers",
    "2.1 FLF2V 14B": "Wan2.1-FLF2V-14B-720P-diffusers",
    "2.2 I2V A14B": "Wan2.2-I2V-A14B-Diffusers",
    "2.2 TI2V 5B": "Wan2.2-TI2V-5B-Diffusers",
    "2.1 VACE 1.3B": "Wan2.1-VACE-1.3B-diffusers",
    "2.1 VACE 14B": "Wan2.1-VACE-14B-diffusers",
}


def same(params, expected):
    """Asserts that parameters are these numbers, bit for bit."""
    ours = params_to_tensors(params)
    assert ours.keys() == expected.keys()
    for name, array in ours.items():
        np.testing.assert_array_equal(array, expected[name].float(), err_msg=name)


TRANSFORMERS = {
    "text": lambda: wan_transformer(),
    "images": lambda: wan_image_components(places=10)["transformer"],
    "control": lambda: wan_vace_transformer(),
}


@pytest.fixture(scope="module", params=TRANSFORMERS)
def made(tmp_path_factory, request):
    """A transformer of PyTorch, its folder, and its tensors in the original layout."""
    folder, network = tmp_path_factory.mktemp("wan"), TRANSFORMERS[request.param]()
    network.save_pretrained(folder / "transformer")
    pack_single_file(folder / "transformer", folder / "packed.safetensors")
    return network, folder / "transformer", load_file(folder / "packed.safetensors")


def test_what_is_written_is_read_by_diffusers(made):
    network, _, stored = made
    expected = network.state_dict()
    theirs = single_file_utils.convert_wan_transformer_to_diffusers(dict(stored))
    if PLACES in expected:
        # diffusers reads them in a script of its repository alone.
        theirs[PLACES] = theirs.pop("img_emb.emb_pos")
    assert theirs.keys() == expected.keys()
    for key, tensor in expected.items():
        torch.testing.assert_close(theirs[key], tensor, rtol=0, atol=0)


@pytest.mark.parametrize("prefix", ["model.diffusion_model.", ""])
@pytest.mark.parametrize("layout", ["original", "diffusers"])
def test_a_transformer_alone(made, tmp_path, prefix, layout):
    network, folder, stored = made
    tensors = stored if layout == "original" else network.state_dict()
    path = tmp_path / "alone.safetensors"
    save_file(prefixed(prefix, tensors), path)
    kind = getattr(diffusax, type(network).__name__)
    same(kind.from_single_file(path, config=folder).params, network.state_dict())
    assert kind.from_single_file(path, config=folder.parent, subfolder="transformer").params
    with pytest.raises(ValueError, match="of other widths than any"):
        kind.from_single_file(path)


def test_files_of_fewer_bits(tmp_path):
    """ComfyUI's scaled float8 and ComfyUI-GGUF's blocks, which leave the patches as they are."""
    wide = {"num_attention_heads": 4, "attention_head_dim": 32, "ffn_dim": 128, "text_dim": 64}
    network = wan_transformer(**wide)
    network.save_pretrained(tmp_path / "transformer")
    pack_single_file(tmp_path / "transformer", tmp_path / "packed.safetensors")
    stored = load_file(tmp_path / "packed.safetensors")
    assert stored["patch_embedding.weight"].ndim == 5
    eight, numbers = encoded(stored, "fp8 of ComfyUI")
    save_file(prefixed("model.diffusion_model.", eight), tmp_path / "eight.safetensors")
    four = save_gguf(tmp_path / "four.gguf", stored, "Q4_0", architecture="wan")
    changed = [k for k in stored if not torch.equal(numbers[k].float(), stored[k].float())]
    assert "blocks.1.cross_attn.k.weight" in changed
    assert not torch.equal(four["blocks.0.ffn.0.weight"], stored["blocks.0.ffn.0.weight"])
    for name, expected in (("eight.safetensors", numbers), ("four.gguf", four)):
        found = diffusax.WanTransformer3DModel.from_single_file(
            tmp_path / name, config=tmp_path / "transformer", weights=None
        )
        same(found.params, single_file_utils.convert_wan_transformer_to_diffusers(dict(expected)))


@pytest.mark.parametrize("kind", NETWORKS)
def test_the_configs_of_the_real_transformers_are_in_the_package(tmp_path, kind):
    vace = "vace_layers" in NETWORKS[kind]
    name = f"Wan{'VACE' if vace else ''}Transformer3DModel"
    network = network_of(name, NETWORKS[kind], source="a test")
    shapes = torch_shapes(network.shapes)
    names = {own.paths[0]: theirs for theirs, own in transformer_names(network).items()}
    stored = {}
    for key, shape in shapes.items():
        module, _, leaf = key.rpartition(".")
        leaf = "modulation" if leaf == "scale_shift_table" else leaf
        own = {v: k for k, v in ORIGINALS[name].parameters.items()}.get(key)
        stored[own or f"{names[module]}.{leaf}"] = shape
    path = hollow(tmp_path / "real.safetensors", stored)
    with opened_view(path, Reading(), "transformer") as folder:
        found, part = read_network(folder), part_of(folder)
        assert found == network
        entries = named_entries(part, found)
    assert {k: e.shape for k, e in entries.items()} == shapes
    with (
        pytest.raises(ValueError, match=f"such as 'Wan-AI/{REPOSITORIES[kind]}'"),
        opened_view(path, Reading()),
    ):
        pass


DEPTH = {"dim_mult": [1, 2, 4, 4], "num_res_blocks": 2, "z_dim": 16}


@pytest.mark.parametrize("ending", [".safetensors", ".pth"])
def test_the_autoencoder_of_2_1(tmp_path, ending):
    """Of the depth of the real one, which diffusers' conversion is written for."""
    config = diffusers.AutoencoderKLWan().config
    statistics = {name: config[name] for name in ("latents_mean", "latents_std")}
    network = wan_autoencoder(**DEPTH, **statistics)
    network.save_pretrained(tmp_path / "vae")
    pack_single_file(tmp_path / "vae", tmp_path / "packed.safetensors")
    stored, expected = load_file(tmp_path / "packed.safetensors"), network.state_dict()
    theirs = single_file_utils.convert_wan_vae_to_diffusers(dict(stored))
    assert theirs.keys() == expected.keys()
    for key, tensor in expected.items():
        torch.testing.assert_close(theirs[key], tensor, rtol=0, atol=0)
    path = tmp_path / f"vae{ending}"
    if ending == ".pth":
        torch.save(stored, path)
    else:
        save_file(prefixed("vae.", stored), path)
    ours = diffusax.AutoencoderKLWan.from_single_file(path)
    assert ours.config == diffusax.AutoencoderKLWan.from_pretrained(tmp_path / "vae").config
    same(ours.params, expected)
    unpack_single_file(path, tmp_path / "again", Reading(tmp_path / "vae"))
    again = diffusers.AutoencoderKLWan.from_pretrained(tmp_path / "again").state_dict()
    for key, tensor in expected.items():
        torch.testing.assert_close(again[key], tensor, rtol=0, atol=0)


def test_the_autoencoder_of_2_2(tmp_path):
    network = wan_autoencoder(**{**WAN22_VAE, "num_res_blocks": 2})
    network.save_pretrained(tmp_path / "vae")
    expected = network.state_dict()
    stored = {wan22_name(k): x for k, x in expected.items()}
    save_file(prefixed("", stored), tmp_path / "vae.safetensors")
    ours = diffusax.AutoencoderKLWan.from_single_file(
        tmp_path / "vae.safetensors", config=tmp_path / "vae"
    )
    same(ours.params, expected)
    with pytest.raises(ValueError, match="has other latents"):
        diffusax.AutoencoderKLWan.from_single_file(tmp_path / "vae.safetensors")
    pack_single_file(tmp_path / "vae", tmp_path / "packed.safetensors")
    assert load_file(tmp_path / "packed.safetensors").keys() == stored.keys()


def test_the_configs_of_the_real_autoencoders_are_in_the_package(tmp_path):
    of_22 = {**WAN22, "base_dim": 160, "decoder_base_dim": 256, "z_dim": 48}
    of_22 |= {"in_channels": 12, "out_channels": 12}
    for options in ({}, of_22):
        network = network_of("AutoencoderKLWan", options, source="a test")
        shapes = torch_shapes(network.shapes)
        path = tmp_path / f"{len(options)}.safetensors"
        with opened_view(
            hollow(path, {wan22_name(k) if options else k: x for k, x in shapes.items()}),
            # Qwen-Image's has the names and sizes of that of 2.1.
            Reading(class_name=None if options else "AutoencoderKLWan"),
            "vae",
        ) as folder:
            assert read_network(folder) == network
            entries = named_entries(part_of(folder), network)
        assert {k: e.shape for k, e in entries.items()} == shapes


def umt5():
    config = transformers.UMT5Config(
        **{"d_model": 64, "d_kv": 32, "d_ff": 128, "num_layers": 2, "num_heads": 2},
        **{"vocab_size": 50, "relative_attention_num_buckets": 8},
    )
    return randomize(transformers.UMT5EncoderModel(config), 4).requires_grad_(False)


def test_text_encoders(tmp_path):
    """As ComfyUI has it, also in float8, and as Wan's authors do."""
    module = umt5()
    module.save_pretrained(tmp_path / "folder")
    state = {k: x for k, x in module.state_dict().items() if k != "encoder.embed_tokens.weight"}
    words = {"spiece_model": marking(a="the words of the tokenizer")}
    names = {ours: theirs for theirs, ours in umt5_names(module.config).items()}
    original = {f"{names[k.removesuffix('.weight')]}.weight": x for k, x in state.items()}
    assert "blocks.1.ffn.gate.0.weight" in original
    assert "blocks.0.pos_embedding.embedding.weight" in original
    save_file(prefixed("", state | words), tmp_path / "plain.safetensors")
    eight, numbers = encoded(state, "fp8 of ComfyUI")
    save_file(prefixed("", eight | words), tmp_path / "eight.safetensors")
    torch.save(original, tmp_path / "models_t5.pth")
    save_file(prefixed("", original), tmp_path / "original.safetensors")
    for name in ("plain.safetensors", "eight.safetensors", "models_t5.pth", "original.safetensors"):
        found = diffusax.UMT5EncoderModel.from_single_file(
            tmp_path / name, config=tmp_path / "folder", weights=None
        )
        same(found.params, numbers if name.startswith("eight") else state)
    with pytest.raises(ValueError, match="holds text_encoder, but not a second"):
        diffusax.T5EncoderModel.from_single_file(tmp_path / "plain.safetensors")


def test_the_config_of_the_real_text_encoder_is_in_the_package(tmp_path):
    options = {"d_model": 4096, "d_ff": 10240, "num_layers": 24, "num_heads": 64}
    network = network_of("UMT5EncoderModel", {**options, "vocab_size": 256384}, source="a test")
    shapes = torch_shapes(network.shapes)
    with opened_view(hollow(tmp_path / "a.safetensors", shapes), Reading(), "text_encoder") as own:
        assert read_network(own) == network


CALL = {"height": 16, "width": 32, "num_frames": 5, "num_inference_steps": 2}
CALL |= {"max_sequence_length": 24, "output_type": "np"}


def frames(pipe, **call):
    pipe.set_progress_bar_config(disable=True)
    given = {"prompt": "a photo of a cat", **CALL, **call}
    return pipe(**given, generator=torch.Generator().manual_seed(0)).frames


def test_a_pipeline_of_two_files(tmp_path):
    """The file is the transformer of the noisier steps; the other one is given."""
    more = {"transformer_2": wan_transformer(7), "boundary_ratio": 0.8}
    theirs = wan_pipeline(tmp_path / "folder", **more)
    for name in ("transformer", "transformer_2", "vae"):
        pack_single_file(tmp_path / "folder" / name, tmp_path / f"{name}.safetensors")
    given = {"config": tmp_path / "folder"}
    parts = {
        "transformer_2": diffusax.WanTransformer3DModel.from_single_file(
            tmp_path / "transformer_2.safetensors", subfolder="transformer_2", **given
        ),
        "vae": diffusax.AutoencoderKLWan.from_single_file(tmp_path / "vae.safetensors", **given),
        "text_encoder": diffusax.UMT5EncoderModel.from_pretrained(
            tmp_path / "folder", subfolder="text_encoder"
        ),
    }
    high = tmp_path / "transformer.safetensors"
    ours = diffusax.WanPipeline.from_single_file(high, **given, **parts)
    np.testing.assert_allclose(frames(ours), frames(theirs), atol=1e-4)
    del parts["transformer_2"]
    with pytest.raises(ValueError, match=r"second transformer, .*give transformer_2="):
        diffusax.WanPipeline.from_single_file(high, **given, **parts)
    with pytest.raises(ValueError, match="has two transformers, and a single file holds one"):
        pack_single_file(tmp_path / "folder", tmp_path / "all.safetensors")


@pytest.mark.parametrize("kind", ["images", "control"])
def test_pipelines_of_one_file(tmp_path, kind):
    """Whole ones, as ComfyUI has them, but for what reads images."""
    of_images = kind == "images"
    parts = wan_image_components() if of_images else {"transformer": wan_vace_transformer()}
    name = "WanImageToVideoPipeline" if of_images else "WanVACEPipeline"
    theirs = wan_pipeline(tmp_path / "folder", name, **parts)
    pack_single_file(tmp_path / "folder", tmp_path / "all.safetensors")
    assert {*read_contents(tmp_path / "all.safetensors").parts} == {
        *("transformer", "vae", "text_encoder")
    }
    given = {}
    if of_images:
        given["image_encoder"] = diffusax.CLIPVisionModel.from_pretrained(
            tmp_path / "folder", subfolder="image_encoder"
        )
    ours = diffusax.DiffusionPipeline.from_single_file(
        tmp_path / "all.safetensors", config=tmp_path / "folder", **given
    )
    assert type(ours).__name__ == name
    call = {}
    if of_images:
        call = {"image": picture(0, 48, 24), "max_sequence_length": 512}
    np.testing.assert_allclose(frames(ours, **call), frames(theirs, **call), atol=1e-4)
