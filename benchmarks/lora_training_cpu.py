"""Steps of LoRA training per second against diffusers with PEFT in PyTorch, on the CPU.

    python benchmarks/lora_training_cpu.py [--rank 4] [--repeats 7]

The same UNet, adapters of attention, latents, noise, timesteps and AdamW, float32. Latents and text
embeddings are given: a step is the UNet's forward pass, the backward pass to the adapters alone,
clipping and the update. The PyTorch step is the inner loop of diffusers'
train_text_to_image_lora.py. In turns.
"""

import argparse
import sys
from pathlib import Path

import train_cpu
import training_steps
from machine import describe
from unet_cpu import pytorch_unet

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.lora import ATTENTION
from support.lora_training import ALPHA, add_trained, trained_tree

from diffusax.boundary.config import config_from_dict
from diffusax.lora.trained import LayerPlan, TrainedLora
from diffusax.models import UNet2DConditionConfig, UNet2DConditionModel
from diffusax.networks import initialize

SD2_NARROW = {
    "sample_size": 32,
    "block_out_channels": (160, 320, 640, 640),
    "attention_head_dim": (2, 5, 10, 10),
    "cross_attention_dim": 512,
    "norm_num_groups": 32,
    "use_linear_projection": True,
}
MODELS = {**train_cpu.MODELS, "half of SD 2": SD2_NARROW}
BATCHES = {**train_cpu.BATCHES, "half of SD 2": 4}


def compare(name: str, rank: int, repeats: int) -> None:
    """Both trainings of a model's adapters, a step at a time."""
    config, b = MODELS[name], BATCHES[name]
    network = initialize(UNet2DConditionModel, config_from_dict(UNet2DConditionConfig, config))
    inputs = train_cpu.draw_inputs(config, b, train_cpu.TOKENS.get(name, 77))
    reference = pytorch_unet(network.params, config)
    add_trained(reference, rank, ATTENTION)
    adapters = {"unet": trained_tree(reference)}
    plans = dict.fromkeys(adapters["unet"], LayerPlan(rank, ALPHA))
    ours = train_cpu.jax_step(
        network, *inputs, lora=TrainedLora({"unet": plans}), adapters=adapters
    )
    theirs = train_cpu.torch_step(reference, *inputs)
    size = network.num_params / 1e6
    about = f"{name} ({size:.1f} M parameters), LoRA of rank {rank}"
    training_steps.compare(about, b, ours, theirs, repeats)


def main() -> None:
    """Prints a line for each model."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--rank", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    print(describe("torch", "diffusers", "peft", "optax"))
    for name in args.models:
        compare(name, args.rank, args.repeats)


if __name__ == "__main__":
    main()
