"""The options of caches of steps, under diffusers' names."""

import dataclasses
import re
from typing import Annotated, Any

import numpy as np
from msgspec import Meta

from diffusax.boundary.options import Count, Options
from diffusax.models.caches.deep import DeepCache
from diffusax.models.caches.first_block import FirstBlockCache
from diffusax.models.caches.taylor_seer import TaylorSeerCache
from diffusax.models.network import Network, parse_dtype

_NEVER = 2**30
"""More evaluations than a run has."""
_ATTENTION = tuple(
    rf"{prefix}blocks.*attn"
    for prefix in ("", "transformer_", "single_transformer_", "temporal_transformer_")
)
_BLOCKS = (r"[^.]*block[^.]*\.[^.]+",)
_LAST_LAYER = ("proj_out",)
"""The layers of diffusers' templates, hooks/taylorseer_cache.py."""


@dataclasses.dataclass(frozen=True)
class FirstBlockCacheConfig(Options):
    """First Block Cache for transformers (ParaAttention; diffusers hooks/first_block_cache.py).

    Every step computes the first block. Where what it adds to the tokens has changed little since
    the blocks were last computed, those after it are left out, and what they added then is added
    again.

    Attributes:
        threshold: the mean absolute change, relative to the mean absolute value, above which all
            blocks are computed. Higher is faster and less exact.
    """

    threshold: Annotated[float, Meta(ge=0, le=1e6)] = 0.05

    def method(self) -> FirstBlockCache:
        """Returns the method with its number as data."""
        return FirstBlockCache(np.float32(self.threshold))


@dataclasses.dataclass(frozen=True)
class TaylorSeerCacheConfig(Options):
    """TaylorSeer for transformers (Liu et al. 2025; diffusers hooks/taylorseer_cache.py).

    Most steps foretell the outputs of layers by Taylor series, whose derivatives are differences
    between the steps that were computed.

    Attributes:
        cache_interval: one in so many steps is computed.
        disable_cache_before_step: the first so many steps are computed.
        disable_cache_after_step: from this step on all are computed; None for none.
        max_order: the highest derivative. Each takes memory of the size of the layers' outputs.
        taylor_factors_dtype: the dtype in which derivatives are kept, by name or as one of JAX's or
            PyTorch's; None for that of the outputs.
        skip_predict_identifiers: regular expressions for the whole names of layers in whose place
            zeros stand where nothing is computed.
        cache_identifiers: the same for layers whose outputs are foretold; None for the attentions
            of all blocks.
        use_lite_mode: whether the last layer alone is foretold, and no block computed. It overrides
            both lists.
    """

    cache_interval: Count = 5
    disable_cache_before_step: Annotated[int, Meta(ge=0, le=_NEVER)] = 3
    disable_cache_after_step: Annotated[int, Meta(ge=0, le=_NEVER)] | None = None
    max_order: Annotated[int, Meta(ge=0, le=8)] = 1
    taylor_factors_dtype: Any = "bfloat16"
    skip_predict_identifiers: tuple[str, ...] | None = None
    cache_identifiers: tuple[str, ...] | None = None
    use_lite_mode: bool = False

    def __post_init__(self) -> None:
        """Holds the options against their types.

        Raises:
            ValueError: one has another type, or is no regular expression or dtype.
        """
        super().__post_init__()
        dtype = self.taylor_factors_dtype
        object.__setattr__(self, "taylor_factors_dtype", None if dtype is None else _name(dtype))
        for name in ("skip_predict_identifiers", "cache_identifiers"):
            for pattern in getattr(self, name) or ():
                try:
                    re.compile(pattern)
                except re.error as error:
                    raise ValueError(
                        f"{name} must be regular expressions (got {pattern!r}: {error})"
                    ) from None

    def method(self) -> TaylorSeerCache:
        """Returns the method with its numbers as data."""
        foretold, skipped = self.cache_identifiers or _ATTENTION, self.skip_predict_identifiers
        if self.use_lite_mode:
            foretold, skipped = _LAST_LAYER, _BLOCKS
        last = self.disable_cache_after_step
        return TaylorSeerCache(
            np.int32(self.cache_interval),
            np.int32(self.disable_cache_before_step),
            np.int32(_NEVER if last is None else last),
            self.max_order,
            self.taylor_factors_dtype,
            foretold,
            skipped or (),
        )


@dataclasses.dataclass(frozen=True)
class DeepCacheConfig(Options):
    """DeepCache for UNets (Ma et al. 2023; the package DeepCache, DeepCacheSDHelper).

    Attributes:
        cache_interval: all levels of the UNet are computed in one of so many steps.
        cache_branch_id: the skip connection below which the others compute nothing, counted from 0
            for that of the largest maps. Higher is slower and more exact.
    """

    cache_interval: Count = 3
    cache_branch_id: Annotated[int, Meta(ge=0, le=1000)] = 0

    def method(self) -> DeepCache:
        """Returns the method with its number as data."""
        return DeepCache(np.int32(self.cache_interval), self.cache_branch_id)


CONFIGS: dict[str, Any] = {
    kind.__name__: kind for kind in (FirstBlockCacheConfig, TaylorSeerCacheConfig, DeepCacheConfig)
}


def as_config(config: Any, network: Network) -> Any:
    """Returns the options of a cache for a network, which may be diffusers' own.

    Args:
        config: the options.
        network: the network that runs with it.

    Raises:
        ValueError: there is no such cache for the network; says which there are.
    """
    module = getattr(network, "module_class", None)
    known: tuple[str, ...] = getattr(module, "step_caches", ())
    name = type(config).__name__
    if not known:
        raise ValueError(f"a {network.class_name} has no cache of steps; leave enable_cache out")
    if name not in known:
        raise ValueError(
            f"config must be a {' or '.join(known)} for a {network.class_name} (got a {name})"
        )
    kind = CONFIGS[name]
    if not isinstance(config, kind):
        config = kind(**vars(config))
    config.method().check(network)
    return config


_SHORT: dict[str, tuple[Any, str]] = {
    "first-block": (FirstBlockCacheConfig, "threshold"),
    "taylorseer": (TaylorSeerCacheConfig, "cache_interval"),
    "deep": (DeepCacheConfig, "cache_interval"),
}
"""The caches by their names on command lines, and the options that are given there."""


def config_from_text(text: str) -> Any:
    """Returns the options of a cache that a text such as "first-block=0.1" names.

    Raises:
        ValueError: there is no such cache, or its number is none.
    """
    name, _, number = text.partition("=")
    try:
        kind, option = _SHORT[name]
        value = float(number)
    except (KeyError, ValueError):
        names = ", ".join(f"{key}=NUMBER" for key in _SHORT)
        raise ValueError(f"a cache of steps must be one of {names} (got {text!r})") from None
    return kind(**{option: int(value) if value.is_integer() else value})


def _name(dtype: Any) -> str:
    return parse_dtype(dtype).name
