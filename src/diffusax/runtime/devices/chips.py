"""Figures of TPUs and GPUs, by their makers' data sheets."""

import re
from typing import NamedTuple

import jax

GPU_SHARE = 0.92
"""The share of a GPU's memory that a program can count on, with XLA_CLIENT_MEM_FRACTION=0.92; the
driver, the libraries and other programs take the rest."""
DEFAULT_GPU_SHARE = 0.75
"""The share that JAX gives its programs without that variable, whether it takes all of it at the
start or not (docs.jax.dev, "GPU memory allocation")."""


class Chip(NamedTuple):
    """The performance of one device."""

    tflops: float
    """The peak TFLOP/s of dense products in bfloat16, added up in float32; of GPUs that have no
    units for bfloat16 (compute capability below 8.0), in float16."""
    memory: float
    """The GB of its memory."""
    bandwidth: float
    """The bandwidth of that memory in GB/s."""
    is_gpu: bool = False
    """Whether it is a GPU, of whose memory XLA takes a share."""

    @property
    def usable(self) -> float:
        """The GB that programs can have: of a GPU the share of `GPU_SHARE`, of a TPU all."""
        return self.memory * (GPU_SHARE if self.is_gpu else 1)

    @property
    def usable_by_default(self) -> float:
        """The GB that programs can have if XLA_CLIENT_MEM_FRACTION is not set."""
        return self.memory * (DEFAULT_GPU_SHARE if self.is_gpu else 1)


class Card(NamedTuple):
    """A GPU: its performance, and what its compiler asks of it."""

    kind: str
    """JAX's `device_kind`."""
    chip: Chip
    capability: tuple[int, int]
    """The compute capability."""
    cores: int
    """The number of streaming multiprocessors."""
    clock: float
    """The clock rate in GHz."""
    cache: int
    """The bytes of the level 2 cache."""


def _gpu(tflops: float, memory: float, bandwidth: float) -> Chip:
    return Chip(tflops, memory, bandwidth, is_gpu=True)


CARDS = {
    "a100": Card("NVIDIA A100-SXM4-80GB", _gpu(312, 85.1, 2039), (8, 0), 108, 1.41, 40 << 20),
    "a100-40": Card("NVIDIA A100-SXM4-40GB", _gpu(312, 42.4, 1555), (8, 0), 108, 1.41, 40 << 20),
    "h100": Card("NVIDIA H100 80GB HBM3", _gpu(989, 84.9, 3352), (9, 0), 132, 1.98, 50 << 20),
    "h200": Card("NVIDIA H200", _gpu(989, 151.4, 4800), (9, 0), 132, 1.98, 50 << 20),
    "b200": Card("NVIDIA B200", _gpu(2250, 191.5, 7672), (10, 0), 148, 1.965, 132_644_864),
    "l4": Card("NVIDIA L4", _gpu(121, 24.1, 300), (8, 9), 58, 2.04, 48 << 20),
    "l40s": Card("NVIDIA L40S", _gpu(362, 47.8, 864), (8, 9), 142, 2.52, 96 << 20),
    "rtx4090": Card("NVIDIA GeForce RTX 4090", _gpu(165, 25.3, 1008), (8, 9), 128, 2.52, 72 << 20),
    "t4": Card("Tesla T4", _gpu(65, 16, 320), (7, 5), 40, 1.59, 4 << 20),
    "v100": Card("Tesla V100-SXM2-16GB", _gpu(125, 16.9, 898), (7, 0), 80, 1.53, 6 << 20),
}
"""GPUs by the names in topologies.

Source: NVIDIA's data sheets and architecture whitepapers, and for A100, H100, H200, B200 and V100
the files in xla/backends/gpu/target_config/specs of openxla/xla.
"""

