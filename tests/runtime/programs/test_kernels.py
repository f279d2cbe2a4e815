from pathlib import Path

import pytest

from diffusax.runtime.programs.cost import bytes_of, kernels_of, traffic

MODULE = (Path(__file__).parent / "gpu_module.txt").read_text("utf-8")


def test_kernels_of_a_module():
    kernels = kernels_of(MODULE)
    assert [(k.kind, k.read, k.written, k.times, k.in_step) for k in kernels[1:]] == [
        ("loop_slice_fusion", 8 * 32 * 4, 8 * 32 * 2, 1, True),
        ("update_fusion", 32 * 4 + 4, 32 * 4, 1, True),
        ("__cudnn$fmhaSoftmax", 8 * 32 * 2, 8 * 32 * 2, 1, True),
        ("loop_add_fusion", 2 * 8 * 32 * 2, 8 * 32 * 2, 4, True),
    ]
    assert kernels[3].source == "jit(f)/attend"
    assert [k.copies_weights for k in kernels] == [True, False, False, False, False]
    total = traffic([k for k in kernels if k.in_step])
    assert total.kernels == 7
    assert total.estimate == pytest.approx(4 * 2.5e-6)


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ("bf16[2,3]{1,0}", 12),
        ("pred[5]", 5),
        ("f8e4m3fn[7]", 7),
        ("s4[3]", 2),
        ("(f32[2], /*index=1*/s32[])", 12),
        ("f32[]", 4),
    ],
)
def test_the_bytes_of_a_shape(shape, size):
    assert bytes_of(shape) == size
