"""What of a pipeline stays in the host's memory, and how it comes to the device."""

import dataclasses
from typing import Any, Literal

from diffusax.models.network import Network
from diffusax.pipelines.families.family import Role

_WHOLE = ("text_encoder", "autoencoder", "image_encoder")
"""The roles of components that may stay in the host's memory except for their turn."""
_SMALL = ("autoencoder", "image_encoder")
"""Those of them that come as a whole where others are streamed."""

Stay = Literal["device", "turn", "blocks", "everything"]
"""Where parameters are between calls: on the device; in the host's memory, as NumPy arrays, and on
the device for their turn; in the host's memory those of numbered blocks, or all, which programs
copy block by block."""


@dataclasses.dataclass(frozen=True)
class Offload:
    """Which components stay in the host's memory."""

    method: Literal["model", "sequential", "group"]
    """The method of diffusers' that it stands for: components that come for their turn, or are
    streamed."""
    streamed: Literal["blocks", "everything"] = "blocks"
    """What of components is streamed."""
    excluded: frozenset[str] = frozenset()
    """The names of components that stay on the device."""
    device: Any = None
    """The device to compute on, where parameters are still on another one."""

    def stay(self, name: str, role: Role, network: Any) -> Stay:
        """Returns where a component's parameters are between calls.

        A PyTorch module's stay on the device, because its own code reads them.
        """
        if name in self.excluded:
            return "device"
        if self.method == "model" or role in _SMALL:
            return "turn" if role in _WHOLE else "device"
        return self.streamed if isinstance(network, Network) else "device"