CHIPS = {
    "TPU v3": Chip(61.5, 16, 450),
    "TPU v4": Chip(275, 32, 1228),
    "TPU v5 lite": Chip(197, 16, 819),
    "TPU v5e": Chip(197, 16, 819),
    "TPU v5": Chip(459, 95, 2765),
    "TPU v5p": Chip(459, 95, 2765),
    "TPU v6 lite": Chip(918, 32, 1640),
    "TPU v6e": Chip(918, 32, 1640),
    # Of a chip JAX sees two devices, which are half of it each.
    "TPU7x": Chip(1153, 96, 3690),
    "NVIDIA A100-PCIE-40GB": _gpu(312, 42.4, 1555),
    "NVIDIA A100 80GB PCIe": _gpu(312, 79.1, 1935),
    "NVIDIA H100 PCIe": _gpu(756, 84.9, 2039),
    "NVIDIA H100 NVL": _gpu(835, 94, 3938),
    "NVIDIA L40": _gpu(181, 47.8, 864),
    **{card.kind: card.chip for card in CARDS.values()},
}
"""Devices by JAX's `device_kind`.

Source for TPUs: cloud.google.com/tpu/docs, the page of each version. For GPUs, besides those of
`CARDS`: NVIDIA's data sheets of A100, H100 (PCIe, NVL) and L40, without sparsity, and for the
memory of the PCIe cards of A100 and H100 xla/backends/gpu/target_config/specs of openxla/xla.
"""


def chip_of(device: jax.Device) -> Chip | None:
    """Returns the figures of a device, or None where they are not known.

    Kinds with more in their name are others: "NVIDIA GeForce RTX 4090 Laptop GPU" is another card,
    and "NVIDIA A100-SXM4-40GB MIG 1g.5gb" a part of one.
    """
    return CHIPS.get(device.device_kind)


CHANNELS_LAST = (8, 0)
"""The compute capability from which XLA convolves images b h w c in every dtype."""


def capability_of(device: jax.Device) -> tuple[int, int] | None:
    """Returns the compute capability of an NVIDIA GPU; None for other devices."""
    found = re.fullmatch(r"(\d+)\.(\d+)", str(getattr(device, "compute_capability", "")))
    return (int(found[1]), int(found[2])) if found else None


_CORES = {
    (7, 0): (2048, 98_304, 64),
    (7, 5): (1024, 65_536, 64),
    (8, 0): (2048, 167_936, 64),
    (8, 9): (1536, 102_400, 128),
    (9, 0): (2048, 233_472, 128),
    (10, 0): (2048, 233_472, 128),
}
"""Threads, bytes of shared memory and float32 units of a multiprocessor by compute capability.
Source: CUDA C++ programming guide, "Technical specifications per compute capability"."""
_RESERVED = 1024
"""The bytes of a multiprocessor's shared memory that a block cannot have, from compute capability
8.0 (the same guide)."""


def target_config(card: Card) -> str:
    """Returns what XLA's GPU compiler asks to know of a card: a GpuTargetConfigProto, as text."""
    major, minor = card.capability
    threads, shared, units = _CORES[card.capability]
    info = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "shared_memory_per_block": 49_152,
        "shared_memory_per_block_optin": shared - (_RESERVED if card.capability >= (8, 0) else 0),
        "shared_memory_per_core": shared,
        "threads_per_core_limit": threads,
        "core_count": card.cores,
        "fpus_per_core": units,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 65_535,
        "block_dim_limit_z": 65_535,
        "memory_bandwidth": round(card.chip.bandwidth * 1e9),
        "l2_cache_size": card.cache,
        "clock_rate_ghz": card.clock,
        "device_memory_size": round(card.chip.memory * 1e9),
        "registers_per_core_limit": 65_536,
        "registers_per_block_limit": 65_536,
    }
    listed = " ".join(f"{name}: {value}" for name, value in info.items())
    return (
        f"gpu_device_info {{ {listed} "
        f"cuda_compute_capability {{ major: {major} minor: {minor} }} }} "
        f'platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }} '
        f'device_description_str: "{card.kind}"'
    )
