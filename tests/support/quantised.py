"""Weights in the encodings that people's files have, written by the encodings' own libraries."""

import json
import warnings
from collections.abc import Callable

import gguf
import numpy as np
import torch
from diffusers.quantizers.bfl import utils as bfl

from diffusax.checkpoints.encodings import rotated
from diffusax.checkpoints.entries import Kept

with warnings.catch_warnings():
    warnings.simplefilter("ignore")

    from bitsandbytes import functional
    from comfy_kitchen.tensor import QuantizedTensor

Stored = dict[str, torch.Tensor]
"""What a file has in the place of a weight, by the ends of the names."""


def marking(**options) -> torch.Tensor:
    """ComfyUI's JSON beside a weight."""
    return torch.tensor(list(json.dumps(options).encode()), dtype=torch.uint8)


def _plain(weight: torch.Tensor) -> tuple[Stored, torch.Tensor]:
    eight = weight.to(torch.float8_e4m3fn)
    return {"weight": eight}, eight.float()


def _scaled(
    ends: tuple[str, str], *, marked: bool = False, dtype: torch.dtype = torch.float8_e4m3fn
) -> Callable:
    def write(weight):
        scale = weight.abs().max() / torch.finfo(dtype).max
        eight = (weight / scale).to(dtype)
        stored = {"weight": eight, ends[0]: scale, ends[1]: 2 * scale}
        if marked:
            stored["comfy_quant"] = marking(format=str(dtype).removeprefix("torch."))
        return stored, eight.float() * scale

    return write


def _fp8r(weight):
    eight, scale = bfl.quantize_fp8r(weight)
    return {"weight": eight, "weight_scale": scale}, bfl.dequantize_fp8r(eight, scale)


def _kitchen(layout: str, told: dict, shape: tuple[int, ...] | None = None, **options) -> Callable:
    """An encoding of comfy_kitchen; shape is what the scales are written in."""

    def write(weight):
        made = QuantizedTensor.from_float(weight, layout, **options)
        stored = made.state_dict("weight")
        if shape is not None:
            stored["weight_scale"] = stored["weight_scale"].reshape(shape)
        return {**stored, "comfy_quant": marking(**told)}, made.dequantize()

    return write


def _int8(shape: tuple[int, ...] | None = None, *, group: int = 0) -> Callable:
    told = {"format": "int8_tensorwise"}
    if group:
        told |= {"convrot": True, "convrot_groupsize": group}
    rotation = {"convrot": True, "convrot_groupsize": group} if group else {}
    by_row = {"per_channel": True} if group or shape is not None else {}
    return _kitchen("TensorWiseINT8Layout", told, shape, **by_row, **rotation)


def _nvfp4_of_bfl(weight):
    stored = bfl.quantize_nvfp4(weight)
    ends = ("weight", "weight_scale", "weight_scale_2")
    more = {"input_scale": torch.tensor(0.5)}
    return dict(zip(ends, stored, strict=True)) | more, bfl.dequantize_nvfp4(*stored)


def _smoothed(weight):
    stored, expected = _kitchen("TensorCoreNVFP4Layout", {"format": "nvfp4"})(weight)
    smooth = torch.linspace(0.5, 2, weight.shape[1])
    return {**stored, "pre_quant_scale": smooth}, expected * smooth


def _four_bits(kind: str, *, nested: bool) -> Callable:
    def write(weight):
        stored, state = functional.quantize_4bit(
            weight, quant_type=kind, compress_statistics=nested, blocksize=64
        )
        more = {f"weight.{end}": x for end, x in state.as_dict(packed=True).items()}
        return {"weight": stored, **more}, functional.dequantize_4bit(stored, state)

    return write


