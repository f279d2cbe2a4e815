"""Makes what the training starts from: the model "emoji" with room for longer captions.

python examples/emoji_styles/build_start.py --output out/emoji_styles/start
"""

import argparse
import dataclasses
import json
import shutil
import tempfile
from pathlib import Path

import jax

import diffusax
from diffusax import CLIPTokenizer, resolve
from diffusax.models import CLIPTextModel, initialize

MAX_TOKENS = 28


def longer(encoder: CLIPTextModel, tokens: int) -> CLIPTextModel:
    """The text encoder with more positions, the new ones random."""
    config = dataclasses.replace(encoder.config, max_position_embeddings=tokens)
    wider = initialize(CLIPTextModel, config, seed=0)

    def widen(new: jax.Array, old: jax.Array) -> jax.Array:
        return old if new.shape == old.shape else new.at[: len(old)].set(old)

    wider.params = jax.tree.map(widen, wider.params, encoder.params)
    return wider


def retokenized(folder: Path, tokens: int) -> CLIPTokenizer:
    """A tokenizer for longer texts."""
    with tempfile.TemporaryDirectory() as copy:
        shutil.copytree(folder, copy, dirs_exist_ok=True)
        config = Path(copy, "tokenizer_config.json")
        known = json.loads(config.read_text("utf-8"))
        config.write_text(json.dumps(known | {"model_max_length": tokens}), "utf-8")
        return CLIPTokenizer.from_folder(copy)


def main() -> None:
    """Writes the checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="emoji", help="what ../emoji makes")
    parser.add_argument("--output", type=Path, default=Path("out/emoji_styles/start"))
    args = parser.parse_args()
    pipe = diffusax.StableDiffusionPipeline.from_pretrained(args.model, dtype="float32")
    folder = resolve(args.model)
    tokenizer = retokenized(folder / "tokenizer", MAX_TOKENS)
    encoder = longer(pipe.text_encoder, MAX_TOKENS)
    longer_pipe = type(pipe).from_pipe(pipe, text_encoder=encoder, tokenizer=tokenizer)
    longer_pipe.save_pretrained(args.output)
    print(f"texts of up to {MAX_TOKENS} tokens in {args.output}")


if __name__ == "__main__":
    main()
