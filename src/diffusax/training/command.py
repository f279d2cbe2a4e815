"""`diffusax train` and `diffusax cache-latents`."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from diffusax.arguments import parse_arguments
from diffusax.runtime.mesh import start_processes
from diffusax.training import (
    AutoencoderConfig,
    CacheConfig,
    Preempted,
    TextToImageConfig,
    autoencoder,
    cache_latents,
    read_config,
    text_to_image,
    train,
)

RECIPES: dict[str, tuple[type, Callable[[Any], Any]]] = {
    "text-to-image": (TextToImageConfig, text_to_image),
    "autoencoder": (AutoencoderConfig, autoencoder),
}


def train_command(args: Sequence[str]) -> None:
    """`train RECIPE --config FILE --set NAME=VALUE --any-option ...`, the last one given wins.

    Raises:
        ValueError: an unknown recipe, or an option that cannot be.
    """
    if not args or args[0] not in RECIPES:
        if args and args[0] in ("-h", "--help"):
            print(f"usage: diffusax train {{{','.join(RECIPES)}}} --help")
            return
        given = f"got {args[0]!r}" if args else "none was given"
        raise ValueError(f"train takes a recipe: {', '.join(RECIPES)} ({given})")
    config_class, recipe = RECIPES[args[0]]
    config = parse_config(config_class, args[1:], prog=f"diffusax train {args[0]}")
    for name in ("model", "data"):
        if not getattr(config, name):
            raise ValueError(f"--{name} must be given, or {name} in the --config file")
    if config.distributed:
        start_processes()
    try:
        train(recipe(config), config)
    except Preempted as stopped:
        print(f"diffusax: {stopped}; start the same command again to go on", file=sys.stderr)
        # 128 + SIGTERM, as of a process that the signal ended.
        sys.exit(143)
    print(f"wrote {config.output}")


def cache_command(args: Sequence[str]) -> None:
    """`cache-latents --model DIR --data DIR --output DIR`."""
    config = parse_config(CacheConfig, args, prog="diffusax cache-latents")
    print(f"wrote {cache_latents(config)} rows to {config.output}")


def parse_config(config_class: type, args: Sequence[str], *, prog: str) -> Any:
    """Options from --config and --set, then from the command line."""
    if {"-h", "--help"} & set(args):
        print("--config FILE     options from a YAML file")
        print("--set NAME=VALUE  one option, as in the file; as often as needed")
        print("Options of their own, below, win over both.")
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    first.add_argument("--config", type=Path)
    first.add_argument("--set", action="append", default=[])
    known, rest = first.parse_known_args(list(args))
    default: Any = read_config(config_class, known.config, known.set)
    return parse_arguments(config_class, rest, prog=prog, default=default)
