"""Finds out how the tensors of safetensors files are encoded, from what lies beside them."""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar

import ml_dtypes
import msgspec
import numpy as np

from diffusax.checkpoints.encodings import Blocked, Codebook, Scaled, swizzled_size
from diffusax.checkpoints.entries import INSTEAD, Encoding, Entry, Shape

_FLOAT8 = {
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
}
_FLOATS = (*map(np.dtype, (np.float32, np.float16, ml_dtypes.bfloat16)), *_FLOAT8.values())
_E4M3, _E8M0 = _FLOAT8["float8_e4m3fn"], np.dtype(ml_dtypes.float8_e8m0fnu)
_BYTE, _INT8 = np.dtype(np.uint8), np.dtype(np.int8)
_SCALES = (".weight_scale", ".scale_weight")
_QUANT, _WHOLE, _SMOOTH = ".comfy_quant", ".weight_scale_2", ".pre_quant_scale"
_ROWS = ".SCB"
_UNUSED = (".scale_input", ".input_scale", ".weight_format", ".comfy_attention.config")
_MARKER = "scaled_fp8"
_BITSANDBYTES = ".quant_state.bitsandbytes__"
_OF_BITSANDBYTES = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map")
_PREFIXES = ("", "model.diffusion_model.", "diffusion_model.")
"""What names in a file's header may lack."""
_FOREIGN = {
    ".wscales": "weights of four bits by SVDQuant (Nunchaku)",
    ".qzeros": "weights of four bits by AWQ or GPTQ",
    ".qweight": "weights of four bits by SVDQuant, AWQ or GPTQ",
    ".weight._data": "weights of quanto",
    ".weight_s_rel": "weights of asym_w4a8_int8",
}
"""Encodings that are not read, by the end of a tensor's name."""
_MAX_JSON = 2**16
_Length = Annotated[int, msgspec.Meta(ge=1, le=2**31)]
T = TypeVar("T")


class Rotation(msgspec.Struct):
    """ComfyUI's options of ConvRot."""

    convrot: bool = False
    convrot_groupsize: _Length | None = None


class Told(Rotation, kw_only=True):
    """ComfyUI's JSON beside a weight, of which other options do not change the numbers."""

    format: str
    params: Rotation | None = None


class ToldOfAll(msgspec.Struct):
    """ComfyUI's JSON in the header of a file."""

    layers: dict[str, str | Told]


class State(msgspec.Struct):
    """The JSON of bitsandbytes beside a weight."""

    blocksize: _Length
    shape: Annotated[tuple[_Length, ...], msgspec.Meta(min_length=1, max_length=5)]
    nested_blocksize: _Length = 256
    nested_offset: float = 0.0


def marked(
    files: Sequence[Mapping[str, Entry]], metadata: Mapping[str, str] | None = None
) -> list[dict[str, Entry]]:
    """Returns the tensors of a network's files, of which the encoded ones know how.

    What belongs to their encodings is left out. It may be in another of the files.

    Args:
        files: the places of the tensors by name, for each file.
        metadata: the texts in the header, by name.

    Raises:
        ValueError: a tensor is encoded in a way that is not read, or lacks a part.
    """
    everything: dict[str, Entry] = {}
    for entries in files:
        everything.update(entries)
    _refuse(everything)
    told = _told(everything, metadata or {})
    found: dict[str, Encoding] = {}
    shapes: dict[str, Shape] = {}
    beside: set[str] = set()
    for name in everything:
        module, _, leaf = name.rpartition(".")
        if leaf == "weight" and (own := _encoding(everything, module, told.get(module))):
            found[name], shapes[name] = own
        weight, mark, kind = name.partition(_BITSANDBYTES)
        if mark and weight in everything:
            found[weight], shapes[weight] = _codebook(everything, weight, name, kind)
            beside |= {name, *(f"{weight}{end}" for end in _OF_BITSANDBYTES)}
    ends = (*_SCALES, _QUANT, _WHOLE, _SMOOTH, _ROWS, *_UNUSED)
    return [
        {
            name: _encoded(entry, found[name], shapes[name]) if name in found else entry
            for name, entry in entries.items()
            if name not in beside and not name.endswith(ends) and name.rpartition(".")[2] != _MARKER
        }
        for entries in files
    ]


def _encoded(entry: Entry, encoding: Encoding, shape: Shape) -> Entry:
    # Numbers of four bits may be stored as if they were of another dtype.
    dtype = _BYTE if isinstance(encoding, Codebook) else entry.dtype
    return entry._replace(encoding=encoding, shape=shape, dtype=dtype)


