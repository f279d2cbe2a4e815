"""Draws pictures with no network: makes a small untrained checkpoint, loads it, samples from it.

The weights are random, so the pictures are patterns and not what the prompts say.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import diffusax
from diffusax.models import (
    AutoencoderKL,
    AutoencoderKLConfig,
    CLIPTextConfig,
    CLIPTextModel,
    UNet2DConditionConfig,
    UNet2DConditionModel,
    initialize,
)
from diffusax.pipelines.images import contact_sheet
from diffusax.text.tokenizer import CLIPTokenizer

PROMPTS = ("a red apple", "a cat", "a house by the sea", "the moon")


def byte_vocabulary(folder: Path) -> CLIPTokenizer:
    """A CLIP tokenizer without merges: each printable ASCII character is a token."""
    characters = [chr(code) for code in range(33, 127)]
    tokens = [*characters, *(c + "</w>" for c in characters), "<|startoftext|>", "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(tokens)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    return CLIPTokenizer.from_folder(folder)


def untrained_checkpoint(folder: Path) -> None:
    """A checkpoint in diffusers' layout with the parts of Stable Diffusion 1.x, made small."""
    tokenizer = byte_vocabulary(folder)
    text = CLIPTextConfig(
        vocab_size=tokenizer.eos_token_id + 1,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        eos_token_id=tokenizer.eos_token_id,
    )
    unet = UNet2DConditionConfig(
        sample_size=16,
        block_out_channels=(32, 64),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=64,
        norm_num_groups=8,
    )
    vae = AutoencoderKLConfig(
        block_out_channels=(16, 32, 32, 32),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        norm_num_groups=8,
        sample_size=128,
    )
    diffusax.StableDiffusionPipeline(
        text_encoder=initialize(CLIPTextModel, text, seed=0),
        tokenizer=tokenizer,
        unet=initialize(UNet2DConditionModel, unet, seed=1),
        vae=initialize(AutoencoderKL, vae, seed=2),
        scheduler=diffusax.DDIMScheduler(clip_sample=False, steps_offset=1),
    ).save_pretrained(folder)


def main() -> None:
    """Draws a contact sheet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("out/demo.png"))
    output = parser.parse_args().output
    print("No trained model is at hand: making a small one with random weights.")
    print("Its pictures are patterns; they do not show what the prompts say.")
    with tempfile.TemporaryDirectory() as folder:
        untrained_checkpoint(Path(folder))
        pipe = diffusax.DiffusionPipeline.from_pretrained(folder)
    for _ in range(2):
        start = time.perf_counter()
        images = pipe(list(PROMPTS), num_inference_steps=20, seed=0).images
        print(f"{len(images)} pictures in {time.perf_counter() - start:.2f} s")
    output.parent.mkdir(parents=True, exist_ok=True)
    contact_sheet([image.resize((256, 256), 0) for image in images]).save(output)
    print(f"wrote {output}")


if __name__ == "__main__":
    main()
