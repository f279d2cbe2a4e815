"""Encoders of texts and images: CLIP's towers, Qwen3 and T5."""
