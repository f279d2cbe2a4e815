"""Trains the tiny checkpoint for a few steps and writes the result.

python devices_run.py MODEL DATA OUTPUT name=value ...
"""

import sys

from diffusax.training import TextToImageConfig, read_config, text_to_image, train


def main(model: str, data: str, output: str, *pairs: str) -> None:
    options = [
        f"model={model}",
        f"data.path={data}",
        f"output={output}",
        "steps=4",
        "batch_size=16",
        "data.resolution=16",
        "optimizer.learning_rate=1e-3",
        "compute_dtype=float32",
        "ema.rule=constant",
        "ema.decay=0.5",
        "log_every=1",
        "checkpoint_every=2",
        "report_to=[]",
        "validation.every=4",
        "validation.prompts=[a dog]",
        "validation.steps=1",
    ]
    config = read_config(TextToImageConfig, None, [*options, *pairs])
    train(text_to_image(config), config)


if __name__ == "__main__":
    main(*sys.argv[1:])
