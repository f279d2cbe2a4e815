"""ComfyUI's tensors to images of the server's API, and back."""

import base64
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image


def images_to_send(images: torch.Tensor) -> list[str]:
    """Encodes images as PNG files, each in a data URI.

    images: an IMAGE, [batch, height, width, channels], or a MASK, [batch, height, width], from 0
        to 1.
    """
    return [_data_uri(Image.fromarray(array)) for array in _to_bytes(images)]


def images_of(files: Sequence[bytes]) -> tuple[torch.Tensor, list[str]]:
    """Decodes PNG files of the same size.

    Returns:
        An IMAGE, [batch, height, width, 3] from 0 to 1, and the settings in each file.
    """
    arrays, texts = [], []
    for data in files:
        with Image.open(io.BytesIO(data)) as image:
            image.load()
            texts.append(str(image.info.get("parameters", "")))
            arrays.append(np.asarray(image.convert("RGB"), np.float32) / 255)
    return torch.from_numpy(np.stack(arrays)), texts


def preview_of(data_uri: str) -> Image.Image:
    """Decodes the preview in an event."""
    image = Image.open(io.BytesIO(base64.b64decode(data_uri.partition(",")[2])))
    return image.convert("RGB")


def _to_bytes(values: torch.Tensor) -> Any:
    """Rounds values from 0 to 1 to bytes."""
    return (values.detach().cpu().float().numpy().clip(0, 1) * 255).round().astype(np.uint8)


def _data_uri(image: Image.Image) -> str:
    file = io.BytesIO()
    image.save(file, "PNG", compress_level=1)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
