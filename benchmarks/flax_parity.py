"""The pictures of diffusax's Flax classes beside those of diffusers 0.35.2's own.

    python benchmarks/flax_parity.py [--folder FOLDER] [--python PYTHON]

The same programs (flax_programs.py) run here and in an environment with diffusers 0.35.2 and a JAX
of its time, which is made in FOLDER unless PYTHON is one. Both have two devices. Prints for each
program the largest difference of a pixel in [0, 1] (or of a latent, or of a sample), first to the
old classes as they are, then with PyTorch's GELU and epsilon in their transformers.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
os.environ["JAX_PLATFORMS"] = "cpu"

import numpy as np

HERE = Path(__file__).parent
PACKAGES = ("diffusers==0.35.2", "transformers==4.48.3", "jax==0.5.3", "flax==0.10.4", "numpy<2.3")


def environment(folder: Path) -> str:
    """The Python of an environment with the old packages, without PyTorch."""
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", *PACKAGES], check=True)
    return str(python)


def main() -> None:
    """See the top of the file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir(), "flax-parity"))
    parser.add_argument("--python")
    options = parser.parse_args()
    folder = options.folder.absolute()
    vocabulary = folder / "vocabulary"
    python = options.python or environment(folder / "environment")

    sys.path.insert(0, str(HERE.parent / "tests"))
    from flax_programs import draw
    from support.clip_vocabulary import write_clip_vocabulary

    from diffusax.interop import flax

    write_clip_vocabulary(vocabulary)
    old = {}
    for name in ("pictures", "exact"):
        path = folder / f"{name}.npz"
        if not path.exists():
            command = [python, HERE / "flax_old.py", folder, vocabulary, name]
            subprocess.run(list(map(str, command)), check=True)
        old[name] = np.load(path)
    ours = draw(flax, folder)
    print(f"{'program':45} {'shape':20} {'deviation':>9} {'as it was':>10} {'exact':>10}")
    for name, drawn in ours.items():
        drawn = np.asarray(drawn)
        differences = [np.abs(drawn - old[kind][name]).max() for kind in old]
        figures = " ".join(f"{d:10.1e}" for d in differences)
        print(f"{name:45} {drawn.shape!s:20} {old['pictures'][name].std():9.3f} {figures}")


if __name__ == "__main__":
    main()
