"""LoRA files for FLUX.1 and FLUX.2 in the formats that are shipped, read live by diffusers, too."""

import numpy as np
import pytest
import torch
from diffusers.loaders import lora_pipeline
from safetensors.torch import load_file, save_file
from support.effort import few
from support.lora_files import layers_of, numbers
from support.pairs import Pair, mask, picture
from support.tiny_transformers import (
    FLUX_FILL,
    FLUX_SIZE,
    KLEIN_CALL,
    flux_pipeline,
    klein_pipeline,
)
from support.upstream_widths import for_tiny

import diffusax
from diffusax.checkpoints.original.transformers import adapter_names, transformer_names
from diffusax.lora import find_layers, lora_of_layers, read_lora, write_lora
from diffusax.lora.changes import delta
from diffusax.models.adapters.low_rank import kernel_shapes
from diffusax.pipelines.components.adapters import adaptable_networks

RANK, ALPHA = 4, 3.0
CALLS = {"flux": FLUX_SIZE, "klein": KLEIN_CALL}
BLOCKS = ("double_blocks.", "single_blocks.")
LAST = "final_layer.adaLN_modulation.1"


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """A function that gives PyTorch's tiny pipeline of a family and ours, made once."""
    found = {}

    def make(kind):
        if kind not in found:
            folder = tmp_path_factory.mktemp(kind)
            theirs = (flux_pipeline if kind == "flux" else klein_pipeline)(folder)
            ours = diffusax.DiffusionPipeline.from_pretrained(folder)
            ours.set_progress_bar_config(disable=True)
            found[kind] = theirs, ours
        return found[kind]

    return make


@pytest.fixture(autouse=True)
def tiny_width(monkeypatch):
    """Has diffusers convert FLUX.1's LoRAs of the tiny width."""
    for name in ("_convert_kohya_flux_lora_to_diffusers", "_convert_fal_kontext_lora_to_diffusers"):
        monkeypatch.setattr(lora_pipeline, name, for_tiny(getattr(lora_pipeline, name)))


def products(network, chosen):
    """A and B in PyTorch's layout of layers under their names in the original code."""
    kernels = kernel_shapes(network)
    names = {name: own.paths for name, own in adapter_names(network).items()}
    shapes = {n: [kernels[path] for path in own if path in kernels] for n, own in names.items()}
    return random_pairs({n: own for n, own in shapes.items() if own and chosen(n)})


def random_pairs(shapes):
    """A and B of layers of which each is made of kernels of these shapes."""
    generator, found = torch.Generator().manual_seed(5), {}
    for name, kernels in shapes.items():
        down = numbers((RANK, kernels[0][0]), generator, 0.7)
        outputs = sum(kernel[-1] for kernel in kernels)
        found[name] = down, numbers((outputs, RANK), generator, 0.7)
    return found


def in_blocks(name):
    return name.startswith(BLOCKS) and ".processor." not in name


def written(layers, prefix, ends=("lora_A.weight", "lora_B.weight"), alpha=None, dot="."):
    tensors = {}
    for name, (down, up) in layers.items():
        key = prefix + name.replace(".", dot)
        tensors |= {f"{key}.{ends[0]}": down, f"{key}.{ends[1]}": up}
        if alpha is not None:
            tensors[f"{key}.alpha"] = torch.tensor(alpha)
    return tensors


KOHYA = ("lora_down.weight", "lora_up.weight")


def kohya(network):
    return written(products(network, in_blocks), "lora_unet_", KOHYA, ALPHA, "_")


def comfyui(network):
    return written(products(network, in_blocks), "diffusion_model.", KOHYA, ALPHA)


def xlabs(network):
    chosen = products(network, lambda name: ".processor." in name)
    return written(chosen, "", ("down.weight", "up.weight"))


def fal(network):
    last = LAST if network.class_name.startswith("Flux2") else "final_layer.linear"
    return written(products(network, lambda n: in_blocks(n) or n == last), "base_model.model.")


def ai_toolkit(network):
    return written(products(network, in_blocks), "diffusion_model.")


def cut(network):
    """The names of diffusers as some files of FLUX.2 have them, without their first letters."""
    kernels = kernel_shapes(network)
    found = {n: [s] for n, s in kernels.items() if n.startswith("transformer_blocks.")}
    layers = random_pairs({n.removeprefix("tran"): s for n, s in found.items()})
    return written(layers, "diffusion_model.")


