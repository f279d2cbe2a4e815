"""The results of networks: dataclasses that are also read by position and by key."""

import dataclasses
from typing import Any


class Output:
    """A dataclass whose fields, except those that are None, are also read by position or by key."""

    def __getitem__(self, index: Any) -> Any:
        """Returns fields by position or key, as in diffusers: `output[0]`, `output["sample"]`."""
        return getattr(self, index) if isinstance(index, str) else self.to_tuple()[index]

    def __iter__(self) -> Any:
        """Yields the names of the fields that are not None, as a dict does."""
        return iter(self.keys())

    def keys(self) -> tuple[str, ...]:
        """Returns the names of the fields that are not None."""
        names = (field.name for field in dataclasses.fields(self))  # type: ignore[arg-type]
        return tuple(name for name in names if getattr(self, name) is not None)

    def to_tuple(self) -> tuple[Any, ...]:
        """Returns the values of the fields that are not None."""
        return tuple(getattr(self, name) for name in self.keys())
