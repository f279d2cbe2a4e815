"""Reads the embeddings of textual inversion (Gal et al. 2022) from files, the Hub or arrays.

A file is in one of these forms: {token: vectors}, as diffusers writes it; emb_params, as
stable-diffusion-webui has it, where the file's name is the token; clip_l and clip_g, vectors for
both text encoders of SDXL, where it is in the file's header or the file's name. Only safetensors
files are read.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from diffusax.boundary.tensors import as_numpy
from diffusax.checkpoints.tensors import TensorFile, copy_tensors, read_metadata
from diffusax.checkpoints.weight_file import PICKLES, fetch_file

FILE = "learned_embeds.safetensors"
"""The file that diffusers' training script writes, and that is looked for in folders."""
MAX_VECTORS = 1000
"""The most vectors of a word; a prompt has room for far fewer."""
ENCODERS = {"clip_l": "text_encoder", "clip_g": "text_encoder_2"}
"""The text encoder that each part of a file for SDXL is for."""

_NAMELESS = ("emb_params", "*")
_TOKEN = "token"
"""The name of the word in the header of a file."""


class Embedding(NamedTuple):
    """The embeddings of one word."""

    token: str
    vectors: dict[str | None, np.ndarray]
    """n d float32, by the text encoder that they are for; None stands for the only one that is
    asked for."""
    source: str
    """The name of what it was read from, for errors."""


def read_embeddings(
    given: Any,
    token: str | Sequence[str | None] | None = None,
    *,
    weight_name: str | None = None,
    subfolder: str | None = None,
    hub: Mapping[str, Any] | None = None,
) -> list[Embedding]:
    """Reads embeddings.

    Args:
        given: a file, a folder, a Hub repository id, a dictionary {token: vectors}, an array, or a
            list of these. Arrays may be NumPy's, JAX's or PyTorch's.
        token: the word, or one for each entry of a list; None takes the name in the file, or that
            of the file. Several words for one array n d get a vector each.
        weight_name: the file in a folder or repository.
        subfolder: the folder in a folder or repository.
        hub: revision, token, cache_dir, local_files_only of `hf_hub_download`.

    Raises:
        ValueError: there is nothing to read or it is no embedding; says what is wrong.
    """
    entries, tokens = _pair_up(given, token)
    found = []
    for entry, own in zip(entries, tokens, strict=True):
        if isinstance(entry, str | os.PathLike):
            path = find_file(entry, weight_name=weight_name, subfolder=subfolder, hub=hub)
            tensors = _read_file(path)
            name = read_metadata(path).get(_TOKEN, None if path.name == FILE else path.stem)
            found += _named(tensors, own, name=name, source=str(path))
        elif isinstance(entry, Mapping):
            found += _named(dict(entry), own, name=None, source="the dictionary")
        else:
            found += _named({"*": entry}, own, name=None, source="the array")
    _check_distinct([embedding.token for embedding in found])
    return found


def write_embedding(path: Path, token: str, vectors: Mapping[str, np.ndarray]) -> None:
    """Writes the embeddings of one word; the same vectors are the same bytes.

    Args:
        path: the file, which appears only when it is whole.
        token: the word.
        vectors: n d, by the name of the text encoder that they are for. Those of one are written as
            diffusers' script does, those of both of SDXL as clip_l and clip_g.

    Raises:
        OSError: the file cannot be written; names it and says why.
    """
    names = {encoder: key for key, encoder in ENCODERS.items()}
    if len(vectors) == 1:
        names = dict.fromkeys(vectors, token)
    tensors = {names[encoder]: [np.asarray(x, np.float32)] for encoder, x in vectors.items()}
    copy_tensors(path, tensors, metadata={"format": "pt", _TOKEN: token})


def embedding_files(path: Path) -> list[Path]:
    """Returns the file, or the safetensors files in a folder, sorted by name.

    Raises:
        ValueError: there is none.
    """
    if not path.is_dir():
        return [path]
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise ValueError(f"the folder {path} has no .safetensors files; give one that has")
    return files


def find_file(
    path_or_repo: str | os.PathLike[str],
    *,
    weight_name: str | None = None,
    subfolder: str | None = None,
    hub: Mapping[str, Any] | None = None,
) -> Path:
    """Returns the file of an embedding, which is downloaded if it is a repository's.

    Raises:
        ValueError: there is none, or it is a pickle.
    """
    path = Path(os.path.expanduser(path_or_repo))
    if path.is_dir():
        path = _in_folder(path / (subfolder or ""), weight_name)
    elif not path.is_file() and not _is_path(path_or_repo):
        _refuse_pickle(Path(weight_name or FILE))
        name = weight_name or FILE
        path = fetch_file(str(path_or_repo), name, subfolder=subfolder, **(hub or {}))
    _refuse_pickle(path)
    if not path.is_file():
        raise ValueError(f"there is no file {path}; give a safetensors file, or its folder")
    return path


def _pair_up(given: Any, token: Any) -> tuple[list[Any], list[str | None]]:
    """Returns what is given, and the word that is asked for with each."""
    entries = list(given) if isinstance(given, list | tuple) else [given]
    tokens = list(token) if isinstance(token, list | tuple) else [token]
    if len(entries) == 1 < len(tokens) and hasattr(entries[0], "shape"):
        entries = list(as_numpy(entries[0]))
    if tokens in ([], [None]):
        tokens = [None] * len(entries)
    if not entries:
        raise ValueError("no embedding is given; name at least one file or dictionary")
    if len(tokens) != len(entries):
        raise ValueError(f"token has {len(tokens)} words for {len(entries)} embeddings")
    return entries, tokens


