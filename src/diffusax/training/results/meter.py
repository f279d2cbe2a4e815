"""Measures losses and speed of a run, from one line of its log to the next."""

import logging
import time

import jax
import numpy as np

from diffusax.training.config import TrainConfig
from diffusax.training.results.reports import peak_flops

log = logging.getLogger(__name__)


class Meter:
    """Losses and speed since the last reading."""

    def __init__(self, config: TrainConfig, step: int):
        """Starts to measure. step: the step that the run begins after."""
        self.config = config
        self.peak = peak_flops(config)
        self.skipped = 0
        self.restart(step)

    def restart(self, step: int) -> None:
        """Starts to measure anew after a step."""
        self.metrics: list[dict[str, jax.Array]] = []
        self.flops = 0
        self.step, self.time = step, time.perf_counter()

    def pause(self, seconds: float) -> None:
        """Leaves out time in which no step was done."""
        self.time += seconds

    def add(self, metrics: dict[str, jax.Array], flops: int) -> None:
        """Adds the metrics of one more step, which need not be computed yet, and its operations."""
        self.metrics.append(metrics)
        self.flops += flops

    def read(self, step: int) -> dict[str, float]:
        """Returns means over the steps since the last reading; waits until they are computed."""
        metrics = jax.device_get(self.metrics)
        losses = [float(m["loss"]) for m in metrics if np.isfinite(m["loss"])]
        skipped = int(metrics[-1]["skipped"])
        if skipped > self.skipped:
            log.warning(
                "%d steps were skipped so far, whose loss, gradients or update were not finite",
                skipped,
            )
        self.skipped = skipped
        values: dict[str, float] = {"skipped": skipped}
        if losses:
            values["loss"] = sum(losses) / len(losses)
            values["grad_norm"] = float(metrics[-1]["grad_norm"])
        steps = step - self.step
        seconds = time.perf_counter() - self.time
        values["images_per_s"] = steps * self.config.batch_size / seconds
        if self.flops:
            rate = self.flops / seconds
            values["tflops"] = rate / 1e12
            if self.peak:
                values["mfu"] = rate / self.peak
        self.restart(step)
        return values
