"""In which order kernels of convolutions lie on which device."""

from types import SimpleNamespace

import pytest

from diffusax.runtime.devices.layouts import kernel_order
from diffusax.runtime.devices.lowering import int8_activations, platform_of

LAST, FIRST = (3, 0, 1, 2), (3, 2, 0, 1)
# Of kernels over frames, t h w c d.
OF_FRAMES = {LAST: (4, 0, 1, 2, 3), FIRST: (4, 3, 0, 1, 2), None: None}


@pytest.mark.parametrize(
    ("platform", "capability", "orders"),
    [
        ("gpu", "9.0", (LAST, LAST, LAST)),
        ("gpu", "8.0", (LAST, LAST, LAST)),
        ("gpu", "7.5", (LAST, FIRST, FIRST)),
        ("gpu", "6.1", (FIRST, FIRST, FIRST)),
        ("gpu", "gfx942", (None, None, None)),
        ("tpu", None, (None, None, None)),
    ],
)
def test_kernels_lie_as_the_library_of_the_device_reads_them(platform, capability, orders):
    device = SimpleNamespace(platform=platform, compute_capability=capability)
    for dtype, order in zip(("float16", "bfloat16", "float32"), orders, strict=True):
        assert kernel_order((3, 3, 64, 32), dtype, device) == order
        assert kernel_order((1, 1, 64, 32), dtype, device) is None
        # XLA convolves videos b f h w c by an option that older cards do not get.
        of_frames = FIRST if capability == "7.5" else order
        assert kernel_order((3, 3, 3, 64, 32), dtype, device) == OF_FRAMES[of_frames]
        assert kernel_order((3, 1, 1, 64, 32), dtype, device) is None
    assert kernel_order((64, 32), "int8", device) is None
    amd = platform == "gpu" and orders[0] is None
    assert platform_of(device) == ("rocm" if amd else "cuda" if platform == "gpu" else platform)


def test_kernels_of_int8_lie_so_where_integers_are_multiplied():
    device = SimpleNamespace(platform="gpu", compute_capability="9.0")
    for choice, order in (("auto", None), ("off", None), ("on", (1, 0))):
        with int8_activations(choice):
            assert kernel_order((64, 32), "int8", device) == order
