"""Makes the untrained checkpoint: a vocabulary for the instructions, and small networks.

python examples/emoji_edit/build_model.py --output out/emoji_edit/untrained
"""

import argparse
import sys
from pathlib import Path

import diffusax
from diffusax import CLIPTokenizer
from diffusax.models import (
    CLIPTextConfig,
    CLIPTextModel,
    UNet2DConditionConfig,
    UNet2DConditionModel,
    initialize,
)

sys.path.insert(0, str(Path(__file__).parents[1] / "emoji"))
from instructions import instructions, wordings
from vocabulary import train_tokenizer

VOCABULARY, MAX_TOKENS = 720, 16
TEXT = 128


def build(tokenizer: CLIPTokenizer) -> diffusax.StableDiffusionInstructPix2PixPipeline:
    """The pipeline with random parameters and the other model's autoencoder and scheduler."""
    text = CLIPTextConfig(
        vocab_size=tokenizer.eos_token_id + 1,
        hidden_size=TEXT,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=MAX_TOKENS,
        eos_token_id=tokenizer.eos_token_id,
    )
    vae = diffusax.load_network(diffusax.resolve("emoji") / "vae", dtype="float32")
    latents = vae.config.latent_channels
    unet = UNet2DConditionConfig(
        sample_size=8,
        in_channels=2 * latents,
        out_channels=latents,
        block_out_channels=(80, 112),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D",) * 2,
        up_block_types=("CrossAttnUpBlock2D",) * 2,
        attention_head_dim=(5, 7),
        cross_attention_dim=TEXT,
        norm_num_groups=16,
        use_linear_projection=True,
    )
    return diffusax.StableDiffusionInstructPix2PixPipeline(
        text_encoder=initialize(CLIPTextModel, text, seed=0),
        tokenizer=tokenizer,
        unet=initialize(UNet2DConditionModel, unet, seed=1),
        vae=vae,
        scheduler=diffusax.DDIMScheduler.from_pretrained("emoji", subfolder="scheduler"),
    )


def main() -> None:
    """Writes the checkpoint and says how large its networks are."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("out/emoji_edit/untrained"))
    args = parser.parse_args()
    prompts = [words for key in instructions() for words in wordings(key)]
    prompts += [words for key in instructions() for words in wordings(key, held_out=True)]
    tokenizer = train_tokenizer(prompts, VOCABULARY, MAX_TOKENS)
    longest = max(len(tokenizer.tokenize(prompt)) + 2 for prompt in prompts)
    pipe = build(tokenizer)
    pipe.save_pretrained(args.output)
    print(f"{tokenizer.eos_token_id + 1} tokens, the longest instruction has {longest}")
    for name in ("text_encoder", "unet", "vae"):
        print(f"{name}: {getattr(pipe, name).num_params / 1e6:.2f} M parameters")


if __name__ == "__main__":
    main()
