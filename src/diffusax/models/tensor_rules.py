"""The rules by which a mesh's tensor axis splits the parameters of one network."""

import functools
from typing import Any

from flax import nnx

from diffusax.models.rngs import ShapeRngs
from diffusax.runtime.mesh import Rule, Rules, counted_rules


@functools.lru_cache(64)
def counted_tensor_rules(module_class: Any, config: Any) -> Rules:
    """Returns the rules of a class of networks with the heads that its layers have by a config.

    Heads that the devices do not divide are not cut: their projections stay whole on each device,
    because a head's channels would have to be gathered again before they can be used.
    """
    rules: Rules = getattr(module_class, "tensor_rules", ())
    pieces = {rule.pieces for rule in rules if isinstance(rule, Rule)}
    names = sorted(name for name in pieces if isinstance(name, str))
    if not names:
        return rules
    counts: dict[str, dict[str, int]] = {name: {} for name in names}
    for path, layer in nnx.iter_modules(module_class(config, rngs=ShapeRngs())):
        for name in names:
            if hasattr(layer, name):
                counts[name][".".join(map(str, path))] = getattr(layer, name)
    return counted_rules(rules, counts)
