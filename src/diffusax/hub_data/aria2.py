"""Writes the addresses of files for other programs to download."""

from collections.abc import Sequence
from pathlib import Path

import huggingface_hub

from diffusax.files import written_whole
from diffusax.hub_data.repository import HubDataset, HubFile


def write_urls(file: Path, dataset: HubDataset, shards: Sequence[HubFile]) -> None:
    """Writes aria2's input file: a line for each address, then its options on lines of their own.

    `aria2c --input-file FILE --dir DIR` gets the files and checks their digests. The file holds no
    token.

    Raises:
        OSError: the file cannot be written; names it and says why.
    """
    lines = []
    for shard in shards:
        lines.append(file_url(dataset, shard))
        lines.append(f"  out={shard.path}")
        if shard.sha256:
            lines.append(f"  checksum=sha-256={shard.sha256}")
    file.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(file) as partial:
        partial.write_text("\n".join([*lines, ""]), "utf-8")


def file_url(dataset: HubDataset, shard: HubFile) -> str:
    """Returns the address of a file at the data set's commit, at HF_ENDPOINT if that is set."""
    return huggingface_hub.hf_hub_url(
        dataset.repo, shard.path, repo_type="dataset", revision=dataset.commit
    )
