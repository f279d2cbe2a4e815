"""Encoders of texts and images: CLIP's towers, Qwen3 and T5.

One file for each network; `configs` reads what their checkpoints say of them.
"""
