"""Language models as transformer families condition on them: a decoder (Qwen3) and T5's encoder."""
