"""A run of the training loop on a small linear model, as a process of its own.

python toy_run.py OUTPUT name=value ...
"""

import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from diffusax.runtime.devices.processes import initialize
from diffusax.training import TrainConfig, read_config, train
from diffusax.training.data.buckets import SIZE, BucketedSource, Buckets

ROWS, INPUTS, OUTPUTS = 96, 64, 4096


class Rows:
    """Deterministic rows; row 7 is broken if asked for."""

    def __init__(self, rows: int = ROWS):
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(index)
        return {"x": rng.standard_normal(INPUTS, np.float32)}

    def name(self, index: int) -> str:
        return f"row {index}"


class Toy:
    """A linear model's recipe."""

    name = "toy"

    def __init__(self, source=None, *, slow: bool = False, slow_compile: bool = False):
        """slow: takes its time to save. slow_compile: takes the compiler minutes."""
        self.source, self.slow, self.slow_compile = source or Rows(), slow, slow_compile

    def shapes(self):
        return {"w": {"kernel": jax.ShapeDtypeStruct((INPUTS, OUTPUTS), np.float32)}}

    def trained(self, mesh=None):
        rng = np.random.default_rng(0)
        return {"w": {"kernel": rng.standard_normal((INPUTS, OUTPUTS), np.float32) * 0.1}}

    def frozen(self, mesh=None):
        return {"target": jnp.ones(OUTPUTS)}

    def frozen_shapes(self):
        return {"target": jax.ShapeDtypeStruct((OUTPUTS,), np.float32)}

    def example(self, row, rng):
        return {"x": row["x"] + rng.standard_normal(INPUTS).astype(np.float32) * 0.1}

    def loss(self, trained, frozen, batch, keys):
        noise = jax.vmap(lambda key: jax.random.normal(key, (OUTPUTS,)))(keys)
        y = jnp.tanh(batch["x"] @ trained["w"]["kernel"]) + 0.1 * noise
        if self.slow_compile:
            # XLA computes sums over constants itself, one by one.
            constants = np.random.default_rng(0).random((512, 512), np.float32)
            zero, window = np.float32(0), (32, 32)
            sums = jax.lax.reduce_window(constants, zero, jax.lax.add, window, (1, 1), "VALID")
            y += sums[0, 0]
        return ((y - frozen["target"]) ** 2).mean(-1)

    def validate(self, trained, frozen):
        raise AssertionError("there is nothing to see")

    def save(self, trained, folder: Path) -> None:
        if self.slow:
            (folder.parent / "saving").touch()
            time.sleep(3)
        folder.mkdir(parents=True, exist_ok=True)
        np.save(folder / "kernel.npy", np.asarray(trained["w"]["kernel"]))

    def card(self):
        return {}


class BucketedToy(Toy):
    """The same model on rows of several sizes, which are means of different numbers of inputs."""

    def __init__(self, sizes: tuple[tuple[int, int], ...] = ((1, 2), (2, 2), (3, 1))):
        """sizes: heights and widths; the first has half of the rows."""
        rows = Rows()
        of_row = np.arange(len(rows)) % (2 * len(sizes))
        of_row = np.where(of_row < len(sizes), of_row, 0).astype(np.int16)
        super().__init__(BucketedSource(rows, Buckets(sizes, of_row)))

    def example(self, row, rng):
        noise = rng.standard_normal((*row[SIZE], INPUTS)).astype(np.float32)
        return {"x": row["x"] + noise * 0.1}

    def loss(self, trained, frozen, batch, keys):
        return super().loss(trained, frozen, {"x": batch["x"].mean((1, 2))}, keys)


class HangingRows(Rows):
    """Rows that come to an end without one."""

    def __init__(self, last: int):
        super().__init__()
        self.left = last

    def __getitem__(self, index: int):
        self.left -= 1
        if self.left < 0:
            time.sleep(1000)
        return super().__getitem__(index)


def main(output: str, *pairs: str) -> None:
    options = ["steps=24", "batch_size=8", "checkpoint_every=4", "log_every=1", "report_to=[]"]
    # The test's own: "hang_at=3" (no more data from that step on), "slow_save=true",
    # "slow_compile=true" and "bucketed=true".
    names = ("hang_at", "slow_", "bucketed")
    own = dict(pair.split("=") for pair in pairs if pair.startswith(names))
    pairs = [pair for pair in pairs if pair.split("=")[0] not in own]
    if "hang_at" in own:
        # Several threads would not read the rows in their order, and hang in an earlier batch.
        options.append("data.threads=1")
    config = read_config(TrainConfig, None, [*options, f"output={output}", *pairs])
    if config.distributed:
        initialize()
    if "bucketed" in own:
        train(BucketedToy(), config)
        return
    # One row more is read, for the shapes of a batch.
    rows = int(own.get("hang_at", 0)) * config.batch_size + 1
    source = HangingRows(rows) if "hang_at" in own else None
    train(Toy(source, slow="slow_save" in own, slow_compile="slow_compile" in own), config)


if __name__ == "__main__":
    main(*sys.argv[1:])
