"""`diffusax download`."""

import dataclasses
from pathlib import Path
from typing import Annotated

from tyro.conf import FlagCreatePairsOff, Positional, configure

from diffusax.boundary.messages import escaped
from diffusax.boundary.options import Count, Options
from diffusax.cli.parsing import OWN, parse
from diffusax.cli.parts import jax_part, parse_part
from diffusax.hub_data import (
    HubDataset,
    HubFile,
    Reference,
    download,
    in_bytes,
    open_dataset,
    write_urls,
)


@configure(FlagCreatePairsOff)
@dataclasses.dataclass(frozen=True, kw_only=True)
class Download(Options):
    """Download the Parquet files or WebDataset archives of a data set on the Hub.

    Run the same command again to continue a download that stopped, even inside a file. Digests are
    checked. HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE mean what they do for huggingface_hub.
    """

    repo: Positional[str]
    """The data set: owner/name, owner/name@revision or hf://datasets/owner/name/folder."""
    output: Annotated[Path | None, OWN] = None
    """Write the files to this folder, by default data/name."""
    split: Annotated[str | None, OWN] = None
    """Get only the files of this split, such as train, by the data set's card or their names."""
    subset: Annotated[str | None, OWN] = None
    """Get only the files of this subset, which the data set's card names."""
    include: Annotated[tuple[str, ...], OWN] = ()
    """Get the files that these globs match, such as 'data/*.parquet', instead of all Parquet and
    tar files."""
    revision: Annotated[str | None, OWN] = None
    """Get the files of this branch, tag or commit."""
    part: Annotated[str | None, OWN] = None
    """Get a part of the files, such as 0/4 for the first of four machines: every fourth file."""
    distributed: bool = False
    """Run as one of several JAX processes and get its part: they find each other on TPU pods and
    under Slurm by themselves, elsewhere through JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and
    JAX_PROCESS_ID."""
    threads: Count = 8
    """The number of files to download at the same time."""
    urls: Annotated[Path | None, OWN] = None
    """Download nothing, and write the addresses and digests of the files to this file, in the form
    of aria2c --input-file."""

    def __post_init__(self) -> None:
        super().__post_init__()
        parse_part("part", self.part)
        if self.part and self.distributed:
            raise ValueError("--distributed says which part to download; leave --part out")
        if self.urls and self.output:
            raise ValueError("--output cannot be given with --urls: nothing is downloaded")

    def run(self) -> None:
        """Downloads, or writes the list, and prints the result."""
        reference = self._reference()
        dataset = open_dataset(reference.repo, reference.revision)
        shards = self._part_of(dataset, reference)
        nbytes = in_bytes(sum(shard.size for shard in shards))
        what = f"{len(shards)} files, {nbytes}, of {dataset.repo} at {dataset.commit}"
        if self.urls is not None:
            write_urls(self.urls, dataset, shards)
            print(escaped(f"{self.urls} ({what})"))
            return
        folder = self.output or Path("data") / dataset.repo.split("/")[1]
        print(escaped(what), flush=True)
        # The card says what the splits are, for a run that reads the folder.
        card = [file for file in dataset.files if file.path == "README.md"]
        download(dataset, card, folder, progress=False)
        done = download(dataset, shards, folder, threads=self.threads)
        there = len(shards) - done.fetched
        print(escaped(f"{folder} ({done.fetched} files downloaded, {there} were there)"))

    def _reference(self) -> Reference:
        reference = Reference.parse(self.repo)
        if reference is None:
            raise ValueError(
                f"repo must be owner/name or hf://datasets/owner/name/folder (got {self.repo!r})"
            )
        if self.revision and reference.revision not in (None, self.revision):
            raise ValueError(f"--revision {self.revision} is not the revision in {self.repo}")
        return dataclasses.replace(reference, revision=self.revision or reference.revision)

    def _part_of(self, dataset: HubDataset, reference: Reference) -> list[HubFile]:
        shards = dataset.shards(
            split=self.split,
            subset=self.subset,
            include=self.include,
            below=reference.path,
        )
        index, count = (jax_part() if self.distributed else parse_part("part", self.part)) or (0, 1)
        if len(shards) < count:
            raise ValueError(f"{dataset.repo!r} has {len(shards)} files, too few for {count} parts")
        return shards[index::count]


def command(args: list[str]) -> Download:
    """Reads the options from the arguments."""
    return parse(Download, args, prog="diffusax download")