def _refuse(entries: Mapping[str, Entry]) -> None:
    for name, entry in entries.items():
        end = next((end for end in _FOREIGN if name.endswith(end)), None)
        if end is not None:
            raise ValueError(
                f"{entry.path}: {name} is of {_FOREIGN[end]}, which diffusax does not read; "
                f"{INSTEAD}"
            )


def _told(entries: Mapping[str, Entry], metadata: Mapping[str, str]) -> dict[str, Told]:
    """Returns what a file says of the encoding of modules, by their names."""
    found: dict[str, Told] = {}
    text = metadata.get("_quantization_metadata")
    if text is not None and entries:
        path = next(iter(entries.values())).path
        layers = _parsed(text, ToldOfAll, f"{path}: _quantization_metadata").layers
        for name, own in layers.items():
            prefix = next((p for p in _PREFIXES if f"{p}{name}.weight" in entries), "")
            found[f"{prefix}{name}"] = Told(format=own) if isinstance(own, str) else own
    for name, entry in entries.items():
        if name.endswith(_QUANT):
            found[name.removesuffix(_QUANT)] = _parsed(_read(entry, name), Told, _at(entry, name))
    return found


def _encoding(
    entries: Mapping[str, Entry], module: str, told: Told | None
) -> tuple[Encoding, Shape] | None:
    """Returns the encoding and the shape of a module's weight; None for one that is not encoded."""
    weight = f"{module}.weight"
    entry, rows = entries[weight], entries.get(f"{module}{_ROWS}")
    scale = next((entries[k] for end in _SCALES if (k := f"{module}{end}") in entries), None)
    whole, smooth = entries.get(f"{module}{_WHOLE}"), entries.get(f"{module}{_SMOOTH}")
    where = _at(entry, weight)
    if rows is not None:
        _need(where, entry.dtype == _INT8, f"has SCB, but is {entry.dtype}, not int8")
        return _scaled(where, entry, rows, "int8 of bitsandbytes", factor=1 / 127)
    if told is not None:
        return _as_told(where, entry, told, scale, whole, smooth)
    if scale is None:
        return None
    if whole is not None:
        return _nvfp4(where, entry, scale, whole, smooth, comfy=False)
    known = entry.dtype in (*_FLOATS, _INT8)
    _need(where, known, f"is {entry.dtype} with scales of shape {scale.shape}")
    return _scaled(where, entry, scale, f"{entry.dtype} with a scale")


def _as_told(
    where: str,
    entry: Entry,
    told: Told,
    scale: Entry | None,
    whole: Entry | None,
    smooth: Entry | None,
) -> tuple[Encoding, Shape] | None:
    """Returns the encoding that ComfyUI's `comfy_quant` names."""
    kind = told.format
    if kind not in (*_FLOAT8, "int8_tensorwise", "mxfp8", "nvfp4"):
        raise ValueError(f"{where} is in the format {kind[:40]!r}, which is not read; {INSTEAD}")
    if scale is None:
        raise ValueError(f"{where} is {kind}, but its weight_scale is missing; download it again")
    if kind == "nvfp4":
        _need(where, whole is not None, "is nvfp4, but its weight_scale_2 is missing")
        assert whole is not None
        return _nvfp4(where, entry, scale, whole, smooth, comfy=True)
    if kind == "mxfp8":
        return _mxfp8(where, entry, scale)
    stored = _FLOAT8.get(kind, _INT8)
    _need(where, entry.dtype == stored, f"is {entry.dtype}, but said to be {kind}")
    group = _group(where, told, entry) if kind == "int8_tensorwise" else 0
    name = f"int8 by ConvRot (groups of {group})" if group else f"{entry.dtype} with a scale"
    return _scaled(where, entry, scale, name, rotation=group)


def _group(where: str, told: Told, entry: Entry) -> int:
    """Returns the length of ConvRot's groups; 0 without."""
    more = told.params or Rotation()
    if not told.convrot and not more.convrot:
        return 0
    group = told.convrot_groupsize or more.convrot_groupsize or 256
    powers = [4**i for i in range(1, 9)]
    fits = group in powers and len(entry.shape) == 2 and entry.shape[1] % group == 0
    _need(where, fits, f"has the shape {entry.shape}, and groups of {group} for ConvRot")
    return group


def _scaled(
    where: str, entry: Entry, scale: Entry, name: str, *, factor: float = 1.0, rotation: int = 0
) -> tuple[Encoding, Shape]:
    count = math.prod(scale.shape)
    rows = entry.shape[0] if entry.shape else 1
    fits = scale.dtype in _FLOATS and (count == 1 or (count == rows and scale.shape[0] == rows))
    _need(where, fits, f"is {entry.dtype} with scales of shape {scale.shape}")
    width = math.prod(entry.shape[1:])
    return Scaled(name, max(width, 1), scale, factor, rotation), entry.shape


