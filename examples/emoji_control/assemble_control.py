"""Writes a trained ControlNet in half precision, with its card.

python examples/emoji_control/assemble_control.py --controlnet out/emoji_control/run/model_ema \
        --output src/diffusax/data/emoji_control
"""

import argparse
import shutil
from pathlib import Path

import diffusax


def main() -> None:
    """Writes the folder."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--controlnet", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    diffusax.save_network(diffusax.load_network(args.controlnet, dtype="float16"), args.output)
    shutil.copyfile(Path(__file__).with_name("CARD.md"), args.output / "README.md")
    size = sum(file.stat().st_size for file in args.output.iterdir())
    print(f"{args.output}: {size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
