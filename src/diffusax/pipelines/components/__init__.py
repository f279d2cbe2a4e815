"""What a pipeline is made of: networks, tokenizers, a scheduler and adapters.

Begin with `components`. `loading` reads them from a checkpoint's folder and writes them,
`attributes` gives them as `pipe.unet`, and the rest holds adapters and merges them.
"""