def _check_distinct(tokens: list[str]) -> None:
    for i, token in enumerate(tokens):
        if token in tokens[:i]:
            raise ValueError(f"token {token!r} is there twice; give each embedding its own token=")


def _is_path(text: str | os.PathLike[str]) -> bool:
    """Returns whether a name that is no file can be nothing else, and so no repository."""
    if not isinstance(text, str):
        return True
    return text.startswith((".", "/", "~")) or text.endswith((".safetensors", *PICKLES))


def _in_folder(folder: Path, weight_name: str | None) -> Path:
    if weight_name is not None:
        return folder / weight_name
    if (folder / FILE).is_file():
        return folder / FILE
    files = sorted(folder.glob("*.safetensors"))
    if len(files) == 1:
        return files[0]
    pickles = [path for path in sorted(folder.glob("*")) if path.suffix in PICKLES]
    if pickles and not files:
        return pickles[0]
    found = ", ".join(path.name for path in files[:5]) or "none"
    raise ValueError(
        f"the folder {folder} must have a {FILE} or a single .safetensors file (it has {found}); "
        "name the file with weight_name="
    )


def _refuse_pickle(path: Path) -> None:
    if path.suffix.lower() not in PICKLES:
        return
    loaded = f"torch.load({path.name!r}, weights_only=True)"
    if path.suffix.lower() == ".bin":
        convert = f"save_file({loaded}, {path.with_suffix('.safetensors').name!r})"
    else:
        vectors = f"{loaded}['string_to_param']['*'].detach()"
        new = path.with_suffix(".safetensors").name
        convert = f"save_file({{'emb_params': {vectors}}}, {new!r})"
    raise ValueError(
        f"{path} is not a safetensors file, and loading it could run code; convert it where "
        f"PyTorch is installed: safetensors.torch.{convert}"
    )


def _read_file(path: Path) -> dict[str, Any]:
    file = TensorFile(path)
    sizes = [entry.nbytes for entry in file.entries.values()]
    if len(sizes) > MAX_VECTORS or sum(sizes) > MAX_VECTORS * 2**20:
        raise ValueError(f"{path} holds {len(sizes)} tensors, too much for an embedding")
    return {name: file.view(entry) for name, entry in file.entries.items()}


def _named(
    tensors: dict[str, Any], token: str | None, *, name: str | None, source: str
) -> list[Embedding]:
    """Returns the embeddings of one file or dictionary.

    token: the word that is asked for, if any. name: the word where the tensors have none.
    """
    if "string_to_param" in tensors:
        # The dictionary in stable-diffusion-webui's .pt files, loaded by the caller.
        inner = tensors["string_to_param"]
        name = tensors.get("name", name)
        tensors = dict(inner) if isinstance(inner, Mapping) else {"*": inner}
    keys = list(tensors)
    if keys and set(keys) <= set(ENCODERS):
        vectors: dict[str | None, np.ndarray] = {
            ENCODERS[key]: _vectors(x, key, source) for key, x in tensors.items()
        }
        counts = {len(x) for x in vectors.values()}
        if len(counts) > 1:
            pairs = " and ".join(f"{len(tensors[key])} in {key}" for key in keys)
            raise ValueError(
                f"{source} must have as many vectors in clip_l as in clip_g (got {pairs})"
            )
        return [Embedding(_word(token or name, source), vectors, source)]
    if len(keys) == 1:
        (key,) = keys
        word = token or (name if key in _NAMELESS else key)
        return [Embedding(_word(word, source), {None: _vectors(tensors[key], key, source)}, source)]
    dotted = [key for key in keys if not isinstance(key, str) or "." in key]
    if dotted or not keys or token is not None or set(keys) & {*ENCODERS, *_NAMELESS}:
        shown = ", ".join(repr(key) for key in keys[:3]) or "nothing"
        raise ValueError(
            f"{source} holds {len(keys)} tensors ({shown}) and is no embedding; one has a single "
            "tensor, or clip_l and clip_g"
        )
    return [
        Embedding(_word(key, source), {None: _vectors(x, key, source)}, source)
        for key, x in tensors.items()
    ]


def _word(word: Any, source: str) -> str:
    """Checks and returns a word."""
    if word is None:
        raise ValueError(f"{source} does not name its word; give it with token=")
    try:
        blank = not isinstance(word, str) or not word.strip() or not word.encode()
    except UnicodeEncodeError:
        blank = True
    if blank or word != word.strip():
        raise ValueError(
            f"token {word!r} of {source} must be a text without spaces around it; give another "
            "with token="
        )
    return word  # type: ignore[no-any-return]


def _vectors(tensor: Any, key: Any, source: str) -> np.ndarray:
    """Returns vectors n d as float32, for one vector d or several n d."""
    try:
        array = as_numpy(tensor)
    except (TypeError, ValueError):
        array = np.array(None)
    if array.ndim not in (1, 2) or not array.size or not _is_float(array):
        raise ValueError(
            f"{source} has {key!r} of {array.dtype} {array.shape}, but an embedding is a vector of "
            "floating-point numbers, or a table of some"
        )
    array = array.reshape(-1, array.shape[-1])
    if len(array) > MAX_VECTORS:
        raise ValueError(f"{source} has {len(array)} vectors for one word, and is no embedding")
    with np.errstate(over="ignore", invalid="ignore"):
        array = array.astype(np.float32)
    if not np.isfinite(array).all():
        raise ValueError(f"{source} has numbers in {key!r} that are not finite; download it again")
    return array


def _is_float(array: np.ndarray) -> bool:
    # The names of the dtypes that NumPy does not know begin so, too.
    return array.dtype.name.startswith(("float", "bfloat"))