def _mxfp8(where: str, entry: Entry, scale: Entry) -> tuple[Encoding, Shape]:
    fits = entry.dtype in _FLOAT8.values() and scale.dtype in (_BYTE, _E8M0)
    fits = fits and len(entry.shape) == 2 and entry.shape[1] % 32 == 0 and entry.shape[1] > 0
    fits = fits and scale.nbytes == swizzled_size(entry.shape[0], entry.shape[1] // 32)
    _need(where, fits, f"is mxfp8 of shape {entry.shape} with scales of shape {scale.shape}")
    return Blocked("mxfp8", entry.shape[1], 32, scale, swizzled=True), entry.shape


def _nvfp4(
    where: str, entry: Entry, scale: Entry, whole: Entry, smooth: Entry | None, *, comfy: bool
) -> tuple[Encoding, Shape]:
    wrong = f"is nvfp4 of shape {entry.shape} with scales of shape {scale.shape}"
    fits = entry.dtype == _BYTE and len(entry.shape) == 2 and scale.dtype in (_BYTE, _E4M3)
    _need(where, fits and entry.shape[1] > 0 and entry.shape[1] % 8 == 0, wrong)
    shape = (entry.shape[0], 2 * entry.shape[1])
    blocks = shape[1] // 16
    fits = scale.nbytes == (swizzled_size(shape[0], blocks) if comfy else shape[0] * blocks)
    fits = fits and _counts(whole, 1, _FLOATS)
    _need(where, fits and (smooth is None or _counts(smooth, shape[1], _FLOATS)), wrong)
    kind = Blocked(
        *("nvfp4", shape[1], 16, scale._replace(dtype=_E4M3), whole, smooth),
        swizzled=comfy,
        high_first=comfy,
    )
    return kind, shape


def _codebook(
    entries: Mapping[str, Entry], weight: str, state: str, kind: str
) -> tuple[Encoding, Shape]:
    """Returns the encoding of a weight of four bits by bitsandbytes."""
    entry, where = entries[weight], _at(entries[weight], weight)
    told = _parsed(_read(entries[state], state), State, _at(entry, state))
    largest, table, nested, nested_table = (
        entries.get(f"{weight}{end}") for end in _OF_BITSANDBYTES
    )
    wrong = f"is {kind[:20]} of {entry.nbytes} bytes and the shape {told.shape}, or lacks a part"
    count = math.prod(told.shape)
    blocks = -(-count // told.blocksize)
    fits = kind in ("nf4", "fp4") and entry.nbytes == -(-count // 2)
    fits = fits and _counts(largest, blocks) and _counts(table, 16, _FLOATS)
    _need(where, fits, wrong)
    assert largest is not None
    assert table is not None
    if nested is None or nested_table is None:
        _need(where, nested is nested_table and largest.dtype in _FLOATS, wrong)
        return Codebook(kind, told.blocksize, largest, table), told.shape
    fits = _counts(nested, -(-blocks // told.nested_blocksize), _FLOATS)
    fits = fits and _counts(nested_table, 256, _FLOATS) and largest.dtype == _BYTE
    _need(where, fits, wrong)
    both = (nested, nested_table)
    more = (both, told.nested_blocksize, told.nested_offset)
    return Codebook(kind, told.blocksize, largest, table, *more), told.shape


def _counts(entry: Entry | None, count: int, dtypes: Sequence[np.dtype] = ()) -> bool:
    """Returns whether there is such a tensor, of so many numbers, and of one of these dtypes."""
    if entry is None or math.prod(entry.shape) != count:
        return False
    return not dtypes or entry.dtype in dtypes


def _need(where: str, fits: Any, what: str) -> None:
    if not fits:
        raise ValueError(f"{where} {what}; download it again, or {INSTEAD}")


def _read(entry: Entry, name: str) -> bytes:
    if entry.nbytes > _MAX_JSON:
        raise ValueError(f"{entry.path}: {name} has {entry.nbytes} bytes; download it again")
    with entry.path.open("rb") as file:
        file.seek(entry.offset)
        return file.read(entry.nbytes)


def _at(entry: Entry, name: str) -> str:
    return f"{entry.path}: {name}"


def _parsed(text: str | bytes, kind: type[T], where: str) -> T:
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"{where} does not say how tensors are encoded ({reason}); download the file again"
        ) from None
