"""Transformers that denoise latents (Peebles and Xie 2023), one file each, and their blocks."""
