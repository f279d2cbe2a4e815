"""Tiny language models with random weights, as text encoders."""

from typing import Any

import transformers

from support.tiny_tokenizers import (
    BERT_TOKENS,
    GEMMA_TOKENS,
    LLAMA_TOKENS,
    MISTRAL_TOKENS,
    QWEN_TOKENS,
    T5_TOKENS,
)

from .weights import randomize

DECODER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
GEMMA = {**DECODER, "vocab_size": len(GEMMA_TOKENS)}
LLAMA = {**DECODER, "vocab_size": len(LLAMA_TOKENS), "pad_token_id": 3}
QWEN = {**DECODER, "vocab_size": len(QWEN_TOKENS)}


def gemma(**changes: Any) -> Any:
    """Gemma with its last layer of tokens."""
    config = transformers.GemmaConfig(**{**GEMMA, **changes})
    return randomize(transformers.GemmaForCausalLM(config))


def gemma2(**changes: Any) -> Any:
    """Gemma 2, 32 channels."""
    return randomize(transformers.Gemma2Model(transformers.Gemma2Config(**{**GEMMA, **changes})))


def llama(**changes: Any) -> Any:
    """Llama with its last layer of tokens."""
    config = transformers.LlamaConfig(**{**LLAMA, **changes})
    return randomize(transformers.LlamaForCausalLM(config))


def glm(**changes: Any) -> Any:
    """GLM, for the tokenizer of Llama."""
    config = transformers.GlmConfig(**{**LLAMA, **changes})
    return randomize(transformers.GlmModel(config))


def smollm3(**changes: Any) -> Any:
    """SmolLM 3, for the tokenizer of Llama."""
    config = transformers.SmolLM3Config(**{**LLAMA, **changes})
    return randomize(transformers.SmolLM3ForCausalLM(config))


def qwen3(**changes: Any) -> Any:
    """Qwen 3, 32 channels."""
    return randomize(transformers.Qwen3Model(transformers.Qwen3Config(**{**QWEN, **changes})))


def qwen3_causal(**changes: Any) -> Any:
    """Qwen 3 with its last layer of tokens."""
    return randomize(transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**{**QWEN, **changes})))


def umt5() -> Any:
    """UMT5's encoder, for the tokenizer of T5."""
    config = transformers.UMT5Config(
        d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=len(T5_TOKENS)
    )
    return randomize(transformers.UMT5EncoderModel(config))


def bert() -> Any:
    """BERT, 32 channels."""
    config = transformers.BertConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=len(BERT_TOKENS),
    )
    return randomize(transformers.BertModel(config))


def qwen2_5_vl(**changes: Any) -> Any:
    """Qwen 2.5 VL, which reads pictures too."""
    text = {**QWEN, "rope_scaling": {"mrope_section": [1, 1, 2], "rope_type": "default"}}
    tokens = {
        "vision_start_token_id": QWEN_TOKENS.index("<|vision_start|>"),
        "vision_end_token_id": QWEN_TOKENS.index("<|vision_end|>"),
        "vision_token_id": QWEN_TOKENS.index("<|vision_pad|>"),
        "image_token_id": QWEN_TOKENS.index("<|image_pad|>"),
        "video_token_id": QWEN_TOKENS.index("<|video_pad|>"),
    }
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_heads": 2,
        "out_hidden_size": 32,
    }
    config = transformers.Qwen2_5_VLConfig(
        text_config={**text, **changes}, vision_config=vision, **tokens
    )
    return randomize(transformers.Qwen2_5_VLForConditionalGeneration(config))


SEEING = {"depth": 2, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2}


def _qwen3_vl(**changes: Any) -> Any:
    text = {**QWEN, "rope_scaling": {"mrope_section": [2, 1, 1], "rope_type": "default"}}
    tokens = {
        "vision_start_token_id": QWEN_TOKENS.index("<|vision_start|>"),
        "vision_end_token_id": QWEN_TOKENS.index("<|vision_end|>"),
        "image_token_id": QWEN_TOKENS.index("<|image_pad|>"),
        "video_token_id": QWEN_TOKENS.index("<|video_pad|>"),
    }
    vision = {
        **SEEING,
        "out_hidden_size": 32,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1],
    }
    return transformers.Qwen3VLConfig(
        text_config={**text, **changes}, vision_config=vision, **tokens
    )


def qwen3_vl(**changes: Any) -> Any:
    """Qwen 3 VL with its last layer of tokens."""
    return randomize(transformers.Qwen3VLForConditionalGeneration(_qwen3_vl(**changes)))


def qwen3_vl_model(**changes: Any) -> Any:
    """Qwen 3 VL without its last layer."""
    return randomize(transformers.Qwen3VLModel(_qwen3_vl(**changes)))


def _mistral3(**changes: Any) -> Any:
    text = {
        **DECODER,
        "model_type": "mistral",
        "vocab_size": len(MISTRAL_TOKENS),
        "sliding_window": None,
    }
    vision = {
        "model_type": "pixtral",
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "image_size": 28,
        "patch_size": 7,
    }
    return transformers.Mistral3Config(
        text_config={**text, **changes},
        vision_config=vision,
        vision_feature_layer=-1,
        image_token_index=MISTRAL_TOKENS.index("[IMG]"),
    )


def mistral3(**changes: Any) -> Any:
    """Mistral Small 3 with its last layer of tokens."""
    return randomize(transformers.Mistral3ForConditionalGeneration(_mistral3(**changes)))


def mistral3_model(**changes: Any) -> Any:
    """Mistral Small 3 without its last layer."""
    return randomize(transformers.Mistral3Model(_mistral3(**changes)))
