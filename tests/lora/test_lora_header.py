"""The header of kohya's files, by which other programs know what a LoRA is for."""

import numpy as np
import pytest
from safetensors import safe_open

from diffusax.lora import write_lora

TEXT = ("text_encoder", "text_model.encoder.layers.0.self_attn.q_proj")


def layer(width: int, rank: int = 4, alpha: float | None = 2, **more) -> dict[str, np.ndarray]:
    parts = {"down": np.ones((rank, width), np.float32), "up": np.ones((6, rank), np.float32)}
    if alpha is not None:
        parts["alpha"] = np.float32(alpha)
    return {**parts, **more}


def header(tmp_path, layers, encoders: int = 1) -> dict[str, str]:
    write_lora(tmp_path / "lora.safetensors", layers, "kohya", encoders=encoders)
    with safe_open(tmp_path / "lora.safetensors", "np") as file:
        return file.metadata()


def attention(width: int, *, context: str = "attn2.to_v", **options):
    path = f"mid_block.attentions.0.transformer_blocks.0.{context}"
    return {("unet", path): layer(width, **options)}


@pytest.mark.parametrize(
    ("width", "model", "v2"),
    [(768, "sd_v1", "False"), (1024, "sd_v2", "True"), (2048, "sdxl_base_v1-0", "False")],
)
def test_it_names_the_model_rank_and_alpha(tmp_path, width, model, v2):
    """As sd-scripts' networks/extract_lora_from_models.py writes them."""
    layers = {TEXT: layer(64), **attention(width)}
    assert header(tmp_path, layers) == {
        "ss_v2": v2,
        "ss_base_model_version": model,
        "ss_network_module": "networks.lora",
        "ss_network_dim": "4",
        "ss_network_alpha": "2.0",
    }


def test_two_text_encoders_are_those_of_sdxl(tmp_path):
    assert header(tmp_path, {TEXT: layer(64)}, 2)["ss_base_model_version"] == "sdxl_base_v1-0"


def test_ranks_and_alphas_that_differ_are_dynamic(tmp_path):
    found = header(tmp_path, {TEXT: layer(64, 8, None), **attention(768, alpha=4)})
    assert (found["ss_network_dim"], found["ss_network_alpha"]) == ("Dynamic", "Dynamic")
    found = header(tmp_path, {TEXT: layer(64, alpha=None), **attention(768, alpha=4)})
    assert (found["ss_network_dim"], found["ss_network_alpha"]) == ("4", "4.0")


def test_lengths_of_columns_are_lycoris(tmp_path):
    found = header(tmp_path, attention(768, magnitude=np.ones(6, np.float32)))
    assert found["ss_network_module"] == "lycoris.kohya"


@pytest.mark.parametrize(
    "layers",
    [
        {TEXT: layer(64)},
        attention(320, context="attn1.to_k"),
        attention(32),
        {**attention(768), TEXT: {"diff": np.ones((6, 64), np.float32)}},
    ],
)
def test_of_an_unknown_model_it_says_nothing(tmp_path, layers):
    assert header(tmp_path, layers) == {"format": "pt"}
