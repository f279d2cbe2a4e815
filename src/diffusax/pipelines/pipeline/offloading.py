"""Text encoders and autoencoder in the host's memory, and on the device for their turn alone."""

import logging
from collections.abc import Collection
from typing import Any

from diffusax.pipelines.components.components import OFFLOADED, Components, on_host

log = logging.getLogger(__name__)


class Offloading:
    """The methods of every pipeline under diffusers' names that move components off the device."""

    parts: Components

    def enable_model_cpu_offload(self, gpu_id: Any = None, device: Any = None) -> None:
        """Keeps text encoders and autoencoder in the host's memory except for their turn.

        Each call copies them to the device, or to the devices of the mesh, where it encodes texts
        and images and where it decodes, and drops the copies then. The denoiser and ControlNets
        stay. The images are the same, bit for bit. On CPUs nothing moves. `pipe.params` holds NumPy
        arrays of what is offloaded. Pipelines that are made from this one by `from_pipe` share
        them; one that was made before keeps its own on the device.

        Args:
            gpu_id: accepted, as diffusers' argument; JAX has placed the denoiser already.
            device: accepted likewise.
        """
        self.parts.offloaded = True
        self.maybe_free_model_hooks()

    def maybe_free_model_hooks(self) -> None:
        """Moves offloaded components back to host memory.

        Every call ends with it, so that it concerns only what was assigned since.
        """
        for name in _offloaded_names(self.parts):
            if not on_host(self.parts.params[name]):
                self.parts.params[name] = self.parts.placed(name, self.parts.params[name])

    def remove_all_hooks(self) -> None:
        """Puts the components that `enable_model_cpu_offload` moved back on the device for good."""
        names = _offloaded_names(self.parts)
        self.parts.offloaded = False
        for name in names:
            self.parts.params[name] = self.parts.ready(name)

    def reset_device_map(self) -> None:
        """Ends offloading, as `remove_all_hooks` does."""
        self.remove_all_hooks()

    def _offload_like(self, other: "Offloading", own: Collection[str]) -> None:
        """Offloads the components of another pipeline as it does.

        own: the names of the components that the other pipeline does not share.
        """
        self.parts.offloaded = other.parts.offloaded
        for name in _offloaded_names(self.parts):
            if name not in own:
                self.parts.params[name] = other.parts.params[name]
        self.maybe_free_model_hooks()


def _offloaded_names(parts: Components) -> list[str]:
    """Returns the names of the components that are offloaded; none where offloading is off."""
    family = parts.family
    return [name for name in parts.params if parts.offloaded and family.role(name) in OFFLOADED]


def _changes_nothing(name: str) -> Any:
    def method(self: Offloading, *args: Any, **kwargs: Any) -> None:
        log.warning(
            "%s changes nothing in diffusax; enable_model_cpu_offload keeps text encoders and "
            "autoencoder in the host's memory",
            name,
        )

    method.__doc__ = "Changes nothing and says so in the log; see `enable_model_cpu_offload`."
    method.__name__ = name
    return method


for _name in ("enable_sequential_cpu_offload", "enable_group_offload"):
    setattr(Offloading, _name, _changes_nothing(_name))