def mixture(network):
    """kohya's names for attention's layers in diffusers."""
    ends = ("attn.to_q", "attn.to_v", "attn.to_out.0", "attn.add_k_proj")
    found = {n: [shape] for n, shape in kernel_shapes(network).items() if n.endswith(ends)}
    return written(random_pairs(found), "lora_transformer_", KOHYA, ALPHA, "_")


FORMATS = [
    ("flux", kohya),
    ("flux", comfyui),
    ("flux", xlabs),
    ("flux", fal),
    ("klein", kohya),
    ("klein", ai_toolkit),
    ("klein", fal),
    ("klein", cut),
]
# diffusers takes the B of FLUX.2's last norm as it is, though it swaps the layer's weights.
DRAWN = [*(case for case in FORMATS if case != ("klein", fal)), ("flux", mixture)]


def by_layer(pipe, path):
    """What a file adds to each layer of the transformer, as we read it."""
    networks = adaptable_networks(pipe.parts)
    file = read_lora(path)
    found = {}
    for (component, layer), parts in find_layers(file, networks).items():
        rank = len(parts["down"])
        scale = float(np.reshape(parts.get("alpha", rank), ())) / rank
        found[f"{component}.{layer}"] = parts["up"] @ parts["down"] * scale
    return found


@pytest.mark.parametrize(("kind", "write"), FORMATS)
def test_every_format_is_read_as_by_diffusers(both, tmp_path, kind, write):
    theirs, ours = both(kind)
    tensors = write(ours.transformer.network)
    save_file(tensors, tmp_path / "given.safetensors")
    state = type(theirs).lora_state_dict(tmp_path, weight_name="given.safetensors")
    expected = {
        key.removesuffix(".lora_A.weight"): state[key.replace("lora_A", "lora_B")] @ down
        for key, down in state.items()
        if key.endswith(".lora_A.weight")
    }
    found = by_layer(ours, tmp_path / "given.safetensors")
    expected = {
        key if key.startswith("transformer.") else f"transformer.{key}": x
        for key, x in expected.items()
    }
    assert found.keys() == expected.keys()
    swapped = "transformer.norm_out.linear" if kind == "klein" else ""
    for key, tensor in expected.items():
        tensor = torch.roll(tensor, len(tensor) // 2, 0) if key == swapped else tensor
        np.testing.assert_allclose(found[key], tensor, atol=1e-6)


def draw(pipe, kind, **call):
    seed = {"generator": torch.Generator().manual_seed(3)}
    given = {"prompt": "a red apple", "num_inference_steps": 2, "output_type": "np"}
    return pipe(**{**given, **CALLS[kind], **seed, **call}).images


def text_layers(theirs):
    """kohya's keys for CLIP; diffusers knows those of attention by out_proj."""
    generator, found = torch.Generator().manual_seed(7), {}
    for name, weight in layers_of(theirs.text_encoder, "q_proj", "out_proj", "fc1").items():
        down, up = (
            numbers((RANK, weight.shape[1]), generator),
            numbers((len(weight), RANK), generator),
        )
        found[f"text_model.{name.removeprefix('text_model.')}"] = down, up
    return written(found, "lora_te1_", KOHYA, ALPHA, "_")


@pytest.mark.parametrize(("kind", "write"), few(DRAWN, ("flux", kohya)))
def test_every_format_is_drawn_as_by_diffusers(both, tmp_path, kind, write):
    theirs, ours = both(kind)
    tensors = write(ours.transformer.network)
    if (kind, write) == ("flux", kohya):
        tensors |= text_layers(theirs)
    save_file(tensors, tmp_path / "given.safetensors")
    plain = draw(ours, kind, adapters={})
    ours.load_lora_weights(tmp_path / "given.safetensors", adapter_name="given")
    theirs.load_lora_weights(tmp_path, weight_name="given.safetensors", adapter_name="given")
    try:
        expected = draw(theirs, kind)
        assert np.abs(draw(ours, kind) - expected).max() < 1e-4
        assert np.abs(plain - expected).max() > 0.005
    finally:
        theirs.unload_lora_weights()
        ours.unload_lora_weights()


def test_layers_outside_of_blocks_that_diffusers_leaves_out(both, tmp_path):
    _, ours = both("flux")
    network = ours.transformer.network
    layers = products(network, lambda name: ".processor." not in name)
    save_file(written(layers, "lora_unet_", KOHYA, ALPHA, "_"), tmp_path / "given.safetensors")
    found = by_layer(ours, tmp_path / "given.safetensors")
    assert found.keys() == {f"transformer.{path}" for path in kernel_shapes(network)}
    names = transformer_names(network)
    for name, (down, up) in layers.items():
        (path, *_), swapped = names[name]
        whole = torch.roll(up, len(up) // 2, 0) if swapped else up
        rows = found[f"transformer.{path}"]
        np.testing.assert_allclose(rows, (whole @ down * ALPHA / RANK)[: len(rows)], atol=1e-6)


@pytest.mark.parametrize("kind", ["flux", "klein"])
def test_kronecker_products_of_layers_in_one(both, tmp_path, kind):
    _, ours = both(kind)
    generator = torch.Generator().manual_seed(11)
    qkv = "transformer_blocks.1.attn.to_q", "transformer_blocks.1.attn.to_k"
    width = kernel_shapes(ours.transformer.network)[qkv[0]][0]
    w1 = numbers((8, 4), generator)
    a, b = numbers((3 * width // 8, 2), generator), numbers((2, width // 4), generator)
    key = "diffusion_model.double_blocks.1.img_attn.qkv"
    tensors = {f"{key}.lokr_w1": w1, f"{key}.lokr_w2_a": a, f"{key}.lokr_w2_b": b}
    save_file({**tensors, f"{key}.alpha": torch.tensor(3.0)}, tmp_path / "lokr.safetensors")
    file, networks = read_lora(tmp_path / "lokr.safetensors"), adaptable_networks(ours.parts)
    layers = find_layers(file, networks)
    changes = lora_of_layers(layers, file, networks).changes["transformer"]
    expected = torch.kron(w1, a @ b) * 3.0 / 2
    for i, path in enumerate(qkv):
        added = delta(changes[f"{path}.kernel"], np.zeros((width, width), np.float32), 1.0)
        np.testing.assert_allclose(added, expected[i * width : (i + 1) * width], atol=1e-6)
    ours.load_lora_weights(tmp_path / "lokr.safetensors", adapter_name="lokr")
    ours.unload_lora_weights()
    with pytest.raises(ValueError, match="has a part of a LoHa or LoKr of several layers"):
        write_lora(tmp_path / "again.safetensors", layers, "kohya")


@pytest.mark.parametrize("kind", ["flux", "klein"])
@pytest.mark.parametrize("alphas", [(3.0, 3.0), (3.0, 5.0)])
def test_diffusers_reads_kohyas_files_that_we_write(both, tmp_path, kind, alphas):
    theirs, ours = both(kind)
    kernels = kernel_shapes(ours.transformer.network)
    # Of layers in one some have adapters here, and some none.
    ends = ("to_q", "to_v", "to_out", "to_out.0", "add_k_proj", "proj_mlp", "to_qkv_mlp_proj")
    chosen = {name: [shape] for name, shape in kernels.items() if name.endswith(ends)}
    tensors, expected = {}, {}
    for i, (name, (down, up)) in enumerate(random_pairs(chosen).items()):
        alpha = alphas[i % 2]
        # Some files have alphas of one axis.
        tensors |= written({name: (down, up)}, "transformer.", alpha=alpha if i % 3 else [alpha])
        expected[f"transformer.{name}"] = up @ down * alpha / RANK
    file, networks = read_lora(tensors), adaptable_networks(ours.parts)
    layers = find_layers(file, networks)
    write_lora(tmp_path / "kohya.safetensors", layers, "kohya", encoders=len(networks) - 1)
    state = type(theirs).lora_state_dict(tmp_path, weight_name="kohya.safetensors")
    again = by_layer(ours, tmp_path / "kohya.safetensors")
    for key, down in state.items():
        if key.endswith(".lora_A.weight"):
            layer = key.removesuffix(".lora_A.weight")
            found = state[key.replace("lora_A", "lora_B")] @ down
            np.testing.assert_allclose(found, again[layer], atol=1e-6)
            np.testing.assert_allclose(found, expected.pop(layer, 0 * found), atol=1e-6)
    assert not expected


def test_t5_has_layers_of_its_own(both, tmp_path):
    theirs, ours = both("flux")
    found = {
        n: [(w.shape[1], len(w))] for n, w in layers_of(theirs.text_encoder_2, "q", "wo").items()
    }
    layers = random_pairs(found)
    for prefix, dot in (("lora_te3_", "_"), ("text_encoders.t5xxl.transformer.", ".")):
        path = tmp_path / f"{prefix}.safetensors"
        save_file(written(layers, prefix, KOHYA, ALPHA, dot), path)
        read = by_layer(ours, path)
        assert read.keys() == {f"text_encoder_2.{name}" for name in layers}
    file = read_lora(path)
    write_lora(
        tmp_path / "k.safetensors", find_layers(file, adaptable_networks(ours.parts)), "kohya"
    )
    assert all(key.startswith("lora_te3_") for key in load_file(tmp_path / "k.safetensors"))
    ours.load_lora_weights(path, adapter_name="t5")
    call = {"max_sequence_length": 16}
    plain = theirs.encode_prompt("a red apple", None, **call)[0]
    state = {key: x.clone() for key, x in theirs.text_encoder_2.state_dict().items()}
    changed = {
        f"{name}.weight": state[f"{name}.weight"] + up @ down * ALPHA / RANK
        for name, (down, up) in layers.items()
    }
    theirs.text_encoder_2.load_state_dict({**state, **changed})
    try:
        expected = theirs.encode_prompt("a red apple", None, **call)[0]
        found = ours.encode_prompt("a red apple", **call)[0]
        np.testing.assert_allclose(found, expected, atol=1e-5)
        assert (expected - plain).abs().max() > 0.01
    finally:
        theirs.text_encoder_2.load_state_dict(state)
        ours.unload_lora_weights()


def test_all_that_comfyui_extracts_of_clip_is_read(both, tmp_path, caplog):
    theirs, ours = both("flux")
    prefix, generator = "text_encoders.clip_l.transformer.", torch.Generator().manual_seed(9)
    state = {key: x.clone() for key, x in theirs.text_encoder.state_dict().items()}
    changed, tensors = dict(state), {}
    for key in state:
        name, _, leaf = key.rpartition(".")
        given = f"{prefix}text_model.{name.removeprefix('text_model.')}"
        if name.endswith("token_embedding"):
            down, up = (numbers(s, generator) for s in ((2, 16), (len(state[key]), 2)))
            tensors |= {f"{given}.lora_down.weight": down, f"{given}.lora_up.weight": up}
            changed[key] = state[key] + up @ down
        elif "norm" in name or name.endswith("position_embedding"):
            delta = numbers(tuple(state[key].shape), generator)
            tensors[f"{given}.diff{'_b' if leaf == 'bias' else ''}"] = delta
            changed[key] = state[key] + delta
    # FLUX.1's CLIP has neither, and no picture depends on them.
    tensors |= written({"text_projection": (torch.ones(2, 16), torch.ones(16, 2))}, prefix, KOHYA)
    tensors[f"{prefix}logit_scale.diff"] = torch.ones(1)
    save_file(tensors, tmp_path / "clip.safetensors")
    plain = theirs.encode_prompt("a red apple", None)[1]
    ours.load_lora_weights(tmp_path / "clip.safetensors")
    layers = find_layers(read_lora(tmp_path / "clip.safetensors"), adaptable_networks(ours.parts))
    for end, message in (("token_embedding", "changes of embeddings"), ("layer_norm1", "diff")):
        one = {key: parts for key, parts in layers.items() if key[1].endswith(end)}
        with pytest.raises(
            ValueError, match=rf"diffusers' format has no {message}.*; write kohya's"
        ):
            write_lora(tmp_path / "written.safetensors", one, "diffusers")
    assert "3 tensors are of what the pipeline lacks" in caplog.text
    theirs.text_encoder.load_state_dict(changed)
    try:
        expected = theirs.encode_prompt("a red apple", None)[1]
        np.testing.assert_allclose(ours.encode_prompt("a red apple")[1], expected, atol=1e-5)
        assert (expected - plain).abs().max() > 0.01
    finally:
        theirs.text_encoder.load_state_dict(state)
        ours.unload_lora_weights()


def test_what_does_not_fit_is_not_called_a_lora_for_flux(both):
    _, ours = both("flux")
    tensors = {"transformer.transformer_blocks.0.attn.to_q.lora_C": torch.ones(24)}
    with pytest.raises(
        ValueError, match="fits no layer of text_encoder, text_encoder_2, transfo"
    ) as error:
        ours.load_lora_weights(tensors)
    assert "seems to be" not in str(error.value)


def test_control_loras_are_a_sentence(both, tmp_path):
    _, ours = both("flux")
    tensors = written({"img_in": (torch.ones(2, 128), torch.ones(24, 2))}, "")
    tensors["double_blocks.0.img_attn.norm.query_norm.scale"] = torch.ones(12)
    save_file(tensors, tmp_path / "control.safetensors")
    with pytest.raises(ValueError, match=r"is a Control LoRA, .*; load it into PyTorch's FluxCon"):
        ours.load_lora_weights(tmp_path / "control.safetensors")


@pytest.mark.slow
def test_each_image_has_adapters_and_weights_of_its_own(both, tmp_path):
    _, ours = both("flux")
    for name, write in (("one", xlabs), ("two", kohya)):
        save_file(write(ours.transformer.network), tmp_path / f"{name}.safetensors")
        ours.load_lora_weights(tmp_path / f"{name}.safetensors", adapter_name=name)
    rows = [{"one": 0.7}, {"two": -0.4, "one": 0.2}]
    call = {"seed": [1, 2], "generator": None}
    images = draw(ours, "flux", prompt=["a red apple", "two dogs"], adapters=rows, **call)
    for image, prompt, row, seed in zip(images, ("a red apple", "two dogs"), rows, (1, 2)):
        alone = draw(ours, "flux", prompt=prompt, adapters=row, seed=seed, generator=None)[0]
        np.testing.assert_allclose(image, alone, atol=1e-5)
    ours.unload_lora_weights()


def test_a_lora_of_dev_changes_fill(tmp_path):
    theirs = flux_pipeline(tmp_path, "FluxFillPipeline", **FLUX_FILL)
    ours = diffusax.DiffusionPipeline.from_pretrained(tmp_path)
    ours.set_progress_bar_config(disable=True)
    names = ("x_embedder", "transformer_blocks.0.attn.to_q")
    layers = random_pairs({names[0]: [(64, 24)], names[1]: [(24, 24)]})
    call = {"image": picture(1, 40, 24), "mask_image": mask(2, 40, 24), "prompt": "a hat"}
    pair = Pair(theirs, ours)
    before, _ = pair.draw(**call, **FLUX_SIZE)
    for pipe in (theirs, ours):
        pipe.load_lora_weights(written(layers, "transformer."))
    assert np.abs(pair.check(**call, **FLUX_SIZE) - before).max() > 0.01


def test_fusing_leaves_the_text_encoders_alone(both):
    pair = Pair(*both("flux"))
    layers = random_pairs({"transformer_blocks.0.attn.to_q": [(24, 24)]})
    encoder = random_pairs({"text_model.encoder.layers.0.self_attn.q_proj": [(16, 16)]})
    tensors = written(layers, "transformer.") | written(encoder, "text_encoder.")
    plain, _ = pair.draw(prompt="a hat", **FLUX_SIZE)
    for pipe in (pair.reference, pair.ours):
        pipe.load_lora_weights(dict(tensors))
        pipe.fuse_lora(lora_scale=0.7)
    assert list(pair.ours.parts.fused) == ["transformer"]
    fused = pair.check(prompt="a hat", **FLUX_SIZE)
    for pipe in (pair.reference, pair.ours):
        pipe.unfuse_lora(components=["transformer"])
        pipe.unload_lora_weights()
    assert np.abs(fused - plain).max() > 0.01
    pair.check(prompt="a hat", **FLUX_SIZE)


@pytest.mark.parametrize("kind", CALLS)
def test_layers_in_the_second_place_are_the_transformers(both, tmp_path, kind):
    theirs, ours = both(kind)
    tensors = written(random_pairs({"transformer_blocks.0.attn.to_q": [(24, 24)]}), "")
    for pipe, name in ((theirs, "theirs"), (ours, "ours")):
        pipe.save_lora_weights(tmp_path / name, tensors)
    name = "pytorch_lora_weights.safetensors"
    wanted, found = (load_file(tmp_path / where / name) for where in ("theirs", "ours"))
    assert set(found) == set(wanted)
    assert all(key.startswith("transformer.") for key in found)
