"""A vocabulary learnt from captions, as CLIP's byte-pair encoding."""

import json
import tempfile
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from diffusax import CLIPTokenizer

BOS, EOS = "<|startoftext|>", "<|endoftext|>"
WORD = r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"


def train_tokenizer(captions: Iterable[str], vocabulary: int, max_tokens: int) -> CLIPTokenizer:
    """CLIP's byte-pair encoding, with merges learnt from the captions.

    vocabulary: the most tokens that there can be. max_tokens: of a text.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE(end_of_word_suffix="</w>", continuing_subword_prefix=""))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORD), "removed", invert=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    trainer = BpeTrainer(
        vocab_size=vocabulary - len(alphabet) - 2,
        initial_alphabet=alphabet,
        end_of_word_suffix="</w>",
        show_progress=False,
    )
    tokenizer.train_from_iterator(captions, trainer)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.model.save(folder)
        merges = Path(folder, "merges.txt").read_text("utf-8").splitlines()
        pairs = [line.split(" ") for line in merges if not line.startswith("#version")]
        tokens = [*alphabet, *(c + "</w>" for c in alphabet), *map("".join, pairs), BOS, EOS]
        ids = {token: i for i, token in enumerate(dict.fromkeys(tokens))}
        Path(folder, "vocab.json").write_text(json.dumps(ids), "utf-8")
        config = {"model_max_length": max_tokens}
        Path(folder, "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
        return CLIPTokenizer.from_folder(folder)
