"""Single files: a whole model in one .safetensors or .gguf file, as the community has them."""

from diffusax.checkpoints.single_file.contents import (
    Contents,
    FileKind,
    Part,
    is_single_file,
    kind_of_file,
    read_contents,
)
from diffusax.checkpoints.single_file.names import named_entries
from diffusax.checkpoints.single_file.view import Reading, lasting_view, opened_view, part_of

__all__ = [
    "Contents",
    "FileKind",
    "Part",
    "Reading",
    "is_single_file",
    "kind_of_file",
    "lasting_view",
    "named_entries",
    "opened_view",
    "part_of",
    "read_contents",
]
