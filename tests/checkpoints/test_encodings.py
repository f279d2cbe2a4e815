"""Encoded tensors have the numbers that the encodings' own libraries read."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support.quantised import EIGHT_BITS, ENCODINGS, encoded, multiplied

from diffusax.checkpoints.markings import marked
from diffusax.checkpoints.tensors import TensorFile, read_entries, read_metadata

ROTATED = {"rtol": 2e-6, "atol": 2e-6}
"""ConvRot sums 64 products, in another order here than in PyTorch."""


def written(path, kind, *, rows=192, width=256):
    weight = torch.randn(rows, width, generator=torch.Generator().manual_seed(0))
    stored, expected = encoded({"layer.weight": weight}, kind)
    save_file(stored, path)
    (entries,) = marked([read_entries(path)], read_metadata(path))
    assert list(entries) == ["layer.weight"]
    return entries["layer.weight"], expected["layer.weight"].numpy()


@pytest.mark.parametrize("kind", ENCODINGS)
def test_numbers_are_those_of_the_library(tmp_path, kind):
    entry, expected = written(tmp_path / "one.safetensors", kind)
    file = TensorFile(entry.path)
    same = {"rtol": 0, "atol": 0} if kind != "ConvRot" else ROTATED
    assert entry.shape == expected.shape
    np.testing.assert_allclose(file.view(entry), expected, **same)
    np.testing.assert_allclose(file.view(entry.transpose()), expected.T, **same)
    halves = np.concatenate([expected[96:], expected[:96]])
    np.testing.assert_allclose(file.view(entry.swap()), halves, **same)
    first = 0
    for length, part in zip((17, 130, 45), entry.cut([17, 130, 45]), strict=True):
        np.testing.assert_allclose(file.view(part), expected[first : first + length], **same)
        first += length
    inner = entry.cut([17, 130, 45])[1].cut([1, 129])[1]
    np.testing.assert_allclose(file.view(inner), expected[18:147], **same)
    file.release(entry)
    np.testing.assert_allclose(file.view(inner), expected[18:147], **same)
    parts = [part.copy() for part in file.rows(entry, 50)]
    assert list(map(len, parts)) == [50, 50, 50, 42]
    np.testing.assert_allclose(np.concatenate(parts), expected, **same)
    (whole,) = file.rows(entry.transpose(), 50)
    np.testing.assert_allclose(whole, expected.T, **same)


@pytest.mark.parametrize("kind", EIGHT_BITS)
def test_eight_bits_are_kept_as_they_are(tmp_path, kind):
    entry, expected = written(tmp_path / "one.safetensors", kind)
    file = TensorFile(entry.path)
    whole = file.kept(entry)
    assert whole.values.dtype.itemsize == 1
    assert whole.rotation == (64 if kind == "ConvRot" else 0)
    # bitsandbytes divides by 127 in the end, where the scale has it before.
    np.testing.assert_allclose(multiplied(whole), expected, rtol=3e-7, atol=2e-6)
    part = entry.cut([64, 128])[1]
    np.testing.assert_allclose(multiplied(file.kept(part)), expected[64:], rtol=3e-7, atol=2e-6)
    swapped = multiplied(file.kept(part.swap()))
    halves = np.concatenate([expected[128:], expected[64:128]])
    np.testing.assert_allclose(swapped, halves, rtol=3e-7, atol=2e-6)
    turned = file.kept(entry.transpose())
    if whole.scale.ndim or whole.rotation or whole.fine is not None:
        assert turned is None
    else:
        np.testing.assert_array_equal(turned.values.view(np.uint8), whole.values.view(np.uint8).T)


def test_other_bits_are_not_kept(tmp_path):
    for kind in set(ENCODINGS) - set(EIGHT_BITS):
        entry, _ = written(tmp_path / "four.safetensors", kind)
        assert TensorFile(entry.path).kept(entry) is None
    save_file({"layer.weight": torch.ones(4, 4)}, tmp_path / "plain.safetensors")
    entries = read_entries(tmp_path / "plain.safetensors")
    assert TensorFile(tmp_path / "plain.safetensors").kept(entries["layer.weight"]) is None


def test_the_header_may_name_the_formats(tmp_path):
    name, path = "model.diffusion_model.a.b.weight", tmp_path / "told.safetensors"
    for kind, layer in (("ConvRot", "a.b"), ("int8", "model.diffusion_model.a.b")):
        stored, expected = encoded({name: torch.randn(64, 64)}, kind)
        own = json.loads(bytes(stored.pop(name.replace("weight", "comfy_quant")).numpy()))
        own = own if kind == "ConvRot" else own["format"]
        told = json.dumps({"format_version": "1.0", "layers": {layer: own}})
        save_file(stored, path, {"_quantization_metadata": told})
        (entries,) = marked([read_entries(path)], read_metadata(path))
        assert list(entries) == [name]
        view = TensorFile(path).view(entries[name])
        np.testing.assert_allclose(view, expected[name], **ROTATED)
