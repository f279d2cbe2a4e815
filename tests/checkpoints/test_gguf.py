"""GGUF files have the numbers and shapes that the gguf package reads."""

import gguf
import numpy as np
import pytest
import torch
from support.quantised import blocks, multiplied, save_gguf

from diffusax.checkpoints.gguf import read_gguf
from diffusax.checkpoints.gguf.blocks import BLOCKS
from diffusax.checkpoints.tensors import TensorFile, read_metadata

PLAIN = ("F32", "F16", "BF16")


def random(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("kind", [*BLOCKS, *PLAIN])
def test_numbers_are_those_of_the_gguf_package(tmp_path, kind):
    path = tmp_path / "one.gguf"
    expected = save_gguf(path, {"layer.weight": random(48, 512)}, kind, architecture="flux")
    (read,) = gguf.GGUFReader(path).tensors
    theirs = gguf.dequantize(read.data, read.tensor_type).reshape(48, 512)
    file = TensorFile(path)
    entry = file.entries["layer.weight"]
    assert read_metadata(path)["general.architecture"] == "flux"
    assert entry.shape == (48, 512)
    np.testing.assert_array_equal(file.view(entry).astype(np.float32), theirs)
    np.testing.assert_array_equal(expected["layer.weight"], theirs)
    first, second = entry.cut([5, 43])
    np.testing.assert_array_equal(file.view(first).astype(np.float32), theirs[:5])
    np.testing.assert_array_equal(file.view(second.transpose()).astype(np.float32), theirs[5:].T)
    kept = file.kept(second)
    assert (kept is not None) == (kind in BLOCKS)
    if kept is not None:
        small = {"Q4_0": "int4", "Q4_1": "uint4", "Q4_K": "uint4"}
        assert kept.values.dtype.name == small.get(kind, "int8")
        np.testing.assert_array_equal(multiplied(kept), theirs[5:])


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K", "Q6_K"])
def test_all_codes_and_scales(kind):
    rng = np.random.default_rng(0)
    stored = rng.integers(0, 256, (300, BLOCKS[kind][1]), np.uint8)
    halves = rng.standard_normal((300, 2)).astype(np.float16)
    places = (208,) if kind == "Q6_K" else (0, 2)
    for i, place in enumerate(places):
        stored[:, place : place + 2] = halves[:, i : i + 1].copy().view(np.uint8)
    expected = gguf.dequantize(stored, gguf.GGMLQuantizationType[kind])
    np.testing.assert_array_equal(BLOCKS[kind][2](stored).numbers(), expected)


def test_shapes_that_were_changed_are_beside(tmp_path):
    path = tmp_path / "one.gguf"
    tensors = {"conv.weight": random(32, 16, 3, 3), "short.weight": random(3, 5), "b": random(7)}
    expected = save_gguf(path, tensors, "Q4_K", architecture="sd1", wide=True)
    file = TensorFile(path)
    for name, entry in file.entries.items():
        assert entry.shape == tuple(tensors[name].shape)
        np.testing.assert_array_equal(file.view(entry), expected[name])
    half = file.entries["conv.weight"].cut([1, 31])[1]
    np.testing.assert_array_equal(file.view(half), expected["conv.weight"][1:])


@pytest.mark.parametrize("kind", ["Q2_K", "IQ4_NL", "MXFP4"])
def test_other_blocks_are_named(tmp_path, kind):
    number = gguf.GGMLQuantizationType[kind]
    length, size = gguf.GGML_QUANT_SIZES[number]
    writer = gguf.GGUFWriter(tmp_path / "one.gguf", "flux")
    stored = np.zeros((4, 512 // length * size), np.uint8)
    writer.add_tensor("layer.weight", stored, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    message = rf"layer\.weight is in blocks of {kind}, .*; take the file in float8, int8"
    with pytest.raises(ValueError, match=message):
        read_gguf(tmp_path / "one.gguf")


def test_drawn_blocks_are_of_the_weights_size():
    weight = random(64, 256).numpy()
    for kind in ("Q4_K", "Q5_K", "Q6_K"):
        _, numbers = blocks(weight, kind)
        assert 0.03 < numbers.std() < 3
