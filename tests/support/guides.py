"""A rule of guidance by which tests see the steps of a running batch, and slow them."""

import time
from typing import Any

import jax
import numpy as np


class Watched:
    """Classifier-free guidance that notes every step, and may take its time."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        """For how many places of the batch each step was computed."""
        self.seconds = 0.0
        """How much longer a step takes."""

    def __call__(self, predictions: jax.Array, step: Any) -> jax.Array:
        prompted, negative = predictions
        nothing = jax.pure_callback(
            self._note,
            jax.ShapeDtypeStruct((), np.float32),
            prompted.ravel()[0],
            vmap_method="broadcast_all",
        )
        return negative + step.scale * (prompted - negative) + nothing

    def _note(self, numbers: jax.Array) -> np.ndarray:
        self.sizes.append(np.size(numbers))
        time.sleep(self.seconds)
        return np.zeros(np.shape(numbers), np.float32)
