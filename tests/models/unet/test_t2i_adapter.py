"""T2I-Adapters, and UNets that take their maps, against diffusers with all weights random."""

import json
import random

import diffusers
import jax
import numpy as np
import pytest
import torch
from support.effort import first
from support.tiny import randomize

import diffusax
from diffusax.boundary.config import config_from_dict
from diffusax.models import T2IAdapterConfig
from diffusax.models.unet.t2i_adapter import weigh_maps
from diffusax.networks import load_network

CONTEXT = 24
SMALL = {"channels": [8, 16, 24], "num_res_blocks": 2, "downscale_factor": 4}
SD1 = {
    "block_out_channels": (16, 32),
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "cross_attention_dim": CONTEXT,
    "norm_num_groups": 8,
    "attention_head_dim": 4,
    "layers_per_block": 1,
}
# As in SDXL: no attention in the first level, and a map for the middle.
XL = {
    **SD1,
    "block_out_channels": (16, 32, 32),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
}


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def nhwc(x):
    return np.asarray(x).transpose(0, 2, 3, 1)


def assert_close(actual, expected):
    assert len(actual) == len(expected)
    for a, e in zip(actual, expected, strict=True):
        assert a.shape == e.shape
        assert np.abs(a - e).max() <= 1e-5 * np.abs(e).max()


def adapter_of(folder, seed=0, **config):
    """One of diffusers, saved in the folder, and ours from there."""
    reference = randomize(diffusers.T2IAdapter(**{**SMALL, **config}), seed).requires_grad_(False)
    reference.save_pretrained(folder)
    return reference, diffusax.T2IAdapter.from_pretrained(folder)


@pytest.mark.parametrize(
    ("config", "size"),
    first(
        [
            ({}, (20, 28)),
            ({"adapter_type": "full_adapter_xl", "channels": [8, 16, 24, 24]}, (16, 24)),
            ({"adapter_type": "light_adapter", "in_channels": 1}, (36, 12)),
            ({"channels": [8]}, (8, 8)),
            ({"adapter_type": "full_adapter_xl", "channels": [8, 8]}, (8, 8)),
            ({"adapter_type": "light_adapter", "channels": [9]}, (8, 12)),
            ({"num_res_blocks": 1, "downscale_factor": 1, "in_channels": 5}, (5, 3)),
        ],
        3,
    ),
)
def test_an_adapter_equals_diffusers(tmp_path, config, size):
    """Maps of odd sizes are averaged at their edge over the entries that there are."""
    reference, ours = adapter_of(tmp_path, **config)
    x = np.abs(normal(2, reference.config.in_channels, *size))
    expected = reference(torch.tensor(x))
    maps = ours.run(nhwc(x))
    assert_close(maps, [nhwc(e) for e in expected])
    assert tuple(m.shape[-1] for m in maps) == ours.config.widths
    assert ours.config.total_downscale_factor == reference.total_downscale_factor


@pytest.mark.parametrize(
    ("config", "adapter", "count"),
    first(
        [
            (XL, {"adapter_type": "full_adapter_xl", "channels": [16, 32, 32, 32]}, 4),
            (SD1, {"channels": [16, 32]}, 2),
        ]
    ),
    ids=["xl", "sd"],
)
def test_a_unet_with_maps_equals_diffusers(tmp_path, config, adapter, count):
    factor = 4 if count == 2 else 8
    theirs, ours = adapter_of(tmp_path / "adapter", **adapter, downscale_factor=factor)
    reference = randomize(diffusers.UNet2DConditionModel(**config)).requires_grad_(False)
    reference.save_pretrained(tmp_path / "unet")
    unet = load_network(tmp_path / "unet")
    x, context, image = normal(1, 4, 16, 8), normal(1, 7, CONTEXT), normal(1, 3, 64, 32, seed=1)
    given = [torch.tensor(x), torch.tensor(5), torch.tensor(context)]
    plain = reference(*given).sample
    # diffusers takes the maps out of the list.
    expected = reference(
        *given, down_intrablock_additional_residuals=theirs(torch.tensor(image))
    ).sample
    maps = ours.run(nhwc(image))
    assert len(maps) == count
    actual = unet.run(nhwc(x), np.float32(5), context, down_intrablock_additional_residuals=maps)
    assert np.abs(np.asarray(expected - plain)).max() > 0.1
    assert_close([actual], [nhwc(expected)])


def test_several_adapters_equal_diffusers(tmp_path):
    pairs = [
        adapter_of(tmp_path / "a", channels=[8, 16]),
        adapter_of(tmp_path / "b", 1, adapter_type="light_adapter", channels=[8], in_channels=1),
    ]
    with pytest.raises(ValueError, match=r"equal downscale_factor.*light_adapter 4 \(8,\)"):
        diffusax.MultiAdapter(ours for _, ours in pairs)
    pairs[1] = adapter_of(tmp_path / "b", 1, channels=[8, 16], num_res_blocks=1)
    both = diffusers.MultiAdapter([theirs for theirs, _ in pairs])
    images = [np.abs(normal(1, 3, 16, 16, seed=s)) for s in (1, 2)]
    expected = both([torch.tensor(image) for image in images], [0.7, -0.4])
    maps = [ours.run(nhwc(image)) for (_, ours), image in zip(pairs, images)]
    assert_close(weigh_maps(maps, np.array([[0.7, -0.4]])), [nhwc(e) for e in expected])

    ours = diffusax.MultiAdapter(ours for _, ours in pairs)
    assert (ours.downscale_factor, ours.total_downscale_factor) == (4, 8)
    assert both.total_downscale_factor == 8
    ours.save_pretrained(tmp_path / "ours")
    read = diffusers.MultiAdapter.from_pretrained(str(tmp_path / "ours"))
    again = read([torch.tensor(image) for image in images], [0.7, -0.4])
    for a, e in zip(again, expected, strict=True):
        np.testing.assert_array_equal(a.detach(), e)
    both.save_pretrained(str(tmp_path / "theirs"))
    back = diffusax.MultiAdapter.from_pretrained(tmp_path / "theirs")
    for mine, saved in zip(back.adapters, ours.adapters, strict=True):
        assert mine.network == saved.network
        jax.tree.map(np.testing.assert_array_equal, mine.params, saved.params)


