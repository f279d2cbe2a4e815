"""Makes the untrained checkpoint: a vocabulary for captions and instructions, and small networks.

python examples/emoji_flow/build_model.py --output out/emoji_flow/untrained
"""

import argparse
import json
import tempfile
from pathlib import Path

import pyarrow.parquet as pq
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

import diffusax
from diffusax import Qwen2Tokenizer
from diffusax.models import (
    AutoencoderKLFlux2,
    AutoencoderKLFlux2Config,
    Flux2Transformer2DConfig,
    Flux2Transformer2DModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    initialize,
)

VOCABULARY = 2048
MAX_TOKENS = 20
"""The tokens of each text, of which the transformer reads the padding, too."""
TEXT = 96
LATENTS = 8
WORD = r"'s| ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+"
END = "<|endoftext|>"
BEGIN = "<|im_start|>"
CHAT = BEGIN + "{{ messages[0].content | lower }}"
"""What stands around a text in a chat is one token here, so that no text is empty."""


def train_tokenizer(texts: list[str]) -> Qwen2Tokenizer:
    """Byte pairs learnt from the texts, in the form of Qwen's tokenizer."""
    tokenizer = Tokenizer(BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORD), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=VOCABULARY - 2,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    special = [AddedToken(token, special=True, normalized=False) for token in (BEGIN, END)]
    tokenizer.add_special_tokens(special)
    config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "model_max_length": MAX_TOKENS,
        "chat_template": CHAT,
        **dict.fromkeys(("unk_token", "eos_token", "pad_token"), END),
    }
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(str(Path(folder, "tokenizer.json")))
        Path(folder, "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
        return Qwen2Tokenizer.from_folder(folder)


def build(tokenizer: Qwen2Tokenizer) -> diffusax.Flux2KleinPipeline:
    """The pipeline with random parameters."""
    text = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=TEXT,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=3,
        num_key_value_heads=3,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    vae = AutoencoderKLFlux2Config(
        block_out_channels=(16, 32, 64),
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        layers_per_block=1,
        latent_channels=LATENTS,
        norm_num_groups=16,
        sample_size=64,
        mid_block_add_attention=False,
    )
    transformer = Flux2Transformer2DConfig(
        in_channels=4 * LATENTS,
        num_layers=2,
        num_single_layers=6,
        attention_head_dim=32,
        num_attention_heads=6,
        joint_attention_dim=3 * TEXT,
        axes_dims_rope=(8, 8, 8, 8),
        guidance_embeds=False,
    )
    pipe = diffusax.Flux2KleinPipeline(
        text_encoder=initialize(Qwen3ForCausalLM, text, seed=0),
        tokenizer=tokenizer,
        transformer=initialize(Flux2Transformer2DModel, transformer, seed=1),
        vae=initialize(AutoencoderKLFlux2, vae, seed=2),
        scheduler=diffusax.FlowMatchEulerDiscreteScheduler(shift=1.0),
    )
    pipe.call_defaults |= {
        "height": 64,
        "width": 64,
        "max_sequence_length": MAX_TOKENS,
        "text_encoder_out_layers": [1, 2, 3],
        "num_inference_steps": 20,
        "guidance_scale": 2.0,
    }
    return pipe


def main() -> None:
    """Writes the checkpoint and says how large its networks are."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("out/emoji_flow/data"))
    parser.add_argument("--output", type=Path, default=Path("out/emoji_flow/untrained"))
    args = parser.parse_args()
    texts = pq.read_table(args.data, columns=["edit_prompt"])["edit_prompt"].to_pylist()
    tokenizer = train_tokenizer(texts)
    longest = max((1 + len(tokenizer(text).input_ids), text) for text in set(texts))
    pipe = build(tokenizer)
    pipe.save_pretrained(args.output)
    print("the longest text has", *longest)
    for name in ("text_encoder", "transformer", "vae"):
        print(f"{name}: {getattr(pipe, name).num_params / 1e6:.2f} M parameters")


if __name__ == "__main__":
    main()
