"""Caches of steps: what a denoising network keeps of a step to compute less in others."""

from diffusax.models.caches.deep import DeepCache
from diffusax.models.caches.first_block import FirstBlockCache
from diffusax.models.caches.step_cache import Evaluation, Memory, StepCache, zero_memory
from diffusax.models.caches.taylor_seer import TaylorSeerCache

__all__ = [
    "DeepCache",
    "Evaluation",
    "FirstBlockCache",
    "Memory",
    "StepCache",
    "TaylorSeerCache",
    "zero_memory",
]
