"""Words that are added to a tokenizer's vocabulary, as textual inversion does.

A word of n embeddings is n added tokens: word, word_1, word_2, ... (diffusers'
loaders/textual_inversion.py). In a text the word alone stands for all of them.
"""

import json
from collections.abc import Container, Iterator, Mapping, Sequence

from tokenizers import AddedToken, Tokenizer


def added_words(tokenizer: Tokenizer) -> dict[str, int]:
    """Returns the words that are beyond the model's own vocabulary, with their ids, in order."""
    own = tokenizer.get_vocab_size(with_added_tokens=False)
    added = sorted(tokenizer.get_added_tokens_decoder().items())
    return {token.content: i for i, token in added if i >= own and not token.special}


def following_ids(words: Mapping[str, int]) -> dict[int, tuple[int, ...]]:
    """Returns the ids of word_1, word_2, ... by the id of the word, where there are some."""
    found = {}
    for word, first in words.items():
        ids = tuple(words[name] for name in names_of(word, words)[1:])
        if ids:
            found[first] = ids
    return found


def token_names(word: str, count: int) -> list[str]:
    """Returns the names of the tokens of a word of `count` embeddings."""
    return [word, *(f"{word}_{i}" for i in range(1, count))]


def taken_name(
    word: str, count: int, words: Mapping[str, str], vocabulary: Container[str]
) -> str | None:
    """Returns the name because of which a word cannot be added; None where it can be.

    Args:
        word: the word.
        count: the number of its embeddings.
        words: the words that were added before, by their names in lower case.
        vocabulary: the names of all tokens.
    """
    base = word.lower().rpartition("_")[0]
    # It would be read as a later embedding of that word.
    joins = base in words and word.lower() == f"{base}_{len(names_of(base, words))}"
    wanted = token_names(word, count + 1)
    taken = [words.get(n.lower(), n) for n in wanted if n in vocabulary or n.lower() in words]
    return next(iter([*taken, *([words[base]] if joins else [])]), None)


def names_of(word: str, words: Container[str]) -> list[str]:
    """Returns the names of a word's embeddings among the words: word, word_1, word_2, ... ."""
    names = [word]
    while (name := f"{word}_{len(names)}") in words:
        names.append(name)
    return names


def expanded(
    ids: Sequence[int], offsets: Sequence[tuple[int, int]], parts: Mapping[int, tuple[int, ...]]
) -> tuple[list[int], list[tuple[int, int]]]:
    """Returns ids with all those of each word of several embeddings, and their offsets.

    Args:
        ids: the ids of a text.
        offsets: the first character of each token, and the one after its last.
        parts: see `following_ids`.
    """
    rests = dict(to_expand(ids, parts))
    all_ids, all_offsets = list[int](), list[tuple[int, int]]()
    for position, (i, offset) in enumerate(zip(ids, offsets)):
        own = i, *rests.get(position, ())
        all_ids += own
        all_offsets += [offset] * len(own)
    return all_ids, all_offsets


def to_expand(
    ids: Sequence[int], parts: Mapping[int, tuple[int, ...]]
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yields the position of each word of several embeddings, and the ids that have to follow.

    A word that the text spells out, as `word word_1`, is left as it is.
    """
    for position, i in enumerate(ids):
        rest = parts.get(i, ())
        if rest and tuple(ids[position + 1 : position + 1 + len(rest)]) != rest:
            yield position, rest


def add_words(tokenizer: Tokenizer, new: Sequence[str]) -> Tokenizer:
    """Returns a copy of the tokenizer with further words; their ids follow the largest one.

    As in transformers, upper and lower case do not matter, and a word is found inside others.
    """
    copy = Tokenizer.from_str(tokenizer.to_str())
    copy.add_tokens([AddedToken(word, special=False) for word in new])
    return copy


def remove_words(tokenizer: Tokenizer, removed: Sequence[str]) -> Tokenizer:
    """Returns a copy of the tokenizer without words; the ids of later added tokens move up."""
    content = json.loads(tokenizer.to_str())
    gone = sorted(i for word, i in added_words(tokenizer).items() if word in removed)
    content["added_tokens"] = [
        {**token, "id": moved(token["id"], gone)}
        for token in content["added_tokens"]
        if token["id"] not in gone
    ]
    return Tokenizer.from_str(json.dumps(content))


def moved(i: int, gone: Sequence[int]) -> int:
    """Returns the id that a token has after the tokens with the ids `gone` were removed."""
    return i - sum(other < i for other in gone)
