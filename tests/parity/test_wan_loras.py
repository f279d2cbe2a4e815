"""LoRA files for Wan in the formats that are shipped, against diffusers with the same files."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.effort import few
from support.lora_files import kohya, numbers, pair
from support.pairs import picture
from support.tiny_transformers import wan_image_components, wan_pipeline, wan_transformer

import diffusax
from diffusax.cli.convert_lora import ConvertLora

RANK = 4
NAMES = {
    "attn1": "self_attn",
    "attn2": "cross_attn",
    "to_out.0": "o",
    "to_q": "q",
    "to_k": "k",
    "to_v": "v",
    "add_k_proj": "k_img",
    "add_v_proj": "v_img",
    "ffn.net.0.proj": "ffn.0",
    "ffn.net.2": "ffn.2",
    "condition_embedder.time_embedder.linear_1": "time_embedding.0",
    "condition_embedder.time_embedder.linear_2": "time_embedding.2",
    "condition_embedder.text_embedder.linear_1": "text_embedding.0",
    "condition_embedder.text_embedder.linear_2": "text_embedding.2",
    "condition_embedder.time_proj": "time_projection.1",
    "condition_embedder.image_embedder.ff.net.0.proj": "img_emb.proj.1",
    "condition_embedder.image_embedder.ff.net.2": "img_emb.proj.3",
    "proj_out": "head.head",
}
CALL = {"height": 16, "width": 32, "num_frames": 5, "num_inference_steps": 2}
CALL |= {"max_sequence_length": 24, "guidance_scale": 3.0, "output_type": "np"}


def opened(folder, kind="WanPipeline", **parts):
    theirs = wan_pipeline(folder, kind, **parts)
    ours = diffusax.DiffusionPipeline.from_pretrained(folder)
    ours.set_progress_bar_config(disable=True)
    return theirs, ours


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    return opened(tmp_path_factory.mktemp("wan"))


@pytest.fixture(scope="module")
def of_images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wan-images")
    return opened(folder, "WanImageToVideoPipeline", **wan_image_components())


@pytest.fixture(scope="module")
def of_two(tmp_path_factory):
    parts = {"transformer_2": wan_transformer(7), "boundary_ratio": 0.9}
    return opened(tmp_path_factory.mktemp("wan-two"), **parts)


def products(network, start="", seed=5):
    """A and B of each linear layer in PyTorch's layout, by the original names."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, layer in network.named_modules():
        if isinstance(layer, torch.nn.Linear) and name.startswith(start) and "lora" not in name:
            found[original_name(name)] = pair(layer.weight, RANK, generator)
    return found


def original_name(name):
    """The name of a layer in the code of Wan's authors."""
    for ours, theirs in NAMES.items():
        at = f".{name}".find(f".{ours}")
        if at >= 0:
            name = name[:at] + theirs + name[at + len(ours) :]
    return name


def comfyui(layers, ends=("lora_A", "lora_B"), alphas=False):
    found = {}
    for name, own in layers.items():
        for end, x in zip(ends, own):
            found[f"diffusion_model.{name}.{end}.weight"] = x
        if alphas and name.startswith("blocks."):
            found[f"diffusion_model.{name}.alpha"] = torch.tensor(2.0)
    return found


def distilled(layers):
    """As CausVid's and LightX2V's: biases gain something, and norms nothing."""
    found = comfyui(layers, ("lora_down", "lora_up"), alphas=True)
    generator = torch.Generator().manual_seed(8)
    for name, (_, up) in layers.items():
        found[f"diffusion_model.{name}.diff_b"] = numbers((len(up),), generator)
    width = 24 if "blocks.0.ffn.0" not in layers else layers["blocks.0.ffn.0"][0].shape[1]
    found["diffusion_model.blocks.0.norm3.diff"] = torch.zeros(width)
    found["diffusion_model.blocks.0.self_attn.norm_q.diff"] = torch.zeros(width)
    head = layers["head.head"]
    for end in ("lora_down", "lora_up"):
        del found[f"diffusion_model.head.head.{end}.weight"]
    found["diffusion_model.head.head.diff"] = head[1] @ head[0]
    return found


FORMATS = {
    "comfyui": (comfyui, ""),
    "lightx2v": (distilled, ""),
    "alphas": (lambda layers: comfyui(layers, ("lora_down", "lora_up"), alphas=True), ""),
    "musubi": (kohya, "blocks."),
}


def frames(pipe, **call):
    seed = {"generator": torch.Generator().manual_seed(3)}
    return pipe(**{"prompt": "a photo of a cat", **CALL, **seed, **call}).frames


def saved(path, tensors):
    save_file({key: x.clone().contiguous() for key, x in tensors.items()}, path)
    return str(path)


