"""Peak host memory while a full-size UNet (860 M parameters, 3.4 GB) is loaded.

The resident memory gained, over the size of the loaded parameters, sampled every 2 ms; in a fresh
process for each dtype.
    python benchmarks/loading_cpu.py
"""

import argparse
import subprocess
import sys
import tempfile
import threading
import time

import jax
import jax.numpy as jnp
from full_size import SD1
from machine import describe

from diffusax.checkpoints import save_network
from diffusax.models import UNet2DConditionConfig, UNet2DConditionModel
from diffusax.networks import initialize, load_network


def resident() -> int:
    """Bytes of this process in memory."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS")) * 1024


def measure(folder: str, dtype: str) -> None:
    """Loads the network and prints a line."""
    jax.block_until_ready(jnp.ones(3) + 1)
    before = resident()
    peak, done = before, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.002):
            peak = max(peak, resident())

    thread = threading.Thread(target=watch)
    thread.start()
    start = time.perf_counter()
    params = jax.block_until_ready(load_network(folder, dtype=dtype).params)
    seconds = time.perf_counter() - start
    done.set()
    thread.join()
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    print(
        f"float32 file loaded as {dtype}: {size / 1e9:.2f} GB of parameters in {seconds:.1f} s, "
        f"peak {(peak - before) / 1e9:.2f} GB, {(peak - before) / size:.3f} of them"
    )


def main() -> None:
    """Writes a checkpoint and measures it in processes of their own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measure", nargs=2, metavar=("FOLDER", "DTYPE"))
    args = parser.parse_args()
    if args.measure:
        measure(*args.measure)
        return
    print(describe())
    with tempfile.TemporaryDirectory() as folder:
        save_network(initialize(UNet2DConditionModel, UNet2DConditionConfig(**SD1)), folder)
        for dtype in ("float32", "bfloat16"):
            subprocess.run([sys.executable, __file__, "--measure", folder, dtype], check=True)


if __name__ == "__main__":
    main()
