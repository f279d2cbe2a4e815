"""LoRA formats that diffusers does not read, against weights merged by LyCORIS' formulas."""

import warnings

import diffusers
import jax
import numpy as np
import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from support.lora_files import layers_of
from support.pairs import PROMPTS, TOLERANCE, generators
from support.tiny import build_stable_diffusion

import diffusax
from diffusax.checkpoints.tree import params_to_tensors
from diffusax.pipelines.components.adapters import resolve_adapters
from diffusax.pipelines.plan.arguments import check_call

CALL = {"num_inference_steps": 2, "output_type": "np", "guidance_scale": 4.0}
RANK, ALPHA = 4, 2.0


def kron(a, b):
    """torch.kron of a matrix with a matrix or a convolution's kernel (LyCORIS, make_kron)."""
    return torch.kron(a[(..., *(None,) * (b.ndim - 2))], b.contiguous())


def tucker(core, a, b):
    """LyCORIS, rebuild_tucker: the core is r r kh kw, a: r d, b: r c."""
    return torch.einsum("i j ..., i p, j r -> p r ...", core, a, b)


def lora(w, n):
    down, up = n(RANK, *w.shape[1:]), n(w.shape[0], RANK, *(1,) * (w.ndim - 2))
    change = (up.flatten(1) @ down.flatten(1)).reshape(w.shape)
    return {"lora_down.weight": down, "lora_up.weight": up}, change * ALPHA / RANK


def lora_mid(w, n):
    down, up, mid = (
        n(RANK, w.shape[1], 1, 1),
        n(w.shape[0], RANK, 1, 1),
        n(RANK, RANK, *w.shape[2:]),
    )
    change = tucker(mid, up.flatten(1).T, down.flatten(1))
    tensors = {"lora_down.weight": down, "lora_up.weight": up, "lora_mid.weight": mid}
    return tensors, change * ALPHA / RANK


def loha(w, n):
    tensors, product = {}, 1
    for i in (1, 2):
        a, b = n(w.shape[0], RANK), n(RANK, w[0].numel())
        tensors |= {f"hada_w{i}_a": a, f"hada_w{i}_b": b}
        product = product * (a @ b)
    return tensors, product.reshape(w.shape) * ALPHA / RANK


def loha_tucker(w, n):
    tensors, product = {}, 1
    for i in (1, 2):
        a, b, t = n(RANK, w.shape[0]), n(RANK, w.shape[1]), n(RANK, RANK, *w.shape[2:])
        tensors |= {f"hada_w{i}_a": a, f"hada_w{i}_b": b, f"hada_t{i}": t}
        product = product * tucker(t, a, b)
    return tensors, product * ALPHA / RANK


