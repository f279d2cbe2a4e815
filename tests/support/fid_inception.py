"""FID's Inception v3 in PyTorch, for the networks to be compared with.

After torchvision's inception_v3 as pytorch-fid changes it: names of modules and order of branches
are theirs.
"""

import torch
from torch import nn
from torch.nn import functional as F


class Basic(nn.Module):
    def __init__(self, c, d, kernel=1, stride=1, padding=0):
        super().__init__()
        self.conv = nn.Conv2d(c, d, kernel, stride=stride, padding=padding, bias=False)
        self.bn = nn.BatchNorm2d(d, eps=0.001)

    def forward(self, x):
        return F.relu(self.bn(self.conv(x)))


class Block(nn.Module):
    """Branches of convolutions, each a list of (name, d, kernel, stride, padding) from c."""

    def __init__(self, c, branches, pool, pool_features=None):
        super().__init__()
        self.branches, self.pool = [], pool
        for branch in branches:
            width, names = c, []
            for name, d, kernel, stride, padding in branch:
                self.add_module(name, Basic(width, d, kernel, stride, padding))
                width = d
                names.append(name)
            self.branches.append(names)
        if pool_features is not None:
            self.branch_pool = Basic(c, pool_features)

    def run(self, x, names):
        for name in names:
            x = getattr(self, name)(x)
        return x

    def forward(self, x):
        parts = [self.run(x, names) for names in self.branches]
        return torch.cat([*parts, self.pooled(x)], 1)

    def pooled(self, x):
        if self.pool == "reduce":
            return F.max_pool2d(x, 3, stride=2)
        if self.pool == "largest":
            return self.branch_pool(F.max_pool2d(x, 3, stride=1, padding=1))
        pooled = F.avg_pool2d(x, 3, stride=1, padding=1, count_include_pad=False)
        return self.branch_pool(pooled)


class BlockE(Block):
    """Its second and third branches part again, into a row and a column."""

    def __init__(self, c, pool):
        row, column = ((1, 3), 1, (0, 1)), ((3, 1), 1, (1, 0))
        super().__init__(
            c,
            [
                [("branch1x1", 320, 1, 1, 0)],
                [("branch3x3_1", 384, 1, 1, 0)],
                [("branch3x3dbl_1", 448, 1, 1, 0), ("branch3x3dbl_2", 384, 3, 1, 1)],
            ],
            pool,
            192,
        )
        self.ends = {1: ("branch3x3_2a", "branch3x3_2b"), 2: ("branch3x3dbl_3a", "branch3x3dbl_3b")}
        for a, b in self.ends.values():
            self.add_module(a, Basic(384, 384, *row))
            self.add_module(b, Basic(384, 384, *column))

    def forward(self, x):
        parts = [self.run(x, names) for names in self.branches]
        for i, ends in self.ends.items():
            parts[i] = torch.cat([getattr(self, name)(parts[i]) for name in ends], 1)
        return torch.cat([*parts, self.pooled(x)], 1)


def block_a(c, pool_features):
    return Block(
        c,
        [
            [("branch1x1", 64, 1, 1, 0)],
            [("branch5x5_1", 48, 1, 1, 0), ("branch5x5_2", 64, 5, 1, 2)],
            [
                ("branch3x3dbl_1", 64, 1, 1, 0),
                ("branch3x3dbl_2", 96, 3, 1, 1),
                ("branch3x3dbl_3", 96, 3, 1, 1),
            ],
        ],
        "average",
        pool_features,
    )


def block_b(c):
    return Block(
        c,
        [
            [("branch3x3", 384, 3, 2, 0)],
            [
                ("branch3x3dbl_1", 64, 1, 1, 0),
                ("branch3x3dbl_2", 96, 3, 1, 1),
                ("branch3x3dbl_3", 96, 3, 2, 0),
            ],
        ],
        "reduce",
    )


def block_c(c, d):
    row, column = ((1, 7), 1, (0, 3)), ((7, 1), 1, (3, 0))
    return Block(
        c,
        [
            [("branch1x1", 192, 1, 1, 0)],
            [("branch7x7_1", d, 1, 1, 0), ("branch7x7_2", d, *row), ("branch7x7_3", 192, *column)],
            [
                ("branch7x7dbl_1", d, 1, 1, 0),
                ("branch7x7dbl_2", d, *column),
                ("branch7x7dbl_3", d, *row),
                ("branch7x7dbl_4", d, *column),
                ("branch7x7dbl_5", 192, *row),
            ],
        ],
        "average",
        192,
    )


def block_d(c):
    return Block(
        c,
        [
            [("branch3x3_1", 192, 1, 1, 0), ("branch3x3_2", 320, 3, 2, 0)],
            [
                ("branch7x7x3_1", 192, 1, 1, 0),
                ("branch7x7x3_2", 192, (1, 7), 1, (0, 3)),
                ("branch7x7x3_3", 192, (7, 1), 1, (3, 0)),
                ("branch7x7x3_4", 192, 3, 2, 0),
            ],
        ],
        "reduce",
    )


class FIDInception(nn.Module):
    """pixels: b 3 h w in [0, 1], of any size -> features b 2048 and logits b 1008."""

    def __init__(self):
        super().__init__()
        self.Conv2d_1a_3x3 = Basic(3, 32, 3, 2)
        self.Conv2d_2a_3x3 = Basic(32, 32, 3)
        self.Conv2d_2b_3x3 = Basic(32, 64, 3, 1, 1)
        self.Conv2d_3b_1x1 = Basic(64, 80)
        self.Conv2d_4a_3x3 = Basic(80, 192, 3)
        self.Mixed_5b, self.Mixed_5c = block_a(192, 32), block_a(256, 64)
        self.Mixed_5d, self.Mixed_6a = block_a(288, 64), block_b(288)
        self.Mixed_6b, self.Mixed_6c = block_c(768, 128), block_c(768, 160)
        self.Mixed_6d, self.Mixed_6e = block_c(768, 160), block_c(768, 192)
        self.Mixed_7a = block_d(768)
        self.Mixed_7b, self.Mixed_7c = BlockE(1280, "average"), BlockE(2048, "largest")
        self.fc = nn.Linear(2048, 1008)

    def forward(self, pixels):
        x = F.interpolate(pixels, size=(299, 299), mode="bilinear", align_corners=False)
        x = 2 * x - 1
        x = self.Conv2d_2b_3x3(self.Conv2d_2a_3x3(self.Conv2d_1a_3x3(x)))
        x = F.max_pool2d(x, 3, stride=2)
        x = F.max_pool2d(self.Conv2d_4a_3x3(self.Conv2d_3b_1x1(x)), 3, stride=2)
        for name in ("5b", "5c", "5d", "6a", "6b", "6c", "6d", "6e", "7a", "7b", "7c"):
            x = getattr(self, f"Mixed_{name}")(x)
        features = F.adaptive_avg_pool2d(x, 1).flatten(1)
        return features, self.fc(features)


def random_inception():
    """The network with all weights random, and statistics that keep its pixels of one size."""
    torch.manual_seed(0)
    network = FIDInception().eval()
    for name, parameter in network.named_parameters():
        values = torch.randn(parameter.shape)
        if parameter.ndim > 1:
            parameter.data = values * (2 * parameter.shape[0] / parameter.numel()) ** 0.5
        else:
            parameter.data = 0.1 * values + name.endswith("weight")
    for name, buffer in network.named_buffers():
        if name.endswith("running_mean"):
            buffer.copy_(0.1 * torch.randn(buffer.shape))
        elif name.endswith("running_var"):
            buffer.copy_(0.8 + 0.4 * torch.rand(buffer.shape))
    return network
