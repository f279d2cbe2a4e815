"""Trains a tiny checkpoint for a few steps and writes the result.

python devices_run.py MODEL DATA OUTPUT name=value ...

One pair is the program's own: recipe=instruct-pix2pix, dreambooth, textual-inversion or
text-to-video, by default text-to-image.
"""

import sys

from diffusax.runtime.devices.processes import initialize
from diffusax.training import (
    DreamBoothConfig,
    InstructPix2PixConfig,
    TextToImageConfig,
    TextToVideoConfig,
    TextualInversionConfig,
    dreambooth,
    instruct_pix2pix,
    read_config,
    text_to_image,
    text_to_video,
    textual_inversion,
    train,
)

RECIPES = {
    "dreambooth": (DreamBoothConfig, dreambooth),
    "text-to-image": (TextToImageConfig, text_to_image),
    "text-to-video": (TextToVideoConfig, text_to_video),
    "instruct-pix2pix": (InstructPix2PixConfig, instruct_pix2pix),
    "textual-inversion": (TextualInversionConfig, textual_inversion),
}


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
    ]
    own = dict(pair.split("=") for pair in pairs if pair.startswith("recipe="))
    config_class, recipe = RECIPES[own.get("recipe", "text-to-image")]
    pairs = tuple(pair for pair in pairs if not pair.startswith("recipe="))
    config = read_config(config_class, None, [*options, *pairs])
    if config.distributed:
        initialize()
    train(recipe(config), config)


if __name__ == "__main__":
    main(*sys.argv[1:])
