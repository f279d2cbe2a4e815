"""The types of what calls and commands take, with their ranges."""

from typing import Annotated

from msgspec import Meta

Count = Annotated[int, Meta(ge=1, le=4096)]
Steps = Annotated[int, Meta(ge=1, le=100_000)]
Pixels = Annotated[int, Meta(ge=1, le=32_768)]
Scale = Annotated[float, Meta(ge=-10_000, le=10_000)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
