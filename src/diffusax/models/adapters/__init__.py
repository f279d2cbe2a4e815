"""What changes layers of a network from outside: LoRA, image prompts, FreeU.

A network is never rewritten for them: a layer is given the arrays of its adapters with its input.
"""
