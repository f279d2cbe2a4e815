"""Components in the host's memory: whole but for their turn, or streamed block by block."""

import logging
from collections.abc import Collection, Sequence
from typing import Any

import jax

from diffusax.boundary.convert import shortened
from diffusax.pipelines.components.components import Components, on_host
from diffusax.pipelines.components.offload import Offload
from diffusax.runtime.devices.host import first_place, has_host_memory, in_host_memory

log = logging.getLogger(__name__)

_STREAMED: dict[Any, Any] = {"block_level": "blocks", "leaf_level": "everything"}
"""What each offload_type streams."""


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

        Raises:
            ValueError: `enable_group_offload` streams the components.
        """
        self._check_offload("enable_model_cpu_offload", "group")
        self._offload(Offload("model"))

    def enable_sequential_cpu_offload(self, gpu_id: Any = None, device: Any = None) -> None:
        """Keeps all parameters in the host's memory, and streams them, for the least memory.

        It is `enable_group_offload` with "leaf_level", and computes as fast.

        Args:
            gpu_id: accepted, as diffusers' argument; `device` chooses.
            device: the device to compute on, see `enable_group_offload`.

        Raises:
            ValueError: `enable_group_offload` streams the components.
        """
        self._check_offload("enable_sequential_cpu_offload", "group")
        self._offload(Offload("sequential", "everything", device=_device_of(device)))

    def enable_group_offload(
        self,
        onload_device: Any,
        offload_device: Any = "cpu",
        offload_type: str = "block_level",
        num_blocks_per_group: int | None = None,
        non_blocking: bool = False,
        use_stream: bool = False,
        record_stream: bool = False,
        low_cpu_mem_usage: bool = False,
        offload_to_disk_path: Any = None,
        exclude_modules: str | Sequence[str] | None = None,
    ) -> None:
        """Keeps blocks' parameters in the host's memory, and copies them one block ahead.

        The programs of denoiser, ControlNets and text encoders take them as arguments in pinned
        memory of the host, JAX's "pinned_host", and copy each block's while the block before is
        computed, so that the device holds about two blocks. Autoencoder and image encoder come for
        their turn, as with `enable_model_cpu_offload`. The images are the same. The first call
        compiles; LoRAs, running batches, meshes and programs that are compiled ahead stay usable.
        A PyTorch module's parameters stay on the device.

        Args:
            onload_device: the device to compute on, such as "cuda", of parameters that lie on the
                CPU beside it (`from_pretrained(device=jax.devices("cpu")[0])`), where they do not
                fit the device; others keep theirs.
            offload_device: accepted; parameters are in the memory of the device's own host.
            offload_type: "block_level" for the numbered blocks of networks, or "leaf_level" for
                embeddings and last layers, too.
            num_blocks_per_group: must be given with "block_level", as in diffusers; one block is
                copied ahead, whatever the number.
            non_blocking: accepted; copies never block.
            use_stream: accepted; copies always run beside the computation.
            record_stream: accepted with use_stream.
            low_cpu_mem_usage: accepted; the memory is pinned once.
            offload_to_disk_path: accepted, with a warning: parameters stay in memory.
            exclude_modules: the names of components that stay on the device.

        Raises:
            ValueError: an argument is none of these, or `enable_model_cpu_offload` or
                `enable_sequential_cpu_offload` is in force.
        """
        kind = getattr(offload_type, "value", offload_type)
        _check_group(kind, num_blocks_per_group, record=record_stream and not use_stream)
        self._check_offload("enable_group_offload", "model", "sequential")
        if offload_to_disk_path is not None:
            log.warning("offload_to_disk_path changes nothing: parameters stay in memory")
        names = [exclude_modules] if isinstance(exclude_modules, str) else exclude_modules or ()
        if unknown := set(names) - set(self.parts.models):
            log.info("exclude_modules names no component: %s", ", ".join(sorted(unknown)))
        excluded, device = frozenset(names), _device_of(onload_device)
        self._offload(Offload("group", _STREAMED[kind], excluded, device))

    def maybe_free_model_hooks(self) -> None:
        """Moves offloaded components back to host memory.

        Every call ends with it, so that it concerns only what was assigned since.
        """
        parts = self.parts
        for name, params in parts.params.items():
            if not _is_placed(params, parts.stay(name)):
                parts.params[name] = parts.placed(name, params)

    def remove_all_hooks(self) -> None:
        """Puts the components that one of these methods moved back on the device for good."""
        self._offload(None)

    def reset_device_map(self) -> None:
        """Ends offloading, as `remove_all_hooks` does."""
        self.remove_all_hooks()

    def _check_offload(self, name: str, *methods: str) -> None:
        """Raises ValueError where a method is in force that another does not go with."""
        there = self.parts.offload
        if there is not None and there.method in methods:
            before = "group" if there.method == "group" else f"{there.method}_cpu"
            raise ValueError(
                f"{name} does not go with enable_{before}_offload, which is in force; call "
                "remove_all_hooks() first"
            )

    def _offload(self, offload: Offload | None) -> None:
        """Moves all components where they stay from now on."""
        parts = self.parts
        if offload is not None and offload.method != "model":
            place = getattr(parts.first_leaf, "sharding", None) or first_place()
            device = offload.device or next(iter(place.device_set))
            if not has_host_memory(device):
                log.warning("%s reads no memory of its host; all parameters stay", device)
                return
        came = {name for name in parts.params if parts.stay(name) == "turn"}
        parts.offload = offload
        for name, params in parts.params.items():
            back = name in came and parts.stay(name) == "device"
            parts.params[name] = parts.ready(name) if back else parts.placed(name, params)

    def _offload_like(self, other: "Offloading", own: Collection[str]) -> None:
        """Offloads the components of another pipeline as it does.

        own: the names of the components that the other pipeline does not share.
        """
        self.parts.offload = other.parts.offload
        for name in self.parts.params:
            if name not in own and self.parts.stay(name) != "device":
                self.parts.params[name] = other.parts.params[name]
        self.maybe_free_model_hooks()


def _is_placed(params: Any, stay: str) -> bool:
    """Returns whether parameters are where they stay; of streamed ones some, as all are put."""
    if stay == "device":
        return True
    return on_host(params) if stay == "turn" else any(map(in_host_memory, jax.tree.leaves(params)))


def _check_group(kind: Any, blocks: Any, *, record: bool) -> None:
    """Raises ValueError where an argument of `enable_group_offload` is wrong."""
    if kind not in _STREAMED:
        raise ValueError(
            f"offload_type must be 'block_level' or 'leaf_level' (got {shortened(kind)})"
        )
    if kind == "block_level" and blocks is None:
        raise ValueError(
            "num_blocks_per_group must be given with offload_type='block_level'; 1 will do"
        )
    if record:
        raise ValueError("record_stream goes with use_stream=True")


def _device_of(device: Any) -> jax.Device | None:
    """Returns the accelerator that diffusers' argument names; None where there is none of it.

    device: a name such as "cuda:1", PyTorch's device, or JAX's.
    """
    if device is None or isinstance(device, jax.Device):
        return device
    kind, _, index = str(device).partition(":")
    try:
        return jax.devices(kind)[int(index or 0)] if kind != "cpu" else None
    except (RuntimeError, ValueError, IndexError):
        return None
