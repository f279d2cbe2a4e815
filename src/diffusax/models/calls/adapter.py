"""T2I-Adapters, called as in diffusers."""

from typing import Any

from diffusax.boundary.tensors import alike
from diffusax.models.calls.arguments import take_map
from diffusax.models.network import Model


class Adapter(Model):
    """A T2I-Adapter, called as diffusers' T2IAdapter."""

    class_names = ("T2IAdapter",)

    def __call__(self, x: Any) -> list[Any]:
        """Returns the maps b c h w for the levels of a UNet, the largest first.

        x: images in [0, 1], b c H W.

        Raises:
            ValueError: x has another shape.
        """
        maps = self.run(take_map("x", x, self.config.in_channels), channels_first=True)
        return list(alike(maps, x))
