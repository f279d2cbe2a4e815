"""Tiny CLIPs and data sets to evaluate with."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import transformers
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from support.clip_vocabulary import write_clip_vocabulary
from support.data_sets import picture, png
from support.tiny import TEXT, randomize

VISION = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 30,
    "patch_size": 8,
}


def build_clip(folder: Path) -> transformers.CLIPModel:
    """A whole tiny CLIP in a folder, with its tokenizer and the size of its pictures."""
    write_clip_vocabulary(folder)
    config = transformers.CLIPConfig(text_config=TEXT, vision_config=VISION, projection_dim=16)
    model = randomize(transformers.CLIPModel(config))
    model.logit_scale.data = torch.tensor(2.0)
    model.save_pretrained(folder)
    CLIPImageProcessorPil(
        size={"shortest_edge": 30}, crop_size={"height": 30, "width": 30}
    ).save_pretrained(folder)
    return model


DINO = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 42,
    "patch_size": 14,
}


def build_dino(folder: Path, name: str = "Dinov2Model") -> Any:
    """A tiny DINOv2, or DINO (ViTModel), in a folder without a preprocessor_config.json."""
    config = getattr(transformers, f"{name.removesuffix('Model')}Config")(**DINO)
    model = randomize(getattr(transformers, name)(config))
    model.save_pretrained(folder)
    return model


def write_edits(file: Path, count: int, *, edited: bool = False, captions: bool = True) -> Path:
    """A Parquet file in the form of timbrooks/instructpix2pix-clip-filtered."""
    rows: list[dict[str, Any]] = [
        {
            "input_image": {"bytes": png(picture(i)), "path": None},
            "edit_prompt": f"turn {i} of them into pears",
        }
        for i in range(count)
    ]
    for i, row in enumerate(rows):
        if captions:
            row["original_prompt"] = f"a photo of {i} apples"
            row["edited_prompt"] = f"a photo of {i} pears"
        if edited:
            row["edited_image"] = {"bytes": png(picture(100 + i)), "path": None}
    pq.write_table(pa.Table.from_pylist(rows), file)
    return file
