"""Several T2I-Adapters, whose maps are added up with weights."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

from diffusax.checkpoints.files import numbered, numbered_folders
from diffusax.checkpoints.networks import check_safe, save_network
from diffusax.models.unet.t2i_adapter import check_alike
from diffusax.networks.model import Model
from diffusax.networks.unet import T2IAdapter


class MultiAdapter:
    """Several T2I-Adapters, whose maps are multiplied by a call's scales and added up."""

    def __init__(self, adapters: Iterable[Model]):
        """Joins adapters.

        Args:
            adapters: two or more, as `T2IAdapter.from_pretrained` gives them.

        Raises:
            ValueError: there are fewer than two, one is no T2IAdapter, or their maps differ.
        """
        self.adapters = list(adapters)
        if len(self.adapters) < 2:
            raise ValueError(
                "adapters must be two T2IAdapters or more; a single one is itself the pipeline's "
                f"adapter (got {len(self.adapters)})"
            )
        for adapter in self.adapters:
            found = getattr(adapter, "class_name", type(adapter).__name__)
            if found != "T2IAdapter":
                raise ValueError(f"adapters must be T2IAdapters (got a {found})")
        check_alike([adapter.config for adapter in self.adapters])

    @property
    def num_adapter(self) -> int:
        """The number of adapters."""
        return len(self.adapters)

    @property
    def downscale_factor(self) -> int:
        """The pixels per entry of the largest map in each direction."""
        return int(self.adapters[0].config.downscale_factor)

    @property
    def total_downscale_factor(self) -> int:
        """The pixels per entry of the smallest map in each direction."""
        return int(self.adapters[0].config.total_downscale_factor)

    @classmethod
    def from_pretrained(cls, pretrained_model_path: str | Path, **options: Any) -> Self:
        """Loads the adapters in the folders path, path_1, path_2 and so on, as far as there are.

        Args:
            pretrained_model_path: the first folder.
            **options: the options of `T2IAdapter.from_pretrained`.

        Raises:
            ValueError: there are fewer than two folders, or one cannot be read; says which and why.
        """
        first = Path(pretrained_model_path)
        folders = numbered_folders(first)
        if len(folders) < 2:
            missing = first if not folders else first.with_name(numbered(first.name, 2)[1])
            raise ValueError(f"there is no folder {missing}; a MultiAdapter needs two or more")
        return cls(T2IAdapter.from_pretrained(folder, **options) for folder in folders)

    def save_pretrained(
        self,
        save_directory: str | Path,
        *,
        safe_serialization: bool = True,
        variant: str | None = None,
    ) -> None:
        """Writes the folders save_directory, save_directory_1 and so on, which diffusers opens.

        Raises:
            ValueError: safe_serialization is False, but diffusax writes only safetensors.
        """
        check_safe(safe_serialization)
        first = Path(save_directory)
        for name, adapter in zip(numbered(first.name, len(self.adapters)), self.adapters):
            save_network(adapter, first.with_name(name), variant=variant)

    def __repr__(self) -> str:
        return f"MultiAdapter({self.adapters})"
