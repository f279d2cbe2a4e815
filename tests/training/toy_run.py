"""A run of the training loop on a small linear model, as a process of its own.

python toy_run.py OUTPUT name=value ...
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from diffusax.runtime.mesh import start_processes
from diffusax.training import Recipe, TrainConfig, read_config, train

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


def prepare(row, rng):
    return {"x": row["x"] + rng.standard_normal(INPUTS).astype(np.float32) * 0.1}


def loss(params, frozen, batch, keys):
    noise = jax.vmap(lambda key: jax.random.normal(key, (OUTPUTS,)))(keys)
    y = jnp.tanh(batch["x"] @ params["w"]["kernel"]) + 0.1 * noise
    return ((y - frozen["target"]) ** 2).mean(-1)


def save(params, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / "kernel.npy", np.asarray(params["w"]["kernel"]))


def recipe() -> Recipe:
    rng = np.random.default_rng(0)
    return Recipe(
        name="toy",
        params={"w": {"kernel": rng.standard_normal((INPUTS, OUTPUTS), np.float32) * 0.1}},
        frozen={"target": jnp.ones(OUTPUTS)},
        loss=loss,
        source=Rows(),
        prepare=prepare,
        save=save,
    )


def main(output: str, *pairs: str) -> None:
    options = ["steps=24", "batch_size=8", "checkpoint_every=4", "log_every=1", "report_to=[]"]
    config = read_config(TrainConfig, None, [*options, f"output={output}", *pairs])
    if config.distributed:
        start_processes()
    train(recipe(), config)


if __name__ == "__main__":
    main(*sys.argv[1:])