def test_a_multi_adapter_is_two_or_more_adapters(tmp_path):
    _, one = adapter_of(tmp_path / "one", channels=[8])
    with pytest.raises(ValueError, match=r"two T2IAdapters or more.*\(got 1\)"):
        diffusax.MultiAdapter([one])
    with pytest.raises(ValueError, match=r"must be T2IAdapters \(got a str\)"):
        diffusax.MultiAdapter([one, "two"])
    with pytest.raises(ValueError, match=r"no folder .*one_1; a MultiAdapter needs two"):
        diffusax.MultiAdapter.from_pretrained(tmp_path / "one")
    with pytest.raises(ValueError, match="safe_serialization"):
        diffusax.MultiAdapter([one, one]).save_pretrained(tmp_path, safe_serialization=False)


def test_inputs_that_do_not_fit_are_named(tmp_path):
    _, adapter = adapter_of(tmp_path, channels=[8, 16])
    with pytest.raises(ValueError, match=r"divisible by 4, the adapter's .*\(got 18x16\)"):
        adapter.run(normal(1, 18, 16, 3))
    with pytest.raises(ValueError, match="channels come last here"):
        adapter.run(normal(1, 3, 16, 16))
    unet = diffusers.UNet2DConditionModel(**SD1)
    unet.save_pretrained(tmp_path / "unet")
    given = normal(1, 8, 8, 4), np.float32(5), normal(1, 7, CONTEXT)
    maps = adapter.run(normal(1, 32, 32, 3))
    with pytest.raises(ValueError, match=r"\(8, 8, 16\) here \(got \(8, 8, 8\)\); is the T2I-A"):
        load_network(tmp_path / "unet").run(*given, down_intrablock_additional_residuals=maps)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"adapter_type": "heavy_adapter"}, "adapter_type"),
        ({"channels": []}, "channels"),
        ({"channels": [3, 8], "adapter_type": "light_adapter"}, "channels must be at least 4"),
        (
            {"channels": [8, 8, 8, 16], "adapter_type": "full_adapter_xl"},
            "must not change",
        ),
        ({"downscale_factor": 0}, "downscale_factor"),
        ({"in_channels": -1}, "in_channels"),
        ({"num_res_blocks": 10**9}, "num_res_blocks"),
        ({"ratio": 2}, "ratio"),
    ],
)
def test_unsupported_options_are_errors_that_name_them(options, named):
    with pytest.raises(ValueError, match=named):
        config_from_dict(T2IAdapterConfig, options)


def damaged(rng, config, weights):
    """The bytes of a config.json and of a safetensors file, one of which is changed at random."""
    length = int.from_bytes(weights[:8], "little")
    header = json.loads(weights[8 : 8 + length])
    name = rng.choice([key for key in header if key != "__metadata__"])
    match rng.randrange(7):
        case 0:
            return config, weights[: rng.randrange(len(weights))]
        case 1:
            return config, rng.choice([0, 2**31, 2**64 - 1]).to_bytes(8, "little") + weights[8:]
        case 2:
            return config, bytes(rng.randrange(256) for _ in range(rng.randrange(200)))
        case 3:
            key = rng.choice(sorted(set(config) - {"_class_name"}))
            values = [None, -1, 0, 2**70, "x", [], [8], {}, 0.5, True, float("nan")]
            return {**config, key: rng.choice(values)}, weights
        case 4:
            header[name]["shape"] = rng.choice([[], [1], [2**40, 2**40], [-1], "x", [8, 8, 3, 4]])
        case 5:
            header[rng.choice(["", "x", name + ".x"])] = header.pop(name)
        case _:
            header[name]["dtype"] = rng.choice(["I64", "F16", "BOOL", "X", None, "F8_E4M3"])
    text = json.dumps(header).encode()
    return config, len(text).to_bytes(8, "little") + text + weights[8 + length :]


def test_a_damaged_adapter_is_one_sentence_that_names_its_file(tmp_path):
    adapter_of(tmp_path / "whole", channels=[8, 16])
    config = json.loads((tmp_path / "whole/config.json").read_text())
    file = "diffusion_pytorch_model.safetensors"
    weights = (tmp_path / "whole" / file).read_bytes()
    folder, sentences = tmp_path / "damaged", []
    folder.mkdir()
    for seed in range(120):
        options, data = damaged(random.Random(seed), config, weights)
        (folder / "config.json").write_text(json.dumps(options))
        (folder / file).write_bytes(data)
        try:
            diffusax.T2IAdapter.from_pretrained(folder)
        except ValueError as error:
            sentences.append(str(error))
    assert len(sentences) > 100
    for sentence in sentences:
        assert str(folder) in sentence
        assert "\n" not in sentence
        assert len(sentence) < 2000
    (folder / file).unlink()
    (folder / "diffusion_pytorch_model.bin").write_bytes(b"a pickle")
    with pytest.raises(ValueError, match="loading it could run code"):
        diffusax.T2IAdapter.from_pretrained(folder)
