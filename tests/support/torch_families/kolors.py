"""Kolors, SDXL's UNet with ChatGLM as the reader; needs SentencePiece for its tokenizer."""

import tempfile
from pathlib import Path
from typing import Any

from .autoencoders import autoencoder
from .registry import IMAGE, TEXT, add
from .shared import START
from .stable_diffusion import LEVELS, SIZE, unet
from .weights import parts, randomize, scheduler


def chat_glm() -> Any:
    """Kolors' language model."""
    from diffusers.pipelines.kolors.text_encoder import ChatGLMConfig, ChatGLMModel

    config = ChatGLMConfig(
        num_layers=2,
        padded_vocab_size=400,
        hidden_size=32,
        ffn_hidden_size=64,
        kv_channels=8,
        num_attention_heads=4,
        seq_length=256,
        multi_query_attention=True,
        multi_query_group_num=2,
        add_qkv_bias=True,
        rmsnorm=True,
        original_rope=True,
    )
    return randomize(ChatGLMModel(config))


def chat_glm_tokenizer() -> Any:
    """Kolors' tokenizer, with a vocabulary of bytes."""
    import sentencepiece
    from diffusers.pipelines.kolors.tokenizer import ChatGLMTokenizer

    with tempfile.TemporaryDirectory() as folder:
        prefix = str(Path(folder) / "tokenizer")
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(["a red apple and a green pear on two tables"] * 4),
            model_prefix=prefix,
            vocab_size=300,
            byte_fallback=True,
            hard_vocab_limit=False,
            minloglevel=2,
        )
        return ChatGLMTokenizer(f"{prefix}.model")


kolors = parts(
    vae=autoencoder,
    text_encoder=chat_glm,
    tokenizer=chat_glm_tokenizer,
    scheduler=scheduler("EulerDiscreteScheduler", **LEVELS),
    unet=lambda: unet(
        "xl",
        cross_attention_dim=32,
        encoder_hid_dim=32,
        encoder_hid_dim_type="text_proj",
        projection_class_embeddings_input_dim=32 + 6 * 8,
    ),
)
SHORT = {**SIZE, "max_sequence_length": 64}
NEEDS = {"needs": ("sentencepiece",)}
add("KolorsPipeline", TEXT, kolors, **NEEDS, **SHORT)
add("KolorsPAGPipeline", TEXT, kolors, **NEEDS, **SHORT)
add("KolorsImg2ImgPipeline", IMAGE, kolors, **NEEDS, **START, **SHORT)
