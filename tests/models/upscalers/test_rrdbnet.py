"""RRDBNet against a plain one in PyTorch, under all names that files have."""

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn
from torch.nn import functional

from diffusax.checkpoints.upscalers import describe_upscaler, read_upscaler
from diffusax.serving.engine import upscaling
from diffusax.serving.engine.upscaling import upscaled

WIDTH, GROW, BLOCKS = 12, 6, 2


def conv(c, d):
    return nn.Conv2d(c, d, 3, padding=1)


class Dense(nn.Module):
    def __init__(self):
        super().__init__()
        for i in range(5):
            setattr(self, f"conv{i + 1}", conv(WIDTH + i * GROW, GROW if i < 4 else WIDTH))

    def forward(self, x):
        seen = [x]
        for i in range(4):
            y = getattr(self, f"conv{i + 1}")(torch.cat(seen, 1))
            seen.append(functional.leaky_relu(y, 0.2))
        return self.conv5(torch.cat(seen, 1)) * 0.2 + x


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.rdb1, self.rdb2, self.rdb3 = Dense(), Dense(), Dense()

    def forward(self, x):
        return self.rdb3(self.rdb2(self.rdb1(x))) * 0.2 + x


class Net(nn.Module):
    """BasicSR's network, with any number of doublings."""

    def __init__(self, unshuffle=1, doublings=2):
        super().__init__()
        self.unshuffle, self.doublings = unshuffle, doublings
        self.conv_first = conv(3 * unshuffle**2, WIDTH)
        self.body = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.conv_body = conv(WIDTH, WIDTH)
        for i in range(doublings):
            setattr(self, f"conv_up{i + 1}", conv(WIDTH, WIDTH))
        self.conv_hr, self.conv_last = conv(WIDTH, WIDTH), conv(WIDTH, 3)

    def forward(self, x):
        if self.unshuffle > 1:
            x = functional.pixel_unshuffle(x, self.unshuffle)
        x = self.conv_first(x)
        x = x + self.conv_body(self.body(x))
        for i in range(self.doublings):
            x = functional.interpolate(x, scale_factor=2, mode="nearest")
            x = functional.leaky_relu(getattr(self, f"conv_up{i + 1}")(x), 0.2)
        return self.conv_last(functional.leaky_relu(self.conv_hr(x), 0.2))


def numbered(name, doublings):
    """The name in the form whose layers are numbered."""
    layer, _, rest = name.partition(".")
    if layer == "body":
        block, rdb, inner, kind = rest.split(".")
        return f"model.1.sub.{block}.{rdb.upper()}.{inner}.0.{kind}"
    ups = {f"conv_up{i + 1}": 3 * (i + 1) for i in range(doublings)}
    after = 3 * doublings + 2
    places = {"conv_first": 0, "conv_body": f"1.sub.{BLOCKS}", "conv_hr": after, **ups}
    return f"model.{({**places, 'conv_last': after + 2})[layer]}.{rest}"


def first_release(name, doublings):
    for own, old in (("body", "RRDB_trunk"), ("rdb", "RDB"), ("conv_RRDB_trunk", "trunk_conv")):
        name = name.replace(own, old)
    return name.replace("conv_up", "upconv").replace("conv_hr", "HRconv")


NAMES = {
    "real": lambda name, doublings: name,
    "wrapped": lambda name, doublings: f"params_ema.{name}",
    "numbered": numbered,
    "first": first_release,
}


def saved(folder, net, naming="real", dtype=torch.float32):
    torch.manual_seed(0)
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.15)
    tensors = {
        NAMES[naming](name, net.doublings): tensor.to(dtype).contiguous()
        for name, tensor in net.state_dict().items()
    }
    path = folder / f"4x-{naming}.safetensors"
    safetensors.torch.save_file(tensors, path)
    return path


@pytest.mark.parametrize(
    ("naming", "unshuffle", "doublings", "scale"),
    [
        ("real", 1, 2, 4),
        ("real", 2, 2, 2),
        ("real", 4, 2, 1),
        ("wrapped", 1, 2, 4),
        ("numbered", 1, 2, 4),
        ("numbered", 1, 1, 2),
        ("numbered", 1, 3, 8),
        ("numbered", 1, 0, 1),
        ("first", 1, 2, 4),
    ],
)
def test_pixels_are_pytorch_s(tmp_path, naming, unshuffle, doublings, scale):
    net = Net(unshuffle, doublings)
    path = saved(tmp_path, net, naming)
    config = describe_upscaler(path)
    assert (config.num_feat, config.num_grow_ch, config.num_block) == (WIDTH, GROW, BLOCKS)
    assert config.scale == scale
    network, params = read_upscaler(path)
    x = torch.rand(2, 3, 16, 24, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = net(x).permute(0, 2, 3, 1).numpy()
    found = np.asarray(network.apply(params, x.permute(0, 2, 3, 1).numpy()))
    assert found.shape == (2, 16 * scale, 24 * scale, 3)
    assert expected.std() > 0.1
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_files_of_half_precision_are_read_in_single(tmp_path):
    path = saved(tmp_path, Net(), dtype=torch.float16)
    _, params = read_upscaler(path)
    assert params["conv_last"]["kernel"].dtype == np.float32


def test_tiles_are_parts_of_the_whole(tmp_path, monkeypatch):
    network, params = read_upscaler(saved(tmp_path, Net(doublings=1)))
    pixels = np.random.default_rng(0).random((130, 150, 3), np.float32)
    whole = np.asarray(network.apply(params, pixels[None]))[0]
    monkeypatch.setattr(upscaling, "_TILE", 120)
    # With this halo all that a pixel of two blocks depends on is in its tile.
    monkeypatch.setattr(upscaling, "_HALO", 38)
    found = upscaled(network, params, pixels)
    assert found.shape == whole.shape == (260, 300, 3)
    inner = (slice(76, -76),) * 2
    np.testing.assert_allclose(found[inner], whole[inner], atol=1e-4)
    # At the border the tiles see the image mirrored, and the whole nothing.
    assert abs(found - whole).max() > 1e-3


@pytest.mark.parametrize("size", [(64, 32), (70, 45), (31, 33)])
def test_small_images_are_whole(tmp_path, size):
    network, params = read_upscaler(saved(tmp_path, Net(2)))
    pixels = np.random.default_rng(0).random((*size, 3), np.float32)
    found = upscaled(network, params, pixels)
    assert found.shape == (size[0] * 2, size[1] * 2, 3)
    if size == (64, 32):
        whole = np.asarray(network.apply(params, pixels[None]))[0]
        np.testing.assert_allclose(found, whole, atol=1e-4)


def test_other_networks_are_refused(tmp_path):
    path = tmp_path / "other.safetensors"
    safetensors.torch.save_file({"conv.weight": torch.zeros(3, 3)}, path)
    with pytest.raises(ValueError, match="must hold an ESRGAN or Real-ESRGAN network"):
        describe_upscaler(path)
    net = Net()
    net.conv_last = conv(WIDTH, 1)
    with pytest.raises(ValueError, match="three colours"):
        describe_upscaler(saved(tmp_path, net))
