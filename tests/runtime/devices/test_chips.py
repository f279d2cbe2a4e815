"""The figures of devices."""

from types import SimpleNamespace

import pytest

from diffusax.runtime.devices.chips import CARDS, chip_of


@pytest.mark.parametrize(
    ("kind", "figures"),
    [
        ("NVIDIA L4", (121, 24.1, 300)),
        ("NVIDIA L40", (181, 47.8, 864)),
        ("NVIDIA H100 PCIe", (756, 84.9, 2039)),
        ("NVIDIA H100 NVL", (835, 94, 3938)),
        ("NVIDIA A100-PCIE-40GB", (312, 42.4, 1555)),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA H200 NVL", None),
        ("TPU v5 lite", (197, 16, 819)),
        ("TPU v5", (459, 95, 2765)),
        ("TPU v6 lite", (918, 32, 1640)),
        ("TPU v4 lite", None),
        ("cpu", None),
    ],
)
def test_a_device_has_the_figures_of_its_own_kind(kind, figures):
    chip = chip_of(SimpleNamespace(device_kind=kind))
    assert (chip and (chip.tflops, chip.memory, chip.bandwidth)) == figures


def test_every_card_is_known_by_its_kind():
    for card in CARDS.values():
        assert chip_of(SimpleNamespace(device_kind=card.kind)) == card.chip
