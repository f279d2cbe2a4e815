"""PyTorch's own files are read without PyTorch, and nothing in them is called."""

import argparse
import os
import zipfile

import numpy as np
import pytest
import torch

from diffusax.checkpoints.tensors import read_places
from diffusax.checkpoints.torch_file import read_torch_file


class Calls:
    """What calls a function where a pickle of it is read."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.fixture
def state():
    torch.manual_seed(0)
    x = torch.randn(4, 3)
    return {
        "float32": x,
        "transposed": torch.randn(5, 2).T,
        "part": torch.arange(10.0)[3:7],
        "parameter": torch.nn.Parameter(x.half()),
        "bfloat16": x.bfloat16(),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "integers": torch.tensor([1, -2]),
        "bools": torch.tensor([True, False]),
    }


@pytest.mark.parametrize("newer", [True, False])
def test_tensors_are_those_that_were_saved(state, tmp_path, newer):
    options = {"_use_new_zipfile_serialization": newer}
    torch.save({"state_dict": state, "step": 3}, tmp_path / "a.pt", **options)
    found = read_places(read_torch_file(tmp_path / "a.pt"))
    assert [*found] == [f"state_dict.{name}" for name in state]
    for name, tensor in state.items():
        actual = found[f"state_dict.{name}"]
        assert str(actual.dtype) == str(tensor.dtype).removeprefix("torch.")
        np.testing.assert_array_equal(actual.astype(float), tensor.detach().double().numpy())


@pytest.mark.parametrize("newer", [True, False])
def test_nothing_in_a_file_is_called(state, tmp_path, newer):
    made = tmp_path / "made"
    others = [Calls(made), argparse.Namespace(x=1), np.float64(3.0), {1, 2}, range(3)]
    options = {"_use_new_zipfile_serialization": newer}
    torch.save({"others": others, **state}, tmp_path / "a.pt", **options)
    assert read_torch_file(tmp_path / "a.pt").keys() == state.keys()
    assert not made.exists()
    torch.load(tmp_path / "a.pt", weights_only=False)
    assert made.exists()


def test_broken_files_are_errors(state, tmp_path):
    file = tmp_path / "a.pt"
    torch.save(state, file)
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="not a whole file of PyTorch"):
        read_torch_file(file)
    torch.save(state, file, _use_new_zipfile_serialization=False)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match="its numbers are not all there"):
        read_torch_file(file)
    for data in (b"", b"x", b"cos\nsystem\n", b"\x80\x02K\x01." * 5):
        file.write_bytes(data)
        with pytest.raises(ValueError, match=r"a\.pt"):
            read_torch_file(file)
    torch.save({"x": torch.zeros(2, 3, 4).permute(1, 0, 2)}, file)
    with pytest.raises(ValueError, match="the strides"):
        read_torch_file(file)
    for data in (b"", b"cos\nsystem\n", b"\x80\x02]q\x00h\x07.", b"\x80\x05" + b"(" * 9):
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("a/data.pkl", data)
        with pytest.raises(ValueError, match=r"a\.pt"):
            read_torch_file(file)
