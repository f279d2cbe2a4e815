"""Makes the untrained checkpoint: a vocabulary for the captions, and small networks.

python examples/emoji/build_model.py --data out/emoji/data --output out/emoji/untrained
"""

import argparse
from pathlib import Path

import pyarrow.parquet as pq
from vocabulary import train_tokenizer

import diffusax
from diffusax import CLIPTokenizer
from diffusax.models import (
    AutoencoderKL,
    AutoencoderKLConfig,
    CLIPTextConfig,
    CLIPTextModel,
    UNet2DConditionConfig,
    UNet2DConditionModel,
    initialize,
)

VOCABULARY = 1536
MAX_TOKENS = 20


def build(tokenizer: CLIPTokenizer) -> diffusax.StableDiffusionPipeline:
    """The pipeline with random parameters."""
    text = CLIPTextConfig(
        vocab_size=tokenizer.eos_token_id + 1,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=6,
        max_position_embeddings=MAX_TOKENS,
        eos_token_id=tokenizer.eos_token_id,
    )
    unet = UNet2DConditionConfig(
        sample_size=8,
        in_channels=8,
        out_channels=8,
        block_out_channels=(96, 128),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D",) * 2,
        up_block_types=("CrossAttnUpBlock2D",) * 2,
        attention_head_dim=(3, 4),
        cross_attention_dim=192,
        norm_num_groups=16,
        use_linear_projection=True,
    )
    vae = AutoencoderKLConfig(
        latent_channels=8,
        block_out_channels=(16, 32, 64, 64),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        norm_num_groups=8,
        sample_size=64,
        mid_block_add_attention=False,
    )
    return diffusax.StableDiffusionPipeline(
        text_encoder=initialize(CLIPTextModel, text, seed=0),
        tokenizer=tokenizer,
        unet=initialize(UNet2DConditionModel, unet, seed=1),
        vae=initialize(AutoencoderKL, vae, seed=2),
        scheduler=diffusax.DDIMScheduler(
            beta_schedule="scaled_linear",
            beta_start=0.00085,
            beta_end=0.012,
            clip_sample=False,
            set_alpha_to_one=False,
            steps_offset=1,
            prediction_type="v_prediction",
            rescale_betas_zero_snr=True,
            timestep_spacing="trailing",
        ),
    )


def main() -> None:
    """Writes the checkpoint and says how large its networks are."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("out/emoji/data"))
    parser.add_argument("--output", type=Path, default=Path("out/emoji/untrained"))
    args = parser.parse_args()
    captions = pq.read_table(args.data, columns=["text"])["text"].to_pylist()
    tokenizer = train_tokenizer(captions, VOCABULARY, MAX_TOKENS)
    longest = max(len(tokenizer.tokenize(caption)) + 2 for caption in captions)
    pipe = build(tokenizer)
    pipe.save_pretrained(args.output)
    print(f"{tokenizer.eos_token_id + 1} tokens, the longest caption has {longest}")
    for name in ("text_encoder", "unet", "vae"):
        print(f"{name}: {getattr(pipe, name).num_params / 1e6:.2f} M parameters")


if __name__ == "__main__":
    main()