@pytest.mark.parametrize("name", few(FORMATS, "lightx2v", "musubi"))
def test_every_format_is_drawn_as_by_diffusers(both, tmp_path, name):
    theirs, ours = both
    build, start = FORMATS[name]
    path = saved(tmp_path / "lora.safetensors", build(products(theirs.transformer, start)))
    plain = frames(ours)
    for pipe in both:
        pipe.load_lora_weights(path, adapter_name=name)
    # Only the head, which has a whole matrix, is merged; other biases run beside the parameters.
    merged = {"transformer": 2} if name == "lightx2v" else {}
    assert {k: len(own) for k, own in ours.adapters[name].changes.items()} == merged
    try:
        expected, found = frames(theirs), frames(ours)
        np.testing.assert_allclose(found, expected, atol=1e-4)
        assert np.abs(plain - expected).max() > 0.01
    finally:
        for pipe in both:
            pipe.unload_lora_weights()


@pytest.mark.parametrize("kind", ["of text", "of images"])
def test_loras_for_networks_that_see_images(of_images, tmp_path, kind):
    """One that was trained without them leaves the layers for images as they are."""
    theirs, ours = of_images
    layers = products(theirs.transformer)
    if kind == "of text":
        layers = {k: x for k, x in layers.items() if "_img" not in k and "img_emb" not in k}
    path = saved(tmp_path / "lora.safetensors", comfyui(layers))
    call = {"image": picture(0, 48, 24), "max_sequence_length": 512}
    plain = frames(ours, **call)
    for pipe in of_images:
        pipe.load_lora_weights(path)
    expected, found = frames(theirs, **call), frames(ours, **call)
    for pipe in of_images:
        pipe.unload_lora_weights()
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert np.abs(plain - expected).max() > 0.01


@pytest.mark.parametrize("names", [("high", "low"), ("both", "both")])
def test_loras_of_two_transformers(of_two, tmp_path, names):
    theirs, ours = of_two
    for i, name in enumerate(("high", "low")):
        layers = products(theirs.transformer, seed=i)
        saved(tmp_path / f"{name}.safetensors", comfyui(layers))
    call = {"num_inference_steps": 4}
    assert len({*(ours.scheduler.schedule(4).timesteps >= 900)}) == 2
    plain = frames(ours, **call)
    for pipe in of_two:
        high, low = (str(tmp_path / f"{name}.safetensors") for name in ("high", "low"))
        pipe.load_lora_weights(high, adapter_name=names[0])
        pipe.load_lora_weights(low, adapter_name=names[1], load_into_transformer_2=True)
    expected, found = frames(theirs, **call), frames(ours, **call)
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert ours.get_list_adapters() == {"transformer": [names[0]], "transformer_2": [names[1]]}
    ours.set_adapters([names[0]], [{"transformer_2": 0.0}])
    first = frames(ours, **call)
    for one, other in ((plain, first), (first, found)):
        assert np.abs(one - other).max() > 0.01
    for pipe in of_two:
        pipe.unload_lora_weights()


def test_only_pipelines_with_two_transformers_load_into_the_second(both, tmp_path):
    path = saved(tmp_path / "lora.safetensors", comfyui(products(both[0].transformer, "blocks.")))
    with pytest.raises(ValueError, match="is for pipelines with two transformers"):
        both[1].load_lora_weights(path, load_into_transformer_2=True)


@pytest.mark.parametrize("kind", ["kohya", "comfyui"])
def test_converted_loras_have_the_original_names(both, tmp_path, kind):
    theirs, _ = both
    both[1].save_pretrained(tmp_path / "folder")
    layers = products(theirs.transformer, "blocks.")
    path = saved(tmp_path / "lora.safetensors", comfyui(layers))
    options = {"model": str(tmp_path / "folder"), "to": kind}
    ConvertLora(source=path, output=tmp_path / "other.safetensors", **options).run()
    found = load_file(tmp_path / "other.safetensors")
    expected = kohya(layers) if kind == "kohya" else comfyui(layers)
    assert found.keys() == expected.keys()


def test_whole_changes_of_what_makes_tokens_are_added(both, tmp_path):
    """diffusers leaves them out."""
    theirs, ours = both
    weight = theirs.transformer.patch_embedding.weight
    change = numbers(weight.shape, torch.Generator().manual_seed(2))
    path = saved(tmp_path / "a.safetensors", {"diffusion_model.patch_embedding.diff": change})
    plain = frames(ours)
    ours.load_lora_weights(path)
    found = frames(ours)
    ours.fuse_lora()
    kernel = ours.params["transformer"]["patch_embedding"]["kernel"]
    expected = (weight + change).permute(2, 3, 4, 1, 0)
    np.testing.assert_allclose(kernel, expected, atol=1e-6)
    np.testing.assert_allclose(frames(ours), found, atol=1e-5)
    ours.unfuse_lora()
    ours.unload_lora_weights()
    assert np.abs(found - plain).max() > 0.01
