"""Puts networks from different folders together into one checkpoint, in the dtype asked for.

python examples/emoji/assemble.py --base out/emoji/untrained --vae out/emoji/vae/model \
        --output out/emoji/start
"""

import argparse
import shutil
from pathlib import Path

import diffusax


def main() -> None:
    """Writes the checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", type=Path, required=True, help="the pipeline to start from")
    parser.add_argument("--vae", type=Path, help="an autoencoder to use instead of its own")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument(
        "--defaults",
        nargs="*",
        default=[],
        metavar="NAME=NUMBER",
        help="arguments of a call that suit the model, such as guidance_scale=2",
    )
    parser.add_argument("--card", type=Path, help="a README.md for the result")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    parts = {"vae": diffusax.load_network(args.vae, dtype=args.dtype)} if args.vae else {}
    pipe = diffusax.DiffusionPipeline.from_pretrained(args.base, dtype=args.dtype, **parts)
    for name, _, number in (text.partition("=") for text in args.defaults):
        pipe.call_defaults[name] = float(number)
    pipe.save_pretrained(args.output)
    if args.card:
        shutil.copyfile(args.card, args.output / "README.md")
    size = sum(file.stat().st_size for file in args.output.rglob("*") if file.is_file())
    print(f"{args.output}: {size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
