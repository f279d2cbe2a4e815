"""Data sets on the Hugging Face Hub: lists their files and downloads them."""

from diffusax.hub_data.repository import HubDataset, HubFile, Reference, open_dataset
from diffusax.hub_data.transfer import Downloaded, download, in_bytes, write_urls

__all__ = [
    "Downloaded",
    "HubDataset",
    "HubFile",
    "Reference",
    "download",
    "in_bytes",
    "open_dataset",
    "write_urls",
]