def _rows_of_bitsandbytes(weight):
    stored, scale, _ = functional.int8_vectorwise_quant(weight.half())
    more = {"SCB": scale, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return {"weight": stored, **more}, functional.int8_vectorwise_dequant(stored, scale)


ENCODINGS: dict[str, Callable[[torch.Tensor], tuple[Stored, torch.Tensor]]] = {
    "fp8": _plain,
    "scaled fp8": _scaled(("scale_weight", "scale_input")),
    "fp8 of ComfyUI": _scaled(("weight_scale", "input_scale"), marked=True),
    "e5m2 of ComfyUI": _scaled(
        ("weight_scale", "input_scale"), marked=True, dtype=torch.float8_e5m2
    ),
    "fp8r": _fp8r,
    "int8": _int8(),
    "int8 by row": _int8((-1, 1)),
    "int8 by row, flat": _int8((-1,)),
    "ConvRot": _int8(group=64),
    "mxfp8": _kitchen("TensorCoreMXFP8Layout", {"format": "mxfp8"}),
    "nvfp4": _kitchen("TensorCoreNVFP4Layout", {"format": "nvfp4"}),
    "nvfp4, smoothed": _smoothed,
    "nvfp4 of BFL": _nvfp4_of_bfl,
    "nf4": _four_bits("nf4", nested=False),
    "nf4, nested": _four_bits("nf4", nested=True),
    "fp4": _four_bits("fp4", nested=False),
    "int8 of bitsandbytes": _rows_of_bitsandbytes,
}
"""For each encoding, a function of a weight that returns what is stored, and its exact numbers."""
EIGHT_BITS = [*list(ENCODINGS)[:11], "nvfp4 of BFL", "int8 of bitsandbytes"]
"""The encodings whose numbers are kept as they are, in eight bits."""


def multiplied(kept: Kept) -> np.ndarray:
    """The numbers of what was kept of a matrix, by the definition."""
    rows, columns = kept.values.shape

    def each(x: np.ndarray) -> np.ndarray:
        x = x.astype(np.float32)
        x = x[:, None] if x.ndim == 1 else x
        return np.repeat(x, columns // x.shape[1], axis=1) if x.ndim else x

    scale = each(kept.scale) if kept.fine is None else each(kept.scale) * each(kept.fine)
    own = kept.values.astype(np.float32) * scale
    if kept.least:
        own = own - np.prod([each(x) for x in kept.least], axis=0)
    return rotated(own, kept.rotation) if kept.rotation else own.reshape(rows, columns)


def encoded(tensors: Stored, kind: str) -> tuple[Stored, Stored]:
    """A network's tensors with all matrices of fitting shape encoded, and their exact numbers."""
    stored, expected = {}, {}
    for name, tensor in tensors.items():
        module, _, leaf = name.rpartition(".")
        if tensor.ndim == 2 and leaf == "weight" and not any(n % 64 for n in tensor.shape):
            own, expected[name] = ENCODINGS[kind](tensor.float())
            stored |= {f"{module}.{end}": x.contiguous() for end, x in own.items()}
        else:
            stored[name] = expected[name] = tensor
    return stored, expected


def blocks(weight: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """A weight in blocks of one of ggml's types, and its exact numbers by the gguf package.

    The package cannot write those of 256 numbers; they are drawn, with scales of such a weight.
    """
    number = gguf.GGMLQuantizationType[kind]
    length, size = gguf.GGML_QUANT_SIZES[number]
    if length == 256:
        rng = np.random.default_rng(weight.size)
        shape = (weight.size // length, size)
        stored = rng.integers(0, 256, shape, np.uint8)
        for place, most in _HALVES[kind].items():
            scale = rng.uniform(0.1, 1, (shape[0], 1)) * most * weight.std()
            stored[:, place : place + 2] = scale.astype(np.float16).view(np.uint8)
        stored = stored.reshape(*weight.shape[:-1], -1)
    else:
        stored = gguf.quantize(weight, number)
    return stored, gguf.dequantize(stored, number).reshape(weight.shape)


_HALVES = {
    "Q4_K": {0: 1 / 256, 2: 1 / 256},
    "Q5_K": {0: 1 / 512, 2: 1 / 256},
    "Q6_K": {208: 1 / 2048},
}
"""The places of the scales in blocks of 256, with sizes that make numbers of about one."""


def save_gguf(path, tensors: Stored, kind: str, *, architecture: str | None, wide: bool = False):
    """Writes tensors as ComfyUI-GGUF does; returns their exact numbers.

    architecture: what the header names; None for the files of stable-diffusion.cpp. wide: whether
    tensors whose rows are no whole blocks are written in rows of 256, with their shape beside.
    """
    writer = gguf.GGUFWriter(path, architecture or "none")
    if architecture is None:
        writer.kv_data[0].clear()
    number = gguf.GGMLQuantizationType[kind]
    length = gguf.GGML_QUANT_SIZES[number][0]
    expected = {}
    for name, tensor in tensors.items():
        own = tensor.float().numpy()
        rows = own
        if wide and own.ndim > 1 and own.size % 256 == 0 and own.shape[-1] % length:
            rows = own.reshape(-1, 256)
            writer.add_array(f"comfy.gguf.orig_shape.{name}", own.shape)
        if own.ndim > 1 and rows.shape[-1] % length == 0:
            stored, numbers = blocks(rows, kind)
            writer.add_tensor(name, stored, raw_dtype=number)
            expected[name] = torch.from_numpy(numbers.reshape(own.shape).copy())
        else:
            writer.add_tensor(name, own.copy())
            expected[name] = tensor.float()
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected
