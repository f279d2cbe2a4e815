"""Training of low-rank adapters (LoRA) beside networks that stay as they are."""
