"""What PyTorch modules write into parts and views of tensors, against PyTorch."""

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


def through_a_view(x):
    x.view(2, 8)[1] = 7.0
    x.view(-1).add_(1)


def through_parts(x):
    first, second = x.chunk(2)
    first *= 2
    second.copy_(first)
    for i, row in enumerate(x.unbind(1)):
        row += i
    x.split([1, 3], dim=1)[1].zero_()


def through_a_transpose(x):
    x.transpose(0, 1)[0] = 5.0
    x.T.mul_(2)
    x.permute(1, 0).unsqueeze(0)[0, 2].fill_(3.0)


def through_a_reshape(x):
    x.reshape(2, 2, 4)[0] += 1
    x.flatten()[3:5] = -2.0
    x.squeeze().select(1, 2).sub_(4)
    x.narrow(0, 1, 2).diagonal().zero_()


def not_through_copies(x):
    x.transpose(0, 1).reshape(2, 8)[0] = 9.0
    x.transpose(0, 1).contiguous().add_(1)
    x[:, 1:3].reshape(-1).add_(3)
    x.clone().view(-1)[0] = 8.0
    (x + 0).flatten().zero_()
    x += 1


def read_after_writing(x):
    view, row = x.view(-1), x[1]
    parts = x.chunk(2, dim=1)
    x += 1
    row *= 3
    x[0] = view[4:8] + parts[1][1, 0]
    parts[0][2] = row[:2] + view[0]


def contiguous_slices(x):
    x[1:3].contiguous().add_(2)
    x[:, 1].contiguous().add_(5)
    x[1:3].view(-1)[::2] = 0.5


def overlapping(x):
    whole, again = x.view(16), x.T
    whole[5] = 10.0
    again[3] = whole[8:12] + 1
    x[:, 0] = again[0] + 1


def filled_parts(x):
    x[0, 2:].fill_(3.0)
    x[1].zero_()
    x.T[0].fill_(2.0)


def operations_in_place(x):
    x.neg_().abs_()
    x[1].exp_()
    x[0].lerp_(x[2], 0.3)
    x[3].masked_fill_(x[3] > 0.5, 0.0)
    torch.mul(x[2], 2, out=x[2])
    x.addcmul_(x, x, value=2.0).tril_()
    x.view(-1).index_fill_(0, torch.tensor([1, 5]), 3.0)


@pytest.mark.parametrize("write", [v for v in list(globals().values()) if hasattr(v, "__code__")])
def test_writing_in_place_gives_what_pytorch_does(write):
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
