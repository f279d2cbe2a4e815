"""The scales of tensors in eight bits, as ComfyUI and Black Forest Labs write them.

Beside a weight in float8 stands one number that it is to be multiplied by: `scale_weight` or
`weight_scale`. Those of inputs are for products in eight bits, and are left out.
"""

from collections.abc import Mapping

from diffusax.checkpoints.tensors import Entry

_OF_WEIGHTS = (".scale_weight", ".weight_scale")
_OF_OTHERS = (".scale_input", ".input_scale", ".comfy_quant")
_MARKER = "scaled_fp8"


def with_scales(entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """Returns the tensors of a file, of which those with a scale know where it is.

    Raises:
        ValueError: a tensor has several scales.
    """
    found = {
        name: entry
        for name, entry in entries.items()
        if not name.endswith((*_OF_WEIGHTS, *_OF_OTHERS)) and name.rpartition(".")[2] != _MARKER
    }
    for name, scale in entries.items():
        end = next((end for end in _OF_WEIGHTS if name.endswith(end)), None)
        weight = None if end is None else f"{name.removesuffix(end)}.weight"
        if weight not in found:
            continue
        entry = found[weight]
        if scale.nbytes != scale.dtype.itemsize or entry.dtype.itemsize != 1:
            raise ValueError(
                f"{entry.path}: {weight} is {entry.dtype} with scales of shape {scale.shape}, but "
                "diffusax reads float8 with one scale; take the file in float8 or bfloat16"
            )
        found[weight] = entry._replace(scale=scale)
    return found
