"""Which timesteps of discrete noise levels are drawn more often."""

import numpy as np

from diffusax.training.config import TimestepBiasConfig


def timestep_probabilities(config: TimestepBiasConfig, count: int) -> np.ndarray | None:
    """Returns the probability of each of `count` timesteps, float64; None where all are equal.

    Raises:
        ValueError: the range ends beyond the last timestep.
    """
    if config.strategy == "range" and config.end > count:
        raise ValueError(
            f"timestep_bias.end={config.end} is beyond the last of the {count} timesteps; it may "
            f"be {count} at most"
        )
    biased = round(config.portion * count)
    ranges = {
        "earlier": slice(biased),
        "later": slice(count - biased, None),
        "range": slice(config.begin, config.end),
    }
    if config.strategy == "none":
        return None
    weights = np.ones(count)
    weights[ranges[config.strategy]] *= config.multiplier
    return weights / weights.sum()
