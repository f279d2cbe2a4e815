"""Reads ESRGAN's networks from single files, under the names of any of its versions."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diffusax.checkpoints.tensors import Entry, read_entries
from diffusax.checkpoints.tree import load_entries
from diffusax.models.network import Network, Params
from diffusax.models.upscalers.rrdbnet import RRDBNet, RRDBNetConfig

_WRAPPERS = ("params_ema.", "params.", "module.")
_OLDER = {
    "RRDB_trunk": "body",
    "trunk_conv": "conv_body",
    "HRconv": "conv_hr",
    **{f"upconv{i}": f"conv_up{i}" for i in (1, 2, 3)},
    **{f"RDB{i}": f"rdb{i}" for i in (1, 2, 3)},
}
"""The names of ESRGAN's first release, by which Real-ESRGAN calls the same layers."""
_NUMBERED = re.compile(r"model\.1\.sub\.(\d+)\.RDB([123])\.conv([1-5])\.0\.(weight|bias)")
_WEIGHT = "conv_first.weight"


def describe_upscaler(path: Path) -> RRDBNetConfig:
    """Returns the options of the network in a file, from its header alone.

    Raises:
        ValueError: the file cannot be read, or holds another network.
    """
    return _config(path, _named(read_entries(path)))


def read_upscaler(path: Path, *, device: Any = None) -> tuple[Network, Params]:
    """Reads the network in a file, and its parameters in float32.

    Raises:
        ValueError: the file cannot be read, or holds another network.
    """
    entries = _named(read_entries(path))
    network = Network(RRDBNet, _config(path, entries))
    params = load_entries(
        RRDBNet, network.shapes, [entries], where=str(path), dtype="float32", device=device
    )
    return network, params


def _named(entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """Returns the tensors by Real-ESRGAN's names."""
    wrapper = next((w for w in _WRAPPERS if all(name.startswith(w) for name in entries)), "")
    plain = {name.removeprefix(wrapper): entry for name, entry in entries.items()}
    if "model.0.weight" in plain:
        return _from_numbers(plain)
    return {
        ".".join(_OLDER.get(part, part) for part in name.split(".")): entry
        for name, entry in plain.items()
    }


def _from_numbers(entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """Renames the layers of the form whose parts are numbered, `model.1.sub.0.RDB1.conv1.0`."""
    outer = sorted({int(n.split(".")[1]) for n in entries if re.match(r"model\.\d+\.weight", n)})
    ups = [f"conv_up{i + 1}" for i in range(len(outer) - 3)]
    layers = dict(zip(outer, ["conv_first", *ups, "conv_hr", "conv_last"]))
    blocks = [int(found[1]) for name in entries if (found := _NUMBERED.fullmatch(name))]
    last = f"model.1.sub.{max(blocks, default=-1) + 1}."
    renamed: dict[str, Entry] = {}
    for name, entry in entries.items():
        parts = name.split(".")
        if found := _NUMBERED.fullmatch(name):
            name = f"body.{found[1]}.rdb{found[2]}.conv{found[3]}.{found[4]}"
        elif name.startswith(last):
            name = f"conv_body.{name.removeprefix(last)}"
        elif len(parts) == 3 and parts[1].isdecimal():
            name = f"{layers.get(int(parts[1]), parts[1])}.{parts[2]}"
        renamed[name] = entry
    return renamed


def _config(path: Path, entries: Mapping[str, Entry]) -> RRDBNetConfig:
    """Returns the options that the shapes tell.

    Raises:
        ValueError: it is another network.
    """
    known = {"conv_first.weight", "body.0.rdb1.conv1.weight", "conv_last.weight"}
    if not known <= set(entries):
        raise ValueError(
            f"{path} must hold an ESRGAN or Real-ESRGAN network (RRDBNet), which it does not; "
            "convert another version of it, or use another upscaler"
        )
    numbers = [int(name.split(".")[1]) for name in entries if name.startswith("body.")]
    features, channels = entries[_WEIGHT].shape[:2]
    side = {3: 1, 12: 2, 48: 4}.get(channels)
    colours = entries["conv_last.weight"].shape[0]
    if side is None or colours != 3:
        raise ValueError(
            f"{path} must be for images of three colours (got {channels} channels in, {colours} "
            "out)"
        )
    ups = {name for name in entries if re.fullmatch(r"conv_up\d\.weight", name)}
    options: dict[str, Any] = {"unshuffle": side, "doublings": len(ups)}
    grown = entries["body.0.rdb1.conv1.weight"].shape[0]
    return RRDBNetConfig(features, max(numbers) + 1, grown, **options)