def lokr(w, n):
    w1, a, b = n(4, 2), n(w.shape[0] // 4, RANK), n(RANK, w[0].numel() // 2)
    w2 = (a @ b).reshape(w.shape[0] // 4, w.shape[1] // 2, *w.shape[2:])
    return {"lokr_w1": w1, "lokr_w2_a": a, "lokr_w2_b": b}, kron(w1, w2) * ALPHA / RANK


def lokr_whole(w, n):
    w1, w2 = n(4, 2), n(w.shape[0] // 4, w.shape[1] // 2, *w.shape[2:])
    # Without a rank, alpha has no meaning.
    return {"lokr_w1": w1, "lokr_w2": w2}, kron(w1, w2)


def lokr_tucker(w, n):
    a, b, t = n(RANK, w.shape[0] // 4), n(RANK, w.shape[1] // 2), n(RANK, RANK, *w.shape[2:])
    one, two = n(4, 3), n(3, 2)
    tensors = {"lokr_w1_a": one, "lokr_w1_b": two}
    tensors |= {"lokr_w2_a": a, "lokr_w2_b": b, "lokr_t2": t}
    return tensors, kron(one @ two, tucker(t, a, b)) * ALPHA / RANK


def ia3(w, n):
    factor = n(w.shape[0])
    return {"weight": factor, "on_input": torch.tensor(0)}, w * factor.reshape(
        -1, *(1,) * (w.ndim - 1)
    )


def ia3_on_input(w, n):
    factor = n(w.shape[1])
    return {"weight": factor, "on_input": torch.tensor(1)}, w * factor.reshape(
        1, -1, *(1,) * (w.ndim - 2)
    )


def full(w, n):
    return {"diff": (change := n(*w.shape))}, change


def dora(w, n, axis=0, make=lora):
    """LyCORIS, apply_weight_decompose: lengths over all axes but the first, or but the second."""
    tensors, change = make(w, n)
    axes = tuple(i for i in range(w.ndim) if i != axis)
    length = (w + change).pow(2).sum(axes, keepdim=True).sqrt() + torch.finfo(torch.float32).eps
    scale = w.pow(2).sum(axes, keepdim=True).sqrt() * (1 + 0.3 * n(*length.shape))
    return {**tensors, "dora_scale": scale}, (w + change) * (scale / length) - w


def dora_on_columns(w, n):
    return dora(w, n, axis=1)


def dora_of_loha(w, n):
    return dora(w, n, make=loha)


LINEAR, CONV = ".attn1.to_q", ".conv1"
FORMATS = [
    *(
        (make, end)
        for make in (lora, loha, lokr, lokr_whole, ia3, ia3_on_input, full)
        for end in (LINEAR, CONV)
    ),
    *((make, end) for make in (dora, dora_on_columns) for end in (LINEAR, CONV)),
    *((make, CONV) for make in (lora_mid, loha_tucker, lokr_tucker)),
    (dora_of_loha, LINEAR),
]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("formats")
    theirs = build_stable_diffusion(folder, scheduler=diffusers.DDIMScheduler(clip_sample=False))
    theirs.unet.requires_grad_(False)
    return theirs, diffusax.DiffusionPipeline.from_pretrained(folder)


def write(path, unet, make, end):
    """A file of one format on some layers, and the changes of their weights."""
    generator = torch.Generator().manual_seed(5)

    def n(*shape):
        return torch.randn(shape, generator=generator) * 0.4

    tensors, changes = {}, {}
    for name, weight in list(layers_of(unet, end).items())[:3]:
        own, changes[f"{name}.weight"] = make(weight, n)
        own = {**own, "alpha": torch.tensor(ALPHA)}
        tensors |= {f"lora_unet_{name.replace('.', '_')}.{key}": x for key, x in own.items()}
    save_file({k: x.contiguous() for k, x in tensors.items()}, path)
    return changes


@pytest.mark.parametrize(("make", "end"), FORMATS)
def test_the_parameters_with_a_file_merged(pair, tmp_path, make, end):
    theirs, ours = pair
    changes = write(tmp_path / "x.safetensors", theirs.unet, make, end)
    before = params_to_tensors(ours.params["unet"])
    ours.load_lora_weights(tmp_path / "x.safetensors", adapter_name="x")
    try:
        ours.set_adapters("x", 0.6)
        ours.fuse_lora(lora_scale=0.5)
        merged = params_to_tensors(ours.params["unet"])
        ours.unfuse_lora()
    finally:
        ours.unload_lora_weights()
    for name, tensor in merged.items():
        change = changes.get(name)
        if change is None:
            np.testing.assert_array_equal(tensor, before[name])
            continue
        assert change.abs().max() > 0.02
        difference, expected = tensor - before[name], 0.3 * change.numpy()
        np.testing.assert_allclose(difference, expected, atol=1e-6 * np.abs(tensor).max())


def test_changes_of_norms_and_biases_equal_diffusers(pair, tmp_path):
    theirs, ours = pair
    names = ["conv_norm_out", "conv_in", "mid_block.attentions.0.norm"]
    state, generator, tensors, changes = (
        theirs.unet.state_dict(),
        torch.Generator().manual_seed(1),
        {},
        {},
    )
    for name in names:
        kinds = {"diff_b": "bias"} if name == "conv_in" else {"w_norm": "weight", "b_norm": "bias"}
        for key, leaf in kinds.items():
            change = torch.randn(state[f"{name}.{leaf}"].shape, generator=generator)
            changes[f"{name}.{leaf}"] = tensors[f"lora_unet_{name.replace('.', '_')}.{key}"] = (
                change
            )
    ours.load_lora_weights(tensors, adapter_name="norms")
    before = params_to_tensors(ours.params["unet"])
    try:
        ours.fuse_lora()
        merged = params_to_tensors(ours.params["unet"])
    finally:
        ours.unfuse_lora()
        ours.unload_lora_weights()
    for name, change in changes.items():
        np.testing.assert_allclose(merged[name] - before[name], change, atol=1e-6)


def test_pictures_with_a_merged_format_beside_a_lora(pair, tmp_path):
    theirs, ours = pair
    ours.set_progress_bar_config(disable=True)
    changes = write(tmp_path / "loha.safetensors", theirs.unet, loha, ".conv2")
    more = write(tmp_path / "lora.safetensors", theirs.unet, lora, ".to_v")
    ours.load_lora_weights(tmp_path / "loha.safetensors", adapter_name="loha")
    ours.load_lora_weights(tmp_path / "lora.safetensors", adapter_name="lora")
    options = {**CALL, "prompt": PROMPTS[:1] * 2}
    ours(**options, generator=generators([3, 4]), adapters=[{"loha": 0.5, "lora": 0.5}] * 2)
    from diffusax.runtime.programs.compilations import count_compilations

    with count_compilations() as compiled:
        rows = [{"loha": 0.8, "lora": 0.3}, {"loha": 0.8, "lora": -1.0}]
        actual = ours(**options, generator=generators([3, 4]), adapters=rows).images
    assert compiled == []
    state = {k: v.clone() for k, v in theirs.unet.state_dict().items()}
    for i, weight in enumerate((0.3, -1.0)):
        both = [(changes, 0.8), (more, weight)]
        merged = {
            name: state[name] + w * change for part, w in both for name, change in part.items()
        }
        theirs.unet.load_state_dict(state | merged)
        expected = theirs(PROMPTS[0], **CALL, generator=generators([3 + i])[0]).images[0]
        assert np.abs(actual[i] - expected).max() < TOLERANCE
    theirs.unet.load_state_dict(state)
    with pytest.raises(ValueError, match="'loha' several weights in one call"):
        ours(**options, adapters=[{"loha": 0.8}, {"loha": 0.7}])
    ours.unload_lora_weights()


def test_dora_equals_peft(pair):
    """PEFT scales inside of the lengths, so that other weights are another function."""
    theirs, ours = pair
    unet = diffusers.UNet2DConditionModel.from_config(theirs.unet.config)
    unet.load_state_dict(theirs.unet.state_dict())
    config = LoraConfig(
        r=4, lora_alpha=6, use_dora=True, target_modules=["to_q", "conv1"], init_lora_weights=False
    )
    unet.add_adapter(config, adapter_name="dora")
    generator = torch.Generator().manual_seed(2)
    tensors = {}
    for name, parameter in unet.named_parameters():
        if "lora_magnitude" in name:
            parameter.data *= 1 + 0.3 * torch.rand(parameter.shape, generator=generator)
        if ".dora." in name:
            tensors["unet." + name.replace(".dora.", ".")] = parameter.data
            if "lora_magnitude" in name:
                tensors["unet." + name.replace(".dora.weight", "")] = tensors.pop(
                    "unet." + name.replace(".dora.", ".")
                )
    alphas = {
        f"{key.split('.lora_A')[0]}.alpha": torch.tensor(6.0) for key in tensors if ".lora_A" in key
    }
    ours.load_lora_weights({**tensors, **alphas}, adapter_name="dora")
    unet.set_adapters("dora", [0.7])
    unet.fuse_lora()
    try:
        ours.set_adapters("dora", 0.7)
        ours.fuse_lora()
        merged = params_to_tensors(ours.params["unet"])
        # What is merged is not merged again by a call.
        assert resolve_adapters(ours.parts, check_call({"prompt": "x"}))[0] is ours.parts
    finally:
        ours.unfuse_lora()
        ours.unload_lora_weights()
    expected = {
        k.replace(".base_layer", ""): v for k, v in unet.state_dict().items() if ".lora_" not in k
    }
    before = theirs.unet.state_dict()
    changed = [name for name in expected if not torch.equal(expected[name], before[name])]
    assert len(changed) > 5
    for name in expected:
        np.testing.assert_allclose(merged[name], expected[name].numpy(), atol=1e-5)


def test_a_tree_is_shared_where_nothing_changes(pair, tmp_path):
    """Only the parameters that a file changes are there twice."""
    theirs, ours = pair
    write(tmp_path / "x.safetensors", theirs.unet, full, LINEAR)
    before = jax.tree.leaves(ours.params["unet"])
    ours.load_lora_weights(tmp_path / "x.safetensors", adapter_name="x")
    ours.fuse_lora()
    after = jax.tree.leaves(ours.params["unet"])
    ours.unfuse_lora()
    ours.unload_lora_weights()
    assert sum(a is not b for a, b in zip(before, after, strict=True)) == 3


@pytest.mark.parametrize("more", [[], pytest.param(["conv1"], marks=pytest.mark.slow)])
def test_biases_of_b_are_those_of_peft(pair, tmp_path, more):
    """Layers with and without a bias of their own, weights for each prompt, and a saved copy."""
    theirs, ours = pair
    ours.set_progress_bar_config(disable=True)
    targets = ["to_q", "to_out.0", *more]
    config = LoraConfig(r=4, lora_bias=True, target_modules=targets)
    generator, tensors = torch.Generator().manual_seed(3), {}
    with warnings.catch_warnings():
        # PEFT warns that layers without a bias cannot be merged, and of a second adapter.
        warnings.simplefilter("ignore")
        theirs.unet.add_adapter(config, adapter_name="made")
        for name, parameter in theirs.unet.named_parameters():
            if ".made." in name:
                values = torch.randn(parameter.shape, generator=generator) * 0.2
                tensors["unet." + name.replace(".made.", ".")] = values
        theirs.unet.delete_adapters("made")
        save_file(tensors, tmp_path / "biases.safetensors")
        theirs.load_lora_weights(str(tmp_path / "biases.safetensors"), adapter_name="biases")
    ours.load_lora_weights(tmp_path / "biases.safetensors", adapter_name="biases")
    parts = ours.adapters["biases"].components["unet"]
    ours.save_lora_weights(tmp_path, parts, weight_name="again.safetensors")
    again = load_file(tmp_path / "again.safetensors")
    assert set(again) == set(tensors)
    ours.load_lora_weights(tmp_path / "again.safetensors", adapter_name="again")
    rows = [{"biases": 0.8}, {"again": -0.4}]
    try:
        actual = ours(PROMPTS[:1] * 2, **CALL, generator=generators([3, 4]), adapters=rows).images
        for i, weight in enumerate((0.8, -0.4)):
            theirs.set_adapters("biases", weight)
            expected = theirs(PROMPTS[0], **CALL, generator=generators([3 + i])[0]).images[0]
            assert np.abs(actual[i] - expected).max() < TOLERANCE
        without = {k: v for k, v in tensors.items() if not k.endswith("bias")}
        ours.load_lora_weights(without, adapter_name="without")
        other = ours(PROMPTS[:1], **CALL, generator=generators([3]), adapters={"without": 0.8})
        assert np.abs(other.images[0] - actual[0]).max() > 0.01
        with pytest.raises(ValueError, match=r"no .*to_q.bias, .* cannot be merged; give it to"):
            ours.fuse_lora(adapter_names=["biases"])
        own = {path: own for path, own in parts.items() if "to_q" not in path}
        ours.add_adapter("own", {"unet": own})
        before = params_to_tensors(ours.params["unet"])
        ours.fuse_lora(adapter_names=["own"], lora_scale=0.5)
        merged = params_to_tensors(ours.params["unet"])
        for name in own:
            change = merged[f"{name}.bias"] - before[f"{name}.bias"]
            expected = 0.5 * tensors[f"unet.{name}.lora_B.bias"]
            np.testing.assert_allclose(change, expected, atol=1e-6)
    finally:
        ours.unfuse_lora()
        ours.unload_lora_weights()
        theirs.unload_lora_weights()
