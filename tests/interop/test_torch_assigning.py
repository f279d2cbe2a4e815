"""What PyTorch modules write into parts of tensors, against PyTorch."""

import pytest
import torch

import diffusax.torch

MASK = torch.tensor([True, False, True, True])
ROWS = torch.arange(12.0).reshape(3, 4)


def one_row(x):
    x[MASK] = ROWS[:1]


def plain_row(x):
    x[MASK] = ROWS[0]


def rows(x):
    x[MASK] = ROWS


def number(x):
    x[MASK] = 5.0


def column(x):
    x[MASK] = ROWS[:, :1]


def columns(x):
    x[:, MASK] = ROWS.T


def one_column(x):
    x[..., MASK] = ROWS.T[:, :1]


def every_number(x):
    x[x > 0.5] = -1.0


def computed(x):
    x[x[:, 0] > 0.3] = ROWS[:1]


def three_axes(x):
    y = x.reshape(2, 2, 4)
    z = y + 0
    z[MASK.reshape(2, 2)] = ROWS[:1]
    x.copy_(z.reshape(4, 4))


def into_a_part(x):
    x[1:][MASK[1:]] = ROWS[:1]


def put_in_place(x):
    x.index_put_((MASK,), ROWS[:1])


def accumulated(x):
    x.index_put_((torch.tensor([0, 0, 2]),), ROWS, accumulate=True)


def scattered(x):
    x.masked_scatter_(MASK[:, None], ROWS)


def filled(x):
    x.masked_fill_(MASK[:, None], 3.0)


def more_axes(x):
    x[1] = ROWS[:1]
    x[2:3] = ROWS[None, None, 0]


def rows_of_a_part(x):
    x[0][torch.tensor([1, 2])] = ROWS[0, :2]


def read_by_number(x):
    x[0, :2] = x[1:][..., torch.tensor([3, 0])][1]
    x[3, [0, 2]] = x[[0, 1]][:, 1]


def another_dtype(x):
    half = x.type_as(torch.zeros(1, dtype=torch.float16))
    x += half


@pytest.mark.parametrize("write", [v for v in list(globals().values()) if hasattr(v, "__code__")])
def test_writing(write):
    class Writing(torch.nn.Module):
        """Writes into a copy of its argument."""

        def forward(self, x):
            """4 4 -> 4 4."""
            y = x + 0
            write(y)
            return y

    x = torch.rand(4, 4, generator=torch.Generator().manual_seed(0))
    module = Writing()
    expected = module(x)
    assert not torch.equal(expected, x)
    with torch.no_grad():
        torch.testing.assert_close(diffusax.torch.compile(module)(x), expected)
