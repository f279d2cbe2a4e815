"""Steps that cannot fit are refused before they run."""

import jax
import pytest
from support.runs.toy_run import INPUTS, OUTPUTS, Toy

from diffusax.runtime.devices.memory import device_memory, host_memory
from diffusax.runtime.devices.mesh import make_mesh
from diffusax.training import TrainConfig, train
from diffusax.training.loop.program import does_not_fit


def next_power(number: float) -> int:
    return 1 << int(number).bit_length()


def refused(tmp_path, recipe, **options) -> str:
    config = TrainConfig(output=str(tmp_path), report_to=(), steps=2, **options)
    with pytest.raises(ValueError, match="batch_size") as caught:
        train(recipe, config)
    assert "\n" not in str(caught.value)
    return str(caught.value)


class Untouched(Toy):
    """A recipe whose parameters may not be read."""

    def trained(self, mesh=None):
        raise AssertionError("parameters are read")


def test_a_batch_larger_than_the_memory_is_refused_before_anything_is_read(tmp_path):
    b = next_power(host_memory() / (INPUTS * 4))
    text = refused(tmp_path, Untouched(), batch_size=b)
    assert f"batch_size={b} with accumulate=1 cannot fit: parameters and optimizer take" in text
    assert text.endswith("use a smaller batch_size or a larger accumulate")


def test_a_step_larger_than_the_memory_is_refused_before_it_runs(tmp_path):
    b = next_power(host_memory() / (OUTPUTS * 4))
    text = refused(tmp_path, Toy(), batch_size=b)
    assert f"batch_size={b} with accumulate=1 cannot fit: the compiler says that" in text
    assert text.endswith("use a smaller batch_size or a larger accumulate")
    assert not (tmp_path / "metrics.jsonl").read_text()
    assert not list((tmp_path / "checkpoints").iterdir())


def test_the_devices_of_a_cpu_share_its_memory():
    devices = jax.devices("cpu")
    assert sum(map(device_memory, devices)) <= host_memory()
    assert device_memory(make_mesh().devices.flat[0]) > 2**20


def test_an_error_of_a_device_without_memory_is_one_sentence():
    error = RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.\nMore\nlines")
    text = str(does_not_fit(TrainConfig(batch_size=4), error))
    assert text.startswith("batch_size=4 with accumulate=1 cannot fit: RESOURCE_EXHAUSTED: Out of")
    assert "\n" not in text
