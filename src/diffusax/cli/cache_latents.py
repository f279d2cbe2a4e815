"""`diffusax cache-latents`."""

import dataclasses
import functools
from typing import ClassVar

from diffusax.boundary.messages import escaped
from diffusax.cli.messages import show_messages
from diffusax.cli.parsing import FromFiles, parse_with_files
from diffusax.cli.train import plain
from diffusax.runtime.devices.processes import initialize
from diffusax.training import CacheConfig, cache_latents, read_config


@dataclasses.dataclass(frozen=True)
class CacheLatents(FromFiles, CacheConfig):
    """Encode the images of a data set, and their captions, once, to train from faster."""

    essentials: ClassVar[tuple[str, ...]] = (
        *("recipe", "model", "data.path", "data.split", "data.resolution", "data.bucket_step"),
        *("data.num_frames", "data.image_column", "data.conditioning_image_column"),
        *("data.caption_column", "output", "text_embeddings", "copies", "batch_size", "seed"),
        *("config", "set"),
    )

    def run(self) -> None:
        """Writes the cache."""
        if self.distributed:
            initialize()
        show_messages()
        rows = cache_latents(plain(self, CacheConfig))
        print(f"wrote {rows} rows to {escaped(self.output)}")


def command(args: list[str]) -> CacheLatents:
    """Reads the options from the arguments and the files among them."""
    read = functools.partial(read_config, CacheConfig)
    return parse_with_files(CacheLatents, args, read, prog="diffusax cache-latents")
